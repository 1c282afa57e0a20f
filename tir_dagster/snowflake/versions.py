"""The source at a moment: change tokens, pinned versions, columns, identity. No Spark here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from snowflake.connector.constants import FIELD_ID_TO_NAME

from tir_dagster.errors import SourceError, SpecError
from tir_dagster.measuring import waiting_for
from tir_dagster.snowflake.columns import Column, UnheldTypeError
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal, quote


@dataclass(frozen=True, order=True)
class SourceVersion:
    """A moment on the warehouse's clock at which every table is read: in UTC, to the microsecond.

    A version that is not `kept` by Time Travel is read as it is now: whoever reads it compares change tokens.
    """

    moment: datetime
    kept: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if self.moment.tzinfo is None:
            raise SourceError(f"The version {self.moment} has no time zone. Write it with one: {self.moment}+00:00.")
        object.__setattr__(self, "moment", self.moment.astimezone(UTC))

    @staticmethod
    def parse(text: str) -> SourceVersion:
        """The version back from its text form."""
        try:
            return SourceVersion(datetime.fromisoformat(text))
        except ValueError:
            raise SourceError(
                f"{text!r} is not a version. Write a moment as ISO 8601 with its zone: 2026-01-31T23:59:59+00:00."
            ) from None

    @property
    def sql(self) -> str:
        """The clause that pins a table: AT(TIMESTAMP => …), for a place right after the table's name; empty if not kept."""
        if not self.kept:
            return ""
        return f"AT(TIMESTAMP => {literal(str(self))}::TIMESTAMP_TZ)"

    def __str__(self) -> str:
        return self.moment.isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Probe:
    """A table's change token, to compare with an earlier one and nothing else; or why there is none.

    `seen` is the warehouse's clock when the token was read; it does not count when probes are compared.
    """

    token: str | None
    problem: str | None = None
    seen: SourceVersion | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TableFacts:
    """What INFORMATION_SCHEMA knows about a table or view now; a view has no rows and no retention of its own."""

    created: datetime
    # When DDL of any kind last ran on it; it moves with a comment as with a renamed column, and never with rows.
    last_ddl: datetime | None
    rows: int | None
    retention_days: int | None
    is_view: bool = False

    @property
    def identity(self) -> str:
        """A text that changes when the table is recreated or swapped; not when its rows or columns do."""
        return _utc(self.created)

    @property
    def ddl(self) -> str:
        """A text that changes with every DDL statement on the table; not with its rows."""
        return _utc(self.last_ddl) if self.last_ddl else ""


def probe(access: SnowflakeAccess, tables: Sequence[TableName]) -> dict[TableName, Probe]:
    """Return the change tokens of all tables by one query; a missing table gets a problem, the others their tokens."""
    if not tables:
        return {}
    try:
        return _probe_together(access, tables)
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        if len(tables) == 1:
            return {tables[0]: Probe(None, str(failure))}
    return {table: token_probe for requested in tables for table, token_probe in probe(access, [requested]).items()}


def _probe_together(access: SnowflakeAccess, tables: Sequence[TableName]) -> dict[TableName, Probe]:
    tokens = ", ".join(
        f"SYSTEM$LAST_CHANGE_COMMIT_TIME({literal(table.sql)}) AS {quote(f'T{at}')}" for at, table in enumerate(tables)
    )
    *change_tokens, now = access.query(f"SELECT {tokens}, CURRENT_TIMESTAMP()::TIMESTAMP_TZ AS NOW")[0]
    return {
        table: Probe(str(token), seen=SourceVersion(now)) for table, token in zip(tables, change_tokens, strict=True)
    }


def pin(access: SnowflakeAccess, *, margin_seconds: float) -> SourceVersion:
    """Return the warehouse's current time minus a margin for transactions that are still running."""
    now: Any = access.query("SELECT CURRENT_TIMESTAMP()::TIMESTAMP_TZ AS NOW")[0][0]
    return SourceVersion(now - timedelta(seconds=margin_seconds))


def describe(access: SnowflakeAccess, table: TableName, names: Sequence[str] | None = None) -> tuple[Column, ...]:
    """The table's columns; with names, only those, in that order. A name matches exactly, or else in upper case."""
    declared = _declared(access, table)
    return tuple(
        Column.from_snowflake(name, declared[name][0], nullable=declared[name][1], comment=declared[name][2])
        for name in _chosen(table, list(declared), names)
    )


