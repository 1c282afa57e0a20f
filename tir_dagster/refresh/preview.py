"""What a refresh would do, without doing it: the plan as it would turn out, and what the guard would say. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from functools import partial
from typing import Any

from tir_dagster.changes.change_set import ChangeSet, counts_from_json
from tir_dagster.changes.detectors import find_candidates
from tir_dagster.changes.difference import Counts
from tir_dagster.changes.moves import Moves, count_moves, rows_by_slice
from tir_dagster.changes.plan import Plan, Reason, load_all, merge_plans, settle_plan
from tir_dagster.changes.question import ask_question, checked_hints, lacks_history
from tir_dagster.errors import GuardError
from tir_dagster.refresh.context import Looked, RefreshContext
from tir_dagster.refresh.detect import check_left
from tir_dagster.refresh.plan import Request
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import Survey, definition_fields
from tir_dagster.snowflake.connection import CANCELLED, SnowflakeDownError, SnowflakeError
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.extract import ExtractSpec

# A plan must not cost the warehouse more than a look: a count that takes longer is given up.
COUNT_SECONDS = 60


@dataclass(frozen=True)
class Preview:
    """The plan, settled by counts of the warehouse where it could count, and what would follow."""

    plan: Plan
    # The rows that the extract has, and by slice, before the refresh.
    rows: int | None = None
    slice_rows: Counts = field(default_factory=dict)
    moves: Moves | None = None
    # For a full refresh, and where keys cannot be counted: the source's rows now, by slice.
    source_rows: Counts | None = None
    # Why every row would be read and compared.
    everything: str | None = None
    # Why nothing could be counted.
    uncounted: str | None = None
    # The guard's message, if the refresh would stop there.
    stop: str | None = None
    pending: tuple[ChangeSet, ...] = ()
    # What differs between the spec now and the spec of the last refresh.
    spec_changes: tuple[str, ...] = ()
    # Of an extract of several tables, what happens to each, the main one first.
    parts: Mapping[str, Preview] = field(default_factory=dict)

    @property
    def purged(self) -> Counts:
        """Rows that would leave, by slice."""
        if self.plan.decision == "full":
            return self.slice_rows
        return self.moves.difference.purged if self.moves else {}

    @property
    def appended(self) -> Counts:
        """Rows that would arrive, by slice."""
        if self.plan.decision == "full":
            return self.source_rows or {}
        return self.moves.difference.appended if self.moves else {}

    @property
    def rows_after(self) -> int | None:
        """The rows that the extract would have."""
        if self.parts:
            after = [part.rows if part.plan.decision == "none" else part.rows_after for part in self.parts.values()]
            return None if None in after else sum(count or 0 for count in after)
        if self.source_rows is not None:
            return sum(self.source_rows.values())
        if self.moves is None or self.rows is None:
            return None
        return self.rows - sum(self.purged.values()) + sum(self.appended.values())


def preview(context: RefreshContext, looked: Looked, surveyed: Survey, planned: Plan, request: Request) -> Preview:
    """Count in the warehouse what the planned refresh would move; no Spark is started, and nothing is written."""
    if not context.spec.tables:
        known = _known(context, looked, planned)
        return replace(_counted(context, looked, surveyed, known, request), pending=context.change_sets.pending())
    parts = {}
    for table in context.spec.parts:
        view, part = looked.of(table), surveyed.of(table)
        known = _known(context.of(table), view, planned.of(table))
        # All of it counts together: a small table of which most rows changed is no reason to load everything.
        settling = replace(context.of(table), spec=replace(context.spec.parts[table], policy="incremental_only"))
        parts[table] = _counted(settling, view, part, known, request.of(surveyed, table))
    return _together(context, looked, planned, parts)


def _known(context: RefreshContext, looked: Looked, planned: Plan) -> Preview:
    base, confirmed = looked.base, looked.confirmed
    return Preview(
        planned,
        rows=confirmed.rows if confirmed else None,
        slice_rows=counts_from_json(base.manifest["slice_rows"]) if base else {},
        spec_changes=spec_changes(context.spec, base) if planned.reason is Reason.DEFINITION_CHANGED else (),
    )


def _together(context: RefreshContext, looked: Looked, planned: Plan, parts: Mapping[str, Preview]) -> Preview:
    """Return what happens to all tables as one."""
    spec, confirmed = context.spec, looked.confirmed
    plan, rows = planned, sum(part.rows or 0 for part in parts.values())
    if planned.decision == "incremental":
        plan = merge_plans(planned, {table: part.plan for table, part in parts.items()}, spec.policy)
        moved = max(plan.purged or 0, plan.appended or 0)
        if plan.decision == "incremental" and spec.policy == "auto" and moved > spec.thresholds.full_share * rows > 0:
            plan = load_all(plan, Reason.COST_THRESHOLD, spec.policy)
    return Preview(
        plan,
        rows=confirmed.rows if confirmed else None,
        everything="; ".join(f"{table}: {part.everything}" for table, part in parts.items() if part.everything) or None,
        uncounted="; ".join(f"{table}: {part.uncounted}" for table, part in parts.items() if part.uncounted) or None,
        stop=next((part.stop for part in parts.values() if part.stop), None),
        pending=context.change_sets.pending(),
        spec_changes=spec_changes(spec, looked.base) if planned.reason is Reason.DEFINITION_CHANGED else (),
        parts=parts,
    )


def _counted(context: RefreshContext, looked: Looked, surveyed: Survey, known: Preview, request: Request) -> Preview:
    """Count what happens to a table."""
    base, confirmed, planned = looked.base, looked.confirmed, known.plan
    if planned.decision == "none":
        return known
    query = partial(context.snowflake.query, seconds=COUNT_SECONDS)
    try:
        with context.snowflake.kept_open():
            if planned.decision == "full" or base is None or confirmed is None:
                return _full(context.spec, known, rows_by_slice(surveyed.relation, surveyed.version, query), request)
            return _by_key(context, looked, surveyed, known, request, query)
    except SnowflakeDownError:
        raise
    except SnowflakeError as error:
        # The decision holds without counts.
        slow = f"counting took longer than {COUNT_SECONDS} seconds in the warehouse"
        return replace(known, uncounted=slow if error.errno in CANCELLED else str(error))


def _full(spec: ExtractSpec, known: Preview, source_rows: Counts, request: Request) -> Preview:
    counted = replace(known, source_rows=source_rows)
    try:
        if not request.allow_empty:
            check_left(spec, known.rows or 0, sum(source_rows.values()))
    except GuardError as error:
        return replace(counted, stop=str(error))
    return counted


def _by_key(
    context: RefreshContext, looked: Looked, surveyed: Survey, known: Preview, request: Request, query: Any
) -> Preview:
    relation, confirmed, thresholds = surveyed.relation, looked.confirmed, context.spec.thresholds
    assert confirmed is not None, "there is a base"
    question, warnings = ask_question(
        relation,
        context.snowflake,
        since=SourceVersion.parse(confirmed.source_version),
        watermark=confirmed.watermark,
        version=surveyed.version,
        changed=surveyed.changed(confirmed.known),
        hints=checked_hints(request.hints, relation, context.snowflake),
    )
    candidates = find_candidates(relation, question)
    known = replace(
        known,
        everything=candidates.everything,
        plan=replace(known.plan, warnings=(*known.plan.warnings, *warnings, *candidates.warnings)),
    )
    try:
        if question.history.unreadable:
            why = next(iter(question.history.unreadable.values()))
            return _without_history(context.spec, known, surveyed, why, request, query)
        moves = count_moves(relation, question, candidates, query, resync=request.resync, compare=request.compare)
    except SnowflakeError as error:
        if not lacks_history(error):
            raise
        return _without_history(
            context.spec, known, surveyed, "the source's history does not reach back", request, query
        )
    counted = replace(known, moves=moves)
    try:
        plan = settle_plan(
            known.plan,
            moves.difference,
            rows=known.rows or 0,
            policy=context.spec.policy,
            delete_share=thresholds.delete_share,
            full_share=thresholds.full_share,
            pending=any(
                pending_set.decision == "incremental" and context.spec.table in pending_set.changing
                for pending_set in context.change_sets.pending()
            ),
            allow_empty=request.allow_empty,
        )
    except GuardError as error:
        return replace(counted, stop=str(error))
    if plan.decision == "full":
        rows = rows_by_slice(relation, surveyed.version, query)
        return replace(counted, plan=plan, source_rows=rows)
    return replace(counted, plan=plan)


def _without_history(
    spec: ExtractSpec, known: Preview, surveyed: Survey, why: str, request: Request, query: Any
) -> Preview:
    """Only the rows of now can be counted: which keys differ is found by comparing them with the extract."""
    counted = _full(spec, known, rows_by_slice(surveyed.relation, surveyed.version, query), request)
    return replace(counted, uncounted=f"{why}: only a refresh can tell which keys differ")


def spec_changes(spec: ExtractSpec, base: Version | None) -> tuple[str, ...]:
    """Return what differs between the spec and that of the last refresh, in lines."""
    before = base.manifest.get("definition") if base else None
    if before is None:
        return ("What the spec said at the last refresh is not on record.",)
    return tuple(_differences(before, definition_fields(spec)))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> Sequence[str]:
    lines: list[str] = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        # Kept as JSON, which knows no tuples.
        old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += _differences(old, new, f"{place}{name}.")
        elif isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
            lines.append(f"{place}{name}:")
            lines += [
                f"    {line}" for line in list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))[2:]
            ]
        else:
            lines.append(f"{place}{name}: {_written(old)} → {_written(new)}")
    return lines


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
