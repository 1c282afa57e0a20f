"""The wheel and the sdist: what is in them, and what an empty environment can do with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tir_dagster.cli.main import tir
from tir_dagster.sandbox.processes import NEEDED_MODULES
from tir_dagster_tests.docs.transcript import play_page
from tir_dagster_tests.project import ROOT, normal, project_files

FIRST_HOUR = {
    *("sandbox up", "init", "doctor", "plan", "refresh", "sandbox change", "verify"),
    *("report", "status", "rollback", "sandbox down"),
}
_BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, built from the files that git knows: nothing left over from earlier builds is in them."""
    folder = tmp_path_factory.mktemp("distribution")
    for file in project_files():
        copy = folder / "source" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (folder / "dist").mkdir()
    command = [sys.executable, "-c", _BUILD, str(folder / "dist")]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = (list((folder / "dist").glob(form)) for form in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = archive.read(next(name for name in archive.namelist() if name.endswith("entry_points.txt"))).decode()
    package = ROOT / "tir_dagster"
    assert files == {str(file.relative_to(ROOT)) for file in project_files() if file.is_relative_to(package)}
    assert "tir_dagster/py.typed" in files
    assert "tir = tir_dagster.cli.main:main" in scripts


def test_the_sdist_builds_what_the_wheel_has(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "tir_dagster/py.typed",
        "tir_dagster/probe/known-doubts.md",
    } <= names


def test_the_sandbox_and_the_tools_are_extras(built):
    told = metadata(built[0])
    needed = told.get_all("Requires-Dist") or []
    plain = {
        normal(need.split(";")[0].strip("0123456789.<>=!~,()[] ").split("[")[0])
        for need in needed
        if "extra ==" not in need
    }
    assert {"dagster", "tableauhyperapi", "snowflake-connector-python"} <= {
        name.split(">")[0].split("=")[0] for name in plain
    }
    assert not [
        name
        for name in plain
        if name.startswith(("fakesnow", "moto", "duckdb", "pytest", "sphinx", "dagster-webserver"))
    ]
    assert set(told.get_all("Provides-Extra") or []) == {"sandbox", "dev", "docs", "deploy"}
    assert told["License-Expression"] == "Apache-2.0"
    assert (told.get_payload() or "").lstrip().startswith("# tir_dagster")


def test_without_the_sandbox_s_packages_the_command_says_what_to_install(tmp_path):
    """A finder that knows none of them, as in an environment without the extra."""
    hide = (
        "import sys, importlib.machinery as m; hidden = set(sys.argv[1].split(',')); find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = lambda name, *a, **k: None if name in hidden else find(name, *a, **k)\n"
        "sys.argv[1:2] = []; import tir_dagster.cli.main as c; c.main()"
    )
    hidden = ",".join(set(NEEDED_MODULES) - {"defusedxml"})
    env = {**os.environ, "TIR_HOME": str(tmp_path)}
    command = [sys.executable, "-c", hide, hidden, "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Install them: pip install 'tir_dagster[sandbox]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed_and_complete_commands(shell):
    from click.testing import CliRunner

    script = CliRunner().invoke(tir, ["completion", shell]).stdout
    assert "_TIR_COMPLETE" in script
    words = {
        "COMP_WORDS": "tir sandbox s",
        "COMP_CWORD": "s" if shell == "fish" else "2",
        "_TIR_COMPLETE": f"{shell}_complete",
    }
    done = CliRunner().invoke(tir, [], env=words, prog_name="tir")
    assert {"seed", "status"} <= set(done.stdout.replace(",", "\n").replace("\t", "\n").splitlines()), done.output


def empty_environment(programs: Path) -> dict[str, str]:
    """The variables of a new user, with these programs first in the path."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "TIR_"))
    }
    inherited.pop("DAGSTER_HOME", None)
    return {**inherited, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def play_first_hour(folder: Path, env: dict[str, str]) -> None:
    """Play docs/first-hour.md in an empty folder: every command prints what the page shows, and nothing but progress besides."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    try:
        played = play_page((ROOT / "docs/first-hour.md").read_text(encoding="utf-8"), folder, env, log=log)
    finally:
        subprocess.run(["tir", "sandbox", "down"], cwd=folder, env=env, capture_output=True, check=True)
    for step, printed in played:
        assert step.matches(printed), f"{step.command} printed\n{printed}"
    surprises = [
        line for line in log.read_text(encoding="utf-8").splitlines() if not re.match(r"\[ *\d+\.\d s\] ", line)
    ]
    assert surprises == []
    commands = [step.command for step, _ in played]
    assert {name for name in FIRST_HOUR if any(command.startswith(f"tir {name}") for command in commands)} == FIRST_HOUR


def test_the_first_hour_from_an_empty_folder_prints_what_its_page_shows(built, tmp_path):
    """With the wheel's files, and the packages of this environment; `make soak` installs them."""
    files, programs = tmp_path / "files", tmp_path / "bin"
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(files)
    programs.mkdir()
    tir_program = programs / "tir"
    tir_program.write_text(
        f'#!/bin/sh\nPYTHONPATH={files} exec {sys.executable} -P -m tir_dagster.cli "$@"\n', encoding="utf-8"
    )
    tir_program.chmod(0o755)
    play_first_hour(tmp_path / "empty", empty_environment(programs))


@pytest.mark.long
def test_an_empty_environment_runs_the_demo_from_the_wheel_alone(built, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    new_user = empty_environment(environment / "bin")
    env = {**new_user, "TIR_HOME": str(tmp_path / "home")}
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(program: str, *arguments: str, code: int = 0) -> str:
        command = [environment / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    pins = ["--constraint", str(ROOT / "constraints.txt"), "--quiet", "--disable-pip-version-check"]
    run("python", "-m", "pip", "install", *pins, str(built[0]))
    installed = run("python", "-m", "pip", "list", "--format=freeze")
    assert not [name for name in ("fakesnow", "moto", "duckdb", "sphinx", "pytest") if f"\n{name}==" in installed]
    assert run("tir", "--version").startswith("tir, version ")
    assert '"extracts"' in run("tir", "schema")
    assert "Install them: pip install 'tir_dagster[sandbox]'" in run("tir", "demo", code=1)
    run("python", "-m", "pip", "install", *pins, f"{built[0]}[sandbox]")
    try:
        assert "equal in every slice" in run("tir", "demo", "--rows", "2000")
    finally:
        run("tir", "sandbox", "down")
    play_first_hour(tmp_path / "new", new_user)
