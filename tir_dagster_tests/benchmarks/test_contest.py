"""The contest: which turns there are, what is compared, what is kept of a run that ended early, and what is written."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import script_2021
from benchmarks.bags import Difference, compare
from benchmarks.contest import REPEATED_BELOW, RESULTS, Asked, Store, turns_of
from benchmarks.contest_report import Contest, Result, short_table
from benchmarks.contest_ways import BY_NAME, RECENT, SCATTERED, WAYS
from benchmarks.docs import DOCS, NOT_YET, README, contest_excerpt, contest_page, filled, read_contest, scale_excerpt
from benchmarks.plots import draw_contest
from benchmarks.rivals import RIVALS, rows_of
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import connect
from tir_dagster.sandbox.sample.rows import SCHEMA

SETTING = {
    "machine": {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gb": 24, "load": 0.5},
    "versions": {"Python": "3.11"},
    "date": "2026-11-18 20:00 UTC",
}
ASKED = Asked(rows=1_000, changed=1, seed=1, repetitions=3, ways=tuple(BY_NAME), limit=60)


def result(way: str, *, scenario: str = SCATTERED, number: int = 1, **values) -> Result:
    return Result(scenario, number, way, **values)


def contest_of(*results: Result) -> Contest:
    asked = {"rows": 1_000, "changed": 1.0, "seed": 1, "repetitions": 3, "ways": list(BY_NAME), "limit": 60}
    return Contest(asked=asked, results=results, **SETTING)


def by_id(*results: Result) -> dict:
    return {each.id: each for each in results}


# Turns


def test_everything_that_others_do_is_a_way_of_the_contest():
    others = {way.name for way in WAYS if not way.delivery}
    assert others == set(RIVALS)
    assert {way.delivery for way in WAYS if way.delivery} == {"republish", "patch", "server", "trigger"}
    assert {way.detector for way in WAYS} == {"watermark", "feed", "diff"}


def test_the_first_round_has_every_way_of_its_scenario():
    assert [turn.way.name for turn in turns_of(ASKED, SCATTERED, 1, {})] == list(BY_NAME)
    recent = {turn.way.name for turn in turns_of(ASKED, RECENT, 1, {})}
    assert {"server", "script_2021", "tableau_incremental", "patch"} <= recent
    assert "pantab_all" not in recent


def test_later_rounds_begin_with_another_way_and_leave_out_what_was_slow_or_failed():
    firsts = [result(way.name, seconds=1.0) for way in WAYS]
    slow = result("tableau_full", server=REPEATED_BELOW + 1)
    failed = result("pantab_all", error="no memory")
    second = [turn.way.name for turn in turns_of(ASKED, SCATTERED, 2, by_id(*firsts, slow, failed))]
    assert set(BY_NAME) - set(second) == {"tableau_full", "pantab_all"}
    assert second[0] != WAYS[0].name


def test_only_the_ways_that_were_asked_for_compete():
    few = replace(ASKED, ways=("patch", "script_2021"))
    assert [turn.way.name for turn in turns_of(few, SCATTERED, 1, {})] == ["patch", "script_2021"]


# What is kept


def test_a_run_that_ended_early_goes_on_where_it_was(tmp_path: Path):
    store = Store(tmp_path, ASKED, SETTING, resume=False)
    store.add(result("patch", seconds=1.5, steps={"publish": 1.0}))
    store.add(result("full", error="the disk was full"))
    with (tmp_path / RESULTS).open("a", encoding="utf-8") as file:
        file.write('{"scenario": "scattered", "rou')  # killed while it wrote
    resumed = Store(tmp_path, ASKED, {**SETTING, "date": "later"}, resume=True)
    assert list(resumed.known) == [(SCATTERED, 1, "patch")], "what failed is tried again"
    resumed.add(result("full", seconds=9.0))
    again = Store(tmp_path, ASKED, SETTING, resume=True).contest()
    assert [(each.way, each.total) for each in again.results] == [("patch", 1.5), ("full", 9.0)]
    assert again.date == SETTING["date"], "the run's own date"


def test_a_run_of_something_else_is_not_resumed(tmp_path: Path):
    Store(tmp_path, ASKED, SETTING, resume=False)
    with pytest.raises(TirError, match="asked for something else"):
        Store(tmp_path, replace(ASKED, rows=2_000), SETTING, resume=True)


def test_without_resume_a_run_begins_anew(tmp_path: Path):
    Store(tmp_path, ASKED, SETTING, resume=False).add(result("patch"))
    assert Store(tmp_path, ASKED, SETTING, resume=False).known == {}


# What is compared


VALUES = {
    "ORDER_ID": "{key}", "ORDER_DATE": "DATE '2026-01-02'", "ORDERED_AT": "TIMESTAMP '2026-01-02 03:04:05'",
    "CUSTOMER": "'{customer}'", "REGION": "NULL", "PRODUCT": "'Desk'", "CATEGORY": "'Furniture'", "QUANTITY": "{quantity}",
    "UNIT_PRICE": "CAST(12.50 AS NUMERIC(12,2))", "DISCOUNT": "CAST(0.1 AS DOUBLE PRECISION)", "RUSH": "TRUE",
    "SHIP_TIME": "TIME '10:00:00'", "SHIPPED_AT": "{shipped}", "NOTE": "''", "UPDATED_AT": "TIMESTAMP '2026-01-03 00:00:00'",
}  # fmt: skip
ZONED = "TIMESTAMP WITH TIME ZONE '2026-01-02 01:00:00+01:00'"


def extract(path: Path, *rows: dict, name: str = "Extract") -> Path:
    """An extract of the sample's columns; each row says what it has otherwise."""
    defaults = {"key": 1, "customer": "acme", "quantity": "CAST(5 AS INTEGER)", "shipped": ZONED}
    selects = [
        "SELECT " + ", ".join(f'{sql.format(**{**defaults, **row})} AS "{column}"' for column, sql in VALUES.items())
        for row in rows
    ]
    with connect(path, create=True) as connection:
        connection.execute_command('CREATE SCHEMA "Extract"')
        connection.execute_command(f'CREATE TABLE "Extract"."{name}" AS ({" UNION ALL ".join(selects)})')
    return path


