"""A change set becomes an extract version: keys purged, rows appended, the result verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tir_dagster.changes.state import ChangeSet
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.casts import Loaded
from tir_dagster.hyper.hyperfile import create_extract, create_like, describe, needs_rebuild, rebuild
from tir_dagster.hyper.purge import Applied, key_condition, least_of_keys, least_of_slices, replace_keys, replace_slices
from tir_dagster.hyper.slices import SliceRanges, SliceValues
from tir_dagster.refresh.state.change_sets import KEYS, ROWS, parts_of
from tir_dagster.refresh.state.versions import Version, VersionStore, Workspace
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.slices import SliceBy, slice_range

SHELL = "shell.tdsx"


@dataclass(frozen=True)
class Shape:
    """How the extract is laid out: its columns by source name, its key, its slices, and its own column names."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    slices: SliceBy
    names: Mapping[str, str] = field(default_factory=dict)
    # Columns that may differ in the last digit each time the source is asked, so they tell nothing.
    loose: frozenset[str] = frozenset()


@contextmanager
def new_version(store: VersionStore) -> Iterator[Workspace]:
    """A workspace that is removed unless it was committed inside the block."""
    workspace = store.begin()
    try:
        yield workspace
    finally:
        store.abandon(workspace)


def apply_change_set(
    workspace: Workspace,
    change_set: ChangeSet,
    folder: Path,
    *,
    shape: Shape,
    base: Version | None,
    template: Path | None,
    rebuild_factor: float,
) -> Applied:
    """Fill the workspace's extract. A full one starts anew with the template's types; others replace keys of the base."""
    rows = parts_of(folder / ROWS)
    if change_set.decision == "full":
        if template is None:
            made = create_extract(workspace.extract, shape.columns, rows, names=shape.names or None)
        else:
            made = create_like(workspace.extract, template, shape.columns, rows, names=shape.names or None)
        purged = sum(change_set.purged.values())
        return Applied(purged, purged, made.rows, made.rows, made.bytes)
    if base is None:
        raise ExtractError(f"{change_set.extract}: the version that change set {change_set.id} starts from is gone.")
    applied = replace_change(base.extract, workspace.extract, change_set, folder, shape)
    per_row = float(base.manifest.get("bytes_per_row") or 0)
    if per_row and needs_rebuild(workspace.extract, rows=applied.after, bytes_per_row=per_row, limit=rebuild_factor):
        rebuild(workspace.extract, workspace.extract)
    return applied


def replace_change(base: Path, target: Path, change_set: ChangeSet, folder: Path, shape: Shape) -> Applied:
    """A copy of the extract with the change set's keys, or slices, replaced."""
    names, rows = shape.names or None, parts_of(folder / ROWS)
    if shape.key:
        keys = staged_keys(folder)
        return replace_keys(base, target, key=shape.key, keys=keys, rows=rows, columns=shape.columns, names=names)
    return replace_slices(
        base, target, ranges=_ranges(change_set, shape), rows=rows, columns=shape.columns, names=names
    )


def _ranges(change_set: ChangeSet, shape: Shape) -> SliceRanges | SliceValues:
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


def replaced_rows(change_set: ChangeSet, folder: Path, shape: Shape) -> Callable[[Sequence[Loaded]], str | None]:
    """The condition for rows that a change set replaces: those of its keys, or of its slices."""

    def condition(pairs: Sequence[Loaded]) -> str | None:
        by_name = {pair.source.name: pair for pair in pairs}
        if shape.key:
            return key_condition([by_name[name] for name in shape.key], staged_keys(folder))
        ranges = _ranges(change_set, shape)
        return ranges.condition(by_name[ranges.column])

    return condition


def least_changed(
    extract: Path, column: str, change_set: ChangeSet, folder: Path, shape: Shape
) -> tuple[str | None, int]:
    """The smallest value of a Hyper column among the rows that the change set replaces, and how many have none."""
    names = shape.names or None
    if shape.key:
        keys = staged_keys(folder)
        return least_of_keys(extract, column, key=shape.key, keys=keys, columns=shape.columns, names=names)
    return least_of_slices(extract, column, ranges=_ranges(change_set, shape), columns=shape.columns, names=names)


def bytes_per_row(extract: Path, base: Version | None, change_set: ChangeSet) -> float:
    """What a row costs in a file without purged space: measured when a file is built, carried along otherwise."""
    if base is not None and change_set.decision == "incremental" and base.manifest.get("bytes_per_row"):
        return float(base.manifest["bytes_per_row"])
    table = describe(extract)
    return table.bytes / table.rows if table.rows else 0.0


def staged_keys(folder: Path) -> list[Path]:
    """The files with a change set's keys."""
    return parts_of(folder / KEYS)
