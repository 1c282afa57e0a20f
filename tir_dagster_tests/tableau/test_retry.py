"""The retry policy on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tir_dagster.tableau.client import Backoff, Repeat, RetryPolicy


class FlakyError(Exception):
    pass


@dataclass
class Work:
    """Fails so many times, then succeeds."""

    failures: int
    calls: int = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise FlakyError(f"failure {self.calls}")
        return "done"


@dataclass
class Clock:
    naps: list[float] = field(default_factory=list)

    def policy(self, **more: object) -> RetryPolicy:
        options = {"tries": 5, "sleep": self.naps.append, "chance": lambda: 0.0, **more}
        return RetryPolicy(**options)  # type: ignore[arg-type]


def always(_: Exception) -> Repeat:
    return Repeat("flaky")


def test_a_success_is_not_repeated() -> None:
    clock, work = Clock(), Work(0)
    assert clock.policy().run(work, may_repeat=always) == "done"
    assert (work.calls, clock.naps) == (1, [])


def test_pauses_double() -> None:
    clock, work = Clock(), Work(4)
    assert clock.policy().run(work, may_repeat=always) == "done"
    assert clock.naps == [1, 2, 4, 8]


def test_the_last_failure_is_told_when_all_tries_are_used_up() -> None:
    clock, work = Clock(), Work(99)
    with pytest.raises(FlakyError, match="failure 5"):
        clock.policy().run(work, may_repeat=always)
    assert (work.calls, len(clock.naps)) == (5, 4)


def test_what_may_not_be_repeated_is_told_at_once() -> None:
    clock, work = Clock(), Work(1)
    with pytest.raises(FlakyError):
        clock.policy().run(work, may_repeat=lambda _: None)
    assert (work.calls, clock.naps) == (1, [])


def test_the_server_is_given_the_time_it_asks_for() -> None:
    clock = Clock()
    clock.policy().run(Work(1), may_repeat=lambda _: Repeat("busy", 42.0))
    assert clock.naps == [42]


def test_a_server_that_asks_for_too_much_time_is_given_up() -> None:
    clock = Clock()
    with pytest.raises(FlakyError):
        clock.policy().run(Work(1), may_repeat=lambda _: Repeat("busy", 3600.0))
    assert clock.naps == []


@pytest.mark.parametrize(("number", "chance", "seconds"), [(1, 0, 1), (3, 0, 4), (3, 1, 3), (9, 0, 30), (9999, 0, 30)])
def test_pauses_grow_to_a_limit_and_chance_shortens_them(number: int, chance: float, seconds: float) -> None:
    assert Backoff(first_seconds=1, most_seconds=30, jitter=0.25).seconds(number, chance=chance) == seconds


def test_one_try_means_one_try() -> None:
    work = Work(1)
    with pytest.raises(FlakyError):
        Clock().policy(tries=1).run(work, may_repeat=always)
    assert work.calls == 1
