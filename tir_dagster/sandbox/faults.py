"""Faults on demand and a log of calls, as ASGI middleware for any stand-in server; `/sandbox/` itself is never hurt."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

OWN_PATHS = "/sandbox/"
CALLS_KEPT = 5000
AGENTS_KEPT = 50
KINDS = ("status", "cut", "delay", "expire_session", "slow_job", "fail_job", "vanish_job", "late_job", "torn_job")
CUTS = ("before", "after", "during")
# The least and the greatest value of each whole number, and of each time in seconds.
_COUNTS = {"times": (1, 1_000_000), "skip": (0, 1_000_000), "status": (400, 599), "actions": (0, 1_000)}
_SECONDS = {"retry_after": (0, 86_400), "seconds": (0, 86_400)}
_OPTIONAL = ("method", "path", "code", "message", "retry_after")

# (fault, scope) -> headers and body of the error in the protocol's own form
ErrorBody = Callable[["Fault", Mapping[str, Any]], tuple[dict[str, str], bytes]]


@dataclass
class Fault:
    """One thing that goes wrong: `skip` matching calls pass, then it strikes `times` times.

    `status` answers with a status, code, message and retry_after; `cut` resets the connection before, after or during
    the answer; `delay` waits for `seconds` first. Those three match on method and on path, a regular expression. What
    the other kinds match on, and what they do, is the business of the server that asks for them.
    """

    kind: str
    method: str | None = None
    path: str | None = None
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str | None = None
    message: str | None = None
    retry_after: float | None = None
    when: str = "before"
    notes: str = "The job was made to fail."
    seconds: float = 1.0
    actions: int = 0
    half: bool = False

    @staticmethod
    def from_json(value: Any) -> Fault:
        """Build one from an admin request; ValueError names what is wrong with it."""
        if not isinstance(value, dict):
            raise ValueError("a fault is a JSON object")  # noqa: TRY004
        known = {field.name for field in fields(Fault)}
        if unknown := sorted(set(value) - known):
            raise ValueError(f"unknown fault fields {unknown}; known are {sorted(known)}")
        for name, given in value.items():
            _check_field(name, given)
        fault = Fault(**{"kind": "", **value})
        fault._check()
        return fault

    def _check(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; known are {list(KINDS)}")
        if self.when not in CUTS:
            raise ValueError(f"unknown cut {self.when!r}; known are {list(CUTS)}")
        if self.code is not None and not re.fullmatch(r"[0-9]{6}", self.code):
            raise ValueError(f"a code is six digits, not {self.code!r}")
        if self.kind == "vanish_job" and self.code is not None and not 400_000 <= int(self.code) <= 599_999:
            raise ValueError(f"the code of a vanished job begins with its status, 400 to 599, not {self.code!r}")
        try:
            re.compile(self.path or "")
        except re.error as error:
            raise ValueError(f"path is not a regular expression: {error}") from error

    def matches(self, method: str | None, path: str | None) -> bool:
        if self.method and self.method.upper() != (method or "").upper():
            return False
        return not self.path or bool(re.search(self.path, path or ""))


def _check_field(name: str, given: Any) -> None:
    if given is None and name in _OPTIONAL:
        return
    kind: Any = int if name in _COUNTS else (int, float) if name in _SECONDS else bool if name == "half" else str
    if not isinstance(given, kind) or isinstance(given, bool) != (kind is bool):
        raise ValueError(f"fault field {name} cannot be {given!r}")
    if bounds := {**_COUNTS, **_SECONDS}.get(name):
        least, greatest = bounds
        # The other way round NaN, which JSON lets through here, would pass.
        if not least <= given <= greatest:
            raise ValueError(f"fault field {name} is from {least} to {greatest}, not {given!r}")


class FaultBook:
    """The faults still to strike; safe to ask from every thread."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, faults: Iterable[Fault]) -> None:
        with self._lock:
            self._faults.extend(faults)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def as_json(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(fault) for fault in self._faults]

    def strike(self, kinds: Iterable[str], method: str | None = None, path: str | None = None) -> Fault | None:
        """The first fault of these kinds that hits this call, used up by one."""
        wanted = set(kinds)
        with self._lock:
            for fault in self._faults:
                if fault.kind not in wanted or not fault.matches(method, path):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None


@dataclass
class Call:
    """One call as the log shows it; status 0 means that no answer went out."""

    method: str
    path: str
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    route: str = ""
    fault: str = ""
    seconds: float = 0.0
    # What the client calls itself.
    agent: str = ""


class CallLog:
    """The last calls, bounded; and, for as long as the server runs, which client made which kind of call at all."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._routes: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        name = call.agent.partition("/")[0]
        with self._lock:
            self._calls.append(call)
            if call.route and (name in self._routes or len(self._routes) < AGENTS_KEPT):
                self._routes.setdefault(name, set()).add(call.route)

    def routes(self) -> dict[str, list[str]]:
        """By the client's name, without its version."""
        with self._lock:
            return {name: sorted(routes) for name, routes in self._routes.items()}

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()

    def as_json(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(call) for call in self._calls]


