"""`tir sandbox` as a user runs it.

What is about data runs on real servers, one sandbox for this file. What is about processes, ports and pid files runs on
stubs: processes as real as those, which answer the health page at once and have nothing else to load.
"""

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner
from dagster_snowflake import SnowflakeResource

from tir_dagster import background
from tir_dagster.cli.main import tir
from tir_dagster.sandbox import daemon, processes, sample
from tir_dagster.sandbox.home import SERVERS, Identity, SandboxError, SandboxHome
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import free_port
from tir_dagster_tests.sandbox.tableau.helpers import Publisher

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
    "SLACK_API_URL",
    "SLACK_BOT_TOKEN",
    "SERVICENOW_URL",
    "SERVICENOW_USERNAME",
    "SERVICENOW_PASSWORD",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}
COMMAND = [sys.executable, "-m", "tir_dagster.cli.main", "sandbox"]


STUB = """
import http.server, json, os, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[2:])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"server": sys.argv[1], "pid": os.getpid()}).encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["port"])), Health).serve_forever()
"""


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Shell:
    """A user's shell with TIR_HOME set; `tir` runs a command within this process, `command` as a process of its own."""

    folder: Path

    @property
    def home(self) -> SandboxHome:
        return SandboxHome(self.folder / "sandbox")

    def tir(self, *arguments: object, answer: str = "") -> Outcome:
        words = ["sandbox", *map(str, arguments)]
        result = CliRunner().invoke(tir, words, input=answer, env={"TIR_HOME": str(self.folder)}, prog_name="tir")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    def begin(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            env={**os.environ, "TIR_HOME": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *arguments: object) -> Outcome:
        process = self.begin(*arguments)
        output, errors = process.communicate(timeout=180)
        return Outcome(process.returncode, output, errors)

    def succeed(self, *arguments: object) -> str:
        done = self.tir(*arguments)
        assert done.returncode == 0, f"tir sandbox {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def fail(self, *arguments: object, code: int = 1, answer: str = "") -> str:
        """The error message of a command that must fail in a civil manner."""
        done = self.tir(*arguments, answer=answer)
        assert done.returncode == code, f"tir sandbox {arguments}: {done.returncode} {done.stdout}{done.stderr}"
        return done.stderr

    def servers(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.tir("status", "--json").stdout)["servers"]

    def pids(self) -> dict[str, int | None]:
        return {name: server["pid"] for name, server in self.servers().items()}

    def ports(self) -> dict[str, int | None]:
        return {name: server["port"] for name, server in self.servers().items()}

    def client(self) -> Sandbox:
        return Sandbox(self.home, processes.environment(self.home))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A user in a fresh home; whatever a test leaves running is stopped."""
    yield from _stopping(Shell(tmp_path / "tir home"))


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Stubs in the place of the servers whose names are in the set: all, unless the test takes some out."""
    names, real = set(SERVERS), daemon.command

    def command(home: SandboxHome, server: str, port: int, arguments: tuple[str, ...]) -> list[str]:
        words = real(home, server, port, arguments)
        return [sys.executable, "-IS", "-c", STUB, server, *words[4:]] if server in names else words

    monkeypatch.setattr(daemon, "command", command)
    return names


@pytest.fixture
def stubbed(shell: Shell, stubs: set[str]) -> Shell:
    return shell


@pytest.fixture
def other_stubbed(tmp_path: Path, stubs: set[str]) -> Iterator[Shell]:
    yield from _stopping(Shell(tmp_path / "other"))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, list[str]]]:
    """A real sandbox, started by two commands at once, and what they said."""
    for shell in _stopping(Shell(tmp_path_factory.mktemp("up"))):
        both = [shell.begin("up") for _ in range(2)]
        outputs = [one.communicate(timeout=120) for one in both]
        assert [one.returncode for one in both] == [0, 0], outputs
        yield shell, [output for output, _ in outputs]


@pytest.fixture(scope="module")
def up(started: tuple[Shell, list[str]]) -> Shell:
    """That sandbox for the tests of this file, which put it back up when they stop it."""
    return started[0]


def _stopping(shell: Shell) -> Iterator[Shell]:
    try:
        yield shell
    finally:
        processes.stop(shell.home)


def one_line(message: str) -> bool:
    return len(message.strip().splitlines()) == 1


