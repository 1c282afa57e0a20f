"""One Spark for all processes: `tir spark`, and staging, a load and a refresh over a real Spark Connect server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from pyspark import SparkContext

from tir_dagster.background import wait, write_json
from tir_dagster.cli.main import tir
from tir_dagster.errors import SourceError
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.resources import SparkSettings, spark_session
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark import staging
from tir_dagster.spark.connect import connect_session
from tir_dagster.spark.failures import spark_failures
from tir_dagster.spark.remote import Remote
from tir_dagster.spark.server import SparkServer, find_server, log_file, server_state
from tir_dagster.spark.staging import stage

COLUMNS = [Column("ORDER_ID", Kind.INTEGER, 38), Column("NOTE", Kind.TEXT)]
MANY = 200_000
NUMBERS = f"SELECT SEQ4() AS ID FROM TABLE(GENERATOR(ROWCOUNT => {MANY}))"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(tir, list(arguments))


def started(home: Path) -> SparkServer:
    result = run("spark", "up")
    assert (result.exit_code, "Spark: started in" in result.stdout) == (0, True), repr(result)
    server = find_server(home)
    assert server is not None
    return server


@pytest.fixture(scope="module")
def home(place) -> Iterator[Path]:
    """The place's home, without a server in the end."""
    yield tir_home()
    assert run("spark", "down").exit_code == 0


@pytest.fixture
def server(home) -> SparkServer:
    """The server of the place's home, started unless it runs."""
    return find_server(home) or started(home)


def command(place, *arguments: str, text: str = "", remote: str = "") -> subprocess.CompletedProcess:
    """A `tir` in a process of its own that has no Java, and gives every result to Spark."""
    specs = place.folder / "specs.yaml"
    specs.write_text(text or place.spec_text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(specs), *arguments],
        env={
            **os.environ,
            "JAVA_HOME": "/nowhere",
            "TIR_SPARK_ROWS": "0",
            **({"SPARK_REMOTE": remote} if remote else {}),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_second_up_leaves_the_server_alone_and_status_tells(server):
    again, status = run("spark", "up"), run("spark", "status", "--json")

    assert again.stdout.startswith(f"Spark: already running, {server.address} (pid {server.pid})")
    assert status.exit_code == 0
    fields = json.loads(status.stdout)
    assert (fields["state"], fields["pid"], fields["port"]) == ("running", server.pid, server.port)
    assert server.token not in again.output + status.output


def test_a_refresh_uses_it_without_java_and_leaves_no_credential_in_its_log_or_environment(place, server):
    done = command(place, "refresh", "orders", "--json")

    assert done.returncode == 0, done.stderr
    assert f"using Spark at localhost:{server.port}" in done.stderr
    assert json.loads(done.stdout)["rows_appended"] == sum(place.source_rows().values())
    assert place.published_rows() == place.source_rows()
    secrets = [place.sandbox.env[name] for name in ("SNOWFLAKE_PASSWORD", "TABLEAU_TOKEN_SECRET", "SLACK_BOT_TOKEN")]
    log = log_file(tir_home()).read_text(encoding="utf-8", errors="replace")
    environment = Path(f"/proc/{server.pid}/environ").read_text() if sys.platform == "linux" else ""
    assert [secret for secret in secrets if secret in log or secret in environment] == []


def test_a_load_uses_the_server_that_spark_remote_names_and_shows_no_token(place, server, tmp_path):
    place.sql("CREATE OR REPLACE TABLE LOADED (ID NUMBER, NAME VARCHAR)")
    (tmp_path / "a.csv").write_text("ID,NAME\n1,x\n2,y\n", encoding="utf-8")
    load = (
        "loads:\n  - {name: files, table: MYDB.MYSCHEMA.LOADED, mode: append, "
        f"files: {{path: 'file://{tmp_path}', format: csv, settle: 0 seconds}}}}\n"
    )

    done = command(place, "load", "files", text=load, remote=f"{server.address}/;token={server.token}")

    assert done.returncode == 0, done.stderr
    assert f"using Spark at localhost:{server.port}" in done.stderr
    assert server.token not in done.stdout + done.stderr
    assert place.sql("SELECT ID, NAME FROM LOADED ORDER BY ID") == [(1, "x"), (2, "y")]


def test_a_large_result_is_staged_by_several_tasks_each_row_once(place, server, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "ROWS_PER_TASK", MANY // 4)
    context, lines = SparkContext._active_spark_context, []
    access = SnowflakeAccess.from_environment(place.sandbox.env)

    def start():
        return spark_session(SparkSettings(), tir_home(), log=lines.append)

    staged = stage(start, access, NUMBERS, [Column("ID", Kind.INTEGER, 38)], tmp_path)

    keys = [key for file in staged.files for key in pq.read_table(file).column("ID").to_pylist()]
    assert sorted(keys) == list(range(MANY))
    assert (staged.tasks, len(staged.files)) == (4, 4)
    assert lines == [f"using Spark at localhost:{server.port}"]
    assert SparkContext._active_spark_context is context, "no JVM was started here"


def test_what_a_task_finds_wrong_is_told(place, server, tmp_path):
    access = SnowflakeAccess.from_environment(place.sandbox.env)
    session = connect_session(server.remote(tir_home()))

    with pytest.raises(SourceError, match="gives column NOTE 0 times among ORDER_ID"):
        stage(lambda: session, access, "SELECT ORDER_ID FROM MYDB.MYSCHEMA.MYTABLE", COLUMNS, tmp_path, small_rows=0)


@pytest.mark.parametrize("token", [None, "guessed"])
def test_nobody_runs_code_there_without_the_token(server, token):
    with pytest.raises(SourceError, match=f"localhost:{server.port} does not accept the token"):
        connect_session(Remote(server.address, token=token, log=log_file(tir_home())))


def test_up_replaces_what_a_server_left_that_died_and_the_next_death_is_told_with_what_to_do(
    server, tmp_path, monkeypatch
):
    monkeypatch.setenv("TIR_HOME", str(tmp_path))
    write_json(tmp_path / "spark" / "server.json", asdict(replace(server, started="another boot/1")))
    other = started(tmp_path)
    try:
        assert other.port != server.port
        remote = other.remote(tmp_path)
        session, pid = connect_session(remote), other.pid

        def end_it(batches):
            os.kill(pid, signal.SIGKILL)
            yield from batches

        with pytest.raises(SourceError) as caught, spark_failures("staging rows", remote):
            session.range(1).mapInArrow(end_it, "id long").collect()

        assert f"The Spark server at localhost:{other.port} ended or cannot be reached while staging rows" in str(
            caught.value
        )
        assert f"{log_file(tmp_path)}. Start it again with `tir spark up`" in str(caught.value)
        assert wait(lambda: server_state(tmp_path)[0] == "ended", 20)
        status = run("spark", "status")
        assert (status.exit_code, "It ended unexpectedly" in status.stdout) == (1, True)
        with pytest.raises(SourceError, match="cannot be reached while connecting"):
            connect_session(remote)
    finally:
        down = run("spark", "down")
    assert down.stdout == "Spark: was not running\n"
    assert server.lives, "two homes are two servers"


def test_down_ends_it(server):
    assert run("spark", "down").stdout == f"Spark: stopped (pid {server.pid})\n"
    assert not server.lives
    status = run("spark", "status", "--json")
    assert (status.exit_code, json.loads(status.stdout)["state"]) == (1, "stopped")
