"""Files that appear whole or not at all: written beside, synced, renamed; and room on the disk asked for first."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tir_dagster.errors import MachineError

_MEGABYTE = 1024 * 1024


@contextlib.contextmanager
def replaced_file(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to; when the block ends well it takes target's place, otherwise it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.stem}.{uuid.uuid4().hex[:12]}{target.suffix}"
    try:
        yield beside
        sync(beside)
        beside.replace(target)
        sync(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def need_space(folder: Path, needed: int) -> None:
    """Refuse before anything is written when the disk cannot hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{folder} needs {_megabytes(needed)} of free disk space and has {_megabytes(free)}. "
            "Make room there or move the extracts to a larger disk, then run again."
        )


def _megabytes(count: int) -> str:
    return f"{-(-count // _MEGABYTE):,} MB"


def total_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())
