"""Requests in several parts: read to disk, bounded, then taken apart without loading the file into memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from email.message import Message
from typing import IO, TYPE_CHECKING

from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# One request carries at most 64 MB on a real server; larger files come in pieces.
MAX_REQUEST_BYTES = 65 * 1024 * 1024
MAX_XML_BYTES = 1024 * 1024
# A batch of changes may name many constants.
MAX_JSON_BYTES = 8 * 1024 * 1024
_MAX_HEADER_BYTES = 8192
_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class Parts:
    """The payload's XML and the file beside it, if any; the part's name is the API's business, not ours."""

    payload: bytes
    file: Path | None


def boundary_of(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_maintype() != "multipart" or not isinstance(boundary, str) or not boundary:
        raise ApiError(400000, "The request is not multipart/mixed with a boundary.")
    return boundary.encode("latin-1", "replace")


async def read_bounded(stream: AsyncIterator[bytes], limit: int) -> bytes:
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise ApiError(413000, "The request is too large.")
    return bytes(body)


async def spool(stream: AsyncIterator[bytes], target: Path) -> None:
    """Write the request's body to a file."""
    written = 0
    with target.open("wb") as out:
        async for chunk in stream:
            written += len(chunk)
            if written > MAX_REQUEST_BYTES:
                raise ApiError(413000, "The request is too large; upload the file in pieces.")
            out.write(chunk)


def take_apart(body: Path, boundary: bytes, target: Path) -> Parts:
    """Split a spooled request; the file's bytes go to `target`."""
    if body.stat().st_size == 0:
        raise _malformed("it is empty")
    with body.open("rb") as raw, contextlib.closing(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)) as text:
        ranges = _ranges(text, boundary)
        payload, file = b"", None
        for start, end in ranges:
            name, begin = _header(text, start, end)
            if name == "request_payload":
                if end - begin > MAX_XML_BYTES:
                    raise ApiError(413000, "The request's payload is too large.")
                payload = text[begin:end]
            elif name in ("tableau_datasource", "tableau_workbook", "tableau_file"):
                with target.open("wb") as out:
                    copy_range(raw, begin, end, out)
                file = target
    return Parts(payload, file)


def copy_range(source: IO[bytes], start: int, end: int, target: IO[bytes], at: int = 0) -> None:
    """Write a range of a file's bytes to `target`, from its byte `at` on; on Linux no byte passes through this process."""
    if not hasattr(os, "copy_file_range"):
        source.seek(start)
        target.seek(at)
        for position in range(start, end, _CHUNK):
            target.write(source.read(min(_CHUNK, end - position)))
        return
    while start < end:
        copied = os.copy_file_range(source.fileno(), target.fileno(), end - start, start, at)
        if not copied:
            raise OSError(f"{source.name} ended before byte {end}")
        start, at = start + copied, at + copied


def _malformed(why: str) -> ApiError:
    return ApiError(400000, f"The multipart request is malformed: {why}.")


def _ranges(text: mmap.mmap, boundary: bytes) -> list[tuple[int, int]]:
    mark = b"--" + boundary
    position = 0 if text[: len(mark)] == mark else text.find(b"\r\n" + mark) + 2
    if position == 1:
        raise _malformed("its boundary does not occur")
    ranges: list[tuple[int, int]] = []
    while True:
        position += len(mark)
        if text[position : position + 2] == b"--":
            return ranges
        end = text.find(b"\r\n" + mark, position)
        if text[position : position + 2] != b"\r\n" or end < 0:
            raise _malformed("a part has no end")
        ranges.append((position + 2, end))
        position = end + 2


def _header(text: mmap.mmap, start: int, end: int) -> tuple[str, int]:
    """The part's name and where its content starts."""
    stop = text.find(b"\r\n\r\n", start, min(end + 4, start + _MAX_HEADER_BYTES))
    if stop < 0:
        raise _malformed("a part has no header")
    header = Message()
    for line in text[start:stop].decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    part_name = header.get_param("name", "", "content-disposition")
    return (part_name if isinstance(part_name, str) else ""), stop + 4
