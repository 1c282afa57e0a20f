"""The sandbox's servers in the background, all together: start, stop, status, environment, reset."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tir_dagster.background import LOOPBACK, free_port, last_lines, locked, read_json, wait
from tir_dagster.sandbox.daemon import Daemon, end, find, launch
from tir_dagster.sandbox.home import S3_REGION, SERVERS, SandboxError, SandboxHome, is_identity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

READY_SECONDS = 90.0
PATIENCE_SECONDS = 20.0

# Which servers are told where another one answers, as `--<other>-port`.
PEERS: Mapping[str, tuple[str, ...]] = {"tableau": ("warehouse",)}

# What the `sandbox` extra brings; the servers cannot start without any of them.
NEEDED_MODULES = ("defusedxml", "duckdb", "duckdb_extensions", "fakesnow", "moto", "starlette", "uvicorn")


@dataclass(frozen=True)
class ServerState:
    """One server as it is now; `started_now` is set by `start` on what that call itself started."""

    server: str
    state: Literal["running", "stopped", "not answering"]
    log: Path
    data: Path
    size: int
    pid: int | None = None
    port: int | None = None
    started_now: bool = False

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def url(self) -> str | None:
        return f"http://{LOOPBACK}:{self.port}" if self.port else None


def start(home: SandboxHome, ports: Mapping[str, int | None] | None = None) -> dict[str, ServerState]:
    """Start the servers that do not run yet and wait until all answer; on failure end what this call started."""
    _require_packages()
    asked = {server: port for server, port in (ports or {}).items() if port}
    with _locked(home):
        home.identity()  # made here, before two servers could both try to make it
        return _start_all(home, asked)


def stop(home: SandboxHome) -> dict[str, ServerState]:
    """End every server of this sandbox; returns what was there before."""
    if not home.root.is_dir():
        return status(home)
    with _locked(home):
        before = status(home)
        _end_all(home)
        return before


def status(home: SandboxHome) -> dict[str, ServerState]:
    """Every server as it is now, asked over HTTP."""
    return {server: _state(home, server) for server in SERVERS}


def environment(home: SandboxHome) -> dict[str, str]:
    """The variables with which any client reaches this sandbox; the servers must be running."""
    states = status(home)
    missing = [f"{name} is {state.state}" for name, state in states.items() if not state.running]
    if missing:
        raise SandboxError(
            f"The sandbox in {home.root} is not running ({', '.join(missing)}). Start it: tir sandbox up"
        )
    identity = home.identity()
    return {
        "SNOWFLAKE_ACCOUNT": identity.account,
        "SNOWFLAKE_USER": identity.snowflake_user,
        "SNOWFLAKE_PASSWORD": identity.snowflake_password,
        "SNOWFLAKE_HOST": LOOPBACK,
        "SNOWFLAKE_PORT": str(states["warehouse"].port),
        "SNOWFLAKE_PROTOCOL": "http",
        "TABLEAU_SERVER_URL": str(states["tableau"].url),
        "TABLEAU_SITE": identity.site,
        "TABLEAU_TOKEN_NAME": identity.token_name,
        "TABLEAU_TOKEN_SECRET": identity.token_secret,
        "SLACK_API_URL": f"{states['people'].url}/slack/api/",
        "SLACK_BOT_TOKEN": identity.slack_token,
        "SERVICENOW_URL": str(states["people"].url),
        "SERVICENOW_USERNAME": identity.servicenow_user,
        "SERVICENOW_PASSWORD": identity.servicenow_password,
        "AWS_ENDPOINT_URL_S3": str(states["storage"].url),
        "AWS_REGION": S3_REGION,
        "AWS_ACCESS_KEY_ID": identity.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": identity.s3_secret_key,
    }


def reset(home: SandboxHome) -> dict[str, ServerState]:
    """Delete the servers' data and logs, keep names, secrets and ports; servers that ran run again afterwards."""
    _require_sandbox(home)
    with _locked(home):
        ran = any(find(home, server) for server in SERVERS)
        _end_all(home)
        for folder in _own_folders(home):
            _delete(folder)
        return _start_all(home, {}) if ran else status(home)


def _start_all(home: SandboxHome, asked: Mapping[str, int]) -> dict[str, ServerState]:
    """All launched before the first is waited for: they need only each other's ports, and start side by side."""
    for server, port in asked.items():
        if find(home, server) is None:
            _require_free(server, port)  # before anything starts
    ports: dict[str, int] = {}
    launched: list[tuple[Daemon, int]] = []
    try:
        for server in SERVERS:
            peers = tuple(f"--{peer}-port={ports[peer]}" for peer in PEERS.get(server, ()))
            daemon = _usable(home, server, asked.get(server), peers)
            if daemon is None:
                log_start = _log_size(home.log(server))
                port = _choose_port(home, server, asked.get(server), taken=[*ports.values(), *asked.values()])
                daemon = _launch(home, server, port, peers)
                launched.append((daemon, log_start))
            ports[server] = daemon.port
        for daemon, log_start in launched:
            _wait_until_ready(daemon, home.log(daemon.server), log_start)
        new = {daemon.server for daemon, _ in launched}
        return {
            server: _remembered(home, replace(_state(home, server), started_now=server in new)) for server in SERVERS
        }
    except BaseException:
        for daemon, _ in reversed(launched):
            end(home, daemon.server)
        raise


