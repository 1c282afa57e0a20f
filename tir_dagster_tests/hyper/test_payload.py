"""What `patch` sends: applied as a server does, with a plain `=`, it turns the published file into the new extract."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tableauhyperapi import Date

from tir_dagster.changes.change_set import NO_SLICE_KEY, ChangeSet
from tir_dagster.changes.plan import SourceState
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.casts import PURGE_KEY
from tir_dagster.hyper.content import content_digest, content_fingerprints
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.hyperfile import create_extract, describe
from tir_dagster.hyper.payload import (
    Payload,
    carries_keys,
    needs_key_column,
    row_digest,
    same_layout,
    with_key_column,
    write_payloads,
)
from tir_dagster.hyper.replace import ExtractShape, StagedChange
from tir_dagster.snowflake.columns import Kind
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster_tests.hyper.helpers import bag, columns_of, run, stage
from tir_dagster_tests.hyper.replacing import replace_change

LARGE = 1 << 30
PLAIN = (Kind.TEXT, Kind.INTEGER, Kind.DECIMAL, Kind.BOOLEAN, Kind.DATE, Kind.TIMESTAMP)
COLUMNS = columns_of({"ID": "NUMBER(38,0)", "F": "FLOAT", "S": "VARCHAR", "D": "DATE", "V": "VARCHAR"})
WHOLE = [replace(COLUMNS[0], nullable=False), *COLUMNS[1:]]
MONTHS = SliceBy("D", "month")
SHAPES = {
    "a key that is never NULL": ExtractShape(tuple(WHOLE), ("ID",), MONTHS),
    "a key that may be NULL": ExtractShape(tuple(COLUMNS), ("ID",), MONTHS),
    "a key of several columns": ExtractShape(tuple(COLUMNS), ("S", "F", "ID"), SliceBy()),
    "no key but months": ExtractShape(tuple(COLUMNS), (), MONTHS),
}
Rows = Sequence[tuple[Any, ...]]


def key_of(shape: ExtractShape, row: tuple[Any, ...]) -> tuple[Any, ...]:
    by_name = dict(zip([column.name for column in shape.columns], row, strict=True))
    if not shape.key:
        return (by_name["D"].strftime("%Y-%m") if by_name["D"] else None,)
    return tuple(by_name[name] for name in shape.key)


class Case:
    """An extract, what it becomes, and the change set between them."""

    def __init__(self, folder: Path, shape: ExtractShape, before: Rows, after: Rows, *, keyed: bool = False) -> None:
        folder.mkdir()
        self.keyed = keyed
        self.folder, self.shape, self.after = folder, shape, after
        old, new = by_key(shape, before), by_key(shape, after)
        changed = [key for key in {*old, *new} if old[key] != new[key]]
        fresh = [row for key in changed for row in new[key].elements()]
        stage(folder / "rows" / "part-0.parquet", list(shape.columns), fresh)
        if shape.key:
            parts = [column for name in shape.key for column in shape.columns if column.name == name]
            stage(folder / "keys" / "part-0.parquet", parts, changed, bookkeeping=False)
        touched = {NO_SLICE_KEY if key[0] is None else str(key[0]): 1 for key in changed} if not shape.key else {}
        known = SourceState("t", "d", "s", "w")
        self.change_set = ChangeSet(
            "one", "orders", None, "t", known, "changes", "incremental", None, len(changed), 0, touched, {}, {}, None
        )
        self.base, self.new, self.server = (folder / f"{name}.hyper" for name in ("base", "new", "server"))
        create_extract(self.base, shape.columns, stage(folder / "base.parquet", list(shape.columns), before))
        replace_change(self.base, self.new, self.change_set, folder, shape)

    def publish(self) -> bool:
        """The base as it is published; whether its rows carry a key column."""
        self.keyed = needs_key_column(self.shape) or self.keyed
        if self.keyed:
            with_key_column(self.base, self.server, [self.shape])
        else:
            self.server.write_bytes(self.base.read_bytes())
        return self.keyed

    def payloads(self, *, keyed: bool, most_bytes: int = LARGE) -> list[Payload]:
        change = StagedChange(self.change_set, self.folder, self.shape)
        return write_payloads(self.new, self.folder, [change], keyed=keyed, most_bytes=most_bytes)

    def apply(self, payload: Payload) -> None:
        """What a server does with a batch of ours."""
        with connect(self.server) as connection:
            connection.catalog.attach_database(str(payload.path), alias="p")
            (part,) = payload.tables
            target = quoted("server", *part.table)
            keys, rows = (quoted("p", "Extract", name) for name in (part.keys, part.rows))
            same = " AND ".join(f"k.{quoted(name)} = t.{quoted(name)}" for name in part.key_columns)
            connection.execute_command(
                f"DELETE FROM {target} AS t WHERE EXISTS (SELECT 1 FROM {keys} AS k WHERE {same})"
            )
            listed = ", ".join(quoted(name) for name in _names(connection, rows))
            connection.execute_command(f"INSERT INTO {target} ({listed}) SELECT {listed} FROM {rows}")

    def is_right(self) -> bool:
        prints = [content_digest(content_fingerprints(path, self.shape)) for path in (self.server, self.new)]
        return prints[0] == prints[1] and seen(self.new) == Counter(self.after)


def seen(path: Path) -> Counter[tuple[Any, ...]]:
    """The rows without our own column, days as Python's."""
    listed = ", ".join(quoted(column.name) for column in COLUMNS)
    rows = bag(path, columns=listed).elements()
    return Counter(tuple(value.to_date() if isinstance(value, Date) else value for value in row) for row in rows)


