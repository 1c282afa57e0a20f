"""Queries in whose orders rows tie: a warehouse that takes any of them at each reading, and extracts that still show a right answer."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import Any

import duckdb
import pytest

from tir_dagster.changes import question
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster_tests.changes.following import Detectors, Differs, FollowedQuery, Shown
from tir_dagster_tests.changes.warehouse import COLUMNS, SALES, Row, Warehouse

CONNECTION = duckdb.connect(config={"threads": 1})
FIRST = Shown(
    "SELECT id, day, product FROM db.s.sales QUALIFY ROW_NUMBER() OVER (PARTITION BY product ORDER BY day) = 1",
    sliced=False,
)


class FickleWarehouse(Warehouse):
    """Each reading finds the rows in another order, so that rows which tie take turns."""

    _readings = itertools.count()

    def rows(self, duckdb_sql: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(duckdb_sql).fetchall()

    def _version(self, name: str, moment: str | None) -> str:
        rows = super()._version(name, moment).removesuffix(")")
        return f"{rows} ORDER BY hash(rowid * 31 + {next(self._readings)}))"


class FollowedFirsts(FollowedQuery):
    """The law here: of each product exactly one row, and one that the table has, of the product's first day."""

    def _check(self, version: SourceVersion) -> None:
        del version
        rows = self.warehouse.tables[SALES]
        extract_rows = self.server or Counter()
        for product in {row["PRODUCT"] for row in rows} | {row[2] for row in extract_rows}:
            mine = [row for row in rows if row["PRODUCT"] == product]
            first = min((_late(row["DAY"]) for row in mine), default=None)
            right = {(row["ID"], row["DAY"], row["PRODUCT"]) for row in mine if _late(row["DAY"]) == first}
            rows_of_product = [row for row in extract_rows.elements() if row[2] == product]
            if len(rows_of_product) != min(len(mine), 1) or not set(rows_of_product) <= right:
                raise Differs(f"of product {product} {rows_of_product} is shown; right is one of {right}")


def _late(day: Any) -> tuple[bool, Any]:
    """Days as they are ordered: without one, last."""
    return day is None, str(day)


def play(random: Random, *, steps: int = 30) -> Counter[str]:
    """Rows come, change and go; how the refreshes found what changed."""
    warehouse = FickleWarehouse(CONNECTION)
    history = FollowedFirsts(warehouse, FIRST, Detectors())
    rows: list[Row] = [_row(number, random) for number in range(8)]
    warehouse.write(SALES, rows)
    history.refresh()
    ways: Counter[str] = Counter()
    for number in range(steps):
        match random.choice(["come", "change", "go"]):
            case "come":
                rows = [*rows, _row(100 + number, random)]
            case "change" if rows:
                at = random.randrange(len(rows))
                rows = [*rows[:at], rows[at] | {"DAY": random.choice(COLUMNS[SALES]["DAY"])}, *rows[at + 1 :]]
            case _ if rows:
                gone = random.randrange(len(rows))
                rows = [*rows[:gone], *rows[gone + 1 :]]
        warehouse.write(SALES, rows)
        if history.refresh().decision == "incremental":
            ways["every row" if history.everything else "diff"] += 1
    return ways


def _row(number: int, random: Random) -> Row:
    values = {name: random.choice(of) if of else None for name, of in COLUMNS[SALES].items()}
    return values | {"ID": number}


@pytest.mark.parametrize("seed", range(5))
def test_an_extract_always_shows_a_right_answer_though_rows_tie(seed):
    ways = play(Random(seed))
    assert ways["every row"], ways


def test_by_diff_alone_rows_that_tie_would_be_shown_wrongly(monkeypatch):
    monkeypatch.setattr(question, "open_order", lambda *_: None)
    with pytest.raises(Differs):
        play(Random(0), steps=150)


def followed(rows: list[Row]) -> FollowedFirsts:
    warehouse = FickleWarehouse(CONNECTION)
    warehouse.write(SALES, [dict.fromkeys(COLUMNS[SALES]) | row for row in rows])
    history = FollowedFirsts(warehouse, FIRST, Detectors())
    history.refresh()
    return history


def test_where_no_rows_tie_the_versions_are_compared_in_the_warehouse():
    day, later = COLUMNS[SALES]["DAY"][1:3]
    history = followed([{"ID": 1, "DAY": day, "PRODUCT": 0}, {"ID": 2, "DAY": day, "PRODUCT": 1}])
    history.warehouse.write(
        SALES, [*history.warehouse.tables[SALES], _row(3, Random(0)) | {"DAY": later, "PRODUCT": 1}]
    )
    plan = history.refresh()
    assert (plan.decision, history.everything, plan.warnings) == ("none", None, ())


@pytest.mark.parametrize("before", [True, False], ids=["before", "now"])
def test_rows_that_tie_at_either_version_let_every_row_be_read_with_a_warning(before):
    day = COLUMNS[SALES]["DAY"][1]
    one, two = ({"ID": number, "DAY": day, "PRODUCT": 0} for number in (1, 2))
    history = followed([one, two] if before else [one])
    filled = [dict.fromkeys(COLUMNS[SALES]) | row for row in ([one] if before else [one, two])]
    history.warehouse.write(SALES, filled)
    plan = history.refresh()
    assert history.everything is not None
    (warning,) = plan.warnings
    assert warning == (
        "Rows tie in ROW_NUMBER() OVER (PARTITION BY product ORDER BY day), so that each reading may show other rows: "
        "every row is read and compared with the extract."
    )


@pytest.mark.parametrize("detector", ["watermark", "feed", "hint"])
def test_another_detector_is_not_used_and_the_run_says_so(detector):
    history = FollowedFirsts(FickleWarehouse(CONNECTION), FIRST, Detectors(detector))
    history.warehouse.write(SALES, [_row(1, Random(0))])
    history.refresh()
    history.warehouse.write(SALES, [_row(2, Random(0))])
    (warning,) = history.refresh().warnings
    assert warning.startswith(
        f"changes asks for the detector {detector}, which is not used: `diff` compares the query as a whole"
    )
    assert warning.endswith("QUALIFY keeps a row for what other rows are.")
    assert warning in history.relation.unused_settings