def _launch(home: SandboxHome, server: str, port: int, peers: tuple[str, ...]) -> Daemon:
    home.log(server).parent.mkdir(parents=True, exist_ok=True)
    return launch(home, server, port, peers)


def _log_size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _remembered(home: SandboxHome, state: ServerState) -> ServerState:
    """The same state, its port noted for the next start; also after an `up` that was killed while it waited."""
    if state.port and state.port != home.port(state.server):
        home.remember_port(state.server, state.port)
    return state


def _usable(home: SandboxHome, server: str, asked: int | None, peers: tuple[str, ...]) -> Daemon | None:
    """The server that already runs as wanted; one that hangs or knows an old address of a peer is ended."""
    daemon = find(home, server)
    if daemon is None:
        return None
    # A busy server may be slow to answer: it must not be ended over one missed beat.
    wait(lambda: daemon.answers or not daemon.lives, PATIENCE_SECONDS)
    if not daemon.answers or daemon.arguments != peers:
        end(home, server)
        return None
    if asked not in (None, daemon.port):
        raise SandboxError(
            f"The {server} already runs on port {daemon.port}, not on {asked}."
            f" To move it: tir sandbox down, then tir sandbox up --{server}-port {asked}"
        )
    return daemon


def _wait_until_ready(daemon: Daemon, log: Path, log_start: int) -> None:
    wait(lambda: daemon.answers or not daemon.lives, READY_SECONDS)
    if daemon.lives and daemon.answers:
        return
    what = f"did not answer within {READY_SECONDS:.0f} s" if daemon.lives else "ended while starting"
    log_text = "\n".join(f"  {line}" for line in last_lines(log, 15, start=log_start)) or "  (nothing)"
    raise SandboxError(f"The {daemon.server} {what} (port {daemon.port}). Its log, {log}, ends with:\n{log_text}")


def _choose_port(home: SandboxHome, server: str, asked: int | None, taken: Collection[int]) -> int:
    """The port asked for, else the remembered one, else a free one; `taken` are those of servers just launched."""
    if asked:
        _require_free(server, asked)
        return asked
    remembered = home.port(server)
    if remembered and remembered not in taken and not _port_problem(remembered):
        return remembered
    while (port := free_port()) in taken:
        pass
    return port


def _require_free(server: str, port: int) -> None:
    problem = _port_problem(port)
    if problem:
        raise SandboxError(
            f"The {server} cannot use port {port} on {LOOPBACK}: {problem}."
            f" Give another one with --{server}-port, or leave the option out to get a free one."
        )


def _port_problem(port: int) -> str | None:
    with socket.socket() as probe:
        # As the servers do: a port whose last connections are only closing (TIME_WAIT) is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return "it is taken" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
    return None


def _end_all(home: SandboxHome) -> None:
    for server in reversed(SERVERS):
        end(home, server)


def _state(home: SandboxHome, server: str) -> ServerState:
    data = home.data(server)
    stopped = ServerState(server, "stopped", log=home.log(server), data=data, size=_folder_size(data))
    daemon = find(home, server)
    if daemon is None:
        return stopped
    state: Literal["running", "not answering"] = "running" if daemon.answers else "not answering"
    return replace(stopped, state=state, pid=daemon.pid, port=daemon.port)


def _folder_size(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile do not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - os.walk gives strings
    return total


def _own_folders(home: SandboxHome) -> list[Path]:
    """Everything `reset` may delete: what the sandbox itself made, and nothing else in that folder."""
    made = [home.data(server) for server in SERVERS]
    made += [home.log(SERVERS[0]).parent, home.process_file(SERVERS[0]).parent]
    return [folder for folder in made if folder.is_symlink() or folder.exists()]


def _delete(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise SandboxError(f"{folder} is not a folder made by the sandbox. Look at it and remove it by hand.")
    shutil.rmtree(folder)


def _require_sandbox(home: SandboxHome) -> None:
    if not is_identity(read_json(home.root / "identity.json")):
        raise SandboxError(
            f"{home.root} does not look like a sandbox (it has no identity.json of one): nothing was deleted."
            " Check TIR_HOME; a new sandbox is made by tir sandbox up."
        )


def _require_packages() -> None:
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise SandboxError(
            f"The sandbox's packages are not installed (missing: {', '.join(missing)})."
            " Install them: pip install 'tir_dagster[sandbox]'"
        )


@contextmanager
def _locked(home: SandboxHome) -> Iterator[None]:
    """One start, stop or reset at a time per sandbox; others wait. Failures to write are explained."""
    try:
        with locked(home.root / "lock"):
            yield
    except OSError as error:
        raise SandboxError(_explain(home, error)) from error


def _explain(home: SandboxHome, error: OSError) -> str:
    where = error.filename or home.root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The sandbox cannot write {where}: the disk is full. Free some space, or set TIR_HOME to another disk."
    return f"The sandbox cannot use {where}: {error.strerror or error}. Set TIR_HOME to a folder you may write to."
