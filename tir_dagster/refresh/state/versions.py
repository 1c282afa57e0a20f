"""Extract versions on disk: a folder per version, complete or not there, the newest ones kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster.errors import ExtractError
from tir_dagster.files import shares_blocks, sync
from tir_dagster.refresh.state.mirror import fetched, is_stored, look, mirror_of, push

EXTRACT_FILE = "extract.hyper"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"v(\d{8,})")
_WORKSPACE = ".work."
_LEAVING = ".gone."
_SPARE = ".spare."
# The replacement that made a version of the one before: its keys and rows.
CHANGE_FOLDER = "change"
# In a version's folder: the package that people built around the extract, without its rows.
SHELL = "shell.tdsx"


@dataclass(frozen=True)
class Workspace:
    """A folder in which the next version is prepared; it is invisible until it is committed."""

    folder: Path

    @property
    def extract(self) -> Path:
        return self.folder / EXTRACT_FILE


@dataclass(frozen=True)
class Version:
    """A complete version: its number, its folder, and its manifest."""

    number: int
    folder: Path
    manifest: Mapping[str, Any]

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its tables, the main one first; the only one of an extract of one table has none."""
        return tuple(self.manifest.get("tables", ())) or ("",)

    def of(self, table: str) -> Version:
        """Return the version as one of this table alone: its manifest tells of no other."""
        if not table:
            return self
        return Version(self.number, self.folder, {**self.manifest, **self.manifest["tables"][table], "tables": {}})

    @property
    def id(self) -> str:
        return self.folder.name.removeprefix(_SPARE)

    @property
    def extract(self) -> Path:
        return self.file(EXTRACT_FILE)

    @property
    def shell(self) -> Path:
        """The package that people built around the extract, without its rows; there may be none."""
        return self.file(SHELL)

    def file(self, name: str) -> Path:
        """Return the path of one of its files or folders; where the state is shared, it is fetched when it is first needed."""
        return fetched(self.folder / name)


class VersionStore:
    """The versions of one extract. One writer at a time, which is the caller's lease; any number of readers.

    A version appears by one rename of a folder whose manifest was written last, and leaves by one rename before its
    files are removed: wherever a crash happens, a folder named v… is complete or its manifest shows that it is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> Workspace:
        """Create an empty workspace beside the versions; remove what an earlier crash left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        workspace = Workspace(self.folder / f"{_WORKSPACE}{uuid.uuid4().hex}")
        workspace.folder.mkdir(parents=True)
        return workspace

    def commit(self, workspace: Workspace, manifest: Mapping[str, Any], *, after: str | None = None) -> Version:
        """Make the workspace the newest version; it is on the disk when this returns.

        `after` is the last confirmed version, which may be lost: its name is never used again.
        """
        files = {
            str(path.relative_to(workspace.folder)): path.stat().st_size
            for path in sorted(workspace.folder.rglob("*"))
            if path.is_file() and path.name != MANIFEST_FILE
        }
        if EXTRACT_FILE not in files:
            raise ExtractError(f"{workspace.folder} has no {EXTRACT_FILE}, so it is no version. Run the refresh again.")
        named = [*self._named(), *([Path(after)] if after and _NAME.fullmatch(after) else [])]
        number = max((_number(path) for path in named), default=0) + 1
        for name in files:
            sync(workspace.folder / name)
        # No checksum, which would read the whole extract again, and no times: Hyper touches a file it only reads.
        written = {**manifest, "version": number, "files": files}
        _write(workspace.folder / MANIFEST_FILE, written)
        for folder in {path.parent for path in map(workspace.folder.joinpath, files)} | {workspace.folder}:
            sync(folder)
        folder = self.folder / f"v{number:08d}"
        workspace.folder.rename(folder)
        sync(self.folder)
        push(folder)
        return Version(number, folder, written)

    def abandon(self, workspace: Workspace) -> None:
        """Remove a workspace that will not become a version."""
        shutil.rmtree(workspace.folder, ignore_errors=True)

    def versions(self) -> list[Version]:
        """Return all complete versions, oldest first; skip broken folders."""
        look(self.folder)
        versions = [version for path in self._named() if (version := _read(path)) is not None]
        return sorted(versions, key=lambda version: version.number)

    def latest(self) -> Version | None:
        versions = self.versions()
        return versions[-1] if versions else None

    def find(self, version_id: str) -> Version | None:
        """Return the version of that id; None if it is not there, or if a file of it is lost where the state is shared."""
        version = next((version for version in self.versions() if version.id == version_id), None)
        mirror = mirror_of(self.folder)
        return version if version is None or mirror is None or mirror.is_whole(version.folder) else None

    def get(self, version_id: str) -> Version:
        """Return the version of that id, such as v00000012."""
        version = self.find(version_id)
        if version is None:
            raise ExtractError(
                f"{self.folder} has no complete version {version_id}. It was pruned or lost: run a full refresh."
            )
        return version

    def prune(self, keep: int = 3, *, protected: Collection[str] = (), most_bytes: int | None = None) -> list[str]:
        """Remove all but the newest versions, and of these the oldest until they fit; return the removed ids.

        The newest version and the protected ones are never removed.
        """
        complete = self.versions()
        staying = {version.id for version in complete[-max(keep, 1) :]} | set(protected)
        if most_bytes is not None:
            staying &= _fitting(complete, most_bytes, protected)
        going = [version for version in complete if version.id not in staying]
        if going and not shares_blocks(self.folder):
            self._set_aside(going[-1], [version for version in complete if version.id in staying], most_bytes)
        for version in going:
            if version.folder.is_dir():
                self._remove(version.folder)
        push(*(version.folder for version in going))
        return [version.id for version in going]

    def spare(self) -> Version | None:
        """Return a version that is no longer needed, whose file may become the next version; None if there is none."""
        return next((version for path in self._spares() if (version := _read(path)) is not None), None)

    def drop_spare(self) -> None:
        for path in self._spares():
            shutil.rmtree(path, ignore_errors=True)

    def _spares(self) -> list[Path]:
        return list(self.folder.glob(f"{_SPARE}v*")) if self.folder.is_dir() else []

    def _set_aside(self, version: Version, staying: Sequence[Version], most_bytes: int | None) -> None:
        """Keep the version's file as the spare one: a copy of the next base would need the same space."""
        self.drop_spare()
        if most_bytes is None or sum(map(_bytes, (version, *staying))) <= most_bytes:
            version.folder.rename(self.folder / f"{_SPARE}{version.id}")
            sync(self.folder)

    def _clean(self) -> None:
        """Remove workspaces, half-removed versions and broken ones."""
        broken = []
        for path in self.folder.iterdir():
            if path.name.startswith((_WORKSPACE, _LEAVING)):
                shutil.rmtree(path, ignore_errors=True)
            elif (_NAME.fullmatch(path.name) or path.name.startswith(_SPARE)) and _read(path) is None:
                if is_stored(path) and _is_whole_elsewhere(path):
                    continue
                self._remove(path)
                broken.append(path)
        push(*broken)

    def _remove(self, folder: Path) -> None:
        leaving = self.folder / f"{_LEAVING}{folder.name}.{uuid.uuid4().hex[:8]}"
        folder.rename(leaving)
        sync(self.folder)
        shutil.rmtree(leaving, ignore_errors=True)

    def _named(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]


