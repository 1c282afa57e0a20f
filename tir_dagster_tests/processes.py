"""Other processes that a test starts: a port for them, and waiting until they answer or have done something."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

PATIENCE_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers_on(port: int) -> bool:
    """A process of this machine listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(
    ask: Callable[[], Any],
    what: str,
    *,
    seconds: float = PATIENCE_SECONDS,
    pause: float = 0.02,
    log: Path | None = None,
) -> Any:
    """The first answer that is something; `ask` itself may fail where there is no sense in waiting on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := ask():
            return answer
        time.sleep(pause)
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log else ""
    raise AssertionError(f"waited {seconds:g} s for {what}\n{said}".rstrip())


def answers(url: str) -> bool:
    """Dagster's webserver is up."""
    try:
        return requests.get(f"{url}/server_info", timeout=5).ok
    except requests.RequestException:
        return False


@contextmanager
def running(folder: Path, *command: str) -> Iterator[None]:
    """A server of Dagster's, with all its children ended at the end."""
    program = str(Path(sys.executable).with_name(command[0]))
    with (folder / f"{command[0]}.log").open("w") as log:
        started = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        yield
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait(20)


@contextmanager
def listening(port: int) -> Iterator[None]:
    """The code server answers: those that ask it would otherwise try again, later and later."""
    with socket.socket() as probe:
        wait_for(
            lambda: probe.connect_ex(("127.0.0.1", port)) == 0, "the code server answers", seconds=600.0, pause=0.5
        )
    yield
