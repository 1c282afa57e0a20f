"""A refresh of our own: one that runs already is waited for first, because it may have read its source too early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.find import reread
from tir_dagster.tableau.found import FoundDatasource
from tir_dagster.tableau.increment_refresh import start_incremental_refresh
from tir_dagster.tableau.jobs import (
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    StartedRefresh,
    start_refresh,
    wait_for_job,
)

_TURNS = 3

Log = Callable[[str], None]


@dataclass(frozen=True)
class OwnRefresh:
    """Our job, what the server held before it, and whether another one had to end first."""

    job_id: str
    before: FoundDatasource
    waited: bool


def start_own_refresh(
    client: TableauClient, found: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> OwnRefresh:
    """Start a refresh of this kind. However a refresh that runs already ends, ours follows."""
    waited = False
    for _ in range(_TURNS):
        start = start_incremental_refresh if incremental else _start_full
        started = start(client, found)
        if not started.joined:
            return OwnRefresh(started.job_id, found, waited)
        waited = True
        log(f"another refresh of {found.shown} is at work: waiting for job {started.job_id} before ours")
        with suppress(JobFailedError, JobCancelledError, JobVanishedError):
            wait_for_job(client, started.job_id, what=f"another refresh of {found.shown}", timeout=timeout)
        found = reread(client, found) or found
    kind = "incremental" if incremental else "full"
    raise DatasourceError(
        f"Could not start the {kind} refresh of {found.shown}: {client.where} is refreshing it for somebody else again and"
        " again. Look at its refresh schedules, and run again."
    )


def _start_full(client: TableauClient, found: FoundDatasource) -> StartedRefresh:
    return start_refresh(client, found, incremental=False)