def is_alive(pid: int | None) -> bool:
    return pid is not None and background.start_time(pid) is not None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert background.wait(lambda: not is_alive(pid), 20), f"process {pid} still lives"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


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
    script = f"import sys, tir_dagster.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--warehouse-port", "0"],
        ["up", "--warehouse-port", "70000"],
        ["up", "--warehouse-port", "5000", "--tableau-port", "5000"],
        ["up", "--warehouse-port", "5000", "--people-port", "5000"],
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
        "import sys; sys.modules['fakesnow'] = None; from tir_dagster.cli.main import main;"
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


def test_two_ups_at_once_start_one_sandbox(started):
    shell, outputs = started
    assert sorted(output.count(": started, http://127.0.0.1:") for output in outputs) == [0, len(SERVERS)]
    assert all(server["running"] for server in shell.servers().values())


def test_status_and_env_tell_where_everything_is(up):
    told = up.command("status", "--json")
    assert told.returncode == 0
    servers = json.loads(told.stdout)["servers"]
    assert set(servers) == set(SERVERS)
    for name, server in servers.items():
        assert server["running"]
        assert is_alive(server["pid"])
        assert server["url"] == f"http://127.0.0.1:{server['port']}"
        assert Path(server["log"]).is_file()
        assert server["data"] == str(up.home.data(name))
    assert "warehouse: running" in up.succeed("status")

    lines = up.command("env").stdout.splitlines()
    exported = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    assert set(exported) == VARIABLES
    assert {name: shlex.split(value)[0] for name, value in exported.items()} == processes.environment(up.home)


def test_down_and_up_again(stubbed):
    assert stubbed.succeed("up").count("started, http://127.0.0.1:") == len(SERVERS)
    pids, ports = stubbed.pids(), stubbed.ports()
    stubbed.succeed("down")
    assert not any(is_alive(pid) for pid in pids.values())
    assert stubbed.pids() == dict.fromkeys(SERVERS)
    assert stubbed.tir("status").returncode == 1
    message = stubbed.fail("env")
    assert "tir sandbox up" in message
    assert one_line(message)
    assert "was not running" in stubbed.succeed("down")

    stubbed.succeed("up")
    assert stubbed.ports() == ports, "a restart keeps the addresses"


def test_before_the_first_up_everything_is_stopped_and_no_folder_is_made(shell):
    assert shell.tir("status").returncode == 1
    shell.fail("env")
    shell.succeed("down")
    assert not shell.folder.exists()


def test_up_twice_is_harmless(stubbed):
    stubbed.succeed("up")
    before = stubbed.pids()
    assert stubbed.succeed("up").count("already running") == len(SERVERS)
    assert stubbed.pids() == before


def test_two_homes_are_two_sandboxes(up, sandbox):
    addresses = {name: value for name, value in sandbox.env.items() if name.endswith(("PORT", "URL"))}
    assert not addresses.items() & up.client().env.items()
    assert up.client().identity.token_secret != sandbox.identity.token_secret
    with up.client().snowflake() as ours, sandbox.snowflake() as theirs:
        ours.cursor().execute("CREATE DATABASE IF NOT EXISTS ONLY_HERE")
        names = {row[1] for row in theirs.cursor().execute("SHOW DATABASES").fetchall()}
    assert "ONLY_HERE" not in names


def test_stopping_one_home_leaves_the_other_running(stubbed, other_stubbed):
    stubbed.succeed("up")
    other_stubbed.succeed("up")
    assert len({*stubbed.ports().values(), *other_stubbed.ports().values()}) == 2 * len(SERVERS)
    other_stubbed.succeed("down")
    assert all(server["running"] for server in stubbed.servers().values())


def test_asked_ports_are_used(stubbed):
    ports = {name: free_port() for name in SERVERS}
    stubbed.succeed("up", *(word for name, port in ports.items() for word in (f"--{name}-port", port)))
    assert stubbed.ports() == ports
    moved = stubbed.fail("up", "--tableau-port", free_port())
    assert str(ports["tableau"]) in moved
    assert "tir sandbox down" in moved


