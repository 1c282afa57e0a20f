"""The verification job, and the schedules of verification and full refresh."""

from __future__ import annotations

from typing import Any

import dagster as dg

from tir_dagster.orchestration.checks import gate_specs
from tir_dagster.orchestration.names import ExtractKeys, full_config, verify_job_name
from tir_dagster.orchestration.partitions import add_slices, covering_range
from tir_dagster.spec.extract import ExtractSpec


def refresh_selection(spec: ExtractSpec, keys: ExtractKeys) -> dg.AssetSelection:
    """Return the assets of a refresh with its own checks, without the verification, which reads everything."""
    gate = [dg.AssetCheckKey(keys.purged_extract, check.name) for check in gate_specs(spec, keys.purged_extract)]
    assets = dg.AssetSelection.assets(keys.purged_extract, keys.published_datasource).without_checks()
    return assets | dg.AssetSelection.checks(*gate)


def verify_job(spec: ExtractSpec, keys: ExtractKeys) -> Any:
    return dg.define_asset_job(
        verify_job_name(spec),
        selection=dg.AssetSelection.checks_for_assets(keys.published_datasource),
        executor_def=dg.in_process_executor,
        description=f"Compare all of {spec.datasource.name!r} with its source, at the version that it shows.",
    )


def build_schedules(
    spec: ExtractSpec, keys: ExtractKeys, *, refresh: Any, verify: Any | None
) -> list[dg.ScheduleDefinition]:
    """Build the schedules of the spec; they are on by default."""
    schedules = []
    if spec.schedules.verify and verify is not None:
        schedules.append(_verify_schedule(spec, spec.schedules.verify, verify))
    if spec.schedules.full_refresh:
        schedules.append(_full_schedule(spec, keys, spec.schedules.full_refresh, refresh))
    return schedules


def _verify_schedule(spec: ExtractSpec, cron: str, job: Any) -> dg.ScheduleDefinition:
    return dg.ScheduleDefinition(
        name=f"{spec.name}_verify",
        job=job,
        cron_schedule=cron,
        execution_timezone=spec.slices.zone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compares the whole published extract with its source; a difference is a failed check.",
    )


def _full_schedule(spec: ExtractSpec, keys: ExtractKeys, cron: str, job: Any) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=f"{spec.name}_full_refresh",
        job=job,
        cron_schedule=cron,
        execution_timezone=spec.slices.zone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Loads everything again, whether or not it changed: one run, one publish.",
    )
    def full_refresh(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        # On the newest slice: a run must name one, and a full refresh loads all of them.
        known = add_slices(context.instance, spec, []) if spec.slices.by == "value" else []
        return dg.RunRequest(tags=covering_range(spec, [], known), run_config=full_config(spec, keys))

    return full_refresh
