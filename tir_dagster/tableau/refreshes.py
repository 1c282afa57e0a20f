"""Refreshes that we start: incremental by the best way that the server offers, never a full one instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from defusedxml.ElementTree import fromstring

from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import NOT_IN_FILTERS, FoundDatasource, reread, server_version, settled
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import (
    JOB_LIST_SINCE,
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    cancel_job,
    is_over,
    jobs_with,
    wait_for_job,
)
from tir_dagster.tableau.tasks import TASKS_SINCE, RefreshTask, refresh_tasks

# The first REST versions that refresh a datasource when asked, and incrementally.
REFRESH_SINCE = (2, 8)
INCREMENTAL_SINCE = (3, 25)
_JOIN_TRIES = 3
CREATE_TASK = (
    "Open the datasource on the server, choose Extract Refreshes, New Extract Refresh, type Incremental Refresh, and pick"
    " a schedule; or choose another delivery."
)


class FullRefreshError(DatasourceError):
    """The server began a full refresh instead of an incremental one; it was cancelled."""


class Way(Enum):
    """How an incremental refresh is started."""

    DIRECT = "the server is asked for it"
    TASK = "an incremental task of the datasource is run"
    SCHEDULE = "the schedule of an incremental task is moved"


@dataclass(frozen=True)
class Route:
    """The way for one datasource; `task` is None if the server is asked directly or does not list tasks."""

    way: Way
    task: RefreshTask | None = None


def find_route(client: TableauClient, datasource: FoundDatasource) -> Route:
    """Return the way to an incremental refresh; raise if there is none. Call it before anything is purged."""
    by_hand = _may_run_now(client)
    if by_hand and client.rest_version >= INCREMENTAL_SINCE:
        return Route(Way.DIRECT)
    if client.rest_version < TASKS_SINCE:
        return Route(Way.SCHEDULE)
    task = incremental_task(client, datasource)
    if task is None:
        version = ".".join(map(str, client.rest_version))
        reason = f"it speaks REST {version}" if by_hand else "its site does not allow refreshes to be started by hand"
        raise DatasourceError(
            f"There is no way to refresh {datasource.shown} incrementally on {client.where}: {reason}, and the datasource has"
            f" no incremental refresh task. {CREATE_TASK}"
        )
    return Route(Way.TASK if by_hand else Way.SCHEDULE, task)


def may_refresh_fully(client: TableauClient) -> bool:
    """Whether a full refresh can be started from here at all."""
    return client.rest_version >= REFRESH_SINCE and _may_run_now(client)


def _may_run_now(client: TableauClient) -> bool:
    """Whether the site allows refreshes to be started by hand; a missing setting means yes, the client reads it as no."""
    try:
        answer = client.call(_site, doing="read the site's settings")
    except RefusedError:
        return True
    return answer.get("runNowEnabled", "true").casefold() != "false"


def _site(server: Any) -> dict[str, str]:
    answer = server.sites.get_request(f"{server.sites.baseurl}/{server.site_id}")
    element = fromstring(answer.content).find(".//t:site", namespaces=server.namespace)
    return {} if element is None else dict(element.attrib)


@dataclass(frozen=True)
class StartedRefresh:
    """A refresh job. A joined one was started by somebody else: perhaps too early for our data, or of the other kind.

    `incremental` comes from the server's list of jobs; None if it is unknown.
    """

    job_id: str
    joined: bool
    incremental: bool | None = None


def start_refresh(client: TableauClient, datasource: FoundDatasource, *, incremental: bool) -> StartedRefresh:
    """Start a refresh, or join the one that waits or runs already.

    A cut call is repeated: the server queues one refresh per datasource, and refreshing twice ends the same.
    """
    kind = "an incremental refresh" if incremental else "a full refresh"
    doing = f"start {kind} of {datasource.shown}"
    start = _starter(client, datasource, doing, incremental=incremental)

    def start_or_join() -> StartedRefresh | None:
        if (job_id := client.call(start, doing=doing)) is not None:
            return StartedRefresh(job_id, joined=False)
        # The server has one in its queue. If it is not in the list of jobs, it has just ended: start our own.
        running = _running_refresh(client, datasource)
        return None if running is None else StartedRefresh(running, joined=True)

    started = client.retry.with_tries(_JOIN_TRIES).until(start_or_join, lambda started: started is not None)
    if started is not None:
        return started
    raise DatasourceError(
        f"Could not {doing}: {client.where} has a refresh in its queue already, and it is not in the list of jobs."
        " Wait until it has ended and run again; only an administrator's token sees the jobs of others."
    )


def _starter(
    client: TableauClient, datasource: FoundDatasource, doing: str, *, incremental: bool
) -> Callable[[Any], str | None]:
    """Return the call that starts the refresh: directly, or on older servers through an existing task."""
    version = ".".join(map(str, client.rest_version))
    if client.rest_version < REFRESH_SINCE and not incremental:
        raise DatasourceError(
            f"Could not {doing}: {client.where} speaks REST {version}, which refreshes by schedules only; that call needs"
            " 2.8 (Tableau Server 10.5). Refresh it on the server, or choose the delivery `republish`."
        )
    if not incremental or client.rest_version >= INCREMENTAL_SINCE:
        return lambda server: _job_id(server.datasources.refresh(datasource.id, incremental))
    task = incremental_task(client, datasource)
    if task is None:
        raise DatasourceError(
            f"Could not {doing}: {client.where} speaks REST {version} and would refresh everything instead; that call"
            f" needs 3.25 (Tableau Server 2025.1). {CREATE_TASK}"
        )
    return lambda server: _run_task(server, task.id)


def incremental_task(client: TableauClient, datasource: FoundDatasource) -> RefreshTask | None:
    """Return the incremental task to run: if there are several, the one with the fewest failures."""
    tasks = [task for task in refresh_tasks(client, datasource) if task.incremental]
    return min(tasks, key=lambda task: (task.failures, task.id), default=None)


def _job_id(job: Any) -> str | None:
    return None if job is None else str(job.id)


def _run_task(server: Any, task_id: str) -> str | None:
    try:
        answer = server.tasks.run(TSC.TaskItem(task_id, TSC.TaskItem.Type.ExtractRefresh, 50))
    except TSC.ServerResponseError as error:
        if error.code == "409093":
            return None
        raise
    return str(TSC.JobItem.from_response(answer, server.namespace)[0].id)


def _running_refresh(client: TableauClient, datasource: FoundDatasource) -> str | None:
    """Return the id of the job that refreshes this datasource now. The list shows names only, so each candidate is read."""
    doing = f"find the running refresh of {datasource.shown} among the jobs"
    for status in (TSC.BackgroundJobItem.Status.InProgress, TSC.BackgroundJobItem.Status.Pending):
        try:
            jobs = client.call(partial(jobs_with, status=status), doing=doing)
        except RefusedError:
            # Only administrators see the list, and older servers have none.
            return None
        for job in jobs:
            if job.title == datasource.name and _refreshes(client, job.id, datasource, doing):
                return str(job.id)
    return None


def _refreshes(client: TableauClient, job_id: str, datasource: FoundDatasource, doing: str) -> bool:
    try:
        job = client.call(lambda server: server.jobs.get_by_id(job_id), doing=doing)
    except RefusedError:
        return False
    return bool(job.datasource_id == datasource.id and not is_over(job))


def is_incremental_job(client: TableauClient, job_id: str, datasource: FoundDatasource) -> bool | None:
    """Return whether the job is incremental, by the server's list of jobs; None if the list does not show it."""
    if client.rest_version < JOB_LIST_SINCE:
        return None
    title = {} if NOT_IN_FILTERS & set(datasource.name) else {"title": datasource.name}
    try:
        jobs = client.call(
            lambda server: list(server.jobs.filter(**title)),
            doing=f"find job {job_id} of {datasource.shown} in the list",
        )
    except RefusedError:
        # Only administrators see the list.
        return None
    kind = next((str(job.type or "").casefold() for job in jobs if job.id == job_id), "")
    if "increment" in kind:
        return True
    return False if "refresh" in kind else None


