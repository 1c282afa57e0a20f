"""The stage `apply`: a change set becomes an extract version: keys purged, rows appended, the result verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import KEYS, ROWS, ChangeSet, parts_of, table_folder
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import ExtractError
from tir_dagster.files import copy_file, total_bytes
from tir_dagster.hyper.content import content_digest, joined_digest, slice_digests, slice_rows, sums_to_json
from tir_dagster.hyper.hyperfile import NewTable, create_tables, needs_rebuild, rebuild, rebuild_above
from tir_dagster.hyper.purge import Applied, Replacement, Since, replace_rows
from tir_dagster.hyper.replace import ExtractShape, StagedChange, staged_changes
from tir_dagster.refresh.confirm import prune_versions
from tir_dagster.refresh.context import (
    Looked,
    RefreshContext,
    explaining_lost_lease,
    shape_to_json,
    shapes_of,
)
from tir_dagster.refresh.datasource import server_package
from tir_dagster.refresh.deliveries.relationships import check_references, check_staged_nulls
from tir_dagster.refresh.state.versions import CHANGE_FOLDER, SHELL, Version, VersionStore, Workspace, new_version
from tir_dagster.refresh.survey import definition_fields, extract_layouts
from tir_dagster.refresh.verify import VerifiedTable, last_verified, verify_table

# How many bytes of a file are copied and made durable in the time in which one byte of keys and rows is replaced.
_COPY_SPEED = 64


def fill_extract(
    workspace: Workspace,
    change_set: ChangeSet,
    folder: Path,
    *,
    shapes: Mapping[str, ExtractShape],
    base: Version | None,
    template: Path | None,
    rebuild_factor: float,
    spare: Spare | None = None,
) -> dict[str, Applied]:
    """Fill the workspace's extract; return what was done in each table that changes.

    A full one starts anew with the template's types; others replace keys of the base.
    """
    changes = staged_changes(change_set, folder, shapes)
    if change_set.decision == "full":
        tables = [
            NewTable(
                shape.columns, parts_of(changes[table].folder / ROWS), shape.names or None, shape.table, shape.not_null
            )
            for table, shape in shapes.items()
        ]
        created = create_tables(workspace.extract, tables, template=template)
        return {
            table: Applied(purged, purged, done.rows, done.rows, done.bytes)
            for table, done in zip(shapes, created, strict=True)
            for purged in [sum(change_set.of(table).purged.values())]
        }
    if base is None:
        raise ExtractError(f"{change_set.extract}: the version that change set {change_set.id} starts from is gone.")
    rows_by_table = {table: change.as_rows(spare.since[table] if spare else None) for table, change in changes.items()}
    if spare is not None:
        # A table that does not change now may have changed since.
        for table in shapes.keys() - changes.keys():
            still = StagedChange(change_set.of(table), folder / "nothing", shapes[table])
            rows_by_table[table] = still.as_rows(spare.since[table])
    replaced = replace_rows(
        base.extract, workspace.extract, list(rows_by_table.values()), spare=spare.extract if spare else None
    )
    applied = dict(zip(rows_by_table, replaced, strict=True))
    per_row = float(base.manifest.get("bytes_per_row") or 0)
    rows = _rows_after(applied, base)
    if per_row and needs_rebuild(workspace.extract, rows=rows, bytes_per_row=per_row, limit=rebuild_factor):
        rebuild(workspace.extract, workspace.extract)
    return applied


def _rows_after(applied: Mapping[str, Applied], base: Version | None) -> int:
    """Return the rows of all tables: those that were not changed have the base's."""
    before = {table: int(base.of(table).manifest["rows"]) for table in base.tables} if base else {}
    return sum({**before, **{table: counts.after for table, counts in applied.items()}}.values())


def together(applied: Mapping[str, Applied], base: Version | None) -> Applied:
    """Return the counts of all tables as those of one."""
    after = _rows_after(applied, base)
    purged, appended = (sum(getattr(counts, name) for counts in applied.values()) for name in ("purged", "appended"))
    last = next(reversed(list(applied.values())), None)
    return Applied(
        after + purged - appended, purged, appended, after, last.bytes if last else 0, last.seconds if last else {}
    )


