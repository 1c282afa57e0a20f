"""Several workers with disks of their own refresh one extract; its state is in an object store."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.refresh.state.workers import Workers
from tir_dagster_tests.torture.subjects import Victim
from tir_dagster_tests.torture.victim import Outcome, read_confirmation

# More than a minute's.
RENEWALS = 15


@pytest.fixture(scope="module")
def made(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Workers]]:
    """An extract of each delivery, made when it is first asked for; each test changes its source and leaves it healed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sandbox.env.items():
            patch.setenv(name, value)
        yield cache(lambda delivery: Workers(sandbox, tmp_path_factory.mktemp(f"workers-{delivery}"), delivery))


@pytest.fixture
def shared(made: Callable[[str], Workers], request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = made(getattr(request, "param", "republish"))
    yield workers
    workers.bucket.calm()


def outcome(victim: Victim) -> Outcome:
    outcomes = victim.end()
    assert isinstance(outcomes, list), f"{outcomes}\n{victim.trace}"
    return outcomes[0]


def kill_one_of_two(shared: Workers, point: str, chance: random.Random) -> None:
    """Kill the one that works while the other one waits; that one, and then a clean run on the first one, make all well."""
    shared.change(chance)
    first, second = chance.sample((1, 2), 2)
    working = shared.play(first, point=point)
    assert working.wait_for_point(), f"it ended before {point}: {working.told}"
    holder = shared.holder()
    shared.bucket.calls()
    waiting = shared.play(second)
    assert waiting.is_at_work(seconds=1.5), f"it did not wait for the lease: {waiting.told}"
    # Renewals of the lease are all that is written while both are at work, and they are the holder's.
    written = {call["path"].rpartition("/")[2] for call in shared.bucket.calls() if call["method"] != "GET"}
    assert written <= {"state.json"}, written
    assert shared.holder() == holder
    working.kill()
    assert outcome(waiting).decision != "full"
    shared.at = first
    shared.heal()


@pytest.mark.long
def test_two_workers_take_turns_and_whoever_is_killed_leaves_the_rest_to_the_other(shared: Workers):
    chance = random.Random(1)
    for point in ("staged", "intended", "remembered"):
        kill_one_of_two(shared, point, chance)


@pytest.mark.long
@pytest.mark.parametrize("shared", ["republish", "patch"], indirect=True)
def test_twenty_times_one_of_two_workers_is_killed(shared: Workers):
    chance, points = random.Random(2), [*shared.points, *shared.points][:20]
    for point in points:
        kill_one_of_two(shared, point, chance)


def test_a_refresh_asks_for_few_files(shared: Workers):
    """Requests for state.json are not counted one by one: a slow machine renews its lease more often."""
    shared.change(random.Random(8))
    shared.at = 1
    shared.heal()
    shared.change(random.Random(9))
    shared.bucket.calls()
    assert outcome(shared.play(1)).published
    calls = [(call["method"], "files" in call["path"].split("/")[-2:]) for call in shared.bucket.calls()]
    files = Counter(method for method, is_file in calls if is_file)
    # Keys, old and new rows, extract, package, record and list of the history; that list is read once.
    assert files == {"PUT": 7, "GET": 1}
    assert Counter(method for method, is_file in calls if not is_file)["GET"] == 1
    assert len(calls) <= 24 + RENEWALS


def test_of_workers_that_start_at_once_one_publishes(shared: Workers):
    shared.change(random.Random(3))
    both = [shared.play(1), shared.play(2), shared.play(3)]
    assert sorted(outcome(victim).published for victim in both) == [False, False, True]
    shared.heal()


def test_a_worker_with_an_empty_disk_goes_on_from_the_store_alone(shared: Workers):
    shared.change(random.Random(4))
    assert shared.play(1, point="staged").wait_for_point()
    shared.change(random.Random(5))
    shared.bucket.clock_ahead(60)
    after = shared.play(7)
    assert outcome(after).decision == "incremental"
    shared.bucket.clock_ahead(0)
    shared.heal()


def test_a_suspended_worker_finds_its_lease_lost_and_publishes_nothing(shared: Workers):
    shared.change(random.Random(6))
    sleeping = shared.play(1, point="packed")
    assert sleeping.wait_for_point()
    os.kill(sleeping.process.pid, signal.SIGSTOP)
    shared.bucket.clock_ahead(60)
    assert outcome(shared.play(2)).published
    shared.bucket.clock_ahead(0)
    confirmed, before = read_confirmation(shared.log), shared.held_state()
    sleeping.go_on()
    os.kill(sleeping.process.pid, signal.SIGCONT)
    ended = sleeping.end()
    assert isinstance(ended, str)
    assert ended.startswith("LeaseLostError"), ended
    assert read_confirmation(shared.log) == confirmed
    assert shared.held_state() == before
    shared.at = 1
    shared.heal()
