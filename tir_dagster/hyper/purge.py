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
from tir_dagster.hyper.hyperfile import ExtractTable, TableId, append_rows, check_count, describe, look_at
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
class Since:
    """What was replaced in a table since an older file: all replacements, the oldest first, and the number of rows after them."""

    replacements: tuple[Replacement, ...]
    rows: int


@dataclass(frozen=True)
class TableChange:
    """What replaces rows of a table: the rows that leave by a condition on its columns, and files with those that arrive."""

    columns: Sequence[Column]
    condition: Callable[[Sequence[Loaded]], str | None]
    rows: Sequence[Path]
    names: Mapping[str, str] | None = None
    table: TableId | None = None
    # The key, and how an older file of the extract becomes the base.
    key: Sequence[str] = ()
    since: Since | None = None


class _OutOfStepError(Exception):
    """The spare file does not equal the base."""


def by_key(
    key: Sequence[str],
    keys: Sequence[Path],
    rows: Sequence[Path],
    columns: Sequence[Column],
    *,
    names: Mapping[str, str] | None = None,
    table: TableId | None = None,
    since: Since | None = None,
) -> TableChange:
    """Replace the rows whose key is in the `keys` files by those of the `rows` files.

    Keys are bags of values compared null-safely; the caller promises that every row's key is among the keys. `names` gives a
    column's name in the extract where it differs from the source's.
    """
    if not key:
        raise ExtractError("No key was named to purge by. Name the row key, or replace whole slices.")

    def condition(loaded: Sequence[Loaded]) -> str | None:
        return key_condition([_of(loaded, name) for name in key], keys)

    return TableChange(columns, condition, rows, names, table, key, since)


def by_slice(
    ranges: SliceRanges | SliceValues,
    rows: Sequence[Path],
    columns: Sequence[Column],
    *,
    names: Mapping[str, str] | None = None,
    table: TableId | None = None,
) -> TableChange:
    """Replace the rows of whole slices, in a table without a row key."""

    def condition(loaded: Sequence[Loaded]) -> str | None:
        return ranges.condition(_of(loaded, ranges.column))

    return TableChange(columns, condition, rows, names, table)


def replace_rows(
    base: Path, target: Path, changes: Sequence[TableChange], *, spare: Path | None = None
) -> tuple[Applied, ...]:
    """Write `target`: base with these rows replaced; return what was done in each table.

    `base` is not touched, unless it is the target, which is replaced in one step. A `spare` file is used up instead of a
    copy of the base, if every change says what was replaced since.
    """
    if spare is not None and all(change.since is not None for change in changes):
        try:
            return _replace(base, target, changes, spare=spare)
        except MachineError:
            raise
        except (_OutOfStepError, ExtractError, OSError):
            # The spare only saves a copy: it is used up now, and the base is unchanged.
            pass
    return _replace(base, target, changes)


def _catch_up(
    connection: Any, table: ExtractTable, loaded: Sequence[Loaded], change: TableChange, *, path: Path
) -> int:
    """Make the spare file's table equal to the base's, with one DELETE for all keys; return the number of its rows."""
    since, parts = change.since, [_of(loaded, name) for name in change.key]
    assert since is not None, "asked before"
    _purge(connection, table.sql, key_condition(parts, [file for one in since.replacements for file in one.keys]))
    for place, replacement in enumerate(since.replacements):
        later = [file for one in since.replacements[place + 1 :] for file in one.keys]
        unless = _keyed_rows(parts, later) if later else None
        append_rows(connection, table.sql, loaded, replacement.rows, path=path, unless=unless)
    rows = int(connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table.sql}"))
    if rows != since.rows:
        raise _OutOfStepError(f"{path}: {rows} rows instead of {since.rows}")
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


def least_changed(path: Path, column: str, change: TableChange) -> tuple[str | None, int]:
    """The smallest value of a column among the rows that a change replaces, as text; how many of them have none."""
    with connect(path) as connection:
        table = look_at(connection, path, change.table)
        loaded = pair_columns(change.columns, table.columns, path=path, names=change.names)
        test = change.condition(loaded) or "FALSE"
        name = f"t.{quoted(column)}"
        zoned = any(file_column.name == column and file_column.type == "TIMESTAMPTZ" for file_column in table.columns)
        moment = f"{name} AT TIME ZONE 'UTC'" if zoned else name
        query = f"SELECT CAST(MIN({moment}) AS TEXT), COUNT(*) - COUNT({name}) FROM {table.sql} AS t WHERE {test}"
        least, nulls = connection.execute_list_query(query)[0]
    return least, int(nulls)


def _of(loaded: Sequence[Loaded], name: str) -> Loaded:
    column = next((candidate for candidate in loaded if candidate.source.name == name), None)
    if column is None:
        raise ExtractError(
            f"Rows are purged by {name}, which is no column of the extract. Add it to `columns:` in the spec."
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
    base: Path, target: Path, changes: Sequence[TableChange], *, spare: Path | None = None
) -> tuple[Applied, ...]:
    """Copy, then purge and append in one transaction, then read back what the closed file holds.

    A spare file is taken instead of the copy, and made what the base is in the same transaction.
    """
    if not base.is_file():
        raise ExtractError(f"There is no extract at {base}. Run a full refresh to make one.")
    for change in changes:
        check_staged(change.rows, [column.name for column in change.columns])
    arriving = [file for change in changes for file in change.rows]
    need_space(target.parent, (0 if spare else base.stat().st_size) + _GROWTH * total_bytes(arriving))
    clock = _Clock()
    with replaced_file(target) as beside:
        if spare is not None:
            spare.rename(beside)
        else:
            copy_file(base, beside)
        clock.lap("copy")
        with unbroken(target):
            counts: list[tuple[ExtractTable, int, int, int]] = []
            with connect(beside) as connection:
                connection.execute_command("BEGIN TRANSACTION")
                for change in changes:
                    table = look_at(connection, beside, change.table)
                    loaded = pair_columns(change.columns, table.columns, path=base, names=change.names)
                    before = table.rows
                    if spare is not None:
                        before = _catch_up(connection, table, loaded, change, path=base)
                        clock.lap("catch up")
                    purged = _purge(connection, table.sql, change.condition(loaded))
                    clock.lap("purge")
                    appended = append_rows(connection, table.sql, loaded, change.rows, path=base)
                    clock.lap("append")
                    counts.append((table, before, purged, appended))
                connection.execute_command("COMMIT")
                clock.lap("append")
            # Closing is what makes it durable, COMMIT is not.
            clock.lap("close")
            results = [describe(beside, table.id) for table, *_ in counts]
        for result, (_, before, purged, appended) in zip(results, counts, strict=True):
            check_count(target, result.rows, before - purged + appended)
        clock.lap("check")
    clock.lap("sync")
    return tuple(
        Applied(before, purged, appended, result.rows, result.bytes, clock.seconds)
        for result, (_, before, purged, appended) in zip(results, counts, strict=True)
    )


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
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self._last, 3)
        self._last = now
