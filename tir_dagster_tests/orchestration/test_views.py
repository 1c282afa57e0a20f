"""Extracts that show a query: joins, chains and aggregates, refreshed by key and equal to what the warehouse itself says."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tir_dagster.changes.hints import HintError
from tir_dagster.changes.plan import Reason
from tir_dagster.errors import GuardError, SpecError
from tir_dagster.hyper.content import content_sums, sums_to_json
from tir_dagster.orchestration.metadata import slice_metadata
from tir_dagster.refresh.context import shape_of
from tir_dagster.refresh.survey import survey_source
from tir_dagster.refresh.verify import ExtractVerification
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.shop import DETAIL, TABLES, sell, stock
from tir_dagster_tests.orchestration.shown import Shown, prepare

BY_COLOR = """
    SELECT s.DAY, COALESCE(p.COLOR, 'N/A') AS COLOR, SUM(s.QUANTITY * COALESCE(p.UNIT_PRICE, 0)) AS AMOUNT, COUNT(*) AS N
    FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT GROUP BY s.DAY, COALESCE(p.COLOR, 'N/A')
"""
INNER = DETAIL.replace("LEFT JOIN", "JOIN")
BY_ID = {"row_key": "ID"}
# `make soak` takes a million.
MANY = 1_000_000 if "TIR_LONG" in os.environ else 100_000

Make = Callable[..., Shown]


def rows_read(shown: Shown) -> list[int]:
    """How many rows each reading of the last refresh gave."""
    return [int(line.split()[1].replace(",", "")) for line in shown.lines if line.startswith("read ")]


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    return prepare(sandbox)


@pytest.fixture(scope="module")
def make(prepared, spark, tmp_path_factory) -> Iterator[Make]:
    extracts: list[Shown] = []

    def shop(query: str, *sales: tuple, products: Sequence[tuple] = (), filled: str = "", **settings) -> Shown:
        """An extract and its first load."""
        extract = Shown(prepared, spark, tmp_path_factory.mktemp("shop"), TABLES, query, {**BY_ID, **settings})
        extracts.append(extract)
        for table in TABLES:
            extract.sql(f"ALTER TABLE {{s}}.{table} SET CHANGE_TRACKING = TRUE")
        for row in sales:
            sell(extract, *row)
        for row in products:
            stock(extract, *row)
        for statement in filter(None, filled.split(";")):
            extract.sql(statement)
        assert extract.refresh().reason is Reason.FIRST_LOAD
        return extract

    yield shop
    for extract in extracts:
        extract.close()


def hint(kind: str, table: str = "SALES", **condition: object) -> dict:
    return {"table": f"{{s}}.{table}", "type": kind, "scope": {"equal": condition} if condition else "unknown"}


def amounts(shop: Shown, day: str) -> dict[str, tuple[float, int]]:
    """By color: the amount and the number of sales of a day, as people see them."""
    number = shop.published()
    assert set(number.values()) <= {1}, "a group is there once"
    return {
        row[1].removeprefix("str "): (float(row[2].removeprefix("number ")), int(float(row[3].removeprefix("number "))))
        for row in number
        if day in str(row[0])
    }


def refreshes(shop: Shown, **options) -> None:
    """By key, and to what the query shows."""
    plan = shop.refresh(**options)
    assert plan.decision == "incremental", plan.sentence()
    assert shop.published() == shop.expected()


# Each extract here is loaded once and shared: its tests have days and products of their own.

T1, T2, T3, T9, LAST = "2024-01-01", "2024-02-02", "2024-03-03", "2024-09-09", "2024-12-12"
P1, P2, P3 = ("P1", "blue", 5.0), ("P2", "red", 10.0), ("P3", "green", 15.0)


# An aggregate, of whose sales only hints tell


@pytest.fixture(scope="module")
def told_sums(make: Make) -> Shown:
    sales = [(1, "P1", 10, "x", T1), (2, "P2", 20, "x", T1)]
    sellers = [
        (11, "P1", 10, "microsoft"),
        (12, "P2", 20, "amazon"),
        (13, "P1", 30, "google"),
        (14, "P3", 30, "google"),
    ]
    sales += [(*row, T2) for row in sellers]
    return make(BY_COLOR, *sales, products=[P1, P2, P3], changes={"detector": "hint"})


def test_t1_a_hint_too_broad_and_of_the_wrong_type_gives_the_right_rows_and_a_warning(told_sums):
    shop = told_sums
    sell(shop, 3, "P1", 30, "x", T1)
    refreshes(shop, hints=[hint("ADD_ROWS", PRODUCT="P1")])
    assert amounts(shop, T1) == {"blue": (200, 2), "red": (200, 1)}
    assert any("ADD_ROWS" in warning and "(1, " in warning for warning in shop.change_set.warnings), "key 1 was there"
    assert shop.refresh(hints=[hint("ADD_ROWS", PRODUCT="P1")]).decision == "none", "the hint repeated changes nothing"


def test_t2_an_orthogonal_condition_needs_no_full_refresh(told_sums):
    shop = told_sums
    assert amounts(shop, T2) == {"blue": (200, 2), "red": (200, 1), "green": (450, 1)}
    shop.sql("DELETE FROM {s}.SALES WHERE SELLER = 'google'")
    refreshes(shop, hints=[hint("REMOVE_ROWS", SELLER="google")])
    assert amounts(shop, T2) == {"blue": (50, 1), "red": (200, 1)}


# An aggregate by a watermark, its products compared; the last day is the one that the watermark still looks at


@pytest.fixture(scope="module")
def sums(make: Make) -> Shown:
    sales = [(1, "P1", 10, "x", T3), (2, "P2", 20, "x", T3), (3, "P3", 30, "x", T3)]
    sales += [(number, "Q1" if number == 11 else "Q2", number, "x", T9) for number in range(11, 18)]
    sales += [(21, "R1", 10, "x", LAST), (22, "R2", 20, "x", LAST)]
    return make(
        BY_COLOR,
        *sales,
        products=[
            P1,
            P2,
            *((f"{letter}1", "blue", 5.0) for letter in "QR"),
            *((f"{letter}2", "red", 10.0) for letter in "QR"),
        ],
        changes={"watermark": "DAY", "look_back": "0 seconds"},
        thresholds={"quiet_period": "0 seconds", "full_share": 1.0, "delete_share": 0.3},
    )


def test_t3_an_optional_partner_that_comes_and_goes_and_changes(sums):
    assert amounts(sums, T3) == {"blue": (50, 1), "red": (200, 1), "N/A": (0, 1)}
    stock(sums, *P3)
    refreshes(sums)
    assert amounts(sums, T3) == {"blue": (50, 1), "red": (200, 1), "green": (450, 1)}
    sums.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT = 'P3'")
    refreshes(sums)
    assert amounts(sums, T3) == {"blue": (50, 1), "red": (200, 1), "N/A": (0, 1)}
    sums.sql("UPDATE {s}.PRODUCTS SET COLOR = 'red' WHERE PRODUCT = 'P1'")
    refreshes(sums)
    assert amounts(sums, T3) == {"red": (250, 2), "N/A": (0, 1)}
    assert sums.refresh().decision == "none"


def test_t9_null_keys_and_duplicate_partners_equal_the_rebuild(sums):
    sums.sql(
        f"INSERT INTO {{s}}.SALES SELECT NULL, NULL, NULL, 7, NULL UNION ALL SELECT 11, '{T9}'::DATE, 'Q1', 1, NULL"
    )
    stock(sums, "Q1", "violet", 1.0)
    refreshes(sums)
    assert any("PRODUCTS occur more than once" in warning for warning in sums.change_set.warnings)


def test_what_a_hint_leaves_out_is_detected_all_the_same_and_told(sums):
    sums.sql("UPDATE {s}.SALES SET QUANTITY = 99 WHERE ID IN (21, 22)")
    refreshes(sums, hints=[{"table": "{s}.SALES", "type": "UPDATE_ROWS", "scope": {"keys": [{"ID": 21}]}}])
    (warning_of_hint,) = [warning for warning in sums.change_set.warnings if "partial" in warning]
    assert "2 changed keys were found, 1 were described, and 1 key (" in warning_of_hint
    assert "'red')) in no hint is refreshed as well" in warning_of_hint


def test_hints_that_were_partial_twice_are_no_longer_trusted_alone(make):
    query = "SELECT ID, DAY, PRODUCT, QUANTITY FROM {s}.SALES"
    shop = make(query, (1, "P1", 1), (2, "P1", 1), changes={"detector": "hint"})

    def update_both_and_describe_one(quantity: int) -> list[str]:
        shop.sql(f"UPDATE {{s}}.SALES SET QUANTITY = {quantity}")
        plan = shop.refresh(hints=[{"table": "{s}.SALES", "type": "UPDATE_ROWS", "scope": {"keys": [{"ID": 1}]}}])
        return [warning for warning in plan.warnings if "no longer trusted alone" in warning]

    assert update_both_and_describe_one(2) == []
    assert shop.published() != shop.expected(), "nobody knows of the other row yet"
    # Every second time, the comparison of slices in turn finds what the hint before left out.
    assert [update_both_and_describe_one(quantity) for quantity in (3, 4, 5)] == [[], [], []]
    (warning,) = update_both_and_describe_one(6)
    assert "described less than had changed 2 times" in warning
    assert shop.published() == shop.expected()
    shop.refresh("full")
    assert update_both_and_describe_one(7) == [], "a full load gives them another chance"


def test_a_full_refresh_of_an_aggregate_counts_the_rows_that_people_saw(sums):
    seen = sums.published().total()
    assert sums.refresh("full").reason is Reason.REQUESTED
    counted = sums.change_set
    assert (sum(counted.purged.values()), sum(counted.appended.values())) == (seen, seen)


def test_nothing_of_an_aggregate_is_touched_while_a_table_is_not_quiet(sums):
    spec, waited = sums.refresher.spec, []
    patient = replace(spec, thresholds=replace(spec.thresholds, quiet_period=3600.0))
    refusal = pytest.raises(GuardError, match=r"SALES.* keeps changing: never quiet for 3600 seconds\. Nothing was")
    with sums.refresher.snowflake.kept_open(), refusal:
        survey_source(patient, sums.refresher.snowflake, log=lambda _: None, sleep=waited.append)
    assert min(waited) > 3000


@pytest.fixture
def restored_sums(sums: Shown) -> Iterator[Shown]:
    """The same extract; after the test its sales and its versions are those of before."""
    versions = sums.folder / "extracts" / sums.name / "versions"
    shutil.copytree(versions, sums.folder / "aside")
    sums.sql("CREATE TABLE {s}.SALES_ASIDE AS SELECT * FROM {s}.SALES")
    yield sums
    sums.sql("DELETE FROM {s}.SALES")
    sums.sql("INSERT INTO {s}.SALES SELECT * FROM {s}.SALES_ASIDE")
    shutil.rmtree(versions, ignore_errors=True)
    shutil.move(sums.folder / "aside", versions)


def test_a_full_refresh_of_an_aggregate_stops_where_too_much_would_vanish(restored_sums):
    sums = restored_sums
    before, published = sums.confirmed, sums.published()
    sums.sql(f"DELETE FROM {{s}}.SALES WHERE DAY IN ('{T9}', '{LAST}')")
    with pytest.raises(GuardError, match=r"\d+ of \d+ rows would vanish, more than the 30%"):
        sums.refresh("full", allow_empty=False)
    # Without our own version, what people see is what can vanish.
    shutil.rmtree(sums.folder / "extracts" / sums.name / "versions")
    with pytest.raises(GuardError, match=rf"of {published.total()} rows would vanish"):
        sums.refresh(allow_empty=False)
    sums.sql("TRUNCATE TABLE {s}.SALES")
    with pytest.raises(GuardError, match=r"the source is empty, the extract has \d+ rows\. Nothing was touched"):
        sums.refresh(allow_empty=False)
    assert (sums.confirmed, sums.published()) == (before, published)


# Rows with an optional partner, of which only hints tell; those of a day and product are replaced together


def whole_day(day: str) -> list[dict]:
    return [hint("MIXED_CHANGES", DAY=day)]


@pytest.fixture(scope="module")
def told_rows(make: Make) -> Shown:
    sales = [(1, "P1", 10, "x", T1), (2, "P2", 20, "x", T1), (11, "P1", 10, "x", T2), (12, "P2", 20, "x", T2)]
    changes = {"detector": "hint", "tables": {"{s}.PRODUCTS": {"detector": "hint"}}}
    return make(DETAIL, *sales, products=[P1, P2], row_key=["DAY", "PRODUCT"], changes=changes)


@pytest.mark.long
def test_t1_without_a_key_of_its_own_the_rows_of_day_and_product_are_replaced_together(told_rows):
    sell(told_rows, 3, "P1", 30, "x", T1)
    refreshes(told_rows, hints=[hint("ADD_ROWS", PRODUCT="P1")])


def test_t8_a_removal_that_did_not_happen_changes_nothing_and_is_told(told_rows):
    plan = told_rows.refresh(hints=[hint("REMOVE_ROWS", PRODUCT="P1")])
    assert plan.decision == "none"
    assert any("REMOVE_ROWS" in warning for warning in plan.warnings)
    assert told_rows.published() == told_rows.expected()


@pytest.mark.long
def test_t4_a_fact_before_its_optional_dimension_and_the_same_hint_three_times(told_rows):
    arrive_before_the_partner(told_rows, counts=(3, 3), partner=[hint("ADD_ROWS", "PRODUCTS", PRODUCT="P9")])


def arrive_before_the_partner(shop: Shown, *, counts: tuple[int, int], partner: list[dict]) -> None:
    sell(shop, 13, "P9", 30, "x", T2)
    for _ in range(3):
        shop.refresh(hints=whole_day(T2))
        assert shop.published() == shop.expected()
        assert of_day(shop, T2) == counts[0]
    stock(shop, "P9", "black", 1.0)
    refreshes(shop, hints=partner)
    assert of_day(shop, T2) == counts[1]


def of_day(shop: Shown, day: str) -> int:
    return sum(count for row, count in shop.published().items() if day in str(row[1]))


def test_a_hint_at_a_joined_table_reaches_the_rows_that_refer_to_it(told_rows):
    told_rows.sql("UPDATE {s}.PRODUCTS SET COLOR = 'gold' WHERE PRODUCT = 'P2'")
    refreshes(told_rows, hints=[hint("UPDATE_ROWS", "PRODUCTS", PRODUCT="P2")])


def test_a_hint_that_fits_no_table_or_column_is_refused_before_anything_is_touched(told_rows):
    before = told_rows.confirmed
    for wrong, sentence in (
        (hint("ADD_ROWS", "ELSEWHERE", ID=1), "does not read"),
        (hint("ADD_ROWS", IDD=1), "did you mean ID"),
        (hint("ADD_ROWS", QUANTITY="many"), "QUANTITY"),
    ):
        with pytest.raises(HintError, match=sentence):
            told_rows.refresh(hints=[wrong])
    assert told_rows.confirmed == before


# Rows with a mandatory partner


def test_t4_a_fact_before_its_mandatory_dimension_and_the_same_hint_three_times(make):
    sales = [(11, "P1", 10, "x", T2), (12, "P2", 20, "x", T2)]
    shop = make(INNER, *sales, products=[P1, P2], changes={"detector": "hint"})
    arrive_before_the_partner(shop, counts=(2, 3), partner=[])


SEVERAL = [(1, "P1", 10), (2, "P2", 20), (3, "P3", 30), (4, "P1", 1, "x", "2024-02-01"), (9, "P1", 1)]


def change_all_tables(shop: Shown) -> None:
    """Rows move to other partners, go and come on both sides, and partners get other keys."""
    shop.sql("UPDATE {s}.SALES SET PRODUCT = 'P3' WHERE ID = 2")
    shop.sql("DELETE FROM {s}.SALES WHERE ID = 1")
    sell(shop, 5, "P4", 3)
    stock(shop, "P4", "white", 2.5)
    shop.sql("UPDATE {s}.PRODUCTS SET PRODUCT = 'P3' WHERE PRODUCT = 'P2'")
    refreshes(shop)
    shop.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT = 'P3'")
    refreshes(shop)
    assert shop.refresh().decision == "none"


@pytest.mark.long
def test_changes_of_all_kinds_on_all_tables_by_snapshots_and_what_a_mandatory_partner_hides_is_told(make):
    shop = make(INNER, *SEVERAL, products=[P1, P2])
    change_all_tables(shop)
    assert any("2 rows of" in warning and "no longer has" in warning for warning in shop.change_set.warnings)


def test_changes_of_all_kinds_on_all_tables_by_feeds(make):
    feed = {"detector": "feed"}
    shop = make(BY_COLOR, *SEVERAL, products=[P1, P2], changes={**feed, "tables": {"{s}.PRODUCTS": feed}})
    change_all_tables(shop)


# Rows with an optional partner, by the feed of the first table; the partners' keys must be unique


@pytest.fixture(scope="module")
def rows(make: Make) -> Shown:
    sales = [(1, "P1", 10), (2, "P2", 20), (3, "P3", 30), (4, "A", 1), (5, "B", 2)]
    partners = [P1, P2, ("A", "blue", 1.0), ("B", "red", 1.0)]
    changes = {"detector": "feed", "tables": {"{s}.PRODUCTS": {"duplicates": "fail"}}}
    return make(DETAIL, *sales, products=partners, changes=changes)


@pytest.mark.long
def test_t3_in_the_detail_one_row_is_read_again(rows):
    stock(rows, *P3)
    refreshes(rows)
    assert rows_read(rows) == [1]
    assert (rows.change_set.keys, rows.change_set.rows) == (1, 1)


def test_t5_a_fact_moves_to_another_partner_while_both_partners_go(rows):
    rows.sql("UPDATE {s}.SALES SET PRODUCT = 'B' WHERE ID = 4")
    rows.sql("DELETE FROM {s}.PRODUCTS WHERE PRODUCT IN ('A', 'B')")
    refreshes(rows)
    assert [row[4] for row in rows.published() if row[2] == "str B"] == ["str N/A", "str N/A"]


def test_a_column_of_a_partner_that_the_query_does_not_use_is_nothing_to_do(rows):
    rows.sql("UPDATE {s}.PRODUCTS SET REMARK = 'new'")
    assert rows.refresh().decision == "none"


def test_duplicate_partners_may_be_set_to_fail_before_anything_is_touched(rows):
    before, published = rows.confirmed, rows.published()
    stock(rows, "P1", "violet", 1.0)
    for mode in ("changes", "full"):
        with pytest.raises(GuardError, match=r"PRODUCTS has keys \(PRODUCT\) more than once: P1 \(2 rows\)"):
            rows.refresh(mode)
    assert (rows.confirmed, rows.published()) == (before, published)
    rows.sql("DELETE FROM {s}.PRODUCTS WHERE COLOR = 'violet'")


def test_a_look_at_the_columns_comes_before_anything_is_purged(rows):
    rows.sql("ALTER TABLE {s}.PRODUCTS ADD COLUMN SIZE NUMBER(3,0)")
    rows.sql("UPDATE {s}.PRODUCTS SET COLOR = 'pink' WHERE PRODUCT = 'P1'")
    refreshes(rows)
    rows.sql("ALTER TABLE {s}.SALES DROP COLUMN QUANTITY")
    before = rows.confirmed
    with pytest.raises(SpecError, match="QUANTITY"):
        rows.refresh()
    assert rows.confirmed == before
    rows.sql("ALTER TABLE {s}.SALES ADD COLUMN QUANTITY VARCHAR")
    assert rows.refresh().reason is Reason.SCHEMA_CHANGED
    assert rows.published() == rows.expected()


# By themselves


def test_one_changed_partner_of_many_rows_reads_its_own_rows_only(make):
    row = "SEQ4(), DATEADD('day', MOD(SEQ4(), 365), '2024-01-01'::DATE), 'P' || MOD(SEQ4(), 1000), 1, 'x'"
    shop = make(
        DETAIL,
        filled=f"INSERT INTO {{s}}.SALES SELECT {row} FROM TABLE(GENERATOR(ROWCOUNT => {MANY}));"
        "INSERT INTO {s}.PRODUCTS SELECT 'P' || SEQ4(), 'blue', 1, NULL FROM TABLE(GENERATOR(ROWCOUNT => 1000))",
    )
    assert shop.confirmed.rows == MANY
    shop.sql("UPDATE {s}.PRODUCTS SET COLOR = 'red' WHERE PRODUCT = 'P7'")
    assert shop.refresh().decision == "incremental"
    own = MANY // 1_000
    assert rows_read(shop) == [own]
    assert (shop.change_set.keys, shop.change_set.rows) == (own, own)
    assert shop.confirmed.rows == MANY


# Queries that are not taken apart

RANKED = """
    WITH known AS (SELECT s.*, p.UNIT_PRICE FROM {s}.SALES s JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT)
    SELECT ID, DAY, QUANTITY, RANK() OVER (PARTITION BY PRODUCT ORDER BY QUANTITY) AS PLACE,
        SUM(QUANTITY * UNIT_PRICE) OVER (PARTITION BY PRODUCT) AS AMOUNT FROM known
