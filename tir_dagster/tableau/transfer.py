"""Move packages: download a datasource's, publish one without ever overwriting what somebody else put there."""

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
# A connection that brings so much and then breaks is slow, not broken: large files take many of them.
_GOOD_PART = 64 * 1024 * 1024
# A document says what it is right after its declaration and a comment or two.
_BEGINNING = 4_000


class NoExtractError(DatasourceError):
    """What the server holds is no extract that can be refreshed by key, or compared with ours."""


def _no_package(datasource: FoundDatasource, where: str, file: Path) -> DatasourceError:
    """A document is the datasource's own; anything else was cut, or is the page of a proxy, and tells nothing of it."""
    with file.open("rb") as opened:
        is_document = b"<datasource" in opened.read(_BEGINNING)
    if is_document:
        return NoExtractError(
            f"{datasource.shown} on {where} is not a package with an extract but a plain document: it reads its source live. "
            "Publish it with an extract first."
        )
    return DatasourceError(
        f"{datasource.shown} on {where} did not come as a package. Check that no proxy answers in the server's place, then run again."
    )


def download(
    client: TableauClient,
    datasource: FoundDatasource,
    target: Path,
    *,
    revision: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """The datasource's package at exactly this path, whole or not at all; the path again.

    `revision` is one of its history; without it, and for the newest one, which servers do not give by its number, what
    the datasource shows now.
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
    """Until it is all there; the tries begin anew where a good part came since, of a file that can be continued."""
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
    """A file next to the target that takes its place at the end, or leaves no trace."""
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
    """Publish a .tdsx or .hyper file, which need not be on the disk; the datasource as it is afterwards.

    With `expected`, a datasource that is no longer that version is left alone: ForeignPublishError. Without it,
    `overwrite` replaces whatever is there at the start. A publish whose answer is lost is looked for on the server,
    and sent again only when it is not there: `inferred` is told, for rows that nobody answered for should be compared.
    `check` may still say no, right before every such request; `seen` is told what is about to be overwritten.
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
    """How much of which version of a file is here; an empty mark means that it cannot be continued."""

    mark: str
    size: int

    def goes_on_from(self, before: DownloadedPart, least: int) -> bool:
        """Whether so much more of the same version came since, or of the first one."""
        return bool(self.mark) and before.mark in ("", self.mark) and self.size - before.size >= least


@dataclass
class Fetching:
    """A download into an open file. Call it with the signed-in server until it returns.

    Two versions of a datasource never mix in one file: what came before a cut is continued only if the server names the
    same strong ETag and the same length for both parts.
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
                # All of it: of another version, or because the server gives no parts.
                self._begin(answer)
            if part is None or self._fits(part, start, answer.headers.get("ETag", "")):
                self._take(answer)
                return
        self._fetch_all(server)

    def _ask(self, server: Any, headers: Mapping[str, str]) -> Any:
        endpoint, size = server.datasources, (self.datasource.size_mb or 0) * _BLOCK
        # Bytes as they are stored: a range of what was compressed on the way is another range.
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
