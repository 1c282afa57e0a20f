"""The short form of `make torture`: each crash point of a refresh and of a load once, several in a row, and some at random times."""

from __future__ import annotations

import pytest

from tir_dagster_tests.torture.cases import Case, cases, short_cases
from tir_dagster_tests.torture.playing import play_all


def test_killed_anywhere_one_clean_run_later_all_is_well_and_nothing_is_left_behind(sandbox, tmp_path):
    results = play_all(sandbox, tmp_path, short_cases(), tell=print)
    assert [f"{result.case.command}\n{result.failure}" for result in results if result.failure] == []
    assert sum(result.kills for result in results) >= sum(len(case.points) for case in short_cases()) - 3


def test_what_a_server_loaded_is_not_loaded_again_after_a_kill_and_its_package_does_not_stay(sandbox, tmp_path):
    """The version has another number there than the intent; and a run with nothing to publish had downloaded the package."""
    chosen = [Case("server", "kill", (point,), 1) for point in ("confirmed", "published")]
    results = play_all(sandbox, tmp_path, chosen, tell=print)
    assert [(result.healed, result.failure) for result in results] == [("none", "")] * 2


def test_a_case_is_repeated_from_what_it_prints():
    chosen = cases(100, seed=3)
    assert [Case.parse(str(case)) for case in chosen] == chosen
    assert cases(100, seed=3) == chosen
    assert cases(100, seed=4) != chosen
    assert {case.blow for case in cases(100, seed=3, only="patch") if case.subject != "patch"} == set()


@pytest.mark.parametrize("only", ["staged", "patch", "kill hyperd"])
def test_only_chooses(only):
    chosen = cases(100, seed=3, only=only)
    assert chosen
    assert all(case.concerns(only) for case in chosen)
