"""What commands print: progress on standard error, results on standard output."""

from __future__ import annotations

import time

import click

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
_started = time.monotonic()


def tell(line: str) -> None:
    """Print a line of progress to standard error, so that scripts can read standard output."""
    click.echo(f"[{time.monotonic() - _started:6.1f} s] {line}", err=True)
