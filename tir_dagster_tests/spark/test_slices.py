from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import literal
from tir_dagster.snowflake.slices import SliceBy, slice_filter_snowflake, slice_of, slice_range, slice_sql_snowflake
from tir_dagster.spark.arrow import arrow_schema
from tir_dagster.spark.staging import slice_counts

# Half hours, both hemispheres, a clock change at midnight, a day that was skipped altogether.
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Asia/Kolkata", "Pacific/Apia")
BY = ("month", "week", "day")
COLUMNS = [Column("D", Kind.DATE), Column("N", Kind.TIMESTAMP), Column("Z", Kind.INSTANT)]


@pytest.mark.parametrize(
    ("by", "value", "key"),
    [
        ("month", date(2024, 2, 29), "2024-02"),
        ("week", date(2024, 2, 29), "2024-02-26"),
        ("week", date(2024, 2, 26), "2024-02-26"),
        ("week", date(2023, 1, 1), "2022-12-26"),
        ("day", datetime(2024, 2, 29, 23, 59, 59), "2024-02-29"),  # noqa: DTZ001 - without a zone on purpose
        ("day", datetime(2024, 2, 29, 23, 30, tzinfo=UTC), "2024-03-01"),
        ("month", None, None),
    ],
)
def test_a_value_has_its_slice(by, value, key):
    assert slice_of(SliceBy("D", by, "Europe/Berlin"), value) == key


@pytest.mark.parametrize(
    ("value", "key"),
    [("EU", "EU"), ("eu ", "eu "), (-12, "-12"), ("", None), ("a\\b", None), (None, None)],
)
def test_a_slice_by_value_has_the_values_own_text(value, key):
    assert slice_of(SliceBy("REGION", "value"), value) == key


def test_without_slices_everything_is_one():
    assert slice_of(SliceBy(), None) == "all"
    assert slice_range(SliceBy(), "all") is None


@given(st.dates(), st.sampled_from(BY))
def test_a_date_lies_in_the_range_of_its_slice_and_its_neighbours_do_not(day, by):
    slices = SliceBy("D", by)
    key = slice_of(slices, day)

    first, after = slice_range(slices, key)

    assert first <= day
    assert after is None or day < after
    assert slice_of(slices, first) == key
    assert slice_of(slices, date.max) == key if after is None else slice_of(slices, after) != key


@pytest.mark.parametrize(
    ("by", "key"),
    [("month", "2024-13"), ("month", "2024-02-01"), ("week", "2024-02-27"), ("day", "all"), ("none", "x")],
)
def test_what_is_no_slice_is_refused(by, key):
    with pytest.raises(SourceError, match="is not a slice"):
        slice_range(SliceBy(None if by == "none" else "D", by), key)


def test_a_definition_that_cannot_work_is_refused():
    with pytest.raises(SourceError, match="Mars/Olympus"):
        SliceBy("D", "month", "Mars/Olympus")
    with pytest.raises(SourceError, match="both"):
        SliceBy("D", "none")
    with pytest.raises(SourceError, match="NAME holds text"):
        slice_sql_snowflake(SliceBy("NAME", "month"), [Column("NAME", Kind.TEXT)])
    with pytest.raises(SourceError, match=r"D holds date\. Slice by the values of a text or a whole number"):
        slice_sql_snowflake(SliceBy("D", "value"), COLUMNS)
    with pytest.raises(SourceError, match="NOPE is missing"):
        slice_sql_snowflake(SliceBy("NOPE", "month"), COLUMNS)


def _moments() -> list[datetime]:
    """Around every change of a clock and every new year of some years, in all zones, and some far away."""
    moments = {datetime(1970, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)}
    for name in ZONES:
        zone = ZoneInfo(name)
        for year in (1985, 2011, 2018, 2024, 2026):
            days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=at) for at in range(366)]
            shifts = [
                day
                for day in days
                if day.astimezone(zone).utcoffset() != (day + timedelta(days=1)).astimezone(zone).utcoffset()
            ]
            for day in (days[0], days[58], *shifts):
                moments |= {
                    day + timedelta(minutes=30 * at, microseconds=micro) for at in range(-3, 52, 5) for micro in (0, -1)
                }
    return sorted(moments)


@pytest.fixture(scope="module")
def moments(run) -> list[datetime]:
    values = _moments()
    rows = ", ".join(
        f"({at}, '{value.date()}', '{value.replace(tzinfo=None).isoformat()}', '{value.isoformat()}')"
        for at, value in enumerate(values)
    )
    run("CREATE OR REPLACE TABLE SRC.PUBLIC.MOMENTS (ID INT, D DATE, N TIMESTAMP_NTZ, Z TIMESTAMP_TZ)")
    run(
        f"INSERT INTO SRC.PUBLIC.MOMENTS SELECT column1, column2::DATE, column3::TIMESTAMP_NTZ, column4::TIMESTAMP_TZ FROM VALUES {rows}"
    )
    run("INSERT INTO SRC.PUBLIC.MOMENTS VALUES (-1, NULL, NULL, NULL)")
    return values


