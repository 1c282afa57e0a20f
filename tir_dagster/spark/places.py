"""Staging places: where executors on other machines put the parts of a result, and how this machine fetches and removes them.

Every staging has a folder of its own in the place, named by its time. A place holds no credential: each machine finds its own, by
environment, profile or role.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from tir_dagster.addresses import staging_problem
from tir_dagster.errors import SourceError
from tir_dagster.retries import Backoff, Repeat, RetryPolicy
from tir_dagster.s3 import Settings, s3_filesystem, s3_network, s3_options, trouble_of

STAGING, LIFETIME = "spark.tir.staging", "spark.tir.staging.lifetime"
STAGING_VARIABLE = "TIR_STAGING"
_DAY = 86_400.0
_LOG = logging.getLogger(__name__)
_FOLDER = re.compile(r"tir-(\d{8}T\d{6})Z-[0-9a-f]{12}")
_TIME = "%Y%m%dT%H%M%S"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK = 8 << 20
# Two cores write what eight connections bring.
_AT_ONCE = 8
_FETCHES = RetryPolicy(tries=5, backoff=Backoff(first_seconds=0.5, most_seconds=10.0))


@dataclass(frozen=True)
class StagedPart:
    """A part as the task that wrote it reports it."""

    name: str
    rows: int
    size: int


@dataclass(frozen=True)
class StagingPlace:
    """A folder or an object-store address that executors and this machine reach. It can be pickled."""

    address: str
    # Endpoint and region of S3: addresses, which may differ from the executors' usual ones.
    s3: Settings = ()
    lifetime: float = _DAY

    @staticmethod
    def of(address: str, env: Mapping[str, str], *, lifetime: float = _DAY) -> StagingPlace:
        """Return the place of this address; raise SourceError if it cannot be one."""
        address = re.sub(r"^s3[an]://", "s3://", address.strip()).rstrip("/")
        if problem := staging_problem(address):
            raise SourceError(f"The address for staging ({STAGING_VARIABLE}, or `staging` in the spec file) {problem}.")
        options = s3_options(env, SourceError) if address.startswith("s3://") else {}
        return StagingPlace(address, tuple(sorted(options.items())), lifetime)

    def __reduce__(self) -> tuple[type[StagingPlace], tuple[Any, ...]]:
        # Without the client: each process makes its own.
        return StagingPlace, (self.address, self.s3, self.lifetime)

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The filesystem, with this machine's own credentials, certificates and proxy, and the path in it."""
        scheme, separator, path = self.address.partition("://")
        if not separator or scheme == "file":
            return fs.LocalFileSystem(), path or scheme
        if scheme == "s3":
            return s3_filesystem(dict(self.s3), s3_network(dict(self.s3), os.environ)), path
        try:
            return fs.FileSystem.from_uri(self.address)
        except (ValueError, NotImplementedError):
            pass
        try:
            import fsspec  # type: ignore[import-untyped]

            filesystem, path = fsspec.core.url_to_fs(self.address)
        except (ValueError, ImportError) as error:
            raise SourceError(
                f"{self.address} cannot be opened: {error}. Install the package for it on this machine and in the executors' environment, "
                "or choose another staging place."
            ) from None
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path

    # On the executors

    @contextmanager
    def writing(self, folder: str, name: str) -> Iterator[Any]:
        """Open a new part for writing."""
        with self._explaining(f"Spark's worker on {socket.gethostname()} cannot write to"):
            filesystem, path = self._opened
            with filesystem.open_output_stream(f"{path}/{folder}/{name}") as file:
                yield file

    # On the machine with Hyper

    @contextmanager
    def folder(self) -> Iterator[str]:
        """Give a new folder for the parts of one staging; it is removed at the end, and so is what others left longer ago than the lifetime.

        Before that, write, read and remove a file in it: whoever may not do that shall learn it before a task runs.
        """
        name = f"tir-{datetime.now(UTC):{_TIME}}Z-{uuid.uuid4().hex[:12]}"
        with self._explaining("This machine cannot use"):
            filesystem, path = self._opened
            own = f"{path}/{name}"
            if not isinstance(filesystem, fs.S3FileSystem):
                # S3 has no folders: it would get an empty object.
                filesystem.create_dir(own, recursive=True)
            if isinstance(filesystem, fs.LocalFileSystem):
                # Executors may run as another user of a group that owns the place; nobody else reads rows.
                Path(own).chmod(Path(own).stat().st_mode & stat.S_ISGID | stat.S_IRWXU | stat.S_IRWXG)
            try:
                with filesystem.open_output_stream(f"{own}/trial") as file:
                    file.write(b"tir_dagster")
                with filesystem.open_input_file(f"{own}/trial") as file:
                    file.read()
                filesystem.delete_file(f"{own}/trial")
            except OSError:
                with suppress(OSError):
                    filesystem.delete_dir(own)
                raise
        try:
            yield name
        finally:
            self._remove(name)
            self.remove_leftovers()

    def fetch(self, folder: str, parts: Sequence[StagedPart], target: Path) -> list[Path]:
        """Fetch the parts into a local folder, several at once; each is checked and, after a cut, continued."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda part: self._fetch(folder, part, target), parts))

    def _fetch(self, folder: str, part: StagedPart, target: Path) -> Path:
        filesystem, path = self._opened
        beside = target / f".{part.name}"

        def attempt() -> None:
            with filesystem.open_input_file(f"{path}/{folder}/{part.name}") as source, beside.open("ab") as file:
                source.seek(file.tell())
                while chunk := source.read(min(_CHUNK, part.size - file.tell() + 1)):
                    file.write(chunk)
            size = beside.stat().st_size
            if size > part.size:
                beside.unlink()
            if size != part.size:
                raise ConnectionResetError(f"{size:,} of the {part.size:,} bytes of {part.name} arrived")

        with self._explaining("This machine cannot fetch a part from"):
            _FETCHES.run(attempt, may_repeat=_may_pass)
        try:
            rows = f"{pq.read_metadata(beside).num_rows:,}"
        except pa.ArrowException:
            rows = "no readable"
        if rows != f"{part.rows:,}":
            beside.unlink()
            raise SourceError(
                f"{part.name} in the staging place {self.address} holds {rows} rows instead of {part.rows:,}. Nothing was published. "
                "Find out who else writes there, then run again."
            )
        return beside.rename(target / part.name)

    def _remove(self, name: str) -> None:
        """Remove a folder of parts; if that fails, the staging does not: a later one tries again."""
        filesystem, path = self._opened
        try:
            filesystem.delete_dir(f"{path}/{name}")
        except FileNotFoundError:
            pass
        except OSError as error:
            reason = " ".join(str(error).split())[:200]
            _LOG.warning("%s/%s could not be removed, and may hold rows: %s", self.address, name, reason)

    def remove_leftovers(self) -> None:
        """Remove what crashed runs left longer ago than the lifetime. A place that cannot be searched is a warning."""
        oldest = datetime.now(UTC) - timedelta(seconds=self.lifetime)
        try:
            filesystem, path = self._opened
            names = [info.base_name for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))]
        except (OSError, SourceError) as error:
            _LOG.warning("%s could not be searched for old parts: %s", self.address, " ".join(str(error).split())[:200])
            return
        for name in names:
            match = _FOLDER.fullmatch(name)
            if match and datetime.strptime(match[1], _TIME).replace(tzinfo=UTC) < oldest:
                _LOG.warning("removing %s/%s, which a run left that did not end", self.address, name)
                self._remove(name)

    @contextmanager
    def _explaining(self, action: str) -> Iterator[None]:
        """Turn errors of the filesystem into one that names the place and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise  # of this machine, which is known by its own error
            advice = {
                "denied": "access is denied. Give this identity the right to list, read, write and delete there",
                "no bucket": "the bucket does not exist. Create it, or correct the address",
                "untrusted": "its certificate is not trusted, so nothing was sent. Set AWS_CA_BUNDLE to the file of your authority there",
                "missing": "it, or what was in it, does not exist there. Choose a place that this machine and all executors reach, and do "
                "not let others remove files from it",
                "other": f"{' '.join(str(error).split())[:300].rstrip('.')}. Check the address, network and proxy there",
            }
            raise SourceError(
                f"{action} the staging place {self.address}: {advice[trouble_of(error)]} (docs/spark.md). Nothing was published."
            ) from None


def _may_pass(error: Exception) -> Repeat | None:
    passing = isinstance(error, OSError) and error.errno not in _DISK_FULL and trouble_of(error) == "other"
    return Repeat("fetching a staged part was interrupted") if passing else None


def staging_place(settings: Mapping[str, str], env: Mapping[str, str]) -> StagingPlace | None:
    """Return the place that a session's settings name; None if executors write into this machine's own folder."""
    address = settings.get(STAGING)
    return StagingPlace.of(address, env, lifetime=float(settings.get(LIFETIME, _DAY))) if address else None
