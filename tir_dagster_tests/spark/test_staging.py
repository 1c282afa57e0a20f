"""Staging: Spark's tasks download a result's parts and write them as Parquet that Hyper reads; each row once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.snowflake.versions import describe, pin, select
from tir_dagster.spark import staging
from tir_dagster.spark.failures import spark_failures
from tir_dagster.spark.staging import StagingTask, result_batches, stage, write_part

MANY = 200_000
EVERY_TYPE = (
    "I NUMBER(38,0), S NUMBER(9,0), D NUMBER(12,2), W NUMBER(38,10), F FLOAT, B BOOLEAN, T VARCHAR, DT DATE, TM TIME, "
    'NTZ TIMESTAMP_NTZ, LTZ TIMESTAMP_LTZ, TZ TIMESTAMP_TZ, V VARIANT, "mixed Case" VARCHAR'
)
EVERY_VALUE = (
    "SELECT 9223372036854775807, -2, 3.45, 0.0000000001, 8.5, TRUE, 'h€llo 😀', '9999-12-31'::DATE, "
    "'12:34:56.789012'::TIME, '2024-03-10T02:30:00.123456'::TIMESTAMP_NTZ, "
    "'2024-03-10T02:30:00.123456+00:00'::TIMESTAMP_LTZ, '2024-03-10T02:30:00.5+05:00'::TIMESTAMP_TZ, "
    """PARSE_JSON('{"a": 1}'), 'x'"""
)
MANY_COLUMNS = [Column("ID", Kind.INTEGER, 38), Column("NAME", Kind.TEXT)]
ALL_OF_THEM = (MANY, MANY, MANY * (MANY - 1) // 2)


@pytest.fixture(scope="module")
def many(run) -> str:
    run(
        f"CREATE OR REPLACE TABLE SRC.PUBLIC.MANY AS SELECT SEQ4() AS ID, 'row ' || SEQ4() AS NAME "
        f"FROM TABLE(GENERATOR(ROWCOUNT => {MANY}))"
    )
    return "SELECT ID, NAME FROM SRC.PUBLIC.MANY"


def facts(staged) -> tuple[int, int, int]:
    """Rows, distinct keys and their sum: all right only if each row came once."""
    keys = [value for file in staged.files for value in pq.read_table(file, columns=["ID"]).column("ID").to_pylist()]
    return len(keys), len(set(keys)), sum(keys)


def test_every_type_goes_through_parquet_into_hyper(spark, access, make_table, tmp_path):
    table = make_table(EVERY_TYPE, EVERY_VALUE, '("mixed Case") VALUES (NULL)')
    columns = describe(access, table)

    staged = stage(
        lambda: spark,
        access,
        select(table, columns),
        columns,
        tmp_path / "staged",
        slices=SliceBy("TZ", "month", "America/New_York"),
        small_rows=0,
    )

    assert (staged.rows, staged.slices) == (2, {"2024-03": 1, None: 1})
    (file,) = staged.files
    full, empty = sorted(pq.read_table(file).to_pylist(), key=lambda row: row["I"] is None)
    assert full | {"V": full["V"].replace(" ", "")} == {
        "I": 9223372036854775807,
        "S": -2,
        "D": Decimal("3.45"),
        "W": Decimal("0.0000000001"),
        "F": 8.5,
        "B": True,
        "T": "h€llo 😀",
        "DT": date(9999, 12, 31),
        "TM": "12:34:56.789012",
        "NTZ": datetime(2024, 3, 10, 2, 30, 0, 123456),  # noqa: DTZ001 - without a zone on purpose
        "LTZ": datetime(2024, 3, 10, 2, 30, 0, 123456, tzinfo=UTC),
        "TZ": datetime(2024, 3, 9, 21, 30, 0, 500000, tzinfo=UTC),
        "V": '{"a":1}',
        "mixed Case": "x",
    }
    assert set(empty.values()) == {None}
    rows = through_hyper(file)
    assert [str(value) for value in rows[0][:9]] == [
        *("9223372036854775807", "-2", "3.45", "1E-10", "8.5", "True", "h€llo 😀", "9999-12-31", "12:34:56.789012"),
    ]
    assert rows[1] == [None] * len(columns)


def through_hyper(file: Path) -> list[list]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU) as hyper, Connection(hyper.endpoint) as connection:
        return connection.execute_list_query(f"SELECT * FROM external('{file}') ORDER BY 1 NULLS LAST")


def test_no_rows_give_no_files(spark, access, make_table, tmp_path):
    table = make_table(EVERY_TYPE)
    columns = describe(access, table)

    staged = stage(lambda: spark, access, select(table, columns), columns, tmp_path / "staged", small_rows=0)

    assert (staged.rows, staged.files) == (0, ())


def test_a_pinned_statement_sees_the_old_version(spark, access, make_table, run, tmp_path):
    table = make_table("ID INT, NAME VARCHAR", "VALUES (1, 'old'), (2, 'old')")
    columns = describe(access, table)
    version = pin(access, margin_seconds=0)
    run(f"UPDATE {table.sql} SET NAME = 'new'")

    staged = stage(
        lambda: spark, access, select(table, columns, version=version), columns, tmp_path / "staged", small_rows=0
    )

    assert {tuple(row.values()) for row in pq.read_table(staged.files[0]).to_pylist()} == {(1, "old"), (2, "old")}


def test_a_large_result_is_staged_by_several_tasks_each_row_once(spark, access, many, warehouse, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "ROWS_PER_TASK", MANY // 4)

    staged = stage(lambda: spark, access, many, MANY_COLUMNS, tmp_path / "staged", small_rows=0)

    assert len(staged.files) == 4
    assert (facts(staged), staged.rows) == (ALL_OF_THEM, MANY)
    assert [query["sql"] for query in warehouse.queries()].count(many) == 1


def no_spark() -> NoReturn:
    pytest.fail("Spark was started")


def test_a_small_result_is_staged_without_spark_in_the_same_form(spark, access, many, tmp_path):
    query = f"{many} WHERE ID < 1000"

    here = stage(no_spark, access, query, MANY_COLUMNS, tmp_path / "here", small_rows=1000)
    by_task = stage(lambda: spark, access, query, MANY_COLUMNS, tmp_path / "task", small_rows=999)

    assert (here.tasks, by_task.tasks) == (0, 1)
    assert here.summary == "read 1,000 rows, so few that they were staged without Spark"
    assert (here.rows, here.slices, len(here.files)) == (by_task.rows, by_task.slices, len(by_task.files))
    staged_here, staged_by_task = pq.read_table(here.files[0]), pq.read_table(by_task.files[0])
    assert staged_here.sort_by("ID").equals(staged_by_task.sort_by("ID"))
    assert staged_here.schema.equals(staged_by_task.schema, check_metadata=True)


def test_few_but_huge_rows_go_to_spark():
    @dataclass
    class Batch:
        rowcount: int
        uncompressed_size: int | None

    answer = Batch(10, None)
    assert staging.is_small([answer, Batch(10, 1 << 20)], 20)
    assert not staging.is_small([answer, Batch(10, 1 << 30)], 20)
    assert not staging.is_small([answer, Batch(11, 1 << 20)], 20)
    assert not staging.is_small([Batch(0, None)], 0), "0 gives every result to Spark"


def test_the_environment_says_which_results_are_small():
    assert staging.rows_without_spark({}) == 10_000
    assert staging.rows_without_spark({"TIR_SPARK_ROWS": "0"}) == 0
    assert staging.rows_without_spark({"TIR_SPARK_ROWS": "250_000"}) == 250_000
    with pytest.raises(SourceError, match="TIR_SPARK_ROWS is no whole number"):
        staging.rows_without_spark({"TIR_SPARK_ROWS": "many"})


def test_small_results_pay_for_one_task(access, many):
    assert len(staging._grouped(result_batches(access, f"{many} WHERE ID < 1000"))) == 1


def test_a_second_staging_into_the_same_folder_adds_files(spark, access, make_table, tmp_path):
    table = make_table("ID INT, NAME VARCHAR", "VALUES (1, 'a')")
    columns = describe(access, table)

    both = [
        stage(lambda: spark, access, select(table, columns), columns, tmp_path / "staged", small_rows=0)
        for _ in range(2)
    ]

    assert len({file for staged in both for file in staged.files}) == 2
    assert (both[0] + both[1]).slices == {"all": 2}


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "cut", "when": "before"},
        {"kind": "cut", "when": "during"},
        {"kind": "status", "status": 503},
    ],
    ids=str,
)
def test_a_broken_download_is_repeated(spark, access, many, warehouse, fault, tmp_path):
    warehouse.break_next(**fault, path="results", times=2)

    assert facts(stage(lambda: spark, access, many, MANY_COLUMNS, tmp_path / "staged", small_rows=0)) == ALL_OF_THEM
    assert warehouse.pending_faults() == [], "both faults struck"


def test_a_download_that_is_refused_for_good_is_a_clear_error(access, many, monkeypatch, warehouse, tmp_path):
    monkeypatch.setattr("snowflake.connector.result_batch.MAX_DOWNLOAD_RETRY", 1)
    batches = result_batches(access, many)
    warehouse.break_next(kind="status", status=403, path="results", times=10)

    with pytest.raises(SourceError, match=r"could not be fetched.*Check network") as caught:
        write_part(StagingTask(tuple(MANY_COLUMNS), SliceBy(), str(tmp_path)), batches)

    assert "http" not in str(caught.value)


def test_a_statement_whose_answer_is_lost_is_repeated(spark, access, make_table, warehouse, tmp_path):
    table = make_table("ID INT", "VALUES (1), (2)")
    columns = describe(access, table)
    warehouse.break_next(kind="cut", when="after", path="query-request", times=1)

    assert stage(lambda: spark, access, select(table, columns), columns, tmp_path / "staged", small_rows=0).rows == 2


def test_what_a_task_finds_wrong_is_told_by_the_driver(spark, access, make_table, tmp_path):
    table = make_table("ID INT", "VALUES (1)")
    other, columns = f"SELECT ID AS OTHER FROM {table.sql}", [Column("ID", Kind.INTEGER, 38)]

    with pytest.raises(SourceError, match="gives column ID 0 times among OTHER"):
        stage(lambda: spark, access, other, columns, tmp_path / "staged", small_rows=0)


def test_a_java_process_that_ended_is_told_with_what_to_do():
    with (
        pytest.raises(SourceError, match=r"ended while counting rows.*SPARK_DRIVER_MEMORY"),
        spark_failures("counting rows"),
    ):
        raise Py4JNetworkError("Answer from Java side is empty")


def test_a_failure_of_java_is_one_line_that_says_what_happened():
    text = (
        "An error occurred while calling o80.collectToPython.\n: org.apache.spark.SparkException: EOFException occurred while"
        " reading the port number from pyspark.daemon's stdout.\n\tat org.apache.spark.Some.where(Some.scala:55)\n"
    )
    with pytest.raises(SourceError) as caught, spark_failures("counting rows"):
        raise Py4JError(text)
    assert str(caught.value) == (
        "Spark failed while counting rows: EOFException occurred while reading the port number from pyspark.daemon's stdout. "
        "The log of the run has the details."
    )
