"""One refresh per extract at a time: a lease in the base path, which says who holds it and expires with its owner."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tir_dagster.errors import TirError

RENEW_SECONDS = 5.0
# A holder that has not renewed for this long is dead, whatever machine it ran on.
EXPIRE_SECONDS = 30.0


_held: set[tuple[Path, int]] = set()


class LeaseHeldError(TirError):
    """Somebody else is refreshing the extract."""


@dataclass(frozen=True)
class Holder:
    """Who holds the lease, and until when it counts."""

    id: str
    host: str
    pid: int
    purpose: str
    renewed: float

    def alive(self, now: float) -> bool:
        if self.host == socket.gethostname() and not _process_exists(self.pid):
            return False
        return now - self.renewed < EXPIRE_SECONDS

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.purpose})"


@contextmanager
def lease(
    path: Path, *, purpose: str, wait_seconds: float = 0.0, on_wait: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold the lease for the block; waits for another holder, then refuses with its name."""
    me = (path.absolute(), threading.get_ident())
    if me in _held:
        # The caller's caller holds it already: a command around the runs it starts.
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = uuid.uuid4().hex
    deadline = time.monotonic() + wait_seconds
    told = False
    while (holder := _take(path, mine, purpose)) is not None:
        if time.monotonic() >= deadline:
            raise LeaseHeldError(
                f"{path.parent.name}: {holder} is refreshing this extract. Wait until it is done, or end that process; "
                f"its lease then expires within {EXPIRE_SECONDS:.0f} seconds."
            )
        if not told:
            on_wait(f"waiting for {holder}")
            told = True
        time.sleep(0.2)
    stop = threading.Event()
    renewal = threading.Thread(target=_keep, args=(path, mine, purpose, stop), daemon=True)
    renewal.start()
    _held.add(me)
    try:
        yield
    finally:
        _held.discard(me)
        stop.set()
        renewal.join()
        _release(path, mine)


def lease_holder(path: Path) -> Holder | None:
    """Who holds the lease at this moment; None if it is free or its holder died."""
    holder = _read(path)
    return holder if holder is not None and holder.alive(time.time()) else None


def _take(path: Path, mine: str, purpose: str) -> Holder | None:
    """Take the lease if it is free; gives its holder if not. A guard file makes looking and taking one step."""
    with _guard(path):
        holder = _read(path)
        if holder is not None and holder.id != mine and holder.alive(time.time()):
            return holder
        _write(path, Holder(mine, socket.gethostname(), os.getpid(), purpose, time.time()))
        return None


def _keep(path: Path, mine: str, purpose: str, stop: threading.Event) -> None:
    while not stop.wait(RENEW_SECONDS):
        # A full disk or a shared one that stutters: tried again, for a lease that is not renewed is lost.
        with suppress(OSError), _guard(path):
            holder = _read(path)
            if holder is not None and holder.id == mine:
                _write(path, Holder(mine, socket.gethostname(), os.getpid(), purpose, time.time()))


def _release(path: Path, mine: str) -> None:
    with _guard(path):
        holder = _read(path)
        if holder is not None and holder.id == mine:
            path.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(path: Path, holder: Holder) -> None:
    beside = path.with_name(f".{path.name}.{holder.id}")
    beside.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    beside.replace(path)


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """A folder can be made by one process only, also on a shared file system where locks may not work."""
    guard = path.with_name(f"{path.name}.guard")
    while True:
        try:
            guard.mkdir()
            break
        except FileExistsError:
            _remove_old(guard)
            time.sleep(0.01)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            guard.rmdir()


def _remove_old(guard: Path) -> None:
    """Its maker died between two lines if it is this old; by a rename, so that only one of those who wait removes it."""
    with suppress(OSError):
        if time.time() - guard.stat().st_mtime > EXPIRE_SECONDS:
            going = guard.with_name(f"{guard.name}.{uuid.uuid4().hex}")
            guard.rename(going)
            going.rmdir()


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
