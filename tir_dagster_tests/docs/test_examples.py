"""examples/: what their READMEs show is what their commands print, and run.sh runs these commands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.docs.transcript import play, steps

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# With pages of their own elsewhere: dbt has another environment (tir_dagster_tests/clients).
NAMES = sorted(file.parent.name for file in EXAMPLES.glob("*/run.sh") if file.parent.name != "dbt")
# Played in this process; `make soak` runs them and all others by their one command.
QUICK = ["orders"]


def readme(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def home(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of its own, and the variables of the sandbox of this test run."""
    for name, value in sandbox.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIR_HOME", str(tmp_path))
    # Set by commands themselves, and gone with the test.
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    return tmp_path


@pytest.mark.parametrize("name", QUICK)
def test_the_commands_of_an_example_print_what_its_page_shows(name, home, monkeypatch):
    folder = EXAMPLES / name
    monkeypatch.chdir(folder)
    for step in steps(readme(name)):
        printed = play(step, folder, {"TIR_SPECS": str(folder / "extracts.yaml")})
        assert step.matches(printed), f"{name}: {step.command} printed\n{printed}"


@pytest.mark.parametrize("name", NAMES)
def test_the_one_command_runs_what_the_page_shows(name):
    script = (EXAMPLES / name / "run.sh").read_text(encoding="utf-8")
    run = iter(command.replace('"', "") for command in re.findall(r"^(?:run|fails) (.*)$", script, re.MULTILINE))
    shown = [step.command for step in steps(readme(name))]
    assert len(shown) >= 3
    assert [command for command in shown if command not in run] == [], "in their order"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_by_its_one_command(name, tmp_path):
    inherited = {key: value for key, value in os.environ.items() if key != "DAGSTER_HOME"}
    env = {**inherited, "TIR_HOME": str(tmp_path / "home")}
    try:
        done = subprocess.run([EXAMPLES / name / "run.sh"], env=env, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([ROOT / ".venv/bin/tir", "sandbox", "down"], env=env, capture_output=True, check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = dict(outputs(done.stdout))
    for step in steps(readme(name)):
        command = step.command.replace("$TIR_HOME", env["TIR_HOME"])
        assert step.matches(printed[command].pop(0)), f"{name}: {command} printed\n{done.stdout}"


def outputs(printed: str) -> Iterator[tuple[str, list[str]]]:
    """What each command of run.sh printed, by command, in the order of its runs."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^\$ ", printed, flags=re.MULTILINE)[1:]:
        command, _, text = part.partition("\n")
        found.setdefault(command, []).append(re.sub(r"^The servers of the sandbox .*\n", "", text, flags=re.MULTILINE))
    yield from found.items()