def by_key(shape: ExtractShape, rows: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], Counter[tuple[Any, ...]]]:
    rows_by_key: dict[tuple[Any, ...], Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for row in rows:
        rows_by_key[key_of(shape, row)][row] += 1
    return rows_by_key


def _names(connection: Any, table: str) -> list[str]:
    with connection.execute_query(f"SELECT * FROM {table} LIMIT 0") as result:
        return [column.name.unescaped for column in result.schema.columns]


ROW = st.tuples(
    st.sampled_from([None, 0, 1, 12]),
    st.sampled_from([None, 0.0, -0.0, 0.1, 0.1 + 0.2, 1e300]),
    st.sampled_from([None, "", "-", "1:a", "a", "A"]),
    st.sampled_from([None, date(2025, 3, 1), date(2025, 3, 31), date(2025, 4, 1), date(9999, 12, 31)]),
    st.sampled_from([None, "x", "y"]),
)
_numbers = count(1)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(ROW, max_size=8), after=st.lists(ROW, max_size=8))
def test_the_published_file_becomes_the_new_extract(tmp_path: Path, name: str, before: Rows, after: Rows):
    shape = SHAPES[name]
    if not needs_key_column(shape):
        before, after = ([row for row in rows if row[0] is not None] for rows in (before, after))
    case = Case(tmp_path / str(next(_numbers)), shape, before, after)
    for payload in case.payloads(keyed=case.publish()):
        case.apply(payload)
    assert case.is_right()


def test_rows_that_carry_a_key_are_found_by_it_also_when_their_own_is_never_null_any_more(tmp_path: Path):
    row = (None, None, "s", date(2025, 3, 1), "v")
    case = Case(tmp_path / "case", SHAPES["a key that is never NULL"], [row], [(1, *row[1:])], keyed=True)
    assert case.publish()
    assert carries_keys(case.server, case.shape)
    for payload in case.payloads(keyed=True):
        case.apply(payload)
    assert case.is_right()
    assert carries_keys(case.server, case.shape)


def test_a_file_whose_key_column_lies_is_noticed(tmp_path: Path):
    case = Case(tmp_path / "case", SHAPES["a key that may be NULL"], orders([1, 2], "x"), [])
    case.publish()
    assert carries_keys(case.server, case.shape)
    assert not carries_keys(case.base, case.shape)
    run(case.server, f'UPDATE "Extract"."Extract" SET {quoted(PURGE_KEY)} = NULL WHERE "ID" = 1')
    assert not carries_keys(case.server, case.shape)


