"""Waiting for Tableau without waiting: a sleep moves the stand-in's clock ahead instead of taking its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import requests

from tir_dagster.retries import RetryPolicy
from tir_dagster.tableau.client import paced
from tir_dagster_tests.sandbox.tableau.helpers import Admin

# The longest pause between two looks at a job.
_MOST_SECONDS = 30.0


def nap(seconds: float, *, share: float = 0.05) -> None:
    """Take a share of the seconds that are waited: the server's jobs do their work in real time."""
    time.sleep(min(max(seconds, 0.0), _MOST_SECONDS) * share)


class _Pace:
    def __init__(self, url: str, listen: Callable[[float], None]) -> None:
        self._admin = Admin(url)
        self._listen = listen
        self._ahead = 0.0

    def sleep(self, seconds: float) -> None:
        self._listen(seconds)
        self._ahead += max(seconds, 0.0)
        # Others of this run move it, too, and it never goes back.
        known = requests.get(f"{self._admin.url}/sandbox/settings", timeout=30).json()["clock_offset_seconds"]
        self._admin.set(clock_offset_seconds=known + max(seconds, 0.0))
        nap(seconds)

    def clock(self) -> float:
        return time.monotonic() + self._ahead


def quickly(url: str, listen: Callable[[float], None] = lambda _: None) -> AbstractContextManager[None]:
    """Clients made inside wait on the stand-in's own clock; `listen` is told of each sleep before the time moves."""
    pace = _Pace(url, listen)
    return paced(RetryPolicy(sleep=pace.sleep, clock=pace.clock))
