"""Snowpark on the embedded warehouse: local data frames, tables written from them, merge."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal

import pandas as pd
import pytest
from snowflake.connector.errors import ProgrammingError
from snowflake.snowpark import Session
from snowflake.snowpark import types as T  # noqa: N812 - the name its own documentation uses
from snowflake.snowpark.exceptions import SnowparkSQLException
from snowflake.snowpark.functions import col, lit, when_matched, when_not_matched
from snowflake.snowpark.functions import sum as sum_


@pytest.fixture(scope="module")
def session(connect):
    with Session.builder.configs({"connection": connect().connection}).create() as opened:
        yield opened


def rows(frame) -> list[tuple]:
    return sorted(tuple(row) for row in frame.collect())


def test_a_local_data_frame(session):
    frame = session.create_dataframe([[1, "a"], [2, None]], schema=["id", "name"])
    assert rows(frame) == [(1, "a"), (2, None)]
    assert [field.name for field in frame.schema] == ["ID", "NAME"]
    assert rows(frame.filter(col("id") > 1).select("id")) == [(2,)]
    assert rows(session.create_dataframe([], schema=frame.schema)) == []


def test_a_value_of_every_type(session):
    kinds = {
        "L": (T.LongType(), 1),
        "F": (T.DoubleType(), 1.5),
        "N": (T.DecimalType(12, 2), Decimal("1.25")),
        "B": (T.BooleanType(), True),
        "S": (T.StringType(), "it's \\ a $1"),
        "X": (T.BinaryType(), b"\x00ab"),
        "D": (T.DateType(), date(2026, 1, 2)),
        "M": (T.TimestampType(), datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001 - a moment without a zone
        "T": (T.TimeType(), time(1, 2, 3)),
    }
    schema = T.StructType([T.StructField(name, kind) for name, (kind, _) in kinds.items()])
    values = [value for _, value in kinds.values()]
    session.create_dataframe([values, [None] * len(values)], schema).write.save_as_table("EVERY_TYPE")
    stored = session.table("EVERY_TYPE").sort(col("L").desc()).collect()
    assert [list(row) for row in stored] == [values, [None] * len(values)]


def test_many_local_rows_come_through_a_temporary_table(session):
    frame = session.create_dataframe([[number, str(number)] for number in range(1200)], schema=["id", "s"])
    assert rows(frame.filter(col("id") >= 1198)) == [(1198, "1198"), (1199, "1199")]


def test_a_data_frame_of_pandas(session):
    moment = datetime(2026, 1, 2, 3, 4)  # noqa: DTZ001 - as above
    local = pd.DataFrame({"ID": [1, 2], "X": [0.5, None], "M": [moment, None]})
    assert rows(session.create_dataframe(local).filter(col("ID") == 1)) == [(1, 0.5, moment)]
    session.write_pandas(local[["ID"]], "FROM_PANDAS", auto_create_table=True, table_type="temporary")
    session.write_pandas(local[["ID"]], "FROM_PANDAS")
    assert session.table("FROM_PANDAS").count() == 4
    assert list(session.table("FROM_PANDAS").to_pandas()["ID"]) == [1, 2, 1, 2]


def test_a_table_is_created_appended_to_overwritten_and_emptied(session):
    def write(mode: str, *values: tuple, **options) -> list[tuple]:
        session.create_dataframe(list(values), schema=["id", "name"]).write.mode(mode).save_as_table("SAVED", **options)
        return rows(session.table("SAVED"))

    assert write("errorifexists", (1, "a")) == [(1, "a")]
    with pytest.raises(SnowparkSQLException, match="already exists"):
        write("errorifexists", (2, "b"))
    assert write("append", (2, "b")) == [(1, "a"), (2, "b")]
    assert write("ignore", (3, "c")) == [(1, "a"), (2, "b")]
    assert write("truncate", (4, "d")) == [(4, "d")]
    assert write("overwrite", (5, "e"), (6, "f")) == [(5, "e"), (6, "f")]
    session.table("SAVED").filter(col("id") == 5).write.mode("overwrite").save_as_table("SAVED")
    assert rows(session.table("SAVED")) == [(5, "e")]
    turned = session.create_dataframe([("g", 7)], schema=["name", "id"])
    turned.write.mode("append").save_as_table("SAVED", column_order="name")
    assert rows(session.table("SAVED")) == [(5, "e"), (7, "g")]


def test_a_temporary_table_is_appended_to(session):
    for name in ("a", "b"):
        frame = session.create_dataframe([(1, name)], schema=["id", "name"])
        frame.write.mode("append").save_as_table("SAVED_FOR_NOW", table_type="temporary")
    assert rows(session.table("SAVED_FOR_NOW")) == [(1, "a"), (1, "b")]


def test_merge_update_and_delete(session):
    session.create_dataframe([(1, "a"), (2, "b")], schema=["id", "name"]).write.save_as_table("MERGED_INTO")
    table = session.table("MERGED_INTO")
    source = session.create_dataframe([(1, "A"), (3, "C")], schema=["id", "name"])
    clauses = [
        when_matched().update({"name": source["name"]}),
        when_not_matched().insert({"id": source["id"], "name": source["name"]}),
    ]
    assert tuple(table.merge(source, table["id"] == source["id"], clauses)) == (1, 1, 0)
    assert rows(table) == [(1, "A"), (2, "b"), (3, "C")]
    assert table.update({"name": lit("z")}, table["id"] == 2).rows_updated == 1
    assert table.delete(table["id"] == source["id"], source).rows_deleted == 2
    assert rows(table) == [(2, "z")]


def test_frames_are_joined_grouped_kept_and_shown_as_views(session):
    names = session.create_dataframe([(1, "a"), (2, "b")], schema=["id", "name"])
    amounts = session.create_dataframe([(1, 10), (1, 20), (2, 5)], schema=["id", "x"])
    summed = names.join(amounts, "id").group_by("name").agg(sum_("x").alias("x")).cache_result()
    assert rows(summed) == [("a", 30), ("b", 5)]
    summed.create_or_replace_temp_view("SUMMED")
    assert rows(session.table("SUMMED").filter(col("x") > 5)) == [("a", 30)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT $1, $2 AS B FROM VALUES (1, 'x'), (2, NULL)", [(1, "x"), (2, None)]),
        ("SELECT COLUMN2 FROM VALUES (1, 'x') AS T", [("x",)]),
        ("SELECT L.$2, R.$2 FROM VALUES (1, 'x') L JOIN (VALUES (1, 'y')) AS R ON L.$1 = R.$1", [("x", "y")]),
        ("SELECT $2, B FROM VALUES (1, 2) AS T (A, B)", [(2, 2)]),
        ('SELECT "$1" FROM (SELECT $1 FROM VALUES (1))', [(1,)]),
        ("SELECT * FROM (RANGE_OF_ONE)", [(0,)]),
    ],
)
def test_columns_by_position(sql, query, expected):
    sql("CREATE TABLE IF NOT EXISTS RANGE_OF_ONE AS SELECT 0 AS N")
    assert sql(query) == expected


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("SELECT $3 FROM VALUES (1, 2)", 904),
        ("SELECT $0 FROM VALUES (1, 2)", 904),
        ("SELECT T.$3 FROM VALUES (1, 2) AS T", 904),
        ("SELECT $1 FROM (SELECT 1 AS A)", 2),
        ("SELECT 'xy'::BINARY", 100115),
    ],
)
def test_a_wrong_position_or_binary_is_refused(sql, query, code):
    with pytest.raises(ProgrammingError) as caught:
        sql(query)
    assert caught.value.errno == code
