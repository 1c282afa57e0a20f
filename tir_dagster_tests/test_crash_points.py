"""The list of crash points is that of the code, and the docs show it."""

from __future__ import annotations

import re
from pathlib import Path

from tir_dagster.crash_points import LOAD_POINTS, REFRESH_POINTS, ROLLBACK_POINTS
from tir_dagster_tests.torture.blows import ANY_TIME
from tir_dagster_tests.torture.cases import cases

PACKAGE = Path(__file__).parents[1] / "tir_dagster"
DOCS = PACKAGE.parent / "docs" / "survival.md"
_CALL = re.compile(r'\b(?:crash_after|self\._after)\("(\w+)"\)')


def named_in(*folders: str) -> set[str]:
    """The points that the modules of these folders name."""
    files = [file for folder in folders for file in (PACKAGE / folder).rglob("*.py")]
    return {point for file in files for point in _CALL.findall(file.read_text(encoding="utf-8"))}


def test_every_point_of_the_code_is_listed_and_none_is_only_listed():
    assert named_in("loading") == set(LOAD_POINTS)
    assert named_in("refresh", "tableau") == {*REFRESH_POINTS, *ROLLBACK_POINTS}
    assert named_in("") == {*LOAD_POINTS, *REFRESH_POINTS, *ROLLBACK_POINTS}


def test_the_torture_kills_at_every_point():
    killed_at = {point for case in cases(1, seed=1) for point in case.points}
    assert killed_at - {ANY_TIME} == {*LOAD_POINTS, *REFRESH_POINTS, *ROLLBACK_POINTS}


def test_the_docs_show_the_points():
    listed = [*LOAD_POINTS.items(), *REFRESH_POINTS.items(), *ROLLBACK_POINTS.items()]
    text = DOCS.read_text(encoding="utf-8")
    assert [point for point, meaning in listed if f"| `{point}` | {meaning} |" not in text] == []
