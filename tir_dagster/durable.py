"""Files that appear whole or not at all: written beside, synced, renamed; copied cheaply; and room on the disk asked for first."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tir_dagster.errors import MachineError

_MEGABYTE = 1024 * 1024
# linux/fs.h: _IOW(0x94, 9, int). Btrfs, XFS, bcachefs and others then share the blocks until one of the files is written.
_FICLONE = 0x40049409
_AT_ONCE = 1 << 30
# The file system, or this pair of them, cannot do it; anything else is trouble of its own.
_CANNOT = (
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL),
    *(errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF, errno.ETXTBSY),
)


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


def copy_file(source: Path, target: Path) -> None:
    """Copy a whole file, in place of what is at `target`, without its permissions and times.

    Where the file system shares blocks this costs nothing, whatever the size; else the kernel copies, without a byte
    passing through this process.
    """
    with source.open("rb") as opened, target.open("wb") as made:
        if _share_blocks(opened.fileno(), made.fileno()) or _copy_in_kernel(opened.fileno(), made.fileno()):
            return
    # Also macOS, where it is the system's own copy.
    shutil.copyfile(source, target)


def shares_blocks(folder: Path) -> bool:
    """Whether a copy of a file in this folder costs nothing, whatever its size."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=folder) as target:
        source.write(b"block")
        source.flush()
        return _share_blocks(source.fileno(), target.fileno())


def _share_blocks(source: int, target: int) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl  # noqa: PLC0415 - not on every system

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True


def _copy_in_kernel(source: int, target: int) -> bool:
    if sys.platform != "linux":
        return False
    done, size = 0, os.fstat(source).st_size
    while done < size:
        try:
            moved = os.copy_file_range(source, target, min(size - done, _AT_ONCE), done, done)
        except OSError as error:
            if error.errno in _CANNOT:
                return False
            raise
        if not moved:
            # Some network file systems say so of files that are not at their end.
            return False
        done += moved
    return True


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