@dataclass(frozen=True)
class Spare:
    """An older, unused file of the same extract, and what was replaced since in each table: then it equals the base."""

    extract: Path
    since: Mapping[str, Since]


def spare_file(
    store: VersionStore, base: Version | None, change_set: ChangeSet, folder: Path, shapes: Mapping[str, ExtractShape]
) -> Spare | None:
    """Return the spare version's file with all that was replaced since; None where a new file, or a copy of the base, is cheaper.

    A spare that is of no use is removed: the other file takes its room.
    """
    spare = store.spare()
    if spare is None:
        return None
    since = None
    if base is not None and change_set.decision == "incremental" and all(shape.key for shape in shapes.values()):
        since = _replacements(spare, base, store.versions(), shapes)
    now = [_replacement(table_folder(folder, table)) for table in change_set.changing]
    if (
        base is None
        or since is None
        or not _is_small([*(one for some in since.values() for one in some), *now], base.extract)
    ):
        store.drop_spare()
        return None
    rows = {table: int(base.of(table).manifest["rows"]) for table in shapes}
    return Spare(spare.extract, {table: Since(tuple(some), rows[table]) for table, some in since.items()})


def _replacements(
    spare: Version, base: Version, versions: Sequence[Version], shapes: Mapping[str, ExtractShape]
) -> dict[str, list[Replacement]] | None:
    """Return what was replaced from the spare version to the base, the oldest first; None where not all of it is known."""
    by_id = {version.id: version for version in (*versions, spare)}
    since: dict[str, list[Replacement]] = {table: [] for table in shapes}
    version: Version | None = base
    while version is not None and version.id != spare.id:
        change = version.file(CHANGE_FOLDER)
        if shapes_of(version) != shapes or not change.is_dir():
            return None
        for table, replacements in since.items():
            replacements.insert(0, _replacement(table_folder(change, table)))
        version = by_id.get(version.manifest.get("replaced_in") or "")
    return None if version is None or shapes_of(version) != shapes else since


def _replacement(folder: Path) -> Replacement:
    return Replacement(tuple(parts_of(folder / KEYS)), tuple(parts_of(folder / ROWS)))


def _is_small(replacements: Sequence[Replacement], extract: Path) -> bool:
    """Whether to replace all this takes less time than to copy the file.

    Measured at 10M rows, four times .1 % of the rows take less than a copy, four times 1 % twice as long.
    """
    files = [file for replacement in replacements for file in (*replacement.keys, *replacement.rows)]
    return _COPY_SPEED * total_bytes(files) <= extract.stat().st_size


def keep_change(workspace: Workspace, change_set: ChangeSet, folder: Path, shapes: Mapping[str, ExtractShape]) -> None:
    """Keep a small change with the version: an older file becomes this one by it."""
    folders = [table_folder(folder, table) for table in change_set.changing]
    if (
        change_set.decision != "incremental"
        or not all(shape.key for shape in shapes.values())
        or not _is_small([_replacement(one) for one in folders], workspace.extract)
    ):
        return
    (workspace.folder / CHANGE_FOLDER).mkdir()
    for table in change_set.changing:
        for kind in (KEYS, ROWS):
            target = table_folder(workspace.folder / CHANGE_FOLDER, table) / kind
            target.mkdir(parents=True)
            for file in parts_of(table_folder(folder, table) / kind):
                try:
                    (target / file.name).hardlink_to(file)
                except OSError:
                    # Some file systems know no hard links.
                    copy_file(file, target / file.name)