def describe_held(access: SnowflakeAccess, table: TableName) -> tuple[Column, ...]:
    """The table's columns without those of a type that no extract can hold."""
    columns = []
    for name, (declared, nullable, comment) in _declared(access, table).items():
        with suppress(UnheldTypeError):
            columns.append(Column.from_snowflake(name, declared, nullable=nullable, comment=comment))
    return tuple(columns)


def describe_query(access: SnowflakeAccess, sql: str) -> tuple[Column, ...]:
    """The columns of a query's result, without running it."""
    with access.connect() as connection, waiting_for("warehouse"), connection.cursor() as cursor:
        result_columns = cursor.describe(sql)
    return tuple(
        Column.from_snowflake(
            result_column.name, _declared_type(result_column), nullable=bool(result_column.is_nullable)
        )
        for result_column in result_columns
    )


def _declared_type(result_column: Any) -> str:
    """The type as DESCRIBE TABLE would write it."""
    name = FIELD_ID_TO_NAME[result_column.type_code]
    return f"NUMBER({result_column.precision},{result_column.scale})" if name == "FIXED" else str(name)


def column_comments(access: SnowflakeAccess, table: TableName) -> dict[str, str]:
    """What people wrote about the table's columns, by name."""
    return {name: comment for name, (_, _, comment) in _declared(access, table).items() if comment}


def column_names(
    access: SnowflakeAccess,
    table: TableName,
    *,
    next_step: str = "Check `source` in the extract's spec, and the grants.",
) -> list[str]:
    """All columns of the table, also those of a type that no extract can hold; `next_step` ends the error if there is none."""
    try:
        return list(_declared(access, table))
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        raise missing_table(access, table, next_step) from None


class MissingTableError(SnowflakeError, SpecError):
    """A table that a spec or a command names, and that the role does not see: a mistake in the name, until proven otherwise."""


_MOST_NAMES = 10_000


def missing_table(access: SnowflakeAccess, table: TableName, next_step: str) -> MissingTableError:
    """Return the error for a table that the role does not see, with the names of similar ones."""
    return MissingTableError(
        f"{table} does not exist in Snowflake account {access.account}, or the role may not see it."
        f"{similar_tables(access, table)} {next_step}",
        errno=min(MISSING_OBJECT),
    )


def similar_tables(access: SnowflakeAccess, table: TableName) -> str:
    """Return ` Did you mean …?` with up to three tables of the same database, or with databases; or an empty text."""
    try:
        rows = access.query(
            f"SELECT TABLE_SCHEMA, TABLE_NAME FROM {quote(table.database)}.INFORMATION_SCHEMA.TABLES "
            f"WHERE TABLE_SCHEMA <> 'INFORMATION_SCHEMA' ORDER BY TABLE_SCHEMA <> {literal(table.schema)} LIMIT {_MOST_NAMES}"
        )
        known = {f"{schema}.{name}": str(TableName(table.database, schema, name)) for schema, name in rows}
        wanted = f"{table.schema}.{table.name}"
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            return ""
        known, wanted = (
            {str(row[1]): f"the database {row[1]}" for row in access.query("SHOW DATABASES")},
            table.database,
        )
    same = [name for name in known if name.endswith(f".{table.name}")]
    close = [*same, *(name for name in difflib.get_close_matches(wanted, known, n=3, cutoff=0.7) if name not in same)][
        :3
    ]
    return f" Did you mean {' or '.join(known[name] for name in close)}?" if close else ""


# By column: its type, whether it may be NULL, and its comment.
DeclaredTypes = dict[str, tuple[str, bool, str]]
_COMMENT_AT = 9
_described: ContextVar[dict[tuple[int, TableName], DeclaredTypes] | None] = ContextVar("described", default=None)


@contextmanager
def described_once() -> Iterator[None]:
    """Describe each table only once inside the block: every DESCRIBE is a round trip."""
    token = _described.set({})
    try:
        yield
    finally:
        _described.reset(token)


