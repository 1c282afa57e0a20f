"""What a handler is given, and the table that says which handler serves which call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.wire import Answer, ApiError, JsonAnswer

if TYPE_CHECKING:
    from pathlib import Path

    from tir_dagster.sandbox.tableau.jobs import JobQueue
    from tir_dagster.sandbox.tableau.people import Session
    from tir_dagster.sandbox.tableau.server import Server


@dataclass(frozen=True)
class Download:
    """A file as an answer; it is open already, so that a refresh cannot pull it away."""

    stream: IO[bytes]
    size: int
    file_name: str
    # Names these very bytes; only a file that has one is given in parts.
    etag: str | None = None


@dataclass(frozen=True)
class Call:
    """One authenticated call.

    `address` is where it reached the server, `request` the root of its XML or its JSON value, `file` the uploaded part's,
    if any.
    """

    server: Server
    jobs: JobQueue
    caller: Session | None
    token: str | None
    version: tuple[int, int]
    address: str
    url: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    request: Any
    file: Path | None = None

    @property
    def session(self) -> Session:
        if self.caller is None:
            raise ApiError(401000, "Missing authentication token.")
        return self.caller


Handler = Callable[[Call], Answer | JsonAnswer | Download]


@dataclass(frozen=True)
class Operation:
    """One REST call: how it is addressed and what it needs before its handler runs."""

    method: str
    path: str
    handler: Handler
    signed_in: bool = True
    multipart: bool = False
    # The body is JSON, not XML.
    json: bool = False
    # The first REST version that knows the call.
    since: tuple[int, int] = (2, 0)

    @property
    def name(self) -> str:
        return self.handler.__name__


def operation(
    table: list[Operation],
    method: str,
    path: str,
    *,
    signed_in: bool = True,
    multipart: bool = False,
    json: bool = False,
    since: tuple[int, int] = (2, 0),
) -> Callable[[Handler], Handler]:
    """Enter a handler into its module's table; `S/` stands for a site's address.

    Paths are below `/api/{version}`, but for one that begins with `/api/`: the metadata API has no version.
    """

    def enter(handler: Handler) -> Handler:
        address = path.replace("S/", "/sites/{site}/", 1) if path.startswith("S/") else path
        whole = address if address.startswith("/api/") else f"/api/{{version}}{address}"
        table.append(Operation(method, whole, handler, signed_in, multipart, json, since))
        return handler

    return enter
