"""Hints brought to the source: the keys that their scopes hit, before the change and after it. Keys move, rows do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tir_dagster.changes.hints import (
    All,
    ChangeType,
    Hint,
    HintError,
    Resolution,
    Unknown,
    check_hint,
    condition_sql,
)
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.span import Span
from tir_dagster.snowflake.versions import describe_held

# Keys beyond these are refreshed like all others; only the check of the declared type does not look at them.
_CHECKED_KEYS = 1_000


@dataclass(frozen=True)
class Described:
    """What hints say of one table: queries for the keys they hit, or that anything may have changed."""

    queries: tuple[str, ...] = ()
    anything: bool = False
    warnings: tuple[str, ...] = ()


def checked_hints(hints: Iterable[Hint], relation: Relation, access: SnowflakeAccess) -> tuple[Hint, ...]:
    """The hints with names and values as the tables have them; HintError for what the extract does not read."""
    known: dict[TableName, dict[str, Column]] = {}
    checked = []
    for hint in hints:
        if hint.table not in relation.tables:
            tables = ", ".join(str(table) for table in relation.tables)
            raise HintError(
                f"{relation.spec.name} does not read {hint.table}. It reads {tables}: hint at one of these."
            )
        if hint.table not in known:
            known[hint.table] = {column.name: column for column in describe_held(access, hint.table)}
        checked.append(check_hint(hint, known[hint.table]))
    return tuple(checked)


def described_rows(hints: Sequence[Hint], relation: Relation, access: SnowflakeAccess, span: Span) -> Described:
    """The first table's keys, under the names that the row key has."""
    mine = [hint for hint in hints if hint.table == relation.table]
    if mine and not relation.fact_key:
        # Rows without a key of their own can only be compared all together.
        return Described(anything=True)
    return _described(mine, relation.fact_key_sql if mine else "", access, span)


def described_keys(hints: Sequence[Hint], dimension: Dimension, access: SnowflakeAccess, span: Span) -> Described:
    """The join keys of a joined table."""
    mine = [hint for hint in hints if hint.table == dimension.table]
    return _described(mine, ", ".join(quote(column.name) for column in dimension.key), access, span)


def _described(hints: Sequence[Hint], listed: str, access: SnowflakeAccess, span: Span) -> Described:
    found = Described()
    for hint in hints:
        if isinstance(hint.scope, (All, Unknown)):
            found = replace(found, anything=True)
            continue
        columns = {column.name: column for column in describe_held(access, hint.table)}
        where = condition_sql(hint.scope, columns)
        new, old = (
            f"SELECT DISTINCT {listed} FROM {hint.table.sql} {version.sql} WHERE {where}"
            for version in (span.new, span.old)
        )
        try:
            old_keys = _some(access, old)
        except SnowflakeError as error:
            if error.errno not in BEYOND_TIME_TRAVEL:
                raise
            # What it was before is not known any more.
            told = f"The history of {hint.table} does not reach back to {span.old}: every row is compared with the extract."
            found = replace(found, anything=True, warnings=(*found.warnings, told))
            continue
        new_keys = _some(access, new)
        resolved = Resolution(hint, frozenset(old_keys), frozenset(new_keys))
        # Of two lists that are cut off, nothing can be said about what is in one and not in the other.
        cut = hint.type is ChangeType.UPDATE_ROWS and max(len(old_keys), len(new_keys)) > _CHECKED_KEYS
        doubts = () if cut else resolved.warnings
        found = replace(found, queries=(*found.queries, new, old), warnings=(*found.warnings, *doubts))
    return found


def _some(access: SnowflakeAccess, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in access.query(f"SELECT * FROM ({query}) LIMIT {_CHECKED_KEYS + 1}")]
