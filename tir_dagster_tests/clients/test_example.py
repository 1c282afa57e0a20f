"""examples/dbt from its one command on: dbt builds and changes a table, and the extract follows, as its README says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tir_dagster_tests.clients.conftest import ROOT, run_client

pytestmark = pytest.mark.client

EXAMPLE = ROOT / "examples" / "dbt"


def told(text: str) -> list[str]:
    """What dbt and tir said of each step, without indents, times and seconds."""
    lines = [re.sub(r"^\d\d:\d\d:\d\d +| \(\d+\.\d s\)| in \d+\.\d+s", "", line.strip()) for line in text.splitlines()]
    return [line for line in lines if re.match(r"shop_orders: |\d of \d (OK|PASS)|Done", line)]


def test_the_extract_follows_what_dbt_builds(tmp_path):
    tir = Path(sys.executable).with_name("tir")
    env = {"TIR_HOME": str(tmp_path / "home"), "TIR": str(tir), "PYTHONPATH": str(ROOT)}
    try:
        shown = run_client(EXAMPLE / "run.sh", env=env, folder=ROOT).stdout
    finally:
        run_client(tir, "sandbox", "down", env=env, folder=ROOT)
    assert sorted(told(shown)) == sorted(told((EXAMPLE / "README.md").read_text(encoding="utf-8")))
