"""S3 over HTTP by moto, for the sandbox's own key only, with faults on demand. Objects are in memory: they live as long as the server."""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from email.utils import formatdate
from functools import cache
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tir_dagster.sandbox.faults import (
    OWN_PATHS,
    CallLog,
    Fault,
    FaultBook,
    FaultMiddleware,
    handle_admin,
)
from tir_dagster.sandbox.home import S3_BUCKET, S3_REGION, SandboxHome

_KEY = re.compile(rb"Credential=([^/,\s]+)/")
_DENIED = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message>'
    "<Resource>{path}</Resource><RequestId>sandbox</RequestId></Error>"
)


def build_app(home: SandboxHome, options: argparse.Namespace) -> Any:
    """The stand-in; a request without the sandbox's key is denied, as S3 would."""
    del options
    # moto takes the account of a request from the environment of real AWS, too.
    os.environ.update({"AWS_DEFAULT_REGION": S3_REGION, "AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto"})
    known = home.identity().s3_access_key.encode()
    faults, calls, clock = FaultBook(), CallLog(), _Clock()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        if scope["path"].startswith(OWN_PATHS):
            await _admin(faults, calls, clock, Request(scope, receive))(scope, receive, send)
            return
        send = clock.shown(send)
        header = dict(scope["headers"]).get(b"authorization", b"")
        found = _KEY.search(header)
        if found is None or found[1] != known:
            code = "AccessDenied" if found is None else "InvalidAccessKeyId"
            message = "The AWS access key is not the sandbox's: take it from tir sandbox env."
            body = _DENIED.format(code=code, message=message, path=scope["path"])
            await Response(body, status_code=403, media_type="application/xml")(scope, receive, send)
        else:
            await _moto()(scope, receive, send)

    return FaultMiddleware(app, book=faults, log=calls, error_body=_fault_body)


class _Clock:
    """The clock of the store, by which others judge how old an object is; it may be ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def shown(self, send: Any) -> Any:
        """Let the answer tell this clock's time."""

        async def dated(message: Any) -> None:
            if message["type"] == "http.response.start":
                others = [(name, value) for name, value in message["headers"] if name.lower() != b"date"]
                now = formatdate(time.time() + self.ahead, usegmt=True).encode()
                message = {**message, "headers": [*others, (b"date", now)]}
            await send(message)

        dated.transport_owner = getattr(send, "transport_owner", None)  # type: ignore[attr-defined]
        return dated


def _admin(faults: FaultBook, calls: CallLog, clock: _Clock, request: Request) -> Any:
    """Serve faults and calls like the other servers; and `/sandbox/clock`: by how many seconds the store's clock is ahead."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = await request.body()
        if request.url.path == f"{OWN_PATHS}clock" and request.method == "POST":
            clock.ahead = float(json.loads(body)["ahead"])
            status, value = 200, {"ahead": clock.ahead}
        else:
            status, value = handle_admin(request.url.path, request.method, body, book=faults, log=calls)
        await JSONResponse(value, status)(scope, receive, send)

    return answer


def _fault_body(fault: Fault, scope: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    code = {503: "SlowDown", 409: "ConditionalRequestConflict", 403: "AccessDenied"}.get(fault.status, "InternalError")
    message = fault.message or "The sandbox was asked to fail this call."
    body = _DENIED.format(code=code, message=message, path=scope["path"])
    return {"content-type": "application/xml"}, body.encode()


@cache
def _moto() -> Callable[..., Any]:
    """Made when it is first asked for: its imports take seconds, and most who start a sandbox have no files."""
    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from starlette.middleware.wsgi import WSGIMiddleware

    get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(S3_BUCKET, S3_REGION)
    return WSGIMiddleware(_with_raw_path(DomainDispatcherApplication(create_backend_app)))


def _with_raw_path(app: Callable[..., Any]) -> Callable[..., Any]:
    """Moto decodes the path as it was sent; given only the decoded one, it would decode a name like 5%25.csv twice.

    One writes at a time: moto checks the condition of a write and then writes, and two threads could both pass the check.
    """
    writing = threading.Lock()

    def run(environ: dict[str, Any], start_response: Any) -> Any:
        with nullcontext() if environ["REQUEST_METHOD"] in ("GET", "HEAD") else writing:
            return app({**environ, "RAW_URI": quote(environ["PATH_INFO"].encode("latin1"))}, start_response)

    return run


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
