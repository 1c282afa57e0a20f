"""All definitions: every declared extract and load, with resources by environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from tir_dagster.orchestration.alerts.runs import with_recipients
from tir_dagster.orchestration.alerts.sensor import build_alert_sensor
from tir_dagster.orchestration.extracts import build_extract_defs
from tir_dagster.orchestration.loads import build_load_defs
from tir_dagster.orchestration.names import load_keys
from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.translation import ExtractTranslator
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
