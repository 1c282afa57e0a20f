"""The lease of an extract: one refresh at a time; it shows its holder, and expires when the holder dies.

It is a file; or, where the state is shared through an object store, an entry there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from tir_dagster.errors import TirError
from tir_dagster.measuring import waiting_for
from tir_dagster.refresh.state.mirror import LeaseLostError as LeaseLostError  # noqa: PLC0414 - part of this module
from tir_dagster.refresh.state.mirror import Mirror, mirror_of
from tir_dagster.retries import looks

RENEW_SECONDS = 5.0
# A holder that has not renewed for this long is dead, whatever machine it ran on.
EXPIRE_SECONDS = 30.0


class LeaseHeldError(TirError):
    """Somebody else is refreshing the extract."""


@dataclass(frozen=True)
class Holder:
    """The holder of the lease. `since` is only shown to people: it is a time of the holder's own clock."""

    id: str
    host: str
    pid: int
    purpose: str
    since: str = ""
    # The boot and container in which the process id is valid; empty if unknown.
    space: str = ""

    def alive(self, age: float) -> bool:
        """Whether it may still be running, if it last renewed this many seconds ago."""
        if self.is_here and not _process_exists(self.pid):
            return False
        return age < EXPIRE_SECONDS

    @property
    def is_here(self) -> bool:
        """Whether this process can see the holder's process, if it exists."""
        return bool(self.space) and (self.host, self.space) == (socket.gethostname(), _process_space())

    def __str__(self) -> str:
        since = f", since {self.since}" if self.since else ""
        return f"process {self.pid} on {self.host} ({self.purpose}{since})"


class Lease:
    """The lease while it is held; a process that slept too long finds out here, before it publishes anything."""

    def __init__(self, path: Path, me: Holder) -> None:
        self._path = path
        self._me = me
        self._shared = _shared(path)

    def begin(self) -> None:
        """Where the state is shared, bring this machine's copy of it up to date."""
        if self._shared is not None:
            self._shared.begin()

    def check(self) -> None:
        """Renew the lease; raise LeaseLostError, which names the new holder, if it was lost."""
        if self._renewed():
            return
        holder = _last_holder(self._path)
        by = f"and {holder} has taken over" if holder else "and another process took over and has ended already"
        raise LeaseLostError(
            f"{self._path.parent.name}: this process did not renew its lease for more than {EXPIRE_SECONDS:.0f} seconds, {by}. "
            "Whatever was published from here is that refresh's to confirm. Run again when that refresh is done."
        )

    def _renewed(self, *, again: bool = False) -> bool:
        """Renew the lease if it is still ours; return whether it is."""
        if self._shared is not None:
            return self._shared.renew(self._me.id, again=again)
        while True:
            with guarded(self._path) as guard:
                holder = _read(self._path)
                if holder is None or holder.id != self._me.id:
                    return False
                if _write(self._path, self._me, guard):
                    return True

    def keep(self, stop: threading.Event) -> None:
        """Renew the lease until `stop` is set; a lost lease stays lost."""
        while not stop.wait(RENEW_SECONDS):
            # A full or slow shared disk: try again, because a lease that is not renewed is lost.
            with suppress(OSError):
                self._renewed(again=True)

    def release(self) -> None:
        """Release the lease; if the disk is full or gone, it expires by itself, and no error hides that of the block."""
        if self._shared is not None:
            with suppress(OSError):
                self._shared.give_back(self._me.id)
            return
        with suppress(OSError), guarded(self._path):
            holder = _read(self._path)
            if holder is not None and holder.id == self._me.id:
                self._path.unlink(missing_ok=True)


_held: dict[tuple[Path, int], Lease] = {}


@contextmanager
def lease(
    path: Path, *, purpose: str, wait_seconds: float = 0.0, on_wait: Callable[[str], None] = lambda _: None
) -> Iterator[Lease]:
    """Hold the lease for the block; wait for another holder, then raise LeaseHeldError with its name."""
    key = (path.absolute(), threading.get_ident())
    if key in _held:
        # The caller's caller holds it already: a command around the runs it starts.
        yield _held[key]
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    me = Holder(
        uuid.uuid4().hex,
        socket.gethostname(),
        os.getpid(),
        purpose,
        f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        _process_space(),
    )
    _wait_for(path, me, wait_seconds, on_wait)
    held, stop = Lease(path, me), threading.Event()
    renewal = threading.Thread(target=held.keep, args=(stop,), daemon=True)
    renewal.start()
    _held[key] = held
    try:
        held.begin()
        yield held
    finally:
        del _held[key]
        stop.set()
        renewal.join()
        held.release()


def _wait_for(path: Path, me: Holder, wait_seconds: float, on_wait: Callable[[str], None]) -> None:
    holder, is_announced = None, False
    pause = 0.2 if _shared(path) is None else 1.0
    for _ in looks(wait_seconds, pause=lambda _: pause, sleep=_sleep):
        holder = _take(path, me)
        if holder is None:
            return
        if wait_seconds > 0 and not is_announced:
            on_wait(f"waiting for {holder}")
            is_announced = True
    raise LeaseHeldError(
        f"{path.parent.name}: {holder} is refreshing this extract. Wait until it is done, or end that process; "
        f"its lease then expires within {EXPIRE_SECONDS:.0f} seconds."
    )


