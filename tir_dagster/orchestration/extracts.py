"""From a spec to Dagster definitions: assets, jobs and sensors of one extract. No resources: they are the project's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import dagster as dg

from tir_dagster.orchestration.alerting import build_alert_sensor
from tir_dagster.orchestration.assets import build_assets
from tir_dagster.orchestration.names import detect_job_name, extract_keys, refresh_job_name
from tir_dagster.orchestration.partitions import change_set_partitions, slice_partitions
from tir_dagster.orchestration.sensors import build_sensors
from tir_dagster.orchestration.trigger import build_trigger_defs
from tir_dagster.spec import ExtractSpec


def build_extract_defs(
    spec: ExtractSpec, *, alerts: bool = True, filled_by: Sequence[dg.AssetKey] = ()
) -> dg.Definitions:
    """The definitions of one extract; merge them with a project's own, and with resources by environment.

    Without `alerts` the project has one sensor for all its extracts: `build_alert_sensor(specs)`. `filled_by` are the assets
    after which its source is there: those of loads.
    """
    made = _extract_defs(spec, filled_by)
    if not alerts or spec.alerts is None:
        return made
    return dg.Definitions.merge(made, dg.Definitions(sensors=[build_alert_sensor([spec], f"{spec.name}_alerts")]))


def _extract_defs(spec: ExtractSpec, filled_by: Sequence[dg.AssetKey]) -> dg.Definitions:
    # Dagster calls backfill policies beta in every process that loads them; users can do nothing about it.
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    if spec.delivery == "trigger":
        return build_trigger_defs(spec, filled_by=filled_by)
    keys = extract_keys(spec)
    # In process: a JVM and ten seconds of imports per step would cost more than most refreshes.
    detect = dg.define_asset_job(
        detect_job_name(spec),
        selection=[keys.changed_keys],
        partitions_def=change_set_partitions(spec),
        executor_def=dg.in_process_executor,
        description=f"Find what changed in {spec.source} and stage it as a change set.",
    )
    refresh = dg.define_asset_job(
        refresh_job_name(spec),
        selection=[keys.purged_extract, keys.published_datasource],
        partitions_def=slice_partitions(spec.slices),
        executor_def=dg.in_process_executor,
        description=f"Apply the newest change set and publish {spec.datasource.name!r}.",
    )
    return dg.Definitions(
        assets=build_assets(spec, filled_by=filled_by),
        jobs=[detect, refresh],
        sensors=build_sensors(spec, detect, refresh),
    )
