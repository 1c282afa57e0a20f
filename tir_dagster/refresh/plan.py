"""The stage `plan`: none, incremental or full, and why, from what was looked at and surveyed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.plan import (
    Mode,
    Plan,
    Reason,
    Situation,
    load_all,
    merge_plans,
    plan_refresh,
    redefinition,
)
from tir_dagster.changes.relation import Relation
from tir_dagster.changes.ties import open_order
from tir_dagster.hyper.content import content_sums, source_fingerprints, sums_to_json
from tir_dagster.refresh.context import Looked, RefreshContext, shape_of
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import Survey
from tir_dagster.refresh.verify import Verification
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, SnowflakeError
from tir_dagster.snowflake.versions import SourceVersion, is_kept, table_facts


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

    # Of an extract of several tables: slices of others than the main one that are replaced whatever their rows say.
    resync_in: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    def of(self, whole: Survey, table: str) -> Request:
        """Return what is asked of one table: slices are those of the main one, hints those of the tables that it reads."""
        surveyed = whole.of(table)
        if surveyed is whole:
            return self
        hints = tuple(hint for hint in self.hints if hint.table in surveyed.relation.tables)
        unnamed = self.hinted and not (self.hints or self.resync or self.resync_in)
        if table == whole.spec.main.table:
            return replace(self, hints=hints, hinted=bool(hints or self.resync or self.compare) or unnamed)
        resync = self.resync_in.get(table, ())
        hinted = bool(hints or resync) or unnamed
        mode = "changes" if self.mode == "slices" else self.mode
        return replace(self, mode=mode, slices=(), hints=hints, resync=resync, compare=(), hinted=hinted)


def plan(context: RefreshContext, looked: Looked, surveyed: Survey, request: Request) -> Plan:
    """Decide what to do; change nothing, and read no row unless DDL ran on the source, or may have run behind a view."""
    if context.spec.tables:
        planned = _plan_tables(context, looked, surveyed, request)
    else:
        planned = _plan_table(context, looked, surveyed, request)
    hold = context.hold.read()
    if hold is None or planned.decision == "none":
        return planned
    return replace(
        planned, warnings=(*planned.warnings, f"{hold.sentence(context.spec.name)} Until then, nothing is refreshed.")
    )


def _plan_tables(context: RefreshContext, looked: Looked, surveyed: Survey, request: Request) -> Plan:
    parts = {}
    for name in context.spec.parts:
        part = surveyed.of(name)
        planned = _plan_table(context.of(name), looked.of(name), part, request.of(surveyed, name))
        parts[name] = replace(planned, table=name)
    whole = Plan(context.spec.name, request.mode, "none")
    if not looked.has_tables_of(context.spec) and looked.datasource_reason is None and request.mode != "full":
        return load_all(replace(whole, parts=parts), Reason.DEFINITION_CHANGED, context.spec.policy)
    if request.mode != "full" and any(_lies_elsewhere(looked.of(name), surveyed.of(name)) for name in parts):
        # Somebody published a file with other tables around the same rows.
        return load_all(replace(whole, parts=parts), Reason.FOREIGN_PUBLISH, context.spec.policy)
    return merge_plans(whole, parts, context.spec.policy)


def _lies_elsewhere(looked: Looked, surveyed: Survey) -> bool:
    """Whether the datasource keeps a table otherwise than our last version does."""
    return looked.base is not None and shape_of(looked.base).table != surveyed.place


def _plan_table(context: RefreshContext, looked: Looked, surveyed: Survey, request: Request) -> Plan:
    pending = [change_set for change_set in context.change_sets.pending() if _concerns(change_set, context.spec.table)]
    unfinished = (change_set.reason for change_set in pending if change_set.decision == "full" and change_set.reason)
    relation = surveyed.relation
    is_asked = request.mode == "slices" or bool(request.hinted or request.hints or pending)
    views = _Views() if request.mode == "full" else _look_at_views(context, looked, surveyed, is_asked=is_asked)
    return plan_refresh(
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
            redefined=views.redefined,
            same_view=views.same,
            unseen=views.unseen,
            restless=relation.view is not None and relation.view.restless,
            excluded_changes=(*relation.excluded_changes, *relation.unused_settings),
        )
    )


def _concerns(change_set: ChangeSet, table: str) -> bool:
    """Whether a pending change set has keys of the table; one of everything concerns all."""
    if change_set.decision == "full" or not table:
        return True
    return table in change_set.changing


def _holds_same_rows(context: RefreshContext, looked: Looked, surveyed: Survey) -> bool:
    """Whether the extract equals the old source under the current columns, although DDL ran on it since.

    Time Travel shows old rows under the current columns: after a rename, a drop or an add they differ from what was
    read then, after a comment they do not. Only for extracts that contain all columns that a refresh by key needs.
    """
    confirmed, relation = looked.confirmed, surveyed.relation
    if confirmed is None or looked.base is None or looked.foreign:
        return False
    change = redefinition(confirmed.known.completed_by(surveyed.known), surveyed.known)
    if not change.table_altered or confirmed.known.schema != surveyed.known.schema:
        return False
    hidden = relation.watermark is not None and relation.watermark not in relation.columns
    if hidden or relation.aggregated or relation.why_full is not None or relation.orders:
        return False
    context.log("DDL ran on the source since the last refresh: comparing what the extract shows with the rows of then")
    try:
        return Verification(context, confirmed, looked.base).equals_source().passed
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return False


@dataclass(frozen=True)
class _Views:
    """What the views show of the rows of the last refresh, where that had to be checked."""

    redefined: bool = False
    same: bool = False
    unseen: bool = False


def _look_at_views(context: RefreshContext, looked: Looked, surveyed: Survey, *, is_asked: bool) -> _Views:
    """Compare what views show of the rows of the last refresh with the extract, if a view may be defined otherwise.

    It may if its text changed, or if DDL ran on it or behind it. Two versions, both read through the current definition, do
    not show that. Where the role may not see what is behind a view, it is checked whenever a row may be replaced.
    """
    confirmed, base, relation = looked.confirmed, looked.base, surveyed.relation
    if confirmed is None or base is None or looked.foreign or not surveyed.views:
        return _Views()
    then, now = confirmed.known.completed_by(surveyed.known), surveyed.known
    change = redefinition(then, now)
    is_moved = change.view_replaced or change.view_altered
    is_doubtful = change.view_unknown and (now.token != then.token or is_asked)
    same_spec = (now.definition, now.schema, now.role) == (then.definition, then.schema, then.role)
    if not same_spec or change.table_replaced or not (is_moved or is_doubtful):
        return _Views()
    version = SourceVersion.parse(confirmed.source_version)
    # What the extract does not show, or shows otherwise by its spec, cannot be compared.
    hidden = relation.watermark is not None and relation.watermark not in relation.columns
    if relation.finds_all and not (is_moved and hidden):
        context.log("the source is a view: comparing what it shows of the rows of the last refresh")
        shows_same = _shows_same_rows(context, base, relation, version)
    else:
        shows_same = None
    if shows_same is not None or is_moved:
        return _Views(redefined=shows_same is False, same=bool(shows_same))
    return _Views(
        unseen=surveyed.version.kept and not relation.compares_versions and _lost_past(context, surveyed, version)
    )


def _shows_same_rows(context: RefreshContext, base: Version, relation: Relation, version: SourceVersion) -> bool | None:
    """Whether the source, read through its current definition, showed the extract's rows at their version; None: unknown."""
    shape, kept = shape_of(base), base.manifest.get("content_sums")
    try:
        if open_order(relation, context.snowflake, version):
            # Another reading may show others; then every row is compared, whatever the rows of then are.
            return None
        source_sums = source_fingerprints(context.snowflake.query, relation.from_clause(version), shape)
    except SnowflakeError as error:
        if error.errno not in BEYOND_TIME_TRAVEL:
            raise
        return None
    # Versions of earlier releases have no sums.
    return sums_to_json(source_sums) == (kept or sums_to_json(content_sums(base.extract, shape)))


def _lost_past(context: RefreshContext, surveyed: Survey, version: SourceVersion) -> bool:
    """Whether a view can no longer be read at the version of the last refresh: a table behind it may be another one."""
    facts = {view: table_facts(context.snowflake, view) for view in surveyed.views}
    return not all(is_kept(context.snowflake, view, fact, version) for view, fact in facts.items())
