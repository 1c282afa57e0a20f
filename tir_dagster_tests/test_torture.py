"""The short form of `make torture`: each crash point of a refresh and of a load once, several in a row, and some at random times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from tir_dagster_tests.torture.blows import Struck
from tir_dagster_tests.torture.cases import Case, cases, short_cases
from tir_dagster_tests.torture.playing import Result, play_all
from tir_dagster_tests.torture.report import short_report


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


def test_results_are_kept_as_json_and_shown_by_point():
    killed = Result(Case("patch", "kill", ("staged", "landed"), 1), (Struck(True, 1), Struck(True, 1)), "incremental")
    cut = Result(Case("server", "cut the network", ("sent",), 2), (Struck(True),), "none")
    failed = replace(killed, case=Case("load", "kill", ("staged",), 3), blows=(Struck(True, 1),), failure="rows differ")
    results = [killed, cut, failed]
    assert [Result.of(json.loads(json.dumps(asdict(result)))) for result in results] == results
    first, _, *table = short_report(results, "make torture", cases=5).splitlines()
    assert first == "make torture: 3 kills and 1 other blows in 3 of 5 cases; 1 failed."
    assert table[2:] == [
        "| kill | landed | 1 | 1 | incremental 1 |",
        "| kill | staged | 2 | 2 | FAILED 1, incremental 1 |",
        "| cut the network | any point | 1 | 0 | none 1 |",
    ]


@pytest.mark.parametrize("only", ["staged", "patch", "kill hyperd"])
def test_only_chooses(only):
    chosen = cases(100, seed=3, only=only)
    assert chosen
    assert all(case.concerns(only) for case in chosen)
