"""A command that a signal ends says so in one line, with the exit code that shells use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tir_dagster.cli.main import ProjectGroup, tir
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.refresh.state.lease import lease
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.spec.sample import GOOD

# Never asked: the command waits for its turn first.
SERVERS = {
    "SNOWFLAKE_ACCOUNT": "a",
    "SNOWFLAKE_USER": "u",
    "SNOWFLAKE_PASSWORD": "p",
    "TABLEAU_SERVER_URL": "http://127.0.0.1:1",
    "TABLEAU_TOKEN_NAME": "t",
    "TABLEAU_TOKEN_SECRET": "s",
}


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_refresh_that_waits_for_another_one_ends_with_one_line(tmp_path, number, code, word):
    specs, log, state = tmp_path / "extracts.yaml", tmp_path / "log", tmp_path / "state"
    specs.write_text(GOOD, encoding="utf-8")
    env = {**os.environ, **SERVERS, "TIR_HOME": str(state), "DAGSTER_HOME": str(tmp_path / "dagster")}
    command = [sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(specs), "refresh", "orders"]
    with lease(state / "extracts" / "orders" / "lease.json", purpose="a test"), log.open("wb") as lines:
        started = subprocess.Popen(command, stdout=lines, stderr=lines, start_new_session=True, env=env)
        try:
            wait_for(lambda: "waiting for" in log.read_text(), "its turn", log=log)
            os.killpg(started.pid, number)
            assert started.wait(timeout=60) == code, log.read_text()
        finally:
            started.kill()
            started.wait()
    waiting, said = log.read_text().splitlines()
    assert "waiting for process" in waiting
    assert said == f"orders: stopped by {word}. The published datasource is unchanged. Run it again."


_IN_A_CALLBACK = """
import signal, time, weakref
from tir_dagster.orchestration.interrupts import watch_signals

class Collected: ...

watch_signals()
signal.signal(signal.SIGINT, signal.default_int_handler)
collected = Collected()
kept = weakref.ref(collected, lambda _: signal.raise_signal(signal.SIGINT))
del collected
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped")
"""


def test_an_interrupt_in_a_callback_of_the_collector_is_not_lost_and_prints_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_CALLBACK], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


_LOGGED = """
import logging, signal
from tir_dagster.orchestration.interrupts import watch_signals

watch_signals()
logging.error("before")
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    logging.exception("as py4j does")
"""


def test_what_libraries_log_because_of_an_interrupt_is_not_shown():
    done = subprocess.run([sys.executable, "-c", _LOGGED], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "ERROR:root:before\n")


_IN_THE_BACKGROUND = """
import signal
from dagster._utils.interrupts import capture_interrupts
from tir_dagster.orchestration.interrupts import check_signals, watch_signals

signal.signal(signal.SIGINT, signal.SIG_IGN)
watch_signals()
with capture_interrupts():
    pass
signal.raise_signal(signal.SIGINT)
check_signals()
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("stopped")
"""


def test_what_runs_in_the_background_of_a_script_ends_by_sigterm_after_dagster_has_run_and_not_by_ctrl_c():
    """A shell lets such a process ignore Ctrl-C, and Dagster gives SIGTERM the same handler."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_THE_BACKGROUND], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


def invoke(error: BaseException, so_far: str = "") -> tuple[int, str]:
    @click.group(cls=ProjectGroup)
    def group() -> None: ...

    @group.command()
    def play() -> None:
        if not so_far:
            raise error
        with stopping("tir play", lambda: so_far):
            raise error

    done = CliRunner().invoke(group, ["play"])
    return done.exit_code, done.stderr


class InterruptedRunError(BaseException):
    """As Dagster tells of a signal during a run: no Exception."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InterruptedRunError()])
def test_any_command_ends_with_one_line_and_says_what_it_left(error):
    assert invoke(error) == (130, "tir play: stopped by Ctrl-C. Run it again.\n")
    assert invoke(error, "Half is done.") == (130, "tir play: stopped by Ctrl-C. Half is done. Run it again.\n")


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("plan", "Nothing was changed."),
        ("revisions", "Nothing was changed."),
        ("verify", "What is published stays as it is."),
        ("sandbox", "tir sandbox status shows which servers run."),
    ],
)
def test_a_command_that_is_stopped_says_what_is_true_of_it(command, left, monkeypatch):
    assert command in tir.commands

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(tir.commands, command, click.Command(command, callback=stop))
    done = CliRunner().invoke(tir, [command])
    assert (done.exit_code, left in done.stderr) == (130, True), done.stderr
