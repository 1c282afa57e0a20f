"""The server's own refreshes of a datasource: its tasks, and the schedule that can be moved so that one of them runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from enum import Enum
from typing import Any
from zoneinfo import ZoneInfo

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, ServerVersion, reread, server_version
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import JOB_LIST_SINCE, JobTimeoutError, is_job_of, wait_for_job

# The first REST version that lists tasks and runs them.
TASKS_SINCE = (2, 6)
# Servers show times in whole seconds and schedules start on whole minutes.
_MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class RefreshTask:
    """A refresh that the server runs by a schedule, or on request."""

    id: str
    incremental: bool
    schedule: str
    schedule_id: str | None = None
    active: bool = True
    next_run_at: datetime | None = None
    failures: int = 0

    @property
    def runs_by_itself(self) -> bool:
        """Whether the server runs it by a schedule; a task without a time is run by hand only."""
        return self.active and self.next_run_at is not None

    @property
    def warning(self) -> str:
        """A warning about a task that Tableau runs beside our refreshes."""
        return f"{self._harm} Remove the task on the server, or leave the refreshes to Tableau with the delivery `trigger`."

    @property
    def needed_warning(self) -> str:
        """A warning about a scheduled task that is also run from here."""
        return f"{self._harm} Suspend its schedule: the task is run from here when it is needed."

    @property
    def _harm(self) -> str:
        kind = "an incremental refresh" if self.incremental else "a full refresh"
        when = f", next at {self.next_run_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if self.next_run_at else ""
        harm = (
            "it appends new rows only, and the next refresh has to compare the whole extract"
            if self.incremental
            else "it reads the whole source again, and the next refresh has to compare the whole extract"
        )
        return f"Tableau runs {kind} of this datasource on its own ({self.schedule}{when}): {harm}."


def refresh_tasks(client: TableauClient, datasource: FoundDatasource) -> list[RefreshTask]:
    """Return the server's own refresh tasks of the datasource; none on servers that do not list them."""
    return tasks_by_datasource(client, doing=f"list the refresh tasks of {datasource.shown}").get(datasource.id, [])


def tasks_by_datasource(client: TableauClient, *, doing: str) -> dict[str, list[RefreshTask]]:
    """Return the site's refresh tasks of datasources by their ids; none on servers that do not list them."""
    if client.rest_version < TASKS_SINCE:
        return {}
    tasks = client.call(lambda server: list(TSC.Pager(server.tasks, TSC.RequestOptions(pagesize=1000))), doing=doing)
    by_datasource: dict[str, list[RefreshTask]] = {}
    for task in tasks:
        if task.target is not None and task.target.type == "datasource":
            by_datasource.setdefault(task.target.id, []).append(_task(task))
    return by_datasource


def _task(task: Any) -> RefreshTask:
    schedule = task.schedule_item
    name = getattr(schedule, "name", None)
    return RefreshTask(
        id=task.id,
        # Every other type is a full refresh.
        incremental="increment" in (task.task_type or "").casefold(),
        schedule=f"schedule {name!r}" if name else "a schedule of its own",
        schedule_id=getattr(schedule, "id", None),
        active=getattr(schedule, "state", None) != TSC.ScheduleItem.State.Suspended,
        next_run_at=getattr(schedule, "next_run_at", None),
        failures=task.consecutive_failed_count,
    )


def scheduled_refreshes(client: TableauClient, datasource: FoundDatasource) -> tuple[RefreshTask, ...]:
    """Return the refreshes that Tableau runs on the datasource by a schedule, each with its warning.

    Empty for a user who may not list tasks: a missing warning must not stop a refresh.
    """
    try:
        return tuple(task for task in refresh_tasks(client, datasource) if task.runs_by_itself)
    except RefusedError:
        return ()


def next_slot(at: time, zone: str, *, now: datetime) -> datetime:
    """Return the next moment after `now` at which clocks in that zone show `at`."""
    place = ZoneInfo(zone)
    day = now.astimezone(place).date()
    slots = (datetime.combine(day + timedelta(days=ahead), at, place).astimezone(UTC) for ahead in range(3))
    return next(slot for slot in slots if slot > now)


