"""Extracts that show a query: joins, chains and aggregates, refreshed by key and equal to what the warehouse itself says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tir_dagster.changes.hints import HintError
from tir_dagster.changes.plan import Reason
from tir_dagster.errors import GuardError, SpecError
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.shown import Shown, prepare

SALES = "ID NUMBER(38,0), DAY DATE, PRODUCT VARCHAR, QUANTITY NUMBER(38,0), SELLER VARCHAR"
PRODUCTS = "PRODUCT VARCHAR, COLOR VARCHAR, UNIT_PRICE FLOAT, REMARK VARCHAR"
TABLES = {"SALES": SALES, "PRODUCTS": PRODUCTS}
BY_COLOR = """
    SELECT s.DAY, COALESCE(p.COLOR, 'N/A') AS COLOR, SUM(s.QUANTITY * COALESCE(p.UNIT_PRICE, 0)) AS AMOUNT, COUNT(*) AS N
    FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT GROUP BY s.DAY, COALESCE(p.COLOR, 'N/A')
"""
DETAIL = """
    SELECT s.ID, s.DAY, s.PRODUCT, s.QUANTITY, COALESCE(p.COLOR, 'N/A') AS COLOR
    FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT
"""
INNER = DETAIL.replace("LEFT JOIN", "JOIN")
BY_ID = {"row_key": "ID"}


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    return prepare(sandbox)


@pytest.fixture
def make(prepared, spark, tmp_path) -> Iterator[Callable[..., Shown]]:
    made: list[Shown] = []

    def shop(query: str, *sales: tuple, products=(("P1", "blue", 5.0), ("P2", "red", 10.0)), **settings) -> Shown:
        one = Shown(prepared, spark, tmp_path / str(len(made)), TABLES, query, {**BY_ID, **settings})
        made.append(one)
        for row in sales:
            sell(one, *row)
        for row in products:
            stock(one, *row)
        assert one.refresh().reason is Reason.FIRST_LOAD
        assert one.published() == one.expected()
        return one

    yield shop
    for one in made:
        one.close()


def sell(
    shop: Shown, number: int, product: str, quantity: int, seller: str = "nobody", day: str = "2024-01-01"
) -> None:
    shop.sql(f"INSERT INTO {{s}}.SALES SELECT {number}, '{day}'::DATE, '{product}', {quantity}, '{seller}'")


def stock(shop: Shown, product: str, color: str, price: float) -> None:
    shop.sql(f"INSERT INTO {{s}}.PRODUCTS SELECT '{product}', '{color}', {price}::FLOAT, NULL")


def hint(kind: str, table: str = "SALES", **condition: object) -> dict:
    return {"table": f"{{s}}.{table}", "type": kind, "scope": {"equal": condition} if condition else "unknown"}


def amounts(shop: Shown) -> dict[str, tuple[float, int]]:
    """By color: the amount and the number of sales, as people see them."""
    number = shop.published()
    assert set(number.values()) <= {1}, "a group is there once"
    return {
        row[1].removeprefix("str "): (float(row[2].removeprefix("number ")), int(float(row[3].removeprefix("number "))))
        for row in number
    }


def refreshes(shop: Shown, **options) -> None:
    """Incrementally, and once."""
    plan = shop.refresh(**options)
    assert plan.decision == "incremental", plan.sentence()
    assert shop.published() == shop.expected()
    assert shop.refresh().decision == "none"


def test_t1_a_hint_too_broad_and_of_the_wrong_type_gives_the_right_rows_and_a_warning(make):
    shop = make(BY_COLOR, (1, "P1", 10), (2, "P2", 20), changes={"detector": "hint"})
    sell(shop, 3, "P1", 30)
    refreshes(shop, hints=[hint("ADD_ROWS", PRODUCT="P1")])
    assert amounts(shop) == {"blue": (200, 2), "red": (200, 1)}
    assert any("ADD_ROWS" in warning and "(1)" in warning for warning in shop.change_set.warnings), "key 1 was there"
    assert shop.refresh(hints=[hint("ADD_ROWS", PRODUCT="P1")]).decision == "none", "the hint repeated changes nothing"


def test_t1_without_a_key_of_its_own_the_rows_of_day_and_product_are_replaced_together(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20), row_key=["DAY", "PRODUCT"], changes={"detector": "hint"})
    sell(shop, 3, "P1", 30)
    refreshes(shop, hints=[hint("ADD_ROWS", PRODUCT="P1")])


def test_t2_an_orthogonal_condition_needs_no_full_refresh(make):
    sales = [(1, "P1", 10, "microsoft"), (2, "P2", 20, "amazon"), (3, "P1", 30, "google"), (4, "P3", 30, "google")]
    products = [("P1", "blue", 5.0), ("P2", "red", 10.0), ("P3", "green", 15.0)]
    shop = make(BY_COLOR, *sales, products=products, changes={"detector": "hint"})
    assert amounts(shop) == {"blue": (200, 2), "red": (200, 1), "green": (450, 1)}
    shop.sql("DELETE FROM {s}.SALES WHERE SELLER = 'google'")
    refreshes(shop, hints=[hint("REMOVE_ROWS", SELLER="google")])
    assert amounts(shop) == {"blue": (50, 1), "red": (200, 1)}


def test_t3_an_optional_partner_that_comes_and_goes_and_changes(make):
    shop = make(BY_COLOR, (1, "P1", 10), (2, "P2", 20), (3, "P3", 30))
    assert amounts(shop) == {"blue": (50, 1), "red": (200, 1), "N/A": (0, 1)}
    stock(shop, "P3", "green", 15.0)
    refreshes(shop)
    assert amounts(shop) == {"blue": (50, 1), "red": (200, 1), "green": (450, 1)}
    shop.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT = 'P3'")
    refreshes(shop)
    assert amounts(shop) == {"blue": (50, 1), "red": (200, 1), "N/A": (0, 1)}
    shop.sql("UPDATE {s}.PRODUCTS SET COLOR = 'red' WHERE PRODUCT = 'P1'")
    refreshes(shop)
    assert amounts(shop)["red"] == (250, 2)
    assert "blue" not in amounts(shop)


def test_t3_in_the_detail_one_row_is_read_again(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20), (3, "P3", 30), changes={"detector": "feed"})
    stock(shop, "P3", "green", 15.0)
    assert shop.refresh().decision == "incremental"
    assert "read 1 rows" in shop.lines
    assert (shop.change_set.keys, shop.change_set.rows) == (1, 1)
    assert shop.published() == shop.expected()


@pytest.mark.parametrize(("query", "before", "after"), [(DETAIL, 3, 3), (INNER, 2, 3)], ids=["optional", "mandatory"])
def test_t4_a_fact_before_its_dimension_and_the_same_hint_three_times(make, query, before, after):
    shop = make(query, (1, "P1", 10), (2, "P2", 20), changes={"detector": "hint"})
    sell(shop, 3, "P9", 30)
    whole_day = hint("MIXED_CHANGES", DAY="2024-01-01")
    for _ in range(3):
        shop.refresh(hints=[whole_day])
        assert shop.published() == shop.expected()
        assert shop.published().total() == before
    stock(shop, "P9", "black", 1.0)
    refreshes(shop)
    assert shop.published().total() == after


def test_t5_a_fact_moves_to_another_partner_while_both_partners_go(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20))
    shop.sql("UPDATE {s}.SALES SET PRODUCT = 'P2' WHERE ID = 1")
    shop.sql("DELETE FROM {s}.PRODUCTS")
    refreshes(shop)
    assert all(row[4] == "str N/A" for row in shop.published())


def test_t8_a_removal_that_did_not_happen_changes_nothing_and_is_told(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20), changes={"detector": "hint"})
    plan = shop.refresh(hints=[hint("REMOVE_ROWS", PRODUCT="P1")])
    assert plan.decision == "none"
    assert any("REMOVE_ROWS" in warning for warning in plan.warnings)
    assert shop.published() == shop.expected()


def test_t9_null_keys_and_duplicate_partners_equal_the_rebuild(make):
    shop = make(BY_COLOR, *((number, "P2", number) for number in range(5, 12)), (1, "P1", 10))
    shop.sql("INSERT INTO {s}.SALES SELECT NULL, NULL, NULL, 7, NULL UNION ALL SELECT 1, NULL, 'P1', 1, NULL")
    stock(shop, "P1", "violet", 1.0)
    refreshes(shop)
    assert any("PRODUCTS are there more than once" in warning for warning in shop.change_set.warnings)


def test_duplicate_partners_may_be_set_to_fail_before_anything_is_touched(make):
    shop = make(DETAIL, (1, "P1", 10), changes={"tables": {"{s}.PRODUCTS": {"duplicates": "fail"}}})
    before, published = shop.confirmed, shop.published()
    stock(shop, "P1", "violet", 1.0)
    for mode in ("changes", "full"):
        with pytest.raises(GuardError, match=r"PRODUCTS has keys \(PRODUCT\) more than once: P1 \(2 rows\)"):
            shop.refresh(mode)
    assert (shop.confirmed, shop.published()) == (before, published)
    shop.sql("DELETE FROM {s}.PRODUCTS WHERE COLOR = 'violet'")
    assert shop.refresh().decision == "none"


def test_a_mandatory_partner_that_went_though_rows_refer_to_it_is_told(make):
    shop = make(INNER, (1, "P1", 10), (2, "P2", 20), (3, "P2", 5))
    shop.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT = 'P2'")
    refreshes(shop)
    assert any("2 rows of" in warning and "does not have any more" in warning for warning in shop.change_set.warnings)


def test_a_column_of_a_partner_that_the_query_does_not_use_is_nothing_to_do(make):
    shop = make(DETAIL, (1, "P1", 10))
    shop.sql("UPDATE {s}.PRODUCTS SET REMARK = 'new'")
    assert shop.refresh().decision == "none"


@pytest.mark.parametrize(
    ("query", "detector"), [(INNER, "snapshot"), (BY_COLOR, "feed")], ids=["inner by snapshot", "aggregate by feed"]
)
def test_changes_of_all_kinds_on_all_tables(make, query, detector):
    shop = make(
        query, (1, "P1", 10), (2, "P2", 20), (3, "P3", 30), (4, "P1", 1, "x", "2024-02-01"),
        changes={"detector": detector, "tables": {"{s}.PRODUCTS": {"detector": detector}}},
    )  # fmt: skip
    if detector == "feed":
        for table in TABLES:
            shop.sql(f"ALTER TABLE {{s}}.{table} SET CHANGE_TRACKING = TRUE")
        sell(shop, 9, "P1", 1)
        shop.refresh()
    shop.sql("UPDATE {s}.SALES SET PRODUCT = 'P3' WHERE ID = 2")
    shop.sql("DELETE FROM {s}.SALES WHERE ID = 1")
    sell(shop, 5, "P4", 3)
    stock(shop, "P4", "white", 2.5)
    shop.sql("UPDATE {s}.PRODUCTS SET PRODUCT = 'P3' WHERE PRODUCT = 'P2'")
    refreshes(shop)
    shop.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT = 'P3'")
    refreshes(shop)


def test_one_changed_partner_of_a_million_rows_reads_its_own_rows_only(make):
    rows = "SELECT SEQ4(), DATEADD('day', MOD(SEQ4(), 365), '2024-01-01'::DATE), 'P' || MOD(SEQ4(), 1000), 1, 'x'"
    shop = make(DETAIL, products=())
    shop.sql(f"INSERT INTO {{s}}.SALES {rows} FROM TABLE(GENERATOR(ROWCOUNT => 1000000))")
    shop.sql("INSERT INTO {s}.PRODUCTS SELECT 'P' || SEQ4(), 'blue', 1, NULL FROM TABLE(GENERATOR(ROWCOUNT => 1000))")
    shop.refresh()
    assert shop.confirmed.rows == 1_000_000
    shop.sql("UPDATE {s}.PRODUCTS SET COLOR = 'red' WHERE PRODUCT = 'P7'")
    assert shop.refresh().decision == "incremental"
    assert [line for line in shop.lines if line.startswith("read ")] == ["read 1,000 rows"]
    assert (shop.change_set.keys, shop.change_set.rows) == (1_000, 1_000)
    assert shop.confirmed.rows == 1_000_000


def test_a_look_at_the_columns_comes_before_anything_is_purged(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20))
    shop.sql("ALTER TABLE {s}.PRODUCTS ADD COLUMN SIZE NUMBER(3,0)")
    shop.sql("UPDATE {s}.PRODUCTS SET COLOR = 'pink' WHERE PRODUCT = 'P1'")
    refreshes(shop)
    shop.sql("ALTER TABLE {s}.SALES DROP COLUMN QUANTITY")
    before = shop.confirmed
    with pytest.raises(SpecError, match="QUANTITY"):
        shop.refresh()
    assert shop.confirmed == before
    shop.sql("ALTER TABLE {s}.SALES ADD COLUMN QUANTITY VARCHAR")
    assert shop.refresh().reason is Reason.SCHEMA_CHANGED
    assert shop.published() == shop.expected()


def test_a_query_that_cannot_be_refreshed_by_key_is_loaded_in_full_when_its_tables_change(make):
    shop = make("SELECT ID, DAY, ROW_NUMBER() OVER (ORDER BY ID) AS PLACE FROM {s}.SALES", (1, "P1", 10), (2, "P2", 20))
    assert shop.refresh().decision == "none"
    sell(shop, 3, "P1", 1)
    plan = shop.refresh()
    assert plan.reason is Reason.NONDETERMINISTIC_VIEW
    assert shop.published() == shop.expected()


def test_what_a_hint_leaves_out_is_detected_all_the_same_and_told(make):
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20), (3, "P1", 5))
    # One statement tells of key 1 only; both changed. The detector is the snapshot.
    shop.sql("UPDATE {s}.SALES SET QUANTITY = 99 WHERE ID IN (1, 2)")
    hints = [{"table": "{s}.SALES", "type": "UPDATE_ROWS", "scope": {"keys": [{"ID": 1}]}}]
    refreshes(shop, hints=hints)


def test_a_hint_at_a_joined_table_reaches_the_rows_that_refer_to_it(make):
    tables = {"{s}.PRODUCTS": {"detector": "hint"}}
    shop = make(DETAIL, (1, "P1", 10), (2, "P2", 20), changes={"detector": "hint", "tables": tables})
    shop.sql("UPDATE {s}.PRODUCTS SET COLOR = 'gold' WHERE PRODUCT = 'P1'")
    refreshes(shop, hints=[hint("UPDATE_ROWS", "PRODUCTS", PRODUCT="P1")])


def test_a_hint_that_fits_no_table_or_column_is_refused_before_anything_is_touched(make):
    shop = make(DETAIL, (1, "P1", 10))
    sell(shop, 2, "P1", 1)
    for wrong, told in (
        (hint("ADD_ROWS", "ELSEWHERE", ID=1), "does not read"),
        (hint("ADD_ROWS", IDD=1), "did you mean ID"),
        (hint("ADD_ROWS", QUANTITY="many"), "QUANTITY"),
    ):
        with pytest.raises(HintError, match=told):
            shop.refresh(hints=[wrong])
    refreshes(shop)
