"""Assets, job and sensor of an extract that Tableau refreshes itself (delivery `trigger`).

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

from typing import TYPE_CHECKING, Any, cast

import dagster as dg

from tir_dagster.orchestration import metadata
from tir_dagster.orchestration.assets import LEASE_WAIT_SECONDS, Events
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.jobs import build_schedules
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import pool_name, refresh_job_name
from tir_dagster.orchestration.resources import SnowflakeParam, TableauResource, snowflake_access
from tir_dagster.orchestration.sensing.sensors import build_trigger_sensors
from tir_dagster.orchestration.translation import ExtractAssets

if TYPE_CHECKING:
    from tir_dagster.changes.plan import Plan
    from tir_dagster.refresh.context import Stages
    from tir_dagster.refresh.deliveries.trigger import RefreshedByServer
    from tir_dagster.refresh.survey import Watched


class TriggerConfig(dg.Config):
    """Why to refresh: `changes` only if a watched table changed, `full` in any case."""

    mode: str = "changes"


def build_trigger_defs(assets: ExtractAssets) -> dg.Definitions:
    """Build the definitions of an extract that the server refreshes."""
    spec, keys = assets.spec, assets.keys
    job = dg.define_asset_job(
        refresh_job_name(spec),
        selection=[keys.published_datasource],
        executor_def=dg.in_process_executor,
        description=f"Let Tableau refresh {spec.datasource.name!r} if its source changed, and wait for it.",
    )
    return dg.Definitions(
        assets=[*assets.external(), _published(assets)],
        jobs=[job],
        sensors=build_trigger_sensors(spec, keys, job),
        schedules=build_schedules(spec, keys, refresh=job, verify=None),
    )


def _published(assets: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = assets.spec, assets.keys

    @dg.asset(
        **assets.attributes("published_datasource"),
        deps=[keys.source_table],
        # The confirmation is the event itself; there is nothing to store beside it.
        dagster_type=dg.Nothing,
        output_required=False,
        pool=pool_name(spec),
    )
    def published_datasource(
        context: dg.AssetExecutionContext,
        config: TriggerConfig,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        state: StateFolder,
    ) -> Events:
        from tir_dagster.refresh.context import leased, refresh_context
        from tir_dagster.refresh.deliveries.trigger import (
            no_spark,
            plan_trigger,
            refresh_on_server,
            watch,
        )

        extract = refresh_context(
            spec,
            snowflake=snowflake_access(snowflake),
            tableau=tableau.access(),
            spark=no_spark,
            home=state.folder,
            log=context.log.info,
        )
        with leased(extract, f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS) as refresh:
            confirmed = last_confirmation(context.instance, keys.published_datasource)
            watched = watch(refresh)
            plan = plan_trigger(spec, watched, confirmed, config.mode)  # type: ignore[arg-type]
            context.log.info(plan.sentence())
            yield dg.AssetObservation(keys.source_table, metadata=_source_metadata(watched, plan))
            if plan.decision == "none":
                yield dg.AssetObservation(keys.published_datasource, metadata={metadata.PLAN: plan.sentence()})
                return
            refreshed = refresh_on_server(refresh, plan, watched)
            for warning in refreshed.warnings:
                context.log.warning(warning)
            yield dg.Output(None, metadata=_published_metadata(plan, refreshed, refresh.stages))

    return cast("dg.AssetsDefinition", published_datasource)


def _source_metadata(watched: "Watched", plan: "Plan") -> dict[str, Any]:
    return {
        metadata.PLAN: plan.sentence(),
        metadata.SOURCE_VERSION: str(watched.version),
        "tir/token": watched.known.token,
    }


def _published_metadata(plan: "Plan", refreshed: "RefreshedByServer", stages: "Stages") -> dict[str, Any]:
    """Metadata of the confirmation and of the job on the server; row counts only where the server reports them."""
    triggered = refreshed.triggered
    uri = triggered.datasource.webpage_url or ""
    fields = metadata.confirmation_metadata(refreshed.confirmation, stages=stages.seconds, uri=uri)
    if refreshed.row_count is None:
        del fields["dagster/row_count"]
    loaded = {} if triggered.rows is None else {"tir/rows_appended": triggered.rows}
    return {
        **fields,
        **loaded,
        **metadata.profile_metadata(stages.profile),
        metadata.PLAN: plan.sentence(),
        "tir/mode": plan.mode,
        "tir/decision": plan.decision,
        "tir/reason": plan.reason.name if plan.reason else "",
        "tir/job_id": triggered.job_id,
        "tir/job_seconds": triggered.seconds,
        "tir/warnings": list(refreshed.warnings),
    }
