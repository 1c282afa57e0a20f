"""Jobs on the server: wait for one to end, or cancel it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.access import ConnectedApp
from tir_dagster.tableau.calls import APPS_SEE_JOBS
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import NOT_IN_FILTERS, FoundDatasource
from tir_dagster.tableau.failures import TOO_OLD, RefusedError

# The first REST versions that list jobs, and cancel one.
JOB_LIST_SINCE = (3, 1)
CANCEL_SINCE = (3, 1)
# A server that has forgotten a job says 400031 or some 404; these two speak of the site and of the call.
_GONE = "400031"
_NOT_OF_JOBS = ("404000", TOO_OLD)
_DONE, _FAILED, _CANCELLED = (0, 3), 1, 2
log = logging.getLogger(__name__)


class JobFailedError(DatasourceError):
    """The job failed; the message contains the server's notes, if there are any."""


class JobCancelledError(DatasourceError):
    """Somebody stopped the job."""


class JobTimeoutError(DatasourceError):
    """The job still runs after the time limit."""


class JobVanishedError(DatasourceError):
    """The server no longer knows the job: only the data shows whether it succeeded."""


@dataclass(frozen=True)
class FinishedJob:
    """A job that ended well."""

    id: str
    notes: tuple[str, ...]
    ended_at: datetime | None = None


def shows_jobs(client: TableauClient) -> bool:
    """Whether the end of a job can be seen: servers before 2025.1 show none to connected apps."""
    return not isinstance(client.access.identity, ConnectedApp) or client.rest_version >= APPS_SEE_JOBS


def check_jobs_are_shown(client: TableauClient) -> None:
    """Raise if this server shows no jobs to connected apps; call it before anything is touched that ends with a job."""
    if not shows_jobs(client) and isinstance(client.access.identity, ConnectedApp):
        spoken, needed = (".".join(map(str, version)) for version in (client.rest_version, APPS_SEE_JOBS))
        raise DatasourceError(
            f"{client.where} speaks REST {spoken}, and connected apps may look at jobs only from REST {needed} (Tableau Server"
            f" 2025.1) on: {client.access.identity.shown} could not wait for the end of a job. Nothing was touched. Sign in with"
            " a personal access token or a user's password, or choose the delivery `republish`."
        )


def wait_for_job(
    client: TableauClient,
    job_id: str,
    *,
    what: str,
    timeout: float = 3600.0,
    out_of_reach: float = 600.0,
) -> FinishedJob:
    """Wait until the job succeeds; raise an own error for every other end. `what` names the job in messages.

    The wait goes on while the server cannot be reached for less than `out_of_reach` seconds, for example during a restart.
    """
    clock = client.retry.clock
    started = seen = clock()
    for _ in client.looks(timeout):
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
        if is_over(job):
            return _ending(job, what)
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


def is_over(job: Any) -> bool:
    """Whether the job has ended, however it ended."""
    # The client reads a time with fractions of a second as none at all.
    return job.completed_at is not None or (job.finish_code >= 0 and str(job.progress) == "100")


def _ending(job: Any, what: str) -> FinishedJob:
    notes = _notes(job)
    if job.finish_code in _DONE:
        return FinishedJob(job.id, notes, job.completed_at)
    notes_text = f": {' '.join(notes)}".rstrip(".") if notes else ""
    if job.finish_code == _CANCELLED:
        raise JobCancelledError(
            f"Job {job.id} ({what}) was cancelled on the server{notes_text}. Run again when it may run."
        )
    if notes:
        raise JobFailedError(
            f"Job {job.id} ({what}) failed on the server{notes_text}. Fix what the note reports and run again."
        )
    # Jobs that publish or change data were seen to end so.
    raise JobFailedError(
        f"Job {job.id} ({what}) failed on the server, which gives no reason over REST. Ask an administrator for the reason"
        " (the server's jobs page, or its backgrounder logs), and run again."
    )


def _notes(job: Any) -> tuple[str, ...]:
    texts = [*(job.notes or ()), *(note.get("text") for note in job.status_notes or ())]
    return tuple(dict.fromkeys(" ".join(text.split()) for text in texts if text and text.strip()))


