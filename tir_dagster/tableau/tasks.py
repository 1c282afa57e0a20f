"""The server's own refresh tasks of a datasource: which there are, when they run, and a word of warning about them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.found import FoundDatasource
from tir_dagster.tableau.trouble import RefusedError

# The first REST version that lists tasks and runs them.
TASKS_SINCE = (2, 6)


@dataclass(frozen=True)
class RefreshTask:
    """A refresh that the server runs by its own clock, or when it is asked to."""

    id: str
    incremental: bool
    schedule: str
    schedule_id: str | None = None
    active: bool = True
    next_run_at: datetime | None = None
    last_run_at: datetime | None = None
    failures: int = 0

    @property
    def runs_by_itself(self) -> bool:
        """A task without a time is run by hand only."""
        return self.active and self.next_run_at is not None

    @property
    def warning(self) -> str:
        """A sentence for people who have refreshes of their own on the same datasource."""
        return f"{self._harm} Remove the task on the server, or leave the refreshes to Tableau with the delivery `trigger`."

    @property
    def needed_warning(self) -> str:
        """The same for the task that is run from here, where the server has no other way."""
        return f"{self._harm} Suspend its schedule: the task is run from here when it is needed."

    @property
    def _harm(self) -> str:
        kind = "an incremental refresh" if self.incremental else "a full refresh"
        when = f", next at {self.next_run_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if self.next_run_at else ""
        harm = (
            "it appends new rows only, and the next refresh has to compare the whole extract with what it knows"
            if self.incremental
            else "it reads the whole source again, and the next refresh has to compare the whole extract"
        )
        return f"Tableau runs {kind} of this datasource on its own ({self.schedule}{when}): {harm}."


def refresh_tasks(client: TableauClient, found: FoundDatasource) -> list[RefreshTask]:
    """The server's own refresh tasks of the datasource; none on servers that do not list them."""
    if client.rest_version < TASKS_SINCE:
        return []
    doing = f"list the refresh tasks of {found.shown}"
    tasks = client.call(lambda server: list(TSC.Pager(server.tasks, TSC.RequestOptions(pagesize=1000))), doing=doing)
    return [
        _task(task)
        for task in tasks
        if task.target is not None and task.target.type == "datasource" and task.target.id == found.id
    ]


def _task(task: Any) -> RefreshTask:
    schedule = task.schedule_item
    name = getattr(schedule, "name", None)
    return RefreshTask(
        id=task.id,
        # Anything that does not say so is a full refresh.
        incremental="increment" in (task.task_type or "").casefold(),
        schedule=f"schedule {name!r}" if name else "a schedule of its own",
        schedule_id=getattr(schedule, "id", None),
        active=getattr(schedule, "state", None) != TSC.ScheduleItem.State.Suspended,
        next_run_at=getattr(schedule, "next_run_at", None),
        last_run_at=task.last_run_at,
        failures=task.consecutive_failed_count,
    )


def scheduled_refreshes(client: TableauClient, found: FoundDatasource) -> tuple[RefreshTask, ...]:
    """The refreshes that Tableau runs on the datasource by its clock, each with a sentence to warn with.

    A user who may not list tasks sees none: a warning is no reason to stop a refresh.
    """
    try:
        return tuple(task for task in refresh_tasks(client, found) if task.runs_by_itself)
    except RefusedError:
        return ()
