"""Start a refresh of our own: incremental by the best way that the server has, never a full one in its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from defusedxml.ElementTree import fromstring

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, reread, server_version, settled
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import (
    CREATE_TASK,
    INCREMENTAL_SINCE,
    REFRESH_SINCE,
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    StartedRefresh,
    cancel_job,
    incremental_task,
    is_incremental_job,
    start_refresh,
    wait_for_job,
)
from tir_dagster.tableau.tasks import TASKS_SINCE, RefreshTask


class FullRefreshError(DatasourceError):
    """The server began a full refresh where an incremental one was asked for; it was told to stop."""


class Way(Enum):
    """How an incremental refresh is started."""

    DIRECT = "the server is asked for it"
    TASK = "an incremental task of the datasource is run"
    SCHEDULE = "the schedule of an incremental task is moved"


@dataclass(frozen=True)
class Route:
    """The way for one datasource; `task` is None where the server is asked directly or does not list tasks."""

    way: Way
    task: RefreshTask | None = None


def find_route(client: TableauClient, datasource: FoundDatasource) -> Route:
    """The way to an incremental refresh; an error where there is none. Ask before anything is purged."""
    by_hand = _may_run_now(client)
    if by_hand and client.rest_version >= INCREMENTAL_SINCE:
        return Route(Way.DIRECT)
    if client.rest_version < TASKS_SINCE:
        return Route(Way.SCHEDULE)
    task = incremental_task(client, datasource)
    if task is None:
        version = ".".join(map(str, client.rest_version))
        reason = f"it speaks REST {version}" if by_hand else "its site forbids to run refreshes by hand"
        raise DatasourceError(
            f"There is no way to refresh {datasource.shown} incrementally on {client.where}: {reason}, and the datasource has"
            f" no incremental refresh task. {CREATE_TASK}"
        )
    return Route(Way.TASK if by_hand else Way.SCHEDULE, task)


def may_refresh_fully(client: TableauClient) -> bool:
    """Whether a full refresh can be started from here at all."""
    return client.rest_version >= REFRESH_SINCE and _may_run_now(client)


def _may_run_now(client: TableauClient) -> bool:
    """Whether the site lets people run refreshes; a site that does not say so does. The client reads silence as no."""
    try:
        answer = client.call(_site, doing="read the site's settings")
    except RefusedError:
        return True
    return answer.get("runNowEnabled", "true").casefold() != "false"


def _site(server: Any) -> dict[str, str]:
    answer = server.sites.get_request(f"{server.sites.baseurl}/{server.site_id}")
    element = fromstring(answer.content).find(".//t:site", namespaces=server.namespace)
    return {} if element is None else dict(element.attrib)


def start_incremental_refresh(client: TableauClient, datasource: FoundDatasource) -> StartedRefresh:
    """Start an incremental refresh now, or join the refresh that is queued or runs already.

    Of one that is joined `incremental` tells the kind: False means that somebody else's full refresh is at work, which
    ends with all rows of the source, and None that only the data can tell.
    """
    started = start_refresh(client, datasource, incremental=True)
    kind = is_incremental_job(client, started.job_id, datasource)
    if kind is False and not started.joined:
        what = f"refresh of {datasource.shown}"
        cancel_job(client, started.job_id, what=what)
        raise FullRefreshError(
            f"{client.where} began a full refresh of {datasource.shown} where an incremental one was asked for; job"
            f" {started.job_id} was told to stop. Check that the datasource is set up for incremental refreshes."
        )
    return StartedRefresh(started.job_id, joined=started.joined, incremental=kind)


_TURNS = 3

Log = Callable[[str], None]


@dataclass(frozen=True)
class OwnRefresh:
    """Our job, what the server held before it, and whether another one had to end first."""

    job_id: str
    before: FoundDatasource
    waited: bool


def start_own_refresh(
    client: TableauClient, datasource: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> OwnRefresh:
    """Start a refresh of this kind. However a refresh that runs already ends, ours follows."""
    waited = False
    for _ in range(_TURNS):
        start = start_incremental_refresh if incremental else _start_full
        started = start(client, datasource)
        if not started.joined:
            return OwnRefresh(started.job_id, datasource, waited)
        waited = True
        log(f"another refresh of {datasource.shown} is at work: waiting for job {started.job_id} before ours")
        with suppress(JobFailedError, JobCancelledError, JobVanishedError):
            wait_for_job(client, started.job_id, what=f"another refresh of {datasource.shown}", timeout=timeout)
        datasource = reread(client, datasource) or datasource
    kind = "incremental" if incremental else "full"
    raise DatasourceError(
        f"Could not start the {kind} refresh of {datasource.shown}: {client.where} is refreshing it for somebody else again and"
        " again. Look at its refresh schedules, and run again."
    )


def _start_full(client: TableauClient, datasource: FoundDatasource) -> StartedRefresh:
    return start_refresh(client, datasource, incremental=False)


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


_ROWS = re.compile(r"\b(\d[\d,]*) rows\b")


@dataclass(frozen=True)
class TriggeredRefresh:
    """A refresh that ended well. `rows` is how many the server says it loaded: all of them, or the appended ones.

    `joined` tells that somebody else's refresh was waited for first.
    """

    job_id: str
    joined: bool
    seconds: float
    rows: int | None
    datasource: FoundDatasource


def refresh_by_server(
    client: TableauClient, datasource: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> TriggeredRefresh:
    """Start the server's own refresh of this kind and wait for its end; every other end is an error with the job's notes."""
    clock = client.retry.clock
    begun = clock()
    what = f"{'incremental' if incremental else 'full'} refresh of {datasource.shown}"
    refresh = start_own_refresh(client, datasource, incremental=incremental, log=log, timeout=timeout)
    log(f"{what}: job {refresh.job_id}")
    rows: int | None = None
    try:
        notes = wait_for_job(client, refresh.job_id, what=what, timeout=timeout).notes
    except JobVanishedError as vanished:
        now = _landed(client, refresh.before, what, vanished)
        log(f"the server forgot job {refresh.job_id}, but the datasource is another one than before: it was refreshed")
    else:
        rows = rows_in_notes(notes)
        log(" ".join(notes) or f"{what}: done, without a note")
        now = settled(client, refresh.before)
    return TriggeredRefresh(refresh.job_id, refresh.waited, round(clock() - begun, 3), rows, now)


def _landed(client: TableauClient, before: FoundDatasource, what: str, vanished: JobVanishedError) -> FoundDatasource:
    """The datasource, if it shows that the refresh took place; else nobody knows."""
    now = settled(client, before)
    if server_version(now) != server_version(before):
        return now
    raise JobVanishedError(
        f"{client.where} no longer knows the job of the {what}, and the datasource is as it was before: whether the refresh"
        " took place is unknown. Look at the datasource's refresh history on the server, and run again."
    ) from vanished


def rows_in_notes(notes: tuple[str, ...]) -> int | None:
    """How many rows the job's notes speak of; None where they speak of none."""
    # Without what stands in quotes: a datasource may be called "Top 10 rows".
    counts = [match[1] for note in notes if (match := _ROWS.search(_QUOTED.sub("", note)))]
    return int(counts[0].replace(",", "")) if counts else None
