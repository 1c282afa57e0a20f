"""The delivery `republish`: the whole extract is published, into a package kept to the letter or as a new datasource."""

from __future__ import annotations

from contextlib import nullcontext

from tir_dagster.refresh.context import Looked, Published, RefreshContext
from tir_dagster.refresh.deliveries import RecoveredPublish
from tir_dagster.refresh.deliveries.whole import publish_whole
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import Version
from tir_dagster.tableau.client import TableauClient


class Republish:
    """Publishes the version's file; an interrupted publish landed or did not, so there is nothing to complete."""

    def __init__(self, context: RefreshContext) -> None:
        self._context = context

    def publish(self, looked: Looked, version: Version) -> Published:
        return publish_whole(self._context, looked, version, file=nullcontext(version.extract))

    def recover(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, confirmed: Confirmation | None
    ) -> RecoveredPublish:
        del client, intent, confirmed
        return last
