"""Files to and from the server: a download that continues after a cut, an upload in pieces, and their progress."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from defusedxml.ElementTree import fromstring
from tableauserverclient.config import BYTES_PER_MB, config
from tableauserverclient.server import RequestFactory

from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError
from tir_dagster.files import VirtualFile
from tir_dagster.retries import Repeat
from tir_dagster.tableau.client import TableauClient, Timeouts, patience
from tir_dagster.tableau.datasources import FoundDatasource
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError

# After this many bytes a broken connection is tried anew: a large file may need many connections.
_GOOD_PART = 64 * 1024 * 1024
# A document names its kind after the XML declaration and perhaps some comments.
_BEGINNING = 4_000
_BLOCK = 1024 * 1024
_SPARE_BYTES = 16 * 1024 * 1024
# The same time is also how long a connection may be silent in the middle of a file.
_MOST_PATIENCE_SECONDS = 900.0
# The server knows no such upload session.
UPLOAD_GONE = "404015"
EVERY_SECONDS = 5.0
# (bytes so far, bytes in all)
Progress = Callable[[int, int], None]


def tell_progress(
    log: Callable[[str], None],
    verb: str,
    *,
    every: float = EVERY_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return a callback that logs `uploading 120 of 400 MB`, at most once in `every` seconds."""
    last = clock()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= every:
            last = clock()
            log(f"{verb} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    return tell


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
    with_extract: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Download the datasource's package to exactly this path, complete or not at all; return the path.

    `revision` is a number of its history; without it, and for the newest number, which servers do not serve, the
    current content is downloaded. Without its extract a package is small: only its description.
    """
    older = revision is not None and revision != datasource.revision
    what = f"revisions/{revision}/content" if older else "content"
    what += "" if with_extract else "?includeExtract=false"
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
            f"No room to download {datasource.shown}: it has {needed_bytes / 1e6:.0f} MB, {_SPARE_BYTES / 1e6:.0f} MB must stay free, and"
            f" {folder} has {free / 1e6:.0f} MB free. Free some space or move TIR_HOME to a larger disk."
        )


def upload(client: TableauClient, file: VirtualFile, *, doing: str, progress: Progress | None = None) -> str:
    """Upload the file; return the id of the upload session.

    A piece is sent again only if the server has not stored it: pieces carry no offset, and a piece stored twice would
    break the file. If that is unknown, the upload starts over in a new session.
    """
    upload_id = client.retry.run(
        lambda: _Upload(client, file, doing, progress).run(),
        may_repeat=lambda error: Repeat() if isinstance(error, UnknownOutcomeError) else None,
    )
    crash_after("uploaded")
    return upload_id


class _Upload:
    """One upload session, and the size that the server reports for it.

    The server reports megabytes after each piece, with an undocumented rounding. So only differences are compared:
    every whole piece must add as much as the first one did.
    """

    def __init__(self, client: TableauClient, file: VirtualFile, doing: str, progress: Progress | None) -> None:
        self._client, self._file, self._doing, self._progress = client, file, doing, progress
        self._total, self._most = file.size, config.CHUNK_SIZE_MB * BYTES_PER_MB
        self._id = ""
        self._said = 0
        self._growth: int | None = None
        self._repeated = False

    def run(self) -> str:
        doing = f"start the upload to {self._doing}"
        self._id = str(self._client.call(lambda server: server.fileuploads.initiate(), doing=doing))
        for start in range(0, self._total, self._most):
            self._bring(_Piece(self._file, start, min(self._most, self._total - start), self._tell))
        if self._repeated and self._ask() != self._said:
            raise self._twice()
        return self._id

    def _twice(self) -> UnknownOutcomeError:
        """Return the error for a repeated piece whose first copy arrived late."""
        return UnknownOutcomeError(f"Could not {self._doing}: the server has a piece of the file twice. Run again.")

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._total)

    def _bring(self, piece: _Piece) -> None:
        whole = piece.size == self._most
        try:
            said = self._append(piece)
        except UnknownOutcomeError:
            if not whole or not self._growth:
                raise
            said = self._bring_again(piece)
        grown = said - self._said
        if whole and self._growth is None:
            self._growth = grown
        if self._repeated and grown > (self._growth or 0):
            raise self._twice()
        self._said = said

    def _bring_again(self, piece: _Piece) -> int:
        """Send the piece again unless the size that the server reports shows that it was stored."""
        assert self._growth is not None
        expected, said = self._said + self._growth, self._ask()
        if said == self._said:
            self._repeated = True
            said = self._append(piece)
        if said != expected:
            raise UnknownOutcomeError(
                f"Could not {self._doing}: the server has {said} MB of the file instead of {expected}. Run again."
            )
        return said

    def _ask(self) -> int:
        """Ask for the stored size by sending an empty piece; -1 if the server refuses empty pieces."""
        try:
            return self._append(_Piece(self._file, 0, 0))
        except RefusedError:
            return -1

    def _append(self, piece: _Piece) -> int:
        body, content_type = _in_wrapping(piece)

        def put(server: Any) -> int:
            endpoint = server.fileuploads
            # As `data`, not as content: the client parses content for its log, and the error that this raises would keep
            # the whole piece in memory until the garbage is collected.
            answer = endpoint.put_request(
                f"{endpoint.baseurl}/{self._id}", None, content_type, parameters={"data": body}
            )
            said = fromstring(answer.content).find(".//t:fileUpload", namespaces=server.namespace)
            size = said.get("fileSize", "") if said is not None else ""
            return int(size) if size.isdigit() else 0

        try:
            with patience(self._client.timeouts.for_bytes(piece.size)):
                said: int = self._client.call(put, doing=f"upload a piece of the file to {self._doing}", repeat=False)
        finally:
            self._client.waited_seconds -= body.sending_seconds
        return said


@dataclass(frozen=True)
class _Piece:
    """A part of a file; it is read while it is sent."""

    file: VirtualFile
    start: int
    size: int
    # Called with the number of bytes of the file that were sent.
    tell: Callable[[int], None] = lambda _: None

    def blocks(self) -> Iterator[bytes]:
        done = self.start
        for block in self.file.blocks(self.start, self.size):
            yield block
            done += len(block)
            self.tell(done)


@dataclass
class _Body:
    """A piece in the client's multipart wrapping, as `requests` sends it: of known length, read anew each time."""

    before: bytes
    piece: _Piece
    after: bytes
    # Seconds from the first byte to the last; what follows is the server's time.
    sending_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.before) + self.piece.size + len(self.after)

    def __iter__(self) -> Iterator[bytes]:
        started = time.perf_counter()
        try:
            yield self.before
            yield from self.piece.blocks()
            yield self.after
        finally:
            self.sending_seconds += time.perf_counter() - started


def _in_wrapping(piece: _Piece) -> tuple[_Body, str]:
    empty, content_type = RequestFactory.Fileupload.chunk_req(b"")
    # A part's content ends where the line of the next boundary begins.
    end = empty.rindex(b"\r\n--", 0, -len(b"--\r\n"))
    return _Body(empty[:end], piece, empty[end:]), content_type
