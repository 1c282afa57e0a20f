"""Background processes that outlive the command which started them: launch, recognise by a state file, end."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tir_dagster.retries import looks

LOOPBACK = "127.0.0.1"
END_SECONDS = 15.0
# Processes that this very process started: whoever starts a child must also collect its exit, or it stays a zombie.
_children: dict[int, subprocess.Popen[bytes]] = {}

Described = TypeVar("Described", bound="BackgroundProcess")


@dataclass(frozen=True)
class BackgroundProcess:
    """A server process as its state file describes it; `started` distinguishes it from a later process with its pid."""

    pid: int
    port: int
    started: str

    @property
    def lives(self) -> bool:
        """Whether this very process runs, and not another one that got its pid later."""
        if child := _children.get(self.pid):
            child.poll()  # collects the exit of our own child, which would look alive as a zombie
        return bool(self.started) and start_time(self.pid) == self.started

    def end(self) -> bool:
        """Send SIGTERM, wait, send SIGKILL; return whether the process ended."""
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if not wait(lambda: not self.lives, END_SECONDS):
                # With its own children (it leads a session): a hung server cannot end them itself.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                wait(lambda: not self.lives, END_SECONDS)
        # Not waited for: a child of the same pid may be another server.
        if (child := _children.get(self.pid)) and child.poll() is not None:
            del _children[self.pid]
        return not self.lives


def launch(
    command: Sequence[str],
    *,
    log: Path,
    log_mode: Literal["ab", "wb"],
    record: Callable[[int, str], Described],
    env: Mapping[str, str] | None = None,
) -> Described:
    """Start a process in a session of its own, in the folder of its log; `record` writes its state file.

    The state file is written before the process is ready: if this command is killed now, the next one still finds the process.
    """
    with log.open(log_mode) as out:
        # Not in the user's folder: the process would hold on to it, and leave files there.
        child = subprocess.Popen(
            command,
            cwd=log.parent,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    _children[child.pid] = child
    try:
        return record(child.pid, start_time(child.pid) or "")
    except BaseException:
        child.kill()
        child.wait()
        del _children[child.pid]
        raise


def no_core_files() -> None:
    """Let this process and those that it starts leave no core file: it would hold credentials and rows.

    Whoever looks for a crash of Hyper or Java raises the soft limit again: the hard one stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


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
    return any(condition() for _ in looks(seconds, pause=lambda _: 0.05))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock file; others wait. The system frees it when this process ends, however it ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def last_lines(log: Path, most: int, *, start: int = 0) -> list[str]:
    """Return the last lines of a log, of those after the byte `start`; empty if it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 20_000))
        return file.read().decode("utf-8", errors="replace").strip().splitlines()[-most:]
    return []


def read_json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; empty if the file is missing or does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write beside and rename, readable by the owner only: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(value, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
