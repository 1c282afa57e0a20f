"""The request of a detection: its run config, and news from Dagster's log (hints, upstream assets, drift).

No postponed annotations here: Dagster reads the types of the config.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from tir_dagster.changes.change_set import ChangeSet, counts_from_json
from tir_dagster.changes.plan import Plan, Reason
from tir_dagster.orchestration.checks import known_drift
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.partitions import rest_of
from tir_dagster.orchestration.sensing.upstream import (
    CLOCKS,
    announcements,
    materialization_stamps,
    upstream_changes,
)
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.changes.hints import Hint
    from tir_dagster.changes.relation import Relation
    from tir_dagster.refresh.context import Looked, RefreshContext
    from tir_dagster.refresh.plan import Request
    from tir_dagster.refresh.survey import Survey
    from tir_dagster.snowflake.versions import SourceVersion

Warn = Callable[[str], None]


class DetectionConfig(dg.Config):
    """How to look for changes; `slices` are re-synced regardless of the watermark; `hints` are JSON texts."""

    mode: str = "changes"
    slices: list[str] = Field(default_factory=list)
    allow_empty: bool = False
    hints: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class News:
    """Reported hints and upstream materializations by their numbers in Dagster's log, with their times.

    Read before the version is pinned: a later report may describe a change that the version does not contain.
    """

    since: datetime
    stamps: Mapping[int, float]
    # The numbers that no refresh has used.
    unused: frozenset[int]

    def shown_at(self, version: "SourceVersion") -> tuple[int, ...]:
        """Return the numbers that this version covers and that may be read again; older ones are never read again."""
        oldest = (version.moment - CLOCKS).timestamp()
        return tuple(sorted(number for number, stamp in self.stamps.items() if stamp >= oldest))


@dataclass(frozen=True)
class Detection:
    """What a detection found: the source as it was surveyed, the plan, and the change set if anything differs."""

    surveyed: "Survey"
    plan: Plan
    change_set: ChangeSet | None


def run_detection(
    instance: dg.DagsterInstance,
    context: "RefreshContext",
    looked: "Looked",
    keys: ExtractKeys,
    config: DetectionConfig,
    *,
    ident: str,
    warn: Warn,
) -> Detection:
    """Survey, plan and detect as requested; a new change set gets the name `ident`."""
    from tir_dagster.refresh import stages

    news = read_news(instance, context, looked.confirmed)
    surveyed = stages.survey(context, looked)
    request = build_request(instance, context, looked, surveyed, keys, config, news, warn=warn)
    planned = stages.plan(context, looked, surveyed, request)
    if planned.decision == "none":
        return Detection(surveyed, planned, None)
    context.log(planned.sentence())
    detected = stages.detect(context, looked, surveyed, planned, request, ident=ident)
    if detected.change_set is None and looked.confirmed is not None and news.unused:
        # Only now: after a crash before this line they are read again.
        context.change_sets.remember_looked_at(looked.confirmed.version, news.unused)
    return Detection(surveyed, detected.plan, detected.change_set)


def read_news(instance: dg.DagsterInstance, context: "RefreshContext", confirmed: Confirmation | None) -> News:
    """Read the reports since the confirmed version."""
    from tir_dagster.changes.relation import read_tables
    from tir_dagster.orchestration.sensing.reported import report_stamps
    from tir_dagster.snowflake.versions import SourceVersion

    spec = context.spec
    since = SourceVersion.parse(confirmed.source_version).moment if confirmed else datetime.now(UTC) - CLOCKS
    stamps = report_stamps(instance, read_tables(spec), since=since)
    stamps |= materialization_stamps(instance, spec, since=since)
    used = frozenset[int]()
    if confirmed is not None:
        used = frozenset(context.change_sets.looked_at(confirmed.version).union(confirmed.reports))
    return News(since, stamps, frozenset(stamps) - used if confirmed is not None else frozenset())


def build_request(
    instance: dg.DagsterInstance,
    context: "RefreshContext",
    looked: "Looked",
    surveyed: "Survey",
    keys: ExtractKeys,
    config: DetectionConfig,
    news: News,
    *,
    warn: Warn,
) -> "Request":
    """Combine the run's config, the reports, and the drift that checks found."""
    from tir_dagster.changes.hints import ChangeType, Hint, Unknown, parse_hints
    from tir_dagster.changes.question import checked_hints
    from tir_dagster.refresh import stages

    spec, confirmed = context.spec, looked.confirmed
    relations = list(surveyed.relations.values())
    run_hints = [hint for text in config.hints for hint in parse_hints(text, "the run's hints")]
    hints: list[Hint] = []
    for relation in relations:
        mine = [hint for hint in run_hints if len(relations) == 1 or hint.table in relation.tables]
        hints += checked_hints(mine, relation, context.snowflake)
    if strange := [hint for hint in run_hints if all(hint.table not in relation.tables for relation in relations)]:
        # The error names the tables that are read.
        checked_hints(strange, surveyed.relation, context.snowflake)
    request = stages.Request(
        mode=config.mode,  # type: ignore[arg-type]
        slices=tuple(config.slices),
        hints=tuple(hints),
        origin=_described(hints),
        hinted=bool(hints),
        reports=news.shown_at(surveyed.version),
        allow_empty=config.allow_empty,
    )
    if confirmed is None:
        return request
    # Read after the version is pinned: what came meanwhile is compared now, and again in the next refresh.
    used = context.change_sets.looked_at(confirmed.version).union(confirmed.reports)
    upstream = upstream_changes(instance, spec, since=news.since, used=used)
    for name in upstream.unclear:
        context.log(f"{name} was materialized, but its slices are unknown: every row is compared")
    if upstream.unclear:
        hints += [Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()) for relation in relations]
    elif upstream.slices:
        # They are slices of the main table: which rows of the others came with them is unknown.
        others = (relation for relation in relations[1:] if relation.spec.changes.by == "hint")
        hints += [Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()) for relation in others]
    for relation in relations:
        hints += _reported(instance, context, relation, news, warn)
    drift = known_drift(instance, keys, confirmed)
    due_reason = Reason.DRIFT_UNREPAIRED if drift and drift.unrepaired else None
    drifted = drift.slices if drift else ()
    return replace(
        request,
        hints=tuple(hints),
        origin=(*_described(hints), *announcements(instance, spec, since=news.since, used=used)),
        hinted=bool(config.hints or news.unused or drifted or due_reason or (drift and drift.others)),
        resync=_resync(spec, looked, config, drifted),
        resync_in=drift.others if drift else {},
        compare=upstream.slices,
        due_reason=due_reason,
    )


def _described(hints: "Sequence[Hint]") -> tuple[str, ...]:
    """Name the hints without the values of their scopes: these are people's data."""
    return tuple(dict.fromkeys(f"a hint of {hint.type.value} on {hint.table}" for hint in hints))


def _reported(
    instance: dg.DagsterInstance, context: "RefreshContext", relation: "Relation", news: News, warn: Warn
) -> "Sequence[Hint]":
    from tir_dagster.orchestration.sensing.reported import reported_hints

    if not news.unused:
        return ()
    hints, warnings = reported_hints(instance, relation, context.snowflake, since=news.since, numbers=news.unused)
    for warning in warnings:
        warn(warning)
    return hints


def _resync(
    spec: ExtractSpec, looked: "Looked", config: DetectionConfig, drifted: Sequence[str | None]
) -> tuple[str | None, ...]:
    """Return the slices to replace unconditionally: those of the run with the rest, and those that drifted."""
    chosen = list(drifted)
    if config.mode == "slices" and looked.base is not None:
        present = counts_from_json(looked.base.manifest["slice_rows"])
        chosen += [*config.slices, *rest_of(spec, config.slices, [None, *present])]
    return tuple(dict.fromkeys(chosen))
