"""The bench of joined extracts and stars: what one changed row of a dimension moves in each, what is kept, and what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from benchmarks.command import conclude
from benchmarks.docs import DOCS, STAR, filled, read_star, star_excerpt, star_page
from benchmarks.star import JOINED, WAYS, Result, StarReport, StarStore
from benchmarks.star import STAR as SHAPE

FACTS = 2_000
SETTING = {
    "machine": {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gb": 24, "load": 0.5},
    "versions": {"Python": "3.11"},
    "date": "2026-11-18 20:00 UTC",
}
ASKED = {"facts": FACTS, "dimension": 1_000}


@pytest.mark.long
def test_one_row_moves_in_a_star_where_a_joined_extract_moves_every_fact(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "star", "--facts", str(FACTS), "--json"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work")],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-3000:]}"
    found = {(each["shape"], each["delivery"]): each for each in json.loads(done.stdout)["results"]}
    assert found.keys() == set(WAYS)
    for (shape, _), each in found.items():
        moved = FACTS if shape == JOINED else 1
        assert (each["keys"], each["removed"], each["added"]) == (moved, moved, moved)
        assert each["equal"]
    for delivery in ("republish", "patch"):
        assert found[SHAPE, delivery]["rows_read"] < FACTS / 2 < found[JOINED, delivery]["rows_read"]
        assert found[SHAPE, delivery]["bytes_read"] < found[JOINED, delivery]["bytes_read"]
    assert found[SHAPE, "patch"]["bytes_sent"] < found[JOINED, "patch"]["bytes_sent"]
    assert (tmp_path / "build" / "benchmarks" / "star.md").is_file()
    assert not list(tmp_path.glob("tir-bench-*"))


def made(**values) -> StarReport:
    moved = {JOINED: FACTS, SHAPE: 1}
    results = [
        Result(shape, delivery, keys=moved[shape], seconds=1.25, bytes_sent=1_234_567, equal=True)
        for shape, delivery in WAYS
    ]
    return StarReport(asked=ASKED, results=(replace(results[0], **values), *results[1:]), **SETTING)


def test_the_table_has_a_column_for_each_way():
    lines = [line.split() for line in made().as_text().splitlines()]
    assert ["keys", "2,000", "2,000", "1", "1"] in lines
    assert ["bytes", "sent", *["1,234,567"] * 4] in lines
    assert lines[-1] == ["Published:", "equal", "to", "the", "source"]


def test_a_run_counts_for_nothing_where_a_way_is_wrong_failed_or_missing(capsys: pytest.CaptureFixture[str]):
    assert made().equal
    assert not replace(made(), results=made().results[1:]).equal
    with pytest.raises(click.ClickException):
        conclude(made(equal=False), as_json=False)
    assert "NOT equal to the source: joined by republish" in capsys.readouterr().out
    with pytest.raises(click.ClickException):
        conclude(made(error="the disk was full"), as_json=False)
    assert "FAILED: joined by republish: the disk was full" in capsys.readouterr().out


def test_a_run_that_ended_early_goes_on_where_it_was(tmp_path: Path):
    file = tmp_path / "star" / "results.jsonl"
    store = StarStore(file, ASKED, SETTING, resume=False)
    store.add(Result(*WAYS[0], keys=7, equal=True))
    store.add(Result(*WAYS[1], error="the disk was full"))
    store.add(Result(*WAYS[2], equal=False))
    resumed = StarStore(file, ASKED, {**SETTING, "date": "later"}, resume=True)
    assert resumed.known.keys() == {WAYS[0]}, "what failed or was wrong is tried again"
    assert (resumed.report().date, resumed.report().results[0].keys) == (SETTING["date"], 7)


def test_a_run_is_read_as_it_was_written():
    again = StarReport.from_dict(json.loads(json.dumps(made().as_dict())))
    assert again.as_text() == made().as_text()


def test_the_published_table_is_that_of_the_recorded_run():
    report = read_star()
    assert (DOCS / "star.md").is_file() == (report is not None)
    page = STAR.read_text(encoding="utf-8")
    assert filled(page, "star", star_excerpt(report)) == page
    if report is not None:
        assert report.equal
        assert (DOCS / "star.md").read_text(encoding="utf-8") == star_page(report)
