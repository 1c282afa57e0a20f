"""A session's transaction as Snowflake has it, on DuckDB's: it survives failed statements and commits in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import duckdb

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, from_exception, is_conflict
from tir_dagster.sandbox.warehouse.lake import Lake
from tir_dagster.sandbox.warehouse.locks import Holder, TableLocks

# Runs one statement's change and gives its answer; it may run again, on newer data.
Change = Callable[[], Any]


class Transaction:
    """The changes since BEGIN, in order, so that they can be made again.

    DuckDB ends a transaction at its first failing statement, and DuckLake refuses to commit next to another session's
    insert. Snowflake does neither, so in both cases the changes so far are made again in a new DuckDB transaction.
    """

    def __init__(self, session: int, duck: duckdb.DuckDBPyConnection, lake: Lake, locks: TableLocks) -> None:
        self.open = False
        # Requests of the session that have arrived and not been answered: with one of them nobody is idle.
        self.requests = 0
        self.busy = threading.RLock()
        self._duck = duck
        self._lake = lake
        self._locks = locks
        self._holder = Holder(session, self._abort_if_idle)
        self._changes: list[Change] = []
        self._half_changed = False
        self._lost: str | None = None
        self._last_used = time.monotonic()

    def touch(self) -> None:
        self._last_used = time.monotonic()

    def check(self) -> None:
        """Refuse to work in a transaction that is gone: what follows would be committed without what came before."""
        if self._lost is not None:
            raise _gone(f"{self._lost} Send ROLLBACK or BEGIN, then start it again.")

    def begin(self) -> None:
        self._lost = None
        self._open()

    def commit(self) -> Any:
        """Commit what is open; gives the last change's answer if it had to be made again."""
        if self._lost is not None:
            reason, self._lost = self._lost, None
            raise _gone(reason)
        if not self.open:
            return None
        try:
            with self._lake.committing():
                return self._commit_or_redo()
        except BaseException:
            with suppress(duckdb.Error):
                self._duck.rollback()
            raise
        finally:
            self._closed()

    def rollback(self) -> None:
        self._lost = None
        if self.open:
            with suppress(duckdb.Error):
                self._duck.rollback()
        self._closed()

    def lock(self, table: str, cancelled: Callable[[], bool]) -> None:
        try:
            self._locks.take(table, self._holder, cancelled)
        except SnowflakeError:
            if not self.open:
                self._locks.release(self._holder)
            raise

    def run(self, change: Change, *, autocommit: bool) -> Any:
        """Make one statement's change: inside the open transaction, or in one of its own."""
        alone = not self.open
        self._open()
        try:
            answer = change()
        except BaseException:
            self._half_changed = not alone
            if alone:
                self.rollback()
            raise
        self._changes.append(change)
        if alone and autocommit:
            redone = self.commit()
            return answer if redone is None else redone
        return answer

    def abort(self, reason: str) -> None:
        """TRANSACTION_ABORT_ON_ERROR: the failed statement takes the open transaction along."""
        if self.open:
            self.rollback()
            self._lost = f"The transaction was rolled back by a failed statement ({reason})."

    def recover(self) -> None:
        """After a failed statement: undo the half it may have done, and go on if DuckDB has ended the transaction."""
        if self.open and (self._half_changed or self._ended_by_duckdb()):
            self._half_changed = False
            self._redo_or_lose()

    def _ended_by_duckdb(self) -> bool:
        try:
            self._duck.execute("SELECT 1")
        except duckdb.Error:
            return True
        return False

    def _open(self) -> None:
        if not self.open:
            self._duck.begin()
            self.open = True

    def _closed(self) -> None:
        self.open = False
        self._changes.clear()
        self._locks.release(self._holder)

    def _commit_or_redo(self) -> Any:
        try:
            self._duck.commit()
        except duckdb.TransactionException as error:
            if not is_conflict(error):
                raise
            # Nobody else commits meanwhile, so the second try cannot meet a conflict.
            answer = self._redo()
            self._duck.commit()
            return answer
        return None

    def _redo(self) -> Any:
        with suppress(duckdb.Error):
            self._duck.rollback()
        self._duck.begin()
        answer = None
        for change in self._changes:
            answer = change()
        return answer

    def _redo_or_lose(self) -> None:
        try:
            self._redo()
        except Exception as error:
            reason = from_exception(error).message
            self.rollback()
            self._lost = f"The transaction was rolled back: after a failed statement it could not go on ({reason})."

    def _abort_if_idle(self, seconds: float) -> bool:
        """Called by a session that waits for our locks: gives up a transaction nobody is working on."""
        if self.requests or not self.busy.acquire(blocking=False):
            return False
        try:
            if time.monotonic() - self._last_used < seconds:
                return False
            if self.open:
                self.rollback()
                self._lost = "The transaction was rolled back: it was idle while it blocked another one."
            return True
        finally:
            self.busy.release()


def _gone(reason: str) -> SnowflakeError:
    return SnowflakeError(625, "57014", reason)