def changes_since(
    client: TableauClient, datasource: FoundDatasource, since: datetime, *, own: Collection[str] = ()
) -> tuple[str, ...] | None:
    """Return the jobs, except our `own`, that refreshed the datasource or changed its data and ended after that moment of the server's.

    None if the server does not list jobs to this user. Not every server shows such changes in `updatedAt`; every one shows
    publishes, so jobs that publish do not count.
    """
    if not _lists_jobs(client):
        return None
    doing = f"look for jobs that changed {datasource.shown}"
    wanted = {"completed_at__gte": since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    if not NOT_IN_FILTERS & set(datasource.name):
        wanted["title"] = datasource.name
    try:
        jobs = client.call(lambda server: list(server.jobs.filter(**wanted)), doing=doing)
    except RefusedError:
        return None
    later = [job for job in jobs if job.title == datasource.name and job.ended_at and job.ended_at > since]
    # A failed refresh changes nothing; what a failed change of data left behind is unknown.
    changing = [job for job in later if job.status == "Success" or "extract" not in (job.type or "")]
    others = [job.id for job in changing if job.id not in own and not _publishes(job)]
    return tuple(str(job_id) for job_id in others if is_job_of(client, job_id, datasource, doing))


@dataclass(frozen=True)
class EndedRefresh:
    """A refresh of an extract that ended, as the list of jobs shows it: by the name of a datasource or a workbook."""

    job_id: str
    title: str
    started_at: datetime
    seconds: float


_JOBS_A_PAGE = 1000


def refreshes_since(client: TableauClient, since: datetime, *, most_pages: int) -> list[EndedRefresh] | None:
    """Return the extract refreshes that were created since then and ended; None if this user sees no list of jobs."""
    if not _lists_jobs(client):
        return None
    ended: list[EndedRefresh] = []
    for number in range(1, most_pages + 1):
        options = TSC.RequestOptions(pagenumber=number, pagesize=_JOBS_A_PAGE)
        after = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        options.filter.add(
            TSC.Filter(TSC.RequestOptions.Field.CreatedAt, TSC.RequestOptions.Operator.GreaterThanOrEqual, after)
        )
        try:
            jobs, page = client.call(partial(_jobs_page, options=options), doing="list the refreshes of the last days")
        except RefusedError:
            return ended or None
        ended += [
            EndedRefresh(str(job.id), str(job.title), job.started_at, (job.ended_at - job.started_at).total_seconds())
            for job in jobs
            if "extract" in (job.type or "").casefold() and job.started_at and job.ended_at
        ]
        if number * _JOBS_A_PAGE >= page.total_available:
            break
    return ended


def _jobs_page(server: Any, *, options: Any) -> Any:
    return server.jobs.get(options)


def datasource_of_job(client: TableauClient, job_id: str, *, doing: str) -> str | None:
    """Return the id of the datasource that the job refreshed; None if it was a workbook, or the server forgot the job."""
    try:
        job = client.call(lambda server: server.jobs.get_by_id(job_id), doing=doing)
    except RefusedError:
        return None
    return None if job.datasource_id is None else str(job.datasource_id)


def _lists_jobs(client: TableauClient) -> bool:
    """Whether it makes sense to ask for the list; without permission, the server refuses it even so."""
    return client.rest_version >= JOB_LIST_SINCE and shows_jobs(client)


def _publishes(job: Any) -> bool:
    return "publish" in (job.type or "").lower()


def is_job_of(client: TableauClient, job_id: str, datasource: FoundDatasource, doing: str) -> bool:
    """Whether the job is about this datasource: the list of jobs shows names only, and names repeat. A publish names none."""
    return datasource_of_job(client, job_id, doing=doing) == datasource.id


def unfinished_publishes(client: TableauClient, name: str) -> list[str] | None:
    """Return the jobs that may be publishing a datasource of this name; None if the server does not list jobs to this user."""
    if not _lists_jobs(client):
        return None
    doing, found = f"look for a job that publishes {name!r}", []
    # In this order: one that begins meanwhile is in the second list.
    for status in (TSC.BackgroundJobItem.Status.Pending, TSC.BackgroundJobItem.Status.InProgress):
        try:
            jobs = client.call(partial(jobs_with, status=status), doing=doing)
        except RefusedError:
            return None
        found += [job.id for job in jobs if _publishes(job) and job.title in (None, "", name)]
    return list(dict.fromkeys(map(str, found)))


def outlast_publishes(client: TableauClient, name: str, *, what: str, timeout: float) -> bool:
    """Wait until all jobs that may be publishing a datasource of this name have ended, however; False if they cannot be seen.

    The timeout is for all of them together: where jobs have no title, they are anybody's.
    """
    clock = client.retry.clock
    jobs, deadline = unfinished_publishes(client, name), clock() + timeout
    for job_id in jobs or ():
        log.info("Tableau: waiting for job %s, which may publish %r.", job_id, name)
        try:
            wait_for_job(client, job_id, what=what, timeout=max(deadline - clock(), 0.0))
        except RefusedError:
            return False
        except (JobFailedError, JobCancelledError, JobVanishedError) as error:
            log.info("Tableau: it is over: %s", error)
    return jobs is not None


def jobs_with(server: Any, *, status: str) -> list[Any]:
    """The server's list of jobs in this state: names and times, but not of which datasource."""
    return list(server.jobs.filter(status=status))


def cancel_job(client: TableauClient, job_id: str, *, what: str) -> None:
    """Ask the server to stop a job; a finished job is not changed."""
    if client.rest_version < CANCEL_SINCE:
        raise DatasourceError(
            f"Could not cancel job {job_id} ({what}): {client.where} cannot cancel jobs over REST. Stop it on the"
            " server's jobs page."
        )
    client.call(lambda server: server.jobs.cancel(job_id), doing=f"cancel job {job_id} ({what})")
