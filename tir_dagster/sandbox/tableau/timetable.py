"""The server's own clockwork: schedules and tasks that are due start their refreshes."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.server import log
from tir_dagster.sandbox.tableau.store import update
from tir_dagster.sandbox.tableau.times import next_run
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from tir_dagster.sandbox.tableau.jobs import JobQueue
    from tir_dagster.sandbox.tableau.server import Server
    from tir_dagster.sandbox.tableau.store import Row

ACTIVE = "Active"
_LOOK_SECONDS = 0.5
_TABLES = ("schedules", "tasks")


def next_run_of(server: Server, frequency: str | None, details: str | None) -> float | None:
    """When that timetable runs next by the server's clock."""
    if not frequency:
        return None
    return next_run(frequency, json.loads(details or "{}"), after=server.now(), zone=server.settings.current.time_zone)


class Timetable:
    """A thread that looks at the clock; a run that was missed while the server was down is made up once."""

    def __init__(self, server: Server, queue: JobQueue) -> None:
        self._server = server
        self._queue = queue
        self._stopping = threading.Event()
        self._seen = (server.now(), server.settings.clock_changes)
        self._thread = threading.Thread(target=self._work, daemon=True, name="timetable")

    def start(self) -> None:
        self._plan(only_new=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._server.settings.changed.set()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick()
            except Exception:
                log.exception("the timetable failed")
            self._server.settings.changed.wait(_LOOK_SECONDS)
            self._server.settings.changed.clear()

    def _tick(self) -> None:
        # The number of changes, not the time alone: between two looks a clock can be moved forth and back.
        changes, now = self._server.settings.clock_changes, self._server.now()
        before, changes_before = self._seen
        self._seen = (now, changes)
        if now < before or changes != changes_before:
            # The clock was moved back, or means something else: what was planned is too late or too early now.
            self._plan(only_new=False)
        for task in self._due(now):
            self._run(task)

    def _plan(self, *, only_new: bool) -> None:
        with self._server.store.transaction() as db:
            for table in _TABLES:
                for row in db.execute(f"SELECT id, frequency, details, next_run FROM {table}").fetchall():
                    if row["next_run"] is None or not only_new:
                        update(db, table, row["id"], next_run=self._next(row))

    def _next(self, row: Row) -> float | None:
        try:
            return next_run_of(self._server, row["frequency"], row["details"])
        except (ValueError, OverflowError):
            # Kept by an earlier version, which did not check it.
            return None

    def _due(self, now: float) -> list[Row]:
        """The tasks whose time has come; their timetables are set to the next time before anything runs."""
        with self._server.store.transaction() as db:
            tasks: list[Any] = []
            for row in db.execute("SELECT * FROM schedules WHERE next_run <= ?", (now,)).fetchall():
                update(db, "schedules", row["id"], next_run=self._next(row))
                if row["state"] == ACTIVE:
                    tasks += db.execute("SELECT * FROM tasks WHERE schedule_id = ?", (row["id"],)).fetchall()
            for row in db.execute("SELECT * FROM tasks WHERE next_run <= ?", (now,)).fetchall():
                update(db, "tasks", row["id"], next_run=self._next(row))
                tasks.append(row)
            return tasks

    def _run(self, task: Row) -> None:
        source = self._server.store.row("SELECT * FROM datasources WHERE id = ?", task["datasource_id"])
        if source is None:
            return
        try:
            self._queue.run_task(task, source)
        except ApiError as error:
            # One is queued already, and does the work.
            log.info("task %s did not start: %s", task["id"], error.detail)
