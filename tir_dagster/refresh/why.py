"""Why a row or a slice looks as it does: the refreshes that replaced it, with the rows before and after. Reads state only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tir_dagster.changes.change_set import NO_SLICE_KEY
from tir_dagster.errors import SpecError
from tir_dagster.hyper.hyperfile import rows_of_key
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.refresh.context import RefreshContext, shape_of
from tir_dagster.refresh.state.history import HistoryEntry
from tir_dagster.refresh.state.versions import Version
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import slice_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class KeyChange:
    """What one refresh did to the rows of a key; the rows are None where only the refresh itself is on record."""

    entry: HistoryEntry
    before: tuple[Row, ...] | None
    after: tuple[Row, ...] | None

    @property
    def kind(self) -> str:
        """What happened, in a word."""
        if self.before is None or self.after is None:
            return "unknown"
        if not self.before or not self.after:
            return "added" if self.after else "removed"
        return "changed" if self.changed_columns or len(self.before) != len(self.after) else "written again"

    @property
    def changed_columns(self) -> tuple[str, ...]:
        """The columns whose values differ, where the key had one row before and has one after."""
        if not self.before or not self.after or len(self.before) != 1 or len(self.after) != 1:
            return ()
        old, new = self.before[0], self.after[0]
        return tuple(name for name in new if not _same(old.get(name), new[name]))


@dataclass(frozen=True)
class SliceChange:
    """What one refresh, or a rollback, did to a slice; `sum_change` is how much it added to the sum of a column."""

    entry: HistoryEntry
    # None of a rollback: only the rows that it brought are known.
    purged: int | None
    appended: int
    sum_change: Decimal | None = None


def parse_key(shape: ExtractShape, texts: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of a row key given as texts in the key's order, or as NAME=VALUE; NULL is no value."""
    if not shape.key:
        raise SpecError("The extract has no row key. Ask for a slice: --slice.")
    named: dict[str, str] = {}
    for place, text in enumerate(texts):
        name, equals, value = text.partition("=")
        known = next((key for key in shape.key if key.upper() == name.strip().upper()), None) if equals else None
        if known is None and place < len(shape.key):
            known, value = shape.key[place], text
        if known is not None:
            named[known] = value
    if set(named) != set(shape.key) or len(texts) != len(shape.key):
        raise SpecError(f"The row key is {', '.join(shape.key)}: give --key once for each of them, in this order.")
    columns = {column.name: column for column in shape.columns}
    return tuple(parse_value(columns[name], named[name]) for name in shape.key)


def parse_value(column: Column, text: str) -> Any:
    """Return a value of the column given as text; the word NULL is no value."""
    if text.strip().upper() == "NULL":
        return None
    readers: dict[Kind, Callable[[str], Any]] = {
        Kind.INTEGER: int,
        Kind.DECIMAL: Decimal,
        Kind.FLOAT: float,
        Kind.DATE: date.fromisoformat,
        Kind.TIME: time.fromisoformat,
        Kind.TIMESTAMP: datetime.fromisoformat,
        Kind.INSTANT: datetime.fromisoformat,
        Kind.BOOLEAN: lambda value: {"true": True, "false": False}[value.lower()],
    }
    try:
        return readers.get(column.kind, str)(text)
    except (ValueError, KeyError, InvalidOperation):
        raise SpecError(f"{text!r} is not a value of {column.name}, which is of type {column.kind.value}.") from None


def why_key(
    context: RefreshContext, shape: ExtractShape, key: tuple[Any, ...], *, table: str = ""
) -> Iterator[KeyChange]:
    """Yield what refreshes did to the rows of the key, the newest first; refreshes that left them alone are skipped.

    `table` names one of several tables of the extract.
    """
    kept = {version.id: version.of(table) for version in context.versions.versions() if table in version.tables}
    for whole in context.history.entries():
        entry = whole.of(table)
        if entry.change_set is not None and entry.change_set.decision == "none":
            continue
        change = _change(entry, kept, shape, key)
        is_touched = change.before != () or change.after != ()
        if is_touched and change.kind != "written again":
            yield change


