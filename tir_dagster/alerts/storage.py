"""The files of the alerts, in TIR_HOME/alerts: their state, reports left for the sensor, and running commands."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tir_dagster.alerts.events import Event, Problem, Report, Success, from_json, read_fields, to_json
from tir_dagster.alerts.problems import AlertState, WaitingAlert
from tir_dagster.files import private_folder, replaced_file
from tir_dagster.refresh.state.lease import LeaseHeldError, is_abandoned, lease
from tir_dagster.refresh.state.mirror import drop, look, mirror_of, push, write

T = TypeVar("T")
_STATE = ("open", "pending", "daily", "worked.json", "full.json", "given_up.json", "told.json")
_COMMAND = re.compile(r"([a-z][a-z0-9_]*)@(\d+\.\d+)")


class BusyError(Exception):
    """Another process is sending alerts right now."""


class AlertStorage:
    """The folder of the alerts; every change is a file written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Hold the lock for the block; raise BusyError if another process keeps it too long."""
        private_folder(self.folder)
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
            # The lock is freed by the system when this process ends, however it ends.
            if mirror_of(self.folder) is None:
                yield
                return
            try:
                shared = lease(self.folder / "lease.json", purpose="alerts", wait_seconds=deadline - time.monotonic())
                with shared:
                    yield
            except LeaseHeldError:
                raise BusyError from None

    # The state: one file for each problem, waiting alert and collected success, because they are many and change alone

    def load(self) -> AlertState:
        worked = _read(self.folder / "worked.json", {})
        full = _read(self.folder / "full.json", {})
        return AlertState(
            problems={problem.key: problem for problem in self.problems()},
            waiting={(waiting.channel, waiting.event.key): waiting for waiting in self._all("pending", _waiting)},
            collected={(channel, success.id): success for channel, success in self._all("daily", _collected)},
            worked={name: times for name, times in worked.items() if isinstance(times, dict)},
            full_seconds={name: took for name, took in full.items() if isinstance(took, (int, float))},
            given_up=tuple(_read(self.folder / "given_up.json", [])),
            handled=tuple(_read(self.folder / "told.json", [])),
        )

    def problems(self) -> list[Problem]:
        """Return the open problems, the oldest first."""
        look(self.folder)
        return sorted(self._all("open", partial(read_fields, Problem)), key=lambda problem: problem.since)

    def save(self, before: AlertState, after: AlertState) -> None:
        """Write what changed; handled reports last, so that an interrupted one is sent again and not lost."""
        self._save_each("pending", before.waiting, after.waiting)
        self._save_each("daily", before.collected, after.collected)
        self._save_each("open", before.problems, after.problems)
        for name, old, new in (
            ("worked", before.worked, after.worked),
            ("full", before.full_seconds, after.full_seconds),
            ("given_up", before.given_up, after.given_up),
            ("told", before.handled, after.handled),
        ):
            if new != old:
                _write(self.folder / f"{name}.json", new)
        if after != before:
            push(*(self.folder / name for name in _STATE))

    def _save_each(self, kind: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        for key in before.keys() | after.keys():
            file = self._file(kind, key if isinstance(key, str) else "\0".join(key))
            value = after.get(key)
            if value is None:
                file.unlink(missing_ok=True)
            elif value != before.get(key):
                _write(file, {"to": key[0], **to_json(value)} if kind == "daily" else asdict(value))

    # Reports that wait for the sensor

    def leave(self, report: Report, *, slot: str = "") -> None:
        """Leave a report for the sensor, without the lock; a slot keeps only its newest report."""
        private_folder(self.folder)
        value = {"slot": slot or report.id, **to_json(report)}
        write(self._file("inbox", slot or report.id), json.dumps(value, ensure_ascii=False))

    def left_reports(self, extracts: Collection[str]) -> dict[str, Report]:
        """Return the waiting reports of these extracts, by slot."""
        look(self.folder)
        return {slot: report for slot, report in self._all("inbox", _left) if report.extract in extracts}

    def drop_report(self, slot: str, ident: str) -> None:
        """Remove a report that was handled; a newer one in its slot stays."""
        file = self._file("inbox", slot)
        if _read(file, {}).get("id") == ident:
            drop(file)

    # Running commands, each with a lease: one that ended without removing it was killed

    @contextmanager
    def command_running(self, extract: str, started: float) -> Iterator[None]:
        """Record that a command works on the extract (or load) during the block."""
        with ExitStack() as stack:
            # A full or read-only disk must not stop the command.
            with suppress(OSError, LeaseHeldError):
                private_folder(self.folder)
                path = self.folder / "commands" / f"{extract}@{started:.3f}"
                stack.enter_context(lease(path, purpose="a command"))
            yield

    def killed_commands(self, extracts: Collection[str]) -> list[KilledCommand]:
        """Return the commands on these extracts whose process is gone."""
        killed = []
        for path in sorted((self.folder / "commands").glob("*@*")):
            match = _COMMAND.fullmatch(path.name)
            with suppress(FileNotFoundError):
                if match and match[1] in extracts and is_abandoned(path):
                    killed.append(KilledCommand(match[1], float(match[2]), path.stat().st_mtime, path))
        return killed

    def _file(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _all(self, kind: str, read: Callable[[Any], T]) -> list[T]:
        """Read the files of a kind, without damaged ones: at worst something is sent twice."""
        values = []
        for path in sorted((self.folder / kind).glob("[!.]*.json")):
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                values.append(read(json.loads(path.read_text(encoding="utf-8"))))
        return values


def _waiting(value: Mapping[str, Any]) -> WaitingAlert:
    return read_fields(WaitingAlert, {**value, "event": read_fields(Event, value["event"])})


def _collected(value: Mapping[str, Any]) -> tuple[str, Success]:
    return str(value["to"]), read_fields(Success, value)


def _left(value: Mapping[str, Any]) -> tuple[str, Report]:
    return str(value["slot"]), from_json(value)


@dataclass(frozen=True)
class KilledCommand:
    """A command that was killed."""

    extract: str
    started: float
    # When it was last seen alive.
    last: float
    path: Path

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _read(path: Path, default: Any) -> Any:
    """Read a file; return the default if it is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, type(default)) else default
    return default


def _write(path: Path, value: Any) -> None:
    with replaced_file(path) as beside:
        beside.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
