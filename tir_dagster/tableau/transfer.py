"""Download and publish packages; a publish never overwrites what somebody else published meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tir_dagster.errors import DatasourceError
from tir_dagster.files import VirtualFile
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, ServerVersion
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.publishing import Check, Publishing, always
from tir_dagster.tableau.settings import ConnectionCredential, Seen, nothing
from tir_dagster.tableau.transport import Timeouts, patience
from tir_dagster.tableau.upload import Parcel, Progress

_KINDS = (".tdsx", ".hyper")
# After this many bytes a broken connection is tried anew: a large file may need many connections.
_GOOD_PART = 64 * 1024 * 1024
# A document names its kind after the XML declaration and perhaps some comments.
_BEGINNING = 4_000


class NoExtractError(DatasourceError):
    """The server's datasource is no extract that can be refreshed by key or compared with a version."""


def _no_package(datasource: FoundDatasource, where: str, file: Path) -> DatasourceError:
    """Return the error for a download that is no package: a plain document, or a cut file or a proxy's page."""
    with file.open("rb") as opened:
        is_document = b"<datasource" in opened.read(_BEGINNING)
    if is_document:
        return NoExtractError(
            f"{datasource.shown} on {where} is not a package with an extract but a plain document: it reads its source live. "
            "Publish it with an extract first."
        )
    return DatasourceError(
        f"{datasource.shown} on {where} was not downloaded as a package. Check that no proxy answers in the server's place, then run again."
    )


