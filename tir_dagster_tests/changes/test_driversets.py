"""Keys in the driver are the keys Spark and Snowflake have: the same equality, the same checksums."""

# ruff: noqa: DTZ001 - tables hold times without a zone

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tir_dagster.changes import sets
from tir_dagster.changes.driversets import DriverSets
from tir_dagster.changes.ledger import Ledger
from tir_dagster.source.columns import Column
from tir_dagster.source.keychecks import check_sql
from tir_dagster.source.slices import SliceBy

TYPES = {
    "NUMBER(38,0)": [0, -5, 10**17],
    "NUMBER(12,2)": [Decimal("0.10"), Decimal("-7.00")],
    "VARCHAR": ["", "a|b", "~", "żółć"],
    "DATE": [date(1, 1, 1), date(2026, 3, 29), date(9999, 12, 31)],
    "BOOLEAN": [True, False],
    "TIMESTAMP_NTZ": [datetime(1969, 12, 31, 23, 59, 59, 5), datetime(2026, 3, 29, 2, 30)],
    "TIMESTAMP_TZ": [datetime(2026, 1, 1, 12, 0, 0, 7, tzinfo=UTC)],
    "TIME": ["23:59:59.999999"],
}


@pytest.fixture
def driver(tmp_path):
    opened = []

    def make(*declared: str) -> DriverSets:
        key = [Column.from_snowflake(f"C{at}", text) for at, text in enumerate(declared)]
        opened.append(DriverSets(key, tmp_path))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def put(driver: DriverSets, name: str, rows: list[tuple]) -> None:
    schema = driver.schema("slice", "hash")
    columns = list(zip(*rows, strict=True))
    driver.put(name, pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema))


@pytest.mark.parametrize("declared", TYPES)
def test_a_key_comes_back_as_it_went_in(driver, declared):
    sets_ = driver(declared)
    rows = [(value, "2026-01", 1) for value in [*TYPES[declared], None]]
    put(sets_, "given", rows)
    assert sorted(sets_.keys("given"), key=repr) == sorted(((row[0],) for row in rows), key=repr)
    assert sets_.table("given").schema == sets_.schema("slice", "hash")


def test_keys_are_matched_null_safely_and_as_bags(driver):
    sets_ = driver("NUMBER(38,0)", "VARCHAR")
    put(sets_, "one", [(1, None, "s", 5), (1, None, "s", 5), (None, "x", None, 6)])
    put(sets_, "other", [(1, None, "s", 5), (None, "x", None, 6)])
    sets_.define("differing", sets.differing_keys("one", "other", 2))
    assert sets_.keys("differing") == [(1, None)]
    sets_.define("theirs", sets.having_keys("one", "differing", 2))
    assert sets_.count("theirs") == 2


def test_a_separator_in_a_text_makes_no_two_keys_alike(driver):
    sets_ = driver("VARCHAR", "VARCHAR")
    keys = [("a|b", ""), ("a", "b|"), ("a", "b"), (None, "~"), ("~", None)]
    put(sets_, "given", [(*key, str(at), 1) for at, key in enumerate(keys)])
    assert len({checksum for _, checksum in sets_.stats("given").values()}) == 5


@pytest.mark.parametrize("declared", TYPES)
def test_checksums_are_the_warehouses(sandbox, driver, declared):
    column = Column.from_snowflake("K", declared)
    table = f"CHECKS.PUBLIC.C{abs(hash(declared)) % 10**8}"
    values = [value for value in TYPES[declared] if not (isinstance(value, datetime) and value.year < 1970)]
    with sandbox.snowflake() as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE DATABASE IF NOT EXISTS CHECKS")
        cursor.execute(f"CREATE OR REPLACE TABLE {table} (K {declared})")
        for value in [*values, None]:
            cursor.execute(f"INSERT INTO {table} SELECT %s", (value,))
        (row,) = cursor.execute(check_sql(table, key=[column], slices=SliceBy(), columns=[column])).fetchall()
    sets_ = driver(declared)
    put(sets_, "given", [(value, "all", 1) for value in [*values, None]])
    assert sets_.stats("given") == {"all": (int(row[1]), int(row[2]))}


def test_a_ledger_is_written_by_slice_and_read_back_with_its_types(driver, tmp_path):
    sets_ = driver("TIMESTAMP_TZ", "NUMBER(12,2)")
    moment, amount = TYPES["TIMESTAMP_TZ"][0], Decimal("0.10")
    put(sets_, "given", [(moment, amount, "2026-01", 1), (moment, None, None, 2), (None, amount, "2026-01", None)])
    sets_.write_ledger("SELECT * FROM given", tmp_path / "ledger")
    ledger = Ledger(tmp_path / "ledger", ())
    assert sorted(file.parent.name for file in ledger.files) == ["p=2026-01", "p=none"]
    assert ledger.rows == 3
    assert pq.read_schema(ledger.files[0]).field("k0").type == pa.timestamp("us", tz="UTC")
    sets_.scan("again", ledger.files, "k0, k1, slice, hash")
    assert sorted(sets_.rows("SELECT slice, hash FROM again"), key=repr) == sorted(
        [("2026-01", 1), (None, 2), ("2026-01", None)], key=repr
    )


def test_no_files_are_an_empty_relation(driver):
    sets_ = driver("NUMBER(38,0)")
    sets_.scan("ledger", [], "k0, slice, hash")
    assert sets_.stats("ledger") == {}
    assert sets_.table("ledger").num_rows == 0
