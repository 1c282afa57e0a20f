"""Notes beside the records: settings that a publish has to put back, the last comparison with the server's content, partial hints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tir_dagster.files import replaced_file
from tir_dagster.refresh.state.mirror import look, push
from tir_dagster.tableau.datasources import ServerVersion
from tir_dagster.tableau.settings import Attachments, KeptSettings

# Then nothing is put back, or rows are compared once more; rows never become wrong.
_UNREADABLE = (FileNotFoundError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class SettingsNote:
    """A datasource's settings before a publish, and the version of the datasource that had them."""

    version: ServerVersion
    kept: KeptSettings
    beside: Attachments
    # Which of them are still to be put back; None: all.
    left: tuple[str, ...] | None = None


def settings_file(folder: Path) -> Path:
    """The file with the settings that have not been put back yet; there is none if nothing is owed."""
    return folder / "kept.json"


def write_settings(folder: Path, note: SettingsNote) -> None:
    value = {
        "version": str(note.version),
        "kept": note.kept.as_json(),
        "beside": note.beside.as_json(),
        "left": note.left,
    }
    _write(settings_file(folder), value)


def read_settings(folder: Path) -> SettingsNote | None:
    with suppress(*_UNREADABLE):
        value = json.loads(settings_file(folder).read_text(encoding="utf-8"))
        version, kept = ServerVersion.parse(value["version"]), KeptSettings.from_json(value["kept"])
        beside, left = Attachments.from_json(value.get("beside", {})), value.get("left")
        return SettingsNote(version, kept, beside, None if left is None else tuple(left))
    return None


def forget_settings(folder: Path) -> None:
    _forget(settings_file(folder))


@dataclass(frozen=True)
class Compared:
    """The result of comparing the server's file with a local version."""

    # Of its rows, in every form; none if unknown, or if rows differ although their sums are equal.
    fingerprints: Sequence[str] = ()
    # An interrupted change, sent again, would make it right.
    heals: bool = False
    # Every row carries its purge key.
    keyed: bool = False
    # The table and its columns are what our changes are made for.
    alike: bool = False
    # People have made no document around it.
    bare: bool = False


def write_compared(folder: Path, of: Sequence[str | None], compared: Compared) -> None:
    """Keep the result of comparing `of`: the server's version, ours, and how they were compared."""
    _write(_compared_file(folder), {"of": list(of), "compared": asdict(compared)})


def read_compared(folder: Path, of: Sequence[str | None]) -> Compared | None:
    """Return the kept result if it is of these versions."""
    with suppress(*_UNREADABLE):
        value = json.loads(_compared_file(folder).read_text(encoding="utf-8"))
        if value["of"] == list(of):
            return Compared(**value["compared"])
    return None


def _compared_file(folder: Path) -> Path:
    return folder / "compared.json"


# After so many partial hints, those who send them are no longer believed alone.
TRUSTED_PARTIAL_HINTS = 1


def partial_hints(folder: Path) -> int:
    """Return how often hints described less than had changed, since everything was last loaded."""
    look(folder)
    with suppress(*_UNREADABLE):
        return int(json.loads(_hints_file(folder).read_text(encoding="utf-8"))["partial"])
    return 0


def note_partial_hints(folder: Path) -> None:
    _write(_hints_file(folder), {"partial": partial_hints(folder) + 1})


def forget_partial_hints(folder: Path) -> None:
    _forget(_hints_file(folder))


def _hints_file(folder: Path) -> Path:
    return folder / "hints.json"


def _write(file: Path, value: Any) -> None:
    with replaced_file(file) as beside:
        beside.write_text(json.dumps(value), encoding="utf-8")
    push(file)


def _forget(file: Path) -> None:
    file.unlink(missing_ok=True)
    push(file)
