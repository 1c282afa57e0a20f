"""Files: private folders, atomic writes, copies that share blocks, and virtual files that are assembled while they are sent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from tir_dagster.errors import MachineError

_MEGABYTE = 1024 * 1024
# linux/fs.h: _IOW(0x94, 9, int). Btrfs, XFS, bcachefs and others then share the blocks until one of the files is written.
_FICLONE = 0x40049409
_AT_ONCE = 1 << 30
# Errors by which a file system says that it does not support the call; any other error is a real problem.
_CANNOT = (
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL),
    *(errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF, errno.ETXTBSY),
)


def private_folder(folder: Path) -> Path:
    """Create the folder so that only its owner can enter it, whatever the umask: that protects everything below it.

    From one that is there already, everybody else's rights are taken. A group that may write in it keeps its rights:
    somebody gave them, for example to Spark's workers under another user.
    """
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        status = folder.stat()
        kept = stat.S_IRWXU | (stat.S_IRWXG | stat.S_ISGID if status.st_mode & stat.S_IWGRP else 0)
        mode = stat.S_IMODE(status.st_mode)
        if mode & ~kept and status.st_uid == os.geteuid():
            folder.chmod(mode & kept)
    return folder


@contextlib.contextmanager
def replaced_file(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to write to; it replaces `target` if the block succeeds, and is removed otherwise."""
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
    """Copy a file over `target`, without its permissions and times.

    Where the file system shares blocks, this costs nothing, whatever the size. Elsewhere the kernel copies, so no byte
    passes through this process.
    """
    with source.open("rb") as source_file, target.open("wb") as target_file:
        handles = source_file.fileno(), target_file.fileno()
        if _share_blocks(*handles) or _copy_in_kernel(*handles):
            return
    # Also macOS, where it is the system's own copy.
    shutil.copyfile(source, target)


def shares_blocks(folder: Path) -> bool:
    """Return whether the folder's file system shares blocks: then a copy costs nothing, whatever the size."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as source, tempfile.TemporaryFile(dir=folder) as target:
        source.write(b"block")
        source.flush()
        return _share_blocks(source.fileno(), target.fileno())


def _share_blocks(source: int, target: int) -> bool:
    if sys.platform != "linux":
        return False
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
            # Some network file systems report zero bytes before the end of a file.
            return False
        done += moved
    return True


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def need_space(folder: Path, needed: int) -> None:
    """Raise MachineError if the disk has less than `needed` bytes free."""
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


_BLOCK = 1024 * 1024


@dataclass(frozen=True)
class FileRange:
    """A range of bytes of a file, and the time when that file was last written."""

    path: Path
    start: int
    size: int
    written_at: int

    @classmethod
    def of(cls, path: Path, start: int = 0, size: int | None = None) -> Self:
        """Return a range of the file as it is now; without a size, everything from `start` on."""
        status = path.stat()
        return cls(path, start, status.st_size - start if size is None else size, status.st_mtime_ns)

    def blocks(self, start: int, size: int) -> Iterator[bytes]:
        with self.path.open("rb") as source:
            source.seek(self.start + start)
            while size:
                block = source.read(min(size, _BLOCK))
                if not block:
                    raise self.changed()
                size -= len(block)
                yield block

    def check(self) -> None:
        status = self.path.stat()
        if status.st_mtime_ns != self.written_at or status.st_size < self.start + self.size:
            raise self.changed()

    def changed(self) -> MachineError:
        return MachineError(
            f"{self.path} was written to while it was being sent. Nothing was published. Close other programs that use it, then run again."
        )


@dataclass(frozen=True)
class VirtualFile:
    """A name and content that can be read from any position, repeatedly, block by block."""

    name: str
    parts: tuple[bytes | FileRange, ...]

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> Self:
        """Return a virtual file with the content of a real one, under its own name or another."""
        return cls(name or path.name, (FileRange.of(path),))

    @property
    def kind(self) -> str:
        """The file extension, such as .tdsx."""
        return Path(self.name).suffix

    @cached_property
    def size(self) -> int:
        return sum(map(_size, self.parts))

    def blocks(self, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a range in blocks of at most one megabyte."""
        left, skipped = self.size - start if size is None else size, start
        for part in self.parts:
            here = min(_size(part) - skipped, left)
            if here > 0:
                yield from [part[skipped : skipped + here]] if isinstance(part, bytes) else part.blocks(skipped, here)
                left -= here
            skipped = max(0, skipped - _size(part))

    def check(self) -> None:
        """Raise MachineError if one of its files was changed since: the bytes sent would be inconsistent."""
        for part in self.parts:
            if isinstance(part, FileRange):
                part.check()

    def write(self, target: Path) -> Path:
        """Write it to `target`, replacing an existing file."""
        need_space(target.parent, self.size)
        with replaced_file(target) as beside, beside.open("wb") as sink:
            for block in self.blocks():
                sink.write(block)
        return target


def _size(part: bytes | FileRange) -> int:
    return len(part) if isinstance(part, bytes) else part.size
