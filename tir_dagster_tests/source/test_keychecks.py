from __future__ import annotations

import pytest

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.keychecks import check_ledger, check_source, check_sql
from tir_dagster.source.names import TableName
from tir_dagster.source.reader import read
from tir_dagster.source.slices import SliceBy
from tir_dagster.source.staging import stage
from tir_dagster.source.versions import describe, select

KEYS = (
    "I NUMBER(38,0), D NUMBER(12,2), SMALL NUMBER(20,10), B BOOLEAN, T VARCHAR, DT DATE, TM TIME, N TIMESTAMP_NTZ, "
    "Z TIMESTAMP_TZ"
)
ROWS = (
    "(-9223372036854775807, -0.50, 0.0000000001, TRUE, 'Ünïcode 😀 ~|~0', '2024-02-29'::DATE, '01:02:03.5'::TIME, "
    "'1969-12-31T23:59:59.5'::TIMESTAMP_NTZ, '2024-03-31T00:30:00+00:00'::TIMESTAMP_TZ), "
    "(0, 0.00, 0, FALSE, '', '0001-01-01'::DATE, '00:00:00'::TIME, '2024-03-31T02:30:00'::TIMESTAMP_NTZ, "
    "'1969-12-31T23:59:59.999999+00:00'::TIMESTAMP_TZ), "
    "(7, 10.00, 12345.6, NULL, NULL, NULL, NULL, NULL, NULL), "
    "(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), "
    "(7, 10.00, 12345.6, NULL, NULL, NULL, NULL, NULL, NULL)"
)
TABLE = TableName("SRC", "PUBLIC", "KEYS")
SLICES = SliceBy("Z", "week", "Europe/Berlin")


@pytest.fixture(scope="module")
def ledger(spark, access, run, tmp_path_factory):
    """The table's rows, staged once for all keys."""
    run(f"CREATE OR REPLACE TABLE {TABLE.sql} ({KEYS})")
    run(f"INSERT INTO {TABLE.sql} VALUES {ROWS}")
    columns = describe(access, TABLE)
    folder = tmp_path_factory.mktemp("keys") / "staged"
    stage(read(spark, access, select(TABLE, columns), columns), folder, key=["I"], slices=SLICES, columns=columns)
    return spark.read.parquet(str(folder))


@pytest.mark.parametrize("key", ["I", "D", "SMALL", "B", "T", "DT", "TM", "N", "Z", "I T", "I D B T DT TM N Z"])
def test_snowflake_and_spark_sum_up_alike(access, ledger, key):
    columns = describe(access, TABLE)
    chosen = [column for column in columns if column.name in key.split()]

    source = check_source(access, check_sql(TABLE.sql, key=chosen, slices=SLICES, columns=columns))

    assert source == check_ledger(ledger.select(*key.split(), "__tir_slice"), key=chosen)
    assert {name: check.rows for name, check in source.items()} == {"2024-03-25": 1, "1969-12-29": 1, None: 3}


def test_a_lost_an_extra_and_an_exchanged_key_all_show(access, make_table, run):
    table = make_table("K VARCHAR, L VARCHAR", "VALUES ('a', NULL), ('b', '')")
    columns = describe(access, table)
    sql = check_sql(table.sql, key=columns, slices=SliceBy(), columns=columns)
    seen = [check_source(access, sql)["all"]]
    for change in (
        "INSERT INTO {} VALUES ('c', 'c')",
        "UPDATE {} SET K = 'd' WHERE K = 'c'",
        "UPDATE {} SET L = NULL WHERE K = 'b'",
        "UPDATE {} SET K = 'd|', L = '' WHERE K = 'd'",
        "UPDATE {} SET K = 'd', L = '|' WHERE K = 'd|'",
        "DELETE FROM {} WHERE K = 'a'",
    ):
        run(change.format(table.sql))
        seen.append(check_source(access, sql)["all"])

    assert len({check.checksum for check in seen}) == len(seen)
    assert [check.rows for check in seen] == [2, 3, 3, 3, 3, 3, 2]


def test_a_key_that_cannot_be_compared_is_refused():
    with pytest.raises(SourceError, match=r"F \(float\)"):
        check_sql("T", key=[Column("F", Kind.FLOAT)], slices=SliceBy(), columns=[])
    with pytest.raises(SourceError, match="key of nothing"):
        check_sql("T", key=[], slices=SliceBy(), columns=[])
