"""Credentials are nowhere but in the environment: no output, state, history, alert or process list shows them, and rows are their owner's alone."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tir_dagster.background import no_core_files
from tir_dagster.files import private_folder
from tir_dagster_tests.conftest import People
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.orchestration.shell import FAILED, Shell

SECRETS = (
    "SNOWFLAKE_PASSWORD",
    "TABLEAU_TOKEN_SECRET",
    "SLACK_BOT_TOKEN",
    "SERVICENOW_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
)
MARK = "m4rked-s3cret"
ALERTS = (
    '    alerts:\n      slack: {channel: "#mychannel"}\n      servicenow: {group: mygroup}\n      timeout: 10 seconds\n'
)
LOAD = "loads:\n  - {name: files, table: MYDB.MYSCHEMA.LOADED, mode: append, files: {path: 's3://landing/secrets', format: csv}}\n"


@pytest.fixture
def shell(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell whose commands tell people, load files, and keep their state and history in folders of their own."""
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home" / "dagster"))
    return Shell(Place(place.sandbox, place.spec, place.spec_text + ALERTS + LOAD, tmp_path, place.before))


def new_datasource(name: str) -> tuple[tuple[str, str], ...]:
    return (("name: mydatasource", f"name: {name}\n      create: true"),)


def leaks(secrets: dict[str, str], *folders: Path, texts: tuple[str, ...] = ()) -> list[str]:
    """Where one of the secrets is: in a file, whatever its format, or in a text."""
    found = [name for text in texts for name, secret in secrets.items() if secret in text]
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        found += [f"{name} in {file}" for name, secret in secrets.items() if secret.encode() in content]
    return found


def descendants(pid: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            yield int(entry.name)
            yield from descendants(int(entry.name))


def watched(process: subprocess.Popen[str]) -> tuple[set[str], set[str]]:
    """The command lines of a command and of all that it starts, while it runs, and their soft limits of core files."""
    lines, limits = set(), set()
    while process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
                limit = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
            except OSError:
                continue
            lines.add(line.replace("\0", " "))
            if "hyperd" in line:
                limits |= {row.split()[4] for row in limit.splitlines() if row.startswith("Max core file size")}
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    return lines, limits


def open_to_others(folder: Path) -> list[Path]:
    """The files that other users could read: no folder above them, up to this one, keeps them out."""

    def is_open(path: Path) -> bool:
        return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))

    def is_kept(file: Path) -> bool:
        return any(
            not is_open(path) for path in (file, *file.parents) if path.is_relative_to(folder) and path != folder
        )

    return [file for file in folder.rglob("*") if file.is_file() and not is_kept(file)]


def test_a_refresh_shows_no_secret_and_keeps_rows_to_its_owner(shell: Shell, tmp_path: Path):
    secrets = {name: os.environ[name] for name in SECRETS}
    specs = shell.specs(new_datasource("secrets"))
    command = [sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(specs), "refresh", "orders", "--profile"]
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # The most open umask there is.
    with subprocess.Popen(
        ["prlimit", f"--core={hard}", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0,
    ) as process:
        lines, limits = watched(process)
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == 0, output
    assert any("hyperd" in line for line in lines), "the processes were seen"
    assert limits == {"0"}, "no core file, in which secrets and rows would be"
    assert leaks(secrets, tmp_path / "home", texts=(output, *lines)) == []
    rows = list((tmp_path / "home" / "extracts").rglob("*.hyper"))
    assert rows, "there is something to protect"
    opened = open_to_others(tmp_path / "home")
    assert [
        file for file in opened if file.relative_to(tmp_path / "home").parts[0] in ("extracts", "alerts", "dagster")
    ] == []


def pem() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*form).decode()


def test_commands_that_fail_show_no_secret(shell: Shell, tmp_path: Path):
    key, people = pem(), People(shell.place.sandbox.people_url)
    wrong: tuple[dict[str, str | None], ...] = (
        {"SNOWFLAKE_PASSWORD": MARK},
        {"SNOWFLAKE_PASSWORD": None, "SNOWFLAKE_PRIVATE_KEY": f"-----BEGIN PRIVATE KEY-----\n{MARK}"},
        {"SNOWFLAKE_PASSWORD": None, "SNOWFLAKE_PRIVATE_KEY": key},
        {"SNOWFLAKE_PASSWORD": None, "SNOWFLAKE_OAUTH_TOKEN": MARK},
        {"TABLEAU_TOKEN_SECRET": MARK},
        {"TABLEAU_TOKEN_NAME": None, "TABLEAU_TOKEN_SECRET": None, "TABLEAU_USERNAME": "me", "TABLEAU_PASSWORD": MARK},
        # The refresh fails by its site, and nobody can be told: both are noted.
        {"SLACK_BOT_TOKEN": MARK, "SERVICENOW_PASSWORD": MARK, "TABLEAU_SITE": "nosite"},
    )
    outputs = []
    for env in wrong:
        shell.env = env
        result = shell.tir("refresh", "orders")
        assert result.code == FAILED, env
        outputs += [result.stdout, result.stderr]
    shell.env = {"AWS_ACCESS_KEY_ID": MARK, "AWS_SECRET_ACCESS_KEY": MARK}
    result = shell.tir("load", "files", "--dry-run")
    assert result.code == FAILED
    told = (*outputs, result.stdout, result.stderr, str(people.messages()), str(people.incidents()))
    assert people.messages()
    for sentence in (
        "Snowflake account sandbox",
        "The private key given cannot be read",
        "refused (401001)",
        "check SLACK_BOT_TOKEN",
    ):
        assert any(sentence in text for text in told), sentence
    secrets = {name: os.environ[name] for name in SECRETS} | {"mark": MARK, "key": key.splitlines()[5]}
    assert leaks(secrets, tmp_path / "home", texts=told) == []


def test_a_folder_that_is_there_is_closed_to_others_and_a_group_that_may_write_stays(tmp_path: Path):
    for before, after in ((0o755, 0o700), (0o777, 0o770), (0o2770, 0o2770), (0o700, 0o700)):
        folder = tmp_path / f"{before:o}"
        folder.mkdir()
        folder.chmod(before)
        assert stat.S_IMODE(private_folder(folder).stat().st_mode) == after


def test_the_hard_limit_of_core_files_stays():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    no_core_files()
    try:
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
