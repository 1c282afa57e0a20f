"""Wrong rows are found by narrowing slices to buckets to rows, and only rows of differing buckets travel."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.hyper.differences import RowDifference, find_row_differences, shown_key
from tir_dagster.hyper.hyperfile import create_extract
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import columns_of, run, stage

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "DAY": "DATE", "NAME": "VARCHAR", "AMOUNT": "NUMBER(12,2)"})
KEYED = ExtractShape(COLUMNS, ("ID",), SliceBy("DAY", "month"))
TABLE = '"DIFFERENCES"."D"."T"'
COUNT = 6000
FIRST = date(2024, 1, 1)


@pytest.fixture(scope="module")
def query(sandbox):
    """Ask the warehouse, which holds 6,000 rows over three months, two rows without a key and one key twice."""
    connection = sandbox.snowflake()
    cursor = connection.cursor()
    for statement in (
        "CREATE DATABASE IF NOT EXISTS DIFFERENCES",
        "CREATE SCHEMA IF NOT EXISTS DIFFERENCES.D",
        f"CREATE OR REPLACE TABLE {TABLE} (ID NUMBER(38,0), DAY DATE, NAME VARCHAR, AMOUNT NUMBER(12,2))",
    ):
        cursor.execute(statement)
    for begin in range(0, len(rows()), 2000):
        values = ", ".join(_sql(row) for row in rows()[begin : begin + 2000])
        cursor.execute(f"INSERT INTO {TABLE} SELECT * FROM VALUES {values}")

    def ask(sql: str) -> list[tuple[Any, ...]]:
        ask.travelled += len(answer := cursor.execute(sql).fetchall())
        return answer

    ask.travelled = 0
    yield ask
    connection.close()


def _sql(row: tuple[Any, ...]) -> str:
    number, day, name, amount = row
    shown_day = f"'{day}'::DATE" if day else "NULL::DATE"
    return f"({'NULL' if number is None else number}, {shown_day}, '{name}', {amount})"


def rows() -> list[tuple[Any, ...]]:
    plain = [(at, FIRST + timedelta(days=at % 90), f"name {at}", f"{at}.25") for at in range(COUNT)]
    return [*plain, (None, None, "nobody", "1.00"), (None, None, "nobody", "1.00"), (7, FIRST, "again", "7.00")]


@pytest.fixture
def extract(tmp_path: Path) -> Path:
    staged = [(number, day, name, Decimal(amount)) for number, day, name, amount in rows()]
    create_extract(tmp_path / "e.hyper", COLUMNS, stage(tmp_path / "rows.parquet", COLUMNS, staged))
    return tmp_path / "e.hyper"


def find(extract: Path, query: Any, shape: ExtractShape = KEYED) -> list[RowDifference]:
    slices = ["all"] if shape.slices.by == "none" else [None, "2024-01", "2024-02", "2024-03"]
    differences = find_row_differences(extract, slices, shape=shape, table_sql=TABLE, query=query)
    assert differences.complete
    return list(differences.found)


def change(extract: Path, *statements: str) -> None:
    run(extract, *(statement.format(t='"Extract"."Extract"') for statement in statements))


def test_equal_sides_have_no_differences(extract: Path, query: Any):
    assert find(extract, query) == []


def test_missing_extra_and_stale_rows_are_told_apart_with_their_columns(extract: Path, query: Any):
    change(
        extract,
        'DELETE FROM {t} WHERE "ID" = 11',
        'UPDATE {t} SET "NAME" = \'other\', "AMOUNT" = 1 WHERE "ID" = 12',
        "INSERT INTO {t} VALUES (99999, DATE '2024-02-02', 'nobody knows', 3)",
    )
    found = {difference.key: difference for difference in find(extract, query)}
    assert {key: difference.kind for key, difference in found.items()} == {
        (11,): "missing",
        (12,): "stale",
        (99999,): "extra",
    }
    assert found[(12,)].columns == ("NAME", "AMOUNT")
    assert found[(12,)].extract[0].values[2] == "other"
    assert found[(12,)].source[0].values[2] == "name 12"
    assert found[(99999,)].slice == "2024-02"
    assert shown_key(KEYED.key, found[(11,)].key) == "ID = 11"


def test_only_rows_of_differing_buckets_travel(extract: Path, query: Any):
    change(extract, 'UPDATE {t} SET "NAME" = \'other\' WHERE "ID" = 12')
    before = query.travelled
    assert [difference.key for difference in find(extract, query)] == [(12,)]
    # 4 slices of about 12 buckets each, then the rows of two of these.
    assert query.travelled - before < COUNT / 6


def test_a_row_that_moved_between_slices_is_stale(extract: Path, query: Any):
    change(extract, 'UPDATE {t} SET "DAY" = DATE \'2024-03-20\' WHERE "ID" = 31')
    (moved,) = find(extract, query)
    assert (moved.kind, moved.key, moved.columns) == ("stale", (31,), ("DAY",))


def test_keys_that_are_null_or_repeated_are_compared_as_bags(extract: Path, query: Any):
    change(extract, "DELETE FROM {t} WHERE \"NAME\" = 'again'")
    with_null = 'INSERT INTO {t} SELECT * FROM {t} WHERE "ID" IS NULL LIMIT 1'
    change(extract, with_null)
    found = {difference.key: difference for difference in find(extract, query)}
    # One of two rows of key 7 is missing, and one row too many has no key.
    assert {key: (len(d.extract), len(d.source)) for key, d in found.items()} == {(7,): (0, 1), (None,): (1, 0)}


def test_without_a_row_key_each_row_stands_for_itself(extract: Path, query: Any):
    shape = ExtractShape(COLUMNS, (), SliceBy())
    change(extract, 'UPDATE {t} SET "NAME" = \'other\' WHERE "ID" = 12')
    assert sorted(difference.kind for difference in find(extract, query, shape)) == ["extra", "missing"]


def test_where_everything_differs_some_rows_are_named_and_said_to_be_some(extract: Path, query: Any, monkeypatch: Any):
    monkeypatch.setattr("tir_dagster.hyper.differences._MOST_READ", 3)
    change(extract, "UPDATE {t} SET \"NAME\" = 'other'")
    differences = find_row_differences(extract, ["2024-01", "2024-02"], shape=KEYED, table_sql=TABLE, query=query)
    assert not differences.complete
    assert differences.found
