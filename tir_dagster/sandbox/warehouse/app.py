"""Snowflake's HTTP protocol: login, statements (also slow, repeated and asynchronous ones), result chunks, session end."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hmac
import itertools
import json
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import fakesnow.transforms.stage
import jwt
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from fakesnow.converter import from_binding
from fakesnow.expr import normalise_ident
from fakesnow.transforms import SERVER_VERSION
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tir_dagster.sandbox.faults import CallLog, Fault, FaultBook, FaultMiddleware, handle_admin
from tir_dagster.sandbox.home import Identity, SandboxHome
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, internal_error
from tir_dagster.sandbox.warehouse.lake import Lake
from tir_dagster.sandbox.warehouse.locks import TableLocks
from tir_dagster.sandbox.warehouse.parameters import login_parameters
from tir_dagster.sandbox.warehouse.results import Result, ResultStore
from tir_dagster.sandbox.warehouse.roles import role_of_login, warehouse_of_login
from tir_dagster.sandbox.warehouse.session import Answer, Context, Session, new_query_id

logger = logging.getLogger("tir_dagster.sandbox.warehouse")

# A statement that takes longer is answered with "in progress", and the connector asks for its result again.
ANSWER_WITHIN_SECONDS = 30.0
SESSION_IDLE_SECONDS = 4 * 3600
_IN_PROGRESS, _IN_PROGRESS_ASYNC = "333333", "333334"
_MAX_BODY = 256 << 20
_QUERY_LOG_LENGTH, _QUERY_LOG_SQL = 2000, 20_000
# Finished statements are known this long, for a client that repeats its request, and at most so many of them.
_KNOWN_SECONDS, _KNOWN_STATEMENTS = 600.0, 5000
# How often it is looked which dynamic tables are due.
_SCHEDULER_SECONDS = 5.0
_ENDS_TRANSACTION = re.compile(r"\s*(COMMIT|ROLLBACK)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """What a statement came to: the answer's small part, and the result whose rows may be on disk."""

    payload: dict[str, Any]
    result: Result | None = None

    def as_json(self, base_url: str) -> dict[str, Any]:
        if self.result is None:
            return self.payload
        try:
            rows = self.result.as_json(base_url)
        except SnowflakeError as error:
            return _failure(error, self.result.query_id)
        return {**self.payload, "data": {**self.payload["data"], **rows}}


@dataclass
class Running:
    """A statement on its way: found again by its query id, or by its request id when a client repeats itself."""

    query_id: str
    session: Session
    task: asyncio.Future[Outcome]
    started: float = field(default_factory=time.monotonic)