def test_the_values_of_this_test_are_those_of_the_sample():
    assert list(VALUES) == SCHEMA.names


def test_rows_are_compared_as_bags(tmp_path: Path):
    source = extract(tmp_path / "source.hyper", {"key": 1}, {"key": 2}, {"key": 3}, {"key": 3})
    same = extract(tmp_path / "same.hyper", {"key": 3}, {"key": 2}, {"key": 3}, {"key": 1})
    assert compare(same, source) == Difference(rows=4, wrong=0, missing=0, orders=0)
    # 2 is stale, one of the two 3 is missing, 4 was deleted in the source.
    other = extract(tmp_path / "other.hyper", {"key": 1}, {"key": 2, "customer": "ACME"}, {"key": 3}, {"key": 4})
    assert compare(other, source) == Difference(rows=4, wrong=2, missing=2, orders=3)


def test_the_same_values_in_other_types_are_equal(tmp_path: Path):
    source = extract(tmp_path / "source.hyper", {"key": 1}, {"key": 2})
    converted = {"quantity": "CAST(5 AS BIGINT)", "shipped": "TIMESTAMP '2026-01-02 00:00:00'"}
    shown = extract(
        tmp_path / "shown.hyper",
        {"key": "CAST(1 AS NUMERIC(18,0))", **converted},
        {"key": "2", **converted},
        name="Orders",
    )
    assert compare(shown, source).orders == 0


# The scripts


def test_the_script_of_2021_deletes_a_range_and_goes_on_from_what_remains(tmp_path: Path):
    file = tmp_path / "orders.hyper"
    with connect(file, create=True) as connection:
        connection.execute_command('CREATE SCHEMA "Extract"')
        connection.execute_command(
            """CREATE TABLE "Extract"."Extract" AS (SELECT * FROM (VALUES
            (DATE '2026-01-01'), (DATE '2026-02-01'), (DATE '2026-03-01'), (NULL)) AS v("ORDER_DATE"))"""
        )
    (tmp_path / "orders.tds").write_text(
        """<refresh-event increment-value='#2026-01-01#'/><refresh-event increment-value="#2026-03-01#"/>""",
        encoding="utf-8",
    )
    with script_2021.hyper(file) as connection:
        rows, largest = script_2021.delete_from(connection, "ORDER_DATE", "2026-02-15")
    script_2021.set_increment_value(tmp_path, largest)
    assert (rows, largest) == (3, "2026-02-01")
    text = (tmp_path / "orders.tds").read_text(encoding="utf-8")
    assert text == """<refresh-event increment-value="#2026-02-01#"/>""" * 2


def test_what_is_missing_in_a_frame_is_null_for_hyper():
    day = dt.date(2026, 1, 2)
    frame = pd.DataFrame(
        {
            "QUANTITY": [1.0, None],
            "ORDER_DATE": [day, None],
            "AT": [pd.Timestamp("2026-01-02"), pd.NaT],
            "RATE": [0.5, None],
        }
    )
    first, second = rows_of(frame)
    assert (first[0], type(first[0])) == (1, int), (
        "a whole number, though pandas keeps it as a float beside missing ones"
    )
    assert first[1:] == [day, pd.Timestamp("2026-01-02"), 0.5]
    assert second == [None, None, None, None]


