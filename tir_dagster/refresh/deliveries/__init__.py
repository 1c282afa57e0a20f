"""How an extract reaches Tableau: one module per delivery, each behind the same small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import datetime

    from tir_dagster.refresh.context import Looked, Published, ServerLook
    from tir_dagster.refresh.state.records import Confirmation, Intent
    from tir_dagster.refresh.state.versions import Version
    from tir_dagster.tableau.client import TableauClient
    from tir_dagster.tableau.outcome import PublishOutcome


@dataclass(frozen=True)
class RecoveredPublish:
    """The outcome of an interrupted publish, and what the server holds now."""

    outcome: PublishOutcome
    server: ServerLook
    # When its job ended, by the server's clock, if that is known.
    ended_at: datetime | None = None


class Delivery(Protocol):
    """Publishes versions of one extract, and completes a publish that a crash interrupted."""

    def publish(self, looked: Looked, version: Version) -> Published:
        """Bring the version to the server over exactly what was looked at."""

    def recover(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, confirmed: Confirmation | None
    ) -> RecoveredPublish:
        """Complete or undo an interrupted publish if this delivery has to; return the outcome."""
