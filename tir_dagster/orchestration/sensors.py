"""Sensors: the source changed and is quiet → detection; a change set is ready → refresh. Pure decisions, thin edges."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import dagster as dg
from dagster_snowflake import SnowflakeResource

from tir_dagster.changes.changesets import new_id
from tir_dagster.errors import TirError
from tir_dagster.orchestration.assets import ExtractKeys, extract_keys
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.partitions import change_set_partitions, covering_range
from tir_dagster.orchestration.resources import snowflake_access
from tir_dagster.spec import ExtractSpec

INTERVAL_SECONDS = 30


@dataclass(frozen=True)
class Watch:
    """What the sensor remembers: the token it saw, since when it has been the same, and what it asked for."""

    token: str | None = None
    since: float = 0.0
    requested: str | None = None

    @staticmethod
    def parse(cursor: str | None) -> "Watch":
        try:
            return Watch(**json.loads(cursor or "{}"))
        except (ValueError, TypeError):
            return Watch()

    def to_cursor(self) -> str:
        return json.dumps(asdict(self))


def watch_source(before: Watch, *, token: str, confirmed: str | None, now: float, quiet: float) -> tuple[Watch, str]:
    """What to remember, and why nothing is asked for; an empty reason means: start a detection."""
    since = before.since if before.token == token else now
    seen = Watch(token, since, before.requested)
    if token == confirmed:
        return seen, "the source has not changed since the last confirmation"
    if token == before.requested:
        return seen, "a detection was already asked for this change"
    if now - since < quiet:
        return seen, f"the source changed and has been quiet for {now - since:.0f} of {quiet:.0f} seconds"
    return Watch(token, since, token), ""


def build_sensors(spec: ExtractSpec, detect_job: Any, refresh_job: Any) -> list[Any]:
    keys = extract_keys(spec)
    return [_source_sensor(spec, keys, detect_job), _refresh_sensor(spec, keys, refresh_job)]


def _source_sensor(spec: ExtractSpec, keys: ExtractKeys, detect_job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_source",
        job=detect_job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        description=f"Probes {spec.source} by one cheap query; starts a detection when it changed and has been quiet.",
    )
    def source_sensor(context: dg.SensorEvaluationContext, snowflake: SnowflakeResource) -> Any:
        from tir_dagster.source.names import TableName  # noqa: PLC0415
        from tir_dagster.source.versions import probe  # noqa: PLC0415

        table = TableName.parse(spec.source)
        try:
            found = probe(snowflake_access(snowflake), [table])[table]
        except TirError as error:
            return dg.SkipReason(f"the source could not be read: {error}")
        if found.token is None:
            return dg.SkipReason(f"the source could not be read: {found.problem}")
        confirmed = last_confirmation(context.instance, keys.published_datasource)
        seen, waiting = watch_source(
            Watch.parse(context.cursor),
            token=found.token,
            confirmed=confirmed.known.token if confirmed else None,
            now=time.time(),
            quiet=spec.thresholds.quiet_period,
        )
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=seen.to_cursor())
        ident = new_id()
        observed = dg.AssetObservation(keys.source_table, metadata={"tir/token": found.token})
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=f"{spec.name}-{found.token}", partition_key=ident)],
            dynamic_partitions_requests=[change_set_partitions(spec).build_add_request([ident])],
            asset_events=[observed],
            cursor=seen.to_cursor(),
        )

    return source_sensor


def _refresh_sensor(spec: ExtractSpec, keys: ExtractKeys, refresh_job: Any) -> dg.SensorDefinition:
    @dg.asset_sensor(
        name=f"{spec.name}_refresh",
        asset_key=keys.changed_keys,
        job=refresh_job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        description="Starts the refresh of the touched slices when a change set is ready: one run, one publish.",
    )
    def refresh_sensor(context: dg.SensorEvaluationContext, asset_event: dg.EventLogEntry) -> Any:
        del context
        materialization = asset_event.asset_materialization
        if materialization is None or materialization.partition is None:
            return dg.SkipReason("an event without a change set")
        entry = materialization.metadata.get("tir/touched")
        touched = getattr(entry, "value", None) or []
        return dg.RunRequest(
            run_key=materialization.partition,
            tags=covering_range(spec, touched),
            run_config=application_config(keys, materialization.partition),
        )

    return refresh_sensor


def application_config(keys: ExtractKeys, change_set: str) -> dict[str, Any]:
    return {"ops": {keys.purged_extract.to_python_identifier(): {"config": {"change_set": change_set}}}}
