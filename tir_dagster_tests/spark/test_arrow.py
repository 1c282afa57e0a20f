from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pytest

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.spark.arrow import arrow_schema, convert, fetch
from tir_dagster_tests.spark.batches import arrow_batch, arrow_moments


def test_scaled_integers_become_exact_decimals_not_floats():
    batch = arrow_batch("P", pa.array([123456789012345678, None, -5], pa.int64()), logicalType="FIXED", scale="2")

    got = fetch(batch, [Column("P", Kind.DECIMAL, 18, 2)])

    assert got.column("P").to_pylist() == [Decimal("1234567890123456.78"), None, Decimal("-0.05")]


@pytest.mark.parametrize("sent", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.decimal128(38, 0)])
def test_integers_arrive_in_any_width(sent):
    batch = arrow_batch("ID", pa.array([1, None, -7]).cast(sent), logicalType="FIXED")

    assert fetch(batch, [Column("ID", Kind.INTEGER, 38)]).column("ID").to_pylist() == [1, None, -7]


def test_an_integer_beyond_64_bits_names_its_column():
    batch = arrow_batch("BIG", pa.array([Decimal(2**63)], pa.decimal128(38, 0)), logicalType="FIXED")

    with pytest.raises(SourceError, match="Column BIG holds an integer beyond 64 bits"):
        fetch(batch, [Column("BIG", Kind.INTEGER, 38)])


def test_the_end_of_time_and_finer_fractions_arrive():
    batch = arrow_batch(
        "AT", arrow_moments((253402300799, 999999999), (-1, 500_000_001)), logicalType="TIMESTAMP_NTZ", scale="9"
    )

    assert fetch(batch, [Column("AT", Kind.TIMESTAMP)]).column("AT").to_pylist() == [
        datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001 - without a zone on purpose
        datetime(1969, 12, 31, 23, 59, 59, 500000),  # noqa: DTZ001 - without a zone on purpose
    ]


def test_a_batch_that_stays_short_is_an_error():
    batch = arrow_batch("ID", pa.array([1, 2]), rows=3, logicalType="FIXED")

    with pytest.raises(SourceError, match="holds 2 rows, but Snowflake announced 3"):
        fetch(batch, [Column("ID", Kind.INTEGER, 38)])


def test_columns_are_taken_by_name_in_the_declared_order():
    arrived = pa.table({"B": [1], "a": ["x"], "C": [True]})
    columns = [Column("A", Kind.TEXT), Column("B", Kind.INTEGER, 38)]

    assert convert(arrived, columns).to_pylist() == [{"A": "x", "B": 1}]
    assert convert(arrived, columns).schema == arrow_schema(columns)


def test_a_column_that_is_missing_or_there_twice_is_an_error():
    arrived = pa.table([pa.array([1]), pa.array([2])], names=["ID", "ID"])

    with pytest.raises(SourceError, match="ID 2 times"):
        convert(arrived, [Column("ID", Kind.INTEGER, 38)])
    with pytest.raises(SourceError, match="NAME 0 times among ID, ID"):
        convert(arrived, [Column("NAME", Kind.TEXT)])


def test_times_are_texts_with_six_digits_and_dates_stay_dates():
    arrived = pa.table(
        {
            "T": pa.array([time(1, 2, 3, 4), time(23, 0), None], pa.time64("ns")),
            "D": pa.array([date(1, 1, 1), date(9999, 12, 31), None], pa.date64()),
            "I": pa.array([datetime(2026, 1, 1, tzinfo=UTC), None, None], pa.timestamp("ns", "Europe/Berlin")),
        }
    )

    got = convert(arrived, [Column("T", Kind.TIME), Column("D", Kind.DATE), Column("I", Kind.INSTANT)])

    assert got.column("T").to_pylist() == ["01:02:03.000004", "23:00:00.000000", None]
    assert got.column("D").to_pylist() == [date(1, 1, 1), date(9999, 12, 31), None]
    assert got.schema.field("I").type == pa.timestamp("us", tz="UTC")
    assert got.column("I").to_pylist()[0] == datetime(2026, 1, 1, tzinfo=UTC)


def test_a_zone_is_neither_invented_nor_dropped():
    arrived = pa.table({"AT": pa.array([datetime(2026, 1, 1)], pa.timestamp("us"))})  # noqa: DTZ001 - without a zone on purpose

    with pytest.raises(SourceError, match="AT is declared as instant"):
        convert(arrived, [Column("AT", Kind.INSTANT)])
