"""Calls that Tableau Cloud limits by the hour: counted for all extracts of a home, and refused before anything is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.refresh.context import NEEDED_CALLS
from tir_dagster.refresh.state.call_budget import BudgetSpentError, CallBudget, UsedCalls, free_at
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.calls import Budget

NOON = 1_700_000_040.0 - 1_700_000_040.0 % 3600
REFRESH = {Budget.REFRESHES: 1}


def site(**more: Any) -> TableauAccess:
    return TableauAccess("https://10ax.online.tableau.com", "sales", TableauToken("t", "s"), **more)


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(home: Path, clock: Clock, extract: str = "orders", **more: Any) -> CallBudget:
    return CallBudget(home, site(**more), extract, now=clock)


def refresh(calls: CallBudget) -> None:
    with calls.reserved(REFRESH):
        calls.count(Budget.REFRESHES)


def used(calls: CallBudget) -> list[str]:
    return [extract for _, extract in json.loads(calls.path.read_text())["refreshes"]["calls"]]


# When


def calls_of(*moments: float, extract: str = "orders") -> UsedCalls:
    return UsedCalls(tuple((NOON + moment, extract) for moment in moments), {extract: NOON + max(moments)})


@pytest.mark.parametrize(
    ("calls", "number", "free"),
    [
        (UsedCalls(), 1, 0),
        (calls_of(-600, -300), 1, 0),
        (calls_of(-600, -300, -100), 1, 3000),
        (calls_of(-600, -300, -100), 2, 3300),
        (calls_of(-3601, -300, -100), 1, 0),
        # More than there are at all: as soon as none is used.
        (calls_of(-600, -300), 9, 3300),
        # By a clock that was set back since.
        (calls_of(7200, 7200, 7200), 1, 3600),
    ],
)
def test_a_call_is_free_when_enough_others_are_an_hour_old(calls: UsedCalls, number: int, free: float) -> None:
    assert free_at(calls, extract="orders", number=number, limit=3, now=NOON) == NOON + free


def test_an_extract_leaves_a_call_to_each_of_the_others() -> None:
    busy = UsedCalls(tuple((NOON - 60 * n, "orders") for n in range(1, 9)), {"orders": NOON, "margins": NOON - 7200})
    assert free_at(busy, extract="orders", number=1, limit=10, now=NOON) == NOON
    ninth = busy.with_call("orders", NOON)
    assert free_at(ninth, extract="orders", number=1, limit=10, now=NOON) > NOON
    assert free_at(ninth, extract="margins", number=1, limit=10, now=NOON) == NOON
    forgotten = UsedCalls(ninth.calls, {"orders": NOON, "margins": NOON - 90_000})
    assert free_at(forgotten, extract="orders", number=1, limit=10, now=NOON) == NOON
    many = UsedCalls(((NOON, "orders"),), {f"other {n}": NOON - 7200 for n in range(50)})
    assert free_at(many, extract="orders", number=1, limit=10, now=NOON) == NOON, "half of all is for everybody"


# The count


def test_extracts_share_the_calls_of_their_site(tmp_path: Path, clock: Clock) -> None:
    for extract in ("orders", "margins", "orders"):
        refresh(budget(tmp_path, clock, extract, refreshes_per_hour=3))
        clock.now += 60
    with pytest.raises(BudgetSpentError) as caught:
        refresh(budget(tmp_path, clock, "margins", refreshes_per_hour=3))
    told = str(caught.value)
    assert "https://10ax.online.tableau.com (site 'sales') allows 3 refresh starts an hour" in told
    assert "3 are used (orders 2, margins 1): the next is free for this extract at" in told
    assert "Nothing was touched. Run again then" in told
    assert "TABLEAU_REFRESHES_PER_HOUR" in told
    assert caught.value.free_at == NOON + 3600
    clock.now = NOON + 3600
    refresh(budget(tmp_path, clock, "margins", refreshes_per_hour=3))


def test_what_was_reserved_and_not_called_is_given_back(tmp_path: Path, clock: Clock) -> None:
    calls = budget(tmp_path, clock)
    with calls.reserved(NEEDED_CALLS["server"]):
        assert used(calls) == ["orders"]
    assert used(calls) == []
    with calls.reserved(REFRESH):
        calls.count(Budget.REFRESHES)
    assert used(calls) == ["orders"], "what was called stays counted"


def test_what_has_begun_is_finished_and_counted(tmp_path: Path, clock: Clock) -> None:
    calls = budget(tmp_path, clock, refreshes_per_hour=1)
    with calls.reserved(REFRESH):
        calls.count(Budget.REFRESHES)
        calls.count(Budget.REFRESHES)
    assert used(calls) == ["orders"] * 2
    assert calls.free_at(REFRESH) == (Budget.REFRESHES, NOON + 3600)
    assert calls.free_at({Budget.PUBLISHES: 1}) is None


def test_a_server_that_asks_to_wait_is_left_alone_by_all_extracts(tmp_path: Path, clock: Clock) -> None:
    budget(tmp_path, clock).refused(Budget.REFRESHES, 29 * 60)
    other = budget(tmp_path, clock, "margins")
    assert other.free_at(REFRESH) == (Budget.REFRESHES, NOON + 29 * 60)
    with pytest.raises(BudgetSpentError, match="and the server asked to wait"):
        refresh(other)
    clock.now += 29 * 60
    refresh(other)


def test_processes_at_once_use_no_more_than_there_is(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tir_dagster.refresh.state.call_budget import BudgetSpentError, CallBudget
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.calls import Budget
access = TableauAccess("https://10ax.online.tableau.com", "sales", TableauToken("t", "s"), refreshes_per_hour=25)
done = 0
for _ in range(20):
    calls = CallBudget(Path(sys.argv[1]), access, "orders")
    try:
        with calls.reserved({Budget.REFRESHES: 1}):
            calls.count(Budget.REFRESHES)
            done += 1
    except BudgetSpentError:
        pass
print(done)
"""

    def play(_: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout
        return int(done)

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(play, range(2))) == 25