# What is written


def test_a_way_is_shown_by_its_median_and_by_what_was_wrong_after_the_first_change():
    contest = contest_of(
        *(
            result("patch", number=number, seconds=seconds, server=0.5)
            for number, seconds in enumerate((1.0, 9.0, 2.0), 1)
        ),
        result("pantab_append", number=2, seconds=1.0, orders=900),
        result("pantab_append", number=1, seconds=1.0, orders=300),
        result("hyperleaup_all", error="it | failed"),
    )
    rows = {row.way.name: row for row in contest.rows(SCATTERED)}
    assert (rows["patch"].seconds, rows["patch"].total, rows["patch"].repetitions) == (2.0, 2.5, 3)
    assert rows["pantab_append"].orders == 300, "later rounds begin with what the first one left"
    text = contest.as_text()
    assert "it / failed" in text
    assert "cannot do: updates, deletes, moves" in text
    assert contest.equal
    assert "2.5" in short_table(contest)


def test_a_run_counts_for_nothing_where_one_of_ours_is_wrong_or_failed():
    assert not contest_of(result("patch", orders=1)).equal
    assert not contest_of(result("server", error="no")).equal
    assert contest_of(result("script_2021", orders=7)).equal


def test_a_contest_is_read_as_it_was_written():
    contest = contest_of(result("patch", seconds=1.0, steps={"publish": 0.5}, peak=7))
    again = Contest.from_dict(json.loads(json.dumps(contest.as_dict())))
    assert again.as_text() == contest.as_text()
    assert again.results[0].steps == {"publish": 0.5}


def test_the_picture_is_drawn_twice(tmp_path: Path):
    contest = contest_of(
        result("patch", seconds=1.0), result("tableau_full", server=9.0), result("server", scenario=RECENT, seconds=2.0)
    )
    png, svg = draw_contest(contest, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text(encoding="utf-8")
    before = svg.read_bytes()
    assert draw_contest(contest, tmp_path)[1].read_bytes() == before, "the same numbers, the same picture"


def test_only_what_is_between_the_comments_is_replaced():
    assert (
        filled("a\n<!-- x -->\nold\n<!-- end of x -->\nb", "x", "new \\1")
        == "a\n<!-- x -->\n\nnew \\1\n\n<!-- end of x -->\nb"
    )
    with pytest.raises(TirError, match="no place for y"):
        filled("text", "y", "new")


def test_the_published_tables_are_those_of_the_recorded_run():
    contest = read_contest()
    readme = README.read_text(encoding="utf-8")
    assert filled(readme, "contest", contest_excerpt(contest)) == readme
    written = {file.name for file in DOCS.glob("contest.*")}
    assert written == (set() if contest is None else {f"contest.{kind}" for kind in ("json", "md", "png", "svg")})
    if contest is not None:
        assert contest.equal
        assert (DOCS / "contest.md").read_text(encoding="utf-8") == contest_page(contest)


def test_without_a_run_there_are_no_numbers_and_with_one_the_readme_has_them():
    assert contest_excerpt(None) == scale_excerpt(None) == NOT_YET
    shown = contest_excerpt(contest_of(result("patch", seconds=1.5, server=0.25), result("pantab_all", seconds=2.0)))
    assert "contest --rows 1000 --changed 1 --repetitions 3" in shown
    assert any(line.split() == ["patch,", "watermark", "1.5", "0.2", "1.8", "0"] for line in shown.splitlines())


@pytest.mark.long
def test_a_small_contest_ends_with_everything_of_ours_equal_and_the_others_counted(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks", "contest", "--rows", "3000", "--repetitions", "1", "--json"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work")],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1_800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(each["scenario"], each["way"]): each for each in json.loads(done.stdout)["results"]}
    assert {way for _, way in found} == set(BY_NAME)
    assert not [each for each in found.values() if each["error"]]
    assert found[SCATTERED, "tableau_full"]["orders"] == found[SCATTERED, "pandas_all"]["orders"] == 0
    assert found[SCATTERED, "pandas_changed"]["orders"] == 6, "the deletes: 200 of 960 of the sample's own change"
    assert found[SCATTERED, "script_2021"]["orders"] > found[RECENT, "script_2021"]["orders"]
    assert not list(tmp_path.glob("tir-bench-*"))
