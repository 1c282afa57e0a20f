"""The delivery `trigger`: the server's own refresh is started and waited for; nothing of the datasource is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC

from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version, settled
from tir_dagster.tableau.jobs import JobVanishedError, wait_for_job
from tir_dagster.tableau.refreshes import start_own_refresh
from tir_dagster.tableau.tasks import RefreshTask, scheduled_refreshes

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_ROWS = re.compile(r"\b(\d[\d,]*) rows\b")

Log = Callable[[str], None]


@dataclass(frozen=True)
class TriggeredRefresh:
    """A refresh that ended well. `rows` is how many the server says it loaded: all of them, or the appended ones.

    `joined` tells that somebody else's refresh was waited for first.
    """

    job_id: str
    joined: bool
    seconds: float
    rows: int | None
    found: FoundDatasource


def refresh_by_server(
    client: TableauClient, found: FoundDatasource, *, incremental: bool, log: Log, timeout: float
) -> TriggeredRefresh:
    """Start the server's own refresh of this kind and wait for its end; every other end is an error with the job's notes."""
    clock = client.retry.clock
    begun = clock()
    what = f"{'incremental' if incremental else 'full'} refresh of {found.shown}"
    own = start_own_refresh(client, found, incremental=incremental, log=log, timeout=timeout)
    log(f"{what}: job {own.job_id}")
    rows: int | None = None
    try:
        notes = wait_for_job(client, own.job_id, what=what, timeout=timeout).notes
    except JobVanishedError as vanished:
        now = _landed(client, own.before, what, vanished)
        log(f"the server forgot job {own.job_id}, but the datasource is another one than before: it was refreshed")
    else:
        rows = rows_told(notes)
        log(" ".join(notes) or f"{what}: done, without a note")
        now = settled(client, own.before)
    return TriggeredRefresh(own.job_id, own.waited, round(clock() - begun, 3), rows, now)


def _landed(client: TableauClient, before: FoundDatasource, what: str, vanished: JobVanishedError) -> FoundDatasource:
    """The datasource, if it shows that the refresh took place; else nobody knows."""
    now = settled(client, before)
    if server_version(now) != server_version(before):
        return now
    raise JobVanishedError(
        f"{client.where} no longer knows the job of the {what}, and the datasource is as it was before: whether the refresh"
        " took place is unknown. Look at the datasource's refresh history on the server, and run again."
    ) from vanished


def rows_told(notes: tuple[str, ...]) -> int | None:
    """How many rows the job's notes speak of; None where they speak of none."""
    # Without what stands in quotes: a datasource may be called "Top 10 rows".
    told = [found[1] for note in notes if (found := _ROWS.search(_QUOTED.sub("", note)))]
    return int(told[0].replace(",", "")) if told else None


def schedule_warnings(client: TableauClient, found: FoundDatasource) -> tuple[str, ...]:
    """A sentence for each refresh that Tableau also runs on the datasource by its own clock."""
    return tuple(_warning(found, task) for task in scheduled_refreshes(client, found))


def _warning(found: FoundDatasource, task: RefreshTask) -> str:
    kind = "an incremental" if task.incremental else "a full"
    when = f", next at {task.next_run_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if task.next_run_at else ""
    return (
        f"Tableau also runs {kind} refresh of {found.shown} on its own ({task.schedule}{when}), whether the source changed or"
        " not. Remove the task on the server if the refreshes started from here are enough."
    )
