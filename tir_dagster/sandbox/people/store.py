"""What Slack and ServiceNow got: messages and incidents in one small file, the newest ones."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tir_dagster.background import read_json, write_json

KEPT = 500
# A resolved incident (6) is active until it closes, as in ServiceNow after days.
ENDED = ("7", "8")
RESOLVED = "6"


class Store:
    """Safe to ask from every thread; written beside and renamed at each change."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "people.json"
        self._lock = threading.Lock()
        stored = read_json(self._file)
        self._messages: list[dict[str, Any]] = stored.get("messages", [])
        self._incidents: list[dict[str, Any]] = stored.get("incidents", [])
        self._number: int = stored.get("number", 10_000)

    def messages(self) -> list[dict[str, Any]]:
        with self._lock:
            return [dict(message) for message in self._messages]

    def incidents(self) -> list[dict[str, Any]]:
        with self._lock:
            return [dict(incident) for incident in self._incidents]

    def clear(self) -> None:
        with self._lock:
            self._messages, self._incidents = [], []
            self._save()

    def post(self, channel: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """The message as it was kept; None for an answer to a message that is not there."""
        with self._lock:
            thread = message.get("thread_ts")
            if thread and not any((one["ts"], one["channel"]) == (thread, channel) for one in self._messages):
                return None
            kept = {**message, "channel": channel, "ts": self._next_ts()}
            self._messages = [*self._messages, kept][-KEPT:]
            self._save()
            return dict(kept)

    def _next_ts(self) -> str:
        """Slack's time stamps are the messages' ids: never two alike."""
        now = f"{time.time():.6f}"
        last = self._messages[-1]["ts"] if self._messages else ""
        return now if now > last else f"{float(last) + 0.000001:.6f}"

    def create(self, fields: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            incident = {
                "state": "1",
                "urgency": "3",
                "impact": "3",
                **fields,
                "sys_id": uuid.uuid4().hex,
                "number": f"INC{self._number:07d}",
                "opened_at": _now(),
                "notes": [],
            }
            self._incidents = [*self._incidents, self._changed(incident, fields)][-KEPT:]
            self._save()
            return dict(self._incidents[-1])

    def change(self, sys_id: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        with self._lock:
            for at, incident in enumerate(self._incidents):
                if incident["sys_id"] == sys_id:
                    own = {name: incident[name] for name in ("sys_id", "number", "opened_at", "notes")}
                    self._incidents[at] = self._changed({**incident, **fields, **own}, fields)
                    self._save()
                    return dict(self._incidents[at])
        return None

    def _changed(self, incident: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Notes are a journal: each is added, and the field itself reads empty."""
        note = fields.get("work_notes")
        notes = [*incident["notes"], {"at": _now(), "text": note}] if note else incident["notes"]
        active = "false" if str(incident["state"]) in ENDED else "true"
        ended = _now() if str(incident["state"]) in (RESOLVED, *ENDED) else ""
        return {**incident, "work_notes": "", "notes": notes, "active": active, "resolved_at": ended}

    def find(self, wanted: list[tuple[str, bool, str]], limit: int) -> list[dict[str, Any]]:
        """Incidents by terms: a field's name, whether it must equal or must not, and the text."""
        found = [
            one
            for one in self.incidents()
            if all((str(one.get(name, "")) == text) == equal for name, equal, text in wanted)
        ]
        return found[:limit]

    def _save(self) -> None:
        write_json(self._file, {"messages": self._messages, "incidents": self._incidents, "number": self._number})


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
