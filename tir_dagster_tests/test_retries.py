"""The retry policy on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tir_dagster.retries import NO_PAUSE, Backoff, Repeat, RetryPolicy, looks


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

    def now(self) -> float:
        return sum(self.naps)

    def policy(self, **more: object) -> RetryPolicy:
        options = {"tries": 5, "sleep": self.naps.append, "clock": self.now, "chance": lambda: 0.0, **more}
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


@pytest.mark.parametrize(("within", "naps"), [(3.5, [1, 2]), (3, [1]), (1, [])])
def test_no_try_begins_after_the_deadline(within: float, naps: list[float]) -> None:
    clock, work = Clock(), Work(99)
    with pytest.raises(FlakyError, match=f"failure {len(naps) + 1}"):
        clock.policy(within_seconds=within).run(work, may_repeat=always)
    assert clock.naps == naps


def test_a_pause_that_the_server_asks_for_may_not_pass_the_deadline() -> None:
    clock = Clock()
    with pytest.raises(FlakyError):
        clock.policy(within_seconds=40).run(Work(1), may_repeat=lambda _: Repeat("busy", 42.0))
    assert clock.naps == []


def test_somebody_who_interrupts_is_not_asked_twice() -> None:
    calls: list[int] = []

    def interrupted() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Clock().policy().run(interrupted, may_repeat=always)
    assert calls == [1]


def test_tries_without_a_pause_follow_at_once() -> None:
    clock, work = Clock(), Work(2)
    assert clock.policy(tries=3, backoff=NO_PAUSE).run(work, may_repeat=always) == "done"
    assert clock.naps == [0, 0]


def test_every_repeat_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    Clock().policy().run(Work(2), may_repeat=lambda error: Repeat(f"{error}, busy"))
    assert [record.getMessage() for record in caplog.records] == [
        "failure 1, busy; try 2 of 5 in 1.0 s",
        "failure 2, busy; try 3 of 5 in 2.0 s",
    ]
    caplog.clear()
    Clock().policy().run(Work(2), may_repeat=lambda _: Repeat())
    assert not caplog.records, "without a reason there is nothing to say"


@pytest.mark.parametrize(("tries", "result", "naps"), [(5, 3, [1, 2]), (2, 2, [1])])
def test_an_action_is_repeated_until_its_result_is_accepted(tries: int, result: int, naps: list[float]) -> None:
    clock, results = Clock(), iter([1, 2, 3, 4])
    assert clock.policy(tries=tries).until(lambda: next(results), lambda number: number >= 3) == result
    assert clock.naps == naps


def test_an_error_is_no_result_to_wait_for() -> None:
    clock, work = Clock(), Work(1)
    with pytest.raises(FlakyError):
        clock.policy().until(work, lambda _: False)
    assert (work.calls, clock.naps) == (1, [])


def test_looks_end_with_one_at_the_end_of_the_time() -> None:
    clock = Clock()
    times = [clock.now() for _ in looks(6, pause=float, sleep=clock.naps.append, clock=clock.now)]
    assert times == [0, 1, 3, 6]


def test_there_is_a_look_even_without_time() -> None:
    assert len(list(looks(0, pause=lambda _: 1.0))) == 1


def test_a_wait_does_not_spin_when_almost_no_time_is_left() -> None:
    clock = Clock()
    list(looks(1e-9, pause=lambda _: 1.0, sleep=clock.naps.append, clock=clock.now))
    assert clock.naps == [0.05]
