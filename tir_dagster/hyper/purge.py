"""Replace by key: a copy of the extract in which the rows of some keys, or of some slices, are gone and the fresh ones stand instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.changes.difference import SLICE_KEY
from tir_dagster.durable import copy_file, need_space, replaced_file, total_bytes
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.casts import Loaded, check_staged, pair_columns
from tir_dagster.hyper.engine import connect, parquet, quoted, unbroken
from tir_dagster.hyper.hyperfile import append_rows, check_count, describe, look_at
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.snowflake.columns import Column

# Purged rows keep their space until a rebuild, and new ones grow when they leave Parquet's encodings.
_GROWTH = 4


@dataclass(frozen=True)
class Applied:
    """What one replacement did: before - purged + appended = after, as read back from the closed file."""

    before: int
    purged: int
    appended: int
    after: int
    bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)


def replace_keys(
    base: Path,
    target: Path,
    *,
    key: Sequence[str],
    keys: Sequence[Path],
    rows: Sequence[Path],
    columns: Sequence[Column],
    names: Mapping[str, str] | None = None,
) -> Applied:
    """Write `target`: base without the rows whose key is in the `keys` files, with the rows of the `rows` files.

    Keys are bags of values compared null-safely; the caller promises that every row's key is among the keys. `base`
    is not touched, unless it is the target, which is replaced in one step. `names` gives a column's name in the
    extract where it differs from the source's.
    """
    if not key:
        raise ExtractError(f"{base}: no key was named to purge by. Name the row key, or replace whole slices.")

    def condition(loaded: Sequence[Loaded]) -> str | None:
        return key_condition([_of(loaded, name, base) for name in key], keys)

    return _replace(base, target, condition=condition, columns=columns, names=names, rows=rows)


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
        zoned = any(found.name == column and found.type == "TIMESTAMPTZ" for found in table.columns)
        moment = f"{name} AT TIME ZONE 'UTC'" if zoned else name
        asked = f"SELECT CAST(MIN({moment}) AS TEXT), COUNT(*) - COUNT({name}) FROM {table.sql} AS t WHERE {test}"
        least, nulls = connection.execute_list_query(asked)[0]
    return least, int(nulls)


def _of(loaded: Sequence[Loaded], name: str, base: Path) -> Loaded:
    found = next((column for column in loaded if column.source.name == name), None)
    if found is None:
        raise ExtractError(
            f"{base}: {name} is to be purged by, but it is no column of the extract. Add it to `columns:` in the spec."
        )
    return found


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
    import pyarrow.parquet as pq  # noqa: PLC0415 - heavy

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
) -> Applied:
    """Copy, then purge and append in one transaction, then read back what the closed file holds."""
    if not base.is_file():
        raise ExtractError(f"There is no extract at {base}. Run a full refresh to make one.")
    check_staged(rows, [column.name for column in columns])
    need_space(target.parent, base.stat().st_size + _GROWTH * total_bytes(rows))
    clock = _Clock()
    with replaced_file(target) as beside:
        copy_file(base, beside)
        clock.lap("copy")
        with unbroken(target):
            with connect(beside) as connection:
                table = look_at(connection, beside)
                loaded = pair_columns(columns, table.columns, path=base, names=names)
                connection.execute_command("BEGIN TRANSACTION")
                purged = _purge(connection, table.sql, condition(loaded))
                clock.lap("purge")
                appended = append_rows(connection, table.sql, loaded, rows, path=base)
                connection.execute_command("COMMIT")
                clock.lap("append")
            # Closing is what makes it durable, COMMIT is not.
            clock.lap("close")
            made = describe(beside)
        check_count(target, made.rows, table.rows - purged + appended)
        clock.lap("check")
    clock.lap("sync")
    return Applied(table.rows, purged, appended, made.rows, made.bytes, clock.seconds)


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