class RefusedError(Exception):
    """The request itself is wrong; `status` and `code` are the protocol's."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Warehouse:
    """All state of the server: the lake, the sessions, the statements under way, the log of queries."""

    def __init__(self, home: SandboxHome) -> None:
        folder = home.data("warehouse")
        self.identity: Identity = home.identity()
        self.lake = Lake(folder)
        self.locks = TableLocks()
        self.results = ResultStore(folder / "results")
        self.sessions: dict[str, Session] = {}
        self.running: OrderedDict[str, Running] = OrderedDict()
        self.by_request: OrderedDict[str, Running] = OrderedDict()
        self.queries: deque[dict[str, Any]] = deque(maxlen=_QUERY_LOG_LENGTH)
        # A thread is held by each statement that waits for a lock, so the one that ends the wait needs another pool.
        self.threads = ThreadPoolExecutor(max_workers=128, thread_name_prefix="statement")
        self.threads_in_transaction = ThreadPoolExecutor(max_workers=128, thread_name_prefix="transaction")
        self.threads_of_commits = ThreadPoolExecutor(max_workers=16, thread_name_prefix="commit")
        # fakesnow stages files in a temporary folder of its own; ours must outlive a restart.
        fakesnow.transforms.stage.LOCAL_BUCKET_PATH = str(folder / "stages")
        self._closing = threading.Event()
        self._scheduler = threading.Thread(target=self._refresh_dynamic_tables, name="scheduler", daemon=True)
        self._scheduler.start()

    def _refresh_dynamic_tables(self) -> None:
        session = Session(self.lake, self.locks, self.results, Context(user="SYSTEM"))
        while not self._closing.wait(_SCHEDULER_SECONDS):
            try:
                session.refresh_due_tables()
            except Exception:
                logger.exception("the refreshes of dynamic tables broke")
        session.close()

    def close(self) -> None:
        self._closing.set()
        self._scheduler.join()
        for session in self.sessions.values():
            session.interrupt()
        for pool in (self.threads, self.threads_in_transaction, self.threads_of_commits):
            pool.shutdown(wait=True, cancel_futures=True)
        for session in self.sessions.values():
            with suppress(Exception):
                session.close()
        self.results.close()
        self.lake.close()

    # Sessions

    async def login(self, request: Request) -> JSONResponse:
        data = (await _body(request)).get("data") or {}
        user = self._authenticate(data)
        try:
            defaults, parameters = login_parameters(self.lake, user, data.get("SESSION_PARAMETERS") or {})
            role = role_of_login(self.lake, request.query_params.get("roleName"))
        except SnowflakeError as error:
            raise RefusedError(200, f"{error.code:06d}", error.message) from error
        query = request.query_params
        names = {key: query.get(key) for key in ("databaseName", "schemaName", "warehouse")}
        context = Context(
            user=user,
            database=names["databaseName"] and normalise_ident(names["databaseName"]),
            schema=names["schemaName"] and normalise_ident(names["schemaName"]),
            role=role,
            warehouse=warehouse_of_login(self.lake, names["warehouse"]),
            account=str(data.get("ACCOUNT_NAME") or self.identity.account).upper(),
            parameters=parameters,
            defaults=defaults,
        )
        self._close_idle_sessions()
        session = Session(self.lake, self.locks, self.results, context)
        token = secrets.token_urlsafe(32)
        self.sessions[token] = session
        return JSONResponse({"data": _login_answer(token, session), "code": None, "message": None, "success": True})

    def _authenticate(self, data: dict[str, Any]) -> str:
        user = str(data.get("LOGIN_NAME") or "").upper()
        method = str(data.get("AUTHENTICATOR") or "SNOWFLAKE").upper()
        if method == "SNOWFLAKE_JWT":
            known = self._signed_by(user, str(data.get("TOKEN") or ""))
        elif method == "OAUTH":
            user = self.identity.snowflake_user.upper()
            known = hmac.compare_digest(
                str(data.get("TOKEN") or "").encode(), self.identity.snowflake_password.encode()
            )
        else:
            password = str(data.get("PASSWORD") or "")
            known = user == self.identity.snowflake_user.upper() and hmac.compare_digest(
                password.encode(), self.identity.snowflake_password.encode()
            )
        if not known:
            raise RefusedError(200, "390100", "Incorrect username or password was specified.")
        return user

    def _signed_by(self, user: str, token: str) -> bool:
        stored = self.lake.public_key(user)
        if stored is None:
            return False
        pem = f"-----BEGIN PUBLIC KEY-----\n{stored}\n-----END PUBLIC KEY-----\n".encode()
        try:
            jwt.decode(token, key=load_pem_public_key(pem), algorithms=["RS256"])  # type: ignore[arg-type]
        except (jwt.PyJWTError, ValueError):
            return False
        return True

    def _close_idle_sessions(self) -> None:
        for token, session in list(self.sessions.items()):
            if time.monotonic() - session.last_used > SESSION_IDLE_SECONDS:
                del self.sessions[token]
                self.threads_in_transaction.submit(session.close)

    def session_of(self, request: Request) -> tuple[str, Session]:
        header = request.headers.get("Authorization", "")
        token = header.removeprefix('Snowflake Token="').removesuffix('"')
        session = self.sessions.get(token)
        if session is None:
            raise RefusedError(200, "390104", "ID Token is invalid. User must login again to access the service.")
        session.last_used = time.monotonic()
        return token, session

    async def end_session(self, request: Request) -> JSONResponse:
        if request.query_params.get("delete"):
            token, session = self.session_of(request)
            del self.sessions[token]
            await asyncio.get_running_loop().run_in_executor(self.threads_in_transaction, session.close)
        return _ok()

    async def heartbeat(self, request: Request) -> JSONResponse:
        self.session_of(request)
        return _ok()

    async def renew(self, request: Request) -> JSONResponse:
        token, _ = self.session_of(request)
        return _ok(
            {"sessionToken": token, "masterToken": token, "validityInSecondsST": 3600, "validityInSecondsMT": 14400}
        )

    # Statements

    async def query(self, request: Request) -> JSONResponse:
        _, session = self.session_of(request)
        body = await _body(request)
        sql = body.get("sqlText")
        if not isinstance(sql, str) or not sql.strip():
            return _failed(SnowflakeError(900, "42601", "SQL compilation error:\nEmpty SQL statement."), new_query_id())
        request_id = request.query_params.get("requestId") or new_query_id()
        # A client whose connection broke asks again under the same request id: the statement must not run twice.
        running = self.by_request.get(request_id)
        if running is None:
            running = self._start(session, sql, body)
            self.by_request[request_id] = self.running[running.query_id] = running
            for table in (self.by_request, self.running):
                _forget_finished(table)
        if body.get("asyncExec"):
            return _in_progress(running, _IN_PROGRESS_ASYNC)
        return await self._answer(running, request)

    def _start(self, session: Session, sql: str, body: dict[str, Any]) -> Running:
        query_id = new_query_id()
        transaction = session.transaction
        pool = self.threads_in_transaction if transaction.open else self.threads
        pool = self.threads_of_commits if _ENDS_TRANSACTION.match(sql) else pool
        transaction.requests += 1
        task = asyncio.get_running_loop().run_in_executor(pool, self._run, session, sql, body, query_id)

        def answered(_: asyncio.Future[Outcome]) -> None:
            transaction.requests -= 1

        task.add_done_callback(answered)
        return Running(query_id, session, task)

    def _run(self, session: Session, sql: str, body: dict[str, Any], query_id: str) -> Outcome:
        started = time.monotonic()
        entry = {
            "query_id": query_id,
            "sql": sql[:_QUERY_LOG_SQL],
            "user": session.context.user,
            "session": session.number,
        }
        entry |= {"role": session.context.role, "warehouse": session.context.warehouse}
        try:
            params, batch = _bindings(body.get("bindings"))
            if body.get("describeOnly"):
                answer = session.describe(sql, query_id)
            else:
                answer = session.execute(sql, query_id, params, batch)
            entry["rows"] = answer.result.total
            return self._success(session, answer, query_id)
        except SnowflakeError as error:
            entry["error"] = f"{error.code:06d}"
            logger.info("%s failed: %s", query_id, error)
            return Outcome(_failure(error, query_id))
        except Exception as error:
            logger.exception("%s broke", query_id)
            entry["error"] = "000603"
            return Outcome(_failure(internal_error(str(error)), query_id))
        finally:
            entry["query_tag"] = session.context.parameters.get("QUERY_TAG", "")
            entry["seconds"] = round(time.monotonic() - started, 4)
            self.queries.append(entry)

    def _success(self, session: Session, answer: Answer, query_id: str) -> Outcome:
        if answer.upload is not None:
            return Outcome({"data": answer.upload, "code": None, "message": None, "success": True})
        data = {
            "parameters": _told_parameters(session),
            "queryId": query_id,
            "statementTypeId": answer.type_id,
            "finalDatabaseName": session.database,
            "finalSchemaName": session.schema,
            "finalRoleName": session.context.role,
            "finalWarehouseName": session.context.warehouse,
        }
        return Outcome({"data": data, "code": None, "message": None, "success": True}, answer.result)

    async def _answer(self, running: Running, request: Request) -> JSONResponse:
        try:
            outcome = await asyncio.wait_for(asyncio.shield(running.task), ANSWER_WITHIN_SECONDS)
        except TimeoutError:
            return _in_progress(running, _IN_PROGRESS)
        return JSONResponse(outcome.as_json(str(request.base_url).rstrip("/")))

    async def result(self, request: Request) -> JSONResponse:
        self.session_of(request)
        running = self.running.get(request.path_params["query_id"])
        if running is None:
            return _failed(SnowflakeError(709, "02000", "Statement not found"), request.path_params["query_id"])
        return await self._answer(running, request)

    async def abort(self, request: Request) -> JSONResponse:
        self.session_of(request)
        if query_id := request.path_params.get("query_id"):
            running = self.running.get(query_id)
        else:
            running = self.by_request.get(str((await _body(request)).get("requestId")))
        if running is not None and not running.task.done():
            running.session.cancel(running.query_id)
        return _ok()

    async def monitor(self, request: Request) -> JSONResponse:
        self.session_of(request)
        running = self.running.get(request.path_params["query_id"])
        status = None
        if running is not None:
            status = (
                "RUNNING"
                if not running.task.done()
                else "SUCCESS"
                if running.task.result().payload["success"]
                else "FAILED_WITH_ERROR"
            )
        queries = [{"status": status, "id": running.query_id}] if running else []
        return JSONResponse({"data": {"queries": queries}, "code": None, "message": None, "success": True})

    async def chunk(self, request: Request) -> Response:
        path = self.results.path(request.path_params["query_id"], request.path_params["number"])
        if path is None:
            return JSONResponse({"message": "this result is no longer kept: run the query again"}, status_code=404)
        return FileResponse(path, media_type="application/octet-stream")

    async def settings(self, request: Request) -> JSONResponse:
        """What a test may want otherwise: `idle_transaction_seconds`."""
        if request.method == "PUT":
            seconds = (await _body(request)).get("idle_transaction_seconds")
            if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= 3600:
                raise RefusedError(400, "390000", "idle_transaction_seconds must be a number above 0, up to 3600.")
            self.locks.idle_seconds = float(seconds)
        return JSONResponse({"idle_transaction_seconds": self.locks.idle_seconds})

    async def query_log(self, request: Request) -> JSONResponse:
        if request.method == "DELETE":
            self.queries.clear()
        return JSONResponse({"queries": list(self.queries)})


def build_app(home: SandboxHome, options: argparse.Namespace) -> Starlette:
    del options
    warehouse = Warehouse(home)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        warehouse.close()

    routes = [
        Route("/session/v1/login-request", warehouse.login, methods=["POST"]),
        Route("/session", warehouse.end_session, methods=["POST"]),
        Route("/session/heartbeat", warehouse.heartbeat, methods=["POST"]),
        Route("/session/token-request", warehouse.renew, methods=["POST"]),
        Route("/queries/v1/query-request", warehouse.query, methods=["POST"]),
        Route("/queries/v1/abort-request", warehouse.abort, methods=["POST"]),
        Route("/queries/{query_id}/abort-request", warehouse.abort, methods=["POST"]),
        Route("/queries/{query_id}/result", warehouse.result, methods=["GET"]),
        Route("/monitoring/queries/{query_id}", warehouse.monitor, methods=["GET"]),
        Route("/results/{query_id}/{number:int}", warehouse.chunk, methods=["GET"]),
        Route("/telemetry/send", _accepted, methods=["POST"]),
        Route("/sandbox/settings", warehouse.settings, methods=["GET", "PUT"]),
        Route("/sandbox/queries", warehouse.query_log, methods=["GET", "DELETE"]),
    ]
    book, log = FaultBook(), CallLog()

    async def admin(request: Request) -> JSONResponse:
        status, value = handle_admin(request.url.path, request.method, await request.body(), book=book, log=log)
        return JSONResponse(value, status_code=status)

    routes += [Route(path, admin, methods=["GET", "POST", "DELETE"]) for path in ("/sandbox/faults", "/sandbox/calls")]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={RefusedError: _refused},
        middleware=[Middleware(FaultMiddleware, book=book, log=log, error_body=_fault_body)],
    )


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    if len(raw) > _MAX_BODY:
        raise RefusedError(413, "390000", "The request is too large.")
    try:
        if request.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        value = json.loads(raw)
    except (OSError, EOFError, ValueError) as error:
        raise RefusedError(400, "390000", f"The request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RefusedError(400, "390000", "The request is not a JSON object.")
    return value


def _forget_finished(table: OrderedDict[str, Running]) -> None:
    """Make room in the list of statements; one that still runs is never forgotten."""
    for key in list(itertools.islice(table, 10)):
        running = table[key]
        if not running.task.done():
            table.move_to_end(key)
        elif time.monotonic() - running.started > _KNOWN_SECONDS or len(table) > _KNOWN_STATEMENTS:
            del table[key]
        else:
            return


def _bindings(bindings: Any) -> tuple[Any, list[tuple[Any, ...]] | None]:
    """Bound values as one row of parameters, or as many rows when the client binds arrays."""
    if not bindings:
        return None, None
    if not all(str(key).isdigit() for key in bindings):
        return {name: _bound(binding) for name, binding in bindings.items()}, None
    ordered = [bindings[str(position)] for position in range(1, len(bindings) + 1)]
    if any(isinstance(binding["value"], list) for binding in ordered):
        columns = [[_bound({**binding, "value": value}) for value in binding["value"]] for binding in ordered]
        return None, list(zip(*columns, strict=True))
    return tuple(_bound(binding) for binding in ordered), None


def _bound(binding: dict[str, Any]) -> Any:
    return None if binding.get("value") is None else from_binding(binding)


def _told_parameters(session: Session) -> list[dict[str, Any]]:
    """The parameters that the connector itself goes by."""
    return [{"name": name, "value": session.parameter(name)} for name in ("AUTOCOMMIT", "TIMEZONE")]


def _login_answer(token: str, session: Session) -> dict[str, Any]:
    return {
        "token": token,
        "masterToken": token,
        "validityInSeconds": 3600,
        "masterValidityInSeconds": 14400,
        "displayUserName": session.context.user,
        "serverVersion": SERVER_VERSION,
        "sessionId": session.number,
        "parameters": [
            {"name": "CLIENT_SESSION_KEEP_ALIVE_HEARTBEAT_FREQUENCY", "value": 3600},
            # 0: array bindings come inline, not through a stage.
            {"name": "CLIENT_STAGE_ARRAY_BINDING_THRESHOLD", "value": 0},
            *_told_parameters(session),
        ],
        "sessionInfo": {
            "databaseName": session.database,
            "schemaName": session.schema,
            "warehouseName": session.context.warehouse,
            "roleName": session.context.role,
        },
    }


def _in_progress(running: Running, code: str) -> JSONResponse:
    data = {"queryId": running.query_id, "getResultUrl": f"/queries/{running.query_id}/result"}
    return JSONResponse({"data": data, "code": code, "message": "Query execution in progress.", "success": True})


def _failure(error: SnowflakeError, query_id: str) -> dict[str, Any]:
    code = f"{error.code:06d}"
    data = {"errorCode": code, "sqlState": error.state, "queryId": query_id, "internalError": False}
    return {"data": data, "code": code, "message": error.message, "success": False}


def _failed(error: SnowflakeError, query_id: str) -> JSONResponse:
    return JSONResponse(_failure(error, query_id))


def _ok(data: dict[str, Any] | None = None) -> JSONResponse:
    return JSONResponse({"data": data, "code": None, "message": None, "success": True})


def _fault_body(fault: Fault, scope: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
    del scope
    body = {
        "data": None,
        "code": fault.code or "390000",
        "message": fault.message or "A fault on demand.",
        "success": False,
    }
    return {"content-type": "application/json"}, json.dumps(body).encode()


async def _accepted(request: Request) -> JSONResponse:
    del request
    return _ok()


def _refused(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, RefusedError)
    return JSONResponse(
        {"data": None, "code": error.code, "message": error.message, "success": False}, status_code=error.status
    )