def bytes_per_row(extract: Path, base: Version | None, change_set: ChangeSet, rows: int) -> float:
    """Return the bytes per row in a file without purged space: measured when a file is built, else taken from the base."""
    if base is not None and change_set.decision == "incremental" and base.manifest.get("bytes_per_row"):
        return float(base.manifest["bytes_per_row"])
    return extract.stat().st_size / rows if rows else 0.0


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
            layouts = extract_layouts(context, looked)
            relations = {
                table: relation_of(part, context.snowflake, columns=layouts[table].columns)
                for table, part in context.spec.parts.items()
            }
            shapes = {table: layouts[table].shape(relation) for table, relation in relations.items()}
            if shell is not None:
                copy_file(shell, workspace.folder / SHELL)
        with context.stages.timed("apply") as meter:
            check_staged_nulls(context.spec, staged_changes(change_set, folder, shapes))
            applied = fill_extract(
                workspace,
                change_set,
                folder,
                shapes=shapes,
                base=looked.base,
                # Only a package that people built fixes the types; what we made ourselves may change with the source.
                template=template if shell is not None else None,
                rebuild_factor=context.spec.thresholds.rebuild_factor,
                spare=spare_file(context.versions, looked.base, change_set, folder, shapes),
            )
            counts = together(applied, looked.base if change_set.decision == "incremental" else None)
            meter.moved(rows=counts.purged + counts.appended, bytes=workspace.extract.stat().st_size)
        crash_after("applied")
        context.log(f"{counts.purged:,} rows purged, {counts.appended:,} appended: verifying against the source")
        with context.stages.timed("verify"):
            verified = {
                table: verify_table(
                    context.of(table),
                    workspace.extract,
                    change_set.of(table),
                    looked.of(table).base,
                    relations[table],
                    shape,
                    table_folder(folder, table),
                )
                for table, shape in shapes.items()
            }
            warnings = check_references(
                context.spec, workspace.extract, shapes, change_set.changing, declared=shell is None
            )
        crash_after("checked")
        keep_change(workspace, change_set, folder, shapes)
        per_row = bytes_per_row(workspace.extract, looked.base, change_set, counts.after)
        rebuilt_above = rebuild_above(
            rows=counts.after, bytes_per_row=per_row, limit=context.spec.thresholds.rebuild_factor
        )
        tables = {
            table: _table_manifest(
                *(change_set.of(table), looked.of(table).base, relations[table], shape, verified[table]),
                applied.get(table),
            )
            for table, shape in shapes.items()
        }
        manifest = {
            "extract": context.spec.name,
            "change_set": change_set.id,
            "change_sets": [*change_set.settles, change_set.id],
            "base": change_set.base,
            "replaced_in": looked.base.id if looked.base and change_set.decision == "incremental" else None,
            "source_version": change_set.source_version,
            "server_version": looked.server.version_text,
            # What the spec says: a later plan shows what was changed there since.
            "definition": definition_fields(context.spec),
            "decision": change_set.decision,
            "sentence": change_set.sentence,
            "seconds": dict(context.stages.seconds),
            "reports": change_set.reports,
            "bytes_per_row": per_row,
            "rebuild_above": rebuilt_above,
            # Of several tables, what is told by slice is the main one's.
            **next(iter(tables.values())),
        }
        if context.spec.tables:
            manifest |= {
                "known": change_set.known.__dict__,
                "fingerprint": joined_digest({table: one["fingerprint"] for table, one in tables.items()}),
                "keys": change_set.keys if change_set.decision == "incremental" else None,
                "rows": counts.after,
                "rows_purged": counts.purged,
                "rows_appended": counts.appended,
                "warnings": list(warnings),
                "tables": tables,
            }
        version = context.versions.commit(
            workspace, manifest, after=looked.confirmed.version if looked.confirmed else None
        )
    crash_after("verified")
    return AppliedVersion(version, counts)


def _table_manifest(
    change_set: ChangeSet,
    base: Version | None,
    relation: Relation,
    shape: ExtractShape,
    verified: VerifiedTable,
    counts: Applied | None,
) -> dict[str, Any]:
    """Return what a version's manifest tells of a table; `counts` is None for one that did not change."""
    sums = verified.sums
    rows = slice_rows(sums)
    known = {**last_verified(base, change_set), **verified.compared}
    return {
        "comments": {column.name: column.comment for column in relation.columns if column.comment},
        "known": change_set.known.__dict__,
        "watermark": change_set.watermark,
        "fingerprint": content_digest(sums),
        "content_sums": sums_to_json(sums),
        "slice_digests": slice_digests(sums),
        # By slice, the source version at which it last equalled the source; and the same of this refresh alone.
        "verified": {name: version for name, version in known.items() if name in rows},
        "compared": verified.compared,
        "odd_keys": verified.odd_keys,
        "keys": change_set.keys if change_set.decision != "full" else None,
        "rows": counts.after if counts else sum(rows.values()),
        "rows_purged": counts.purged if counts else 0,
        "rows_appended": counts.appended if counts else 0,
        "slice_rows": rows,
        "shape": shape_to_json(shape),
    }
