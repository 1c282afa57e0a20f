"""Read and rewrite a .tdsx without trusting it: names stay inside, sizes stay bounded, foreign members stay as they are."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_MEMBERS = 10_000
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_ENCRYPTED = 0x1


class BadPackageError(ValueError):
    """The file cannot be published; the message says why, in one sentence for people."""


class Package:
    """An opened .tdsx whose member names and declared sizes have been checked."""

    def __init__(self, file: Path | IO[bytes], *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        try:
            self._zip = zipfile.ZipFile(file)
            members = self._zip.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise BadPackageError("The file is not a zip archive, or it is damaged.") from error
        try:
            _check_members(members, max_bytes)
        except BadPackageError:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def names(self) -> list[str]:
        return [member.filename for member in self._zip.infolist() if not member.is_dir()]

    def document_name(self, suffix: str = ".tds") -> str:
        """The one .tds of the package, or the one .twb of a workbook's, at any folder level."""
        found = [name for name in self.names() if name.lower().endswith(suffix)]
        if len(found) != 1:
            raise BadPackageError(f"A package holds exactly one {suffix} file; this one holds {len(found)}.")
        return found[0]

    def document(self, suffix: str = ".tds") -> bytes:
        with self._open(self.document_name(suffix)) as member:
            text = member.read(MAX_DOCUMENT_BYTES + 1)
        if len(text) > MAX_DOCUMENT_BYTES:
            raise BadPackageError(f"The {suffix} file is too large.")
        return text

    def member_at(self, name: str) -> str | None:
        """The member a document's path means: written with either slash, from the package's root."""
        wanted = name.replace("\\", "/")
        return next((member for member in self.names() if member.replace("\\", "/") == wanted), None)

    def extract_to(self, name: str, target: Path) -> None:
        """Copy one member to a file we name; counted while it is read, because a header may lie about its size."""
        with self._open(name) as member, target.open("wb") as out:
            _copy_bounded(member, out, self._max_bytes)

    def _open(self, name: str) -> IO[bytes]:
        try:
            return _Checked(self._zip.open(name))  # type: ignore[return-value]
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise BadPackageError(f"The member {name!r} cannot be read: {error}") from error

    def rewrite(self, target: Path, replacements: Mapping[str, Path | bytes]) -> None:
        """The same package with some members replaced; all others keep their bytes, order and dates."""
        self._write(target, lambda _: True, replacements)

    def without_extracts(self, target: Path) -> None:
        """The same package without its extract files."""
        self._write(target, lambda name: not name.lower().endswith((".hyper", ".tde")), {})

    def _write(self, target: Path, keep: Callable[[str], bool], replacements: Mapping[str, Path | bytes]) -> None:
        with target.open("wb") as raw:
            with zipfile.ZipFile(raw, "w", compresslevel=1) as out:
                for member in self._zip.infolist():
                    if keep(member.filename):
                        self._copy_member(member, out, replacements.get(member.filename))
            raw.flush()
            os.fsync(raw.fileno())

    def _copy_member(self, member: zipfile.ZipInfo, out: zipfile.ZipFile, replacement: Path | bytes | None) -> None:
        info = zipfile.ZipInfo(member.filename, member.date_time)
        info.compress_type = zipfile.ZIP_STORED if member.is_dir() else zipfile.ZIP_DEFLATED
        info.external_attr = member.external_attr
        # ZipInfo of our own making ignores the archive's level; without it 6 is used, slow for a large extract.
        info._compresslevel = 1  # type: ignore[attr-defined]  # noqa: SLF001
        with out.open(info, "w", force_zip64=True) as sink:
            if isinstance(replacement, bytes):
                sink.write(replacement)
            elif replacement is not None:
                with replacement.open("rb") as source:
                    shutil.copyfileobj(source, sink, _CHUNK)
            elif not member.is_dir():
                with self._open(member.filename) as source:
                    _copy_bounded(source, sink, self._max_bytes)


class _Checked:
    """A member's stream whose damage is told as a bad package."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except (zipfile.BadZipFile, EOFError, ValueError, OSError) as error:
            raise BadPackageError(f"The archive is damaged: {error}") from error
        except Exception as error:
            if type(error).__module__ in ("zlib", "lzma", "_lzma"):
                raise BadPackageError(f"The archive is damaged: {error}") from error
            raise


def _check_members(members: list[zipfile.ZipInfo], max_bytes: int) -> None:
    if len(members) > MAX_MEMBERS:
        raise BadPackageError(f"The archive holds more than {MAX_MEMBERS} members.")
    if sum(member.file_size for member in members) > max_bytes:
        raise BadPackageError("The archive is too large once it is unpacked.")
    names = set()
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        drive = len(member.filename) > 1 and member.filename[1] == ":"
        if path.is_absolute() or drive or ".." in path.parts or not path.parts:
            raise BadPackageError(f"The member name {member.filename!r} leads out of the archive.")
        if member.flag_bits & _ENCRYPTED:
            raise BadPackageError(f"The member {member.filename!r} is encrypted.")
        if str(path) in names:
            raise BadPackageError(f"The archive holds {member.filename!r} twice.")
        names.add(str(path))


def _copy_bounded(source: IO[bytes], sink: IO[bytes], limit: int) -> None:
    copied = 0
    while block := source.read(_CHUNK):
        copied += len(block)
        if copied > limit:
            raise BadPackageError("The archive is too large once it is unpacked.")
        sink.write(block)
