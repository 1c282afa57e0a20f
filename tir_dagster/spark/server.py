"""The Spark server of a machine: one Spark Connect server under TIR_HOME that processes share, on loopback only.

Later processes need no JVM of their own. Its state is one file, readable by its owner only: it holds the token without which
the server runs nobody's code.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import secrets
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tir_dagster.background import (
    LOOPBACK,
    BackgroundProcess,
    free_port,
    last_lines,
    launch,
    locked,
    read_json,
    wait,
    write_json,
)
from tir_dagster.errors import SourceError
from tir_dagster.spark.connect import connect_session
from tir_dagster.spark.java import require_java
from tir_dagster.spark.package import task_modules
from tir_dagster.spark.remote import REMOTE_VARIABLE, TOKEN_VARIABLE, Remote

READY_SECONDS = 180.0
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
# Credentials that tasks need travel with them: the server, which outlives the command, gets none by its environment.
_SECRETS = ("SNOWFLAKE_", "TABLEAU_", "SLACK_", "SERVICENOW_")

State = Literal["running", "stopped", "ended", "not answering", "outdated"]


@dataclass(frozen=True)
class SparkServer(BackgroundProcess):
    """A server as its state file describes it; `made_by` tells the packages that its workers have loaded."""

    made_by: str
    # One session for all processes: Spark starts new Python workers for each session, and keeps their parent for ever.
    session: str
    token: str = field(repr=False)

    @property
    def answers(self) -> bool:
        """Whether it listens: it does so when Spark is ready."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=3):
                return True
        except OSError:
            return False

    @property
    def address(self) -> str:
        # By this name: only there the client sends a token without TLS.
        return f"sc://localhost:{self.port}"

    def remote(self, home: Path) -> Remote:
        """How its clients reach it."""
        return Remote(self.address, self.token, self.session, log_file(home))


def log_file(home: Path) -> Path:
    return home / "spark" / "server.log"


def find_server(home: Path) -> SparkServer | None:
    """The server that was started and not stopped by a command; it may have ended since."""
    try:
        return SparkServer(**read_json(_state_file(home)))
    except (OSError, TypeError):
        return None


def server_state(home: Path) -> tuple[State, SparkServer | None]:
    """Return the server's state and its description; only a running server is used."""
    server = find_server(home)
    if server is None:
        return "stopped", None
    if not server.lives:
        return "ended", server
    if not server.answers:
        return "not answering", server
    return ("running" if server.made_by == _packages() else "outdated"), server


def remote_spark(env: Mapping[str, str], home: Path, log: Callable[[str], None]) -> Remote | None:
    """Return SPARK_REMOTE if that is set, else this home's own server if it runs; log why a server is not used."""
    if address := env.get(REMOTE_VARIABLE):
        return Remote.parse(address, env)
    state, server = server_state(home)
    if server is None:
        return None
    if state == "running":
        return server.remote(home)
    reason = "was started by other versions of the packages" if state == "outdated" else f"is {state}"
    log(f"the Spark server of {home} {reason} and is not used; `tir spark up` starts a new one")
    return None


def start_server(home: Path, env: Mapping[str, str]) -> tuple[SparkServer, bool]:
    """Start the server unless it runs, and wait until it runs tasks; return it, and whether it was started now."""
    with _locked(home):
        state, server = server_state(home)
        if state == "running" and server is not None:
            return server, False
        if server is not None:
            _end(home, server)
        require_java({name: value for name, value in env.items() if name != REMOTE_VARIABLE})
        server = _launch(home, env)
        try:
            _wait_until_ready(home, server)
        except BaseException:
            _end(home, server)
            raise
        return server, True


def stop_server(home: Path) -> SparkServer | None:
    """End the server; return it if there was one that lived."""
    if find_server(home) is None:
        return None
    with _locked(home):
        server = find_server(home)
        if server is None:
            return None
        lived = server.lives
        _end(home, server)
        return server if lived else None


def _launch(home: Path, env: Mapping[str, str]) -> SparkServer:
    from tir_dagster.spark.session import spark_conf

    port, token = free_port(), secrets.token_urlsafe(32)
    conf = {
        **spark_conf(home=home),
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        # Spark would end a session that nobody used for an hour, and refuse it from then on.
        "spark.connect.session.manager.defaultSessionTimeout": "3650d",
    }
    spark_home = _spark_home()
    settings = [f"--conf={name}={value}" for name, value in conf.items()]
    command = [str(spark_home / "bin" / "spark-submit"), f"--class={_CLASS}", "--name=tir spark", *settings]
    # A jar must be named, though the class comes with Spark itself.
    command.append("spark-internal")
    passed_on = {name: value for name, value in env.items() if not name.startswith(_SECRETS)}
    passed_on.pop(REMOTE_VARIABLE, None)
    child_env = {"PYSPARK_PYTHON": sys.executable, **passed_on, "SPARK_HOME": str(spark_home), TOKEN_VARIABLE: token}

    def record(pid: int, started: str) -> SparkServer:
        server = SparkServer(pid, port, started, _packages(), str(uuid.uuid4()), token)
        write_json(_state_file(home), asdict(server))
        return server

    return launch(command, log=log_file(home), log_mode="wb", record=record, env=child_env)


def _wait_until_ready(home: Path, server: SparkServer) -> None:
    """Wait until it listens, then run a task: that loads what every staging needs, and shows that workers find it."""
    from tir_dagster.spark.failures import spark_failures
    from tir_dagster.spark.staging import rehearse

    wait(lambda: server.answers or not server.lives, READY_SECONDS)
    if not (server.lives and server.answers):
        problem = f"did not answer within {READY_SECONDS:.0f} s" if server.lives else "ended while it started"
        log_text = " | ".join(line.strip() for line in last_lines(log_file(home), 5)) or "nothing"
        raise SourceError(
            f"The Spark server {problem} (port {server.port}). Its log, {log_file(home)}, ends with: {log_text}"
        )
    remote = server.remote(home)
    with spark_failures("trying the new server", remote):
        rehearse(connect_session(remote))


def _end(home: Path, server: SparkServer) -> None:
    """End the server; a state file that no longer describes our process is only removed."""
    if not server.end():
        raise SourceError(f"The Spark server (pid {server.pid}) does not end, not even by SIGKILL. Try again later.")
    _state_file(home).unlink(missing_ok=True)


def _state_file(home: Path) -> Path:
    return home / "spark" / "server.json"


def _locked(home: Path) -> AbstractContextManager[None]:
    """One start or stop at a time; others wait."""
    return locked(home / "spark" / "server.lock")


def _spark_home() -> Path:
    """The folder of the package pyspark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _packages() -> str:
    """A text that changes with the packages that Spark's workers import."""
    package, modules = Path(__file__).parents[1], task_modules()
    newest = max(file.stat().st_mtime_ns for file in modules)
    return f"{sys.executable} pyspark-{importlib.metadata.version('pyspark')} {package} {len(modules)} {newest}"
