"""What commands print: results on standard output, progress on standard error, in one of three forms.

On a terminal, lines and below them one that lives: what is done now, for how long, and how long it usually takes. Else lines only;
with `--progress json`, a JSON object for each. What commands took is kept in TIR_HOME/commands.json, to show the time left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import click

from tir_dagster.files import replaced_file

if TYPE_CHECKING:
    from rich.console import Console

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
FORM_VARIABLE = "TIR_PROGRESS"
Form = Literal["auto", "lines", "json"]
_loaded = time.monotonic()
_REFRESHES_PER_SECOND = 4


@dataclass(frozen=True)
class UsualSeconds:
    """What the last runs of each command took. It is never needed: a file that is not there, or is damaged, is an empty one."""

    file: Path
    kept: int = 5
    commands: int = 200

    @classmethod
    def from_environment(cls) -> UsualSeconds:
        return cls(Path(os.environ.get("TIR_HOME") or ".tir").expanduser() / "commands.json")

    def of(self, what: str) -> float | None:
        """Return the middle of the command's last runs."""
        seconds = self._read().get(what)
        return median(seconds) if seconds else None

    def add(self, what: str, seconds: float) -> None:
        """Note what a run took that went well. A home is not made for that."""
        if not self.file.parent.is_dir():
            return
        every = self._read()
        # Taken out and put at the end: the commands that were not run for longest are forgotten first.
        every[what] = [*every.pop(what, []), round(seconds, 2)][-self.kept :]
        newest = dict(list(every.items())[-self.commands :])
        with suppress(OSError), replaced_file(self.file) as beside:
            beside.write_text(json.dumps(newest, indent=1), encoding="utf-8")

    def _read(self) -> dict[str, list[float]]:
        with suppress(OSError, ValueError):
            read = json.loads(self.file.read_text(encoding="utf-8"))
            if isinstance(read, dict):
                return {
                    what: seconds
                    for what, seconds in read.items()
                    if isinstance(seconds, list) and all(isinstance(one, int | float) for one in seconds)
                }
        return {}


class _Progress:
    """What a command is doing, for people or programs that watch it."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._what, self._line = "", ""
        self._started: float | None = None
        self._begun = _loaded
        self._expected: float | None = None

    @property
    def _form(self) -> Form:
        return "json" if os.environ.get(FORM_VARIABLE) == "json" else "lines"

    def begin(self) -> None:
        """Begin a command. The first one began with its process, so that its start-up counts."""
        self._started = _loaded if self._started is None else time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - (self._started or _loaded)

    def tell(self, line: str) -> None:
        seconds = self.elapsed()
        self._line = line
        if self._form == "json":
            click.echo(json.dumps({"seconds": round(seconds, 1), "message": line}), err=True)
        elif self._console is not None:
            self._console.print(f"[{seconds:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(f"[{seconds:6.1f} s] {line}", err=True)

    def expect(self, seconds: float) -> None:
        """Show how long it is likely to take from now on."""
        self._expected = time.monotonic() - self._begun + seconds
        if self._form == "json":
            click.echo(json.dumps({"expected_seconds": round(seconds, 1)}), err=True)

    @contextmanager
    def working(self, what: str, *, doing: str, of: str) -> Iterator[None]:
        if self._what:
            yield
            return
        self._what, self._line, self._begun, self._expected = what, doing, time.monotonic(), None
        try:
            with self._living_line():
                usual, command = UsualSeconds.from_environment(), f"{what} {of}".strip()
                if doing and self._console is None:
                    self.tell(doing)
                if (seconds := usual.of(command)) and seconds >= 1:
                    self.expect(seconds)
                yield
                usual.add(command, time.monotonic() - self._begun)
        finally:
            self._what = ""

    @contextmanager
    def _living_line(self) -> Iterator[None]:
        if os.environ.get(FORM_VARIABLE) in ("lines", "json") or not _is_terminal():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        # What goes to a pipe must reach it; what goes to the same terminal must not be written over.
        live = Live(
            get_renderable=self._living,
            console=console,
            transient=True,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=sys.stdout.isatty(),
        )
        with live:
            self._console = console
            try:
                yield
            finally:
                self._console = None

    def _living(self) -> Any:
        from rich.spinner import Spinner
        from rich.text import Text

        elapsed = time.monotonic() - self._begun
        text = f"{self._what} · {elapsed:.0f} s{_left(elapsed, self._expected)}"
        return Spinner(
            "dots", Text(f"{text} · {self._line}" if self._line else text, no_wrap=True, overflow="ellipsis")
        )


def _left(elapsed: float, expected: float | None) -> str:
    """Return how much longer it is likely to take."""
    if expected is None:
        return ""
    left = expected - elapsed
    return (
        f" · about {left:.0f} s left"
        if left >= 1
        else " · longer than usual"
        if left < -expected / 2
        else " · almost done"
    )


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


_progress = _Progress()


def tell(line: str) -> None:
    """Print a line of progress to standard error, so that scripts can read standard output."""
    _progress.tell(line)


def expect(seconds: float) -> None:
    """Show how long the work is likely to take from now on."""
    _progress.expect(seconds)


def working(what: str, *, doing: str = "", of: str = "") -> Any:
    """Show while the block runs that work goes on, what is done now, and how much longer it may take.

    That is what earlier runs of the same command took; `of` names an amount of work without which they are not the same.
    """
    return _progress.working(what, doing=doing, of=of)


def begin() -> None:
    """Begin a command."""
    _progress.begin()


def elapsed() -> float:
    """Return the seconds since the command began, with its start-up."""
    return _progress.elapsed()
