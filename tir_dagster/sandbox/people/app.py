"""The HTTP application: Slack below /slack/api, ServiceNow at its own addresses, the page at /, faults on demand."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tir_dagster.sandbox.faults import CallLog, Fault, FaultBook, FaultMiddleware, handle_admin
from tir_dagster.sandbox.people import slack
from tir_dagster.sandbox.people.page import page
from tir_dagster.sandbox.people.servicenow import TABLE, ServiceNow
from tir_dagster.sandbox.people.store import Store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from tir_dagster.sandbox.home import SandboxHome

SLACK_API = "/slack/api/"


def build_app(home: SandboxHome, options: argparse.Namespace) -> Any:
    """The ASGI application over one home."""
    del options
    store, identity = Store(home.data("people")), home.identity()
    servicenow = ServiceNow(store, identity)
    faults, calls = FaultBook(), CallLog()

    async def slack_api(request: Request) -> Response:
        body, method = await request.body(), request.path_params["method"]
        return JSONResponse(
            await run_in_threadpool(slack.answer, store, method, request.headers, body, identity.slack_token)
        )

    async def oauth(request: Request) -> Response:
        status, value = servicenow.token(await request.body())
        return JSONResponse(value, status)

    async def incidents(request: Request) -> Response:
        rest, signed = request.path_params.get("rest", ""), request.headers.get("authorization", "")
        body = await request.body()
        status, value = await run_in_threadpool(
            servicenow.incidents, request.method, rest, request.query_params, signed, body
        )
        return JSONResponse(value, status)

    async def shown(_: Request) -> Response:
        return HTMLResponse(page(store.messages(), store.incidents()))

    methods = ["GET", "POST", "PATCH", "PUT", "DELETE"]
    app = Starlette(
        routes=[
            Route("/", shown),
            Route(f"{SLACK_API}{{method}}", slack_api, methods=["GET", "POST"]),
            Route("/oauth_token.do", oauth, methods=["POST"]),
            Route(TABLE, incidents, methods=methods),
            Route(f"{TABLE}/{{rest}}", incidents, methods=methods),
            Route("/sandbox/{rest:path}", partial(_admin, store, faults, calls), methods=methods),
        ]
    )
    return FaultMiddleware(app, book=faults, log=calls, error_body=_fault_body)


def _fault_body(fault: Fault, scope: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    """In the protocol's own form; a message that begins like HTML is sent as the page of whatever stands in between."""
    said = fault.message or "The sandbox was asked to fail this call."
    if said.startswith("<"):
        return {"content-type": "text/html; charset=utf-8"}, said.encode()
    if scope["path"].startswith(SLACK_API):
        word = "ratelimited" if fault.status == 429 else "internal_error"
        return {"content-type": "application/json"}, json.dumps({"ok": False, "error": word}).encode()
    value = {"error": {"message": said, "detail": ""}, "status": "failure"}
    return {"content-type": "application/json"}, json.dumps(value).encode()


async def _admin(store: Store, faults: FaultBook, calls: CallLog, request: Request) -> Response:
    path, method = request.url.path, request.method
    kept = {"/sandbox/messages": store.messages, "/sandbox/incidents": store.incidents}.get(path)
    if kept is not None and method == "GET":
        return JSONResponse({path.rpartition("/")[2]: kept()})
    if path == "/sandbox/people" and method == "DELETE":
        store.clear()
        return JSONResponse({"messages": [], "incidents": []})
    status, value = handle_admin(path, method, await request.body(), book=faults, log=calls)
    return JSONResponse(value, status)
