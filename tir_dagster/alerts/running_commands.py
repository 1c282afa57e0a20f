"""Running commands, each with a lease: one that ended without removing it was killed, which is reported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.refresh.state.lease import LeaseHeldError, is_abandoned, lease

_FORM = re.compile(r"([a-z][a-z0-9_]*)@(\d+\.\d+)")


@dataclass(frozen=True)
class Killed:
    """A command that was killed."""

    extract: str
    started: float
    # When it was last seen alive.
    last: float
    path: Path

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def under_way(folder: Path, extract: str, started: float) -> Iterator[None]:
    """Record that a command works on the extract (or load) during the block."""
    with ExitStack() as stack:
        # A full or read-only disk must not stop the command.
        with suppress(OSError, LeaseHeldError):
            stack.enter_context(lease(folder / f"{extract}@{started:.3f}", purpose="a command"))
        yield


def killed_commands(folder: Path, extracts: Collection[str]) -> list[Killed]:
    """Return the commands on these extracts whose process is gone."""
    killed = []
    for path in sorted(folder.glob("*@*")):
        match = _FORM.fullmatch(path.name)
        with suppress(FileNotFoundError):
            if match and match[1] in extracts and is_abandoned(path):
                killed.append(Killed(match[1], float(match[2]), path.stat().st_mtime, path))
    return killed
