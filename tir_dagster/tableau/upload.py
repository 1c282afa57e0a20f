"""Upload a file in pieces, and send the publish request that uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from defusedxml.ElementTree import fromstring
from tableauserverclient.config import BYTES_PER_MB, config
from tableauserverclient.server import RequestFactory

from tir_dagster.files import VirtualFile
from tir_dagster.retries import Repeat
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError, reading
from tir_dagster.tableau.settings import ConnectionCredential
from tir_dagster.tableau.transport import patience

UPLOAD_GONE = "404015"
# For one request the client holds the whole file in memory several times.
_MOST_AT_ONCE_MB = 8


@dataclass(frozen=True)
class Parcel:
    """A publish: the file, where it goes, and with which credentials."""

    package: VirtualFile
    project_id: str
    name: str
    overwrite: bool
    connections: Sequence[ConnectionCredential]
    as_job: bool

    @property
    def size(self) -> int:
        return self.package.size

    @property
    def in_pieces(self) -> bool:
        return self.size >= min(config.FILESIZE_LIMIT_MB, _MOST_AT_ONCE_MB) * BYTES_PER_MB

    @property
    def mode(self) -> str:
        return str(TSC.Server.PublishMode.Overwrite if self.overwrite else TSC.Server.PublishMode.CreateNew)

    def item(self) -> Any:
        return TSC.DatasourceItem(self.project_id, self.name)

    def connection_items(self) -> list[Any] | None:
        return [credential.as_item() for credential in self.connections] or None


def send(
    client: TableauClient, parcel: Parcel, *, doing: str, check: Callable[[], None], progress: Progress | None
) -> str | None:
    """Publish; return the job's id if the server was asked to publish as a job.

    `check` runs right before every publishing request, after a large file was uploaded. A request whose answer is lost
    is not sent again: UnknownOutcomeError.
    """
    upload_id = upload(client, parcel.package, doing=doing, progress=progress) if parcel.in_pieces else None

    def post(server: Any) -> Any:
        check()
        parcel.package.check()
        with patience(client.timeouts.for_bytes(parcel.size)), reading(doing, where=client.where):
            return _publish(server, parcel, upload_id)

    job_id: str | None = client.call(post, doing=doing, repeat=False)
    if progress is not None:
        progress(parcel.size, parcel.size)
    return job_id


def _publish(server: Any, parcel: Parcel, upload_id: str | None) -> str | None:
    """Send the publish request. The client's own `publish` needs a file on disk, and cannot repeat a piece or check first."""
    requests, connections = RequestFactory.Datasource, parcel.connection_items()
    kind = parcel.package.kind.removeprefix(".")
    url = f"{server.datasources.baseurl}?datasourceType={kind}&{parcel.mode.lower()}=true"
    url += "&asJob=true" if parcel.as_job else ""
    if upload_id is None:
        content = b"".join(parcel.package.blocks())
        request, content_type = requests.publish_req(parcel.item(), parcel.package.name, content, None, connections)
    else:
        url += f"&uploadSessionId={upload_id}"
        request, content_type = requests.publish_req_chunked(parcel.item(), None, connections)
    answer = server.datasources.post_request(url, request, content_type)
    item_class = TSC.JobItem if parcel.as_job else TSC.DatasourceItem
    item = item_class.from_response(answer.content, server.namespace)[0]
    return str(item.id) if parcel.as_job else None


def upload(client: TableauClient, file: VirtualFile, *, doing: str, progress: Progress | None = None) -> str:
    """Upload the file; return the id of the upload session.

    A piece is sent again only if the server has not stored it: pieces carry no offset, and a piece stored twice would
    break the file. If that is unknown, the upload starts over in a new session.
    """
    return client.retry.run(
        lambda: _Upload(client, file, doing, progress).run(),
        may_repeat=lambda error: Repeat() if isinstance(error, UnknownOutcomeError) else None,
    )


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


# (bytes so far, bytes in all)
Progress = Callable[[int, int], None]
EVERY_SECONDS = 5.0


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
