"""Table locks: UPDATE, DELETE, MERGE and the like on one table go one transaction after the other, as in Snowflake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, cancelled

WAIT_SECONDS = 120.0
# Snowflake aborts an idle transaction that has blocked another one for five minutes; here nobody waits so long.
IDLE_SECONDS = 10.0


@dataclass
class Holder:
    """A transaction that may hold locks, and how to end it when it blocks others without doing anything."""

    session: int
    abort: Callable[[float], bool]
    tables: set[str] = field(default_factory=set)


class TableLocks:
    """Who holds which table. A waiter whose blocker sleeps has it rolled back; else it waits, then gives up."""

    def __init__(self) -> None:
        self.idle_seconds = IDLE_SECONDS
        self._changed = threading.Condition()
        self._held: dict[str, Holder] = {}

    def take(self, table: str, holder: Holder, is_cancelled: Callable[[], bool]) -> None:
        """Hold the table from now on; the wait ends early when the statement is cancelled."""
        started = time.monotonic()
        while True:
            if is_cancelled():
                raise cancelled()
            with self._changed:
                blocker = self._held.get(table)
                if blocker is None or blocker is holder:
                    self._held[table] = holder
                    holder.tables.add(table)
                    return
                self._changed.wait(timeout=min(1.0, self.idle_seconds / 2))
            waited = time.monotonic() - started
            # Outside the condition: the abort releases the blocker's locks.
            if waited > self.idle_seconds and self._held.get(table) is blocker:
                blocker.abort(self.idle_seconds)
            if waited > WAIT_SECONDS:
                raise SnowflakeError(
                    625,
                    "57014",
                    f"Statement waited {waited:.0f} seconds for a lock on table {table} held by another transaction.",
                )

    def wake(self) -> None:
        """Let every waiter look again, also whether it was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def release(self, holder: Holder) -> None:
        with self._changed:
            for table in holder.tables:
                if self._held.get(table) is holder:
                    del self._held[table]
            holder.tables.clear()
            self._changed.notify_all()
