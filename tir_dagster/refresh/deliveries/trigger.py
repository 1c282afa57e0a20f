"""The delivery `trigger`: watch the tables, let Tableau run its own refresh, wait for it; the datasource is not changed.

The confirmed tokens were read before the refresh started: a change during it is seen next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

from tir_dagster.changes.plan import Mode, Plan, Reason
from tir_dagster.refresh.context import NEEDED_CALLS, RefreshContext
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.survey import Watched, watch_tables
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, find_datasource, find_project, server_version
from tir_dagster.tableau.jobs import check_jobs_are_shown
from tir_dagster.tableau.refreshes import TriggeredRefresh, refresh_by_server
from tir_dagster.tableau.tasks import RefreshTask, scheduled_refreshes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class TriggerPlan(Plan):
    """A plan whose refresh is the server's own."""

    def sentence(self) -> str:
        if self.decision == "none":
            return super().sentence()
        why = self.reason.value if self.reason else "the source changed"
        return f"{self.extract}: {self.decision} refresh by Tableau itself, because {why}."


def plan_trigger(spec: ExtractSpec, watched: Watched, confirmed: Confirmation | None, mode: Mode) -> TriggerPlan:
    """Plan nothing if all tables are as confirmed; else the refresh that the spec names, or the requested one."""
    requested = mode == "full" or spec.policy == "full"
    if mode != "full" and confirmed is not None and confirmed.known == watched.known:
        return TriggerPlan(spec.name, mode, "none")
    decision = "full" if requested else spec.datasource.refresh
    return TriggerPlan(spec.name, mode, decision, Reason.REQUESTED if requested else None)


@dataclass(frozen=True)
class RefreshedByServer:
    """What the server did, and the confirmation of it."""

    triggered: TriggeredRefresh
    confirmation: Confirmation
    row_count: int | None
    warnings: tuple[str, ...]


def watch(context: RefreshContext) -> Watched:
    """Wait until all watched tables are quiet together; what changes after this is seen next time."""
    with context.stages.timed("survey"), context.snowflake.kept_open():
        return watch_tables(context.spec, context.snowflake, log=context.log)


def trigger_warnings(context: RefreshContext) -> tuple[str, ...]:
    """Return warnings about refreshes that Tableau runs by a schedule; raise if the datasource does not exist."""
    with context.stages.timed("look"), TableauClient(context.tableau) as client:
        return schedule_warnings(client, _find(context, client))


def refresh_on_server(context: RefreshContext, plan: Plan, watched: Watched) -> RefreshedByServer:
    """Let the server refresh the datasource, and wait for it."""
    context.hold.check(context.spec.name)
    with context.calls.reserved(NEEDED_CALLS["trigger"]), context.client() as client:
        with context.stages.timed("look"):
            datasource = _find(context, client)
            warnings = schedule_warnings(client, datasource)
        incremental = plan.decision == "incremental"
        with context.stages.timed("refresh"):
            triggered = refresh_by_server(
                client,
                datasource,
                incremental=incremental,
                log=context.log,
                timeout=context.spec.datasource.job_timeout,
            )
    # After an increment the server reports the appended rows, not the total.
    row_count = None if incremental else triggered.rows
    confirmation = _confirmation(context.spec, watched, triggered.datasource, row_count)
    return RefreshedByServer(triggered, confirmation, row_count, warnings)


def _find(context: RefreshContext, client: TableauClient) -> FoundDatasource:
    check_jobs_are_shown(client)
    project = find_project(client, context.spec.datasource.project)
    return find_datasource(client, project=project, name=context.spec.datasource.name)


def _confirmation(
    spec: ExtractSpec, watched: Watched, datasource: FoundDatasource, row_count: int | None
) -> Confirmation:
    return Confirmation(
        extract=spec.name,
        version="",
        source_version=str(watched.version),
        known=watched.known,
        watermark=None,
        datasource_id=datasource.id,
        server_version=str(server_version(datasource)),
        fingerprint="",
        rows=row_count or 0,
        change_sets=(),
    )


def schedule_warnings(client: TableauClient, datasource: FoundDatasource) -> tuple[str, ...]:
    """Return a warning for each refresh that Tableau also runs on the datasource by a schedule."""
    return tuple(_warning(datasource, task) for task in scheduled_refreshes(client, datasource))


def _warning(datasource: FoundDatasource, task: RefreshTask) -> str:
    kind = "an incremental" if task.incremental else "a full"
    when = f", next at {task.next_run_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if task.next_run_at else ""
    return (
        f"Tableau also runs {kind} refresh of {datasource.shown} on its own ({task.schedule}{when}), whether the source changed or"
        " not. Remove the task on the server if the refreshes started from here are enough."
    )


def no_spark() -> SparkSession:
    """Take the place of Spark in a context whose rows Tableau reads itself."""
    raise AssertionError("a refresh by the server needs no Spark")
