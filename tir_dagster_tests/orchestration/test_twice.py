"""Two `tir refresh` of one extract at once, as real processes: one after the other, and both end well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.sandbox.tableau.helpers import Admin

# `make soak` does it twenty times, and as often where only the change is sent: each turn starts a Spark of its own.
TURNS = int(os.environ.get("TIR_TWICE", "1"))


def refresh_twice(place: Place, specs: Path, log: Path) -> list[dict[str, Any]]:
    """What both commands printed; what they told meanwhile is in one file, in the order in which they told it."""
    command = [
        sys.executable,
        "-m",
        "tir_dagster.cli.main",
        "--specs",
        str(specs),
        "refresh",
        place.spec.name,
        "--json",
    ]
    with log.open("a", encoding="utf-8") as progress:
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=progress, text=True) for _ in range(2)]
        printed = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], log.read_text(encoding="utf-8")
    return [json.loads(text) for text in printed]


@pytest.mark.parametrize("turn", range(TURNS))
def test_one_works_while_the_other_waits_and_then_finds_nothing_to_do(place: Place, tmp_path: Path, turn: int) -> None:
    place.touch(f"turn {turn}")
    never_at_once(place, tmp_path, sent="publish")


@pytest.mark.long
@pytest.mark.parametrize("turn", range(TURNS))
def test_one_sends_its_change_while_the_other_waits(patched: Place, tmp_path: Path, turn: int) -> None:
    patched.touch(f"change {turn}")
    never_at_once(patched, tmp_path, sent="update_data")


def never_at_once(place: Place, folder: Path, *, sent: str) -> None:
    specs, log, admin = folder / "extracts.yaml", folder / "log", Admin(place.sandbox.tableau_url)
    specs.write_text(place.spec_text, encoding="utf-8")
    admin.forget_calls()
    outcomes = refresh_twice(place, specs, log)
    assert sorted(outcome["published"] for outcome in outcomes) == [False, True]
    routes = [call["route"] for call in admin.calls()]
    assert [route for route in routes if route in ("publish", "update_data")] == [sent]
    lines = [line.split("] ", 1)[1] for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("[")]
    assert sum(line.startswith("waiting for process") for line in lines) == 1, lines
    worked = [line for line in lines if not line.startswith("waiting for")]
    assert worked[0] == worked[-2], "the second one looked when the first one had told its last"
    assert worked[-1] == f"{place.spec.name}: nothing to do, the source has not changed."
    assert worked.count(worked[0]) == 2
    assert place.published_rows() == place.source_rows()
