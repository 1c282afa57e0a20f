"""A change set becomes an extract version: keys purged, rows appended, the result verified."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.changes.changesets import KEYS, ROWS, parts_of
from tir_dagster.changes.state import NO_SLICE_KEY, ChangeSet, slice_label
from tir_dagster.errors import EQUALS_SOURCE, ExtractError, VerificationError
from tir_dagster.extract.features import is_older_feature
from tir_dagster.extract.fingerprints import Fingerprint, different_slices, extract_fingerprints, read_fingerprints
from tir_dagster.extract.fingerprints import snowflake_sql as fingerprint_sql
from tir_dagster.extract.hyperfile import create_extract, create_like, describe, needs_rebuild, rebuild
from tir_dagster.extract.purge import Applied, least_of_keys, least_of_slices, replace_keys, replace_slices
from tir_dagster.extract.slices import SliceRanges, SliceValues
from tir_dagster.extract.versions import Version, VersionStore, Workspace
from tir_dagster.source.columns import Column
from tir_dagster.source.slices import SliceBy, slice_range

SHELL = "shell.tdsx"
# Of digests over the digest of each row; those of the form before, over sums by column only, have none before them.
_FORM = "rows"


Prints = Mapping[str | None, Fingerprint]


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


def least_changed(
    extract: Path, column: str, change_set: ChangeSet, folder: Path, shape: Shape
) -> tuple[str | None, int]:
    """The smallest value of a Hyper column among the rows that the change set replaces, and how many have none."""
    names = shape.names or None
    if shape.key:
        keys = staged_keys(folder)
        return least_of_keys(extract, column, key=shape.key, keys=keys, columns=shape.columns, names=names)
    return least_of_slices(extract, column, ranges=_ranges(change_set, shape), columns=shape.columns, names=names)


def content_fingerprints(extract: Path, shape: Shape) -> Prints:
    """What the extract holds, by slice."""
    return extract_fingerprints(extract, shape.columns, shape.slices, names=shape.names or None, loose=shape.loose)


def source_fingerprints(
    query: Callable[[str], list[tuple[Any, ...]]],
    table_sql: str,
    shape: Shape,
    *,
    only: Collection[str | None] | None = None,
) -> Prints:
    """What the source shows, by slice."""
    sql = fingerprint_sql(shape.columns, table_sql, shape.slices, only=only, loose=shape.loose)
    return read_fingerprints(query(sql), shape.columns, loose=shape.loose)


def verify_touched(
    prints: Prints,
    change_set: ChangeSet,
    *,
    shape: Shape,
    table_sql: str,
    query: Callable[[str], list[tuple[Any, ...]]],
) -> None:
    """Compare the touched slices (a full one: all) with the source at the same version; a difference stops the refresh."""
    only = None if change_set.decision == "full" else set(change_set.touched)
    ours = {name: found for name, found in prints.items() if only is None or name in only}
    theirs = source_fingerprints(query, table_sql, shape, only=only)
    if different := different_slices(ours, theirs):
        name, lines = next(iter(different.items()))
        raise VerificationError(
            f"{change_set.extract}: the new extract differs from the source in {len(different)} slices, in "
            f"{name or 'rows without a slice'} for example: {'; '.join(lines[:3])}. Nothing was published. The next refresh "
            "replaces these slices, and loads everything if that does not help; if that differs too, report it.",
            check=EQUALS_SOURCE,
            slices={slice_label(one or NO_SLICE_KEY): found for one, found in different.items()},
        )


def verify_counts(prints: Prints, change_set: ChangeSet, base: Version | None) -> None:
    """Compare the number of rows by slice with what was read: all that can be said of rows that cannot be read again."""
    expected = Counter(change_set.appended)
    if change_set.decision == "incremental" and base is not None:
        expected.update(base.manifest["slice_rows"])
        expected.subtract(change_set.purged)
    if slice_rows(prints) != {name: count for name, count in expected.items() if count}:
        raise VerificationError(
            f"{change_set.extract}: the new extract does not hold the rows that were read. Nothing was published. "
            "Run the refresh again; if that differs too, report it.",
            check=EQUALS_SOURCE,
        )


def slice_rows(prints: Prints) -> dict[str, int]:
    """The number of rows by slice, as JSON names them."""
    return {name or NO_SLICE_KEY: int(found["rows"]) for name, found in prints.items()}


def content_digest(prints: Prints) -> str:
    """A digest of an extract's rows, the same for equal rows in any order and in any file; its form stands before it."""
    return f"{_FORM} {_sha256(prints)}"


def content_digests(prints: Prints, shape: Shape) -> tuple[str, ...]:
    """The digest of an extract's rows in every form: a version may have been written down in an earlier one."""
    older = {
        name: Fingerprint({one: value for one, value in found.items() if is_older_feature(one, shape.columns)})
        for name, found in prints.items()
    }
    return content_digest(prints), _sha256(older)


def _sha256(prints: Prints) -> str:
    value = {name or NO_SLICE_KEY: dict(found) for name, found in prints.items()}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def slice_digests(prints: Prints) -> dict[str, str]:
    """A short digest of each slice's rows, for people and for a look at which slice changed."""
    return {name or NO_SLICE_KEY: _sha256({name: found})[:16] for name, found in prints.items()}


def bytes_per_row(extract: Path, base: Version | None, change_set: ChangeSet) -> float:
    """What a row costs in a file without purged space: measured when a file is built, carried along otherwise."""
    if base is not None and change_set.decision == "incremental" and base.manifest.get("bytes_per_row"):
        return float(base.manifest["bytes_per_row"])
    table = describe(extract)
    return table.bytes / table.rows if table.rows else 0.0


def staged_keys(folder: Path) -> list[Path]:
    """The files with a change set's keys."""
    return parts_of(folder / KEYS)
