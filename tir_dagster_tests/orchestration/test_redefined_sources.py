"""Sources that are not a plain table with a past: redefined by DDL, without Time Travel, a view, read by another role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import GuardError
from tir_dagster.refresh.verify import Verification
from tir_dagster_tests.conftest import hostile_defaults
from tir_dagster_tests.orchestration.shown import Shown, prepare

SALES = "ID INT, PRODUCT VARCHAR, DAY DATE"
PRODUCTS = "PRODUCT VARCHAR, MARK INT, PRICE NUMBER(9,2), PRICE_NEW NUMBER(9,2)"
JOINED = "SELECT s.ID, s.DAY, p.PRICE FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT"
SHOWN = "SELECT PRODUCT, MARK, PRICE FROM {s}.PRODUCTS"
PRICES = "CREATE VIEW {s}.PRICES AS SELECT PRODUCT, MARK, PRICE FROM {s}.PRODUCTS WHERE PRICE IS NULL OR PRICE < 1000"
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
    shops: list[Shown] = []

    def begin(query: str, /, *, before: str = "", **settings: Any) -> Shown:
        tables = {"SALES": SALES, "PRODUCTS": PRODUCTS}
        folder: Path = tmp_path_factory.mktemp("redefined")
        shop = Shown(prepare(places), spark, folder, tables, query, settings)
        shops.append(shop)
        shop.sql("INSERT INTO {s}.SALES VALUES (1, 'P1', '2026-01-05'), (2, 'P2', '2026-01-06')")
        shop.sql("INSERT INTO {s}.PRODUCTS VALUES ('P1', 1, 1, 100), ('P2', 2, 2, 200)")
        if before:
            shop.sql(before)
        assert shop.refresh().reason is Reason.FIRST_LOAD
        assert shop.published() == shop.expected()
        return shop

    yield begin
    for shop in shops:
        shop.close()


def exchange_prices(shop: Shown) -> None:
    """The names stay, what they stand for does not."""
    shop.sql("ALTER TABLE {s}.PRODUCTS RENAME COLUMN PRICE TO PRICE_OLD")
    shop.sql("ALTER TABLE {s}.PRODUCTS RENAME COLUMN PRICE_NEW TO PRICE")


def add_anew(shop: Shown) -> None:
    """The last column, so that even the order of the columns is as before."""
    shop.sql("ALTER TABLE {s}.PRODUCTS DROP COLUMN PRICE")
    shop.sql("ALTER TABLE {s}.PRODUCTS ADD COLUMN PRICE NUMBER(9,2)")


@pytest.fixture(scope="module")
def products(make: Make) -> Shown:
    return make(SHOWN, **OF_TABLE)


@pytest.fixture(scope="module")
def joined(make: Make) -> Shown:
    return make(JOINED, row_key="ID")


@pytest.mark.parametrize("redefine", [exchange_prices, add_anew])
def test_a_column_of_the_same_name_with_other_content_costs_a_full_refresh(products, redefine):
    redefine(products)
    products.sql(
        "INSERT INTO {s}.PRODUCTS (PRODUCT, MARK, PRICE) SELECT 'P' || (MAX(MARK) + 1), MAX(MARK) + 1, 3 FROM {s}.PRODUCTS"
    )
    plan = products.refresh()
    assert plan.reason is Reason.SCHEMA_CHANGED
    assert "may hold other values" in plan.warnings[0]
    assert products.published() == products.expected()


def test_ddl_that_leaves_the_rows_as_they_are_costs_no_full_refresh(products):
    products.sql("COMMENT ON TABLE {s}.PRODUCTS IS 'told'")
    products.sql("ALTER TABLE {s}.PRODUCTS ADD COLUMN UNUSED INT")
    assert products.refresh().decision == "none"
    products.sql("INSERT INTO {s}.PRODUCTS (PRODUCT, MARK, PRICE) VALUES ('P9', 9, 9)")
    assert products.refresh().decision == "incremental"
    assert products.published() == products.expected()


def test_a_column_of_a_joined_table_with_other_content_costs_a_full_refresh(joined):
    exchange_prices(joined)
    joined.sql("UPDATE {s}.PRODUCTS SET PRODUCT = 'P9' WHERE PRODUCT = 'P2'")
    assert joined.refresh().reason is Reason.SCHEMA_CHANGED
    assert joined.published() == joined.expected()


def test_another_role_in_the_spec_is_another_definition(joined):
    joined.sql("CREATE ROLE IF NOT EXISTS ANALYST")
    joined.settings = {**joined.settings, "snowflake": {"role": "analyst"}}
    joined.refresher = joined.new_refresher()
    assert joined.refresh().reason is Reason.DEFINITION_CHANGED
    assert joined.refresh().decision == "none"


def test_a_table_without_time_travel_is_read_as_it_is_and_never_in_two_versions(make):
    forgetful = "ALTER TABLE {s}.PRODUCTS SET DATA_RETENTION_TIME_IN_DAYS = 0"
    shop = make(JOINED, before=forgetful, row_key="ID")
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 5 WHERE PRODUCT = 'P1'")
    assert shop.refresh().decision == "incremental"
    assert shop.published() == shop.expected()
    assert Verification(shop.refresher.context, shop.confirmed).equals_source().passed

    # A change between the survey and the end of the reading.
    looked = shop.refresher.look(shop.confirmed)
    surveyed = shop.refresher.survey(looked)
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 6 WHERE PRODUCT = 'P1'")
    plan = shop.refresher.plan(looked, surveyed, "full")
    with pytest.raises(GuardError, match=r"changed while it was read.*DATA_RETENTION_TIME_IN_DAYS is 0"):
        shop.refresher.detect(looked, surveyed, plan, ident="early", resync=[], allow_empty=True)
    finding = Verification(shop.refresher.context, shop.confirmed).equals_source()
    assert (finding.passed, finding.open) == (False, True)

    # And one between the reading and the verification: what was read is what is published.
    shop.refresh("full", until="staged")
    looked, staged = shop.refresher.look(shop.confirmed), shop.change_set
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 7 WHERE PRODUCT = 'P1'")
    version = shop.refresher.apply(looked, staged)
    assert version.manifest["rows"] == staged.rows
    assert shop.refresh().reason is Reason.REQUESTED, "it is still owed"
    assert shop.published() == shop.expected()


def test_a_change_right_before_the_look_is_seen_through_a_view(make):
    of_view = OF_TABLE | {"source": "{s}.PRICES", "changes": {}}
    shop = make("SELECT PRODUCT, MARK, PRICE FROM {s}.PRICES", before=PRICES, **of_view)
    shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 5 WHERE PRODUCT = 'P1'")
    shop.refresh()
    assert shop.published() == shop.expected()


@pytest.mark.parametrize("redefine", [exchange_prices, add_anew])
def test_a_column_behind_a_view_with_other_content_costs_a_full_refresh(make, redefine):
    of_view = OF_TABLE | {"source": "{s}.PRICES"}
    shop = make("SELECT PRODUCT, MARK, PRICE FROM {s}.PRICES", before=PRICES, **of_view)
    shop.sql("INSERT INTO {s}.PRODUCTS (PRODUCT, MARK, PRICE) VALUES ('P3', 3, 3)")
    assert shop.refresh().decision == "incremental", "nothing was redefined"
    redefine(shop)
    shop.sql("INSERT INTO {s}.PRODUCTS (PRODUCT, MARK, PRICE) VALUES ('P4', 4, 4)")
    plan = shop.refresh()
    assert plan.reason is Reason.SCHEMA_CHANGED
    assert "a table behind it was redefined" in plan.warnings[0]
    assert shop.published() == shop.expected()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT s.ID, s.DAY, p.PRICE FROM {s}.SALES s LEFT JOIN {s}.PRICES p ON s.PRODUCT = p.PRODUCT",
        "SELECT s.DAY, SUM(p.PRICE) AS P FROM {s}.SALES s LEFT JOIN {s}.PRICES p ON s.PRODUCT = p.PRODUCT GROUP BY s.DAY",
    ],
    ids=["rows", "groups"],
)
def test_a_column_behind_a_joined_view_that_did_not_change_itself_costs_a_full_refresh(make, query):
    shop = make(query, before=PRICES, row_key="ID")
    exchange_prices(shop)
    shop.sql("INSERT INTO {s}.SALES VALUES (3, 'P1', '2026-01-07')")
    assert shop.refresh().reason is Reason.SCHEMA_CHANGED
    assert shop.published() == shop.expected()


def test_rows_that_an_extract_keeps_by_its_spec_do_not_redefine_a_view(make):
    dated = PRICES.replace(" MARK,", " DATEADD('day', MARK, '2026-01-01'::DATE) AS MARK,")
    changes = {"watermark": "MARK", "deletes": False}
    of_view = OF_TABLE | {"source": "{s}.PRICES", "changes": changes}
    shop = make("SELECT PRODUCT, MARK, PRICE FROM {s}.PRICES", before=dated, **of_view)
    for mark in (3, 4):
        shop.sql(f"INSERT INTO {{s}}.PRODUCTS (PRODUCT, MARK, PRICE) VALUES ('P{mark}', {mark}, 1)")
        shop.sql(f"DELETE FROM {{s}}.PRODUCTS WHERE MARK = {mark - 2}")
        assert shop.refresh().decision == "incremental", "kept rows are no difference"
    assert len(shop.published()) == 4
    assert Verification(shop.refresher.context, shop.confirmed).equals_source().passed


def test_an_account_with_defaults_of_its_own_gives_the_same_extract(make):
    query = JOINED.replace("p.PRICE", "TO_VARCHAR(s.DAY) AS DAY_TEXT, DATE_TRUNC('WEEK', s.DAY) AS WEEK, p.PRICE")
    more = "INSERT INTO {s}.SALES SELECT COLUMN1, 'P2', '2026-01-06' FROM VALUES (11), (12), (13), (14), (15), (16)"
    shop = make(query, before=more, row_key="ID", slices={"column": "DAY", "by": "week", "start": "2026-01-05"})
    with hostile_defaults(shop.sql):
        assert shop.refresh().decision == "none"
        shop.sql("INSERT INTO {s}.SALES VALUES (3, 'P1', '2026-01-11')")
        shop.sql("UPDATE {s}.PRODUCTS SET PRICE = 7 WHERE PRODUCT = 'P1'")
        assert shop.refresh().decision == "incremental"
        assert shop.published() == shop.expected()
