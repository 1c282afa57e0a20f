"""How often and how long a call to a channel is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class ChannelError(Exception):
    """A channel did not take the message; `passing` when another try is worth it, after `wait` seconds if it said so."""

    def __init__(self, message: str, *, passing: bool = False, wait: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        self.wait = wait


@dataclass(frozen=True)
class Persistence:
    """At most so many attempts, and no new one that could not end within so many seconds."""

    attempts: int = 2
    seconds: float = 10.0
    pause: float = 0.5

    def run(self, action: Callable[[float], T]) -> T:
        """`action` is told how many seconds it has."""
        deadline = time.monotonic() + self.seconds
        for attempt in range(1, self.attempts + 1):
            try:
                return action(max(0.1, deadline - time.monotonic()))
            except ChannelError as error:
                wait = self.pause * 2 ** (attempt - 1) if error.wait is None else error.wait
                if attempt == self.attempts or not error.passing or time.monotonic() + wait >= deadline:
                    raise
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")
