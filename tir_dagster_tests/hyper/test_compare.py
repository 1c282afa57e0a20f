# ruff: noqa: DTZ001 - timestamps without a zone are part of what is tested
"""Candidates beside the extract: equal is equal, different is different, as bags, null-safely, in the stored types."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tir_dagster.changes.difference import ROW_MARK, SLICE_KEY, Difference, Forced
from tir_dagster.changes.hints import And, Between, Equal, In, KeyList, Not, Or
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.hyperfile import create_extract, create_like
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import bag, columns_of, run, stage
from tir_dagster_tests.hyper.replacing import replace_keys

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "DAY": "DATE", "NAME": "VARCHAR"})
MONTHS = SliceBy("DAY", "month")
NOTHING = Forced()
SHAPE = ExtractShape(COLUMNS, ("ID",), MONTHS)
ROWS = [
    (1, date(2024, 1, 5), "one"),
    (2, date(2024, 1, 6), "two"),
    (2, date(2024, 2, 6), "two again"),
    (3, date(2024, 2, 7), None),
    (None, None, "nobody"),
]


def extract_of(folder: Path, rows: list[tuple[Any, ...]], columns=COLUMNS) -> Path:
    path = folder / "base.hyper"
    create_extract(path, columns, stage(folder / "base.parquet", columns, rows))
    return path


def candidates(folder: Path, rows: list[tuple[Any, ...]], deleted: list[Any] = (), columns=COLUMNS) -> list[Path]:
    """Staged rows of candidate keys, and keys that have no row any more."""
    marked = [(*row, 1) for row in rows] + [(key, *[None] * len(columns)) for key in deleted]
    name = f"staged-{len(list(folder.glob('staged-*')))}.parquet"
    return stage(folder / name, [*columns, ROW_MARK], marked, bookkeeping=False)


def compared(base: Path, files: list[Path], folder: Path, shape=SHAPE, forced=NOTHING, **more) -> Difference:
    with comparing(base, shape) as comparison:
        comparison.add(files, **more)
        return comparison.decide(forced, folder / "change")


def keys_in(folder: Path) -> list[tuple]:
    table = pq.read_table(folder / "change" / "keys")
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


def rows_in(folder: Path) -> Counter:
    columns = [column.name for column in COLUMNS]
    return Counter(
        tuple(row.values()) for row in pq.read_table(folder / "change" / "rows", columns=columns).to_pylist()
    )


def test_candidates_whose_rows_are_the_same_are_no_changes(tmp_path: Path):
    difference = compared(extract_of(tmp_path, ROWS), candidates(tmp_path, ROWS), tmp_path)

    assert difference == Difference(0, {}, {})
    assert keys_in(tmp_path) == []


def test_changed_new_moved_and_deleted_keys_are_found_with_their_slices(tmp_path: Path):
    fresh = [
        (1, date(2024, 3, 5), "one"),
        (2, date(2024, 1, 6), "two"),
        (2, date(2024, 2, 6), "two again"),
        (9, None, "new"),
    ]

    difference = compared(extract_of(tmp_path, ROWS), candidates(tmp_path, fresh, deleted=[3, 7]), tmp_path)

    assert difference == Difference(3, {"2024-01": 1, "2024-02": 1}, {"2024-03": 1, None: 1})
    assert keys_in(tmp_path) == [(1,), (3,), (9,)]
    assert rows_in(tmp_path) == Counter([fresh[0], fresh[3]])


def test_a_key_with_one_row_more_or_less_differs(tmp_path: Path):
    doubled = [(1, date(2024, 1, 5), "one")] * 2 + [(2, date(2024, 1, 6), "two")] + [(None, None, "nobody")] * 2

    difference = compared(extract_of(tmp_path, ROWS), candidates(tmp_path, doubled), tmp_path)

    assert keys_in(tmp_path) == [(1,), (2,), (None,)]
    assert difference == Difference(3, {"2024-01": 2, "2024-02": 1, None: 1}, {"2024-01": 3, None: 2}, 2, 1)


def test_where_everything_was_read_what_is_missing_is_gone(tmp_path: Path):
    difference = compared(extract_of(tmp_path, ROWS), candidates(tmp_path, ROWS[1:]), tmp_path, everything=True)

    assert difference == Difference(1, {"2024-01": 1}, {})
    assert compared(extract_of(tmp_path, ROWS), [], tmp_path, everything=True).purged == {
        "2024-01": 2,
        "2024-02": 2,
        None: 1,
    }


def test_pending_keys_and_whole_slices_are_replaced_whatever_the_rows_say(tmp_path: Path):
    base, files = extract_of(tmp_path, ROWS), candidates(tmp_path, ROWS)
    pending = stage(tmp_path / "pending.parquet", [COLUMNS[0]], [(3,), (8,)], bookkeeping=False)

    difference = compared(base, files, tmp_path, forced=Forced(tuple(pending), ("2024-01", None)))

    assert keys_in(tmp_path) == [(1,), (2,), (3,), (8,), (None,)]
    assert difference == Difference(
        5, {"2024-01": 2, "2024-02": 2, None: 1}, {"2024-01": 2, "2024-02": 2, None: 1}, 1, 1
    )


def test_keys_that_nobody_staged_are_named(tmp_path: Path):
    pending = stage(tmp_path / "pending.parquet", [COLUMNS[0]], [(1,), (3,), (None,)], bookkeeping=False)
    with comparing(extract_of(tmp_path, ROWS), SHAPE) as comparison:
        assert len(comparison.unstaged_keys_in_slices(["2024-02"], most=9)) == 2
        comparison.add(candidates(tmp_path, ROWS[:2]))
        assert comparison.unstaged_keys_in_slices(["2024-02"], most=9) == [(3,)]
        assert comparison.unstaged_keys_in_slices([None, "2024-01"], most=9) == [(None,)]
        assert sorted(comparison.unstaged_keys_in_files(pending, most=9), key=repr) == [(3,), (None,)]
        assert len(comparison.unstaged_keys_in_files(pending, most=1)) == 1


@pytest.mark.parametrize(
    ("scope", "keys"),
    [
        (Equal("ID", 1), [(1,)]),
        (Equal("DAY", None), [(None,)]),
        (Not(In("ID", (1, 2))), [(3,), (None,)]),
        (Between("DAY", date(2024, 1, 6), date(2024, 2, 6)), [(2,)]),
        (Between("ID", 2, 10**30), [(2,), (3,)]),
        (And((Equal("ID", None), Not(Equal("DAY", date(2024, 1, 5))))), [(None,)]),
        (Or((Equal("DAY", date(2024, 1, 5)), Equal("ID", 3))), [(1,), (3,)]),
        (KeyList(("ID",), ((1,), (None,), (7,))), [(1,), (None,)]),
    ],
    ids=repr,
)
def test_what_a_hint_describes_is_found_among_the_extracts_own_columns(tmp_path: Path, scope, keys):
    with comparing(extract_of(tmp_path, ROWS), SHAPE) as comparison:
        assert sorted(comparison.unstaged_keys_in_scope(scope, most=9), key=repr) == keys
        comparison.add(candidates(tmp_path, [], deleted=[key for (key,) in keys]))
        assert comparison.unstaged_keys_in_scope(scope, most=9) == []


def test_without_a_row_key_slices_are_compared(tmp_path: Path):
    shape = ExtractShape(COLUMNS, (), MONTHS)
    rows = [
        (*ROWS[0], 1, "2024-01"),
        (*ROWS[1], 1, "2024-01"),
        (None, None, None, None, "2024-02"),
        (None, None, "other", 1, None),
    ]
    files = stage(tmp_path / "slices.parquet", [*COLUMNS, ROW_MARK, SLICE_KEY], rows, bookkeeping=False)

    difference = compared(extract_of(tmp_path, ROWS), files, tmp_path, shape)

    assert keys_in(tmp_path) == [("2024-02",), (None,)]
    assert difference == Difference(2, {"2024-02": 2, None: 1}, {None: 1})


EVERY_TYPE = columns_of(
    {
        "K": "NUMBER(38,0)", "WIDE": "NUMBER(38,0)", "D": "NUMBER(18,4)", "DW": "NUMBER(38,5)", "F": "FLOAT", "B": "BOOLEAN",
        "T": "VARCHAR", "DT": "DATE", "TM": "TIME", "TS": "TIMESTAMP_NTZ", "TZ": "TIMESTAMP_TZ", "J": "VARIANT",
    }
)  # fmt: skip
_LOW = (
    1, -(2**63), Decimal("-99999999999999.9999"), Decimal("0.00001"), -0.0, False, "", date(1, 1, 1), "00:00:00",
    datetime(1, 1, 1), datetime(1, 1, 1, tzinfo=UTC), "{}",
)  # fmt: skip
_HIGH = (
    2, 2**63 - 1, Decimal("99999999999999.9999"), Decimal("1e32"), math.inf, True, "Ä😀\\'\"", date(9999, 12, 31),
    "23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999999), datetime(9999, 12, 31, tzinfo=UTC), '{"a": [1, null]}',
)  # fmt: skip
_NOTHING = (3, *[None] * (len(EVERY_TYPE) - 1))


@pytest.mark.parametrize("row", [_LOW, _HIGH, _NOTHING, (*_LOW[:4], math.nan, *_LOW[5:])])
def test_every_type_at_its_extremes_equals_itself(tmp_path: Path, row):
    shape = ExtractShape(EVERY_TYPE, ("K",), SliceBy("TZ", "month", "Europe/Berlin"))

    difference = compared(
        extract_of(tmp_path, [row], EVERY_TYPE), candidates(tmp_path, [row], columns=EVERY_TYPE), tmp_path, shape
    )

    assert difference.keys == 0


_NEXT = {
    "WIDE": (-(2**63) + 1, 2**63 - 2),
    "D": (Decimal("-99999999999999.9998"), Decimal("99999999999999.9998")),
    "DW": (Decimal("0.00002"), None),
    "F": (5e-324, 1.7976931348623157e308),
    "B": (None, False),
    "T": (None, "ä😀\\'\""),
    "DT": (date(1, 1, 2), date(9999, 12, 30)),
    "TM": ("00:00:00.000001", "23:59:59.999998"),
    "TS": (datetime(1, 1, 1, 0, 0, 0, 1), None),
    "TZ": (datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=UTC), None),
    "J": ("[]", "null"),
}


@pytest.mark.parametrize("name", _NEXT)
def test_every_type_differs_from_its_nearest_neighbour_and_from_null(tmp_path: Path, name):
    shape = ExtractShape(EVERY_TYPE, ("K",), SliceBy())
    place = [column.name for column in EVERY_TYPE].index(name)
    base = extract_of(tmp_path, [_LOW, _HIGH], EVERY_TYPE)
    for row, other in zip((_LOW, _HIGH), _NEXT[name], strict=True):
        near = (*row[:place], other, *row[place + 1 :])
        assert compared(base, candidates(tmp_path, [near], columns=EVERY_TYPE), tmp_path, shape).keys == 1, (
            name,
            other,
        )


def test_minus_zero_is_zero_and_nan_is_nan(tmp_path: Path):
    columns = columns_of({"K": "NUMBER(38,0)", "F": "FLOAT"})
    base = extract_of(tmp_path, [(1, -0.0), (2, math.nan)], columns)
    shape = ExtractShape(columns, ("K",), SliceBy())

    assert compared(base, candidates(tmp_path, [(1, 0.0), (2, -math.nan)], columns=columns), tmp_path, shape).keys == 0
    assert compared(base, candidates(tmp_path, [(1, 1e-300), (2, None)], columns=columns), tmp_path, shape).keys == 2


def test_an_extract_that_does_not_tell_capitals_apart_is_compared_to_the_letter(tmp_path: Path):
    columns = columns_of({"K": "VARCHAR", "T": "VARCHAR"})
    template = tmp_path / "template.hyper"
    run(
        template,
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."Extract" ("K" TEXT COLLATE "en_US_CI", "T" TEXT COLLATE "en_US_CI")',
        create=True,
    )
    base = tmp_path / "base.hyper"
    create_like(base, template, columns, stage(tmp_path / "base.parquet", columns, [("a", "x"), ("A", "y")]))
    shape = ExtractShape(columns, ("K",), SliceBy())

    difference = compared(base, candidates(tmp_path, [("a", "X")], deleted=["A"], columns=columns), tmp_path, shape)

    assert (difference.keys, difference.purged) == (2, {"all": 2})
    assert compared(base, candidates(tmp_path, [("a", "x"), ("A", "y")], columns=columns), tmp_path, shape).keys == 0


VALUES = st.tuples(
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from([date(2024, 1, 1), date(2024, 2, 1), None]),
    st.sampled_from(["a", "b", None]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    old=st.lists(VALUES, max_size=6),
    new=st.lists(VALUES, max_size=6),
    proposed=st.sets(st.sampled_from([1, 2, 3, 7, None])),
)
def test_replacing_what_differs_among_the_candidates_gives_the_source(tmp_path_factory, old, new, proposed):
    """Rows of keys that nobody proposed stay; those of all proposed keys are the source's."""
    folder = tmp_path_factory.mktemp("property")
    base = extract_of(folder, old)
    fresh = [row for row in new if row[0] in proposed]
    deleted = [key for key in proposed if key not in {row[0] for row in fresh}]

    difference = compared(base, candidates(folder, fresh, deleted), folder)
    applied = replace_keys(
        base,
        folder / "next.hyper",
        key=("ID",),
        keys=sorted((folder / "change" / "keys").glob("*.parquet")),
        rows=sorted((folder / "change" / "rows").glob("*.parquet")),
        columns=COLUMNS,
    )

    expected = [row for row in old if row[0] not in proposed] + fresh
    assert bag(folder / "next.hyper", columns='"ID", CAST("DAY" AS TEXT), "NAME"') == Counter(
        (key, day and day.isoformat(), name) for key, day, name in expected
    )
    changed = {
        key for key in proposed if Counter(r for r in old if r[0] == key) != Counter(r for r in fresh if r[0] == key)
    }
    assert difference.keys == len(changed)
    assert (applied.purged, applied.appended) == (sum(difference.purged.values()), sum(difference.appended.values()))
