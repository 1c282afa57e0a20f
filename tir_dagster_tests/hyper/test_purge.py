# ruff: noqa: DTZ001 - timestamps without a zone are part of what is tested
"""Replace by key: E' = rows of E whose key is not in S, plus the fresh rows; as bags, with NULLs and duplicates."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.hyperfile import create_extract, describe
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster_tests.hyper.helpers import bag, columns_of, run, stage
from tir_dagster_tests.hyper.replacing import replace_keys, replace_slices

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "REGION": "VARCHAR", "AMOUNT": "NUMBER(12,2)"})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    rows = [
        (1, "north", Decimal(10)),
        (2, "south", Decimal(20)),
        (2, "south", Decimal(20)),
        (None, None, Decimal(5)),
        (3, "North", None),
    ]
    create_extract(tmp_path / "base.hyper", COLUMNS, stage(tmp_path / "base.parquet", COLUMNS, rows))
    return tmp_path / "base.hyper"


def keys_file(folder: Path, columns: list[Column], keys: list[tuple[Any, ...]]) -> list[Path]:
    return stage(folder / "keys.parquet", columns, keys, bookkeeping=False)


def test_rows_of_the_keys_go_and_the_fresh_rows_stand_instead(tmp_path: Path, base: Path):
    target = tmp_path / "next.hyper"
    untouched = base.read_bytes()
    applied = replace_keys(
        base,
        target,
        key=["ID"],
        keys=keys_file(tmp_path, [COLUMNS[0]], [(2,), (None,), (9,)]),
        rows=stage(tmp_path / "rows.parquet", COLUMNS, [(2, "west", Decimal(21)), (9, "new", None)]),
        columns=COLUMNS,
    )
    assert (applied.before, applied.purged, applied.appended, applied.after) == (5, 3, 2, 4)
    assert bag(target) == Counter(
        [(1, "north", Decimal(10)), (3, "North", None), (2, "west", Decimal(21)), (9, "new", None)]
    )
    assert set(applied.seconds) == {"copy", "purge", "append", "close", "check", "sync"}
    assert base.read_bytes() == untouched
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_same_refresh_twice_changes_nothing_more(tmp_path: Path, base: Path):
    keys = keys_file(tmp_path, [COLUMNS[0]], [(2,), (None,)])
    rows = stage(tmp_path / "rows.parquet", COLUMNS, [(2, "west", Decimal(21)), (None, "x", None)])
    replace_keys(base, tmp_path / "1.hyper", key=["ID"], keys=keys, rows=rows, columns=COLUMNS)
    replace_keys(tmp_path / "1.hyper", tmp_path / "2.hyper", key=["ID"], keys=keys, rows=rows, columns=COLUMNS)
    assert bag(tmp_path / "1.hyper") == bag(tmp_path / "2.hyper")


def test_an_extract_can_be_replaced_by_its_own_successor(tmp_path: Path, base: Path):
    keys = keys_file(tmp_path, [COLUMNS[0]], [(2,)])
    assert replace_keys(base, base, key=["ID"], keys=keys, rows=[], columns=COLUMNS).after == 3
    assert describe(base).rows == 3


def test_no_keys_and_no_rows_leave_the_content_as_it_is(tmp_path: Path, base: Path):
    applied = replace_keys(base, tmp_path / "n.hyper", key=["ID"], keys=[], rows=[], columns=COLUMNS)
    assert (applied.purged, applied.appended) == (0, 0)
    assert bag(tmp_path / "n.hyper") == bag(base)


def test_text_keys_are_compared_letter_by_letter_whatever_the_extract_collates(tmp_path: Path):
    base = tmp_path / "ci.hyper"
    run(
        base,
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."Extract" ("ID" TEXT COLLATE "en_US_CI")',
        "INSERT INTO \"Extract\".\"Extract\" VALUES ('a'), ('A'), ('a '), ('á')",
        create=True,
    )
    columns = columns_of({"ID": "VARCHAR"})
    keys = keys_file(tmp_path, list(columns), [("a",)])
    replace_keys(base, tmp_path / "n.hyper", key=["ID"], keys=keys, rows=[], columns=columns)
    assert bag(tmp_path / "n.hyper") == Counter([("A",), ("a ",), ("á",)])


VALUES: dict[str, tuple[Any, Any, Any]] = {
    "NUMBER(38,0)": (1, 2, None),
    "NUMBER(12,2)": (Decimal("1.10"), Decimal("1.11"), None),
    "NUMBER(18,4)": (Decimal("0.0001"), Decimal("-0.0001"), None),
    "FLOAT": (0.1, float("nan"), None),
    "BOOLEAN": (True, False, None),
    "VARCHAR": ("", "é", None),
    "DATE": (date(1969, 12, 31), date(2024, 2, 29), None),
    "TIME": ("10:11:12.123456", "00:00:00", None),
    "TIMESTAMP_NTZ": (datetime(2024, 1, 1, 0, 0, 0, 1), datetime(1900, 1, 1), None),
    "TIMESTAMP_TZ": (datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=UTC), datetime(1900, 1, 1, tzinfo=UTC), None),
}


@pytest.mark.parametrize("declared", VALUES)
def test_every_type_can_be_a_key_and_so_can_its_null(tmp_path: Path, declared: str):
    columns = columns_of({"K": declared, "N": "NUMBER(38,0)"})
    values = VALUES[declared]
    base = tmp_path / "b.hyper"
    create_extract(base, columns, stage(tmp_path / "b.parquet", columns, [(v, n) for n, v in enumerate(values)]))
    for place, value in enumerate(values):
        keys = keys_file(tmp_path, [columns[0]], [(value,)])
        applied = replace_keys(base, tmp_path / "n.hyper", key=["K"], keys=keys, rows=[], columns=columns)
        assert applied.purged == 1, f"{declared}: the row of {value!r} was not found by its key"
        assert sorted(n for (n,) in bag(tmp_path / "n.hyper", columns='"N"')) == [n for n in range(3) if n != place]


def test_an_extract_keeps_its_own_types(tmp_path: Path):
    base = tmp_path / "b.hyper"
    run(
        base,
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."Extract" ("ID" INTEGER NOT NULL, "PRICE" DOUBLE PRECISION, "WIDER" NUMERIC(18,4), '
        '"DAY" TIMESTAMP, "MOMENT" TIMESTAMPTZ, "Customer Name" TEXT)',
        "INSERT INTO \"Extract\".\"Extract\" VALUES (1, 9.99, 1.5, '2024-01-31', '2024-01-31 10:00:00+00', 'x')",
        create=True,
    )
    columns = columns_of(
        {"ID": "NUMBER(9,0)", "PRICE": "NUMBER(12,2)", "WIDER": "NUMBER(12,2)", "DAY": "DATE",
         "MOMENT": "TIMESTAMP_TZ", "NAME": "VARCHAR"}
    )  # fmt: skip
    row = (1, Decimal("9.99"), Decimal("1.50"), date(2024, 1, 31), datetime(2024, 1, 31, 10, tzinfo=UTC), "x")
    for key in (["ID"], ["PRICE", "WIDER"], ["DAY", "MOMENT"], ["NAME"]):
        picked = [column for column in columns if column.name in key]
        keys = keys_file(tmp_path, picked, [tuple(row[columns.index(column)] for column in picked)])
        applied = replace_keys(
            base,
            tmp_path / "n.hyper",
            key=key,
            keys=keys,
            rows=stage(tmp_path / "r.parquet", columns, [row]),
            columns=columns,
            names={"NAME": "Customer Name"},
        )
        assert (applied.purged, applied.appended) == (1, 1), key
        assert bag(tmp_path / "n.hyper") == bag(base)
    assert describe(tmp_path / "n.hyper").columns == describe(base).columns


def only_column(folder: Path, stored: str) -> Path:
    path = folder / "one.hyper"
    run(
        path, 'CREATE SCHEMA "Extract"', f'CREATE TABLE "Extract"."Extract" ("X" {stored})', create=True, file_version=4
    )
    return path


@pytest.mark.parametrize(
    ("declared", "stored"),
    [
        ("VARCHAR", "BIGINT"),
        ("VARCHAR", "DATE"),
        ("VARCHAR", "VARCHAR(3)"),
        ("FLOAT", "BIGINT"),
        ("FLOAT", "REAL"),
        ("NUMBER(12,2)", "BIGINT"),
        ("NUMBER(12,2)", "NUMERIC(18,1)"),
        ("TIMESTAMP_NTZ", "DATE"),
        ("BOOLEAN", "TEXT"),
        ("NUMBER(38,0)", "TEXT"),
    ],
)
def test_a_type_that_would_change_values_is_refused_by_name(tmp_path: Path, declared: str, stored: str):
    columns = columns_of({"X": declared})
    rows = stage(tmp_path / "r.parquet", columns, [])
    with pytest.raises(ExtractError, match=r"Column X is .* the extract stores it as"):
        replace_keys(
            only_column(tmp_path, stored), tmp_path / "n.hyper", key=["X"], keys=rows, rows=rows, columns=columns
        )


def test_a_key_that_the_extract_stores_inexactly_is_refused(tmp_path: Path):
    columns = columns_of({"X": "NUMBER(38,10)"})
    keys = stage(tmp_path / "k.parquet", columns, [(Decimal(1),)])
    with pytest.raises(ExtractError, match="different keys can look the same"):
        replace_keys(
            only_column(tmp_path, "DOUBLE PRECISION"),
            tmp_path / "n.hyper",
            key=["X"],
            keys=keys,
            rows=[],
            columns=columns,
        )


def test_a_number_too_large_for_the_extract_names_its_column_and_leaves_the_target_alone(tmp_path: Path):
    base = tmp_path / "b.hyper"
    run(base, 'CREATE SCHEMA "Extract"', 'CREATE TABLE "Extract"."Extract" ("ID" BIGINT, "QTY" INTEGER)', create=True)
    columns = columns_of({"ID": "NUMBER(38,0)", "QTY": "NUMBER(38,0)"})
    rows = stage(tmp_path / "r.parquet", columns, [(3_000_000_000, 3_000_000_000)])
    before = base.read_bytes()
    with pytest.raises(
        ExtractError, match=r"Values of QTY \(bigint into INTEGER\) do not fit .*overflow.*Nothing was replaced"
    ):
        replace_keys(base, base, key=["ID"], keys=[], rows=rows, columns=columns)
    assert base.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_column_that_only_one_side_has_is_refused_by_name(tmp_path: Path, base: Path):
    more = columns_of({"ID": "NUMBER(38,0)", "REGION": "VARCHAR", "AMOUNT": "NUMBER(12,2)", "COLOUR": "VARCHAR"})
    with pytest.raises(ExtractError, match="has no column COLOUR, which the source has"):
        replace_keys(base, base, key=["ID"], keys=[], rows=[], columns=more)
    with pytest.raises(ExtractError, match="The source has no column AMOUNT"):
        replace_keys(base, base, key=["ID"], keys=[], rows=[], columns=COLUMNS[:2])
    with pytest.raises(ExtractError, match="Rows are purged by NOWHERE"):
        replace_keys(base, base, key=["NOWHERE"], keys=[], rows=[], columns=COLUMNS)
    with pytest.raises(ExtractError, match="No key was named"):
        replace_keys(base, base, key=[], keys=[], rows=[], columns=COLUMNS)


@pytest.mark.parametrize("version", [1, 3])
def test_the_file_version_stays(tmp_path: Path, version: int):
    create_extract(tmp_path / "b.hyper", COLUMNS, [], file_version=version)
    replace_keys(tmp_path / "b.hyper", tmp_path / "n.hyper", key=["ID"], keys=[], rows=[], columns=COLUMNS)
    assert describe(tmp_path / "n.hyper").file_version == version


SLICED = columns_of(
    {"DAY": "DATE", "SEEN": "TIMESTAMP_NTZ", "MOMENT": "TIMESTAMP_TZ", "N": "NUMBER(38,0)", "REGION": "VARCHAR"}
)
# An empty text, and one with a backslash, are in no slice.
REGIONS = ["EU", "eu", "", "N\\S", "O'Higgins"]


@pytest.fixture
def sliced(tmp_path: Path) -> Path:
    days = [date(2023, 12, 31), date(2024, 1, 1), date(2024, 1, 31), date(2024, 2, 1), date(2024, 3, 1)]
    rows: list[tuple[Any, ...]] = [
        (
            day,
            datetime(day.year, day.month, day.day),
            datetime(day.year, day.month, day.day, 2, tzinfo=UTC),
            number,
            REGIONS[number],
        )
        for number, day in enumerate(days)
    ]
    rows.append((None, None, None, 5, None))
    create_extract(tmp_path / "s.hyper", SLICED, stage(tmp_path / "s.parquet", SLICED, rows))
    return tmp_path / "s.hyper"


@pytest.mark.parametrize(
    ("ranges", "left"),
    [
        (SliceRanges("DAY", (("2024-01-01", "2024-02-01"),)), [0, 3, 4, 5]),
        (SliceRanges("SEEN", (("2024-01-01", "2024-02-01"), ("2024-03-01", "2024-04-01"))), [0, 3, 5]),
        (SliceRanges("MOMENT", (("2024-01-01", "2024-02-01"),)), [0, 3, 4, 5]),
        (SliceRanges("MOMENT", (("2024-01-01", "2024-02-01"),), zone="America/New_York"), [0, 1, 4, 5]),
        (SliceRanges("DAY", (), nulls=True), [0, 1, 2, 3, 4]),
        (SliceRanges("DAY", (("2024-02-01", None),), nulls=True), [0, 1, 2]),
        (SliceRanges("DAY", ()), [0, 1, 2, 3, 4, 5]),
        (SliceValues("REGION", ("EU", "O'Higgins")), [1, 2, 3, 5]),
        (SliceValues("REGION", (None, "eu")), [0, 4]),
        (SliceValues("N", ("1", "5", "x")), [0, 2, 3, 4]),
        (SliceValues("N", ()), [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_whole_slices_are_replaced_where_there_is_no_row_key(
    tmp_path: Path, sliced: Path, ranges: SliceRanges | SliceValues, left: list[int]
):
    rows = stage(tmp_path / "r.parquet", SLICED, [(None, None, None, 99, None)])
    applied = replace_slices(sliced, tmp_path / "n.hyper", ranges=ranges, rows=rows, columns=SLICED)
    assert sorted(n for (n,) in bag(tmp_path / "n.hyper", columns='"N"')) == [*left, 99]
    assert applied.purged == 6 - len(left)


def test_the_edge_of_a_slice_is_an_iso_date(tmp_path: Path, sliced: Path):
    with pytest.raises(ExtractError, match="is not the edge of a slice"):
        replace_slices(sliced, sliced, ranges=SliceRanges("DAY", (("1; DROP", "x"),)), rows=[], columns=SLICED)
    with pytest.raises(ExtractError, match="it is integer"):
        replace_slices(sliced, sliced, ranges=SliceRanges("N", ()), rows=[], columns=SLICED)


SMALL = (Column("CASE", Kind.INTEGER), Column("A", Kind.INTEGER), Column("B", Kind.TEXT), Column("V", Kind.INTEGER))
KEYED = SMALL[:3]
small_rows = st.lists(
    st.tuples(st.sampled_from([1, 2, None]), st.sampled_from(["x", "X", "", None]), st.integers(0, 2)), max_size=8
)
small_keys = st.lists(st.tuples(st.sampled_from([1, 2, 3, None]), st.sampled_from(["x", "", None])), max_size=5)
numbers = count()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=st.lists(st.tuples(small_rows, small_rows, small_keys), min_size=1, max_size=6), width=st.sampled_from([2, 3])
)
def test_replacing_by_key_equals_its_definition_as_bags(tmp_path: Path, cases: list, width: int):
    """Several cases share a file, each under its number, because opening files is what takes the time."""
    extract, fresh, keys = (
        [(number, *row) for number, case in enumerate(cases) for row in case[part]] for part in range(3)
    )
    purged = {key[:width] for key in keys}
    fresh = [row for row in fresh if row[:width] in purged]
    folder = tmp_path / str(next(numbers))
    create_extract(folder / "base.hyper", SMALL, stage(folder / "base.parquet", SMALL, extract))
    replace_keys(
        folder / "base.hyper",
        folder / "next.hyper",
        key=[column.name for column in KEYED[:width]],
        keys=keys_file(folder, list(KEYED[:width]), [key[:width] for key in keys]),
        rows=stage(folder / "rows.parquet", SMALL, fresh),
        columns=SMALL,
    )
    assert bag(folder / "next.hyper") == Counter([row for row in extract if row[:width] not in purged] + fresh)
