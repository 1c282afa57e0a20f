"""What hangs on a datasource without being part of it: refresh tasks and subscriptions, looked at before a publish and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.found import FoundDatasource
from tir_dagster.tableau.tasks import RefreshTask, refresh_tasks

# They belong to the whole site, so that a large one is not read through for every refresh.
_MOST_SUBSCRIPTIONS = 1000


@dataclass(frozen=True)
class Beside:
    """Tasks of the datasource and subscriptions of the site, by id, each in words; None where nobody could look."""

    tasks: Mapping[str, str] | None = None
    subscriptions: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Beside:
        return Beside(**value)


def look_beside(client: TableauClient, found: FoundDatasource) -> Beside:
    """What is there now. Whatever the server does not show to this user is no reason to stop a refresh."""
    return Beside(_tasks(client, found), _subscriptions(client, found))


def _tasks(client: TableauClient, found: FoundDatasource) -> dict[str, str] | None:
    try:
        return {task.id: _in_words(task) for task in refresh_tasks(client, found)}
    except DatasourceError:
        return None


def _in_words(task: RefreshTask) -> str:
    return f"{'incremental' if task.incremental else 'full'} refresh on {task.schedule}"


def _subscriptions(client: TableauClient, found: FoundDatasource) -> dict[str, str] | None:
    options = TSC.RequestOptions(pagesize=_MOST_SUBSCRIPTIONS)
    doing = f"list the subscriptions beside {found.shown}"
    try:
        items, pages = client.call(lambda server: server.subscriptions.get(options), doing=doing)
    except DatasourceError:
        return None
    if pages.total_available > _MOST_SUBSCRIPTIONS:
        return None
    return {str(item.id): f"subscription {item.subject!r}" for item in items}


def gone(before: Beside, after: Beside, found: FoundDatasource) -> tuple[str, ...]:
    """A sentence about each that was there before the publish and is there no more."""
    tasks = [
        f"{found.shown} lost its {task} when it was published over. Put it back on the server."
        for task in _missing(before.tasks, after.tasks)
    ]
    subscriptions = [
        f"The {subscription} is gone since {found.shown} was published over. Unless somebody ended it on purpose,"
        " subscribe again on the server."
        for subscription in _missing(before.subscriptions, after.subscriptions)
    ]
    return (*tasks, *subscriptions)


def _missing(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> list[str]:
    if before is None or after is None:
        return []
    return [text for key, text in before.items() if key not in after]
