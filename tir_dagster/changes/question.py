"""Prepares a detection with a few small queries: changed tables, watermarks, keys of hints, limits of the history."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tir_dagster.changes.detectors import HintedCandidates, HistoryLimits, Question
from tir_dagster.changes.hints import (
    All,
    ChangeType,
    Hint,
    HintError,
    Resolution,
    Scope,
    Unknown,
    check_hint,
    condition_sql,
    is_held_exactly,
)
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.changes.ties import open_order
from tir_dagster.changes.watermarks import highest_mark, lower_bound
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, UNTRACKED, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.versions import SourceVersion, Span, describe_held

# Snowflake's words for a view with more than filters and inner joins, and a dynamic table that is rewritten by each refresh:
# the numbers of these errors are not documented.
_NO_FEED = "change tracking is not "


def lacks_history(error: SnowflakeError) -> bool:
    """Whether a statement failed because it reads an old version, or a feed of changes, that Snowflake does not have."""
    return error.errno in UNTRACKED | BEYOND_TIME_TRAVEL or _NO_FEED in str(error).lower()


def _is_too_old(error: SnowflakeError) -> bool:
    return error.errno in BEYOND_TIME_TRAVEL


def ask_question(
    relation: Relation,
    access: SnowflakeAccess,
    *,
    since: SourceVersion,
    watermark: str | None,
    version: SourceVersion,
    changed: Collection[TableName],
    hints: Sequence[Hint] = (),
    try_history: bool = True,
) -> tuple[Question, tuple[str, ...]]:
    """Prepare a detection from a version, with its highest watermark, to a new one; return warnings about the hints, too.

    Without `try_history`, all old versions and feeds count as readable: one that is not fails later (`lacks_history`).
    """
    span = Span(since, version)
    if try_history:
        history = _history(relation, access, span, changed)
    else:
        history = HistoryLimits(tied=None if relation.analysed else open_order(relation, access, span.old, span.new))
    question = Question(span, changed, since=_lowest_mark(relation, watermark, since), history=history)
    rows = described_rows(hints, relation, access, span)
    keys = {dimension.alias: described_keys(hints, dimension, access, span) for dimension in relation.dimensions}
    marked = {
        dimension.alias: condition
        for dimension in relation.dimensions
        if dimension.table in changed and (condition := _marked(access, dimension, span, history))
    }
    warnings = tuple(dict.fromkeys(warning for hinted in (rows, *keys.values()) for warning in hinted.warnings))
    return (
        replace(
            question,
            marked=marked,
            described={alias: HintedCandidates(hinted.queries, hinted.anything) for alias, hinted in keys.items()},
            described_rows=HintedCandidates(rows.queries, rows.anything, rows.in_extract),
        ),
        warnings,
    )


def _history(relation: Relation, access: SnowflakeAccess, span: Span, changed: Collection[TableName]) -> HistoryLimits:
    """Try to read the old version of every table, and the feeds that are used; ask whether rows tie."""
    unreadable = {
        table: f"the history of {table} does not reach back to {span.old}"
        for table in _failing(access, relation.tables, _is_too_old, lambda table: f"{table.sql} {span.old.sql}")
    }
    if not relation.analysed:
        # A query that is compared as a whole has no change feed.
        return HistoryLimits(unreadable, tied=None if unreadable else open_order(relation, access, span.old, span.new))
    feeds = {
        relation.table: relation.spec.changes.by,
        **{dimension.table: dimension.changes.by for dimension in relation.dimensions},
    }
    fed = [table for table, by in feeds.items() if by == "feed" and table in changed and table not in unreadable]
    untracked = {
        table: f"{table} has no change tracking since {span.old}"
        for table in _failing(access, fed, lacks_history, span.changes)
    }
    return HistoryLimits(unreadable, untracked)


def _failing(
    access: SnowflakeAccess,
    tables: Iterable[TableName],
    is_expected: Callable[[SnowflakeError], bool],
    source: Callable[[TableName], str],
) -> list[TableName]:
    """Return the tables that cannot be read this way; one query is enough where none fails."""
    tables = list(tables)
    try:
        if tables:
            parts = [f"(SELECT 1 AS TIR_N FROM {source(table)} LIMIT 1)" for table in tables]
            access.query(f"SELECT COUNT(*) FROM ({' UNION ALL '.join(parts)}) AS u")
    except SnowflakeError as error:
        if not is_expected(error):
            raise
        if len(tables) == 1:
            return tables
        return [failing for table in tables for failing in _failing(access, [table], is_expected, source)]
    return []


def _lowest_mark(relation: Relation, watermark: str | None, read: SourceVersion) -> str | None:
    """The lowest watermark of candidates, as an SQL literal: the last confirmed one minus the look-back."""
    if relation.watermark is None or watermark is None:
        return None
    return lower_bound(relation.watermark, watermark, read_at=read.moment, look_back=relation.spec.changes.look_back)


def _marked(access: SnowflakeAccess, dimension: Dimension, span: Span, history: HistoryLimits) -> str | None:
    """The condition for rows, called r, that the joined table's watermark proposes."""
    if dimension.mark is None or dimension.table in history.unreadable:
        return None
    highest = highest_mark(access, dimension.mark, f"{dimension.table.sql} {span.old.sql}")
    if highest is None:
        return "TRUE"
    since = lower_bound(dimension.mark, highest, read_at=span.old.moment, look_back=dimension.changes.look_back)
    mark = f"r.{quote(dimension.mark.name)}"
    return f"({mark} >= {since} OR {mark} IS NULL)"


