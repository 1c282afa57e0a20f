"""The history of an extract: for each confirmed version what was replaced, with the rows before and after, for some days."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import BEFORE, ROWS, ChangeSet, parts_of, table_folder
from tir_dagster.files import copy_file, sync
from tir_dagster.refresh.state.mirror import fetched, is_stored, look, mirror_of, push
from tir_dagster.refresh.state.versions import Version

_RECORD = "record.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class HistoryEntry:
    """One confirmed version: when it was confirmed, what it was made of, and where its replaced rows lie."""

    folder: Path
    confirmed_at: datetime
    version: str
    manifest: Mapping[str, Any]
    # None for a version that was published again, by a rollback.
    change_set: ChangeSet | None

    def of(self, table: str) -> HistoryEntry:
        """Return what the entry tells of this table alone."""
        if not table:
            return self
        return replace(
            self,
            folder=table_folder(self.folder, table),
            manifest={**self.manifest, **self.manifest.get("tables", {}).get(table, {"slice_rows": {}})},
            change_set=self.change_set.parts.get(table) if self.change_set else None,
        )

    @property
    def source_version(self) -> str:
        return str(self.manifest["source_version"])

    @property
    def before(self) -> list[Path]:
        """The rows that were removed."""
        return parts_of(fetched(self.folder / BEFORE))

    @property
    def after(self) -> list[Path]:
        """The rows that were added."""
        return parts_of(fetched(self.folder / ROWS))

    @property
    def has_rows(self) -> bool:
        """Whether the replaced rows were kept: not of a version for which everything was loaded."""
        return (self.folder / BEFORE).is_dir() or is_stored(self.folder / BEFORE)


class HistoryStore:
    """The entries of one extract, a folder each; complete or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, version: Version, change_set_folder: Path, change_set: ChangeSet | None, *, now: datetime) -> None:
        """Keep what made the version. Repeating it is harmless."""
        target = self.folder / version.id
        if is_stored(target) or (target.exists() and mirror_of(target) is None):
            return
        # What is left here of an entry that did not get to the shared store.
        shutil.rmtree(target, ignore_errors=True)
        folder = self.folder / f"{_UNFINISHED}{version.id}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True, mode=0o700)
        try:
            if change_set is not None and change_set.decision == "incremental":
                for table in change_set.tables:
                    for kind in (BEFORE, ROWS):
                        # Where most rows change, the old ones are not written down.
                        if (table_folder(change_set_folder, table) / kind).is_dir():
                            _link(table_folder(change_set_folder, table) / kind, table_folder(folder, table) / kind)
            record = {
                "confirmed_at": now.isoformat(),
                "version": version.id,
                "manifest": dict(version.manifest),
                "change_set": json.loads(change_set.to_json()) if change_set else None,
            }
            (folder / _RECORD).write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
            sync(folder / _RECORD)
            folder.rename(target)
            sync(self.folder)
            push(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def entries(self) -> list[HistoryEntry]:
        """Return all readable entries, the newest first."""
        look(self.folder)
        folders = self._folders()
        if mirror := mirror_of(self.folder):
            mirror.fetch(*(folder / _RECORD for folder in folders))
        entries = [entry for folder in folders if (entry := _read(folder)) is not None]
        return sorted(entries, key=lambda entry: (entry.confirmed_at, entry.version), reverse=True)

    def _folders(self) -> list[Path]:
        """Return the folders of all entries, those of the lowest versions first."""
        mirror = mirror_of(self.folder)
        names = mirror.names(self.folder) if mirror else (path.name for path in self.folder.glob("[!.]*"))
        return [self.folder / name for name in sorted(names, key=lambda name: (len(name), name))]

    def prune(self, *, days: float, now: datetime) -> None:
        """Remove entries that are older, and what a crash left unfinished; call it only while holding the extract's lease."""
        folders, going = self._folders(), []
        # Versions are confirmed in their order, so the first one that stays ends the search: there may be thousands.
        for folder in folders:
            fetched(folder / _RECORD)
            entry = _read(folder)
            if entry is not None and now - entry.confirmed_at <= timedelta(days=days):
                break
            going.append(folder)
        staying = set(folders) - set(going)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in staying:
                shutil.rmtree(path, ignore_errors=True)
        push(*going)


def _link(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True)
    for file in parts_of(source):
        try:
            (target / file.name).hardlink_to(file)
        except OSError:
            # Some file systems know no hard links.
            copy_file(file, target / file.name)


def _read(folder: Path) -> HistoryEntry | None:
    if folder.name.startswith(_UNFINISHED):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        value = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        change_set = value["change_set"]
        return HistoryEntry(
            folder,
            datetime.fromisoformat(value["confirmed_at"]),
            value["version"],
            value["manifest"],
            ChangeSet.from_mapping(change_set) if change_set else None,
        )
    return None