def _declared(access: SnowflakeAccess, table: TableName) -> DeclaredTypes:
    described = _described.get()
    declared = None if described is None else described.get((id(access), table))
    if declared is None:
        rows = access.query(f"DESCRIBE TABLE {table.sql}")
        columns = [row for row in rows if str(row[2]).upper() == "COLUMN"]
        declared = {
            str(row[0]): (str(row[1]), str(row[3]).upper() == "Y", str((row[_COMMENT_AT:] or ("",))[0] or ""))
            for row in columns
        }
    if described is not None:
        described[id(access), table] = declared
    return declared


def _chosen(table: TableName, table_columns: list[str], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return table_columns
    chosen = [name if name in table_columns else name.upper() for name in names]
    missing = [name for name, choice in zip(names, chosen, strict=True) if choice not in table_columns]
    if missing:
        raise SourceError(
            f"{table} has no column {', '.join(missing)}. It has {', '.join(table_columns)}: "
            "correct `columns:` in the extract's spec."
        )
    if twice := sorted({name for name in chosen if chosen.count(name) > 1}):
        raise SourceError(f"{table}: column {', '.join(twice)} is named twice. Name it once in the extract's spec.")
    return chosen


def table_facts(access: SnowflakeAccess, table: TableName) -> TableFacts:
    """Return when the table was created and last altered, its number of rows and its Time Travel retention."""
    rows = access.query(
        "SELECT CREATED, LAST_DDL, ROW_COUNT, RETENTION_TIME, TABLE_TYPE "
        f"FROM {quote(table.database)}.INFORMATION_SCHEMA.TABLES "
        f"WHERE TABLE_SCHEMA = {literal(table.schema)} AND TABLE_NAME = {literal(table.name)}"
    )
    if not rows:
        raise SnowflakeError(
            f"{table} does not exist, or the role may not see it. Check the name and the grants.",
            errno=min(MISSING_OBJECT),
        )
    created, defined, count, retention, kind = rows[0]
    return TableFacts(created, defined, _whole(count), _whole(retention), is_view=kind == "VIEW")


def shown_objects(access: SnowflakeAccess, table: TableName, *, views: bool = False) -> list[dict[str, Any]]:
    """Return what SHOW TABLES, or SHOW VIEWS, says of the objects whose names fit this one: it may have wildcards."""
    place = f"{quote(table.database)}.{quote(table.schema)}"
    return rows_by_name(access, f"SHOW {'VIEWS' if views else 'TABLES'} LIKE {literal(table.name)} IN SCHEMA {place}")


def rows_by_name(access: SnowflakeAccess, sql: str) -> list[dict[str, Any]]:
    """Run a SHOW statement and return its rows by the names of their columns, whose order differs between accounts."""
    with access.connect() as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def is_kept(access: SnowflakeAccess, table: TableName, facts: TableFacts, version: SourceVersion) -> bool:
    """Whether Time Travel can read the table at this recent version; a view has the history of the tables behind it."""
    if facts.retention_days is not None:
        return facts.retention_days != 0
    try:
        access.query(f"SELECT 1 FROM {table.sql} {version.sql} LIMIT 0")
    except SnowflakeError as failure:
        if failure.errno not in BEYOND_TIME_TRAVEL:
            raise
        return False
    return True


def select(
    table: TableName, columns: Sequence[Column], *, version: SourceVersion | None = None, where: str | None = None
) -> str:
    """The query that reads these columns, pinned to a version."""
    listed = ", ".join(quote(column.name) for column in columns)
    pinned = f" {version.sql}" if version else ""
    return f"SELECT {listed} FROM {table.sql}{pinned}" + (f" WHERE {where}" if where else "")


@dataclass(frozen=True)
class Span:
    """From the version that the extract shows to the version of the refresh."""

    old: SourceVersion
    new: SourceVersion

    def changes(self, table: TableName) -> str:
        """The FROM clause that reads the table's change feed, with both images of updates."""
        end = self.new.sql.replace("AT(", "END(", 1)
        return f"{table.sql} CHANGES(INFORMATION => DEFAULT) {self.old.sql} {end}"


def combined_token(probes: Iterable[tuple[TableName, Probe]]) -> str:
    """Return one token that changes when any of the tables does; raise SourceError for a table without one."""
    return ",".join(_token(table, probed) for table, probed in probes)


def _token(table: TableName, table_probe: Probe) -> str:
    if table_probe.token is None:
        raise SourceError(
            table_probe.problem
            or f"{table} gives no change token. Check that it is a table or view that the role may read."
        )
    return table_probe.token