def _sleep(seconds: float) -> None:
    with waiting_for("lease"):
        time.sleep(seconds)


def lease_holder(path: Path) -> Holder | None:
    """Return the current holder of the lease; None if it is free or its holder died."""
    if shared := _shared(path):
        held = shared.holder()
        return _holder(held[0]) if held is not None and _is_alive(*held) else None
    with suppress(FileNotFoundError):
        holder = _read(path)
        return holder if holder is not None and holder.alive(_age(path)) else None
    return None


def is_abandoned(path: Path) -> bool:
    """Whether the holder's process is gone, and not only suspended with its machine."""
    holder = _read(path)
    if holder is None:
        return True
    return not holder.alive(_age(path)) and not (holder.is_here and _process_exists(holder.pid))


def _take(path: Path, me: Holder) -> Holder | None:
    """Take the lease if it is free; return its holder if not. A guard makes checking and taking one step."""
    if shared := _shared(path):
        held = shared.take(asdict(me), _is_alive)
        return None if held is None else _holder(held)
    while True:
        with guarded(path) as guard:
            holder = _read(path)
            if holder is not None and holder.alive(_age(path)):
                return holder
            if _write(path, me, guard):
                return None


def _shared(path: Path) -> Mirror | None:
    """Return the mirror of which this is the lease; None for the lease of a local folder, or of a command on this machine."""
    mirror = mirror_of(path)
    return mirror if mirror is not None and mirror.folder == path.absolute().parent else None


def _last_holder(path: Path) -> Holder | None:
    """Return who has the lease, or had it last."""
    if shared := _shared(path):
        with suppress(OSError):
            held = shared.holder()
            return _holder(held[0]) if held is not None else None
        return None
    return _read(path)


def _holder(value: Mapping[str, Any]) -> Holder:
    return Holder(**{field.name: value[field.name] for field in fields(Holder) if field.name in value})


def _is_alive(value: Mapping[str, Any], age: float) -> bool:
    return _holder(value).alive(age)


def _read(path: Path) -> Holder | None:
    try:
        return _holder(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(path: Path, holder: Holder, guard: _Guard) -> bool:
    """Write the holder; return False if this process slept so long that another one has the guard by now."""
    beside = path.with_name(f".{path.name}.{holder.id}")
    try:
        beside.write_text(json.dumps(asdict(holder)), encoding="utf-8")
        if not guard.is_ours():
            return False
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return True


def _age(path: Path) -> float:
    """Return how many seconds ago a file or folder was written, by the file system's own clock.

    This machine's clock may be minutes ahead of the one that wrote it. So compare with a new file, which gets its time
    from the same clock: that of the disk's machine, if the disk is shared.
    """
    probe = path.with_name(f".{path.name}.now.{uuid.uuid4().hex}")
    try:
        probe.write_text(".", encoding="utf-8")
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    # Through an open file: a shared file system may answer about a name from its cache.
    handle = os.open(path, os.O_RDONLY)
    try:
        return now - os.fstat(handle).st_mtime
    finally:
        os.close(handle)


@dataclass(frozen=True)
class _Guard:
    """The folder that keeps others out, as it was when this process made it."""

    path: Path
    identity: tuple[int, int]

    def is_ours(self) -> bool:
        """Whether it still exists: other processes remove an old guard and create their own."""
        return _identity(self.path) == self.identity


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the folder's inode and time: inode numbers alone are used again."""
    with suppress(FileNotFoundError):
        stat = folder.stat()
        return stat.st_ino, stat.st_mtime_ns
    return None


@contextmanager
def guarded(path: Path) -> Iterator[_Guard]:
    """Hold a guard folder for the block: only one process can create it, even on a shared disk without locks."""
    guard = path.with_name(f"{path.name}.guard")
    tries = 0
    while True:
        try:
            guard.mkdir()
            break
        except FileExistsError:
            if tries % 100 == 0:
                _remove_old(guard)
            tries += 1
            time.sleep(0.01)
    own_guard = _Guard(guard, _identity(guard) or (0, 0))
    try:
        yield own_guard
    finally:
        if own_guard.is_ours():
            with suppress(FileNotFoundError):
                guard.rmdir()


def _remove_old(guard: Path) -> None:
    """Remove the guard of a process that died; by a rename, so that only one waiting process removes it."""
    with suppress(OSError):
        if _age(guard) > EXPIRE_SECONDS:
            going = guard.with_name(f"{guard.name}.{uuid.uuid4().hex}")
            guard.rename(going)
            going.rmdir()


@cache
def _process_space() -> str:
    """Return the space in which process ids are unique: this boot of this machine, and this container in it.

    Two containers can have one host name and not see each other's processes. Empty if unknown: then only the time of
    the last renewal counts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        pass
    try:
        # macOS, where processes of one boot all see each other.
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
