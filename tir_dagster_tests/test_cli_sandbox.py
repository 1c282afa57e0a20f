"""`tir sandbox` as a user runs it: real commands, real server processes."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dagster_snowflake import SnowflakeResource

from tir_dagster.cli import tir
from tir_dagster.sandbox import daemon, processes, sample
from tir_dagster.sandbox.home import SERVERS, SandboxHome
from tir_dagster_tests.conftest import Sandbox

VARIABLES = {
    "SNOWFLAKE_ACCOUNT",
    "SNOWFLAKE_USER",
    "SNOWFLAKE_PASSWORD",
    "SNOWFLAKE_HOST",
    "SNOWFLAKE_PORT",
    "SNOWFLAKE_PROTOCOL",
    "TABLEAU_SERVER_URL",
    "TABLEAU_SITE",
    "TABLEAU_TOKEN_NAME",
    "TABLEAU_TOKEN_SECRET",
}
COMMAND = [sys.executable, "-m", "tir_dagster.cli", "sandbox"]


@dataclass(frozen=True)
class Shell:
    """A user's shell with TIR_HOME set."""

    folder: Path

    @property
    def home(self) -> SandboxHome:
        return SandboxHome(self.folder / "sandbox")

    def tir(self, *arguments: object, answer: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            env={**os.environ, "TIR_HOME": str(self.folder)},
            input=answer,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def succeed(self, *arguments: object) -> str:
        done = self.tir(*arguments)
        assert done.returncode == 0, f"tir sandbox {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def fail(self, *arguments: object, code: int = 1, answer: str = "") -> str:
        """The error message of a command that must fail in a civil manner."""
        done = self.tir(*arguments, answer=answer)
        assert done.returncode == code, f"tir sandbox {arguments}: {done.returncode} {done.stdout}{done.stderr}"
        assert not re.search("^Traceback", done.stderr, re.MULTILINE), done.stderr
        return done.stderr

    def servers(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.tir("status", "--json").stdout)["servers"]

    def pids(self) -> dict[str, int | None]:
        return {name: server["pid"] for name, server in self.servers().items()}

    def client(self) -> Sandbox:
        return Sandbox(self.home, processes.environment(self.home))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A user in a fresh home; whatever a test leaves running is stopped."""
    yield from _stopping(Shell(tmp_path / "tir home"))


@pytest.fixture
def other_shell(tmp_path: Path) -> Iterator[Shell]:
    yield from _stopping(Shell(tmp_path / "other"))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A sandbox for the tests of this file, which put it back up when they stop it."""
    shell = Shell(tmp_path_factory.mktemp("up"))
    for running in _stopping(shell):
        running.succeed("up")
        yield running


def _stopping(shell: Shell) -> Iterator[Shell]:
    try:
        yield shell
    finally:
        processes.stop(shell.home)


def one_line(message: str) -> bool:
    return len(message.strip().splitlines()) == 1


def is_alive(pid: int | None) -> bool:
    return pid is not None and daemon.start_time(pid) is not None


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The command itself


@pytest.mark.parametrize(
    "command",
    [[], ["sandbox"], *(["sandbox", name] for name in ("up", "down", "status", "env", "reset", "seed", "change"))],
)
def test_every_command_has_help(command):
    result = CliRunner().invoke(tir, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_the_version_is_told():
    assert re.fullmatch(r"tir, version \d+\.\d+\.\d+\n", CliRunner().invoke(tir, ["--version"]).output)


def test_help_loads_nothing_heavy():
    heavy = [
        "dagster",
        "numpy",
        "pandas",
        "pyarrow",
        "pyspark",
        "snowflake.connector",
        "tableauserverclient",
        "uvicorn",
    ]
    script = f"import sys, tir_dagster.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--warehouse-port", "0"],
        ["up", "--warehouse-port", "70000"],
        ["up", "--warehouse-port", "5000", "--tableau-port", "5000"],
        ["seed", "--until", "2024-13"],
        ["seed", "--rows", "0"],
        ["change", "--deletes", "-1"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(shell, arguments):
    assert "Error:" in shell.fail(*arguments, code=2)
    assert not shell.folder.exists()


def test_a_missing_extra_is_named_with_the_command_that_installs_it(shell):
    script = (
        "import sys; sys.modules['fakesnow'] = None; from tir_dagster.cli import main;"
        " sys.argv = ['tir', 'sandbox', 'up']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TIR_HOME": str(shell.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "fakesnow" in done.stderr
    assert "pip install 'tir_dagster[sandbox]'" in done.stderr
    assert one_line(done.stderr)


# Up, status, env, down


def test_up_status_env_down_and_back(shell):
    assert shell.succeed("up").count("started, http://127.0.0.1:") == 2

    servers = shell.servers()
    assert set(servers) == set(SERVERS)
    for name, server in servers.items():
        assert server["running"]
        assert is_alive(server["pid"])
        assert server["url"] == f"http://127.0.0.1:{server['port']}"
        assert Path(server["log"]).is_file()
        assert server["data"] == str(shell.home.data(name))
    assert "warehouse: running" in shell.succeed("status")

    exported = dict(line.removeprefix("export ").split("=", 1) for line in shell.succeed("env").splitlines())
    assert set(exported) == VARIABLES
    assert {name: shlex.split(value)[0] for name, value in exported.items()} == processes.environment(shell.home)

    shell.succeed("down")
    assert not any(is_alive(server["pid"]) for server in servers.values())
    assert shell.pids() == dict.fromkeys(SERVERS)
    assert shell.tir("status").returncode == 1
    message = shell.fail("env")
    assert "tir sandbox up" in message
    assert one_line(message)
    assert "was not running" in shell.succeed("down")

    shell.succeed("up")
    assert {name: server["port"] for name, server in shell.servers().items()} == {
        name: server["port"] for name, server in servers.items()
    }, "a restart keeps the addresses"


def test_before_the_first_up_everything_is_stopped_and_no_folder_is_made(shell):
    assert shell.tir("status").returncode == 1
    shell.fail("env")
    shell.succeed("down")
    assert not shell.folder.exists()


def test_up_twice_is_harmless(up):
    before = up.pids()
    assert up.succeed("up").count("already running") == 2
    assert up.pids() == before


def test_two_ups_at_once_start_one_sandbox(shell):
    environment = {**os.environ, "TIR_HOME": str(shell.folder)}
    both = [
        subprocess.Popen([*COMMAND, "up"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert sorted(output.count(": started,") for output, _ in outputs) == [0, 2]
    assert all(server["running"] for server in shell.servers().values())


def test_two_homes_are_two_sandboxes(up, other_shell):
    other_shell.succeed("up")
    ports = [server["port"] for shell in (up, other_shell) for server in shell.servers().values()]
    assert len(set(ports)) == 4
    assert up.client().identity.token_secret != other_shell.client().identity.token_secret
    with up.client().snowflake() as ours, other_shell.client().snowflake() as theirs:
        ours.cursor().execute("CREATE DATABASE IF NOT EXISTS ONLY_HERE")
        names = {row[1] for row in theirs.cursor().execute("SHOW DATABASES").fetchall()}
    assert "ONLY_HERE" not in names
    other_shell.succeed("down")
    assert all(server["running"] for server in up.servers().values())


def test_asked_ports_are_used(shell):
    ports = {name: free_port() for name in SERVERS}
    shell.succeed("up", *(word for name, port in ports.items() for word in (f"--{name}-port", port)))
    assert {name: server["port"] for name, server in shell.servers().items()} == ports
    moved = shell.fail("up", "--tableau-port", free_port())
    assert str(ports["tableau"]) in moved
    assert "tir sandbox down" in moved


@pytest.mark.parametrize("server", SERVERS)
def test_a_taken_port_is_named_and_nothing_stays_half_started(shell, taken_port, server):
    message = shell.fail("up", f"--{server}-port", taken_port)
    assert str(taken_port) in message
    assert f"--{server}-port" in message
    assert one_line(message)
    assert shell.pids() == dict.fromkeys(SERVERS)


def test_a_remembered_port_that_is_taken_now_is_replaced_by_a_free_one(shell, taken_port):
    shell.home.remember_port("warehouse", taken_port)
    shell.succeed("up")
    assert shell.servers()["warehouse"]["port"] != taken_port


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for command in ("up", "status", "down", "env", "seed", "change"):
        message = Shell(tmp_path / "file" / "home").fail(command)
        assert "TIR_HOME" in message
        assert str(tmp_path) in message
        assert one_line(message)


def test_a_full_disk_is_explained(shell):
    full = OSError(errno.ENOSPC, "No space left on device", "/some/file")
    explained = processes._explain(shell.home, full)
    assert "/some/file" in explained
    assert "disk is full" in explained


def test_a_server_that_cannot_start_shows_its_log_and_nothing_stays_running(shell):
    shell.home.root.mkdir(parents=True)
    shell.home.data("tableau").write_text("a file where the server needs a folder")
    message = shell.fail("up")
    assert "tableau ended while starting" in message
    assert str(shell.home.log("tableau")) in message
    assert len(message.splitlines()) > 1, "the log's last lines belong to the message"
    assert shell.pids() == dict.fromkeys(SERVERS)


# Processes that die, hang or are not ours


def test_a_pid_file_of_a_dead_process_is_replaced(shell):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in SERVERS:
        path = shell.home.process_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": gone.pid, "port": free_port(), "started": "long ago"}))
    assert shell.pids() == dict.fromkeys(SERVERS)
    assert shell.succeed("up").count(": started,") == 2


def test_a_pid_that_now_belongs_to_another_program_is_left_alone(shell):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        path = shell.home.process_file("warehouse")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"pid": stranger.pid, "port": free_port(), "started": "another boot/1"}))
        assert shell.pids()["warehouse"] is None
        shell.succeed("down")
        path.write_text(json.dumps({"pid": stranger.pid, "port": free_port(), "started": "another boot/1"}))
        shell.succeed("up")
        assert shell.pids()["warehouse"] not in (None, stranger.pid)
        shell.succeed("down")
        assert stranger.poll() is None, "a process of somebody else was ended"
    finally:
        stranger.communicate(b"\n")


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"pid": "x"}'])
def test_a_broken_pid_file_counts_as_stopped(shell, content):
    path = shell.home.process_file("warehouse")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert shell.servers()["warehouse"]["state"] == "stopped"


def test_a_killed_warehouse_is_started_again_by_up_with_its_data(up):
    with up.client().snowflake() as connection:
        connection.cursor().execute("CREATE DATABASE IF NOT EXISTS KEPT")
        connection.cursor().execute("CREATE SCHEMA IF NOT EXISTS KEPT.S")
        connection.cursor().execute("CREATE OR REPLACE TABLE KEPT.S.T (N NUMBER)")
        connection.cursor().execute("INSERT INTO KEPT.S.T VALUES (1), (2), (3)")
    before = up.pids()
    os.kill(before["warehouse"], signal.SIGKILL)
    wait_until_dead(before["warehouse"])
    assert up.tir("status").returncode == 1

    output = up.succeed("up")
    assert "warehouse: started" in output
    assert "tableau: already running" in output
    assert up.pids()["tableau"] == before["tableau"]
    with up.client().snowflake() as connection:
        assert connection.cursor().execute("SELECT SUM(N) FROM KEPT.S.T").fetchone()[0] == 6


def test_when_the_warehouse_has_to_move_the_tableau_server_learns_its_new_address(shell):
    shell.succeed("up")
    before = shell.servers()
    os.kill(before["warehouse"]["pid"], signal.SIGKILL)
    wait_until_dead(before["warehouse"]["pid"])
    new = free_port()
    shell.succeed("up", "--warehouse-port", new)
    after = shell.servers()
    assert after["warehouse"]["port"] == new
    assert after["tableau"]["pid"] != before["tableau"]["pid"]
    assert after["tableau"]["port"] == before["tableau"]["port"]


def test_a_hung_server_is_shown_as_not_answering(up):
    pid = up.pids()["tableau"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "tableau: not answering" in up.tir("status").stdout
        assert up.tir("status").returncode == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert up.succeed("up").count("already running") == 2


# Data


def test_a_restart_loses_nothing(up):
    """Rows, older versions of a table, datasources and the names people noted down."""
    up.succeed("seed", "--rows", 2_000, "--until", "2024-07")
    client = up.client()
    with client.snowflake() as connection:
        moment = connection.cursor().execute("SELECT CURRENT_TIMESTAMP()").fetchone()[0]
    up.succeed("change", "--inserts", 50, "--updates", 5, "--moves", 5, "--deletes", 0)
    with client.tableau() as server:
        published = [(item.id, item.name) for item in server.datasources.all()]

    up.succeed("down")
    up.succeed("up")

    assert up.client().env == client.env
    at = f"AT(TIMESTAMP => '{moment.isoformat()}'::TIMESTAMP_TZ)"
    with up.client().snowflake() as connection:
        assert connection.cursor().execute(f"SELECT COUNT(*) FROM {sample.TABLE}").fetchone()[0] == 2_050
        assert connection.cursor().execute(f"SELECT COUNT(*) FROM {sample.TABLE} {at}").fetchone()[0] == 2_000
    with up.client().tableau() as server:
        assert [(item.id, item.name) for item in server.datasources.all()] == published
        assert [name for _, name in published] == [sample.DATASOURCE]


def test_seed_and_change_say_what_they_did(up):
    told = up.succeed("seed", "--rows", 2_000, "--until", "2024-07", "--seed", 3)
    assert "2,000 rows, 2022-08 to 2024-07" in told
    assert sample.DATASOURCE in told
    told = up.succeed("change", "--inserts", 40, "--updates", 30, "--moves", 20, "--deletes", 10)
    assert "40 inserted, 30 updated, 20 moved to another month, 10 deleted; 2,000 rows before, 2,030 now" in told
    account = json.loads(up.succeed("change", "--seed", 2, "--json"))
    assert account["rows_before"] == 2_030
    assert sum(month["deleted"] for month in account["months"].values()) == account["mix"]["deletes"]


def test_change_without_a_sample_says_what_to_do_first(shell):
    shell.succeed("up")
    message = shell.fail("change")
    assert "tir sandbox seed" in message
    assert one_line(message)


def test_reset_empties_the_sandbox_and_keeps_its_names(up):
    up.succeed("seed", "--rows", 500, "--until", "2024-07")
    before = up.client()
    assert "Aborted" in up.fail("reset", answer="n\n")
    with before.snowflake() as connection:
        assert connection.cursor().execute(f"SELECT COUNT(*) FROM {sample.TABLE}").fetchone()[0] == 500

    assert "started again" in up.succeed("reset", "--yes")
    assert up.client().env == before.env
    assert "tir sandbox seed" in up.fail("change")
    with up.client().tableau() as server:
        assert list(server.datasources.all()) == []


def test_reset_of_a_stopped_sandbox_leaves_it_stopped(shell):
    shell.home.identity()
    shell.home.data("warehouse").mkdir()
    (shell.home.data("warehouse") / "something").write_text("data")
    shell.succeed("reset", "--yes")
    assert not shell.home.data("warehouse").exists()
    assert shell.pids() == dict.fromkeys(SERVERS)


def test_reset_refuses_a_folder_that_is_no_sandbox(shell):
    precious = shell.home.data("warehouse") / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("not ours")
    assert "does not look like a sandbox" in shell.fail("reset", "--yes")
    assert precious.exists()


def test_reset_does_not_follow_links_out_of_the_sandbox(shell, tmp_path):
    shell.home.identity()
    precious = tmp_path / "elsewhere" / "precious"
    precious.parent.mkdir()
    precious.write_text("not ours")
    shell.home.data("warehouse").symlink_to(precious.parent)
    shell.fail("reset", "--yes")
    assert precious.exists()


# How clients reach it


def listening_addresses(session: int) -> set[str]:
    """The local addresses on which any process of this session listens, from /proc."""
    inodes = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                inodes |= {str(link.readlink()) for link in (folder / "fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_the_servers_listen_on_loopback_only(up):
    for name, pid in up.pids().items():
        assert listening_addresses(pid) == {"0100007F"}, name


def test_secrets_are_readable_by_the_owner_only(up):
    assert (up.home.root / "identity.json").stat().st_mode & 0o077 == 0


def test_the_warehouse_is_reached_by_dagsters_own_resource(sandbox):
    env = sandbox.env
    resource = SnowflakeResource(
        account=env["SNOWFLAKE_ACCOUNT"],
        user=env["SNOWFLAKE_USER"],
        password=env["SNOWFLAKE_PASSWORD"],
        additional_snowflake_connection_args={
            "host": env["SNOWFLAKE_HOST"],
            "port": int(env["SNOWFLAKE_PORT"]),
            "protocol": env["SNOWFLAKE_PROTOCOL"],
            "network_timeout": 60,
        },
    )
    with resource.get_connection() as connection:
        assert connection.cursor().execute("SELECT 1 + 1").fetchone()[0] == 2


def test_tableau_is_reached_by_the_real_client(sandbox):
    with sandbox.tableau() as server:
        assert server.is_signed_in()
