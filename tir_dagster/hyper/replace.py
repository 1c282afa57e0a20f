"""Replace the rows of a change set in an extract, by row key or by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tir_dagster.changes.change_set import KEYS, ROWS, ChangeSet, parts_of, table_folder
from tir_dagster.hyper.casts import Loaded
from tir_dagster.hyper.hyperfile import TableId
from tir_dagster.hyper.purge import Since, TableChange, by_key, by_slice, key_condition
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.slices import SliceBy, slice_range


@dataclass(frozen=True)
class ExtractShape:
    """The layout of an extract's table: its columns by source name, its key, its slices, and its own column names."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    slices: SliceBy
    names: Mapping[str, str] = field(default_factory=dict)
    # Columns that may differ in the last digit at each reading of the source, so they are not compared.
    loose: frozenset[str] = frozenset()
    # The table in the Hyper file; None where it holds only one.
    table: TableId | None = None
    # Columns that rows of another table refer to: Tableau's keys hold no NULL.
    not_null: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StagedChange:
    """The change of a table, its staged files, and the table's layout."""

    change_set: ChangeSet
    folder: Path
    shape: ExtractShape

    def as_rows(self, since: Since | None = None) -> TableChange:
        """Return which rows leave and which arrive."""
        shape, rows = self.shape, parts_of(self.folder / ROWS)
        names = shape.names or None
        if shape.key:
            keys = staged_keys(self.folder)
            return by_key(shape.key, keys, rows, shape.columns, names=names, table=shape.table, since=since)
        ranges = _ranges(self.change_set, shape)
        return by_slice(ranges, rows, shape.columns, names=names, table=shape.table)


def staged_changes(change_set: ChangeSet, folder: Path, shapes: Mapping[str, ExtractShape]) -> dict[str, StagedChange]:
    """Return the change of each table that changes, by its name."""
    return {
        table: StagedChange(change_set.of(table), table_folder(folder, table), shapes[table])
        for table in change_set.changing
    }


def _ranges(change_set: ChangeSet, shape: ExtractShape) -> SliceRanges | SliceValues:
    """The touched slices as ranges of their column, or as its values."""
    touched = change_set.touched
    if shape.slices.by == "value":
        return SliceValues(shape.slices.column or "", touched)
    ranges = [slice_range(shape.slices, name) for name in touched if name is not None]
    assert shape.slices.column is not None, "an extract without a row key is sliced"
    return SliceRanges(
        column=shape.slices.column,
        ranges=tuple((begin.isoformat(), end.isoformat() if end else None) for begin, end in filter(None, ranges)),
        nulls=None in touched,
        zone=shape.slices.zone,
    )


def replaced_rows(change_set: ChangeSet, folder: Path, shape: ExtractShape) -> Callable[[Sequence[Loaded]], str | None]:
    """The condition for rows that a change set replaces: those of its keys, or of its slices."""

    def condition(pairs: Sequence[Loaded]) -> str | None:
        by_name = {pair.source.name: pair for pair in pairs}
        if shape.key:
            return key_condition([by_name[name] for name in shape.key], staged_keys(folder))
        ranges = _ranges(change_set, shape)
        return ranges.condition(by_name[ranges.column])

    return condition


def staged_keys(folder: Path) -> list[Path]:
    """The files with a change set's keys."""
    return parts_of(folder / KEYS)
