"""Reports and channels for tests: short ways to say what happened, and a channel that keeps what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.alerts.events import Event, Failure, Report, Success
from tir_dagster.alerts.sending import AlertSender, Note
from tir_dagster.alerts.storage import AlertStorage
from tir_dagster.spec.alerts import Alerts, Cause, SlackAlerts

NOON = 1_700_049_600.0


def failed(ident: str, extract: str = "orders", at: float = NOON, **more: Any) -> Failure:
    given = {"cause": Cause.STEP_FAILED, "sentence": "The step broke. Fix it.", "run_id": ident, **more}
    return Failure(id=ident, extract=extract, at=at, **given)


def down(ident: str, extract: str, at: float = NOON, **more: Any) -> Failure:
    return failed(ident, extract, at, cause=Cause.SERVER_DOWN, scope="tableau.example.com", **more)


def refreshed(ident: str, extract: str = "orders", at: float = NOON, **more: Any) -> Success:
    given = {
        "published": True,
        "decision": "incremental",
        "rows_purged": 5,
        "rows_appended": 7,
        "rows": 1000,
        "slices": ("2025-03",),
        "seconds": 4.0,
        "datasource": "sales/Orders",
        **more,
    }
    return Success(id=ident, extract=extract, at=at, **given)


@dataclass
class Listener:
    """A channel that keeps what it is told; fails as long as `trouble` says something."""

    trouble: str = ""
    heard: list[Event] = field(default_factory=list)

    def told(self, event: Event) -> Mapping[str, str] | None:
        if self.trouble:
            raise OSError(self.trouble)
        self.heard.append(event)
        return {"story": event.remembered.get("story") or event.id}

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.heard]


@dataclass
class Desk:
    """Everything that tells people, on a folder of its own, with a clock that a test moves."""

    folder: Path
    listener: Listener = field(default_factory=Listener)
    now: float = NOON
    alerts: Alerts = field(default_factory=lambda: Alerts(slack=SlackAlerts("#mychannel"), timeout=2.0))
    env: dict[str, str] = field(default_factory=dict)
    extracts: tuple[str, ...] = ("orders", "customers", "items")
    by_name: dict[str, Alerts] = field(default_factory=dict)
    channels: tuple[str, ...] = ("slack:#mychannel",)

    @property
    def storage(self) -> AlertStorage:
        return AlertStorage(self.folder)

    def tell(self, *reports: Report) -> list[Note]:
        return AlertSender(
            self.storage,
            {**dict.fromkeys(self.extracts, self.alerts), **self.by_name},
            lambda _, __: dict.fromkeys(self.channels, lambda: self.listener),
            seconds=self.alerts.timeout,
            env=self.env,
            clock=lambda: self.now,
        ).send(reports)
