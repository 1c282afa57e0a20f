"""What a detection asks: which tables changed, from which watermark on, what hints mean, how far history reaches. Few small queries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from tir_dagster.changes.described import described_keys, described_rows
from tir_dagster.changes.detectors import Described, History, Question
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.marks import highest_mark, lower_bound
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.changes.state import Confirmation
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, UNTRACKED, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.span import Span
from tir_dagster.snowflake.versions import SourceVersion


def ask_question(
    relation: Relation,
    access: SnowflakeAccess,
    *,
    confirmed: Confirmation,
    version: SourceVersion,
    changed: Collection[TableName],
    hints: Sequence[Hint] = (),
) -> tuple[Question, tuple[str, ...]]:
    """Prepare a detection from the confirmed version to a new one; return warnings about the hints, too."""
    span = Span(SourceVersion.parse(confirmed.source_version), version)
    history = _history(relation, access, span, changed)
    question = Question(span, changed, since=_since(relation, confirmed), history=history)
    rows = described_rows(hints, relation, access, span)
    keys = {dimension.alias: described_keys(hints, dimension, access, span) for dimension in relation.dimensions}
    marked = {
        dimension.alias: condition
        for dimension in relation.dimensions
        if dimension.table in changed and (condition := _marked(access, dimension, span, history))
    }
    warnings = tuple(dict.fromkeys(one for found in (rows, *keys.values()) for one in found.warnings))
    return (
        replace(
            question,
            marked=marked,
            described={alias: Described(found.queries, found.anything) for alias, found in keys.items()},
            described_rows=Described(rows.queries, rows.anything),
        ),
        warnings,
    )


def _history(relation: Relation, access: SnowflakeAccess, span: Span, changed: Collection[TableName]) -> History:
    """Try to read the old version of every table, and the feeds that are used."""
    unreadable = {
        table: f"the history of {table} does not reach back to {span.old}"
        for table in _failing(access, relation.tables, BEYOND_TIME_TRAVEL, lambda table: f"{table.sql} {span.old.sql}")
    }
    feeds = {relation.table: relation.spec.changes.by, **{one.table: one.changes.by for one in relation.dimensions}}
    fed = [table for table, by in feeds.items() if by == "feed" and table in changed and table not in unreadable]
    untracked = {
        table: f"{table} has no change tracking since {span.old}"
        for table in _failing(access, fed, UNTRACKED | BEYOND_TIME_TRAVEL, span.changes)
    }
    return History(unreadable, untracked)


def _failing(
    access: SnowflakeAccess, tables: Iterable[TableName], codes: Collection[int], source: Callable[[TableName], str]
) -> list[TableName]:
    """Return the tables that cannot be read so; one query tells where none fails."""
    tables = list(tables)
    try:
        if tables:
            parts = [f"(SELECT 1 AS TIR_N FROM {source(table)} LIMIT 1)" for table in tables]
            access.query(f"SELECT COUNT(*) FROM ({' UNION ALL '.join(parts)}) AS u")
    except SnowflakeError as error:
        if error.errno not in codes:
            raise
        if len(tables) == 1:
            return tables
        return [failing for table in tables for failing in _failing(access, [table], codes, source)]
    return []


def _since(relation: Relation, confirmed: Confirmation) -> str | None:
    """From where on rows are candidates: the last confirmed watermark minus the look-back, as an SQL literal."""
    if relation.watermark is None or confirmed.watermark is None:
        return None
    read = SourceVersion.parse(confirmed.source_version).moment
    return lower_bound(relation.watermark, confirmed.watermark, read=read, look_back=relation.spec.changes.look_back)


def _marked(access: SnowflakeAccess, dimension: Dimension, span: Span, history: History) -> str | None:
    """The condition for rows, called r, that the joined table's watermark proposes."""
    if dimension.mark is None or dimension.table in history.unreadable:
        return None
    highest = highest_mark(access, dimension.mark, f"{dimension.table.sql} {span.old.sql}")
    if highest is None:
        return "TRUE"
    since = lower_bound(dimension.mark, highest, read=span.old.moment, look_back=dimension.changes.look_back)
    mark = f"r.{quote(dimension.mark.name)}"
    return f"({mark} >= {since} OR {mark} IS NULL)"
