"""The server's own refresh tasks and subscriptions of a datasource, and warnings about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource
from tir_dagster.tableau.failures import RefusedError

# The first REST version that lists tasks and runs them.
TASKS_SINCE = (2, 6)


@dataclass(frozen=True)
class RefreshTask:
    """A refresh that the server runs by a schedule, or on request."""

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
    if client.rest_version < TASKS_SINCE:
        return []
    doing = f"list the refresh tasks of {datasource.shown}"
    tasks = client.call(lambda server: list(TSC.Pager(server.tasks, TSC.RequestOptions(pagesize=1000))), doing=doing)
    return [
        _task(task)
        for task in tasks
        if task.target is not None and task.target.type == "datasource" and task.target.id == datasource.id
    ]


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
        last_run_at=task.last_run_at,
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


# Subscriptions belong to the whole site: those of a large site are not read at every refresh.
_MOST_SUBSCRIPTIONS = 1000


@dataclass(frozen=True)
class Attachments:
    """Tasks of the datasource and subscriptions of the site, by id, each in words; None if they could not be read."""

    tasks: Mapping[str, str] | None = None
    subscriptions: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Attachments:
        return Attachments(**value)


def list_attachments(client: TableauClient, datasource: FoundDatasource) -> Attachments:
    """Return the tasks and subscriptions of now; what this user may not see must not stop a refresh."""
    return Attachments(_tasks(client, datasource), _subscriptions(client, datasource))


def _tasks(client: TableauClient, datasource: FoundDatasource) -> dict[str, str] | None:
    try:
        return {task.id: _in_words(task) for task in refresh_tasks(client, datasource)}
    except DatasourceError:
        return None


def _in_words(task: RefreshTask) -> str:
    return f"{'incremental' if task.incremental else 'full'} refresh on {task.schedule}"


def _subscriptions(client: TableauClient, datasource: FoundDatasource) -> dict[str, str] | None:
    options = TSC.RequestOptions(pagesize=_MOST_SUBSCRIPTIONS)
    doing = f"list the subscriptions beside {datasource.shown}"
    try:
        items, pages = client.call(lambda server: server.subscriptions.get(options), doing=doing)
    except DatasourceError:
        return None
    if pages.total_available > _MOST_SUBSCRIPTIONS:
        return None
    return {str(item.id): f"subscription {item.subject!r}" for item in items}


def gone(before: Attachments, after: Attachments, datasource: FoundDatasource) -> tuple[str, ...]:
    """Return a warning for each task and subscription that the publish removed."""
    tasks = [
        f"{datasource.shown} lost its {task} when it was overwritten. Create it again on the server."
        for task in _missing(before.tasks, after.tasks)
    ]
    subscriptions = [
        f"The {subscription} is gone since {datasource.shown} was overwritten. Unless somebody removed it on purpose,"
        " subscribe again on the server."
        for subscription in _missing(before.subscriptions, after.subscriptions)
    ]
    return (*tasks, *subscriptions)


def _missing(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> list[str]:
    if before is None or after is None:
        return []
    return [text for key, text in before.items() if key not in after]
