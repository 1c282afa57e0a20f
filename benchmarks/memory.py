"""The most memory that processes held: this one, and those that it started. Counted on Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# By what a command line has in it; what none fits is not counted.
_KINDS = {"hyperd": "hyper", "java": "spark", "pyspark": "spark workers"}


def peak_memory(pid: int) -> int | None:
    """Return the most memory in bytes that the process ever held, or since `forget_peaks`."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), None)
    return None


def peak_of_children() -> int | None:
    """Return the sum of the peaks of the processes that this one has started."""
    peaks = [peak for pid in _children(os.getpid()) if (peak := peak_memory(pid)) is not None]
    return sum(peaks) if peaks else None


def forget_peaks() -> None:
    """Let all peaks begin anew with what the processes hold now."""
    for pid in [os.getpid(), *_descendants(os.getpid())]:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peaks() -> dict[str, int]:
    """Return the peaks in bytes: of this process (`python`), Hyper's, Spark's JVM and its workers, each added up."""
    own = peak_memory(os.getpid())
    added = {} if own is None else {"python": own}
    for pid in _descendants(os.getpid()):
        kind, peak = _kind(pid), peak_memory(pid)
        if kind is not None and peak is not None:
            added[kind] = added.get(kind, 0) + peak
    return added


def _kind(pid: int) -> str | None:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        program, line = Path(command[0]).name, " ".join(command)
        return next((kind for word, kind in _KINDS.items() if word in (program if word != "pyspark" else line)), None)
    return None


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return [*children, *(inner for child in children for inner in _descendants(child))]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += [int(child) for child in file.read_text(encoding="utf-8").split()]
    return children
