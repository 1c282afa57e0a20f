"""The Spark server of a machine: one Spark Connect server under TIR_HOME that processes share, on loopback only.

Later processes need no JVM of their own. Its state is one file, readable by its owner only: it holds the token without which
the server runs nobody's code.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tir_dagster.errors import SourceError
from tir_dagster.files import replaced_file
from tir_dagster.spark.connect import connect_session
from tir_dagster.spark.java import require_java
from tir_dagster.spark.remote import REMOTE_VARIABLE, Remote

LOOPBACK = "127.0.0.1"
READY_SECONDS = 180.0
END_SECONDS = 15.0
TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
# Credentials that tasks need travel with them: the server, which outlives the command, gets none by its environment.
_SECRETS = ("SNOWFLAKE_", "TABLEAU_", "SLACK_", "SERVICENOW_")
# What Spark's workers import of this package, and keep as long as they live.
_WORKERS_IMPORT = ("snowflake", "spec", "spark", "loading")

State = Literal["running", "stopped", "ended", "not answering", "outdated"]

# The server that this very process started: its exit must be collected, or it would look alive as a zombie.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class SparkServer:
    """A server as its state file describes it; `made_by` tells the packages that its workers have loaded."""

    pid: int
    port: int
    started: str
    made_by: str
    # One session for all processes: Spark starts new Python workers for each session, and keeps their parent for ever.
    session: str
    token: str = field(repr=False)

    @property
    def lives(self) -> bool:
        """Whether this very process runs, and not another one that got its pid later."""
        if child := _children.get(self.pid):
            child.poll()
        return bool(self.started) and start_time(self.pid) == self.started

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
        return SparkServer(**json.loads(_state_file(home).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
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
        if not address.startswith("sc://"):
            raise SourceError(
                f"{REMOTE_VARIABLE} is no address of a Spark Connect server. Set it to something like "
                "sc://spark.example.com:15002, or unset it."
            )
        return Remote(address)
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

    port, token = _free_port(), secrets.token_urlsafe(32)
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
    with log_file(home).open("wb") as log:
        child = subprocess.Popen(
            command,
            cwd=home / "spark",
            env=child_env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _children[child.pid] = child
    server = SparkServer(child.pid, port, start_time(child.pid) or "", _packages(), str(uuid.uuid4()), token)
    # Written before it is ready: if this command is killed now, the next one still finds the process.
    try:
        _write(home, server)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return server


def _wait_until_ready(home: Path, server: SparkServer) -> None:
    """Wait until it listens, then run a task: that loads what every staging needs, and shows that workers find it."""
    from tir_dagster.spark.failures import spark_failures
    from tir_dagster.spark.staging import rehearse

    wait(lambda: server.answers or not server.lives, READY_SECONDS)
    if not (server.lives and server.answers):
        problem = f"did not answer within {READY_SECONDS:.0f} s" if server.lives else "ended while it started"
        raise SourceError(
            f"The Spark server {problem} (port {server.port}). Its log, {log_file(home)}, ends with: {_log_end(home)}"
        )
    remote = server.remote(home)
    with spark_failures("trying the new server", remote):
        rehearse(connect_session(remote))


def _end(home: Path, server: SparkServer) -> None:
    """SIGTERM, wait, SIGKILL; a state file that no longer speaks of our process is only removed."""
    if server.lives:
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)
        if not wait(lambda: not server.lives, END_SECONDS):
            # With its Python workers: it leads a session, and hung it cannot end them itself.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGKILL)
            wait(lambda: not server.lives, END_SECONDS)
        if server.lives:
            raise SourceError(
                f"The Spark server (pid {server.pid}) does not end, not even by SIGKILL. Try again later."
            )
    # Not waited for: a child of the same pid may be the server of another home.
    if (child := _children.get(server.pid)) and child.poll() is not None:
        del _children[server.pid]
    _state_file(home).unlink(missing_ok=True)


def start_time(pid: int) -> str | None:
    """When the process began, as text to compare: a recycled pid has another one. None when there is no process."""
    if sys.platform != "linux":
        begun = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return begun.stdout.strip() or None
    try:
        # The name in parentheses may hold spaces and parentheses itself; the fields follow the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, threads, ticks_since_boot = fields[0], int(fields[17]), fields[19]
    # A killed process is a zombie at once, but holds its port and its files until its last thread is gone.
    has_ended = state == "X" or (state == "Z" and threads <= 1)
    return None if has_ended else f"{boot}/{ticks_since_boot}"


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _state_file(home: Path) -> Path:
    return home / "spark" / "server.json"


def _write(home: Path, server: SparkServer) -> None:
    with replaced_file(_state_file(home)) as beside:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(asdict(server), out, indent=2)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One start or stop at a time; others wait. The system frees the lock when this process ends, however it ends."""
    (home / "spark").mkdir(parents=True, exist_ok=True)
    with (home / "spark" / "server.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _spark_home() -> Path:
    """The folder of the package pyspark, found without importing it."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _packages() -> str:
    """A text that changes with the packages that Spark's workers import."""
    package = Path(__file__).parents[1]
    modules = [file for room in _WORKERS_IMPORT for file in (package / room).rglob("*.py")]
    newest = max(file.stat().st_mtime_ns for file in modules)
    return f"{sys.executable} pyspark-{importlib.metadata.version('pyspark')} {package} {len(modules)} {newest}"


def _log_end(home: Path) -> str:
    with suppress(OSError), log_file(home).open("rb") as file:
        file.seek(max(0, log_file(home).stat().st_size - 2_000))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-5:]) or "nothing"
    return "nothing"
