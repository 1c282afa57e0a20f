"""The place where files land: a folder or an S3 prefix, listed and opened by pyarrow's own filesystems; no jars."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from pyarrow import fs

from tir_dagster.errors import LoadError
from tir_dagster.object_stores import Settings, s3_filesystem, s3_keys, s3_network, s3_options, trouble_of
from tir_dagster.spec.load import Files

_CHUNK = 8 << 20
_HIDDEN = ("_", ".")


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
    options: Settings = ()
    # Spark's workers keep the environment in which Spark began, perhaps with older keys, or on another machine with none.
    access: Settings = field(default=(), repr=False)
    # The proxy and the file of certificate authorities; None: those of the machine that reads.
    network: Settings | None = field(default=(), repr=False)

    @staticmethod
    def of(address: str, env: Mapping[str, str] = os.environ) -> LandingPlace:
        if not address.startswith("s3://"):
            return LandingPlace(address.rstrip("/"))
        options = s3_options(env)
        return LandingPlace(address.rstrip("/"), tuple(sorted(options.items())), s3_keys(env), s3_network(options, env))

    def elsewhere(self) -> LandingPlace:
        """Return the place as other machines read it: with their own proxies and certificate files, not with those of this one."""
        return replace(self, network=None)

    @property
    def is_s3(self) -> bool:
        return self.address.startswith("s3://")

    @cached_property
    def filesystem(self) -> Any:
        if not self.is_s3:
            return fs.LocalFileSystem()
        options = dict(self.options)
        return s3_filesystem(
            options, s3_network(options, os.environ) if self.network is None else self.network, self.access
        )

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
        import boto3
        from botocore.config import Config

        region = dict(self.options).get("region")
        config = Config(connect_timeout=10, read_timeout=60)
        return boto3.Session().client(
            "s3", region_name=region, config=config, verify=dict(self.network or ()).get("tls_ca_file_path")
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
    sentences = {
        "denied": "access is denied. Check the AWS credentials and the bucket's policy, or the folder's rights.",
        "no bucket": "the bucket does not exist. Correct `files.path` in the load's spec.",
        "untrusted": "the certificate of S3 is not trusted, so nothing was sent. If your own authority signs it, set REQUESTS_CA_BUNDLE "
        "or AWS_CA_BUNDLE to the file of that authority; else check the endpoint.",
        "missing": "the file does not exist, or no longer. Nothing was loaded; find out what removes files, then run again.",
        "other": f"the file cannot be read: {message}. Nothing was loaded; fix it, then run again.",
    }
    return sentences[trouble_of(error)]


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
