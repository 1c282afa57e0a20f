"""Replacement by key or slice: a copy of the extract with the old rows of some keys, or slices, replaced by fresh ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.changes.difference import SLICE_KEY
from tir_dagster.errors import ExtractError, MachineError
from tir_dagster.files import copy_file, need_space, replaced_file, total_bytes
from tir_dagster.hyper.casts import Loaded, check_staged, pair_columns
from tir_dagster.hyper.engine import connect, parquet, quoted, unbroken
from tir_dagster.hyper.hyperfile import append_rows, check_count, describe, look_at
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.snowflake.columns import Column

# Purged rows keep their space until a rebuild, and new ones grow when they leave Parquet's encodings.
_GROWTH = 4


@dataclass(frozen=True)
class Applied:
    """The row counts of one replacement: before - purged + appended = after, as read back from the closed file."""

    before: int
    purged: int
    appended: int
    after: int
    bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Replacement:
    """Files with replaced keys, and files with their new rows."""

    keys: tuple[Path, ...]
    rows: tuple[Path, ...]


@dataclass(frozen=True)
class Spare:
    """An older, unused file of the same extract: after some replacements it equals the base."""

    extract: Path
    # All replacements since, the oldest first, and the number of rows after them.
    since: tuple[Replacement, ...]
    rows: int


class _OutOfStepError(Exception):
    """The spare file does not equal the base."""


def replace_keys(
    base: Path,
    target: Path,
    *,
    key: Sequence[str],
    keys: Sequence[Path],
    rows: Sequence[Path],
    columns: Sequence[Column],
    names: Mapping[str, str] | None = None,
    spare: Spare | None = None,
) -> Applied:
    """Write `target`: base without the rows whose key is in the `keys` files, with the rows of the `rows` files.

    Keys are bags of values compared null-safely; the caller promises that every row's key is among the keys. `base`
    is not touched, unless it is the target, which is replaced in one step. `names` gives a column's name in the
    extract where it differs from the source's. A `spare` is used up instead of a copy of the base.
    """
    if not key:
        raise ExtractError(f"{base}: no key was named to purge by. Name the row key, or replace whole slices.")

    def parts(loaded: Sequence[Loaded]) -> list[Loaded]:
        return [_of(loaded, name, base) for name in key]

    def condition(loaded: Sequence[Loaded]) -> str | None:
        return key_condition(parts(loaded), keys)

    def begin(beside: Path) -> None:
        assert spare is not None
        spare.extract.rename(beside)

    def catch_up(connection: Any, table: str, loaded: Sequence[Loaded]) -> int:
        assert spare is not None
        return _catch_up(connection, table, loaded, parts(loaded), spare, path=base)

    if spare is not None:
        try:
            return _replace(
                *(base, target),
                condition=condition,
                columns=columns,
                names=names,
                rows=rows,
                begin=begin,
                catch_up=catch_up,
            )
        except MachineError:
            raise
        except (_OutOfStepError, ExtractError, OSError):
            # The spare only saves a copy: it is used up now, and the base is unchanged.
            pass
    return _replace(base, target, condition=condition, columns=columns, names=names, rows=rows)


def _catch_up(
    connection: Any, table: str, loaded: Sequence[Loaded], parts: Sequence[Loaded], spare: Spare, *, path: Path
) -> int:
    """Make the spare file equal to the base, with one DELETE for all keys; return the number of its rows."""
    every = [file for replacement in spare.since for file in replacement.keys]
    _purge(connection, table, key_condition(parts, every))
    for place, replacement in enumerate(spare.since):
        later = [file for later_replacement in spare.since[place + 1 :] for file in later_replacement.keys]
        append_rows(
            connection, table, loaded, replacement.rows, path=path, unless=_keyed_rows(parts, later) if later else None
        )
    rows = int(connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table}"))
    if rows != spare.rows:
        raise _OutOfStepError(f"{spare.extract}: {rows} rows instead of {spare.rows}")
    return rows


def _keyed_rows(parts: Sequence[Loaded], keys: Sequence[Path]) -> Callable[[str], str]:
    """Return a function that restricts a FROM clause to staged rows whose key is in none of these files."""
    same = " AND ".join(f"k.k{number} IS NOT DISTINCT FROM s.tir_k{number}" for number in range(len(parts)))
    key_columns = ", ".join(f"{part.key} AS tir_k{number}" for number, part in enumerate(parts))

    def rows(files: str) -> str:
        return (
            f"(SELECT *, {key_columns} FROM {files}) AS s"
            f" WHERE NOT EXISTS (SELECT 1 FROM ({key_select(parts, keys)}) AS k WHERE {same})"
        )

    return rows


def replace_slices(
    base: Path,
    target: Path,
    *,
    ranges: SliceRanges | SliceValues,
    rows: Sequence[Path],
    columns: Sequence[Column],
    names: Mapping[str, str] | None = None,
) -> Applied:
    """The same for a table without a row key: the rows of whole slices are replaced."""

    def condition(loaded: Sequence[Loaded]) -> str | None:
        return ranges.condition(_of(loaded, ranges.column, base))

    return _replace(base, target, condition=condition, columns=columns, names=names, rows=rows)


def least_of_keys(
    path: Path,
    column: str,
    *,
    key: Sequence[str],
    keys: Sequence[Path],
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
) -> tuple[str | None, int]:
    """The smallest value of a column of the extract among the rows of these keys, as text; how many of them have none."""
    return _least(
        path, column, lambda loaded: key_condition([_of(loaded, name, path) for name in key], keys), columns, names
    )


def least_of_slices(
    path: Path,
    column: str,
    *,
    ranges: SliceRanges | SliceValues,
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
) -> tuple[str | None, int]:
    """The same among the rows of these slices."""
    return _least(path, column, lambda loaded: ranges.condition(_of(loaded, ranges.column, path)), columns, names)


def _least(
    path: Path,
    column: str,
    condition: Callable[[Sequence[Loaded]], str | None],
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
) -> tuple[str | None, int]:
    with connect(path) as connection:
        table = look_at(connection, path)
        test = condition(pair_columns(columns, table.columns, path=path, names=names)) or "FALSE"
        name = f"t.{quoted(column)}"
        zoned = any(file_column.name == column and file_column.type == "TIMESTAMPTZ" for file_column in table.columns)
        moment = f"{name} AT TIME ZONE 'UTC'" if zoned else name
        query = f"SELECT CAST(MIN({moment}) AS TEXT), COUNT(*) - COUNT({name}) FROM {table.sql} AS t WHERE {test}"
        least, nulls = connection.execute_list_query(query)[0]
    return least, int(nulls)


def _of(loaded: Sequence[Loaded], name: str, base: Path) -> Loaded:
    column = next((candidate for candidate in loaded if candidate.source.name == name), None)
    if column is None:
        raise ExtractError(
            f"{base}: rows are purged by {name}, which is no column of the extract. Add it to `columns:` in the spec."
        )
    return column


def key_condition(parts: Sequence[Loaded], keys: Sequence[Path]) -> str | None:
    """The condition for rows, called t, whose key is in one of the files.

    Measured on 3M rows, the null-safe EXISTS is as fast as IN, which never finds a NULL: one way for all keys.
    """
    if not keys:
        return None
    same = " AND ".join(
        f"k.k{number} IS NOT DISTINCT FROM t.{part.stored.comparable}" for number, part in enumerate(parts)
    )
    return f"EXISTS (SELECT 1 FROM ({key_select(parts, keys)}) AS k WHERE {same})"


def key_select(parts: Sequence[Loaded], files: Sequence[Path]) -> str:
    """A SELECT of the keys in these files, as k0, k1, … in the types of the extract.

    Files of a comparison hold them in this form already; staged rows hold them under the source's names and types.
    """
    import pyarrow.parquet as pq

    stored = [file for file in files if "k0" in pq.read_schema(file).names]
    staged = [file for file in files if file not in stored]
    listed = ", ".join(f"k{number}" for number in range(len(parts) or 1))
    selects = [f"SELECT {listed} FROM {parquet(stored)}"] if stored else []
    selects += [f"SELECT {staged_key(parts)} FROM {parquet(staged)}"] if staged else []
    return " UNION ALL ".join(selects)


def staged_key(parts: Sequence[Loaded]) -> str:
    """The key of a staged row, in the types of the extract; without a row key, its slice."""
    return (
        ", ".join(f"{part.key} AS k{number}" for number, part in enumerate(parts)) or f"{quoted(SLICE_KEY.name)} AS k0"
    )


def _replace(
    base: Path,
    target: Path,
    *,
    condition: Callable[[Sequence[Loaded]], str | None],
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
    rows: Sequence[Path],
    begin: Callable[[Path], None] | None = None,
    catch_up: Callable[[Any, str, Sequence[Loaded]], int] | None = None,
) -> Applied:
    """Copy, then purge and append in one transaction, then read back what the closed file holds.

    `begin` puts another file there instead of the copy, and `catch_up` makes it what the base is, in the same transaction.
    """
    if not base.is_file():
        raise ExtractError(f"There is no extract at {base}. Run a full refresh to make one.")
    check_staged(rows, [column.name for column in columns])
    need_space(target.parent, (0 if begin else base.stat().st_size) + _GROWTH * total_bytes(rows))
    clock = _Clock()
    with replaced_file(target) as beside:
        if begin is not None:
            begin(beside)
        else:
            copy_file(base, beside)
        clock.lap("copy")
        with unbroken(target):
            with connect(beside) as connection:
                table = look_at(connection, beside)
                loaded = pair_columns(columns, table.columns, path=base, names=names)
                connection.execute_command("BEGIN TRANSACTION")
                before = table.rows
                if catch_up is not None:
                    before = catch_up(connection, table.sql, loaded)
                    clock.lap("catch up")
                purged = _purge(connection, table.sql, condition(loaded))
                clock.lap("purge")
                appended = append_rows(connection, table.sql, loaded, rows, path=base)
                connection.execute_command("COMMIT")
                clock.lap("append")
            # Closing is what makes it durable, COMMIT is not.
            clock.lap("close")
            result = describe(beside)
        check_count(target, result.rows, before - purged + appended)
        clock.lap("check")
    clock.lap("sync")
    return Applied(before, purged, appended, result.rows, result.bytes, clock.seconds)


def _purge(connection: Any, table: str, condition: str | None) -> int:
    if condition is None:
        return 0
    return int(connection.execute_command(f"DELETE FROM {table} AS t WHERE {condition}") or 0)


class _Clock:
    """Seconds by stage, for the run's metadata."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 3)
        self._last = now