def test_a_port_asked_for_one_server_is_not_given_to_the_other_that_remembers_it(stubbed):
    port = free_port()
    stubbed.home.remember_port("warehouse", port)
    stubbed.succeed("up", "--tableau-port", port)
    assert stubbed.ports()["tableau"] == port
    assert stubbed.ports()["warehouse"] not in (None, port)


@pytest.mark.parametrize("server", SERVERS)
def test_a_taken_port_is_named_and_nothing_stays_half_started(shell, taken_port, server):
    message = shell.fail("up", f"--{server}-port", taken_port)
    assert str(taken_port) in message
    assert f"--{server}-port" in message
    assert one_line(message)
    assert shell.pids() == dict.fromkeys(SERVERS)


def test_a_remembered_port_that_is_taken_now_is_replaced_by_a_free_one(stubbed, taken_port):
    stubbed.home.remember_port("warehouse", taken_port)
    stubbed.succeed("up")
    assert stubbed.ports()["warehouse"] not in (None, taken_port)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"account": "sandbox"}', b"\xff\xfe"])
def test_damaged_names_and_secrets_are_told_and_not_replaced(stubbed, content):
    stubbed.home.identity()
    path = stubbed.home.root / "identity.json"
    damaged = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(damaged)
    message = stubbed.fail("up")
    assert str(path) in message
    assert "damaged" in message
    assert one_line(message)
    assert path.read_bytes() == damaged
    assert stubbed.pids() == dict.fromkeys(SERVERS)


def test_a_secret_of_another_type_is_damage_and_a_name_of_a_later_version_is_not(shell):
    path = shell.home.root / "identity.json"
    known = {**asdict(shell.home.identity()), "added_later": 7}
    background.write_json(path, known)
    assert shell.home.identity() == Identity(**{name: value for name, value in known.items() if name != "added_later"})
    background.write_json(path, {**known, "tableau_password": None})
    with pytest.raises(SandboxError, match="damaged"):
        shell.home.identity()


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


def test_a_server_that_cannot_start_shows_its_log_and_nothing_stays_running(shell, stubs):
    stubs.remove("tableau")
    shell.home.root.mkdir(parents=True)
    shell.home.data("tableau").write_text("a file where the server needs a folder")
    message = shell.fail("up")
    assert "tableau ended while starting" in message
    assert str(shell.home.log("tableau")) in message
    assert len(message.splitlines()) > 1, "the log's last lines belong to the message"
    assert shell.pids() == dict.fromkeys(SERVERS)


# Processes that die, hang or are not ours


def test_a_pid_file_of_a_dead_process_is_replaced(stubbed):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in SERVERS:
        path = stubbed.home.process_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": gone.pid, "port": free_port(), "started": "long ago"}))
    assert stubbed.pids() == dict.fromkeys(SERVERS)
    assert stubbed.succeed("up").count(": started,") == len(SERVERS)


def test_a_pid_that_now_belongs_to_another_program_is_left_alone(stubbed):
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        path = stubbed.home.process_file("warehouse")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"pid": stranger.pid, "port": free_port(), "started": "another boot/1"}))
        assert stubbed.pids()["warehouse"] is None
        stubbed.succeed("down")
        path.write_text(json.dumps({"pid": stranger.pid, "port": free_port(), "started": "another boot/1"}))
        stubbed.succeed("up")
        assert stubbed.pids()["warehouse"] not in (None, stranger.pid)
        stubbed.succeed("down")
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
    kill(before["warehouse"])
    assert up.tir("status").returncode == 1

    output = up.succeed("up")
    assert "warehouse: started" in output
    assert "tableau: already running" in output
    assert up.pids()["tableau"] == before["tableau"]
    with up.client().snowflake() as connection:
        assert connection.cursor().execute("SELECT SUM(N) FROM KEPT.S.T").fetchone()[0] == 6


def test_when_the_warehouse_has_to_move_the_tableau_server_learns_its_new_address(stubbed):
    stubbed.succeed("up")
    before = stubbed.servers()
    kill(before["warehouse"]["pid"])
    new = free_port()
    stubbed.succeed("up", "--warehouse-port", new)
    after = stubbed.servers()
    assert after["warehouse"]["port"] == new
    assert after["tableau"]["pid"] != before["tableau"]["pid"]
    assert after["tableau"]["port"] == before["tableau"]["port"]
    assert daemon.find(stubbed.home, "tableau").arguments == (f"--warehouse-port={new}",)