def _change(entry: HistoryEntry, kept: Mapping[str, Version], shape: ExtractShape, key: tuple[Any, ...]) -> KeyChange:
    if entry.has_rows:
        names = [column.name for column in shape.columns]
        before, after = (_read(files, names, shape, key) for files in (entry.before, entry.after))
        return KeyChange(entry, before, after)
    # Everything was loaded, or an older version was published again: the files of both versions tell, if they are there.
    base = entry.manifest.get("base") or entry.manifest.get("instead_of")
    if entry.change_set is not None and entry.change_set.base is None and not base:
        rows = _held(kept.get(entry.version), shape, key)
        return KeyChange(entry, () if rows is not None else None, rows)
    return KeyChange(entry, _held(kept.get(base or ""), shape, key), _held(kept.get(entry.version), shape, key))


def _held(version: Version | None, shape: ExtractShape, key: tuple[Any, ...]) -> tuple[Row, ...] | None:
    if version is None or shape_of(version).columns != shape.columns:
        return None
    names = shape.names or None
    return tuple(rows_of_key(version.extract, shape.columns, shape.key, key, names=names, table_id=shape.table))


def current_rows(version: Version, key: tuple[Any, ...]) -> tuple[Row, ...]:
    """Return the version's rows of the key."""
    return _held(version, shape_of(version), key) or ()


def _read(
    files: Sequence[Path], names: Sequence[str], shape: ExtractShape, key: tuple[Any, ...]
) -> tuple[Row, ...] | None:
    """Return the rows of the key in these Parquet files; None if the key had other columns or types then."""
    if not files:
        return ()
    data = ds.dataset([str(file) for file in files])
    present = [name for name in names if name in data.schema.names]
    if not set(shape.key) <= set(present):
        return None
    condition = None
    for name, value in zip(shape.key, key, strict=True):
        field = ds.field(name)
        try:
            is_same = (
                field.is_null() if value is None else pc.equal(field, _scalar(value, data.schema.field(name).type))
            )
        except pa.ArrowException:
            return None
        condition = is_same if condition is None else condition & is_same
    return tuple(data.to_table(columns=present, filter=condition).to_pylist())


def _scalar(value: Any, kind: Any) -> Any:
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.scalar(value).cast(kind)


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)


def why_slice(
    context: RefreshContext, shape: ExtractShape, name: str, column: str | None = None, *, table: str = ""
) -> Iterator[SliceChange]:
    """Yield what refreshes did to the slice, the newest first."""
    for whole in context.history.entries():
        entry = whole.of(table)
        if entry.change_set is None:
            yield SliceChange(entry, None, int(entry.manifest["slice_rows"].get(name, 0)))
            continue
        purged, appended = (counts.get(name, 0) for counts in (entry.change_set.purged, entry.change_set.appended))
        if not purged and not appended:
            continue
        change = SliceChange(entry, purged, appended)
        if column is not None and entry.has_rows:
            before, after = (_sum(files, shape, name, column) for files in (entry.before, entry.after))
            if before is not None and after is not None:
                change = replace(change, sum_change=after - before)
        yield change


def _sum(files: Sequence[Path], shape: ExtractShape, name: str, column: str) -> Decimal | None:
    """Return the sum of the column over the slice's rows; None if the rows of then have no such columns."""
    if not files:
        return Decimal(0)
    by = shape.slices.column
    listed = list(dict.fromkeys([column, *([by] if by else [])]))
    data = ds.dataset([str(file) for file in files])
    if not set(listed) <= set(data.schema.names):
        return None
    table = data.to_table(columns=listed)
    wanted = None if name == NO_SLICE_KEY else name
    days = table[by].to_pylist() if by else [None] * table.num_rows
    return sum(
        (
            Decimal(str(value))
            for value, day in zip(table[column].to_pylist(), days, strict=True)
            if value is not None and slice_of(shape.slices, day) == wanted
        ),
        Decimal(0),
    )
