"""Reports about finished loads, and whom they go to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from tir_dagster.alerts.events import Failure, Success
from tir_dagster.orchestration.alerts.run_reports import (
    cause_of,
    failed_steps,
    materialized,
    run_ending,
    run_url,
    seconds_of,
    snowflake_scope,
)
from tir_dagster.orchestration.names import load_keys
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.alerts import Cause, OthersAlerts
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

UNAFFECTED = "a load is one transaction: the table has all of it or nothing"


def with_people(load: LoadSpec, extracts: Sequence[ExtractSpec]) -> LoadSpec:
    """Return the load with alerts: its own, or those of the first extract that reads its table.

    The people of the extract get only failures and recoveries: a successful load shows in their extract.
    """
    if load.alerts is not None:
        return load
    from tir_dagster.changes.relation import watched_tables

    table = TableName.parse(load.table)
    alerts = next((extract.alerts for extract in extracts if extract.alerts and table in watched_tables(extract)), None)
    return replace(load, alerts=OthersAlerts(**vars(alerts)) if alerts else None)


def load_failure(
    load: LoadSpec,
    *,
    ident: str,
    names: Sequence[str],
    sentence: str,
    at: float,
    step: str = "",
    run_id: str = "",
) -> Failure:
    down = cause_of(names) is Cause.WAREHOUSE_DOWN
    return Failure(
        id=ident,
        extract=load.name,
        cause=Cause.WAREHOUSE_DOWN if down else Cause.LOAD_FAILED,
        sentence=sentence,
        at=at,
        step=step,
        scope=snowflake_scope(os.environ) if down else "",
        run_id=run_id,
        run_url=run_url(run_id, os.environ),
        datasource=load.table,
        unaffected=UNAFFECTED,
        topic="load",
    )


def load_failure_of_run(instance: dg.DagsterInstance, load: LoadSpec, record: dg.RunRecord) -> Failure | None:
    """Return the load's failure; None if only other steps of the run failed."""
    run_id, steps = record.dagster_run.run_id, failed_steps(instance, record.dagster_run.run_id)
    own = [ending for ending in steps if ending[0] == load_keys(load).source_table.to_python_identifier()]
    for step, names, sentence in own or ([] if steps else run_ending(instance, run_id)):
        return load_failure(
            load,
            ident=f"{run_id}/{load.name}",
            names=names,
            sentence=sentence,
            at=record.end_time or record.update_timestamp.timestamp(),
            step=step.replace("__", " / "),
            run_id=run_id,
        )
    return None


def load_success_of_run(instance: dg.DagsterInstance, load: LoadSpec, record: dg.RunRecord) -> Success:
    run_id = record.dagster_run.run_id
    metadata = materialized(instance, run_id).get(load_keys(load).source_table)
    return Success(
        id=f"{run_id}/{load.name}",
        extract=load.name,
        at=record.end_time or record.update_timestamp.timestamp(),
        datasource=load.table,
        run_id=run_id,
        run_url=run_url(run_id, os.environ),
        published=metadata is not None,
        decision="load" if metadata else "none",
        seconds=seconds_of(record),
        of="load",
        facts=_facts(metadata or {}),
        # Every load reads the list of loads, so Snowflake answered.
        scopes=(snowflake_scope(os.environ),),
    )


def _facts(metadata: Mapping[str, Any]) -> dict[str, str]:
    rows = [
        f"{int(metadata[name]):,} {what}"
        for name, what in (
            ("tir/rows_inserted", "inserted"),
            ("tir/rows_updated", "updated"),
            ("tir/rows_deleted", "deleted"),
            ("tir/rows_rejected", "rejected"),
        )
        if metadata.get(name)
    ]
    files = metadata.get("tir/files")
    return {
        **({"Files": str(len(files))} if isinstance(files, list) else {}),
        **({"Rows": ", ".join(rows)} if rows else {}),
    }
