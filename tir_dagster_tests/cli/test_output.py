"""Progress of commands: a line that lives on a terminal, plain lines elsewhere, JSON lines when asked; results alone on standard output."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

SCRIPT = """
import click
from tir_dagster.cli.output import expect, tell, working
with working("tir refresh orders"):
    expect(20)
    tell("reading [bold]1,000[/bold] rows")
click.echo("the result")
"""


def run_script(**environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout, done.stderr


def on_terminal(*, piped: bool = False, **environment: str) -> tuple[str, str]:
    """Run the script on a terminal of its own; return what that shows, and what went to a pipe."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE if piped else slave, stderr=slave, env=env
    ) as running:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        result = running.stdout.read().decode() if running.stdout else ""
    os.close(master)
    assert running.returncode == 0, shown
    return shown.decode(), result


def test_without_a_terminal_progress_is_lines():
    result, progress = run_script()
    assert result == "the result\n"
    (line,) = progress.splitlines()
    assert line.endswith(" s] reading [bold]1,000[/bold] rows")


def test_json_lines_are_for_programs():
    _, progress = run_script(TIR_PROGRESS="json")
    expected, line = map(json.loads, progress.splitlines())
    assert expected == {"expected_seconds": 20.0}
    assert line["message"] == "reading [bold]1,000[/bold] rows"


def test_on_a_terminal_a_line_shows_what_is_done_and_how_long_it_takes_and_goes_away():
    shown, _ = on_terminal()
    assert re.search(r"tir refresh orders · \d+ s · about \d+ s left", shown)
    assert " s] reading [bold]1,000[/bold] rows" in shown, "lines stay, as they are"
    assert shown.endswith("the result\r\n")
    assert "\x1b[2K" in shown.rsplit("the result", 1)[0][-40:], "the living line was erased"


def test_results_reach_a_pipe_although_progress_is_on_a_terminal():
    shown, result = on_terminal(piped=True)
    assert result == "the result\n"
    assert "the result" not in shown


def test_a_terminal_that_asks_for_lines_gets_lines():
    shown, _ = on_terminal(TIR_PROGRESS="lines")
    assert "·" not in shown
