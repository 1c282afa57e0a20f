from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.sql import functions as F  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.datasource import SnowflakeReader, SnowflakeSource
from tir_dagster.source.reader import plan_read, read, spark_failures
from tir_dagster.source.versions import describe, pin, select

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


@pytest.fixture(scope="module")
def many(run) -> str:
    run(
        f"CREATE OR REPLACE TABLE SRC.PUBLIC.MANY AS SELECT SEQ4() AS ID, 'row ' || SEQ4() AS NAME "
        f"FROM TABLE(GENERATOR(ROWCOUNT => {MANY}))"
    )
    return "SELECT ID, NAME FROM SRC.PUBLIC.MANY"


MANY_COLUMNS = [Column("ID", Kind.INTEGER, 38), Column("NAME", Kind.TEXT)]


def _facts(frame) -> tuple:
    """Rows, distinct keys and their sum: all right only if each row came once."""
    return tuple(frame.agg(F.count("*"), F.countDistinct("ID"), F.sum("ID")).collect()[0])


ALL_OF_THEM = (MANY, MANY, MANY * (MANY - 1) // 2)


def test_every_common_type_arrives_with_its_nulls(spark, access, make_table):
    table = make_table(EVERY_TYPE, EVERY_VALUE, '("mixed Case") VALUES (NULL)')
    columns = describe(access, table)

    full, empty = sorted(read(spark, access, select(table, columns), columns).collect(), key=lambda row: row.I is None)

    assert full.asDict() == {
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
        "LTZ": _local(datetime(2024, 3, 10, 2, 30, 0, 123456, tzinfo=UTC)),
        "TZ": _local(datetime(2024, 3, 9, 21, 30, 0, 500000, tzinfo=UTC)),
        "V": '{"a":1}' if " " not in full.V else '{"a": 1}',
        "mixed Case": "x",
    }
    assert set(empty.asDict().values()) == {None}


def _local(moment: datetime) -> datetime:
    """As PySpark shows a moment: in the zone of this Python."""
    return moment.astimezone().replace(tzinfo=None)


def test_an_empty_result_keeps_its_declared_types(spark, access, make_table):
    table = make_table(EVERY_TYPE)
    columns = describe(access, table)

    frame = read(spark, access, select(table, columns), columns)

    assert frame.count() == 0
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        (column.name, column.spark) for column in columns
    ]


def test_a_pinned_frame_sees_the_old_version(spark, access, make_table, run):
    table = make_table("ID INT, NAME VARCHAR", "VALUES (1, 'old'), (2, 'old')")
    columns = describe(access, table)
    version = pin(access, margin_seconds=0)
    run(f"UPDATE {table.sql} SET NAME = 'new'")

    frame = read(spark, access, select(table, columns, version=version), columns)

    assert {tuple(row) for row in frame.collect()} == {(1, "old"), (2, "old")}


def test_a_large_result_is_read_in_parallel_and_each_row_once(spark, access, many, warehouse):
    frame = read(spark, access, many, MANY_COLUMNS, tasks=4)

    assert frame.rdd.getNumPartitions() == 4
    assert _facts(frame) == ALL_OF_THEM
    assert _facts(frame) == ALL_OF_THEM, "a second evaluation reads the same"
    asked = [query["sql"] for query in warehouse.queries()]
    assert asked.count(many) == 1, "but asks the source nothing"


def test_a_large_result_in_few_parts_is_read_by_hash_and_each_row_once(spark, access, many):
    parts = len(plan_read(access, many, MANY_COLUMNS, tasks=100).tasks)

    frame = read(spark, access, many, MANY_COLUMNS, split_by=["ID"], tasks=2 * parts)

    assert frame.rdd.getNumPartitions() == 2 * parts
    assert _facts(frame) == ALL_OF_THEM


def test_a_result_in_enough_parts_is_asked_for_once(access, many, warehouse):
    once = f"{many} WHERE ID >= 0"

    plan_read(access, once, MANY_COLUMNS, split_by=["ID"], tasks=3)

    asked = [query["sql"] for query in warehouse.queries()]
    assert asked.count(once) == 1
    assert not any(once in text and "HASH" in text for text in asked)


def test_no_credential_goes_to_spark(access, many):
    plan = plan_read(access, many, MANY_COLUMNS)

    assert len(plan.tasks) == 1
    assert not any(str(access.password).encode() in task for task in plan.tasks)


def test_a_task_carries_its_own_part_only(access, many):
    source = SnowflakeSource({"plan": plan_read(access, many, MANY_COLUMNS, tasks=4).to_text()})
    reader = source.reader(None)

    assert len(reader.partitions()) == 4
    assert len(pickle.dumps((source, reader))) < 2_000


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "cut", "when": "before"},
        {"kind": "cut", "when": "during"},
        {"kind": "status", "status": 503},
    ],
    ids=str,
)
def test_a_broken_download_is_repeated(spark, access, many, warehouse, fault):
    warehouse.break_next(**fault, path="results", times=2)

    assert _facts(read(spark, access, many, MANY_COLUMNS)) == ALL_OF_THEM
    assert warehouse.pending_faults() == [], "both faults struck"


def test_a_download_that_is_refused_for_good_is_a_clear_error(access, many, monkeypatch, warehouse):
    monkeypatch.setattr("snowflake.connector.result_batch.MAX_DOWNLOAD_RETRY", 1)
    reader = SnowflakeReader(plan_read(access, many, MANY_COLUMNS))
    warehouse.break_next(kind="status", status=403, path="results", times=10)

    with pytest.raises(SourceError, match=r"could not be fetched.*Check network") as caught:
        list(reader.read(reader.partitions()[0]))

    assert "http" not in str(caught.value)


def test_a_statement_whose_answer_is_lost_is_repeated(spark, access, make_table, warehouse):
    table = make_table("ID INT", "VALUES (1), (2)")
    columns = describe(access, table)
    warehouse.break_next(kind="cut", when="after", path="query-request", times=1)

    assert read(spark, access, select(table, columns), columns).count() == 2


def test_what_a_task_finds_wrong_is_told_by_the_driver(spark, access, make_table):
    table = make_table("ID INT", "VALUES (1)")
    frame = read(spark, access, f"SELECT ID AS OTHER FROM {table.sql}", [Column("ID", Kind.INTEGER, 38)])

    with pytest.raises(SourceError, match="gives column ID 0 times among OTHER"), spark_failures("testing"):
        frame.collect()


def test_names_that_spark_cannot_tell_apart_are_refused(spark, access):
    with pytest.raises(SourceError, match="Column A is there more than once"):
        read(spark, access, "SELECT 1", [Column("a", Kind.TEXT), Column("A", Kind.TEXT)])


def test_a_java_process_that_ended_is_told_with_what_to_do():
    with (
        pytest.raises(SourceError, match=r"ended while counting rows.*SPARK_DRIVER_MEMORY"),
        spark_failures("counting rows"),
    ):
        raise Py4JNetworkError("Answer from Java side is empty")
