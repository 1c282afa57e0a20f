"""One server's background process: launched, recognised again by its pid file, asked for its health, ended."""

from __future__ import annotations

import http.client
import json
import sys
from dataclasses import dataclass
from typing import Any

from tir_dagster import background
from tir_dagster.background import LOOPBACK, BackgroundProcess, read_json, write_json
from tir_dagster.sandbox.home import HEALTH_PATH, SandboxError, SandboxHome

ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class Daemon(BackgroundProcess):
    """A server process as its pid file describes it; `arguments` are the addresses of its peers."""

    server: str
    arguments: tuple[str, ...] = ()

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

    def record(pid: int, started: str) -> Daemon:
        daemon = Daemon(pid, port, started, server, arguments)
        write_json(home.process_file(server), vars(daemon))
        return daemon

    return background.launch(command(home, server, port, arguments), log=home.log(server), log_mode="ab", record=record)


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
            daemon = Daemon(pid, port, started, server, tuple(record.get("arguments", ())))
            return daemon if daemon.lives else None
    return None


def end(home: SandboxHome, server: str) -> None:
    """End the server's process; a pid file that no longer describes our process is only removed."""
    daemon = find(home, server)
    if daemon and not daemon.end():
        raise SandboxError(f"The {server} (pid {daemon.pid}) does not end, not even by SIGKILL. Try again later.")
    home.process_file(server).unlink(missing_ok=True)
