"""The state of the alerts, as small files: open troubles, what was sent, what waits to be sent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tir_dagster.alerts.events import TOPICS, Event, Recovered, Report, Success, event_from_json, from_json, to_json
from tir_dagster.files import replaced_file
from tir_dagster.spec.alerts import Topic

TOLD_KEPT = 2000
GIVEN_UP_KEPT = 200


class BusyError(Exception):
    """Another process is sending alerts right now."""


@dataclass(frozen=True)
class Trouble:
    """A problem that is not known to be over."""

    key: str
    cause: str
    sentence: str
    since: float
    last: float
    # How many messages were sent; 0 while a sensor's patience lasts.
    count: int = 0
    # The affected extracts, and what ends the trouble for each.
    affected: Mapping[str, Topic] = field(default_factory=dict)
    # What each channel returned: a thread, an incident.
    memory: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Which server is down, if one is.
    scope: str = ""
    # The newest failure, sent or not: an older success ends nothing.
    latest: float = 0.0

    def left_by(self, report: Success | Recovered) -> Mapping[str, Topic]:
        """Return the extracts that are still affected after this report.

        Any refresh that reached the server shows that the server is back. A sensor's read ends the trouble only for
        extracts that a sensor reported: a refresh may sign in as another user.
        """
        if report.at < self.latest:
            return self.affected
        answers = bool(self.scope) and self.scope in report.scopes
        if answers and (isinstance(report, Success) or report.topic == "server"):
            return {}
        return {
            name: topic
            for name, topic in self.affected.items()
            if not (name == report.extract and report.ends(topic)) and not (answers and topic == "sensor")
        }

    def remembering(self, channel: str, memory: Mapping[str, str]) -> Trouble:
        return replace(self, memory={**self.memory, channel: {**self.memory.get(channel, {}), **memory}})


@dataclass(frozen=True)
class Pending:
    """An event that a channel did not take; it is tried once more."""

    channel: str
    event: Event
    due: float
    # Whose settings name the channel.
    extract: str
    # When the first try failed.
    since: float = 0.0


class Book:
    """The folder with the state of the alerts; every change is a file written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock for the block; raise BusyError if another process keeps it too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + seconds
        with (self.folder / "lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise BusyError from None
                    time.sleep(0.05)
            yield  # freed by the system when this process ends, however it ends

    # Troubles

    def troubles(self) -> list[Trouble]:
        troubles = []
        for value in _all(self.folder / "open"):
            with suppress(TypeError):
                troubles.append(Trouble(**value))
        return sorted(troubles, key=lambda trouble: trouble.since)

    def trouble(self, key: str) -> Trouble | None:
        return next((trouble for trouble in self.troubles() if trouble.key == key), None)

    def keep(self, trouble: Trouble) -> None:
        _write(self._file("open", trouble.key), asdict(trouble))

    def close(self, key: str) -> None:
        self._file("open", key).unlink(missing_ok=True)

    # What was sent

    def is_told(self, ident: str) -> bool:
        return ident in self._told()

    def mark_told(self, *idents: str) -> None:
        idents_told = [*(ident for ident in self._told() if ident not in idents), *idents]
        _write(self.folder / "told.json", idents_told[-TOLD_KEPT:])

    def _told(self) -> list[str]:
        idents = _read(self.folder / "told.json")
        return idents if isinstance(idents, list) else []

    # When things last worked: an older failure is not sent

    def worked_at(self, extract: str, topic: Topic) -> float:
        return self._worked().get(extract, {}).get(topic, 0.0)

    def note_worked(self, report: Success | Recovered) -> None:
        worked = self._worked()
        known = worked.get(report.extract, {})
        now = {topic: max(report.at, known.get(topic, 0.0)) for topic in TOPICS if report.ends(topic)}
        _write(self.folder / "worked.json", {**worked, report.extract: {**known, **now}})

    def _worked(self) -> dict[str, dict[str, float]]:
        worked = _read(self.folder / "worked.json")
        return worked if isinstance(worked, dict) and all(isinstance(times, dict) for times in worked.values()) else {}

    # Reports that wait for the sensor

    def put(self, report: Report, *, slot: str = "") -> None:
        """Leave a report for the sensor, without the lock; a slot keeps only its newest report."""
        _write(self._file("inbox", slot or report.id), {"slot": slot or report.id, **to_json(report)})

    def reports(self, extracts: Collection[str]) -> dict[str, Report]:
        """Return the waiting reports of these extracts, by slot."""
        reports = {}
        for value in _all(self.folder / "inbox"):
            with suppress(KeyError, TypeError, ValueError):
                report = from_json(value)
                if report.extract in extracts:
                    reports[str(value["slot"])] = report
        return reports

    def drop_report(self, slot: str, ident: str) -> None:
        """Remove a report that was sent; a newer one in its slot stays."""
        value = _read(self._file("inbox", slot))
        if isinstance(value, dict) and value.get("id") == ident:
            self._file("inbox", slot).unlink(missing_ok=True)

    # Events that could not be sent

    def postpone(self, pending: Pending) -> None:
        """Keep the event for later, in place of an earlier one of the same trouble."""
        _write(self._pending_file(pending.channel, pending.event.key), asdict(pending))

    def pending(self) -> list[Pending]:
        waiting = []
        for value in _all(self.folder / "pending"):
            with suppress(KeyError, TypeError):
                waiting.append(Pending(**{**value, "event": event_from_json(value["event"])}))
        return sorted(waiting, key=lambda pending: pending.due)

    def drop_pending(self, channel: str, key: str) -> None:
        self._pending_file(channel, key).unlink(missing_ok=True)

    def give_up(self, pending: Pending, why: str) -> None:
        """Drop an event that could not be sent, and record why."""
        lines = self.given_up()
        lines.append({"channel": pending.channel, "title": pending.event.title, "why": why, "at": time.time()})
        _write(self.folder / "given_up.json", lines[-GIVEN_UP_KEPT:])
        self.drop_pending(pending.channel, pending.event.key)

    def given_up(self) -> list[dict[str, Any]]:
        lines = _read(self.folder / "given_up.json")
        return lines if isinstance(lines, list) else []

    # Successes of a day, and the duration of the last full refresh, for comparison

    def collect(self, destination: str, success: Report) -> None:
        _write(self._file("daily", f"{destination}\0{success.id}"), {"to": destination, **to_json(success)})

    def collected(self, destination: str) -> list[Report]:
        reports = []
        for value in _all(self.folder / "daily"):
            with suppress(KeyError, TypeError, ValueError):
                reports += [from_json(value)] if value.get("to") == destination else []
        return sorted(reports, key=lambda report: report.at)

    def sent(self, destination: str, successes: list[Report]) -> None:
        for success in successes:
            self._file("daily", f"{destination}\0{success.id}").unlink(missing_ok=True)

    def full_seconds(self, extract: str) -> float | None:
        seconds_by_extract = _read(self.folder / "full.json")
        seconds = seconds_by_extract.get(extract) if isinstance(seconds_by_extract, dict) else None
        return float(seconds) if isinstance(seconds, (int, float)) else None

    def note_full(self, extract: str, seconds: float) -> None:
        value = _read(self.folder / "full.json")
        _write(self.folder / "full.json", {**(value if isinstance(value, dict) else {}), extract: seconds})

    def _file(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _pending_file(self, channel: str, key: str) -> Path:
        return self._file("pending", f"{channel}\0{key}")


def _all(folder: Path) -> list[dict[str, Any]]:
    values = [_read(path) for path in sorted(folder.glob("[!.]*.json"))]
    return [value for value in values if isinstance(value, dict)]


def _read(path: Path) -> Any:
    """Read a file; None if it is missing or damaged: at worst something is sent twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    with replaced_file(path) as beside:
        beside.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
