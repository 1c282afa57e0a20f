"""S3 over HTTP by moto, for the sandbox's own key only. Objects are in memory: they live as long as the server."""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

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

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization", b"")
        found = _KEY.search(header)
        if found is None or found[1] != known:
            code = "AccessDenied" if found is None else "InvalidAccessKeyId"
            message = "The AWS access key is not the sandbox's: take it from tir sandbox env."
            body = _DENIED.format(code=code, message=message, path=scope["path"])
            await Response(body, status_code=403, media_type="application/xml")(scope, receive, send)
        else:
            await _moto()(scope, receive, send)

    return app


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
    return WSGIMiddleware(_as_sent(DomainDispatcherApplication(create_backend_app)))


def _as_sent(app: Callable[..., Any]) -> Callable[..., Any]:
    """Give Moto the path as it was sent, and the length of the body.

    It decodes the path; given only the decoded one, it would decode a name like 5%25.csv twice. And it reads no body without a length,
    which the clients of AWS do not send where they send a checksum behind it.
    """

    def run(environ: dict[str, Any], start_response: Any) -> Any:
        length = {"CONTENT_LENGTH": str(len(environ["wsgi.input"].getvalue())), "HTTP_TRANSFER_ENCODING": ""}
        path = {"RAW_URI": quote(environ["PATH_INFO"].encode("latin1"))}
        return app({**environ, **length, **path}, start_response)

    return run


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
