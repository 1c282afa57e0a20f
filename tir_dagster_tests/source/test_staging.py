from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.reader import read
from tir_dagster.source.slices import SliceBy
from tir_dagster.source.staging import HASH, SLICE, row_hash, stage, staged
from tir_dagster.source.versions import describe, select
from tir_dagster_tests.source.test_reader import EVERY_TYPE, EVERY_VALUE

PAIR = [Column("A", Kind.TEXT), Column("B", Kind.TEXT)]


def test_every_type_goes_through_parquet_into_hyper(spark, access, make_table, tmp_path):
    table = make_table(EVERY_TYPE, EVERY_VALUE, '("mixed Case") VALUES (NULL)')
    columns = describe(access, table)

    done = stage(
        read(spark, access, select(table, columns), columns),
        tmp_path / "staged",
        key=["I"],
        slices=SliceBy("TZ", "month", "America/New_York"),
        columns=columns,
    )

    assert (done.rows, done.slices) == (2, {"2024-03": 1, None: 1})
    assert done == staged(tmp_path / "staged")
    (file,) = done.files
    assert pq.read_schema(file).names == [*(column.name for column in columns), SLICE, HASH]
    rows = _through_hyper(file)
    assert [str(value) for value in rows[0][:9]] == [
        "9223372036854775807",
        "-2",
        "3.45",
        "1E-10",
        "8.5",
        "True",
        "h€llo 😀",
        "9999-12-31",
        "12:34:56.789012",
    ]
    assert [str(value)[:26] for value in rows[0][9:12]] == [
        "2024-03-10 02:30:00.123456",
        "2024-03-10 02:30:00.123456",
        "2024-03-09 21:30:00.500000",
    ]
    assert rows[1][: len(columns)] == [None] * len(columns)


def _through_hyper(file) -> list[list]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU) as hyper, Connection(hyper.endpoint) as connection:
        return connection.execute_list_query(f"SELECT * FROM external('{file}') ORDER BY 1 NULLS LAST")


def _hashes(spark, rows, columns) -> list[int]:
    schema = ", ".join(f"{column.name} {column.spark}" for column in columns)
    return [row[0] for row in spark.createDataFrame(rows, schema).coalesce(1).select(row_hash(columns)).collect()]


def test_where_a_null_stands_counts(spark):
    rows = [
        (None, "a"),
        ("a", None),
        ("a", "a"),
        (None, None),
        ("", None),
        (None, ""),
        ("", ""),
        ("aa", ""),
        ("", "aa"),
    ]

    assert len(set(_hashes(spark, rows, PAIR))) == len(rows)


def test_equal_values_have_equal_hashes(spark):
    columns = [Column("F", Kind.FLOAT), Column("D", Kind.DECIMAL, 12, 2)]
    one, other, nan, other_nan, null = _hashes(
        spark,
        [(0.0, Decimal("1.50")), (-0.0, Decimal("1.5")), (float("nan"), None), (-float("nan"), None), (None, None)],
        columns,
    )

    assert one == other
    assert nan == other_nan != null


def test_the_hash_is_the_same_in_every_run(spark):
    columns = [
        Column("I", Kind.INTEGER, 38),
        Column("T", Kind.TEXT),
        Column("D", Kind.DATE),
        Column("N", Kind.TIMESTAMP),
    ]

    got = _hashes(spark, [(1, "é", date(2024, 2, 29), datetime(2024, 2, 29, 1))], columns)  # noqa: DTZ001 - without a zone on purpose

    assert got == [RECORDED], "a new hash would make every ledger row look changed"


RECORDED = 5747038566284346656


def test_the_frame_is_evaluated_once(spark, tmp_path):
    seen = spark.sparkContext.accumulator(0)

    def count(value):
        seen.add(1)
        return value

    frame = spark.range(100).select(F.udf(count, "bigint")("id").cast("string").alias("A"), F.lit("b").alias("B"))
    stage(frame, tmp_path / "once", key=["A"], slices=SliceBy(), columns=PAIR)

    assert seen.value == 100


def test_an_earlier_staging_is_replaced_but_nothing_else_is(spark, tmp_path):
    folder = tmp_path / "staged"
    frame = spark.createDataFrame([("a", "b")], "A string, B string")
    for _ in range(2):
        assert stage(frame, folder, key=["A"], slices=SliceBy(), columns=PAIR).slices == {"all": 1}
    (folder / "notes.txt").write_text("mine")

    with pytest.raises(SourceError, match=r"notes\.txt.*folder of its own"):
        stage(frame, folder, key=["A"], slices=SliceBy(), columns=PAIR)


def test_no_rows_are_a_staging_too(spark, tmp_path):
    frame = spark.createDataFrame([], "A string, B string")

    assert stage(frame, tmp_path / "none", key=["A"], slices=SliceBy(), columns=PAIR).rows == 0


def test_an_unfinished_staging_is_no_staging(spark, tmp_path):
    def fail(_):
        raise ValueError("no")

    frame = spark.createDataFrame([("a", "b")], "A string, B string").withColumn("A", F.udf(fail)("A"))
    with pytest.raises(SourceError, match="Spark failed while staging half"):
        stage(frame, tmp_path / "half", key=["A"], slices=SliceBy(), columns=PAIR)

    with pytest.raises(SourceError, match="no finished staging"):
        staged(tmp_path / "half")


def test_a_key_outside_the_columns_is_named(spark, tmp_path):
    frame = spark.createDataFrame([("a", "b")], "A string, B string")

    with pytest.raises(SourceError, match="key column C is not a column"):
        stage(frame, tmp_path / "x", key=["C"], slices=SliceBy(), columns=PAIR)
    with pytest.raises(SourceError, match="Columns C are not among those read: A, B"):
        stage(frame, tmp_path / "x", key=["A"], slices=SliceBy(), columns=[*PAIR, Column("C", Kind.TEXT)])
