"""The place where files land: a folder or an S3 prefix, listed and opened by pyarrow's own filesystems; no jars."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from pyarrow import fs

from tir_dagster.errors import LoadError
from tir_dagster.s3 import s3_client, s3_endpoint, s3_problem, s3_region
from tir_dagster.spec.load import Files
from tir_dagster.trust import S3_CA_VARIABLES, ca_file, proxy_for

_CHUNK = 8 << 20
_HIDDEN = ("_", ".")
# pyarrow's names of the access keys, and the environment's; roles and profiles are found by AWS's own means.
_ACCESS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


@dataclass(frozen=True)
class LandedFile:
    """A file as the listing shows it; `stamp` changes whenever the file is written again."""

    path: str
    size: int
    modified: datetime
    stamp: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass(frozen=True)
class LandingPlace:
    """The filesystem of an address, and the path in it. It can be pickled: tasks open files with it."""

    address: str
    # Where S3 is, unless it is AWS's own.
    options: tuple[tuple[str, str], ...] = ()
    # Spark's workers keep the environment in which Spark began, perhaps with older keys, or on another machine with none.
    access: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    # The proxy, whose address may hold a password, and the file of certificate authorities: pyarrow reads neither from the environment.
    network: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @staticmethod
    def of(address: str, env: Mapping[str, str] = os.environ) -> LandingPlace:
        options: dict[str, str] = {}
        if endpoint := s3_endpoint(env, LoadError) if address.startswith("s3://") else None:
            options = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
        if region := s3_region(env):
            options["region"] = region
        access = {name: env[variable] for name, variable in _ACCESS.items() if env.get(variable)}
        known = access.items() if {"access_key", "secret_key"} <= access.keys() else ()
        network = _network(options, env) if address.startswith("s3://") else ()
        return LandingPlace(address.rstrip("/"), tuple(sorted(options.items())), tuple(known), network)

    @property
    def is_s3(self) -> bool:
        return self.address.startswith("s3://")

    @cached_property
    def filesystem(self) -> Any:
        if self.is_s3:
            # Without a region pyarrow would ask the real AWS for it, even with another endpoint.
            options = {"region": "us-east-1", **dict(self.options)} if self.options else {}
            return fs.S3FileSystem(
                connect_timeout=10, request_timeout=60, **options, **dict(self.access), **dict(self.network)
            )
        return fs.LocalFileSystem()

    @cached_property
    def root(self) -> str:
        """The address as the filesystem understands it. Only the address is decoded: a file may be called 5%25.csv."""
        return self.inner(self.address) if self.is_s3 else unquote(self.inner(self.address)) or "/"

    @property
    def below(self) -> str:
        """The common beginning of the paths of all files below the address."""
        return f"{'s3' if self.is_s3 else 'file'}://{self.root.rstrip('/')}/"

    @staticmethod
    def inner(path: str) -> str:
        """Return a file's path as the filesystem understands it."""
        return path.partition("://")[2]

    def __reduce__(self) -> tuple[type[LandingPlace], tuple[Any, ...]]:
        # Without the clients: each process makes its own.
        return LandingPlace, (self.address, self.options, self.access, self.network)

    @cached_property
    def _s3(self) -> Any:
        """The client that lists objects with their ETags, which pyarrow does not show; it finds credentials the same way."""
        return s3_client(
            region=dict(self.options).get("region"), authorities=dict(self.network).get("tls_ca_file_path")
        )

    def listed(self) -> list[LandedFile]:
        """Return every file below the address; raise if the address does not exist."""
        with self.explaining_errors(self.address):
            if self.is_s3:
                return self._objects()
            if self.filesystem.get_file_info(self.root).type is not fs.FileType.Directory:
                raise LoadError(
                    f"{self.address} is not a folder. Create it, or correct `files.path` in the load's spec."
                )
            infos = self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=True))
        return [_local(info) for info in infos if info.type is fs.FileType.File]

    def _objects(self) -> list[LandedFile]:
        bucket, _, prefix = self.root.partition("/")
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
        return [
            LandedFile(f"s3://{bucket}/{entry['Key']}", entry["Size"], entry["LastModified"], _stamp(entry))
            for page in pages
            for entry in page.get("Contents", ())
            if not entry["Key"].endswith("/")
        ]

    def look(self, path: str) -> LandedFile | None:
        """Return the file as it is now; None if it is gone."""
        with self.explaining_errors(path):
            if not self.is_s3:
                info = self.filesystem.get_file_info(self.inner(path))
                return _local(info) if info.type is fs.FileType.File else None
            bucket, _, key = self.inner(path).partition("/")
            try:
                entry = self._s3.head_object(Bucket=bucket, Key=key)
            except self._s3.exceptions.ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    return None
                raise
            return LandedFile(path, entry["ContentLength"], entry["LastModified"], _stamp(entry))

    @contextmanager
    def opened(self, path: str) -> Iterator[Any]:
        with self.explaining_errors(path), self.filesystem.open_input_file(self.inner(path)) as file:
            yield file

    def digest(self, file: LandedFile) -> str:
        """Return a digest of the file's content. The file is read: S3's ETag also depends on how it was uploaded."""
        with self.opened(file.path) as opened:
            return Hashed(opened).digest()

    @contextmanager
    def explaining_errors(self, path: str) -> Iterator[None]:
        """Turn the filesystem's errors into ones that name the file and what to do."""
        try:
            yield
        except Exception as error:
            # boto3's errors are known only where it is imported.
            if isinstance(error, OSError) or type(error).__module__.startswith("botocore"):
                raise LoadError(f"{path}: {_explanation(error)}") from None
            raise


