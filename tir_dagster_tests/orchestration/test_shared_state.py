"""Commands on two workers that share an object store and Dagster's history, and no disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tir_dagster_tests.orchestration.conftest import Place

pytestmark = pytest.mark.long


class Pods:
    """Commands on workers, each with a TIR_HOME of its own."""

    def __init__(self, place: Place, folder: Path) -> None:
        self._folder = folder
        self._specs = folder / "extracts.yaml"
        self._specs.write_text(place.spec_text, encoding="utf-8")
        self._state = f"s3://landing/{folder.name}"

    def start(self, worker: str, *command: str, crash: str = "") -> subprocess.Popen[str]:
        home = {"TIR_HOME": str(self._folder / worker), "TIR_STATE": self._state, "TIR_CRASH_AFTER": crash}
        command = (sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(self._specs), *command)
        return subprocess.Popen(
            command, env={**os.environ, **home}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, worker: str, *command: str) -> Any:
        return self.ended(self.start(worker, *command, "--json"))

    @staticmethod
    def ended(process: subprocess.Popen[str]) -> Any:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return json.loads(printed)


def test_a_refresh_on_another_worker_goes_on_where_one_was_killed(place: Place, tmp_path: Path) -> None:
    pods = Pods(place, tmp_path)
    assert pods.run("one", "refresh", "orders")["published"]
    place.touch("a first change")
    both = [pods.start(worker, "refresh", "orders", "--json") for worker in ("one", "two")]
    assert sorted(pods.ended(process)["published"] for process in both) == [False, True]
    for point in ("staged", "landed"):
        place.touch(f"killed after {point}")
        killed = pods.start("one", "refresh", "orders", crash=point)
        killed.communicate(timeout=300)
        assert killed.returncode == -9
        outcome = pods.run("two", "refresh", "orders")
        assert outcome["decision"] != "full", outcome["reason"]
        assert place.published_rows() == place.source_rows()
    assert pods.run("one", "refresh", "orders")["decision"] == "none"
    (line,) = pods.run("three", "status")["lines"]
    assert (line["state"], line["pending"]) == ("ok", 0)
    versions = {version["version"] for version in pods.run("three", "history", "orders")["versions"]}
    assert len(versions) >= 4
    held = pods.run("three", "rollback", "orders", "--to", sorted(versions)[-2], "--hold")
    assert held["held"]
    assert pods.run("four", "release", "orders") == {"extract": "orders", "released": True}
    assert pods.run("two", "refresh", "orders")["published"]
    assert place.published_rows() == place.source_rows()
