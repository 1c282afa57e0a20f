"""Replace the rows of a change set in an extract, by row key or by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tir_dagster.changes.change_set import KEYS, ROWS, ChangeSet, parts_of
from tir_dagster.hyper.casts import Loaded
from tir_dagster.hyper.purge import (
    Applied,
    Spare,
    key_condition,
    least_of_keys,
    least_of_slices,
    replace_keys,
    replace_slices,
)
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.slices import SliceBy, slice_range


@dataclass(frozen=True)
class ExtractShape:
    """The layout of an extract: its columns by source name, its key, its slices, and its own column names."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    slices: SliceBy
    names: Mapping[str, str] = field(default_factory=dict)
    # Columns that may differ in the last digit at each reading of the source, so they are not compared.
    loose: frozenset[str] = frozenset()


def replace_change(
    base: Path, target: Path, change_set: ChangeSet, folder: Path, shape: ExtractShape, *, spare: Spare | None = None
) -> Applied:
    """A copy of the extract with the change set's keys, or slices, replaced; a spare file is used up instead of a copy."""
    names, rows = shape.names or None, parts_of(folder / ROWS)
    if shape.key:
        keys = staged_keys(folder)
        return replace_keys(
            base, target, key=shape.key, keys=keys, rows=rows, columns=shape.columns, names=names, spare=spare
        )
    return replace_slices(
        base, target, ranges=_ranges(change_set, shape), rows=rows, columns=shape.columns, names=names
    )


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


def least_changed(
    extract: Path, column: str, change_set: ChangeSet, folder: Path, shape: ExtractShape
) -> tuple[str | None, int]:
    """The smallest value of a Hyper column among the rows that the change set replaces, and how many have none."""
    names = shape.names or None
    if shape.key:
        keys = staged_keys(folder)
        return least_of_keys(extract, column, key=shape.key, keys=keys, columns=shape.columns, names=names)
    return least_of_slices(extract, column, ranges=_ranges(change_set, shape), columns=shape.columns, names=names)


def staged_keys(folder: Path) -> list[Path]:
    """The files with a change set's keys."""
    return parts_of(folder / KEYS)
