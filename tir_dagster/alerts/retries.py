"""The retries of a call to a channel: how often and how long it is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tir_dagster.retries import Backoff, Repeat, RetryPolicy

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
        policy = RetryPolicy(
            tries=self.attempts,
            backoff=Backoff(self.pause, self.seconds, jitter=0.0),
            most_asked_seconds=self.seconds,
            within_seconds=self.seconds,
        )
        deadline = policy.clock() + self.seconds
        return policy.run(lambda: action(max(0.1, deadline - policy.clock())), may_repeat=_may_repeat)


def _may_repeat(error: Exception) -> Repeat | None:
    return Repeat(asked_seconds=error.wait) if isinstance(error, ChannelError) and error.passing else None