def test_files_are_alike_whose_columns_are_our_key_column_aside(tmp_path: Path):
    case = Case(tmp_path / "case", SHAPES["a key that may be NULL"], orders([1, 2], "x"), [])
    case.publish()
    assert same_layout(case.server, case.base)
    for number, declared in enumerate(("TEXT", 'TEXT COLLATE "en_US_CI"', "VARCHAR(9)")):
        listed = ", ".join(
            f"{quoted(column.name)} {column.hyper if column.name != 'V' else declared}" for column in COLUMNS
        )
        other = tmp_path / f"{number}.hyper"
        run(other, 'CREATE SCHEMA "Extract"', f'CREATE TABLE "Extract"."Extract" ({listed})', create=True)
        assert same_layout(other, case.base) == (declared == "TEXT")


def test_a_digest_of_rows_tells_what_sums_do_not(tmp_path: Path):
    columns = columns_of({"ID": "NUMBER(38,0)", "V": "VARCHAR", "J": "VARIANT"})
    shape = ExtractShape(columns, ("ID",), SliceBy())
    tables = [
        [(1, "a", "[1]"), (2, "b", None)],
        [(2, "b", None), (1, "a", "[1]")],
        [(1, "b", "[1]"), (2, "a", None)],
        [(1, "a", "[2]"), (2, "b", None)],
        [(1, "a", "[1]"), (2, "b", None), (2, "b", None)],
    ]
    extracts = [tmp_path / f"{number}.hyper" for number in range(len(tables))]
    for target, rows in zip(extracts, tables, strict=True):
        create_extract(target, columns, stage(target.with_suffix(".parquet"), list(columns), rows))
    assert len({content_digest(content_fingerprints(path, shape)) for path in extracts}) == 3
    first, again, *others = [row_digest(path, shape) for path in extracts]
    assert first == again
    assert first not in others
    with_key_column(extracts[0], tmp_path / "keyed.hyper", [shape])
    assert row_digest(tmp_path / "keyed.hyper", shape) == first


def orders(numbers: Sequence[int], value: str) -> list[tuple[Any, ...]]:
    return [(number, None, value * 50 + str(number * 7919), date(2025, 3, 1), value) for number in numbers]


@pytest.mark.parametrize("name", SHAPES)
def test_over_the_limit_each_part_has_whole_keys(tmp_path: Path, name: str):
    shape = SHAPES[name]
    before, after = orders(range(4000), "x"), [*orders(range(10), "x"), *orders(range(10, 5000), "y")]
    after = [(*row[:3], date(2025, 1 + row[0] % 12, 1), row[4]) for row in after]
    case = Case(tmp_path / "case", shape, before, after)
    old, new = by_key(shape, before), by_key(shape, after)
    keyed = case.publish()
    whole = case.payloads(keyed=keyed)
    limit = whole[0].bytes // 2
    parts = case.payloads(keyed=keyed, most_bytes=limit)
    assert len(whole) == 1
    assert len(parts) > 1
    assert all(part.bytes <= limit for part in parts)
    assert sum(part.rows for part in parts) == whole[0].rows
    for part in parts:
        case.apply(part)
        now = by_key(shape, seen(case.server).elements())
        assert all(now[key] in (old[key], new[key]) for key in {*old, *new, *now})
    assert case.is_right()


def test_a_key_that_is_too_large_for_the_server_is_told(tmp_path: Path):
    case = Case(tmp_path / "case", SHAPES["no key but months"], [], orders(range(4000), "x"))
    with pytest.raises(ExtractError, match=r"orders: the 4,000 rows of one key take \d+ MB, and the server takes 0 MB"):
        case.payloads(keyed=case.publish(), most_bytes=100_000)


