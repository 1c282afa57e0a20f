"""Keys in the driver are the keys Spark and Snowflake have: the same equality, the same checksums."""

# ruff: noqa: DTZ001 - Spark gives times without a zone

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from tir_dagster.changes import sets
from tir_dagster.changes.smallsets import SmallSets, key_number
from tir_dagster.source.columns import Column
from tir_dagster.source.keychecks import check_sql
from tir_dagster.source.slices import SliceBy

TYPES = {
    "NUMBER(38,0)": [0, -5, 10**17],
    "NUMBER(12,2)": [Decimal("0.10"), Decimal("-7.00")],
    "VARCHAR": ["", "a|b", "~", "żółć"],
    "DATE": [date(1, 1, 1), date(2026, 3, 29)],
    "BOOLEAN": [True, False],
    "TIMESTAMP_NTZ": [datetime(1969, 12, 31, 23, 59, 59, 5), datetime(2026, 3, 29, 2, 30)],
    "TIMESTAMP_TZ": [datetime(2026, 1, 1, 12, 0, 0, 7, tzinfo=UTC)],
    "TIME": ["23:59:59.999999"],
}


@pytest.mark.parametrize("declared", TYPES)
def test_a_key_comes_back_as_it_went_in(declared):
    small = SmallSets([Column.from_snowflake("K", declared)])
    rows = [(value, "2026-01", 1) for value in [*TYPES[declared], None]]
    small.put("given", rows)
    assert sorted(small.keys("given"), key=repr) == sorted(((row[0],) for row in rows), key=repr)


def test_keys_are_matched_null_safely_and_as_bags():
    columns = [Column.from_snowflake("A", "NUMBER(38,0)"), Column.from_snowflake("B", "VARCHAR")]
    small = SmallSets(columns)
    small.put("one", [(1, None, "s", 5), (1, None, "s", 5), (None, "x", None, 6)])
    small.put("other", [(1, None, "s", 5), (None, "x", None, 6)])
    small.define("differing", sets.differing_keys("one", "other", 2))
    assert small.keys("differing") == [(1, None)]
    small.define("theirs", sets.having_keys("one", "differing", 2))
    assert small.count("theirs") == 2


def test_a_separator_in_a_text_makes_no_two_keys_alike():
    columns = [Column.from_snowflake(name, "VARCHAR") for name in "AB"]
    numbers = {key_number(key, columns) for key in (["a|b", ""], ["a", "b|"], ["a", "b"], [None, "~"], ["~", None])}
    assert len(numbers) == 5


@pytest.mark.parametrize("declared", TYPES)
def test_checksums_are_the_warehouses(sandbox, declared):
    column = Column.from_snowflake("K", declared)
    table = f"CHECKS.PUBLIC.C{abs(hash(declared)) % 10**8}"
    values = [value for value in TYPES[declared] if not (isinstance(value, datetime) and value.year < 1970)]
    small = SmallSets([column])
    with sandbox.snowflake() as connection:
        cursor = connection.cursor()
        cursor.execute("CREATE DATABASE IF NOT EXISTS CHECKS")
        cursor.execute(f"CREATE OR REPLACE TABLE {table} (K {declared})")
        for value in [*values, None]:
            cursor.execute(f"INSERT INTO {table} SELECT %s", (value,))
        (row,) = cursor.execute(check_sql(table, key=[column], slices=SliceBy(), columns=[column])).fetchall()
        stored = [found for (found,) in cursor.execute(f"SELECT K FROM {table}").fetchall()]
    # The connector gives what Spark would, except for times of day and moments with their zone.
    small.put("given", [(str(found) if declared == "TIME" and found else found, "all", 1) for found in stored])
    assert small.stats("given") == {"all": (int(row[1]), int(row[2]))}
