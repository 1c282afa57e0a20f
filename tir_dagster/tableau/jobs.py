"""Jobs on the server: wait for one to end, start a refresh, or join the one that is running."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource
from tir_dagster.tableau.failures import TOO_OLD, RefusedError
from tir_dagster.tableau.tasks import RefreshTask, refresh_tasks

INCREMENTAL_SINCE = (3, 25)
# The first REST versions that refresh a datasource when asked, list jobs, and cancel one.
REFRESH_SINCE = (2, 8)
JOB_LIST_SINCE = (3, 1)
CANCEL_SINCE = (3, 1)
# A server that has forgotten a job says 400031 or some 404; these two speak of the site and of the call.
_GONE = "400031"
_NOT_OF_JOBS = ("404000", TOO_OLD)
_DONE, _FAILED, _CANCELLED = (0, 3), 1, 2
# How soon a wait notices that it is no longer wanted.
_NOTICE_SECONDS = 1.0
_JOIN_TRIES = 3
# A filter expression has no way to quote these.
_NOT_IN_FILTERS = frozenset(",:&[]*")
CREATE_TASK = (
    "Open the datasource on the server, choose Extract Refreshes, New Extract Refresh, type Incremental Refresh, and pick"
    " a schedule; or choose another delivery."
)
log = logging.getLogger(__name__)


class JobFailedError(DatasourceError):
    """The job failed; the message contains the server's notes."""


class JobCancelledError(DatasourceError):
    """Somebody stopped the job, on the server or here."""


class JobTimeoutError(DatasourceError):
    """The job still runs after the time limit."""


class JobVanishedError(DatasourceError):
    """The server no longer knows the job: only the data shows whether it succeeded."""


@dataclass(frozen=True)
class FinishedJob:
    """A job that ended well."""

    id: str
    kind: str
    notes: tuple[str, ...]
    ended_at: datetime | None = None


@dataclass(frozen=True)
class StartedRefresh:
    """A refresh job. A joined one was started by somebody else: perhaps too early for our data, or of the other kind.

    `incremental` comes from the server's list of jobs; None if it is unknown.
    """

    job_id: str
    joined: bool
    incremental: bool | None = None


def wait_for_job(
    client: TableauClient,
    job_id: str,
    *,
    what: str,
    timeout: float = 3600.0,
    out_of_reach: float = 600.0,
    on_progress: Callable[[int, float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> FinishedJob:
    """Wait until the job succeeds; raise an own error for every other end. `what` names the job in messages.

    `on_progress` receives percent and seconds. When `cancelled` returns true, the server is asked to stop the job. The
    wait goes on while the server cannot be reached for less than `out_of_reach` seconds, for example during a restart.
    """
    clock = client.retry.clock
    started = seen = clock()
    for _ in client.looks(timeout, sleep=partial(_sleep, client, job_id, what, cancelled)):
        try:
            job = _look(client, job_id, what)
        except (RefusedError, JobVanishedError):
            raise
        except DatasourceError as error:
            if clock() - seen >= min(out_of_reach, timeout):
                raise
            log.warning("Tableau: %s Still waiting for job %s.", error, job_id)
            continue
        seen = clock()
        if _is_over(job):
            return _ending(job, what)
        if on_progress is not None:
            on_progress(int(job.progress or 0), seen - started)
    raise JobTimeoutError(
        f"Job {job_id} ({what}) on {client.where} still runs after {clock() - started:.0f} s and continues on the server."
        " Look at it on the server's jobs page, and raise `datasource.job_timeout` in the spec if it always takes this long."
    )


def _look(client: TableauClient, job_id: str, what: str) -> Any:
    try:
        return client.call(lambda server: server.jobs.get_by_id(job_id), doing=f"look at job {job_id} ({what})")
    except RefusedError as error:
        if error.code == _GONE or (error.code.startswith("404") and error.code not in _NOT_OF_JOBS):
            raise JobVanishedError(
                f"{client.where} no longer knows job {job_id} ({what}); servers forget jobs after a while."
                " Look at the data to see whether the job succeeded."
            ) from error
        raise


def _is_over(job: Any) -> bool:
    # The client reads a time with fractions of a second as none at all.
    return job.completed_at is not None or (job.finish_code >= 0 and str(job.progress) == "100")


def _ending(job: Any, what: str) -> FinishedJob:
    notes = _notes(job)
    if job.finish_code in _DONE:
        return FinishedJob(job.id, job.type or "", notes, job.completed_at)
    notes_text = f": {' '.join(notes)}" if notes else ", without a note"
    if job.finish_code == _CANCELLED:
        raise JobCancelledError(
            f"Job {job.id} ({what}) was cancelled on the server{notes_text}. Run again when it may run."
        )
    raise JobFailedError(
        f"Job {job.id} ({what}) failed on the server{notes_text}{'' if notes_text.endswith('.') else '.'}"
        " Fix what the note reports and run again."
    )


def _notes(job: Any) -> tuple[str, ...]:
    texts = [*(job.notes or ()), *(note.get("text") for note in job.status_notes or ())]
    return tuple(dict.fromkeys(" ".join(text.split()) for text in texts if text and text.strip()))


def _sleep(client: TableauClient, job_id: str, what: str, cancelled: Callable[[], bool] | None, seconds: float) -> None:
    """Sleep between two looks at a job; stop the job if the wait is cancelled meanwhile."""
    with client.waiting():
        while seconds > 0 and not (cancelled is not None and cancelled()):
            client.retry.sleep(min(seconds, _NOTICE_SECONDS))
            seconds -= _NOTICE_SECONDS
    if cancelled is not None and cancelled():
        _stop(client, job_id, what)


def _stop(client: TableauClient, job_id: str, what: str) -> NoReturn:
    try:
        cancel_job(client, job_id, what=what)
    except DatasourceError as error:
        raise JobCancelledError(
            f"The wait for job {job_id} ({what}) was stopped, but the job may continue: {error}"
        ) from error
    raise JobCancelledError(f"Job {job_id} ({what}) was cancelled because the wait for it was stopped. Run again.")


def cancel_job(client: TableauClient, job_id: str, *, what: str) -> None:
    """Ask the server to stop a job; a finished job is not changed."""
    if client.rest_version < CANCEL_SINCE:
        raise DatasourceError(
            f"Could not cancel job {job_id} ({what}): {client.where} cannot cancel jobs over REST. Stop it on the"
            " server's jobs page."
        )
    client.call(lambda server: server.jobs.cancel(job_id), doing=f"cancel job {job_id} ({what})")


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
            jobs = client.call(partial(_jobs_with, status=status), doing=doing)
        except RefusedError:
            # Only administrators see the list, and older servers have none.
            return None
        for job in jobs:
            if job.title == datasource.name and _refreshes(client, job.id, datasource, doing):
                return str(job.id)
    return None


def _jobs_with(server: Any, *, status: str) -> list[Any]:
    return list(server.jobs.filter(status=status))


def _refreshes(client: TableauClient, job_id: str, datasource: FoundDatasource, doing: str) -> bool:
    try:
        job = client.call(lambda server: server.jobs.get_by_id(job_id), doing=doing)
    except RefusedError:
        return False
    return bool(job.datasource_id == datasource.id and not _is_over(job))


def is_incremental_job(client: TableauClient, job_id: str, datasource: FoundDatasource) -> bool | None:
    """Return whether the job is incremental, by the server's list of jobs; None if the list does not show it."""
    if client.rest_version < JOB_LIST_SINCE:
        return None
    title = {} if _NOT_IN_FILTERS & set(datasource.name) else {"title": datasource.name}
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
