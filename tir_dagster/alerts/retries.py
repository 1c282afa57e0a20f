"""The retries of a call to a channel: how often and how long it is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class ChannelError(Exception):
    """A channel did not take the message; `passing` if another try may help, after `wait` seconds if it asked for that."""

    def __init__(self, message: str, *, passing: bool = False, wait: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        self.wait = wait


@dataclass(frozen=True)
class Persistence:
    """The largest number of attempts, and the seconds within which all of them must end."""

    attempts: int = 2
    seconds: float = 10.0
    pause: float = 0.5

    def run(self, action: Callable[[float], T]) -> T:
        """Run the action until it succeeds; it receives the seconds that are left."""
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
