"""The parts of one running server, put together once and handed to every call."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tir_dagster.sandbox.faults import CallLog, FaultBook
from tir_dagster.sandbox.tableau.checks import Checker
from tir_dagster.sandbox.tableau.extracts import Hyper
from tir_dagster.sandbox.tableau.settings import Settings, SettingsBook
from tir_dagster.sandbox.tableau.store import Store
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tir_dagster.sandbox.home import Identity, SandboxHome

log = logging.getLogger("tir_dagster.sandbox.tableau")
_WAITING_FILES = "SELECT json_extract(payload, '$.file') AS file FROM jobs WHERE completed IS NULL"


class Uploads:
    """Which upload sessions are being worked on: each by one call at a time, and another one is refused, not queued."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def alone(self, upload_id: str) -> Iterator[None]:
        with self._lock:
            if upload_id in self._busy:
                raise ApiError(409006, "Another piece of the file is being uploaded.")
            self._busy.add(upload_id)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(upload_id)


class HourlyCalls:
    """The calls of the last hour that Tableau Cloud limits, by site."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()

    def take(self, call: str, site: str, settings: Settings, now: float) -> None:
        """Count the call; 429000 beyond the limit, in the words of Tableau Cloud."""
        setting = _LIMITED.get(call)
        if setting is None:
            return
        limit = int(getattr(settings, setting))
        with self._lock:
            made = [moment for moment in self._made.pop((site, setting), ()) if now - 3600 < moment <= now]
            if not limit:
                return
            refused = len(made) >= limit
            self._made[(site, setting)] = made if refused else [*made, now]
        if refused:
            minutes = math.ceil((made[-limit] + 3600 - now) / 60)
            raise ApiError(429000, f"Too many requests for '{_NAMES[setting]}'. Please retry after {minutes} minutes.")


_LIMITED = {
    **dict.fromkeys(("refresh", "run_task"), "refreshes_per_hour"),
    **dict.fromkeys(("publish", "update_datasource", "update_data", "update_connection_data"), "publishes_per_hour"),
}
# The first one was seen in a report; the second one is a guess.
_NAMES = {"refreshes_per_hour": "api.rest.refresh_extracts", "publishes_per_hour": "api.rest.publish_content"}


@dataclass(frozen=True)
class Server:
    """Everything a call or a job may need."""

    root: Path
    identity: Identity
    store: Store
    settings: SettingsBook
    faults: FaultBook
    calls: CallLog
    hyper: Hyper
    uploads: Uploads
    hourly_calls: HourlyCalls
    warehouse_port: int
    # Set when an event waits to be delivered to a webhook.
    mail: threading.Event

    @staticmethod
    def open(home: SandboxHome, warehouse_port: int) -> Server:
        root = home.data("tableau")
        for folder in ("packages", "incoming", "scratch"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        store = Store(root / "server.sqlite")
        server = Server(
            root,
            home.identity(),
            store,
            SettingsBook(store),
            FaultBook(),
            CallLog(),
            Hyper(),
            Uploads(),
            HourlyCalls(),
            warehouse_port,
            threading.Event(),
        )
        server._sweep()
        return server

    def now(self) -> float:
        """The time on this server, as its jobs, schedules and datasources show it. Sessions live by the machine's."""
        return time.time() + self.settings.current.clock_offset_seconds

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def checker(self) -> Checker:
        settings = self.settings.current
        beyond = settings.increment_beyond_data or settings.increment_reads == "again"
        return Checker(self.hyper, self.scratch, self.max_bytes, increment_beyond_data=beyond)

    @property
    def max_bytes(self) -> int:
        return self.settings.current.max_extract_mb * 1024 * 1024

    def new_incoming(self) -> Path:
        """A name for a file on its way in."""
        return self.incoming(uuid.uuid4().hex)

    def incoming(self, file: str) -> Path:
        return self.root / "incoming" / file

    @property
    def oldest_upload(self) -> float:
        """When the oldest upload session that still counts was opened."""
        return time.time() - self.settings.current.upload_session_minutes * 60

    def drop_old_uploads(self) -> None:
        """Upload sessions nobody can use any more, with their files."""
        for row in self.store.rows("SELECT id, file FROM uploads WHERE created < ?", self.oldest_upload):
            # One whose last piece is just arriving goes the next time.
            with suppress(ApiError), self.uploads.alone(row["id"]):
                self.store.run("DELETE FROM uploads WHERE id = ?", row["id"])
                self.incoming(row["file"]).unlink(missing_ok=True)

    def package(self, file: str) -> Path:
        return self.root / "packages" / file

    def keep_package(self, path: Path, suffix: str) -> str:
        """Put a finished file among the packages, safely on disk before any row names it.

        A link, not a move: a publish job that a crash interrupts finds its file again.
        """
        name = f"{uuid.uuid4().hex}{suffix}"
        with path.open("rb") as written:
            os.fsync(written.fileno())
        os.link(path, self.package(name))
        folder = os.open(self.package(name).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return name

    def drop_packages(self, files: list[str]) -> None:
        """Files no row names any more. An open download keeps reading its own."""
        for file in files:
            self.package(file).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a crash left behind: files no row names."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True, exist_ok=True)
        named = {file for row in self.store.rows("SELECT file, published_file FROM revisions") for file in row}
        for path in (self.root / "packages").iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)
        self.drop_old_uploads()
        waiting = {row["file"] for row in self.store.rows("SELECT file FROM uploads")}
        waiting |= {row["file"] for row in self.store.rows(_WAITING_FILES)}
        for path in (self.root / "incoming").iterdir():
            if path.name not in waiting:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self.hyper.close()
        self.store.close()
