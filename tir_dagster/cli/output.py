"""What commands print: results on standard output, progress on standard error, in one of three forms.

On a terminal, lines and below them one that lives: what is done now, for how long, and how long it usually takes. Else lines only;
with `--progress json`, a JSON object for each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from rich.console import Console

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
FORM_VARIABLE = "TIR_PROGRESS"
Form = Literal["auto", "lines", "json"]
_started = time.monotonic()
_REFRESHES_PER_SECOND = 4


class _Progress:
    """What a command is doing, for people or programs that watch it."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._what, self._line = "", ""
        self._begun = _started
        self._expected: float | None = None

    @property
    def _form(self) -> Form:
        return "json" if os.environ.get(FORM_VARIABLE) == "json" else "lines"

    def tell(self, line: str) -> None:
        seconds = time.monotonic() - _started
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
    def working(self, what: str) -> Iterator[None]:
        if self._console is not None or os.environ.get(FORM_VARIABLE) in ("lines", "json") or not _is_terminal():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        self._what, self._line, self._begun, self._expected = what, "", time.monotonic(), None
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


def working(what: str) -> Any:
    """Show on a terminal, while the block runs, that work goes on, what is done now and how much longer it may take."""
    return _progress.working(what)
