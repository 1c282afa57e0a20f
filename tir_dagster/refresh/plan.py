"""The stage `plan`: none, incremental or full, and why, from what was looked at and surveyed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tir_dagster.changes.hints import Hint
from tir_dagster.changes.plan import Mode, Plan, Reason, Situation, plan_refresh
from tir_dagster.changes.ties import open_order
from tir_dagster.hyper.content import content_sums, source_fingerprints, sums_to_json
from tir_dagster.refresh.context import Looked, RefreshContext, shape_of
from tir_dagster.refresh.survey import Survey
from tir_dagster.refresh.verify import Verification
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, SnowflakeError
from tir_dagster.snowflake.versions import SourceVersion


@dataclass(frozen=True)
class Request:
    """What a refresh is asked to do, and the hints since the last one."""

    mode: Mode = "changes"
    slices: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()
    # Slices that are replaced whatever their rows say, and slices whose rows are compared.
    resync: tuple[str | None, ...] = ()
    compare: tuple[str | None, ...] = ()
    # There are hints to check even if the source has not changed.
    hinted: bool = False
    # Why everything has to be loaded, if the caller knows a reason.
    due_reason: Reason | None = None
    # Numbers of the reports in Dagster's log that the pinned version shows.
    reports: tuple[int, ...] = ()
    # Where the changes were announced, in words.
    origin: tuple[str, ...] = ()
    allow_empty: bool = False


def plan(context: RefreshContext, looked: Looked, surveyed: Survey, request: Request) -> Plan:
    """Decide what to do; change nothing, and read no row unless DDL ran on the source, or may have run behind a view."""
    pending = context.change_sets.pending()
    unfinished = (change_set.reason for change_set in pending if change_set.decision == "full" and change_set.reason)
    relation = surveyed.relation
    is_asked = request.mode == "slices" or bool(request.hinted or request.hints or pending)
    planned = plan_refresh(
        Situation(
            extract=context.spec.name,
            mode=request.mode,
            policy=context.spec.policy,
            now=surveyed.known,
            confirmed=looked.confirmed.known if looked.confirmed else None,
            base_present=looked.base is not None,
            foreign=looked.foreign,
            datasource_reason=looked.datasource_reason,
            forgotten=looked.confirmed is None and bool(context.settled_versions()),
            pending=tuple(change_set.id for change_set in pending),
            due_reason=request.due_reason or next((Reason[reason] for reason in unfinished), None),
            slices=request.slices,
            hinted=bool(request.hinted or request.hints),
            opaque=relation.why_full,
            same_rows=request.mode != "full" and _holds_same_rows(context, looked, surveyed),
            redefined=request.mode != "full" and _is_redefined(context, looked, surveyed, is_asked=is_asked),
            restless=relation.view is not None and relation.view.restless,
            excluded_changes=(*relation.excluded_changes, *relation.unused_settings),
        )
    )
    hold = context.hold.read()
    if hold is None or planned.decision == "none":
        return planned
    return replace(
        planned, warnings=(*planned.warnings, f"{hold.sentence(context.spec.name)} Until then, nothing is refreshed.")
    )


def _holds_same_rows(context: RefreshContext, looked: Looked, surveyed: Survey) -> bool:
    """Whether the extract equals the old source under the current columns, although DDL ran on it since.

    Time Travel shows old rows under the current columns: after a rename, a drop or an add they differ from what was
    read then, after a comment they do not. Only for extracts that contain all columns that a refresh by key needs.
    """
    confirmed, relation = looked.confirmed, surveyed.relation
    if confirmed is None or looked.base is None or looked.foreign:
        return False
    if confirmed.known.ddl in (None, surveyed.known.ddl) or confirmed.known.schema != surveyed.known.schema:
        return False
    hidden = relation.watermark is not None and relation.watermark not in relation.columns
    if hidden or relation.aggregated or relation.why_full is not None or relation.orders:
        return False
    context.log("DDL ran on the source since the last refresh: comparing what the extract shows with the rows of then")
    try:
        return Verification(context, confirmed).equals_source().passed
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return False


def _is_redefined(context: RefreshContext, looked: Looked, surveyed: Survey, *, is_asked: bool) -> bool:
    """Whether a view now shows the old rows with other values than the extract; checked if any row may be replaced.

    Columns of a table behind the view may have been renamed, or dropped and added again: that does not change LAST_DDL of
    the view, and two versions, both read under the current columns, do not show it. Without history it is unknown.
    """
    confirmed, base, relation = looked.confirmed, looked.base, surveyed.relation
    if confirmed is None or base is None or looked.foreign or not surveyed.views or not relation.finds_all:
        return False
    then, now = confirmed.known.completed_by(surveyed.known), surveyed.known
    if replace(now, token=then.token) != then or (now.token == then.token and not is_asked):
        return False
    context.log("the source is a view: comparing what it shows of the rows of the last refresh")
    shape, kept = shape_of(base), base.manifest.get("content_sums")
    version = SourceVersion.parse(confirmed.source_version)
    try:
        if open_order(relation, context.snowflake, version):
            # Another reading may show others; then every row is compared, whatever the rows of then are.
            return False
        source_sums = source_fingerprints(context.snowflake.query, relation.from_clause(version), shape)
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return False
    # Versions of earlier releases have no sums.
    return sums_to_json(source_sums) != (kept or sums_to_json(content_sums(base.extract, shape)))
