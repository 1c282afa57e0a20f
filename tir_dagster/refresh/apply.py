"""The stage `apply`: a change set becomes an extract version: keys purged, rows appended, the result verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.changes.change_set import KEYS, ROWS, ChangeSet, parts_of
from tir_dagster.changes.relation import relation_of
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import ExtractError
from tir_dagster.files import copy_file, total_bytes
from tir_dagster.hyper.content import content_digest, slice_digests, slice_rows, sums_to_json
from tir_dagster.hyper.hyperfile import create_extract, create_like, describe, needs_rebuild, rebuild
from tir_dagster.hyper.purge import Applied, Replacement, Spare
from tir_dagster.hyper.replace import ExtractShape, replace_change
from tir_dagster.refresh.confirm import prune_versions
from tir_dagster.refresh.context import (
    Looked,
    RefreshContext,
    explaining_lost_lease,
    shape_of,
    shape_to_json,
)
from tir_dagster.refresh.datasource import server_package
from tir_dagster.refresh.state.versions import CHANGE_FOLDER, SHELL, Version, VersionStore, Workspace, new_version
from tir_dagster.refresh.survey import extract_columns, extract_shape
from tir_dagster.refresh.verify import count_odd_keys, last_verified, verify_content, verify_turn

# How many bytes of a file are copied and made durable in the time in which one byte of keys and rows is replaced.
_COPY_SPEED = 64


def fill_extract(
    workspace: Workspace,
    change_set: ChangeSet,
    folder: Path,
    *,
    shape: ExtractShape,
    base: Version | None,
    template: Path | None,
    rebuild_factor: float,
    spare: Spare | None = None,
) -> Applied:
    """Fill the workspace's extract. A full one starts anew with the template's types; others replace keys of the base."""
    rows = parts_of(folder / ROWS)
    if change_set.decision == "full":
        if template is None:
            created = create_extract(workspace.extract, shape.columns, rows, names=shape.names or None)
        else:
            created = create_like(workspace.extract, template, shape.columns, rows, names=shape.names or None)
        purged = sum(change_set.purged.values())
        return Applied(purged, purged, created.rows, created.rows, created.bytes)
    if base is None:
        raise ExtractError(f"{change_set.extract}: the version that change set {change_set.id} starts from is gone.")
    applied = replace_change(base.extract, workspace.extract, change_set, folder, shape, spare=spare)
    per_row = float(base.manifest.get("bytes_per_row") or 0)
    if per_row and needs_rebuild(workspace.extract, rows=applied.after, bytes_per_row=per_row, limit=rebuild_factor):
        rebuild(workspace.extract, workspace.extract)
    return applied


def spare_file(
    store: VersionStore, base: Version | None, change_set: ChangeSet, folder: Path, shape: ExtractShape
) -> Spare | None:
    """Return the spare version's file with all that was replaced since; None where a new file, or a copy of the base, is cheaper.

    A spare that is of no use is removed: the other file takes its room.
    """
    spare = store.spare()
    if spare is None:
        return None
    since = None
    if base is not None and shape.key and change_set.decision == "incremental":
        since = _replacements(spare, base, store.versions(), shape)
    if base is None or since is None or not _is_small([*since, _replacement(folder)], base.extract):
        store.drop_spare()
        return None
    return Spare(spare.extract, tuple(since), int(base.manifest["rows"]))


def _replacements(
    spare: Version, base: Version, versions: Sequence[Version], shape: ExtractShape
) -> list[Replacement] | None:
    """Return what was replaced from the spare version to the base, the oldest first; None where not all of it is known."""
    by_id = {version.id: version for version in (*versions, spare)}
    since: list[Replacement] = []
    version: Version | None = base
    while version is not None and version.id != spare.id:
        change = version.file(CHANGE_FOLDER)
        if shape_of(version) != shape or not change.is_dir():
            return None
        since.insert(0, _replacement(change))
        version = by_id.get(version.manifest.get("replaced_in") or "")
    return None if version is None or shape_of(version) != shape else since


def _replacement(folder: Path) -> Replacement:
    return Replacement(tuple(parts_of(folder / KEYS)), tuple(parts_of(folder / ROWS)))


def _is_small(replacements: Sequence[Replacement], extract: Path) -> bool:
    """Whether to replace all this takes less time than to copy the file.

    Measured at 10M rows, four times .1 % of the rows take less than a copy, four times 1 % twice as long.
    """
    files = [file for replacement in replacements for file in (*replacement.keys, *replacement.rows)]
    return _COPY_SPEED * total_bytes(files) <= extract.stat().st_size


def keep_change(workspace: Workspace, change_set: ChangeSet, folder: Path, shape: ExtractShape) -> None:
    """Keep a small change with the version: an older file becomes this one by it."""
    if (
        change_set.decision != "incremental"
        or not shape.key
        or not _is_small([_replacement(folder)], workspace.extract)
    ):
        return
    (workspace.folder / CHANGE_FOLDER).mkdir()
    for kind in (KEYS, ROWS):
        target = workspace.folder / CHANGE_FOLDER / kind
        target.mkdir()
        for file in parts_of(folder / kind):
            try:
                (target / file.name).hardlink_to(file)
            except OSError:
                # Some file systems know no hard links.
                copy_file(file, target / file.name)


def bytes_per_row(extract: Path, base: Version | None, change_set: ChangeSet) -> float:
    """Return the bytes per row in a file without purged space: measured when a file is built, else taken from the base."""
    if base is not None and change_set.decision == "incremental" and base.manifest.get("bytes_per_row"):
        return float(base.manifest["bytes_per_row"])
    table = describe(extract)
    return table.bytes / table.rows if table.rows else 0.0


# The stage


@dataclass(frozen=True)
class AppliedVersion:
    """A new, verified version, and how many rows it took."""

    version: Version
    counts: Applied


def apply(context: RefreshContext, looked: Looked, change_set: ChangeSet) -> AppliedVersion:
    """Make a new version of the extract, verified against the source at the change set's own version."""
    folder = context.change_sets.path(change_set.id)
    context.check_lease()
    prune_versions(context, looked.confirmed)
    with explaining_lost_lease(context), new_version(context.versions) as workspace:
        with context.stages.timed("shell"), context.snowflake.kept_open():
            shell, template = server_package(context, looked)
            relation = relation_of(context.spec, context.snowflake, columns=extract_columns(context, looked))
            shape = extract_shape(relation, shell)
            if shell is not None:
                copy_file(shell, workspace.folder / SHELL)
        with context.stages.timed("apply") as meter:
            counts = fill_extract(
                workspace,
                change_set,
                folder,
                shape=shape,
                base=looked.base,
                # Only a package that people built fixes the types; what we made ourselves may change with the source.
                template=template if shell is not None else None,
                rebuild_factor=context.spec.thresholds.rebuild_factor,
                spare=spare_file(context.versions, looked.base, change_set, folder, shape),
            )
            meter.moved(rows=counts.purged + counts.appended, bytes=workspace.extract.stat().st_size)
        crash_after("applied")
        context.log(f"{counts.purged:,} rows purged, {counts.appended:,} appended: verifying against the source")
        with context.stages.timed("verify"):
            sums = verify_content(context, workspace.extract, change_set, looked.base, shape)
            compared = verify_turn(context, workspace.extract, change_set, looked.base, relation, shape, sums)
        crash_after("checked")
        keep_change(workspace, change_set, folder, shape)
        manifest = {
            "extract": context.spec.name,
            "change_set": change_set.id,
            "change_sets": [*change_set.settles, change_set.id],
            "base": change_set.base,
            "replaced_in": looked.base.id if looked.base and change_set.decision == "incremental" else None,
            "source_version": change_set.source_version,
            "server_version": looked.server.version_text,
            "known": change_set.known.__dict__,
            "watermark": change_set.watermark,
            "reports": change_set.reports,
            "fingerprint": content_digest(sums),
            "content_sums": sums_to_json(sums),
            "slice_digests": slice_digests(sums),
            # By slice, the source version at which it last equalled the source; and the same of this refresh alone.
            "verified": {
                name: version
                for name, version in {**last_verified(looked.base, change_set), **compared}.items()
                if name in slice_rows(sums)
            },
            "compared": compared,
            "odd_keys": count_odd_keys(workspace.extract, change_set, looked.base, shape),
            "rows": counts.after,
            "rows_purged": counts.purged,
            "rows_appended": counts.appended,
            "slice_rows": slice_rows(sums),
            "bytes_per_row": bytes_per_row(workspace.extract, looked.base, change_set),
            "shape": shape_to_json(shape),
        }
        version = context.versions.commit(
            workspace, manifest, after=looked.confirmed.version if looked.confirmed else None
        )
    crash_after("verified")
    return AppliedVersion(version, counts)
