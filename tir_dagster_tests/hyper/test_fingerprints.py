# ruff: noqa: DTZ001 - timestamps without a zone are part of what is tested
"""An extract and its source give the same numbers, and different ones as soon as a value differs."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.errors import SourceError
from tir_dagster.hyper.casts import FileColumn
from tir_dagster.hyper.content import content_digest, content_digests, content_fingerprints
from tir_dagster.hyper.fingerprints import (
    Fingerprint,
    different_slices,
    extract_fingerprints,
    read_fingerprints,
    snowflake_sql,
)
from tir_dagster.hyper.hyperfile import create_extract
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.hyper.slices import slice_bounds_hyper
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import columns_of, run, stage

DECLARED = {
    "ID": "NUMBER(38,0)",
    "AMOUNT": "NUMBER(12,2)",
    "WIDE": "NUMBER(38,10)",
    "RATIO": "FLOAT",
    "PAID": "BOOLEAN",
    "NAME": "VARCHAR",
    "DAY": "DATE",
    "AT": "TIME",
    "SEEN": "TIMESTAMP_NTZ",
    "MOMENT": "TIMESTAMP_TZ",
    "EXTRA": "VARIANT",
}
COLUMNS = columns_of(DECLARED)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# fmt: off
ROWS: list[tuple[Any, ...]] = [
    (1, Decimal("1.25"), Decimal("2.5"), 1.5, True, "é☃", date(2024, 1, 31), "10:11:12.123456",
     datetime(2024, 1, 1, 0, 0, 0, 5), moment("2024-01-01T03:00:00"), '{"a":1}'),
    (-7, Decimal("-3.50"), Decimal("-12345.6789012345"), -0.1, False, "", date(1969, 12, 29), "00:00:00",
     datetime(1960, 1, 1, 3, 4, 5, 123456), moment("2024-03-10T06:59:59.999999"), None),
    (9223372036854775807, Decimal("9999999999.99"), Decimal("123456789012345678.0000000001"), float("nan"), None, "abc",
     date(2024, 2, 29), "23:59:59.999999", datetime(2024, 12, 29), moment("2024-03-10T07:00:00"), None),
    (9223372036854775807, None, None, float("inf"), None, "a\u0301 日本語 👩‍👩‍👧", date(2024, 1, 1), None, None, None, None),
    (None, None, None, float("-inf"), True, None, None, None, datetime(2024, 12, 30), moment("2023-12-31T22:30:00"), None),
    (0, Decimal("0.01"), Decimal("0.0000000001"), 1e-7, False, "it's \"quoted\"", date(2024, 12, 30), "12:00:00",
     datetime(2025, 1, 1), moment("2024-07-01T00:00:00"), None),
    (5, Decimal("0.10"), Decimal("0.29"), 123456789012.75, True, "z" * 300, date(2025, 1, 1), "06:30:00",
     datetime(2025, 1, 5, 23, 59, 59), moment("2024-06-30T23:59:59"), None),
    (6, Decimal("0.20"), Decimal("1.005"), 1e300, None, "x", None, None, None, None, None),
    (6, Decimal("0.20"), Decimal("1.005"), -2e18, None, "x", None, None, None, None, None),
    (7, Decimal("0.30"), Decimal("-9999999999999999999999999999.9999999999"), -0.0, None, "-", None, None, None, None, None),
    (7, Decimal("0.40"), Decimal("1234567890.0987654321"), 5e-324, None, "|-", None, None, None, None, None),
    (8, Decimal("0.50"), Decimal("100000.0000005"), 1.2345678901234567e-25, None, "-|", None, None, None, None, None),
    (8, Decimal("0.60"), Decimal("-56294.9953421312"), 1.2345678901234567e33, None, "|", None, None, None, None, None),
    (9, Decimal("0.70"), Decimal("56294.9953421311"), -3.3333333333333335e20, None, "", None, None, None, None, None),
]
# fmt: on


def sql_value(column: Column, value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int | Decimal):
        return str(value)
    text = value.isoformat(sep=" ") if isinstance(value, datetime) else str(value)
    quoted = "'" + text.replace("'", "''") + "'"
    return f"PARSE_JSON({quoted})" if column.name == "EXTRA" else f"CAST({quoted} AS {DECLARED[column.name]})"


@pytest.fixture(scope="module")
def cursor(sandbox):
    connection = sandbox.snowflake()
    cursor = connection.cursor()
    for statement in (
        "CREATE DATABASE IF NOT EXISTS FINGERPRINTS",
        "USE DATABASE FINGERPRINTS",
        "CREATE SCHEMA IF NOT EXISTS PRINTS",
        "USE SCHEMA PRINTS",
        "CREATE TABLE T (" + ", ".join(f'"{name}" {kind}' for name, kind in DECLARED.items()) + ")",
    ):
        cursor.execute(statement)
    for row in ROWS:
        values = ", ".join(sql_value(column, value) for column, value in zip(COLUMNS, row, strict=True))
        cursor.execute(f"INSERT INTO T SELECT {values}")
    yield cursor
    connection.close()


@pytest.fixture(scope="module")
def extract(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fingerprints")
    create_extract(folder / "e.hyper", COLUMNS, stage(folder / "rows.parquet", COLUMNS, ROWS))
    return folder / "e.hyper"


@pytest.mark.parametrize(
    "slicing",
    [
        SliceBy(),
        SliceBy("DAY", "month"),
        SliceBy("DAY", "week"),
        SliceBy("DAY", "day"),
        SliceBy("SEEN", "month"),
        SliceBy("SEEN", "week"),
        SliceBy("MOMENT", "day", "America/New_York"),
        SliceBy("MOMENT", "week", "Asia/Tokyo"),
        SliceBy("MOMENT", "month"),
    ],
    ids=str,
)
def test_extract_and_source_agree_to_the_bit(cursor: Any, extract: Path, slicing: SliceBy):
    cursor.execute(snowflake_sql(COLUMNS, '"FINGERPRINTS"."PRINTS"."T"', slicing))
    source = read_fingerprints(cursor.fetchall(), COLUMNS)
    extract_prints = extract_fingerprints(extract, COLUMNS, slicing)
    assert different_slices(extract_prints, source) == {}
    assert sum(fingerprint["rows"] for fingerprint in extract_prints.values()) == len(ROWS)


def test_both_sides_can_be_asked_for_some_slices_only(cursor: Any, extract: Path):
    slicing = SliceBy("DAY", "month")
    cursor.execute(snowflake_sql(COLUMNS, '"FINGERPRINTS"."PRINTS"."T"', slicing, only={"2024-01", None}))
    source = read_fingerprints(cursor.fetchall(), COLUMNS)
    extract_prints = extract_fingerprints(extract, COLUMNS, slicing, only={"2024-01", None})
    assert extract_prints == source
    assert set(extract_prints) == {"2024-01", None}
    assert extract_fingerprints(extract, COLUMNS, slicing, only=[]) == {}


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Kiritimati"])
@pytest.mark.parametrize("by", ["month", "week", "day"])
@pytest.mark.parametrize("column", ["DAY", "SEEN", "MOMENT"])
def test_one_slice_has_the_numbers_that_it_has_among_all(extract: Path, column: str, by: Any, zone: str):
    """Blocks are skipped by bounds of the bare column, which know no zone."""
    slicing = SliceBy(column, by, zone)
    everything = extract_fingerprints(extract, COLUMNS, slicing)
    assert len(everything) > 3
    for name, fingerprint in everything.items():
        assert extract_fingerprints(extract, COLUMNS, slicing, only=[name]) == {name: fingerprint}


def test_a_slice_is_asked_for_by_bounds_of_its_column():
    """Or all rows would be read, in both systems, to look at one slice."""
    stored = {column.name: FileColumn(column.name, column.hyper) for column in COLUMNS}
    within = slice_bounds_hyper(SliceBy("DAY", "month"), COLUMNS, stored, ["2024-01"])
    assert within == """(("DAY" >= DATE '2023-12-31' AND "DAY" < DATE '2024-02-02'))"""
    assert slice_bounds_hyper(SliceBy("DAY", "month"), COLUMNS, stored, ["12024-01"]) == "TRUE"
    query = snowflake_sql(COLUMNS, '"T"', SliceBy("DAY", "month"), only=["2024-01"])
    assert """FROM "T" WHERE (("DAY" >= '2023-12-31'::DATE AND "DAY" < '2024-02-02'::DATE""" in query


def test_slices_are_named_by_the_wall_clock_of_their_zone(extract: Path):
    in_new_york = extract_fingerprints(extract, COLUMNS, SliceBy("MOMENT", "day", "America/New_York"))
    assert {"2023-12-31", "2024-03-10", "2024-06-30", None} == set(in_new_york)
    weeks = extract_fingerprints(extract, COLUMNS, SliceBy("DAY", "week"))
    assert {"1969-12-29", "2024-01-01", "2024-01-29", "2024-02-26", "2024-12-30", None} == set(weeks)


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("ID", '"ID" + 1'),
        ("AMOUNT", '"AMOUNT" + 0.01'),
        ("WIDE", '"WIDE" + 0.0000000001'),
        ("RATIO", '"RATIO" * 1.0000001'),
        ("PAID", 'NOT "PAID"'),
        ("NAME", "'ABC'"),
        ("DAY", '"DAY" + 1'),
        ("AT", "CAST('10:11:12.123457' AS TIME)"),
        ("SEEN", "\"SEEN\" + INTERVAL '1 microsecond'"),
        ("MOMENT", "\"MOMENT\" + INTERVAL '1 microsecond'"),
        ("EXTRA", "CAST(NULL AS TEXT)"),
    ],
)
def test_one_changed_value_shows(tmp_path: Path, extract: Path, column: str, change: str):
    changed = tmp_path / "changed.hyper"
    changed.write_bytes(extract.read_bytes())
    name = "'abc'" if column == "NAME" else None
    where = f'"NAME" = {name}' if name else '"ID" = 1'
    run(changed, f'UPDATE "Extract"."Extract" SET "{column}" = {change} WHERE {where}')
    before, after = (extract_fingerprints(path, COLUMNS)["all"] for path in (extract, changed))
    lines = [line for line in before.differences(after) if not line.startswith("digest:")]
    assert lines, "people are told which column differs"
    assert all(line.startswith(column) for line in lines)


VALUES = {
    # Two values, and two others of the same sum, between a smallest and a largest one.
    "NUMBER(38,0)": (-900, 900, (10, 30), (-100, 140)),
    "NUMBER(12,2)": (
        Decimal(-900),
        Decimal(900),
        (Decimal("1.25"), Decimal("3.75")),
        (Decimal("0.05"), Decimal("4.95")),
    ),
    "NUMBER(38,10)": (
        Decimal("-1e20"),
        Decimal("1e20"),
        (Decimal("7000000.5"), Decimal("8000000.5")),
        (Decimal("7000100.5"), Decimal("7999900.5")),
    ),
    "FLOAT": (-900.0, 900.0, (0.5, 0.25), (0.625, 0.125)),
    "BOOLEAN": (True, False, (True, False), (False, True)),
    "DATE": (
        date(2020, 1, 1),
        date(2030, 1, 1),
        (date(2024, 1, 2), date(2024, 1, 9)),
        (date(2024, 1, 4), date(2024, 1, 7)),
    ),
}


@pytest.mark.parametrize("declared", VALUES)
def test_values_of_the_same_sum_and_values_that_changed_places_show(tmp_path: Path, declared: str):
    least, most, before, after = VALUES[declared]
    columns = columns_of({"ID": "NUMBER(38,0)", "VALUE": declared})

    def prints(name: str, *values: Any) -> Fingerprint:
        rows = list(enumerate((least, *values, most)))
        create_extract(tmp_path / f"{name}.hyper", columns, stage(tmp_path / f"{name}.parquet", columns, rows))
        return extract_fingerprints(tmp_path / f"{name}.hyper", columns)["all"]

    here = prints("before", *before)
    assert here != prints("after", *after)
    assert here != prints("exchanged", *reversed(before))
    assert here == prints("again", *before)


def test_a_source_whose_numbers_changed_by_opposite_amounts_differs(cursor: Any, tmp_path: Path):
    columns = columns_of({"ID": "NUMBER(38,0)", "AMOUNT": "NUMBER(12,2)", "RATIO": "FLOAT"})
    rows = [(1, Decimal(-900), -9.5), (2, Decimal(10), 1.5), (3, Decimal(30), 2.5), (4, Decimal(900), 9.5)]
    create_extract(tmp_path / "e.hyper", columns, stage(tmp_path / "rows.parquet", columns, rows))
    extract_prints = extract_fingerprints(tmp_path / "e.hyper", columns)

    def source(amounts: tuple[int, int], ratios: tuple[float, float] = (1.5, 2.5)) -> Any:
        values = [(1, -900, -9.5), (2, amounts[0], ratios[0]), (3, amounts[1], ratios[1]), (4, 900, 9.5)]
        listed = "COLUMN1::NUMBER(38,0) AS ID, COLUMN2::NUMBER(12,2) AS AMOUNT, COLUMN3::FLOAT AS RATIO"
        cursor.execute(snowflake_sql(columns, f"(SELECT {listed} FROM VALUES {', '.join(map(str, values))})"))
        return different_slices(extract_prints, read_fingerprints(cursor.fetchall(), columns))

    assert source((10, 30)) == {}
    for changed in (source((-100, 140)), source((30, 10)), source((10, 30), (1.25, 2.75))):
        assert [line.split(":")[0] for line in changed["all"]] == ["digest"]
    assert [line.split(":")[0] for line in source((-1000, 1040))["all"]] == ["AMOUNT min", "AMOUNT max", "digest"]


def test_wide_decimals_give_the_same_numbers_from_a_file_that_holds_them_exactly(tmp_path: Path):
    wide = [column for column in COLUMNS if column.name in ("AMOUNT", "WIDE")]
    exact = tmp_path / "exact.hyper"
    values = ", ".join(
        f"({row[1] if row[1] is not None else 'NULL'}, {row[2] if row[2] is not None else 'NULL'})" for row in ROWS
    )
    run(
        exact,
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."Extract" ("AMOUNT" NUMERIC(12,2), "WIDE" NUMERIC(38,10))',
        f'INSERT INTO "Extract"."Extract" VALUES {values}',
        create=True,
        file_version=3,
    )
    rounded = create_extract(
        tmp_path / "rounded.hyper", wide, stage(tmp_path / "rows.parquet", wide, [row[1:3] for row in ROWS])
    )
    assert rounded.columns[1].type == "DOUBLE PRECISION"
    assert extract_fingerprints(exact, wide) == extract_fingerprints(tmp_path / "rounded.hyper", wide)


def test_differences_read_as_sentences():
    extract = Fingerprint({"rows": 3, "AMOUNT sum": 1250})
    source = Fingerprint({"rows": 3, "AMOUNT sum": 1300, "NAME letters": 4})
    assert extract.differences(source) == [
        "AMOUNT sum: extract 1,250, source 1,300 (-50)",
        "NAME letters: extract nothing, source 4",
    ]


def test_decimals_are_shown_with_their_point_and_the_digest_comes_last():
    columns = [Column.from_snowflake("AMOUNT", "NUMBER(10,2)"), Column.from_snowflake("QTY", "NUMBER(38,0)")]
    extract = {"2026-01": Fingerprint({"rows": 1, "digest": 1, "AMOUNT sum": 9900, "QTY sum": 9900})}
    source = {"2026-01": Fingerprint({"rows": 1, "digest": 2, "AMOUNT sum": 4005, "QTY sum": 9901})}
    assert different_slices(extract, source, columns)["2026-01"] == [
        "AMOUNT sum: extract 99.00, source 40.05 (+58.95)",
        "QTY sum: extract 9,900, source 9,901 (-1)",
        "digest: extract 1, source 2 (-1)",
    ]


def test_versions_of_the_release_before_are_still_recognised(tmp_path: Path):
    create_extract(tmp_path / "e.hyper", COLUMNS, stage(tmp_path / "rows.parquet", COLUMNS, ROWS[:9]))
    shape = ExtractShape(COLUMNS, ("ID",), SliceBy("DAY", "month"), loose=frozenset({"RATIO"}))
    prints = content_fingerprints(tmp_path / "e.hyper", shape)
    digest = content_digest(prints)
    # As that release wrote it down.
    before = "7bf9878b0aa194c1ba446c131ccdc0e88660750efc3d7f31d66c6199990baa9a"
    assert content_digests(prints, shape) == (digest, before)
    run(tmp_path / "e.hyper", 'UPDATE "Extract"."Extract" SET "RATIO" = "RATIO" * 1.0000001')
    assert content_digest(content_fingerprints(tmp_path / "e.hyper", shape)) == digest, "a loose column tells nothing"


def test_slices_need_a_date(extract: Path):
    with pytest.raises(SourceError, match="NAME holds text"):
        extract_fingerprints(extract, COLUMNS, SliceBy("NAME", "month"))
    with pytest.raises(SourceError, match="NOWHERE is missing"):
        snowflake_sql(COLUMNS, "T", SliceBy("NOWHERE", "month"))


def test_times_are_cut_at_microseconds(tmp_path: Path):
    columns = columns_of({"AT": "TIME"})
    create_extract(tmp_path / "t.hyper", columns, stage(tmp_path / "t.parquet", columns, [("10:11:12.123456789",)]))
    micro = (time(10, 11, 12).hour * 3600 + 11 * 60 + 12) * 1_000_000 + 123456
    assert extract_fingerprints(tmp_path / "t.hyper", columns)["all"]["AT max"] == micro