@pytest.mark.parametrize("content", ["", "[]", '{"refreshes": {"calls": [[1]]}}', '{"refreshes": 7}'])
def test_a_damaged_file_stops_no_refresh(tmp_path: Path, clock: Clock, content: str) -> None:
    calls = budget(tmp_path, clock)
    calls.path.parent.mkdir(parents=True)
    calls.path.write_text(content)
    refresh(calls)
    assert used(calls) == ["orders"]


# Where


def test_only_sites_with_limits_are_counted(tmp_path: Path, clock: Clock) -> None:
    server = TableauAccess("https://tableau.example.com", "sales", TableauToken("t", "s"))
    assert server.limits == {}
    calls = CallBudget(tmp_path, server, "orders", now=clock)
    refresh(calls)
    calls.refused(Budget.REFRESHES, 60)
    assert calls.free_at(REFRESH) is None
    assert list(tmp_path.iterdir()) == []


def test_every_site_has_its_own_count(tmp_path: Path, clock: Clock) -> None:
    other = TableauAccess("https://10ax.online.tableau.com", "finance", TableauToken("t", "s"))
    assert CallBudget(tmp_path, other, "orders").path != budget(tmp_path, clock).path


@pytest.mark.parametrize(
    ("url", "env", "limits"),
    [
        ("https://10ax.online.tableau.com", {}, {Budget.REFRESHES: 60, Budget.PUBLISHES: 600}),
        ("https://10ax.online.tableau.com", {"TABLEAU_REFRESHES_PER_HOUR": "0"}, {Budget.PUBLISHES: 600}),
        ("https://tableau.example.com", {}, {}),
        ("https://tableau.example.com", {"TABLEAU_PUBLISHES_PER_HOUR": "5"}, {Budget.PUBLISHES: 5}),
    ],
)
def test_limits_are_those_of_tableau_cloud_unless_the_environment_says_otherwise(
    url: str, env: dict[str, str], limits: dict[Budget, int]
) -> None:
    token = {"TABLEAU_TOKEN_NAME": "t", "TABLEAU_TOKEN_SECRET": "s"}
    assert TableauAccess.from_environment({"TABLEAU_SERVER_URL": url, **token, **env}).limits == limits


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_refused(text: str) -> None:
    env = {"TABLEAU_SERVER_URL": "https://t.example.com", "TABLEAU_TOKEN_NAME": "t", "TABLEAU_TOKEN_SECRET": "s"}
    with pytest.raises(Exception, match=r"TABLEAU_REFRESHES_PER_HOUR is .*: write how many"):
        TableauAccess.from_environment({**env, "TABLEAU_REFRESHES_PER_HOUR": text})
