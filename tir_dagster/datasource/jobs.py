"""Jobs on the server: wait for one to end, start a refresh, or join the one that is running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.found import FoundDatasource
from tir_dagster.datasource.trouble import RefusedError
from tir_dagster.errors import DatasourceError

INCREMENTAL_SINCE = (3, 25)
_DONE, _FAILED, _CANCELLED = (0, 3), 1, 2
# How soon a wait notices that it is no longer wanted.
_NOTICE_SECONDS = 1.0
_JOIN_TRIES = 3


class JobFailedError(DatasourceError):
    """The job ended badly; the text carries the server's notes."""


class JobCancelledError(DatasourceError):
    """Somebody stopped the job, on the server or here."""


class JobTimeoutError(DatasourceError):
    """The job still runs, and nobody waits for it any longer."""


class JobVanishedError(DatasourceError):
    """The server no longer knows the job: whether it did its work, only the data can tell."""


@dataclass(frozen=True)
class FinishedJob:
    """A job that ended well."""

    id: str
    kind: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class StartedRefresh:
    """A refresh job. A joined one was started by somebody else: before our data was there, perhaps, or of another kind."""

    job_id: str
    joined: bool


def wait_for_job(
    client: TableauClient,
    job_id: str,
    *,
    what: str,
    timeout: float = 3600.0,
    on_progress: Callable[[int, float], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> FinishedJob:
    """Wait until the job ends well; every other end is an error of its own. `what` names it in messages.

    `on_progress` is told percent and seconds; when `cancelled` says so, the server is asked to stop the job.
    """
    started, number = client.retry.clock(), 0
    while True:
        job = _look(client, job_id, what)
        waited = client.retry.clock() - started
        if _is_over(job):
            return _ending(job, what)
        if on_progress is not None:
            on_progress(int(job.progress or 0), waited)
        if waited >= timeout:
            raise JobTimeoutError(
                f"Job {job_id} ({what}) on {client.where} still runs after {waited:.0f} s. It goes on without us:"
                " look at it on the server's jobs page, and allow more time if it always takes that long."
            )
        number += 1
        pause = client.poll.seconds(number, chance=client.retry.chance())
        if not _slept(client, min(pause, timeout - waited), cancelled):
            _cancel(client, job_id, what)


def _look(client: TableauClient, job_id: str, what: str) -> Any:
    try:
        return client.call(lambda server: server.jobs.get_by_id(job_id), doing=f"look at job {job_id} ({what})")
    except RefusedError as error:
        if error.code == "400031" or error.code.startswith("404"):
            raise JobVanishedError(
                f"{client.where} no longer knows job {job_id} ({what}); servers forget jobs after a while."
                " Look at the data to see whether it did its work."
            ) from error
        raise


def _is_over(job: Any) -> bool:
    # The client reads a time with fractions of a second as none at all.
    return job.completed_at is not None or (job.finish_code >= 0 and str(job.progress) == "100")


def _ending(job: Any, what: str) -> FinishedJob:
    notes = _notes(job)
    if job.finish_code in _DONE:
        return FinishedJob(job.id, job.type or "", notes)
    said = f": {' '.join(notes)}" if notes else ", without a note"
    if job.finish_code == _CANCELLED:
        raise JobCancelledError(f"Job {job.id} ({what}) was cancelled on the server{said}. Run again when it may run.")
    raise JobFailedError(
        f"Job {job.id} ({what}) failed on the server{said}{'' if said.endswith('.') else '.'}"
        " Mend what the note says and run again."
    )


def _notes(job: Any) -> tuple[str, ...]:
    texts = [*(job.notes or ()), *(note.get("text") for note in job.status_notes or ())]
    return tuple(dict.fromkeys(" ".join(text.split()) for text in texts if text and text.strip()))


def _slept(client: TableauClient, seconds: float, cancelled: Callable[[], bool] | None) -> bool:
    """False when the wait is no longer wanted."""
    while seconds > 0:
        if cancelled is not None and cancelled():
            return False
        client.retry.sleep(min(seconds, _NOTICE_SECONDS))
        seconds -= _NOTICE_SECONDS
    return cancelled is None or not cancelled()


def _cancel(client: TableauClient, job_id: str, what: str) -> None:
    try:
        client.call(lambda server: server.jobs.cancel(job_id), doing=f"cancel job {job_id} ({what})")
    except DatasourceError as error:
        raise JobCancelledError(f"The wait for job {job_id} ({what}) was stopped, but it may go on: {error}") from error
    raise JobCancelledError(f"Job {job_id} ({what}) was cancelled because the wait for it was stopped. Run again.")


def start_refresh(client: TableauClient, found: FoundDatasource, *, incremental: bool) -> StartedRefresh:
    """Start a refresh, or join the one that waits or runs already.

    A cut call is repeated: the server queues one refresh per datasource, and refreshing twice ends the same.
    """
    kind = "an incremental refresh" if incremental else "a full refresh"
    doing = f"start {kind} of {found.shown}"
    start = _starter(client, found, doing, incremental=incremental)
    for _ in range(_JOIN_TRIES):
        job_id = client.call(start, doing=doing)
        if job_id is not None:
            return StartedRefresh(job_id, joined=False)
        # Queued already, says the server. Not found means that it has just ended: start one of our own.
        running = _running_refresh(client, found)
        if running is not None:
            return StartedRefresh(running, joined=True)
    raise DatasourceError(
        f"Could not {doing}: {client.where} says that one is queued already, and it cannot be found among the jobs."
        " Wait for it to end and run again."
    )


def _starter(
    client: TableauClient, found: FoundDatasource, doing: str, *, incremental: bool
) -> Callable[[Any], str | None]:
    """The call that starts it: directly, or on older servers through a task that somebody has set up."""
    if not incremental or client.rest_version >= INCREMENTAL_SINCE:
        return lambda server: _job_id(server.datasources.refresh(found.id, incremental))
    task = next((task for task in refresh_tasks(client, found) if task.incremental), None)
    if task is None:
        version = ".".join(map(str, client.rest_version))
        raise DatasourceError(
            f"Could not {doing}: {client.where} speaks REST {version} and would refresh everything instead; that call"
            " needs 3.25 (Tableau Server 2025.1). Set up an incremental refresh task for the datasource on the server,"
            " or choose another delivery."
        )
    return lambda server: _run_task(server, task.id)


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


def _running_refresh(client: TableauClient, found: FoundDatasource) -> str | None:
    """The job that refreshes this datasource now. The list shows names only, so each candidate is looked at."""
    doing = f"find the running refresh of {found.shown} among the jobs"
    for status in (TSC.BackgroundJobItem.Status.InProgress, TSC.BackgroundJobItem.Status.Pending):
        jobs = client.call(partial(_jobs_with, status=status), doing=doing)
        for job in jobs:
            if job.title == found.name and _refreshes(client, job.id, found, doing):
                return str(job.id)
    return None


def _jobs_with(server: Any, *, status: str) -> list[Any]:
    return list(server.jobs.filter(status=status))


def _refreshes(client: TableauClient, job_id: str, found: FoundDatasource, doing: str) -> bool:
    try:
        job = client.call(lambda server: server.jobs.get_by_id(job_id), doing=doing)
    except RefusedError:
        return False
    return bool(job.datasource_id == found.id and not _is_over(job))


@dataclass(frozen=True)
class RefreshTask:
    """A refresh that the server runs by its own clock."""

    id: str
    incremental: bool
    schedule: str


def refresh_tasks(client: TableauClient, found: FoundDatasource) -> list[RefreshTask]:
    """The server's own refresh tasks of the datasource."""
    doing = f"list the refresh tasks of {found.shown}"
    tasks = client.call(lambda server: list(TSC.Pager(server.tasks, TSC.RequestOptions(pagesize=1000))), doing=doing)
    return [
        RefreshTask(task.id, "increment" in (task.task_type or "").casefold(), _schedule(task))
        for task in tasks
        if task.target is not None and task.target.type == "datasource" and task.target.id == found.id
    ]


def _schedule(task: Any) -> str:
    return str(getattr(task.schedule_item, "name", None) or "a schedule of its own")
