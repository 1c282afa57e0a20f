"""Other processes that a test starts: a port for them, and waiting until they answer or have done something."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
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
