"""A change set becomes an extract version: keys purged, rows appended, the result verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tir_dagster.changes.change_set import ROWS, ChangeSet, parts_of
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.hyperfile import create_extract, create_like, describe, needs_rebuild, rebuild
from tir_dagster.hyper.purge import Applied
from tir_dagster.hyper.replace import Shape, replace_change
from tir_dagster.refresh.state.versions import Version, VersionStore, Workspace

SHELL = "shell.tdsx"


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


def bytes_per_row(extract: Path, base: Version | None, change_set: ChangeSet) -> float:
    """What a row costs in a file without purged space: measured when a file is built, carried along otherwise."""
    if base is not None and change_set.decision == "incremental" and base.manifest.get("bytes_per_row"):
        return float(base.manifest["bytes_per_row"])
    table = describe(extract)
    return table.bytes / table.rows if table.rows else 0.0
