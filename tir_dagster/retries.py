"""Retries and waits, stated once: how often a failed action is tried again, with which pauses, and how long something is waited for.

Callers decide what may be tried again. Clocks, sleeps and chance can be replaced, so that tests do not wait.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, retry_if_result

log = logging.getLogger(__name__)

T = TypeVar("T")
# With less than the clock's resolution left, a wait would spin.
_SHORTEST_PAUSE = 0.05


@dataclass(frozen=True)
class Backoff:
    """Pauses that grow from the first to the longest, each shortened by up to `jitter` of itself."""

    first_seconds: float = 1.0
    most_seconds: float = 30.0
    jitter: float = 0.25
    factor: float = 2.0

    def seconds(self, number: int, *, chance: float = 0.0) -> float:
        """The pause of this number, counted from 1; `chance` is a random number from 0 to 1."""
        # Bounded before the power: a job polled for a day would overflow a float.
        grown = self.first_seconds * self.factor ** min(number - 1, 1000)
        return min(grown, self.most_seconds) * (1 - self.jitter * chance)


NO_PAUSE = Backoff(first_seconds=0.0)


@dataclass(frozen=True)
class Repeat:
    """A failure that may pass: its reason for the log, empty for none, and how long the server asked to wait, if it did."""

    reason: str = ""
    asked_seconds: float | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """A bounded number of tries, all of which begin within `within_seconds` if that is set."""

    tries: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    # A server that asks for a longer pause is treated as down.
    most_asked_seconds: float = 300.0
    within_seconds: float | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def run(self, action: Callable[[], T], *, may_repeat: Callable[[Exception], Repeat | None]) -> T:
        """Return the action's result; raise its last error when no further try is allowed or left."""
        repeat = Repeat()

        def is_passing(error: BaseException) -> bool:
            nonlocal repeat
            answer = may_repeat(error) if isinstance(error, Exception) else None
            repeat = answer or Repeat()
            return answer is not None and (answer.asked_seconds or 0) <= self.most_asked_seconds

        def pause(state: RetryCallState) -> float:
            return max(self.pause(state.attempt_number), repeat.asked_seconds or 0)

        def announce(state: RetryCallState) -> None:
            if repeat.reason:
                number = state.attempt_number + 1
                log.warning("%s; try %d of %d in %.1f s", repeat.reason, number, self.tries, state.upcoming_sleep)

        return self._retrying(retry=retry_if_exception(is_passing), wait=pause, before_sleep=announce, reraise=True)(
            action
        )

    def until(self, action: Callable[[], T], accept: Callable[[T], bool]) -> T:
        """Return the action's first accepted result, or its last one when no try is left; its errors are raised."""

        def last(state: RetryCallState) -> T:
            assert state.outcome is not None
            result: T = state.outcome.result()
            return result

        return self._retrying(
            retry=retry_if_result(lambda result: not accept(result)),
            wait=lambda state: self.pause(state.attempt_number),
            retry_error_callback=last,
        )(action)

    def with_tries(self, tries: int) -> RetryPolicy:
        return replace(self, tries=tries)

    def pause(self, number: int) -> float:
        """Return the seconds to wait after try `number`, counted from 1."""
        return self.backoff.seconds(number, chance=self.chance())

    def _retrying(self, **options: Any) -> Retrying:
        # The library's own limit of time reads a clock that cannot be replaced.
        deadline = None if self.within_seconds is None else self.clock() + self.within_seconds

        def is_over(state: RetryCallState) -> bool:
            is_late = deadline is not None and self.clock() + state.upcoming_sleep >= deadline
            return is_late or state.attempt_number >= self.tries

        return Retrying(sleep=self.sleep, stop=is_over, **options)


def looks(
    seconds: float,
    *,
    pause: Callable[[int], float],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Yield whenever it is time to look whether something has happened, the last time when `seconds` are over.

    `pause` returns the seconds between look `number`, counted from 1, and the next one.
    """
    started = clock()
    for number in count(1):
        yield
        left = seconds - (clock() - started)
        if left <= 0:
            return
        sleep(max(min(pause(number), left), _SHORTEST_PAUSE))
