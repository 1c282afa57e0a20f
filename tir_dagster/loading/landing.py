"""Where files land: a folder or an S3 prefix, listed and opened by pyarrow's own filesystems; no jars."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote, urlparse

from pyarrow import fs

from tir_dagster.errors import LoadError
from tir_dagster.loading.declared import Files

_CHUNK = 8 << 20
_HIDDEN = ("_", ".")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class LandedFile:
    """A file as the listing shows it; `stamp` changes whenever it is written again."""

    path: str
    size: int
    modified: datetime
    stamp: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass(frozen=True)
class Place:
    """The filesystem that an address means, and the path in it. It can be pickled: tasks open files by it."""

    address: str
    # How S3 is reached besides the environment's own AWS variables; no secret is in here.
    options: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(address: str, env: Mapping[str, str] = os.environ) -> Place:
        options: dict[str, str] = {}
        if endpoint := next((env[name] for name in _ENDPOINTS if env.get(name)), None):
            found = urlparse(endpoint)
            options = {"endpoint_override": found.netloc, "scheme": found.scheme}
        if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"):
            options["region"] = region
        return Place(address.rstrip("/"), tuple(sorted(options.items())))

    @property
    def is_s3(self) -> bool:
        return self.address.startswith("s3://")

    @cached_property
    def filesystem(self) -> Any:
        if self.is_s3:
            # A region that is not given would be asked of a real AWS, also where the endpoint is another one.
            given = {"region": "us-east-1", **dict(self.options)} if self.options else {}
            return fs.S3FileSystem(connect_timeout=10, request_timeout=60, **given)
        return fs.LocalFileSystem()

    @cached_property
    def root(self) -> str:
        return self.inner(self.address)

    @staticmethod
    def inner(address: str) -> str:
        """The path that the filesystem understands."""
        if address.startswith("s3://"):
            return address.removeprefix("s3://")
        return unquote(address.removeprefix("file://")) or "/"

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def listed(self) -> list[LandedFile]:
        """Every file below the address; the address must be there."""
        with self.told(self.address):
            if not self.is_s3 and self.filesystem.get_file_info(self.root).type is not fs.FileType.Directory:
                raise LoadError(f"{self.address} is no folder. Create it, or correct `files.path` in the load's spec.")
            found = self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=True, allow_not_found=False))
        return [self._landed(info) for info in found if info.type is fs.FileType.File]

    def look(self, path: str) -> LandedFile | None:
        """The file as it is now; None if it is gone."""
        with self.told(path):
            info = self.filesystem.get_file_info(self.inner(path))
        return self._landed(info) if info.type is fs.FileType.File else None

    def _landed(self, info: Any) -> LandedFile:
        scheme = "s3://" if self.is_s3 else "file://"
        modified = datetime.fromtimestamp((info.mtime_ns or 0) / 1e9, UTC)
        return LandedFile(f"{scheme}{info.path}", info.size, modified, f"{info.size}/{info.mtime_ns}")

    @contextmanager
    def opened(self, path: str) -> Iterator[Any]:
        with self.told(path), self.filesystem.open_input_file(self.inner(path)) as file:
            yield file

    def digest(self, path: str) -> str:
        """The file's content in a few letters: S3 knows it as the ETag, a local file is read once."""
        if self.is_s3:
            with self.told(path), self.filesystem.open_input_stream(self.inner(path)) as stream:
                tag = (stream.metadata() or {}).get(b"ETag")
                if tag:
                    return f"etag {tag.decode().strip(chr(34))}"
        known = hashlib.md5(usedforsecurity=False)
        with self.opened(path) as file:
            while chunk := file.read(_CHUNK):
                known.update(chunk)
        return f"md5 {known.hexdigest()}"

    @contextmanager
    def told(self, path: str) -> Iterator[None]:
        """What the filesystem says becomes an error that says which file and what to do."""
        try:
            yield
        except OSError as error:
            _fail(path, error)


def _fail(path: str, error: OSError) -> NoReturn:
    said = " ".join(str(error).split())[:300]
    low = said.upper()
    if "ACCESS_DENIED" in low or "ACCESS DENIED" in low or "FORBIDDEN" in low or isinstance(error, PermissionError):
        raise LoadError(
            f"{path}: reading it is forbidden. Check the AWS credentials and the bucket's policy, or the folder's rights."
        ) from None
    if "NO_SUCH_BUCKET" in low or "BUCKET DOES NOT EXIST" in low:
        raise LoadError(f"{path}: the bucket does not exist. Correct `files.path` in the load's spec.") from None
    if isinstance(error, FileNotFoundError):
        raise LoadError(
            f"{path}: it is not there, or no longer. Nothing was loaded; look for who removes files, then run again."
        ) from None
    raise LoadError(f"{path}: it cannot be read: {said}. Nothing was loaded; mend it, then run again.") from None


def chosen(files: list[LandedFile], place: Place, declared: Files) -> list[LandedFile]:
    """Those that the pattern means, without markers and hidden files, in the order in which they are loaded."""
    root = f"{place.address}/"
    wanted = [
        file
        for file in files
        if not file.path.rpartition("/")[2].startswith(_HIDDEN)
        and not _is_marker(file.path, declared)
        and (
            fnmatch.fnmatch(file.path.removeprefix(root), declared.pattern)
            or fnmatch.fnmatch(file.path.rpartition("/")[2], declared.pattern)
        )
    ]
    return sorted(wanted, key=lambda file: order_key(file, declared))


def order_key(file: LandedFile, declared: Files) -> str:
    """Files sort by this text."""
    if declared.order == "modified":
        return f"{file.modified:%Y-%m-%dT%H:%M:%S.%f} {file.path}"
    return file.path


def complete(files: list[LandedFile], everything: list[LandedFile], declared: Files) -> list[LandedFile]:
    """Those whose marker is there; by size and time only a second look can tell."""
    if declared.complete == "stable":
        return files
    there = {file.path for file in everything}
    return [file for file in files if {f"{file.path}{declared.marker}", f"{file.folder}/{declared.marker}"} & there]


def _is_marker(path: str, declared: Files) -> bool:
    return declared.complete == "marker" and path.endswith(declared.marker)