def soonest_slot(now: datetime, *, every_minutes: int = 5) -> datetime:
    """Return the next multiple of this many minutes, at least a minute away: enough time to change the schedule."""
    start = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    step = timedelta(minutes=every_minutes)
    return start + step * -(-(now + _MINUTE - start) // step)


@dataclass(frozen=True)
class Schedule:
    """A schedule that refreshes one datasource incrementally, and nothing else."""

    id: str
    name: str
    next_run_at: datetime | None
    # How often its task has failed in a row so far.
    failures: int = 0


def find_schedule(client: TableauClient, datasource: FoundDatasource, *, name: str | None = None) -> Schedule:
    """Return the schedule of the datasource's incremental task: by this name, by the datasource's name, or the task's own.

    Raise if the schedule also refreshes others: they would be moved with it.
    """
    schedule_name = name or datasource.name
    doing = f"find the schedule of {datasource.shown}"
    items = client.call(
        lambda server: list(TSC.Pager(server.schedules, TSC.RequestOptions(pagesize=1000))), doing=doing
    )
    chosen = next((item for item in items if item.name == schedule_name), None)
    failures = {task.schedule_id: task.failures for task in refresh_tasks(client, datasource) if task.incremental}
    if chosen is None and name is None:
        chosen = next((item for item in items if item.id in failures), None)
    if chosen is None:
        raise DatasourceError(
            f"There is no schedule {schedule_name!r} for {datasource.shown} on {client.where} that this user can see. Create it on the"
            " server, and put an incremental refresh of the datasource on it; only server administrators see schedules."
        )
    _check_alone(client, datasource, chosen, doing)
    return Schedule(chosen.id, chosen.name, chosen.next_run_at, failures.get(chosen.id, 0))


def _check_alone(client: TableauClient, datasource: FoundDatasource, schedule: Any, doing: str) -> None:
    extracts = client.call(lambda server: _extracts(server, schedule.id), doing=doing)
    own_extracts = [item for item in extracts if item.datasource_id == datasource.id]
    if len(own_extracts) < len(extracts):
        raise DatasourceError(
            f"Schedule {schedule.name!r} on {client.where} also refreshes {len(extracts) - len(own_extracts)} others, which would"
            f" be moved with it. Give {datasource.shown} a schedule of its own, and call it {datasource.name!r}."
        )
    if not own_extracts or not all("increment" in (item.type or "").casefold() for item in own_extracts):
        what = "a full refresh" if own_extracts else "no refresh"
        raise DatasourceError(
            f"Schedule {schedule.name!r} on {client.where} has {what} of {datasource.shown}. Put an incremental refresh of the"
            " datasource on it, and nothing else."
        )


def _extracts(server: Any, schedule_id: str) -> list[Any]:
    def page(options: Any) -> Any:
        return server.schedules.get_extract_refresh_tasks(schedule_id, options)

    return list(TSC.Pager(page, TSC.RequestOptions(pagesize=1000)))


def move_schedule(client: TableauClient, schedule: Schedule, slot: datetime) -> Schedule:
    """Make the schedule run daily, next at that moment.

    A schedule's times are in the server's own time zone, which the API does not show. The answer contains the next run
    with its zone, which shows how far off the first guess was.
    """
    start = slot.astimezone(UTC)
    for _ in range(2):
        moved = _set_start(client, schedule, start.time())
        if moved.next_run_at is None or abs(moved.next_run_at - slot) < _MINUTE:
            break
        start += (slot - moved.next_run_at) % _DAY
    if moved.next_run_at is None or abs(moved.next_run_at - slot) >= _MINUTE:
        next_run = f"{moved.next_run_at:%Y-%m-%d %H:%M} UTC" if moved.next_run_at else "never"
        raise DatasourceError(
            f"Schedule {schedule.name!r} on {client.where} was moved to {slot.astimezone(UTC):%Y-%m-%d %H:%M} UTC, but its next"
            f" run is {next_run}. Compare the server's clock with this machine's, and check that the schedule is active."
        )
    return moved


def _set_start(client: TableauClient, schedule: Schedule, start: time) -> Schedule:
    item = TSC.ScheduleItem(
        schedule.name, None, "Extract", "Parallel", TSC.DailyInterval(start.replace(second=0, microsecond=0))
    )
    item._id = schedule.id  # noqa: SLF001 - the client can only update what it has read, one call more
    item._execution_order = None  # noqa: SLF001 - stays as it is
    doing = f"move schedule {schedule.name!r}"
    changed = client.call(lambda server: server.schedules.update(item), doing=doing)
    return replace(schedule, next_run_at=changed.next_run_at)


class RunState(Enum):
    """What became of a scheduled refresh."""

    WAITING = "it has not begun"
    RUNNING = "it waits in the queue or runs"
    BEGUN = "it has begun, and the server does not show this user whether it has ended"
    DONE = "the datasource has changed since"
    FAILED = "it failed or was cancelled"


@dataclass(frozen=True)
class ScheduledRun:
    """A scheduled refresh as far as the server shows it. `job_id` is known if the user may see the list of jobs."""

    state: RunState
    job_id: str | None = None
    at: datetime | None = None


def scheduled_run(
    client: TableauClient, datasource: FoundDatasource, *, slot: datetime, before: ServerVersion, failures: int = 0
) -> ScheduledRun:
    """Return whether and when the refresh at that slot ran: by the jobs, else by the datasource, else by its tasks.

    `before` is the datasource's version after our own last change to it, `failures` how often its task had failed in a
    row before the slot.
    """
    if (by_job := _by_jobs(client, datasource, slot)) is not None:
        return by_job
    now = reread(client, datasource)
    if now is None:
        raise DatasourceError(
            f"{datasource.shown} on {client.where} was deleted. Publish it again, or name another one."
        )
    if server_version(now) != before:
        return ScheduledRun(RunState.DONE, at=now.updated_at)
    # No answer tells when a task ran last: one whose next run is a later one has begun.
    begun = [
        task
        for task in refresh_tasks(client, datasource)
        if task.incremental and task.next_run_at is not None and task.next_run_at > slot
    ]
    if not begun:
        return ScheduledRun(RunState.WAITING)
    failed = all(task.failures > failures for task in begun)
    return ScheduledRun(RunState.FAILED if failed else RunState.BEGUN, at=slot)


def _by_jobs(client: TableauClient, datasource: FoundDatasource, slot: datetime) -> ScheduledRun | None:
    """Return the newest refresh job of the datasource since the slot; None if there is none or the user sees no jobs."""
    if client.rest_version < JOB_LIST_SINCE:
        return None
    since = (slot - _MINUTE).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    doing = f"look for the scheduled refresh of {datasource.shown} among the jobs"
    try:
        jobs = client.call(lambda server: list(server.jobs.filter(created_at__gte=since)), doing=doing)
    except RefusedError:
        return None
    titled = [job for job in jobs if job.title == datasource.name and "extract" in (job.type or "")]
    for job in sorted(titled, key=lambda job: job.created_at, reverse=True):
        if is_job_of(client, job.id, datasource, doing):
            state = _STATES.get(job.status, RunState.RUNNING)
            return ScheduledRun(state, str(job.id), job.ended_at or job.started_at or job.created_at)
    return None


_STATES = {"Success": RunState.DONE, "Failed": RunState.FAILED, "Cancelled": RunState.FAILED}


def wait_for_scheduled_run(
    client: TableauClient,
    datasource: FoundDatasource,
    *,
    slot: datetime,
    before: ServerVersion,
    failures: int = 0,
    timeout: float = 3600.0,
    job_timeout: float | None = None,
) -> ScheduledRun:
    """Wait until the refresh at that slot has succeeded; raise its job's errors otherwise.

    `timeout` begins now; once the job is known it may take `job_timeout`, if that is set.
    """
    clock = client.retry.clock
    started, state = clock(), RunState.WAITING
    for _ in client.looks(timeout):
        run = scheduled_run(client, datasource, slot=slot, before=before, failures=failures)
        state = run.state
        if state is RunState.DONE:
            return run
        if run.job_id is not None:
            left = timeout - (clock() - started)
            what, allowed = f"scheduled refresh of {datasource.shown}", left if job_timeout is None else job_timeout
            job = wait_for_job(client, run.job_id, what=what, timeout=max(allowed, 0.0))
            return ScheduledRun(RunState.DONE, run.job_id, job.ended_at or run.at)
        if state is RunState.FAILED:
            raise DatasourceError(
                f"The scheduled refresh of {datasource.shown} on {client.where} failed; this user cannot see the job. Look at it"
                " on the server's jobs page."
            )
    raise JobTimeoutError(
        f"The refresh of {datasource.shown} scheduled for {slot.astimezone(UTC):%Y-%m-%d %H:%M} UTC on {client.where}:"
        f" {state.value} after {timeout:.0f} s. Look at the schedule and at the server's jobs page."
    )
