"""The HTTP application: routes, authentication, errors in Tableau's own form, and the sandbox's admin calls beside them."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tir_dagster.sandbox.faults import Fault, FaultMiddleware, handle_admin
from tir_dagster.sandbox.tableau import people
from tir_dagster.sandbox.tableau.api import (
    auth,
    connections,
    content,
    data,
    jobs,
    metadata,
    publish,
    schedules,
    subscriptions,
    webhooks,
    workbooks,
)
from tir_dagster.sandbox.tableau.api.call import Call, Download, Operation
from tir_dagster.sandbox.tableau.jobs import JobQueue
from tir_dagster.sandbox.tableau.multipart import (
    MAX_JSON_BYTES,
    MAX_XML_BYTES,
    boundary_of,
    read_bounded,
    spool,
    take_apart,
)
from tir_dagster.sandbox.tableau.request_schema import check_request
from tir_dagster.sandbox.tableau.scopes import is_granted
from tir_dagster.sandbox.tableau.server import Server, log
from tir_dagster.sandbox.tableau.settings import parse_version
from tir_dagster.sandbox.tableau.sign_in_methods import forget_credentials, save_credential
from tir_dagster.sandbox.tableau.timetable import Timetable
from tir_dagster.sandbox.tableau.webhooks import Courier
from tir_dagster.sandbox.tableau.wire import XML_HEADERS, ApiError, JsonAnswer, error_text, read_json, read_request

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from tir_dagster.sandbox.home import SandboxHome

OPERATIONS: list[Operation] = [
    *auth.OPERATIONS,
    *content.OPERATIONS,
    *connections.OPERATIONS,
    *publish.OPERATIONS,
    *data.OPERATIONS,
    *jobs.OPERATIONS,
    *schedules.OPERATIONS,
    *webhooks.OPERATIONS,
    *subscriptions.OPERATIONS,
    *workbooks.OPERATIONS,
    *metadata.OPERATIONS,
]
_CHUNK = 256 * 1024


def build_app(home: SandboxHome, options: argparse.Namespace) -> Any:
    """The ASGI application of one server over one home."""
    server = Server.open(home, options.warehouse_port)
    people.seed(server.store, server.identity)
    queue = JobQueue(server)
    timetable = Timetable(server, queue)
    courier = Courier(server)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        queue.start()
        timetable.start()
        courier.start()
        try:
            yield
        finally:
            await run_in_threadpool(timetable.stop)
            await run_in_threadpool(queue.stop)
            await run_in_threadpool(courier.stop)
            server.close()

    routes = [
        Route(path, _Endpoint(server, queue, [entry for entry in OPERATIONS if entry.path == path]))
        for path in dict.fromkeys(entry.path for entry in OPERATIONS)
    ]
    admin = Route("/sandbox/{rest:path}", partial(_admin, server), methods=["GET", "PUT", "POST", "DELETE"])
    app = Starlette(
        routes=[*routes, admin],
        lifespan=lifespan,
        exception_handlers={404: _unknown_address, 405: _unknown_address},
    )
    return FaultMiddleware(app, book=server.faults, log=server.calls, error_body=_fault_body)


class _Endpoint:
    """All methods of one address; an ASGI application of its own, so that Starlette leaves the methods to us."""

    def __init__(self, server: Server, queue: JobQueue, operations: list[Operation]) -> None:
        self._server = server
        self._queue = queue
        self._operations = {entry.method: entry for entry in operations}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except ApiError as error:
            answer = _error(error)
        except ClientDisconnect:
            return
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            answer = _error(ApiError(500000, "The server could not complete the request."))
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Any:
        entry = self._operations.get(request.method)
        if entry is None:
            raise ApiError(405000, f"{request.method} is not allowed here.")
        request.scope["sandbox_call"].route = entry.name
        version = self._version(request)
        if version < entry.since:
            raise ApiError(404950, f"Version {version[0]}.{version[1]} does not know this call.")
        token = request.headers.get("x-tableau-auth")
        session = await run_in_threadpool(self._session, request, token) if entry.signed_in else None
        if session is not None and not is_granted(entry.name, session.scopes, version):
            raise people.no_session()
        if session is not None:
            settings = self._server.settings.current
            self._server.hourly_calls.take(entry.name, session.site_id, settings, self._server.now())
        make = partial(
            Call,
            self._server,
            self._queue,
            session,
            token,
            version,
            _address(request),
            request.url.path,
            request.path_params,
            dict(request.query_params),
            request.headers,
        )
        if entry.multipart:
            return await self._multipart(request, entry, make)
        body = await read_bounded(request.stream(), MAX_JSON_BYTES if entry.json else MAX_XML_BYTES)
        read = read_json if entry.json else partial(_read_xml, entry)
        return await run_in_threadpool(lambda: _response(entry.handler(make(read(body)))))

    async def _multipart(self, request: Request, entry: Operation, make: Any) -> Any:
        boundary = boundary_of(request.headers.get("content-type", ""))
        body, file = self._server.scratch / self._server.new_incoming().name, self._server.new_incoming()
        try:
            await spool(request.stream(), body)
            parts = await run_in_threadpool(take_apart, body, boundary, file)
            return await run_in_threadpool(
                lambda: _response(entry.handler(make(_read_xml(entry, parts.payload), parts.file)))
            )
        finally:
            body.unlink(missing_ok=True)
            file.unlink(missing_ok=True)

    def _version(self, request: Request) -> tuple[int, int]:
        text = request.path_params.get("version")
        if text is None:
            return self._server.settings.current.version
        try:
            version = parse_version(text)
        except ValueError as error:
            raise ApiError(404950, f"API version {text!r} not found.") from error
        if not (2, 0) <= version <= self._server.settings.current.version:
            raise ApiError(404950, f"API version {text!r} not found.")
        return version

    def _session(self, request: Request, token: str | None) -> people.Session:
        if self._server.faults.strike(("expire_session",), request.method, request.url.path) is not None:
            people.end_session(self._server.store, token or "")
        session = people.find_session(self._server, token)
        site = request.path_params.get("site")
        if site is not None and site != session.site_id and request.query_params.get("key") is None:
            if self._server.store.row("SELECT 1 FROM sites WHERE id = ?", site) is None:
                raise ApiError(404000, f"Site {site!r} could not be found.")
            # Which code a real server answers here was not measured.
            raise ApiError(403004, "The session belongs to another site.")
        return session


def _read_xml(entry: Operation, body: bytes) -> Any:
    root = read_request(body)
    check_request(entry.name, root)
    return root


def _address(request: Request) -> str:
    """The socket's own address: the Host header is whatever the client says."""
    host, port = request.scope["server"]
    return f"http://{host}:{port}"


