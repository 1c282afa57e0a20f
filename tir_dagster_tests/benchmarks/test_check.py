"""No going back: what refreshes ask for is held against the recorded budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.check import CASES, POLLS, Check, allowed, read_budget

BUDGET = {"republish": {"statements": 20, "bytes read": 1_000, "REST calls": 40}}


def check_of(**counts: int) -> Check:
    return Check(
        {"republish": {**BUDGET["republish"], POLLS: 3, **{name.replace("_", " "): n for name, n in counts.items()}}},
        BUDGET,
    )


def test_counts_within_their_budget_are_well():
    assert check_of().equal
    assert check_of(bytes_read=1_050).equal
    assert check_of(statements=3).equal, "less is no fault"


def test_one_statement_more_is_over_budget_and_the_table_says_so():
    over = check_of(statements=21)
    assert over.over == [("republish", "statements")]
    text = over.as_text()
    assert "OVER: 20 are allowed" in text
    assert "--check --record" in text
    assert over.moved == ["republish: statements 20 -> 21"]


def test_how_often_a_job_is_asked_for_is_no_fault():
    assert check_of(**{POLLS: 1_000}).equal
    assert check_of(**{POLLS: 1_000}).moved == []


def test_a_refresh_without_a_budget_is_over_it():
    assert Check({"new": {"statements": 1}}, BUDGET).over == [("new", "statements")]


@pytest.mark.parametrize(
    ("meter", "recorded", "most"), [("statements", 20, 20), ("bytes read", 1_000, 1_050), ("REST calls", 40, 42)]
)
def test_only_some_counts_have_a_tolerance(meter: str, recorded: int, most: int):
    assert allowed(meter, recorded) == most


def test_every_refresh_has_a_recorded_budget():
    assert read_budget().keys() == {case.name for case in CASES}


def test_no_refresh_asks_for_more_than_recorded(tmp_path: Path):
    """The short form; `python -m benchmarks --check` also has the other detectors, deliveries, and Spark."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--check", "--short", "--json"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = json.loads(done.stdout) if done.stdout else {}
    assert (done.returncode, found.get("over")) == (0, []), done.stderr[-3000:]
    counts = found["counts"]
    assert counts.keys() == {case.name for case in CASES if case.in_short}
    assert counts["republish, watermark"]["rows read"] < counts["full"]["rows read"]
    assert counts["patch, watermark"]["REST bytes sent"] < counts["republish, watermark"]["REST bytes sent"]
    assert counts["nothing changed"]["state files"] == 0
