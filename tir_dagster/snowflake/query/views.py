"""What a view in the warehouse is made of: its text, and the tables and views behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.scope import traverse_scope

from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal, quote
from tir_dagster.snowflake.query.repeatable import why_unrepeatable
from tir_dagster.snowflake.query.text import DIALECT, folded


@dataclass(frozen=True)
class ViewDefinition:
    """What decides which rows a view shows, as digests; None where the role may not see it, or it is not understood.

    `text` is the view's own, without comments, so that it is the same after CREATE OR REPLACE VIEW with the same query.
    `behind` are the texts of views behind it and when its tables were created, `ddl` when DDL last ran on them.
    As a text it is kept in the state of a source: text/behind/ddl, with ? for what is not known.
    """

    text: str | None = None
    behind: str | None = None
    ddl: str | None = None

    def __str__(self) -> str:
        return "/".join(part or "?" for part in (self.text, self.behind, self.ddl))


@dataclass(frozen=True)
class _Object:
    """A table or view as INFORMATION_SCHEMA shows it; `text` is a view's, if the role may see it."""

    is_view: bool
    created: datetime
    last_ddl: datetime | None
    text: str | None

    @property
    def later_ddl(self) -> str:
        """When DDL last ran on it; of a view, nothing if that was its creation: its text says the same."""
        is_created_last = self.is_view and self.last_ddl == self.created
        return "" if self.last_ddl is None or is_created_last else _utc(self.last_ddl)

    @property
    def identity(self) -> str:
        return text_digest(self.text or "") if self.is_view else _utc(self.created)


def view_definition(access: SnowflakeAccess, view: TableName) -> ViewDefinition:
    """Return what the role may know of a view: owners hide the text of secure views, and often the tables themselves."""
    own = _objects(access, [view]).get(view)
    if own is None or not own.text:
        return ViewDefinition()
    text = text_digest(own.text)
    behind: dict[TableName, _Object] = {}
    level = tables_behind(view, own.text)
    while level:
        known = _objects(access, level)
        behind |= known
        inner = [tables_behind(name, entry.text or "") for name, entry in known.items() if entry.is_view]
        if len(known) < len(level) or None in inner:
            return ViewDefinition(text)
        level = frozenset(name for names in inner for name in names or ()) - behind.keys()
    if level is None:
        return ViewDefinition(text)
    return ViewDefinition(
        text,
        _digest(sorted((str(name), entry.identity) for name, entry in behind.items())),
        _digest(sorted((str(name), entry.later_ddl) for name, entry in behind.items())),
    )


def _objects(access: SnowflakeAccess, names: Iterable[TableName]) -> dict[TableName, _Object]:
    """Return what INFORMATION_SCHEMA shows the role of these; one query for each database."""
    by_database: dict[str, list[TableName]] = {}
    for name in sorted(names):
        by_database.setdefault(name.database, []).append(name)
    objects = {}
    for database, tables in by_database.items():
        schema = f"{quote(database)}.INFORMATION_SCHEMA"
        wanted = " OR ".join(
            f"(t.TABLE_SCHEMA = {literal(table.schema)} AND t.TABLE_NAME = {literal(table.name)})" for table in tables
        )
        try:
            rows: Any = access.query(
                "SELECT t.TABLE_SCHEMA, t.TABLE_NAME, t.TABLE_TYPE, t.CREATED, t.LAST_DDL, v.VIEW_DEFINITION "
                f"FROM {schema}.TABLES AS t LEFT JOIN {schema}.VIEWS AS v "
                f"ON v.TABLE_SCHEMA = t.TABLE_SCHEMA AND v.TABLE_NAME = t.TABLE_NAME WHERE {wanted}"
            )
        except SnowflakeError as failure:
            # A view may show tables of a database that the role may not use.
            if failure.errno not in MISSING_OBJECT:
                raise
            continue
        for schema_name, table_name, kind, created, last_ddl, text in rows:
            name = TableName(database, str(schema_name), str(table_name))
            objects[name] = _Object(kind == "VIEW", created, last_ddl, text)
    return objects


def text_digest(text: str) -> str:
    """Return a digest of a view's text from its name on: no comments, which dbt writes anew, and no way of creating it."""
    try:
        words = [text[token.start : token.end + 1] for token in DIALECT.tokenize(text)]
    except SqlglotError:
        words = text.split()
    start = next((at for at, word in enumerate(words) if word.upper() == "VIEW"), -1) + 1
    return _digest(words[start:])


def tables_behind(view: TableName, text: str) -> frozenset[TableName] | None:
    """Return the tables and views that a view's text names; None if it cannot be read, or depends on something else.

    Names without a schema are seen from the view's own one. A function of somebody's own may read any table.
    """
    try:
        created = sqlglot.parse_one(text, dialect=DIALECT)
        query = created.expression if isinstance(created, exp.Create) else None
        query = query.unnest() if isinstance(query, exp.Subquery) else query
        if not isinstance(query, exp.Query) or why_unrepeatable(query) is not None:
            return None
        tables = [
            source
            for scope in traverse_scope(query)
            for source in scope.sources.values()
            if isinstance(source, exp.Table)
        ]
    except (SqlglotError, RecursionError):
        return None
    if any(not isinstance(table.this, exp.Identifier) for table in tables):
        return None
    return frozenset(_full_name(table, view) for table in tables)


def _full_name(table: exp.Table, view: TableName) -> TableName:
    database, schema = table.args.get("catalog"), table.args.get("db")
    # DB..TABLE is in the schema PUBLIC.
    seen_from = view.schema if database is None else "PUBLIC"
    return TableName(
        folded(database) if database else view.database,
        folded(schema) if schema and schema.name else seen_from,
        folded(table.this),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
