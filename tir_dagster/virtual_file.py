"""A file that is put together from bytes and stretches of other files, and never written: what a publish sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from tir_dagster.durable import need_space, replaced_file
from tir_dagster.errors import MachineError

_BLOCK = 1024 * 1024


@dataclass(frozen=True)
class FileRange:
    """A stretch of a file, and when that file was last written."""

    path: Path
    start: int
    size: int
    written_at: int

    @classmethod
    def of(cls, path: Path, start: int = 0, size: int | None = None) -> Self:
        """A stretch of the file as it is now; without a size, all from `start` on."""
        found = path.stat()
        return cls(path, start, found.st_size - start if size is None else size, found.st_mtime_ns)

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
        found = self.path.stat()
        if found.st_mtime_ns != self.written_at or found.st_size < self.start + self.size:
            raise self.changed()

    def changed(self) -> MachineError:
        return MachineError(
            f"{self.path} was written to while it was being sent. Nothing was published. Close it where else it is open, then run again."
        )


@dataclass(frozen=True)
class VirtualFile:
    """A name and content that can be read from anywhere, any number of times, a block at a time."""

    name: str
    parts: tuple[bytes | FileRange, ...]

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> Self:
        """A file as it is, under its own name or another one."""
        return cls(name or path.name, (FileRange.of(path),))

    @property
    def kind(self) -> str:
        """What its name ends with, such as .tdsx."""
        return Path(self.name).suffix

    @cached_property
    def size(self) -> int:
        return sum(map(_size, self.parts))

    def blocks(self, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The bytes of a stretch, at most a megabyte of them in memory at once."""
        left, skipped = self.size - start if size is None else size, start
        for part in self.parts:
            here = min(_size(part) - skipped, left)
            if here > 0:
                yield from [part[skipped : skipped + here]] if isinstance(part, bytes) else part.blocks(skipped, here)
                left -= here
            skipped = max(0, skipped - _size(part))

    def check(self) -> None:
        """Raise MachineError if a file it is made of was written to since: what was sent would not fit together."""
        for part in self.parts:
            if isinstance(part, FileRange):
                part.check()

    def write(self, target: Path) -> Path:
        """Make it a file, in place of what was there."""
        need_space(target.parent, self.size)
        with replaced_file(target) as beside, beside.open("wb") as sink:
            for block in self.blocks():
                sink.write(block)
        return target


def _size(part: bytes | FileRange) -> int:
    return len(part) if isinstance(part, bytes) else part.size
