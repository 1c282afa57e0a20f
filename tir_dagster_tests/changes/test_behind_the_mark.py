"""Changes that a watermark's order hides: behind a number that is far too high, or in a slice without a row key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import duckdb
import pytest

from tir_dagster_tests.changes.following import Detectors, FollowedQuery, Shown
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, SALES, STAMP, Row, Warehouse

OLD = datetime(2025, 1, 1)  # noqa: DTZ001 - a time without a zone
NUMBERS = "SELECT id, day, note FROM db.s.sales"
JOINED = "SELECT s.id, s.day, p.color FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"
BY_NOTE = "SELECT day, note, SUM(qty) AS qty, COUNT(*) AS n FROM db.s.sales GROUP BY day, note"


@dataclass(frozen=True)
class ByNumber(Detectors):
    """A number as watermark, of the first table and of the joined one."""

    first: str = "watermark"

    def settings(self, query: str) -> dict[str, Any]:
        tables = {str(PRODUCTS): {"watermark": "SINCE"}} if "products" in query else {}
        return {"watermark": "QTY", "tables": tables}


def sale(number: int, **values: Any) -> Row:
    return dict.fromkeys(COLUMNS[SALES]) | {"ID": number, "DAY": date(2025, 3, 5), STAMP: OLD} | values


def product(number: int, **values: Any) -> Row:
    return dict.fromkeys(COLUMNS[PRODUCTS]) | {"PRODUCT": number, STAMP: OLD} | values


@pytest.fixture
def loaded() -> Callable[..., FollowedQuery]:
    """An extract of these rows."""

    def load(shown: Shown, detectors: Detectors, sales: list[Row], products: list[Row] | None = None) -> FollowedQuery:
        warehouse = Warehouse(duckdb.connect(config={"threads": 1}))
        warehouse.write(SALES, sales)
        warehouse.write(PRODUCTS, products or [])
        history = FollowedQuery(warehouse, shown, detectors)
        history.refresh()
        return history

    return load


def test_changes_behind_a_number_that_is_far_too_high_are_found(loaded):
    high = sale(1, QTY=10**9)
    history = loaded(Shown(NUMBERS), ByNumber(), [high, sale(2, QTY=1), sale(3, QTY=2)])
    history.warehouse.write(SALES, [high, sale(2, QTY=3, NOTE="a"), sale(3, QTY=2)])
    assert history.refresh().keys == 1
    # The next one is higher still, and another row changes beside it.
    history.warehouse.write(SALES, [high, sale(2, QTY=3, NOTE="a"), sale(3, QTY=4, NOTE="b"), sale(4, QTY=2 * 10**9)])
    assert history.refresh().keys == 2


def test_changes_are_found_when_the_highest_number_falls(loaded):
    history = loaded(Shown(NUMBERS), ByNumber(), [sale(1, QTY=10**9), sale(2, QTY=1), sale(3, QTY=2)])
    history.warehouse.write(SALES, [sale(1, QTY=4, NOTE="b"), sale(2, QTY=3, NOTE="a"), sale(3, QTY=2)])
    assert history.refresh().keys == 2


def test_only_what_has_another_number_is_looked_at(loaded):
    rows = [sale(number, QTY=number) for number in range(5)]
    history = loaded(Shown(NUMBERS), ByNumber(), rows)
    history.warehouse.write(SALES, [*rows[:4], sale(4, QTY=5)])
    assert history.refresh().decision == "none", "the row shows nothing else"


def test_where_the_history_is_too_short_for_numbers_every_row_is_compared(loaded):
    history = loaded(Shown(NUMBERS), ByNumber(), [sale(1, QTY=10**9), sale(2, QTY=1)])
    history.warehouse.forget()
    history.warehouse.write(SALES, [sale(1, QTY=10**9), sale(2, QTY=2, NOTE="a")])
    plan = history.refresh()
    assert plan.keys == 1
    assert "does not reach back" in plan.warnings[0]


def test_changes_of_a_joined_table_behind_too_high_a_number_are_found(loaded):
    products = [product(1, COLOR="a", SINCE=10**9), product(2, COLOR="a", SINCE=1)]
    history = loaded(Shown(JOINED), ByNumber(), [sale(1, PRODUCT=1), sale(2, PRODUCT=2)], products)
    history.warehouse.write(PRODUCTS, [products[0], product(2, COLOR="b", SINCE=2)])
    assert history.refresh().keys == 1


@pytest.mark.parametrize("detector", ["watermark", "hint"])
@pytest.mark.parametrize("query", [NUMBERS, BY_NOTE], ids=["slices", "groups"])
def test_without_a_row_key_a_delete_and_a_late_insert_in_one_slice_are_found(loaded, query, detector):
    newest = sale(9, QTY=1, DAY=date(2025, 4, 7), STAMP=datetime(2025, 2, 1))  # noqa: DTZ001
    history = loaded(Shown(query, row_key=()), Detectors(detector), [newest, sale(1, QTY=1), sale(2, QTY=1)])
    history.warehouse.write(SALES, [newest, sale(3, QTY=5), sale(2, QTY=1)])
    assert history.refresh().decision == "incremental"


def test_without_a_row_key_and_history_every_row_is_compared(loaded):
    history = loaded(Shown(NUMBERS, row_key=()), Detectors("watermark"), [sale(1), sale(2)])
    history.warehouse.forget()
    history.warehouse.write(SALES, [sale(1), sale(3)])
    plan = history.refresh()
    assert plan.decision == "incremental"
    assert "does not reach back" in plan.warnings[0]