def _fitting(versions: Sequence[Version], most_bytes: int, protected: Collection[str]) -> set[str]:
    """Return the versions that fit, the newest and the protected ones first; a shared file counts once."""
    kept: set[str] = set()
    seen: dict[int, int] = {}
    elsewhere = 0
    must = {version.id for version in versions[-1:]} | set(protected)
    for version in sorted(versions, key=lambda candidate: (candidate.id in must, candidate.number), reverse=True):
        stats = [path.stat() for path in version.folder.rglob("*") if path.is_file()]
        more = {entry.st_ino: entry.st_size for entry in stats if entry.st_ino not in seen}
        # Where the state is shared, files that nobody needed here are only in the store.
        missing = sum(size for name, size in version.manifest["files"].items() if not (version.folder / name).exists())
        if version.id not in must and sum(seen.values()) + sum(more.values()) + elsewhere + missing > most_bytes:
            break
        kept.add(version.id)
        seen |= more
        elsewhere += missing
    return kept


def _bytes(version: Version) -> int:
    return sum(path.stat().st_size for path in version.folder.rglob("*") if path.is_file())


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name.removeprefix(_SPARE))
    assert match is not None
    return int(match[1])


def _read(path: Path) -> Version | None:
    """Return the version in this folder; None if its manifest or one of its files is missing or cut."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        whole = all(_is_whole(path / name, size) for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Version(_number(path), path, manifest) if whole and EXTRACT_FILE in manifest["files"] else None


def _is_whole_elsewhere(folder: Path) -> bool:
    """Drop what is damaged on this disk; return whether the version is whole by what the shared store has."""
    for file in [file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST_FILE]:
        file.unlink()
    return _read(folder) is not None


def _is_whole(path: Path, size: int) -> bool:
    """Whether the file has its recorded size; an extract only needs content, because Hyper writes to files it opens."""
    if not path.exists() and is_stored(path):
        return True
    actual_size = path.stat().st_size
    return actual_size > 0 if path.name == EXTRACT_FILE else actual_size == size


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_version(store: VersionStore) -> Iterator[Workspace]:
    """Give a workspace that is removed unless it is committed inside the block."""
    workspace = store.begin()
    try:
        yield workspace
    finally:
        store.abandon(workspace)
