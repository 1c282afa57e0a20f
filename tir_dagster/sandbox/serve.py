"""Run one stand-in server: loopback only, in the foreground, until SIGTERM; `python -m tir_dagster.sandbox.<server>`."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

from tir_dagster.background import LOOPBACK
from tir_dagster.sandbox.home import HEALTH_PATH, SandboxHome

# The process for which the server runs, if there is one: however that ends, the server ends after it.
OWNER_VARIABLE = "TIR_SANDBOX_OWNER"
_LOOK_SECONDS = 1.0


def run_server(
    server: str, build_app: Callable[[SandboxHome, argparse.Namespace], Any], *, tells_time: bool = False
) -> None:
    """Parse the server's own command line, bind, build the application and serve it; `tells_time`: it dates its answers itself."""
    parser = argparse.ArgumentParser(prog=f"python -m tir_dagster.sandbox.{server}")
    parser.add_argument("--home", type=Path, required=True, help="the sandbox's folder")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--warehouse-port", type=int, default=0, help="where the embedded warehouse answers")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    _follow_owner()
    listener = _bind(server, options.port)
    port: int = listener.getsockname()[1]
    app = build_app(SandboxHome(options.home.absolute()), options)

    async def with_health(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == HEALTH_PATH:
            await JSONResponse({"server": server, "pid": os.getpid(), "port": port})(scope, receive, send)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(
        with_health,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=5,
        ws="none",
        date_header=not tells_time,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _follow_owner() -> None:
    owner = os.environ.get(OWNER_VARIABLE, "")
    if owner.isdecimal():
        threading.Thread(target=_end_after, args=(int(owner),), daemon=True, name="owner").start()


def _end_after(owner: int) -> None:
    while True:
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        except PermissionError:
            # It is there, and somebody else's.
            pass
        time.sleep(_LOOK_SECONDS)


def _bind(server: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            sys.exit(f"{server}: port {port} on {LOOPBACK} is taken or not allowed; choose another one")
        raise
    listener.listen(128)
    return listener