"""
FIRSTS = (
    "SELECT ID, DAY, PRODUCT, QUANTITY FROM {s}.SALES QUALIFY ROW_NUMBER() OVER (PARTITION BY PRODUCT ORDER BY DAY) = 1"
)
MONTHLY = {"column": "DAY", "by": "month", "start": "2024-01"}


def test_a_query_that_is_not_taken_apart_is_compared_in_the_warehouse_and_only_its_changed_keys_are_read(make):
    many = (
        "INSERT INTO {s}.SALES SELECT SEQ4(), '2024-01-01'::DATE, 'P' || (SEQ4() % 100), 1, 'x' FROM TABLE(GENERATOR(ROWCOUNT => 1000));"
        "INSERT INTO {s}.PRODUCTS SELECT 'P' || SEQ4(), 'blue', 0.1, NULL FROM TABLE(GENERATOR(ROWCOUNT => 100))"
    )
    shop = make(RANKED, filled=many, slices=MONTHLY, verify={"each": "slices"}, changes={"detector": "feed"})
    assert shop.refresh().decision == "none"
    shop.sql("UPDATE {s}.SALES SET QUANTITY = 7 WHERE ID = 107")
    shop.sql("UPDATE {s}.PRODUCTS SET UNIT_PRICE = 0.3 WHERE PRODUCT = 'P9'")
    plan = shop.refresh()
    assert (plan.decision, plan.keys, plan.purged, plan.appended) == ("incremental", 20, 20, 20)
    assert rows_read(shop) == [20]
    assert shop.published() == shop.expected()
    (fallback,) = plan.notes
    assert fallback.startswith(
        "changes asks for the detector feed, which is not used: `diff` compares the query as a whole"
    )
    assert (fallback,) == plan.warnings == shop.change_set.warnings
    # A look at DDL that changed no row, and one that did.
    shop.sql("ALTER TABLE {s}.SALES ADD COLUMN MORE VARCHAR")
    shop.sql("DELETE FROM {s}.SALES WHERE ID = 5")
    refreshes(shop)
    shop.sql("ALTER TABLE {s}.SALES RENAME COLUMN QUANTITY TO Q")
    shop.sql("ALTER TABLE {s}.SALES ADD COLUMN QUANTITY NUMBER(38,0)")
    assert shop.refresh().reason is Reason.SCHEMA_CHANGED
    assert shop.published() == shop.expected()


def test_an_extract_that_an_earlier_release_loaded_without_a_key_is_refreshed_by_key(make):
    shop = make(RANKED, (1, "P1", 10), (2, "P2", 20), (3, "P2", 30), products=[P1, P2], slices=MONTHLY)
    path = shop.refresher.versions.latest().folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert (manifest["shape"]["key"], manifest["shape"]["loose"]) == (["ID"], ["AMOUNT"])
    firm = replace(shape_of(shop.refresher.versions.latest()), loose=frozenset())
    sums = sums_to_json(content_sums(shop.refresher.versions.latest().extract, firm))
    earlier = {"shape": {**manifest["shape"], "key": [], "loose": []}, "content_sums": sums}
    path.write_text(json.dumps({**manifest, **earlier}))
    sell(shop, 4, "P1", 1)
    refreshes(shop)
    version = shop.refresher.versions.latest()
    assert version.manifest["content_sums"] == sums_to_json(content_sums(version.extract, shape_of(version)))


def test_where_rows_tie_every_row_is_read_and_verification_does_not_hold_one_reading_against_another(make):
    shop = make(FIRSTS, (1, "P1", 10), (2, "P2", 20, "x", "2024-02-02"), slices=MONTHLY, verify={"each": "slices"})
    sell(shop, 3, "P2", 30, "x", "2024-03-03")
    sell(shop, 4, "P4", 1)
    plan = shop.refresh()
    assert (plan.decision, plan.keys, plan.warnings) == ("incremental", 1, ())
    assert rows_read(shop) == [1]
    assert shop.published() == shop.expected()
    sell(shop, 5, "P4", 2)
    sell(shop, 6, "P6", 6)
    plan = shop.refresh()
    assert plan.decision == "incremental"
    (warning,) = plan.warnings
    assert warning.startswith("Rows tie in ROW_NUMBER() OVER (PARTITION BY PRODUCT ORDER BY DAY)")
    assert rows_read(shop) == [4]
    products = Counter(row[2] for row in shop.published().elements())
    assert products == Counter({"str P1": 1, "str P2": 1, "str P4": 1, "str P6": 1})
    finding = ExtractVerification(shop.refresher.context, shop.confirmed).equals_source()
    assert (finding.passed, "rows tie in ROW_NUMBER()" in finding.sentence) == (True, True)


def test_a_query_that_is_not_repeatable_is_loaded_in_full_when_its_tables_change(make):
    shop = make("SELECT ID, DAY FROM {s}.SALES LIMIT 5", (1, "P1", 10), (2, "P2", 20))
    assert shop.refresh().decision == "none"
    sell(shop, 3, "P1", 1)
    plan = shop.refresh()
    assert plan.reason is Reason.NONDETERMINISTIC_VIEW
    assert plan.warnings == ("LIMIT, TOP or OFFSET without ORDER BY takes any rows.",)
    assert shop.published() == shop.expected()


def test_a_rolling_window_is_loaded_in_full_though_no_table_changed(make):
    shop = make(
        "SELECT ID, DAY FROM {s}.SALES WHERE DAY >= CURRENT_DATE - 90",
        filled="INSERT INTO {s}.SALES SELECT 1, CURRENT_DATE, 'P1', 1, 'x'",
    )
    plan = shop.refresh()
    assert plan.reason is Reason.NONDETERMINISTIC_VIEW
    assert plan.warnings == ("CURRENT_DATE is another value at each refresh.",)


def test_without_a_row_key_and_slices_such_a_query_is_loaded_in_full_and_the_plan_says_what_is_missing(make):
    shop = make("SELECT ID, DAY, RANK() OVER (ORDER BY ID) AS PLACE FROM {s}.SALES", (1, "P1", 10), row_key=[])
    sell(shop, 3, "P1", 1)
    plan = shop.refresh()
    assert plan.reason is Reason.NONDETERMINISTIC_VIEW
    (warning,) = plan.warnings
    assert warning.endswith("It has neither a row_key nor slices by which rows could be replaced.")
    assert shop.published() == shop.expected()


def test_a_row_key_that_such_a_query_does_not_show_is_refused(make):
    with pytest.raises(SpecError, match="row_key names SELLER, which the query does not have"):
        make("SELECT ID, RANK() OVER (ORDER BY ID) AS PLACE FROM {s}.SALES", row_key="SELLER")
    with pytest.raises(SpecError, match="two output columns are called ID"):
        make("WITH a AS (SELECT ID FROM {s}.SALES) SELECT * FROM a JOIN a AS b ON a.ID = b.ID")


def test_groups_by_a_float_are_compared_as_a_whole(make):
    query = "SELECT p.UNIT_PRICE, MIN(s.DAY) AS DAY, COUNT(*) AS N FROM {s}.SALES s JOIN {s}.PRODUCTS p ON s.PRODUCT = p.PRODUCT GROUP BY 1"
    shop = make(query, (1, "P1", 10), (2, "P2", 20, "x", "2024-02-02"), products=[P1, P2], row_key=[], slices=MONTHLY)
    sell(shop, 3, "P1", 1)
    refreshes(shop)
    assert rows_read(shop) == [1]


def test_of_an_aggregate_the_rows_of_the_extract_are_counted_not_those_behind_them(make):
    many = (
        "INSERT INTO {s}.SALES SELECT SEQ4(), '2024-01-01'::DATE, 'P1', 1, 'x' FROM TABLE(GENERATOR(ROWCOUNT => 100));"
    )
    hidden = "INSERT INTO {s}.SALES SELECT 200, '2024-01-02'::DATE, 'P2', 0, 'x'"
    query = "SELECT DAY, SUM(QUANTITY) AS Q FROM {s}.SALES GROUP BY DAY HAVING SUM(QUANTITY) > 0"
    shop = make(query, filled=many + hidden, row_key=[], slices={"column": "DAY", "by": "day", "start": "2024-01-01"})
    shop.sql("UPDATE {s}.SALES SET QUANTITY = 5 WHERE ID IN (1, 2)")
    shop.sql("UPDATE {s}.SALES SET SELLER = 'y' WHERE ID = 200")
    plan = shop.refresh()
    assert (plan.decision, plan.purged, plan.appended) == ("incremental", 1, 1)
    assert (shop.change_set.purged, shop.change_set.appended) == ({"2024-01-01": 1}, {"2024-01-01": 1})
    assert shop.change_set.sentence.endswith("1 rows removed, 1 added.")
    version = shop.refresher.versions.latest()
    assert (version.manifest["rows_purged"], version.manifest["rows_appended"]) == (1, 1)
    assert slice_metadata(version, shop.change_set, "2024-01-01")["dagster/partition_row_count"] == 1
    shop.sql("UPDATE {s}.SALES SET QUANTITY = 1 WHERE ID = 200")
    shop.refresh()
    version = shop.refresher.versions.latest()
    assert (version.manifest["rows_purged"], version.manifest["rows_appended"]) == (0, 1), "it was hidden until now"
