"""Jobs and sensors of the extract `orders`, run in this process."""

from __future__ import annotations

import time
from dataclasses import replace

import dagster as dg

from tir_dagster.orchestration.resources import environment_resources
from tir_dagster.orchestration.sensing.sensors import Watch

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def run(defs, instance, job: str, *, config=None, **options) -> dg.ExecuteInProcessResult:
    return defs.resolve_job_def(job).execute_in_process(
        instance=instance, run_config={**QUIET, **(config or {})}, **options
    )


def events(result, asset: str) -> dict[str | None, dict]:
    materializations = result.asset_materializations_for_node(f"orders__{asset}")
    return {
        event.partition: {name: getattr(entry, "value", entry) for name, entry in event.metadata.items()}
        for event in materializations
    }


def source_tick(defs, instance, cursor: str | None):
    sensor = defs.get_repository_def().get_sensor_def("orders_source")
    resources = {name: environment_resources()[name] for name in ("snowflake", "state")}
    return sensor(dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources))


def refresh_tick(defs, instance):
    repository = defs.get_repository_def()
    resources = {name: environment_resources()[name] for name in ("tableau", "state")}
    context = dg.build_sensor_context(instance=instance, repository_def=repository, resources=resources)
    return repository.get_sensor_def("orders_refresh").evaluate_tick(context)


def detect(defs, instance):
    """The source sensor until it asks, and the detection it asked for."""
    quiet = replace(Watch.parse(source_tick(defs, instance, None).cursor), since=time.time() - 60)
    asked = source_tick(defs, instance, quiet.to_cursor())
    (request,) = asked.run_requests
    instance.add_dynamic_partitions("orders_change_sets", [request.partition_key])
    result = run(defs, instance, "orders_detect", partition_key=request.partition_key, tags=request.tags)
    return asked, request, result
