"""Pages that people write: their commands print what they show, and they quote messages that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tir_dagster_tests.conftest import running_sandbox
from tir_dagster_tests.docs.transcript import Step, play, steps

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_message_in_troubleshooting_is_one_of_the_code():
    texts = " ".join(
        node.value
        for file in (ROOT / "tir_dagster").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^\| "([^"\n]+)"(?! \(Dagster\))', page, re.MULTILINE)
    assert len(quoted) > 10
    assert [message for message in quoted if " ".join(message.split()) not in " ".join(texts.split())] == []


@pytest.mark.long
def test_the_quick_start_prints_what_it_shows(tmp_path, monkeypatch):
    with running_sandbox(tmp_path):
        monkeypatch.setenv("TIR_HOME", str(tmp_path))
        for step in steps((DOCS / "quick-start.md").read_text(encoding="utf-8")):
            printed = play(step, tmp_path, {})
            assert step.matches(printed), f"{step.command} printed\n{printed}"


@pytest.mark.parametrize(
    ("lines", "printed", "same"),
    [
        (["orders: 35 rows (3.4 s)."], "orders: 35 rows (115.0 s).\n", True),
        (["orders: 35 rows (3.4 s)."], "orders: 36 rows (3.4 s).\n", False),
        (["at 2026-11-18T20:40:20.8+00:00"], "at 2027-01-02 03:04\n", True),
        (["orders  ok  9.8 s ago  5"], "orders  ok   2 min ago  5\n", True),
        (["a", "…", "z"], "a\nb\nc\nz\n", True),
        (["a", "z"], "a\nb\nz\n", False),
        ([], "a\n", False),
    ],
)
def test_output_is_compared_but_for_times(lines, printed, same):
    assert Step("x", tuple(lines)).matches(printed) is same