def start_incremental_refresh(client: TableauClient, datasource: FoundDatasource) -> StartedRefresh:
    """Start an incremental refresh now, or join the refresh that is queued or runs already.

    For a joined refresh, `incremental` is its kind: False means that somebody else's full refresh runs, which ends with
    all rows of the source; None means that the kind is unknown.
    """
    started = start_refresh(client, datasource, incremental=True)
    kind = is_incremental_job(client, started.job_id, datasource)
    if kind is False and not started.joined:
        what = f"refresh of {datasource.shown}"
        cancel_job(client, started.job_id, what=what)
        raise FullRefreshError(
            f"{client.where} began a full refresh of {datasource.shown} instead of an incremental one; job"
            f" {started.job_id} was cancelled. Check that the datasource is set up for incremental refreshes."
        )
    return StartedRefresh(started.job_id, joined=started.joined, incremental=kind)


_TURNS = 3

Log = Callable[[str], None]


@dataclass(frozen=True)
class OwnRefresh:
    """Our job, the datasource before it, and whether another job had to end first."""

    job_id: str
    before: FoundDatasource
    waited: bool


def start_own_refresh(
    client: TableauClient, datasource: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> OwnRefresh:
    """Start a refresh of this kind; if another one runs, wait for its end first, however it ends."""
    waited = False
    for _ in range(_TURNS):
        start = start_incremental_refresh if incremental else _start_full
        started = start(client, datasource)
        if not started.joined:
            return OwnRefresh(started.job_id, datasource, waited)
        waited = True
        log(f"another refresh of {datasource.shown} is running: waiting for job {started.job_id} before ours")
        with suppress(JobFailedError, JobCancelledError, JobVanishedError):
            wait_for_job(client, started.job_id, what=f"another refresh of {datasource.shown}", timeout=timeout)
        datasource = reread(client, datasource) or datasource
    kind = "incremental" if incremental else "full"
    raise DatasourceError(
        f"Could not start the {kind} refresh of {datasource.shown}: {client.where} keeps refreshing it for somebody else."
        " Look at its refresh schedules, and run again."
    )


def _start_full(client: TableauClient, datasource: FoundDatasource) -> StartedRefresh:
    return start_refresh(client, datasource, incremental=False)


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


_ROWS = re.compile(r"\b(\d[\d,]*) rows\b")


@dataclass(frozen=True)
class TriggeredRefresh:
    """A successful refresh. `rows` is how many rows the server reports as loaded: all of them, or the appended ones.

    `joined` means that somebody else's refresh ended first.
    """

    job_id: str
    joined: bool
    seconds: float
    rows: int | None
    datasource: FoundDatasource
    # By the server's clock; None if the server forgot the job.
    ended_at: datetime | None = None


def refresh_by_server(
    client: TableauClient, datasource: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> TriggeredRefresh:
    """Start the server's own refresh of this kind and wait until it succeeds; raise with the job's notes otherwise."""
    clock = client.retry.clock
    begun = clock()
    what = f"{'incremental' if incremental else 'full'} refresh of {datasource.shown}"
    refresh = start_own_refresh(client, datasource, incremental=incremental, log=log, timeout=timeout)
    crash_after("asked")
    log(f"{what}: job {refresh.job_id}")
    rows: int | None = None
    ended_at: datetime | None = None
    try:
        job = wait_for_job(client, refresh.job_id, what=what, timeout=timeout)
    except JobVanishedError as vanished:
        now = _landed(client, refresh.before, what, vanished)
        log(f"the server forgot job {refresh.job_id}, but the datasource changed: it was refreshed")
    else:
        rows, ended_at = rows_in_notes(job.notes), job.ended_at
        log(" ".join(job.notes) or f"{what}: done, without a note")
        now = settled(client, refresh.before)
    crash_after("refreshed")
    return TriggeredRefresh(refresh.job_id, refresh.waited, round(clock() - begun, 3), rows, now, ended_at)


def _landed(client: TableauClient, before: FoundDatasource, what: str, vanished: JobVanishedError) -> FoundDatasource:
    """Return the datasource if it shows a change, so that the refresh took place; raise otherwise."""
    now = settled(client, before)
    if server_version(now) != server_version(before):
        return now
    raise JobVanishedError(
        f"{client.where} no longer knows the job of the {what}, and the datasource shows no change: whether the refresh"
        " took place is unknown. Look at the datasource's refresh history on the server, and run again."
    ) from vanished


def rows_in_notes(notes: tuple[str, ...]) -> int | None:
    """Return the number of rows in the job's notes; None if there is none."""
    # Without quoted text: a datasource may be called "Top 10 rows".
    counts = [match[1] for note in notes if (match := _ROWS.search(_QUOTED.sub("", note)))]
    return int(counts[0].replace(",", "")) if counts else None