def test_beside_a_huge_key_the_others_stay_together(tmp_path: Path):
    huge = [(7, None, f"{number * 7919}", date(2025, 3, 1), str(number)) for number in range(8000)]
    case = Case(tmp_path / "case", SHAPES["a key that is never NULL"], [], [*orders(range(2000), "x"), *huge])
    (whole,) = case.payloads(keyed=case.publish())
    parts = case.payloads(keyed=False, most_bytes=whole.bytes - 20_000)
    assert (sum(part.keys for part in parts), sum(part.rows for part in parts)) == (whole.keys, whole.rows)
    assert 1 < len({part.part for part in parts}) == len(parts) < 20
    for part in parts:
        part.path.unlink()
    with pytest.raises(ExtractError, match=r"the 8,001 rows of one key take"):
        case.payloads(keyed=False, most_bytes=whole.bytes // 2)
    assert len(list(case.folder.glob("payload-*"))) < 20


# Each key differs from the first one in one column only.
KEY_VALUES: dict[str, list[Any]] = {
    "VARCHAR": ["a", "A", "a ", " a", "", "-", "1:a", "é", "e\u0301", "ß", "ss", "\0", "a\0", "\U0001f600"],
    "NUMBER(38,0)": [0, -1, 2**63 - 1, -(2**63)],
    "NUMBER(12,2)": [Decimal("0.10"), Decimal("0.01"), Decimal("-0.10"), Decimal("9999999999.99")],
    "BOOLEAN": [True, False],
    "DATE": [date(2025, 3, 1), date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31)],
    "TIMESTAMP_NTZ": [datetime(2025, 3, 30, 2, 30), datetime(2025, 3, 30, 2, 30, 0, 1), datetime(1, 1, 1)],  # noqa: DTZ001
    "TIMESTAMP_TZ": [datetime(2025, 10, 26, hour, 30, tzinfo=UTC) for hour in (0, 1)],
    "TIME": ["00:00:00", "23:59:59.999999", "23:59:59.999998"],
    "FLOAT": [0.3, 0.1 + 0.2, 5e-324, -math.inf],
    "VARIANT": ['{"a":1}', "null"],
}


@pytest.mark.parametrize("nullable", [False, True], ids=["never NULL", "NULL or not"])
def test_keys_of_every_type_are_told_apart(tmp_path: Path, nullable: bool):
    all_columns = columns_of({**{kind: kind for kind in KEY_VALUES}, "V": "VARCHAR"})
    columns = tuple(replace(column, nullable=nullable) for column in all_columns if nullable or column.kind in PLAIN)
    names = tuple(column.name for column in columns[:-1])
    values = {name: [*KEY_VALUES[name], *([None] if nullable else [])] for name in names}
    first = {name: key_values[0] for name, key_values in values.items()}
    keys = list(dict.fromkeys(tuple({**first, name: value}.values()) for name in names for value in values[name]))
    before = [(*key, "x") for key in keys]
    after = [(*key, "y" if number % 3 else "x") for number, key in enumerate(keys) if number % 3 < 2]
    case = Case(tmp_path / "case", ExtractShape(columns, names, SliceBy()), before, after)
    assert case.publish() == nullable
    for payload in case.payloads(keyed=nullable):
        case.apply(payload)
    right = tmp_path / "right.hyper"
    create_extract(right, columns, stage(tmp_path / "right.parquet", list(columns), after))
    listed = ", ".join(quoted(column.name) for column in columns)
    assert bag(case.server, columns=listed) == bag(right)


def test_only_a_key_that_equals_itself_is_left_to_the_server():
    assert [needs_key_column(shape) for shape in SHAPES.values()] == [False, True, True, True]
    floats = replace(SHAPES["a key that is never NULL"], key=("F",), columns=(replace(COLUMNS[1], nullable=False),))
    assert needs_key_column(floats)


def test_the_key_column_is_ours_alone(tmp_path: Path):
    """What is compared and kept is the extract without it."""
    case = Case(tmp_path / "case", SHAPES["a key that may be NULL"], orders([1], "x"), orders([1], "y"))
    case.publish()
    assert [column.name for column in describe(case.server).columns][-1] == PURGE_KEY
    assert [column.name for column in describe(case.new).columns] == [column.name for column in COLUMNS]
    assert bag(case.server, columns=quoted(PURGE_KEY)) == Counter([("1:1",)])
