"""What the detectors propose: candidates among the first table's rows, from watermarks, feeds, hints and joined tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tir_dagster.changes.affected import Log, affected
from tir_dagster.changes.candidates import SLICE_NAME, Candidates
from tir_dagster.changes.described import described_keys, described_rows
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.marks import NUMBERS, differing_sql, lower_bound
from tir_dagster.changes.relation import Relation
from tir_dagster.changes.span import Span
from tir_dagster.changes.state import Confirmation
from tir_dagster.source.connection import BEYOND_TIME_TRAVEL, UNTRACKED, SnowflakeAccess, SnowflakeError
from tir_dagster.source.names import quote
from tir_dagster.source.slices import slice_sql_snowflake
from tir_dagster.source.versions import SourceVersion

if TYPE_CHECKING:
    from tir_dagster.changes.detect import Survey


def propose(
    surveyed: Survey, confirmed: Confirmation, access: SnowflakeAccess, *, hints: Sequence[Hint] = (), log: Log
) -> tuple[Candidates, tuple[str, ...]]:
    """The candidates of all detectors together; and warnings where one had to fall back, or a hint is doubtful."""
    relation, detector = surveyed.relation, surveyed.spec.changes.by
    span = Span(SourceVersion.parse(confirmed.source_version), surveyed.version)
    changed = surveyed.changed(confirmed.known)
    joined, warnings = affected(
        relation,
        access,
        span,
        changed=changed,
        described=lambda dimension: described_keys(hints, dimension, access, span),
        log=log,
    )
    told = described_rows(hints, relation, access, span)
    joined = replace(joined, named=told.queries, everything=joined.everything or told.anything)
    warnings += told.warnings
    if joined.everything or relation.table not in changed:
        return joined, warnings
    if detector in ("watermark", "hint"):
        since = _since(surveyed, confirmed)
        if detector == "watermark" and since is None:
            return replace(joined, everything=True), warnings
        queries, problem = _differing(surveyed, access, span)
        if problem:
            log(problem)
            return replace(joined, everything=True), (*warnings, problem)
        return replace(joined, since=since, differing=queries), warnings
    if detector == "feed":
        query, problem = _feed(surveyed, access, span)
        if problem:
            log(problem)
            return replace(joined, everything=True), (*warnings, problem)
        return replace(joined, named=(*joined.named, query)), warnings
    return replace(joined, everything=True), warnings


def _differing(surveyed: Survey, access: SnowflakeAccess, span: Span) -> tuple[tuple[str, ...], str | None]:
    """A query for what a watermark's order may hide; or why it cannot tell, and every row is compared.

    Without a row key, slices or groups whose rows differ: a delete and a late insert there leave the count as it was.
    With a number as watermark, keys whose numbers differ, whichever is higher.
    """
    relation = surveyed.relation
    new, old = relation.base(span.new), relation.base(span.old)
    if not relation.spec.row_key:
        content = [quote(column.name) for column in new.columns]
    elif relation.watermark is not None and relation.watermark.kind in NUMBERS:
        content = [quote(relation.watermark.name)]
    else:
        return (), None
    keys = [quote(column.name) for column in new.key] or [slice_sql_snowflake(new.slices, new.columns)]
    names = [column.name for column in new.key] or [SLICE_NAME]
    try:
        access.query(f"SELECT 1 FROM {old.sql} LIMIT 1")
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return (), _too_short(relation, span)
    return (differing_sql(keys, content, names, new=new.sql, old=old.sql),), None


def _too_short(relation: Relation, span: Span) -> str:
    return f"The history of {relation.table} does not reach back to {span.old}: every row is compared with the ledger."


def _feed(surveyed: Survey, access: SnowflakeAccess, span: Span) -> tuple[str, str | None]:
    """The query for the keys that the table's own feed names; or why it cannot tell, and every row is compared."""
    relation = surveyed.relation
    if not relation.fact_key:
        return (
            "",
            f"The feed of {relation.table} names no rows without a row key of its own columns: every row is compared.",
        )
    query = f"SELECT DISTINCT {relation.fact_key_sql} FROM {span.changes(relation.table)}"
    try:
        access.query(f"{query} LIMIT 1")
    except SnowflakeError as error:
        if error.errno in UNTRACKED:
            return (
                query,
                f"{relation.table} has no change tracking since {span.old}: every row is compared with the ledger.",
            )
        if error.errno in BEYOND_TIME_TRAVEL:
            return query, _too_short(relation, span)
        raise
    return query, None


def looks_for_deletes(surveyed: Survey, candidates: Candidates) -> bool:
    """Whether counts and key checksums are compared; a feed names what was deleted from its own table."""
    changes, relation = surveyed.spec.changes, surveyed.relation
    named_all = changes.by == "feed" and not candidates.everything
    # A row that lost its mandatory partner, is filtered out or moved to another group by it, and no feed says so.
    hidden = relation.may_hide_rows and (bool(candidates.referring) or not named_all)
    return hidden or (changes.deletes and not named_all)


def _since(surveyed: Survey, confirmed: Confirmation) -> str | None:
    """From where on rows are candidates, as an SQL literal: the last confirmed watermark minus the look-back."""
    column, highest = surveyed.relation.watermark, confirmed.watermark
    if column is None or highest is None:
        return None
    read = SourceVersion.parse(confirmed.source_version).moment
    return lower_bound(column, highest, read=read, look_back=surveyed.spec.changes.look_back)