def download(
    client: TableauClient,
    datasource: FoundDatasource,
    target: Path,
    *,
    revision: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download the datasource's package to exactly this path, complete or not at all; return the path.

    `revision` is a number of its history; without it, and for the newest number, which servers do not serve, the
    current content is downloaded.
    """
    older = revision is not None and revision != datasource.revision
    what = f"revisions/{revision}/content" if older else "content"
    doing = f"download revision {revision} of {datasource.shown}" if older else f"download {datasource.shown}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _beside(target) as (out, part):
            _fetch(client, Fetching(datasource, what, out, part.parent, client.timeouts, progress), doing)
            if target.suffix.lower() == ".tdsx" and not zipfile.is_zipfile(part):
                raise _no_package(datasource, client.where, part)
    except OSError as error:
        raise DatasourceError(
            f"Could not {doing} to {target}: {error.strerror or error}. Free some space or choose another folder."
        ) from error
    return target


def _fetch(client: TableauClient, fetching: Fetching, doing: str) -> None:
    """Fetch until the file is complete; count the tries anew whenever a large part arrived that can be continued."""
    while True:
        before = fetching.came
        try:
            client.call(fetching, doing=doing)
        except RefusedError:
            raise
        except DatasourceError:
            if not fetching.came.goes_on_from(before, _GOOD_PART):
                raise
        else:
            return


@contextmanager
def _beside(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Give a temporary file next to the target; it replaces the target at the end, or is removed."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out, part
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def publish(
    client: TableauClient,
    package: Path | VirtualFile,
    *,
    project: FoundProject,
    name: str,
    overwrite: bool = False,
    expected: ServerVersion | None = None,
    connections: Sequence[ConnectionCredential] = (),
    as_job: bool = False,
    job_timeout: float = 3600.0,
    progress: Progress | None = None,
    check: Check = always,
    seen: Seen = nothing,
    inferred: Check = always,
) -> FoundDatasource:
    """Publish a .tdsx or .hyper file, which need not be on the disk; return the datasource afterwards.

    With `expected`, raise ForeignPublishError if the datasource is no longer that version. Without it, `overwrite`
    replaces whatever is there at the start. If the answer of a publish is lost, look for it on the server and send it
    again only if it is not there; `inferred` is called if it is there, so that its rows can be compared. `check` may
    raise right before every publishing request; `seen` receives the datasource that is about to be overwritten.
    """
    file = VirtualFile.of(package) if isinstance(package, Path) and package.is_file() else package
    if isinstance(file, Path) or file.kind not in _KINDS:
        raise DatasourceError(
            f"Could not publish {file if isinstance(file, Path) else file.name} as datasource {name!r}: it must be a {' or '.join(_KINDS)} file that exists."
        )
    parcel = Parcel(file, project.id, name, overwrite, tuple(connections), as_job)
    publishing = Publishing(
        client,
        parcel,
        project,
        job_timeout=job_timeout,
        progress=progress,
        check=check,
        seen=seen,
        inferred=inferred,
    )
    return publishing.run(expected)


_BLOCK = 1024 * 1024
_SPARE_BYTES = 16 * 1024 * 1024
# The same time is also how long a connection may be silent in the middle of a file.
_MOST_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class DownloadedPart:
    """How many bytes of which version of a file are here; with an empty mark it cannot be continued."""

    mark: str
    size: int

    def goes_on_from(self, before: DownloadedPart, least: int) -> bool:
        """Whether at least this many further bytes of the same version arrived."""
        return bool(self.mark) and before.mark in ("", self.mark) and self.size - before.size >= least


@dataclass
class Fetching:
    """A download into an open file. Call it with the signed-in server until it returns.

    Two versions of a datasource never mix in one file: after a cut it is continued only if the server sends the same
    strong ETag and the same length for both parts.
    """

    datasource: FoundDatasource
    # Below the datasource's address: `content`, or an older revision's.
    what: str
    out: IO[bytes]
    folder: Path
    timeouts: Timeouts
    progress: Progress | None = None
    _mark: str = field(default="", init=False)
    _total: int | None = field(default=None, init=False)

    @property
    def came(self) -> DownloadedPart:
        return DownloadedPart(self._mark, self.out.tell())

    def __call__(self, server: Any) -> None:
        if not self._mark or not self.out.tell():
            self._fetch_all(server)
        elif self.out.tell() != self._total:
            self._continue(server)
        self.out.flush()

    def _fetch_all(self, server: Any) -> None:
        with closing(self._ask(server, {})) as answer:
            self._begin(answer)
            self._take(answer)

    def _continue(self, server: Any) -> None:
        start = self.out.tell()
        with closing(self._ask(server, {"Range": f"bytes={start}-", "If-Range": self._mark})) as answer:
            part = answer.headers.get("Content-Range")
            if part is None:
                # The whole file: of another version, or from a server that sends no parts.
                self._begin(answer)
            if part is None or self._fits(part, start, answer.headers.get("ETag", "")):
                self._take(answer)
                return
        self._fetch_all(server)

    def _ask(self, server: Any, headers: Mapping[str, str]) -> Any:
        endpoint, size = server.datasources, (self.datasource.size_mb or 0) * _BLOCK
        # Uncompressed: a range of a compressed transfer would be another range of the file.
        parameters = {"stream": True, "headers": {"Accept-Encoding": "identity", **headers}}
        with patience(min(self.timeouts.for_bytes(size), _MOST_PATIENCE_SECONDS)):
            return endpoint.get_request(f"{endpoint.baseurl}/{self.datasource.id}/{self.what}", parameters=parameters)

    def _begin(self, answer: Any) -> None:
        self.out.seek(0)
        self.out.truncate()
        length, mark = answer.headers.get("Content-Length", ""), answer.headers.get("ETag", "")
        self._total = int(length) if length.isdigit() else None
        self._mark = mark if mark.startswith('"') and self._total is not None else ""
        needed_bytes = (self.datasource.size_mb or 0) * _BLOCK if self._total is None else self._total
        _check_room(self.folder, needed_bytes, self.datasource)

    def _fits(self, part: str, start: int, mark: str) -> bool:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", part)
        return match is not None and (int(match[1]), int(match[2]), mark) == (start, self._total, self._mark)

    def _take(self, answer: Any) -> None:
        for block in answer.iter_content(_BLOCK):
            self.out.write(block)
            if self.progress is not None:
                self.progress(self.out.tell(), max(self._total or 0, self.out.tell()))


def _check_room(folder: Path, needed_bytes: int, datasource: FoundDatasource) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise DatasourceError(
            f"No room to download {datasource.shown}: it has {needed_bytes / 1e6:.0f} MB, and {folder} has {free / 1e6:.0f} MB"
            " free. Free some space or move TIR_HOME to a larger disk."
        )
