"""Sources that are not a plain table with a past: redefined by DDL, without Time Travel, a view, read by another role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import GuardError
from tir_dagster.orchestration.verification import Verification
from tir_dagster_tests.orchestration.shown import Shown, prepare

SALES = "ID INT, PRODUCT VARCHAR, DAY DATE"
PRODUCTS = "PRODUCT VARCHAR, MARK INT, PRICE NUMBER(9,2), PRICE_NEW NUMBER(9,2)"
JOINED = "SELECT s.ID, s.DAY, p.PRICE FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT"
SHOWN = "SELECT PRODUCT, MARK, PRICE FROM {s}.PRODUCTS"
OF_TABLE = {
    "query": None,
    "source": "{s}.PRODUCTS",
    "columns": ["PRODUCT", "MARK", "PRICE"],
    "row_key": "PRODUCT",
    "changes": {"watermark": "MARK"},
}
Make = Callable[..., Shown]


@pytest.fixture(scope="module")
def make(places, spark, tmp_path_factory) -> Iterator[Make]:
    """Loads an extract over two tables: sales, and products with an old and a new price."""
    made: list[Shown] = []

    def begin(query: str, /, *, before: str = "", **settings: Any) -> Shown:
        tables = {"SALES": SALES, "PRODUCTS": PRODUCTS}
        folder: Path = tmp_path_factory.mktemp("redefined")
        shop = Shown(prepare(places), spark, folder, tables, query, settings)
        made.append(shop)
        shop.sql("INSERT INTO {s}.SALES VALUES (1, 'P1', '2026-01-05'), (2, 'P2', '2026-01-06')")
        shop.sql("INSERT INTO {s}.PRODUCTS VALUES ('P1', 1, 1, 100), ('P2', 2, 2, 200)")
        if before:
            shop.sql(before)
        assert shop.refresh().reason is Reason.FIRST_LOAD
        assert shop.published() == shop.expected()
        return shop

    yield begin
    for shop in made:
        shop.close()


def test_a_table_without_time_travel_is_read_as_it_is_and_never_in_two_versions(make):
    forgetful = "ALTER TABLE {s}.PRODUCTS SET DATA_RETENTION_TIME_IN_DAYS = 0"
    shop = make(JOINED, before=forgetful, row_key="ID")
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 5 WHERE PRODUCT = 'P1'")
    assert shop.refresh().decision == "incremental"
    assert shop.published() == shop.expected()
    assert Verification(shop.refresher, shop.confirmed).equals_source().passed

    # A change between the survey and the end of the reading.
    looked = shop.refresher.look(shop.confirmed)
    surveyed = shop.refresher.survey(looked)
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 6 WHERE PRODUCT = 'P1'")
    plan = shop.refresher.plan(looked, surveyed, "full")
    with pytest.raises(GuardError, match=r"changed while it was read.*DATA_RETENTION_TIME_IN_DAYS is 0"):
        shop.refresher.detect(looked, surveyed, plan, ident="early", resync=[], allow_empty=True)
    finding = Verification(shop.refresher, shop.confirmed).equals_source()
    assert (finding.passed, finding.open) == (False, True)

    # And one between the reading and the verification: what was read is what is published.
    shop.refresh("full", until="staged")
    looked, staged = shop.refresher.look(shop.confirmed), shop.change_set
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 7 WHERE PRODUCT = 'P1'")
    version, _ = shop.refresher.apply(looked, staged)
    assert version.manifest["rows"] == staged.rows
    assert shop.refresh().reason is Reason.REQUESTED, "it is still owed"
    assert shop.published() == shop.expected()


def test_a_change_right_before_the_look_is_seen_through_a_view(make):
    view = "CREATE VIEW {s}.PRICES AS SELECT PRODUCT, MARK, PRICE FROM {s}.PRODUCTS WHERE PRICE < 1000"
    of_view = OF_TABLE | {"source": "{s}.PRICES", "changes": {}}
    shop = make("SELECT PRODUCT, MARK, PRICE FROM {s}.PRICES", before=view, **of_view)
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 5 WHERE PRODUCT = 'P1'")
    shop.refresh()
    assert shop.published() == shop.expected()