def _response(result: Any) -> Any:
    if isinstance(result, Download):
        return _FileAnswer(result)
    if isinstance(result, JsonAnswer):
        return JSONResponse(result.value)
    headers = {**XML_HEADERS, **result.headers} if result.status != 204 else result.headers
    return Response(result.body(), result.status, headers)


class _FileAnswer:
    """Streams an open file, or the rest of it from a byte on, with its length and name."""

    def __init__(self, download: Download) -> None:
        self._download = download

    def _start(self, asked: Mapping[str, str]) -> int:
        """The byte to begin with: another than the first only if the client has the bytes before it of this very file."""
        wanted = re.fullmatch(r"bytes=([0-9]{1,15})-", asked.get("range", ""))
        etag = self._download.etag
        if etag is None or wanted is None or asked.get("if-range", etag) != etag:
            return 0
        return int(wanted[1]) if int(wanted[1]) < self._download.size else 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002
        size, start = self._download.size, self._start(Headers(scope=scope))
        plain = "".join(
            letter if letter.isascii() and letter.isprintable() and letter not in '"\\' else "_"
            for letter in self._download.file_name
        )
        disposition = f'name="tableau_datasource"; filename="{plain}"'
        if plain != self._download.file_name:
            disposition += f"; filename*=UTF-8''{urllib.parse.quote(self._download.file_name)}"
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(size - start),
            "content-disposition": disposition,
            **({"etag": self._download.etag, "accept-ranges": "bytes"} if self._download.etag else {}),
            **({"content-range": f"bytes {start}-{size - 1}/{size}"} if start else {}),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        with self._download.stream as stream:
            stream.seek(start)
            await send({"type": "http.response.start", "status": 206 if start else 200, "headers": raw})
            while block := await run_in_threadpool(stream.read, _CHUNK):
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _error(error: ApiError) -> Response:
    return Response(error_text(error.code, error.detail), error.status, XML_HEADERS)


async def _unknown_address(request: Request, _: Exception) -> Response:
    return _error(ApiError(404950, f"Nothing answers at {request.url.path!r}."))


def _fault_body(fault: Fault, _: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    code = fault.code or str(fault.status * 1000)
    return dict(XML_HEADERS), error_text(code, fault.message or "The sandbox was asked to fail this call.")


async def _admin(server: Server, request: Request) -> Response:
    path, method = request.url.path, request.method
    try:
        body = await read_bounded(request.stream(), MAX_XML_BYTES)
        if path == "/sandbox/settings" and method in ("GET", "PUT"):
            if method == "PUT":
                server.settings.change(json.loads(body))
            return JSONResponse(asdict(server.settings.current))
        if path == "/sandbox/tokens" and method == "POST":
            asked = json.loads(body)
            secret = people.create_token(server.store, str(asked["user"]), str(asked["name"]))
            return JSONResponse({"name": str(asked["name"]), "secret": secret})
        if path == "/sandbox/saved-credentials" and method in ("POST", "DELETE"):
            if method == "POST":
                save_credential(server.store, json.loads(body))
            else:
                forget_credentials(server.store)
            return JSONResponse({})
    except (ApiError, ValueError, LookupError, TypeError) as error:
        return JSONResponse({"error": str(error)}, 400)
    status, value = handle_admin(path, method, body, book=server.faults, log=server.calls)
    return JSONResponse(value, status)
