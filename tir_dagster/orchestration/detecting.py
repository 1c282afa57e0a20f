"""A detection inside a run: from what was prepared to a change set, or to the sentence why there is none.

No postponed annotations here: Dagster reads the types of the config.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from tir_dagster.changes.change_set import ChangeSet, counts_from_json
from tir_dagster.orchestration.partitions import rest_of

if TYPE_CHECKING:
    from tir_dagster.changes.hints import Hint
    from tir_dagster.refresh.flow import Refresher
    from tir_dagster.refresh.steps import Prepared


class Detection(dg.Config):
    """How to look for changes; `slices` are re-synced whatever the watermark says; `hints` are JSON texts."""

    mode: str = "changes"
    slices: list[str] = Field(default_factory=list)
    allow_empty: bool = False
    hints: list[str] = Field(default_factory=list)


def detect(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    refresher: "Refresher",
    prepared: "Prepared",
    config: Detection,
    ident: str,
) -> tuple[ChangeSet | None, str]:
    """The change set, if anything differs, and the plan's sentence."""
    looked, surveyed = prepared.looked, prepared.surveyed
    plan = refresher.plan(
        looked,
        surveyed,
        config.mode,  # type: ignore[arg-type]
        config.slices,
        hinted=bool(config.hints or prepared.hinted),
        owed=prepared.owed,
    )
    if plan.decision == "none":
        return None, plan.sentence()
    plan, change_set = refresher.detect(
        looked,
        surveyed,
        plan,
        ident=ident,
        resync=_resync(refresher, prepared, config),
        compare=prepared.compare,
        allow_empty=config.allow_empty,
        hints=_hints(context, refresher, prepared, config.hints),
        reports=prepared.shown_reports,
    )
    if change_set is None and looked.confirmed is not None and prepared.reports:
        # Not before: a crash until here lets them be looked at again.
        refresher.change_sets.remember_looked_at(looked.confirmed.version, prepared.reports)
    return change_set, plan.sentence()


def _resync(refresher: "Refresher", prepared: "Prepared", config: Detection) -> list[str | None]:
    """The slices that are replaced whatever their rows say: those of the run with the rest, and those that drifted."""
    base, chosen = prepared.looked.base, list(prepared.drifted)
    if config.mode == "slices" and base is not None:
        present = counts_from_json(base.manifest["slice_rows"])
        chosen += [*config.slices, *rest_of(refresher.spec, config.slices, [None, *present])]
    return list(dict.fromkeys(chosen))


def _hints(
    context: dg.OpExecutionContext | dg.AssetExecutionContext,
    refresher: "Refresher",
    prepared: "Prepared",
    given: Sequence[str],
) -> tuple["Hint", ...]:
    """Those of the run, and those that were reported and not yet used."""
    from tir_dagster.changes.hints import ChangeType, Hint, Unknown, parse_hints  # noqa: PLC0415
    from tir_dagster.orchestration.reported import reported_hints  # noqa: PLC0415
    from tir_dagster.snowflake.versions import SourceVersion  # noqa: PLC0415

    hints = [hint for text in given for hint in parse_hints(text, "the run's hints")]
    confirmed, relation = prepared.looked.confirmed, prepared.surveyed.relation
    if confirmed is None:
        return tuple(hints)
    if prepared.anything:
        hints.append(Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()))
    since = SourceVersion.parse(confirmed.source_version).moment
    reported, warnings = reported_hints(
        context.instance, relation, refresher.snowflake, since=since, numbers=prepared.reports
    )
    for warning in warnings:
        context.log.warning(warning)
    return (*hints, *reported)
