"""The one retry policy for calls to Tableau: how often, how long between, and when to give up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from the first to the longest, each shortened by up to `jitter` of itself."""

    first_seconds: float = 1.0
    most_seconds: float = 30.0
    jitter: float = 0.25

    def seconds(self, number: int, *, chance: float = 0.0) -> float:
        """The pause of this number, counted from 1; `chance` is a random number from 0 to 1."""
        # Bounded before the power: a job polled for a day would overflow a float.
        doubled = self.first_seconds * 2.0 ** min(number - 1, 60)
        return min(doubled, self.most_seconds) * (1 - self.jitter * chance)


@dataclass(frozen=True)
class Repeat:
    """A failure that may pass: its reason for the log, and how long the server asked to wait, if it did."""

    reason: str
    asked_seconds: float | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """A bounded number of tries. Clock, sleep and chance can be replaced, so that tests do not wait."""

    tries: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    # A server that asks for more than this is as good as down for a run.
    most_asked_seconds: float = 300.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def run(self, action: Callable[[], T], *, may_repeat: Callable[[Exception], Repeat | None]) -> T:
        """The action's result; its last failure when no further try is allowed or left."""
        for number in range(1, self.tries):
            try:
                return action()
            except Exception as error:
                repeat = may_repeat(error)
                if repeat is None or (repeat.asked_seconds or 0) > self.most_asked_seconds:
                    raise
                self._wait(number, repeat)
        return action()

    def _wait(self, number: int, repeat: Repeat) -> None:
        seconds = max(self.pause(number), repeat.asked_seconds or 0)
        log.warning("Tableau: %s; try %d of %d in %.1f s", repeat.reason, number + 1, self.tries, seconds)
        self.sleep(seconds)

    def pause(self, number: int) -> float:
        """How long to wait after failure or look `number`, counted from 1."""
        return self.backoff.seconds(number, chance=self.chance())
