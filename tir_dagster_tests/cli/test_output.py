"""Progress of commands: a line that lives on a terminal, plain lines elsewhere, JSON lines when asked; results alone on standard output."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.cli.output import UsualSeconds

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


WORK = """
import sys
from tir_dagster.cli.output import working
with working("tir status", doing="reading", of=sys.argv[1]):
    if sys.argv[2:]:
        raise KeyboardInterrupt
"""


def work(home: Path, amount: str, *failing: str) -> list[dict[str, Any]]:
    """What a command that begins to work tells a program."""
    env = {**os.environ, "TIR_HOME": str(home), "TIR_PROGRESS": "json"}
    done = subprocess.run(
        [sys.executable, "-c", WORK, amount, *failing], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode == 0) != bool(failing), done.stderr
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def test_what_a_command_took_is_expected_of_its_next_run(tmp_path):
    usual = UsualSeconds(tmp_path / "commands.json")
    for seconds in (300.0, 7.0, 8.0, 9.0, 400.0, 6.0):
        usual.add("tir status", seconds)
    assert usual.of("tir status") == 8.0, "the middle of the last five"
    first, expected = work(tmp_path, "")
    assert (first["message"], expected) == ("reading", {"expected_seconds": 8.0})
    (only,) = work(tmp_path, "1000 rows")
    assert only["message"] == "reading", "another amount of work"
    assert usual.of("tir status 1000 rows") is not None


def test_only_what_went_well_is_noted_and_no_home_is_made_for_it(tmp_path):
    assert len(work(tmp_path, "", "failing")) == 1
    assert not (tmp_path / "commands.json").exists()
    assert len(work(tmp_path / "none", "")) == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["", "[]", '{"tir status": 3}', '{"tir status": ["x"]}', "\0"])
def test_a_damaged_file_of_usual_seconds_is_an_empty_one(tmp_path, damage):
    usual = UsualSeconds(tmp_path / "commands.json")
    usual.file.write_text(damage, encoding="utf-8")
    assert usual.of("tir status") is None
    usual.add("tir status", 2.0)
    assert usual.of("tir status") == 2.0


def test_the_commands_that_were_run_last_are_kept(tmp_path):
    usual = UsualSeconds(tmp_path / "commands.json", commands=2)
    for what in ("a", "b", "a", "c"):
        usual.add(what, 1.0)
    assert [usual.of(what) for what in "abc"] == [1.0, None, 1.0]
