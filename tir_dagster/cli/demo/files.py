"""First part of the demo: a file lands in the bucket, and sensors bring it to the published datasource.

Dagster's daemon evaluates these sensors every 30 seconds. Here they are evaluated at once, one after the other, and the runs
that they request execute in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import boto3
import dagster as dg

from tir_dagster.cli.jobs import JobRunner
from tir_dagster.errors import TirError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.names import load_keys
from tir_dagster.retries import looks
from tir_dagster.sandbox.home import S3_BUCKET
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

WAIT_SECONDS = 120.0
LOADS = """\
loads:
  - name: order_files
    table: MYDB.MYSCHEMA.MYTABLE
    files: {{path: "s3://landing/orders", format: csv}}
    mode: merge
    key: ORDER_ID
    order_by: UPDATED_AT
    delete_flag: OP
    columns: {{ORDER_ID: NUMBER, ORDER_DATE: DATE, CUSTOMER: VARCHAR, QUANTITY: NUMBER, UPDATED_AT: TIMESTAMP_NTZ}}
"""

Say = Callable[[str], None]


class SensorRunner:
    """Evaluates sensors as Dagster's daemon does: keeps cursors, stores events, executes requested runs."""

    def __init__(
        self,
        extracts: Sequence[ExtractSpec],
        loads: Sequence[LoadSpec],
        instance: dg.DagsterInstance,
        progress: Say = lambda _: None,
    ) -> None:
        self._jobs = JobRunner(instance, progress, extracts=extracts, loads=loads)
        self.defs = self._jobs.definitions
        self.instance = instance
        self.cursors: dict[str, str | None] = {}

    def tick(self, name: str) -> str:
        """Evaluate the sensor once and run its requests; return its skip reason, or an empty text if it requested something."""
        sensor: Any = self.defs.resolve_sensor_def(name)
        resources = {key: (self.defs.resources or {})[key] for key in sensor.required_resource_keys}
        context = dg.build_sensor_context(self.instance, cursor=self.cursors.get(name), resources=resources)
        # Not evaluate_tick: it cannot resolve a partition that is added in the same tick; the daemon can.
        result = sensor(context)
        if isinstance(result, dg.SkipReason):
            return str(result.skip_message)
        if isinstance(result, dg.RunRequest):
            result = dg.SensorResult(run_requests=[result])
        self.cursors[name] = result.cursor or self.cursors.get(name)
        self._keep(result)
        for request in result.run_requests or ():
            options = {"tags": dict(request.tags), "partition_key": request.partition_key}
            self._jobs.run(str(sensor.job_name), config=request.run_config, **options)
        return str(result.skip_reason.skip_message) if result.skip_reason else ""

    def until_it_asks(self, name: str) -> None:
        """Evaluate the sensor until it requests something; it may wait for a quiet source, for example."""
        reason = ""
        for _ in looks(WAIT_SECONDS, pause=lambda _: 0.2):
            reason = self.tick(name)
            if not reason:
                return
        raise TirError(f"The sensor {name} still waits: {reason}. Look at its ticks in Dagster's UI.")

    def _keep(self, result: dg.SensorResult) -> None:
        for event in result.asset_events or ():
            self.instance.report_runless_asset_event(event)
        for request in result.dynamic_partitions_requests or ():
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)


def last_metadata(instance: dg.DagsterInstance, asset: dg.AssetKey) -> dict[str, Any]:
    """Return the metadata of the asset's last materialization; there must be one."""
    event = instance.fetch_materializations(asset, limit=1).records[0].asset_materialization
    assert event is not None, "a run just materialized it"
    return {name: entry.value for name, entry in event.metadata.items()}


def play_files(
    spec: ExtractSpec, load: LoadSpec, access: SnowflakeAccess, env: Mapping[str, str], *, say: Say, progress: Say
) -> None:
    """Land a file and let three sensors do the rest; print each step with the time since the file landed."""
    begun = time.monotonic()

    def tell(line: str) -> None:
        say(f"   {time.monotonic() - begun:6.1f} s  {line}")

    name = _land(access, env)
    tell(f"{name} lands in the bucket")
    with dagster_instance() as instance:
        daemon = SensorRunner([spec], [load], instance, progress)
        daemon.until_it_asks(f"{load.name}_arrival")
        loaded = last_metadata(instance, load_keys(load).source_table)
        inserted, updated, deleted = (loaded[f"tir/rows_{what}"] for what in ("inserted", "updated", "deleted"))
        rows = f"{inserted} rows inserted, {updated} updated, {deleted} deleted"
        tell(f"{load.name}_arrival saw it; loaded into {load.table}: {rows}")
        daemon.until_it_asks(f"{spec.name}_source")
        tell(f"{spec.name}_source saw the change; its keys came with the load")
        daemon.until_it_asks(f"{spec.name}_refresh")
        tell(f"{spec.name}_refresh published {spec.datasource.name}")


def _land(access: SnowflakeAccess, env: Mapping[str, str]) -> str:
    """Put a file with new, changed and deleted orders into the bucket; return its address and row count."""
    ids = [int(row[0]) for row in access.query("SELECT ORDER_ID FROM MYDB.MYSCHEMA.MYTABLE ORDER BY ORDER_ID LIMIT 60")]
    ((highest, stamp),) = access.query(
        "SELECT MAX(ORDER_ID), DATEADD('second', 1, MAX(UPDATED_AT)) FROM MYDB.MYSCHEMA.MYTABLE"
    )
    day = f"{stamp:%Y-%m}-01"
    rows = [f"{int(highest) + at},{day},From a file,1,{stamp}," for at in range(1, 41)]
    rows += [f"{order_id},{day},Changed by a file,2,{stamp}," for order_id in ids[:40]]
    rows += [f"{order_id},,,,{stamp},D" for order_id in ids[40:]]
    text = "\n".join(["ORDER_ID,ORDER_DATE,CUSTOMER,QUANTITY,UPDATED_AT,OP", *rows, ""])
    # A unique name: a demo that runs again sends the same rows.
    key = f"orders/{datetime.now(UTC):%Y%m%dT%H%M%S}.csv"
    client = boto3.Session().client("s3", endpoint_url=env["AWS_ENDPOINT_URL_S3"])
    client.put_object(Bucket=S3_BUCKET, Key=key, Body=text.encode())
    return f"s3://{S3_BUCKET}/{key} ({len(rows)} rows)"
