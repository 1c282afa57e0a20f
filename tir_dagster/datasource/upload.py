"""Bring a file to the server in pieces, as large ones must be, and send the publish that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.config import BYTES_PER_MB, config
from tableauserverclient.server import RequestFactory

from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.credentials import ConnectionCredential
from tir_dagster.datasource.transport import patience
from tir_dagster.datasource.trouble import UnknownOutcomeError

# (bytes so far, bytes in all)
Progress = Callable[[int, int], None]
UPLOAD_GONE = "404015"
# In one request the client holds the whole file several times.
_MOST_AT_ONCE_MB = 8
_BLOCK = 1024 * 1024


@dataclass(frozen=True)
class Parcel:
    """A publish: the file, where it goes, and with which credentials."""

    package: Path
    project_id: str
    name: str
    overwrite: bool
    connections: Sequence[ConnectionCredential]
    as_job: bool

    @property
    def size(self) -> int:
        return self.package.stat().st_size

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
    """Publish; the id of the job when it was asked for as one.

    `check` runs right before every request that would publish, after all bytes of a large file are there. A request
    whose answer is lost is not sent again: UnknownOutcomeError.
    """
    upload_id = upload(client, parcel.package, doing=doing, progress=progress) if parcel.in_pieces else None

    def post(server: Any) -> Any:
        check()
        with patience(client.timeouts.for_bytes(parcel.size)):
            return _publish(server, parcel) if upload_id is None else _publish_uploaded(server, parcel, upload_id)

    job_id: str | None = client.call(post, doing=doing, repeat=False)
    if progress is not None:
        progress(parcel.size, parcel.size)
    return job_id


def _publish(server: Any, parcel: Parcel) -> str | None:
    result = server.datasources.publish(
        parcel.item(), str(parcel.package), parcel.mode, connections=parcel.connection_items(), as_job=parcel.as_job
    )
    return str(result.id) if parcel.as_job else None


def _publish_uploaded(server: Any, parcel: Parcel, upload_id: str) -> str | None:
    """The request that the client's `publish` ends with; that one cannot repeat a piece, nor look before it sends."""
    request, content_type = RequestFactory.Datasource.publish_req_chunked(
        parcel.item(), None, parcel.connection_items()
    )
    kind = parcel.package.suffix.removeprefix(".")
    url = f"{server.datasources.baseurl}?datasourceType={kind}&{parcel.mode.lower()}=true"
    url += "&asJob=true" if parcel.as_job else ""
    answer = server.datasources.post_request(f"{url}&uploadSessionId={upload_id}", request, content_type)
    return str(TSC.JobItem.from_response(answer.content, server.namespace)[0].id) if parcel.as_job else None


def upload(client: TableauClient, file: Path, *, doing: str, progress: Progress | None = None) -> str:
    """All bytes of the file on the server; the id of the upload session.

    A piece is sent again only when the server has surely not taken it: pieces carry no offset, and one taken twice
    would break the file. When nobody knows, a new session starts over.
    """
    for number in range(1, client.retry.tries):
        try:
            return _upload_once(client, file, doing=doing, progress=progress)
        except UnknownOutcomeError:
            client.retry.sleep(client.retry.pause(number))
    return _upload_once(client, file, doing=doing, progress=progress)


def _upload_once(client: TableauClient, file: Path, *, doing: str, progress: Progress | None) -> str:
    total, most = file.stat().st_size, config.CHUNK_SIZE_MB * BYTES_PER_MB
    upload_id = str(client.call(lambda server: server.fileuploads.initiate(), doing=f"start the upload to {doing}"))
    for start in range(0, total, most):
        size = min(most, total - start)
        _append(client, upload_id, _Piece(file, start, size), doing=doing)
        if progress is not None:
            progress(start + size, total)
    return upload_id


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file, which is read while it is sent."""

    file: Path
    start: int
    size: int

    def blocks(self) -> Iterator[bytes]:
        with self.file.open("rb") as source:
            source.seek(self.start)
            left = self.size
            while left and (block := source.read(min(left, _BLOCK))):
                left -= len(block)
                yield block


@dataclass(frozen=True)
class _Body:
    """A piece in the client's own wrapping, as `requests` sends it: of known length, and read anew each time."""

    before: bytes
    piece: _Piece
    after: bytes

    def __len__(self) -> int:
        return len(self.before) + self.piece.size + len(self.after)

    def __iter__(self) -> Iterator[bytes]:
        yield self.before
        yield from self.piece.blocks()
        yield self.after


def _append(client: TableauClient, upload_id: str, piece: _Piece, *, doing: str) -> None:
    empty, content_type = RequestFactory.Fileupload.chunk_req(b"")
    # A part's content ends where the line of the next boundary begins.
    end = empty.rindex(b"\r\n--", 0, -len(b"--\r\n"))
    body = _Body(empty[:end], piece, empty[end:])

    def put(server: Any) -> None:
        endpoint = server.fileuploads
        # As data and not as content: of that the client parses the beginning for its log, and the error that this
        # raises keeps the whole piece in memory until the garbage is collected.
        endpoint.put_request(f"{endpoint.baseurl}/{upload_id}", None, content_type, parameters={"data": body})

    with patience(client.timeouts.for_bytes(piece.size)):
        client.call(put, doing=f"upload a piece of the file to {doing}", repeat=False)