def _network(options: Mapping[str, str], env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    host = options.get("endpoint_override") or f"s3.{options.get('region', 'us-east-1')}.amazonaws.com"
    settings = {
        "proxy_options": proxy_for(options.get("scheme", "https"), host),
        "tls_ca_file_path": ca_file(env, S3_CA_VARIABLES),
    }
    return tuple((name, value) for name, value in settings.items() if value)


class Hashed(io.RawIOBase):
    """A file that is read once for both its rows and its digest."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._known = hashlib.md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        self._known.update(data)
        buffer[: len(data)] = data
        return len(data)

    def digest(self) -> str:
        """Return the digest of the whole content; read the rest first."""
        # Not through this object: the code that unpacked it may have closed it.
        while chunk := self._raw.read(_CHUNK):
            self._known.update(chunk)
        return f"md5 {self._known.hexdigest()}"


def _local(info: Any) -> LandedFile:
    modified = datetime.fromtimestamp((info.mtime_ns or 0) / 1e9, UTC)
    return LandedFile(f"file://{info.path}", info.size, modified, f"{info.size}/{info.mtime_ns}")


def _stamp(entry: Mapping[str, Any]) -> str:
    """Return ETag and time, in whole seconds: a listing may show fractions. The time makes a returning content new."""
    return f"etag {entry['ETag'].strip(chr(34))} {entry['LastModified']:%Y-%m-%dT%H:%M:%S}"


def _explanation(error: Exception) -> str:
    message = " ".join(str(error).split())[:300]
    if problem := s3_problem(error, bucket_named_in="`files.path` in the load's spec"):
        return problem
    if isinstance(error, FileNotFoundError):
        return "the file does not exist, or no longer. Nothing was loaded; find out what removes files, then run again."
    return f"the file cannot be read: {message}. Nothing was loaded; fix it, then run again."


def chosen(files: list[LandedFile], place: LandingPlace, declared: Files) -> list[LandedFile]:
    """Return the files that match the pattern, without markers and hidden files, in the order of loading."""
    root = place.below
    matching = [
        file
        for file in files
        # Folders, too: files that a job has not committed yet are in `_temporary`.
        if not any(part.startswith(_HIDDEN) for part in file.path.removeprefix(root).split("/"))
        and not _is_marker(file.path, declared)
        and (
            fnmatch.fnmatch(file.path.removeprefix(root), declared.pattern)
            or fnmatch.fnmatch(file.path.rpartition("/")[2], declared.pattern)
        )
    ]
    return sorted(matching, key=lambda file: order_key(file, declared))


def order_key(file: LandedFile, declared: Files) -> str:
    """Return the text by which files are sorted."""
    if declared.order == "modified":
        return f"{file.modified:%Y-%m-%dT%H:%M:%S.%f} {file.path}"
    return file.path


@dataclass(frozen=True)
class Listing:
    """The files to load, in their order, and the paths of those that are not complete yet."""

    files: list[LandedFile]
    unfinished: frozenset[str] = frozenset()


def unfinished(files: list[LandedFile], everything: list[LandedFile], declared: Files) -> frozenset[str]:
    """Return the paths of files without their marker; without markers, only a second listing can show it."""
    if declared.complete == "stable":
        return frozenset()
    modified = {file.path: file.modified for file in everything}

    def marked(file: LandedFile) -> bool:
        """Whether the marker exists and is not older than the file: an older one belongs to an earlier file."""
        names = (f"{file.path}{declared.marker}", f"{file.folder}/{declared.marker}")
        return any(name in modified and modified[name] >= file.modified for name in names)

    return frozenset(file.path for file in files if not marked(file))


def _is_marker(path: str, declared: Files) -> bool:
    return declared.complete == "marker" and path.endswith(declared.marker)
