"""The jobs beside detection and refresh: verification and rollback; and the schedules.

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

from typing import Any

import dagster as dg

from tir_dagster.errors import EQUALS_SOURCE
from tir_dagster.orchestration import metadata
from tir_dagster.orchestration.assets import LEASE_WAIT_SECONDS, Events, context_for
from tir_dagster.orchestration.checks import evaluation, finding_result, gate_specs, verified_finding
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import ExtractKeys, full_config, pool_name, rollback_job_name, verify_job_name
from tir_dagster.orchestration.partitions import add_slices, covering_range
from tir_dagster.orchestration.resources import SnowflakeParam, SparkParam, TableauResource
from tir_dagster.orchestration.translation import ExtractAssets
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
        execution_timezone=spec.main.slices.zone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compares the whole published extract with its source; a difference is a failed check.",
    )


def _full_schedule(spec: ExtractSpec, keys: ExtractKeys, cron: str, job: Any) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=f"{spec.name}_full_refresh",
        job=job,
        cron_schedule=cron,
        execution_timezone=spec.main.slices.zone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Loads everything again, whether or not it changed: one run, one publish.",
    )
    def full_refresh(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        # On the newest slice: a run must name one, and a full refresh loads all of them.
        known = add_slices(context.instance, spec, []) if spec.main.slices.by == "value" else []
        return dg.RunRequest(tags=covering_range(spec, [], known), run_config=full_config(spec, keys))

    return full_refresh


class RollbackConfig(dg.Config):
    """The version to go back to, such as v00000012; `hold` is the reason why refreshes must not undo it."""

    to: str
    hold: str = ""
    by: str = "Dagster"


def build_rollback_job(assets: ExtractAssets) -> dg.JobDefinition:
    """Build the job; `tir rollback` runs it, and people can launch it in the UI."""
    spec, keys = assets.spec, assets.keys

    @dg.op(name=f"{spec.name}_roll_back", out={}, pool=pool_name(spec))
    def roll_back(
        context: dg.OpExecutionContext,
        config: RollbackConfig,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        extract = context_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        from tir_dagster.refresh import rollback, stages

        with stages.leased(extract, f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS) as refresh:
            looked = stages.look(refresh, last_confirmation(context.instance, keys.published_datasource))
            for warning in looked.warnings:
                context.log.warning(warning)
            if looked.late is not None:
                yield from metadata.late_events(looked.late, keys)
                stages.settle(refresh, looked.late)
            planned = rollback.plan_rollback(refresh, looked, config.to)
            context.log.info("publishing %s", planned.sentence)
            # First: a sensor must not start a refresh between the publish and the hold.
            with rollback.held(refresh, by=config.by, reason=config.hold):
                version = rollback.make_version(refresh, looked, planned)
                published = rollback.publish_again(refresh, looked, version)
            for warning in published.warnings:
                context.log.warning(warning)
            on_hold = f" On hold until tir release {spec.name}: {config.hold}." if config.hold else ""
            yield dg.AssetMaterialization(
                keys.published_datasource,
                description=f"Rolled back: {planned.sentence}.",
                metadata={
                    metadata.PLAN: f"{spec.name}: rolled back to {planned.sentence}.{on_hold}",
                    "tir/decision": "rollback",
                    "tir/rolled_back_to": planned.target.id,
                    **metadata.confirmation_metadata(
                        published.confirmation,
                        version=version,
                        stages=refresh.stages.seconds,
                        sent_bytes=published.sent_bytes,
                        uri=published.datasource.webpage_url or "",
                        warnings=[*looked.warnings, *published.warnings],
                    ),
                },
            )
            stages.settle(refresh, published.confirmation)
            # Nothing was compared on the way: an old version may be one that is known to be wrong.
            finding = verified_finding(refresh, published.confirmation)
            context.log.info(finding.sentence)
            result = finding_result(EQUALS_SOURCE, finding, published.confirmation.version)
            yield evaluation(result, keys.published_datasource)

    @dg.graph(name=rollback_job_name(spec))
    def rolling_back() -> None:
        roll_back()

    return rolling_back.to_job(
        executor_def=dg.in_process_executor,
        description=f"Publish an earlier version of {spec.datasource.name!r} again. Takes the version in its config.",
    )
