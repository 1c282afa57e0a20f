"""Measurements of one stage: rows and bytes moved, and seconds waited by server. Callers of servers report; stages collect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

Whom = Literal["warehouse", "Spark", "Hyper", "Tableau", "lease", "quiet period"]


@dataclass
class Meter:
    """Counts of a running stage: rows and bytes moved, and seconds waited, by what it waited for."""

    rows: int | None = None
    bytes: int | None = None
    waited_for: dict[Whom, float] = field(default_factory=dict)
    _inner_seconds: float = 0.0

    @contextmanager
    def waiting(self, whom: Whom) -> Iterator[None]:
        """Count the time of the block as waiting for `whom`, without the time that an inner block counts."""
        begun, outer, self._inner_seconds = time.perf_counter(), self._inner_seconds, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            self.waited_for[whom] = self.waited_for.get(whom, 0.0) + spent - self._inner_seconds
            self._inner_seconds = outer + spent

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the time of the block out of all waits: an inner stage has its own meter."""
        begun, outer = time.perf_counter(), self._inner_seconds
        try:
            yield
        finally:
            self._inner_seconds = outer + time.perf_counter() - begun

    def moved(self, *, rows: int | None = None, bytes: int | None = None) -> None:  # noqa: A002 - as metadata calls it
        """Add rows and bytes to the stage's counts."""
        self.rows = self.rows if rows is None else (self.rows or 0) + rows
        self.bytes = self.bytes if bytes is None else (self.bytes or 0) + bytes


# Not inherited by threads: work that runs in parallel to a stage must not count twice.
_running: ContextVar[Meter | None] = ContextVar("running", default=None)


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Collect in this meter what the block moves and waits for; the waits of an outer stage exclude the block."""
    outer = _running.get()
    token = _running.set(meter)
    try:
        if outer is None:
            yield meter
        else:
            with outer.apart():
                yield meter
    finally:
        _running.reset(token)


@contextmanager
def waiting_for(whom: Whom) -> Iterator[None]:
    """Count the time of the block as a wait of the running stage, if there is one."""
    meter = _running.get()
    if meter is None:
        yield
        return
    with meter.waiting(whom):
        yield


def moved(*, rows: int | None = None, bytes: int | None = None) -> None:  # noqa: A002 - as metadata calls it
    """Add rows and bytes to the counts of the running stage, if there is one."""
    if (meter := _running.get()) is not None:
        meter.moved(rows=rows, bytes=bytes)