class FaultMiddleware:
    """Strikes with the book's status, cut and delay faults, and logs every call but the sandbox's own."""

    def __init__(self, app: Any, *, book: FaultBook, log: CallLog, error_body: ErrorBody) -> None:
        self._app = app
        self._book = book
        self._log = log
        self._error_body = error_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self._app(scope, receive, send)
            return
        call = Call(scope["method"], scope["path"], agent=_agent(scope))
        # The application may write its route's name here.
        scope["sandbox_call"] = call
        started = time.monotonic()
        try:
            await self._strike_or_pass(scope, receive, send, call)
        finally:
            if not call.route and (endpoint := scope.get("endpoint")) is not None:
                call.route = getattr(endpoint, "__name__", type(endpoint).__name__)
            call.seconds = round(time.monotonic() - started, 6)
            self._log.add(call)

    async def _strike_or_pass(self, scope: Any, receive: Any, send: Any, call: Call) -> None:
        receive, send = _counting(receive, send, call)
        if (delay := self._book.strike(("delay",), call.method, call.path)) is not None:
            call.fault = "delay"
            await asyncio.sleep(delay.seconds)
        fault = self._book.strike(("status", "cut"), call.method, call.path)
        if fault is None:
            await self._app(scope, receive, send)
            return
        call.fault = fault.kind if fault.kind == "status" else f"cut {fault.when}"
        if fault.kind == "status":
            await self._answer(fault, scope, receive, send)
        else:
            await self._cut(fault, scope, receive, send)

    async def _answer(self, fault: Fault, scope: Any, receive: Any, send: Any) -> None:
        await _drain(receive)
        headers, body = self._error_body(fault, scope)
        headers = {**headers, "content-length": str(len(body))}
        if fault.retry_after is not None:
            headers["retry-after"] = f"{fault.retry_after:g}"
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": fault.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    async def _cut(self, fault: Fault, scope: Any, receive: Any, send: Any) -> None:
        if fault.when != "before":
            await self._app(scope, receive, _half_answer(send) if fault.when == "during" else _no_answer)
        _abort(send)
        # Let the server notice that the connection is gone, or it complains about the missing answer.
        await asyncio.sleep(0)


def _agent(scope: Mapping[str, Any]) -> str:
    given = dict(scope["headers"]).get(b"user-agent", b"")
    return given[:200].decode("latin-1")


async def _no_answer(message: Any) -> None:
    """The work is done, and not one byte of the answer leaves."""


def _half_answer(send: Any) -> Any:
    """Half of the bytes that the answer announces, or of its first ones where it announces none."""
    left: int | None = None

    async def send_half(message: Any) -> None:
        nonlocal left
        if message["type"] == "http.response.start":
            length = dict(message["headers"]).get(b"content-length")
            left = int(length) // 2 if length is not None else None
            await send(message)
            return
        body = message.get("body", b"")
        part = body[: len(body) // 2 if left is None else left]
        left = 0 if left is None else left - len(part)
        if part:
            await send({**message, "body": part, "more_body": True})

    return send_half


def _counting(receive: Any, send: Any, call: Call) -> tuple[Any, Any]:
    async def counted_receive() -> Any:
        message = await receive()
        call.bytes_in += len(message.get("body", b""))
        return message

    async def counted_send(message: Any) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
        call.bytes_out += len(message.get("body", b""))
        await send(message)

    counted_send.transport_owner = getattr(send, "__self__", None)  # type: ignore[attr-defined]
    return counted_receive, counted_send


async def _drain(receive: Any) -> None:
    """Read the request to its end: a client that is still sending would miss the answer."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass


def _abort(send: Any) -> None:
    """Reset the TCP connection; uvicorn's `send` is a method of the object that holds the transport."""
    send.transport_owner.transport.abort()


def handle_admin(path: str, method: str, body: bytes, *, book: FaultBook, log: CallLog) -> tuple[int, Any]:
    """Serve `/sandbox/faults`, `/sandbox/calls` and `/sandbox/routes`: status and JSON value."""
    if path == f"{OWN_PATHS}routes" and method == "GET":
        return 200, {"routes": log.routes()}
    if path == f"{OWN_PATHS}calls" and method in ("GET", "DELETE"):
        calls = log.as_json()
        if method == "DELETE":
            log.clear()
        return 200, {"calls": calls}
    if path == f"{OWN_PATHS}faults" and method in ("GET", "POST", "DELETE"):
        if method == "DELETE":
            book.clear()
        elif method == "POST":
            try:
                value = json.loads(body)
                book.add([Fault.from_json(item) for item in (value if isinstance(value, list) else [value])])
            except ValueError as error:
                return 400, {"error": str(error)}
        return 200, {"faults": book.as_json()}
    return 404, {"error": f"nothing at {method} {path}"}