@pytest.mark.parametrize("by", BY)
def test_python_snowflake_and_arrow_agree_in_every_zone(by, moments, run):
    every = [SliceBy(column.name, by, zone) for column in COLUMNS for zone in ZONES]
    expected = {-1: tuple(None for _ in every)} | {
        at: tuple(slice_of(slices, _value(slices.column, moment)) for slices in every)
        for at, moment in enumerate(moments)
    }

    texts = ", ".join(slice_sql_snowflake(slices, COLUMNS) for slices in every)
    in_snowflake = {row[0]: tuple(row[1:]) for row in run(f"SELECT ID, {texts} FROM SRC.PUBLIC.MOMENTS")}
    in_arrow = [
        {at: slices_of(slices, [moment]) for at, moment in [*enumerate(moments), (-1, None)]} for slices in every
    ]

    assert in_snowflake == expected
    assert {at: tuple(names[at] for names in in_arrow) for at in expected} == expected


def slices_of(slices: SliceBy, moments: list[datetime | None]) -> str | None:
    """The slice of a moment, counted in Arrow."""
    values = {column.name: [moment and _value(column.name, moment) for moment in moments] for column in COLUMNS}
    table = pa.table(
        [pa.array(values[field.name], field.type) for field in arrow_schema(COLUMNS)], arrow_schema(COLUMNS)
    )
    ((name, count),) = slice_counts(slices, COLUMNS, table).items()
    assert count == len(moments)
    return name


VALUED = [Column("REGION", Kind.TEXT), Column("SHOP", Kind.INTEGER)]
VALUES = [("EU", 1), ("eu", -1), ("", 0), ("N\\S", 12), ("O'Higgins", 9_999_999_999), ("東京", None), (None, 7)]


def test_python_snowflake_and_arrow_agree_on_values(run):
    run("CREATE OR REPLACE TABLE SRC.PUBLIC.VALUED (ID INT, REGION VARCHAR, SHOP INT)")
    literals = ["NULL" if region is None else literal(region) for region, _ in VALUES]
    rows = [f"({at}, {literals[at]}, {'NULL' if shop is None else shop})" for at, (_, shop) in enumerate(VALUES)]
    run(f"INSERT INTO SRC.PUBLIC.VALUED VALUES {', '.join(rows)}")
    every = [SliceBy(column.name, "value") for column in VALUED]
    expected = [tuple(map(slice_of, every, row)) for row in VALUES]
    texts = ", ".join(slice_sql_snowflake(slices, VALUED) for slices in every)
    assert run(f"SELECT {texts} FROM SRC.PUBLIC.VALUED ORDER BY ID") == expected
    table = pa.table(list(map(list, zip(*VALUES, strict=True))), schema=arrow_schema(VALUED))
    for at, slices in enumerate(every):
        assert slice_counts(slices, VALUED, table) == Counter(row[at] for row in expected)
    for at, names in enumerate((["EU", "O'Higgins", None, "nowhere"], ["-1", "12", None, "x"])):
        where = slice_filter_snowflake(every[at], VALUED, names)
        ids = {row[0] for row in run(f"SELECT ID FROM SRC.PUBLIC.VALUED WHERE {where}")}
        assert ids == {number for number, row in enumerate(expected) if row[at] in names}


def _value(column: str, moment: datetime) -> date | datetime:
    return {"D": moment.date(), "N": moment.replace(tzinfo=None), "Z": moment}[column]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_the_filter_finds_exactly_the_rows_of_the_slices(column, moments, run):
    slices = SliceBy(column.name, "month", "America/New_York")
    keys = ["2024-03", "2010-12", None]

    ids = {
        row[0]
        for row in run(f"SELECT ID FROM SRC.PUBLIC.MOMENTS WHERE {slice_filter_snowflake(slices, COLUMNS, keys)}")
    }

    assert ids == {-1} | {
        at for at, moment in enumerate(moments) if slice_of(slices, _value(column.name, moment)) in keys
    }
    assert len(ids) > 10


def test_filters_at_the_ends_of_time_leave_the_bound_out():
    slices = SliceBy("D", "day")

    assert slice_filter_snowflake(slices, COLUMNS, ["9999-12-31"]).count("::DATE") == 1
    assert slice_filter_snowflake(slices, COLUMNS, ["0001-01-01"]).count("::DATE") == 1
    assert slice_filter_snowflake(slices, COLUMNS, []) == "FALSE"
    assert slice_filter_snowflake(SliceBy(), COLUMNS, ["all"]) == "TRUE"