# Keys beyond these are refreshed like all others; only the check of the declared type does not look at them.
_CHECKED_KEYS = 1_000


@dataclass(frozen=True)
class HintedKeys:
    """What hints say of one table: queries for the keys they hit, or that anything may have changed."""

    queries: tuple[str, ...] = ()
    anything: bool = False
    # Scopes whose old rows only the extract remembers.
    in_extract: tuple[Scope, ...] = ()
    warnings: tuple[str, ...] = ()


def checked_hints(hints: Iterable[Hint], relation: Relation, access: SnowflakeAccess) -> tuple[Hint, ...]:
    """Return the hints with names and values as the tables have them; raise HintError for a table that is not read."""
    columns: dict[TableName, dict[str, Column]] = {}
    checked = []
    for hint in hints:
        if hint.table not in relation.tables:
            tables = ", ".join(str(table) for table in relation.tables)
            raise HintError(
                f"{relation.spec.name} does not read {hint.table}. It reads {tables}: name one of these in the hint."
            )
        if hint.table not in columns:
            columns[hint.table] = {column.name: column for column in describe_held(access, hint.table)}
        checked.append(check_hint(hint, columns[hint.table]))
    return tuple(checked)


def described_rows(hints: Sequence[Hint], relation: Relation, access: SnowflakeAccess, span: Span) -> HintedKeys:
    """The first table's keys, under the names that the row key has."""
    table_hints = [hint for hint in hints if hint.table == relation.table]
    if relation.whole is not None:
        # Whatever the hints say, both versions of the query are compared.
        return HintedKeys()
    if table_hints and not relation.fact_key:
        # Rows without a key of their own can only be compared all together.
        return HintedKeys(anything=True)
    # An extract that copies the table holds the old rows, with what conditions say of them.
    held = {column.name: column for column in relation.columns} if relation.view is None else {}
    return _described(table_hints, relation.fact_key_sql if table_hints else "", access, span, held)


def described_keys(hints: Sequence[Hint], dimension: Dimension, access: SnowflakeAccess, span: Span) -> HintedKeys:
    """The join keys of a joined table."""
    table_hints = [hint for hint in hints if hint.table == dimension.table]
    return _described(table_hints, ", ".join(quote(column.name) for column in dimension.key), access, span)


def _described(
    hints: Sequence[Hint],
    listed: str,
    access: SnowflakeAccess,
    span: Span,
    held: Mapping[str, Column] = MappingProxyType({}),
) -> HintedKeys:
    """Resolve hints on both versions of the table; where the old one is gone, on the columns that the extract holds."""
    hinted = HintedKeys()
    for hint in hints:
        if isinstance(hint.scope, (All, Unknown)):
            hinted = replace(hinted, anything=True)
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
            # The old rows cannot be read any more.
            warning = f"The history of {hint.table} does not reach back to {span.old}:"
            if is_held_exactly(hint.scope, held):
                warning += " what was there before is looked up in the extract."
                queries, scopes = (*hinted.queries, new), (*hinted.in_extract, hint.scope)
                hinted = replace(hinted, queries=queries, in_extract=scopes, warnings=(*hinted.warnings, warning))
            else:
                warning += " every row is compared with the extract."
                hinted = replace(hinted, anything=True, warnings=(*hinted.warnings, warning))
            continue
        new_keys = _some(access, new)
        resolved = Resolution(hint, frozenset(old_keys), frozenset(new_keys))
        # Of two lists that are cut off, nothing can be said about what is in one and not in the other.
        cut = hint.type is ChangeType.UPDATE_ROWS and max(len(old_keys), len(new_keys)) > _CHECKED_KEYS
        doubts = () if cut else resolved.warnings
        hinted = replace(hinted, queries=(*hinted.queries, new, old), warnings=(*hinted.warnings, *doubts))
    return hinted


def _some(access: SnowflakeAccess, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in access.query(f"SELECT * FROM ({query}) LIMIT {_CHECKED_KEYS + 1}")]
