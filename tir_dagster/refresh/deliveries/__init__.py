"""How an extract reaches Tableau: one module per delivery, each behind the same small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tir_dagster.refresh.context import Looked, Published, ServerLook
    from tir_dagster.refresh.state.records import Confirmation, Intent
    from tir_dagster.refresh.state.versions import Version
    from tir_dagster.tableau.client import TableauClient
    from tir_dagster.tableau.outcome import PublishOutcome


@dataclass(frozen=True)
class RecoveredPublish:
    """What became of an interrupted publish, and what the server holds now."""

    outcome: PublishOutcome
    server: ServerLook


class Delivery(Protocol):
    """Brings versions of one extract to the server, and repairs what a crash left half done."""

    def publish(self, looked: Looked, version: Version) -> Published:
        """Bring the version to the server over exactly what was looked at."""

    def recover(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, confirmed: Confirmation | None
    ) -> RecoveredPublish:
        """Bring what a crash interrupted to its end, as far as this delivery must; else return what is known."""
