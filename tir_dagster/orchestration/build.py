"""Dagster definitions, built from specs: of one extract (assets, checks, jobs, sensors, schedules), and of all declared ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import dagster as dg
from dagster_shared.libraries import DagsterLibraryRegistry

from tir_dagster.orchestration.alerts.runs import with_recipients
from tir_dagster.orchestration.alerts.sensor import build_alert_sensor
from tir_dagster.orchestration.assets import build_assets, build_detect_job, context_for
from tir_dagster.orchestration.checks import build_verification
from tir_dagster.orchestration.jobs import build_rollback_job, build_schedules, refresh_selection, verify_job
from tir_dagster.orchestration.loads import build_load_defs
from tir_dagster.orchestration.names import load_keys, refresh_job_name, refresh_now_job_name
from tir_dagster.orchestration.partitions import extract_partitions, warn_of_many_slices
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import build_sensors
from tir_dagster.orchestration.translation import ExtractAssets, ExtractTranslator, extract_assets
from tir_dagster.orchestration.trigger import build_trigger_defs
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec
from tir_dagster.spec.reading import load_declared


def build_defs(
    *,
    specs: Sequence[ExtractSpec] | None = None,
    loads: Sequence[LoadSpec] | None = None,
    resource_overrides: Mapping[str, Any] | None = None,
    translator: ExtractTranslator | None = None,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
) -> dg.Definitions:
    """Build definitions of all declared extracts and loads (default: those of TIR_SPECS), with resources by environment."""
    if specs is None and loads is None:
        declared = load_declared()
        specs, loads = declared.extracts, declared.loads
    # In process, also for runs that select assets without a job: a separate process per step would start one JVM each.
    common = dg.Definitions(
        resources={**environment_resources(), **(resource_overrides or {})},
        executor=dg.in_process_executor,
        loggers=loggers,
    )
    loads = [with_recipients(load, specs or ()) for load in loads or ()]
    has_alerts = any(spec.alerts for spec in specs or ()) or any(load.alerts for load in loads)
    alert_sensors = [build_alert_sensor(tuple(specs or ()), loads=loads)] if has_alerts else []
    extracts = [_after_loads(spec, loads, translator) for spec in specs or ()]
    return dg.Definitions.merge(
        common, dg.Definitions(sensors=alert_sensors), *extracts, *(build_load_defs(load) for load in loads)
    )


def _after_loads(spec: ExtractSpec, loads: Sequence[LoadSpec], translator: ExtractTranslator | None) -> dg.Definitions:
    """Build the extract's definitions; its source depends on the loads that fill the tables it reads."""
    if not loads:
        return build_extract_defs(spec, alerts=False, translator=translator)
    from tir_dagster.changes.relation import watched_tables

    tables = set(watched_tables(spec))
    load_assets = [load_keys(load).source_table for load in loads if TableName.parse(load.table) in tables]
    return build_extract_defs(spec, alerts=False, translator=translator, filled_by=load_assets)


# Dagster shows which libraries made the definitions. Registered here, because `import tir_dagster` does not import Dagster.
DagsterLibraryRegistry.register("tir_dagster", version("tir_dagster"), is_dagster_package=False)


def build_extract_defs(
    spec: ExtractSpec,
    *,
    translator: ExtractTranslator | None = None,
    alerts: bool = True,
    filled_by: Sequence[dg.AssetKey] = (),
) -> dg.Definitions:
    """Build the definitions of one extract; merge them with your own and with `environment_resources()`.

    A translator changes how the assets look: keys, groups, owners, tags, descriptions. Pass `alerts=False` if the project has
    one sensor for all its extracts: `build_alert_sensor(specs)`. `filled_by` are the assets of loads that fill the source.
    """
    defs = _extract_defs(extract_assets(spec, translator, filled_by))
    if not alerts or spec.alerts is None:
        return defs
    return dg.Definitions.merge(defs, dg.Definitions(sensors=[build_alert_sensor([spec], f"{spec.name}_alerts")]))


def _extract_defs(assets: ExtractAssets) -> dg.Definitions:
    spec = assets.spec
    # Dagster warns in every process that backfill policies are beta; users can do nothing about it.
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    warn_of_many_slices(spec)
    if spec.delivery == "trigger":
        return build_trigger_defs(assets)
    keys = assets.keys
    # In process: a JVM and ten seconds of imports per step would cost more than most refreshes.
    detect = build_detect_job(assets)
    refresh = dg.define_asset_job(
        refresh_job_name(spec),
        selection=refresh_selection(spec, keys),
        partitions_def=extract_partitions(spec),
        executor_def=dg.in_process_executor,
        description=f"Apply the newest change set and publish {spec.datasource.name!r}.",
    )
    refresh_now = dg.define_asset_job(
        refresh_now_job_name(spec),
        selection=dg.AssetSelection.assets(keys.published_datasource).without_checks(),
        executor_def=dg.in_process_executor,
        description=f"Refresh {spec.datasource.name!r} now: find what changed, replace it, publish. Asks for no slices.",
    )
    verify = verify_job(spec, keys)
    return dg.Definitions(
        assets=build_assets(assets),
        asset_checks=[build_verification(spec, keys, context_for)],
        jobs=[refresh_now, detect, refresh, verify, build_rollback_job(assets)],
        sensors=build_sensors(spec, keys, detect, refresh),
        schedules=build_schedules(spec, keys, refresh=refresh, verify=verify),
    )
