"""Change sets and intents on disk: each whole or not there, whatever happens while it is written."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import KEYS, ChangeSet, parts_of, table_folder
from tir_dagster.errors import TirError
from tir_dagster.files import replaced_file, sync
from tir_dagster.refresh.state.mirror import fetched, look, push
from tir_dagster.refresh.state.records import Intent

MANIFEST = "change_set.json"
_DAMAGED = (ValueError, KeyError, TypeError)
_UNFINISHED = ".unfinished-"


class DamagedStateError(TirError, ValueError):
    """A file of pending work cannot be read; its content is not guessed."""


def new_id() -> str:
    """Return a new, unique name for a change set; names sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


class ChangeSetStore:
    """The change sets of one extract under a folder: pending until a confirmation settles them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._intent = folder / "intent.json"
        self._looked = folder / "looked.json"

    def path(self, change_set: str) -> Path:
        """Return the folder of a change set, with all its files."""
        return fetched(self._folder / change_set)

    def keys(self, change_set: str, table: str = "") -> list[Path]:
        """Return the files with a change set's keys, or with those of one of several tables."""
        return parts_of(table_folder(self.path(change_set), table) / KEYS)

    @contextmanager
    def staging(self, change_set: str) -> Iterator[Path]:
        """Give a folder to fill; it is removed unless it is committed inside the block."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder / f"{_UNFINISHED}{change_set}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, change_set: ChangeSet, folder: Path) -> ChangeSet:
        """Make the staged folder durable and give it its name: from here on the change set is pending."""
        (folder / MANIFEST).write_text(change_set.to_json(), encoding="utf-8")
        for path in [*folder.rglob("*"), folder]:
            sync(path)
        # If a run repeats the same partition, the new set contains the old one's keys, like those of every pending set.
        self._take_away(change_set.id)
        folder.rename(self._folder / change_set.id)
        sync(self._folder)
        push(self._folder / change_set.id)
        return change_set

    def get(self, change_set: str) -> ChangeSet:
        file = self._folder / change_set / MANIFEST
        try:
            return ChangeSet.from_json(file.read_text(encoding="utf-8"))
        except _DAMAGED as error:
            raise DamagedStateError(
                f"{self._folder.parent.name}: {file} cannot be read, so nobody knows which keys were about to be replaced. Nothing"
                f" was touched. Remove {file.parent}, then run tir refresh {self._folder.parent.name} --full."
            ) from error

    def pending(self) -> tuple[ChangeSet, ...]:
        """Return all unsettled change sets, oldest first; raise if one cannot be read."""
        look(self._folder)
        if not self._folder.is_dir():
            return ()
        names = sorted(path.parent.name for path in self._folder.glob(f"*/{MANIFEST}"))
        return tuple(self.get(name) for name in names if not name.startswith(_UNFINISHED))

    def settle(self, change_sets: tuple[str, ...]) -> None:
        """Remove change sets that a confirmation covers. Repeating it is harmless."""
        # First: an intent refers to a change set.
        self._intent.unlink(missing_ok=True)
        for name in change_sets:
            self._take_away(name)
        push(self._intent, *(self._folder / name for name in change_sets))

    def _take_away(self, change_set: str) -> None:
        """Remove a change set in one step: half of one would be pending and unreadable."""
        going = self._folder / f"{_UNFINISHED}{change_set}-{uuid.uuid4().hex[:8]}"
        with suppress(FileNotFoundError):
            (self._folder / change_set).rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def clean(self) -> None:
        """Remove what crashed runs left unfinished; call it only while holding the extract's lease."""
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def intend(self, intent: Intent) -> None:
        with replaced_file(self._intent) as beside:
            beside.write_text(intent.to_json(), encoding="utf-8")
        push(self._intent)

    def note_job(self, version: str, job_id: str) -> None:
        """Record the server's job in the intent, if it is still about this version."""
        self._change_intent(version, job=job_id)

    def note_asked_job(self, version: str) -> None:
        """Record that a publish by a job is about to be asked for, if the intent is still about this version."""
        self._change_intent(version, by_job=True, job=None)

    def _change_intent(self, version: str, **changes: Any) -> None:
        intent = self.intent()
        if intent is not None and intent.version == version:
            self.intend(replace(intent, **changes))

    def intent(self) -> Intent | None:
        look(self._folder)
        try:
            return Intent.from_json(self._intent.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except _DAMAGED as error:
            raise DamagedStateError(
                f"{self._intent} cannot be read. Run a refresh: it compares what is there."
            ) from error

    def drop_intent(self) -> None:
        self._intent.unlink(missing_ok=True)
        push(self._intent)

    def looked_at(self, base: str) -> frozenset[int]:
        """Return the reported hints that gave no change set for this base; for another base they are checked again."""
        look(self._folder)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            # If it is lost or unreadable, they are checked once more.
            value = json.loads(self._looked.read_text(encoding="utf-8"))
            return frozenset(value["reports"]) if value["base"] == base else frozenset()
        return frozenset()

    def remember_looked_at(self, base: str, reports: Iterable[int]) -> None:
        """Record hints that were completely compared with the base without a difference."""
        known = sorted({*self.looked_at(base), *reports})
        self._folder.mkdir(parents=True, exist_ok=True)
        with replaced_file(self._looked) as beside:
            beside.write_text(json.dumps({"base": base, "reports": known}), encoding="utf-8")
        push(self._looked)