@pytest.fixture
def hung(stubbed, monkeypatch) -> Iterator[int]:
    """The pid of a Tableau server that is there and does nothing."""
    stubbed.succeed("up")
    monkeypatch.setattr(daemon, "ANSWER_SECONDS", 0.3)
    pid = stubbed.pids()["tableau"]
    os.kill(pid, signal.SIGSTOP)
    yield pid
    if is_alive(pid):
        os.kill(pid, signal.SIGCONT)


def test_a_hung_server_is_shown_as_not_answering(stubbed, hung):
    told = stubbed.tir("status")
    assert told.returncode == 1
    assert "tableau: not answering" in told.stdout
    os.kill(hung, signal.SIGCONT)
    assert stubbed.succeed("up").count("already running") == len(SERVERS)


def test_a_server_that_hangs_for_good_is_replaced_by_up(stubbed, hung, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(background, "END_SECONDS", 0.3)
    assert "tableau: started" in stubbed.succeed("up")
    assert not is_alive(hung)


# Data


def test_a_restart_loses_nothing(up, tmp_path):
    """Rows, older versions of a table, datasources and the names people noted down."""
    client = up.client()
    with client.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS KEPT")
        cursor.execute("CREATE SCHEMA IF NOT EXISTS KEPT.S")
        cursor.execute("CREATE OR REPLACE TABLE KEPT.S.OLD AS SELECT 1 AS N")
        moment = cursor.execute("SELECT CURRENT_TIMESTAMP()").fetchone()[0]
        cursor.execute("INSERT INTO KEPT.S.OLD VALUES (2), (3)")
    with client.tableau() as server:
        project = server.projects.create(TSC.ProjectItem(name="kept"))
        Publisher(client, server, project, tmp_path).publish_live("Kept")
        published = {(item.id, item.name) for item in server.datasources.all()}
    assert "Kept" in {name for _, name in published}

    assert up.command("down").returncode == 0
    assert up.command("up").returncode == 0

    assert up.client().env == client.env
    at = f"AT(TIMESTAMP => '{moment.isoformat()}'::TIMESTAMP_TZ)"
    with up.client().snowflake() as connection, connection.cursor() as cursor:
        assert cursor.execute("SELECT COUNT(*) FROM KEPT.S.OLD").fetchone()[0] == 3
        assert cursor.execute(f"SELECT COUNT(*) FROM KEPT.S.OLD {at}").fetchone()[0] == 1
    with up.client().tableau() as server:
        assert {(item.id, item.name) for item in server.datasources.all()} == published


def test_seed_and_change_say_what_they_did(up):
    told = up.succeed("seed", "--rows", 2_000, "--until", "2024-07", "--seed", 3)
    assert "2,000 rows, 2022-08 to 2024-07" in told
    assert sample.DATASOURCE in told
    told = up.succeed("change", "--inserts", 40, "--updates", 30, "--moves", 20, "--deletes", 10)
    assert "40 inserted, 30 updated, 20 moved to another month, 10 deleted; 2,000 rows before, 2,030 now" in told
    account = json.loads(up.succeed("change", "--seed", 2, "--json"))
    assert account["rows_before"] == 2_030
    assert sum(month["deleted"] for month in account["months"].values()) == account["mix"]["deletes"]


def test_reset_empties_the_sandbox_and_keeps_its_names(up):
    before = up.client()
    with before.snowflake() as connection:
        connection.cursor().execute("CREATE DATABASE IF NOT EXISTS TO_GO")
    with before.tableau() as server:
        server.projects.create(TSC.ProjectItem(name="to go"))

    def names() -> set[str]:
        with up.client().snowflake() as connection, up.client().tableau() as server:
            databases = connection.cursor().execute("SHOW DATABASES").fetchall()
            return {row[1] for row in databases} | {project.name for project in server.projects.all()}

    assert "Aborted" in up.fail("reset", answer="n\n")
    assert {"TO_GO", "to go"} <= names()
    assert "started again" in up.succeed("reset", "--yes")
    assert up.client().env == before.env
    assert not {"TO_GO", "to go"} & names()
    message = up.fail("change")
    assert "tir sandbox seed" in message, "what to do first when there is no sample"
    assert one_line(message)


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
