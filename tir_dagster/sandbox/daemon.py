"""One server's background process: launched, recognised again by its pid file, asked for its health, ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.home import HEALTH_PATH, LOOPBACK, SandboxError, SandboxHome, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

END_SECONDS = 15.0
ANSWER_SECONDS = 3.0

# Servers this very process started: whoever starts a child must also collect its exit, or it stays a zombie.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Daemon:
    """A server process as its pid file describes it; `arguments` are the addresses of its peers."""

    server: str
    pid: int
    port: int
    started: str
    arguments: tuple[str, ...] = ()

    @property
    def lives(self) -> bool:
        """Whether this very process runs, and not another one that got its pid later."""
        child = _children.get(self.pid)
        if child:
            child.poll()  # collects the exit of our own child, which would look alive as a zombie
        return bool(self.started) and start_time(self.pid) == self.started

    @property
    def answers(self) -> bool:
        """Whether the health page answers with this server's name and pid: any other program may own the port."""
        # http.client and not urllib: HTTP_PROXY must not send a loopback request elsewhere.
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", HEALTH_PATH)
            answer: Any = json.loads(connection.getresponse().read(10_000))
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        return isinstance(answer, dict) and (answer.get("server"), answer.get("pid")) == (self.server, self.pid)


def launch(home: SandboxHome, server: str, port: int, arguments: tuple[str, ...]) -> Daemon:
    """Start the server's process and note it in its pid file; it is not ready yet."""
    with home.log(server).open("ab") as log:
        # The folder of the logs is where the server works, so that it neither holds on to the user's folder nor
        # leaves files there.
        child = subprocess.Popen(
            command(home, server, port, arguments),
            cwd=home.log(server).parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _children[child.pid] = child
    daemon = Daemon(server, child.pid, port, start_time(child.pid) or "", arguments)
    # Written before the server is ready: if this command is killed now, the next one still finds the process.
    try:
        write_json(home.process_file(server), vars(daemon))
    except BaseException:
        child.kill()
        _collect(child.pid)
        raise
    return daemon


def command(home: SandboxHome, server: str, port: int, arguments: tuple[str, ...]) -> list[str]:
    """What runs the server."""
    # -P: a file in the user's folder must not be imported in place of a package.
    module = f"tir_dagster.sandbox.{server}"
    return [sys.executable, "-P", "-m", module, f"--home={home.root}", f"--port={port}", *arguments]


def find(home: SandboxHome, server: str) -> Daemon | None:
    """The process of the pid file, if it lives and is the one we started."""
    record = read_json(home.process_file(server))
    match record:
        case {"pid": int(pid), "port": int(port), "started": str(started)}:
            daemon = Daemon(server, pid, port, started, tuple(record.get("arguments", ())))
            return daemon if daemon.lives else None
    return None


def end(home: SandboxHome, server: str) -> None:
    """SIGTERM, wait, SIGKILL; a pid file that no longer speaks of our process is only removed."""
    daemon = find(home, server)
    if daemon:
        with suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)
        if not wait(lambda: not daemon.lives, END_SECONDS):
            # With its own children (the server leads a session): a hung server cannot end them itself.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(daemon.pid, signal.SIGKILL)
            wait(lambda: not daemon.lives, END_SECONDS)
        if daemon.lives:
            raise SandboxError(f"The {server} (pid {daemon.pid}) does not end, not even by SIGKILL. Try again later.")
        _collect(daemon.pid)
    home.process_file(server).unlink(missing_ok=True)


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
    gone = state == "X" or (state == "Z" and threads <= 1)
    return None if gone else f"{boot}/{ticks_since_boot}"


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _collect(pid: int) -> None:
    child = _children.pop(pid, None)
    if child:
        child.wait(END_SECONDS)
