"""`tir probe-server` on the stand-ins: its answers are what they do, and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner, Result
from tableauhyperapi import Connection, CreateMode, HyperProcess, Telemetry

from tir_dagster.cli.main import tir
from tir_dagster.probe.doubts import Findings, doubts, table_text
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.tableau.client import paced
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin

DOCS = Path(__file__).parents[2] / "docs" / "known-doubts.md"
LEFT = "tir-probe-0123456789ab"
NOT_OURS = "tir-probe-of-somebody"
QUICK = RetryPolicy(tries=2, backoff=Backoff(first_seconds=0.01, most_seconds=0.01))


@dataclass(frozen=True)
class Place:
    """A project of its own with an extract of a table, and the command that probes there."""

    sandbox: Sandbox
    admin: Admin
    server: TSC.Server
    project: TSC.ProjectItem
    schema: str
    folder: Path

    def run(self, *options: str, retry: RetryPolicy | None = None) -> Result:
        with paced(retry) if retry is not None else nullcontext():
            result = CliRunner().invoke(tir, ["probe-server", *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return result

    def answers(self, *options: str) -> dict[str, Any]:
        result = self.run(*options, "--json")
        assert result.exit_code == 0, result.stderr
        answers = json.loads(result.stdout)["answers"]
        return {key: answer["answer"] for key, answer in answers.items() if "not asked" not in answer["detail"]}

    @property
    def names(self) -> set[str]:
        items = TSC.Pager(self.server.datasources)
        return {str(item.name) for item in items if item.project_id == self.project.id}

    def publish(self, file: Path, name: str) -> Any:
        user, password = self.sandbox.identity.snowflake_user, self.sandbox.identity.snowflake_password
        return self.server.datasources.publish(
            TSC.DatasourceItem(self.project.id, name),
            str(file),
            "CreateNew",
            connection_credentials=TSC.ConnectionCredentials(user, password, embed=True),
        )


@pytest.fixture
def place(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    admin, schema = Admin(sandbox.tableau_url), f"S{uuid.uuid4().hex[:12].upper()}"
    admin.set(job_seconds=0.01)
    token, secret = sandbox.new_token()
    for name, value in {**sandbox.env, "TABLEAU_TOKEN_NAME": token, "TABLEAU_TOKEN_SECRET": secret}.items():
        monkeypatch.setenv(name, value)
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS PROBES")
        cursor.execute(f"CREATE SCHEMA PROBES.{schema}")
        cursor.execute(f"CREATE TABLE PROBES.{schema}.T (ID NUMBER(38,0), NAME VARCHAR)")
        cursor.execute(f"INSERT INTO PROBES.{schema}.T VALUES (1, 'a'), (2, 'b')")
        cursor.execute(f"CREATE VIEW PROBES.{schema}.V AS SELECT ID FROM PROBES.{schema}.T")
    with sandbox.tableau() as server:
        project = server.projects.create(TSC.ProjectItem(name=f"probe-{uuid.uuid4().hex}"))
        yield Place(sandbox, admin, server, project, schema, tmp_path)
    admin.clear_faults()
    admin.set(**asdict(Settings()))


@pytest.fixture(scope="module")
def hyper() -> Iterator[Any]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


def extract(place: Place, hyper: Any, name: str, *, increment_key: str | None) -> Any:
    """A published extract of the table."""
    identity = place.sandbox.identity
    source = SnowflakeConnection(
        server=f"{identity.account}.snowflakecomputing.com",
        dbname="PROBES",
        schema=place.schema,
        warehouse="WH",
        role="SYSADMIN",
        username=identity.snowflake_user,
    )
    file, columns = place.folder / f"{name}.tdsx", [Column("ID", "NUMBER(38,0)"), Column("NAME", "VARCHAR")]
    build_tdsx(
        file, columns=columns, snowflake=source, table="T", hyper=hyper, caption=name, increment_key=increment_key
    )
    return place.publish(file, name)


def bare(place: Place, hyper: Any, name: str) -> None:
    """A published Hyper file with one row."""
    file = place.folder / f"{name}.hyper"
    with Connection(hyper, file, CreateMode.CREATE) as connection:
        connection.execute_command('CREATE TABLE "public"."t" AS (SELECT 1 AS "n")')
    place.publish(file, name)


# The table


def test_the_page_in_the_docs_is_the_table_of_the_probe():
    assert DOCS.read_text(encoding="utf-8") == table_text(), "cp tir_dagster/probe/known-doubts.md docs/known-doubts.md"


def test_every_row_of_the_table_is_a_whole_doubt_with_a_key_of_its_own():
    rows = [line for line in table_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(doubts())
    ways = ("read", "scratch", "copy", "snowflake", "table", "snowflake scratch", "by hand: ")
    for doubt in doubts().values():
        assert all((doubt.question, doubt.if_so, doubt.if_not)), doubt.key
        assert doubt.settled_by.startswith(ways), doubt.key


def test_the_json_has_every_key_and_says_how_the_open_ones_are_settled():
    answers = Findings(print).as_dict()["answers"]
    assert list(answers) == list(doubts())
    assert answers["patch.op_is"] == {"answer": None, "detail": "not asked: scratch"}


# Reading only


def test_without_scratch_only_reads(place: Place, hyper: Any):
    extract(place, hyper, "Orders", increment_key="ID")
    place.admin.forget_calls()
    answers = place.answers()
    calls = {(call["method"], call["route"]) for call in place.admin.calls() if call["agent"].startswith("tir_dagster")}
    assert {call for call in calls if call[0] != "GET"} == {("POST", "sign_in"), ("POST", "sign_out")}
    assert {key for key in answers if key.startswith("calls.") and answers[key] is not True} == set()
    assert answers["answers.whole_seconds"] is True
    assert answers["answers.no_such_job"] is True


def test_answers_are_for_people_too_and_tell_no_secret_and_no_name(place: Place, hyper: Any):
    extract(place, hyper, "Orders of Mr Smith", increment_key="ID")
    result = place.run()
    assert (
        "site.run_now: yes\n    Does the site allow refreshes by hand? → Refreshes are started directly."
        in result.stdout
    )
    assert place.run("--snowflake", "--table", f"PROBES.{place.schema}.T").exit_code == 0
    for name in ("TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET", "TABLEAU_SERVER_URL", "SNOWFLAKE_PASSWORD"):
        assert os.environ[name] not in result.stdout
    assert "Smith" not in result.stdout


def test_what_is_forbidden_or_not_so_is_told_as_found(place: Place):
    place.admin.set(run_now=False)
    place.admin.fault("status", status=403, code="403004", path="/subscriptions")
    answers = place.answers()
    assert (answers["site.run_now"], answers["calls.subscriptions"], answers["calls.jobs"]) == (False, False, True)


def test_a_scope_that_a_connected_app_lacks_is_told_for_each_call(place: Place, monkeypatch: pytest.MonkeyPatch):
    identity = place.sandbox.identity
    for name in ("TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TABLEAU_USERNAME", identity.tableau_user)
    for name in ("client_id", "secret_id", "secret_value"):
        monkeypatch.setenv(f"TABLEAU_CONNECTED_APP_{name.upper()}", getattr(identity, f"connected_app_{name}"))
    place.admin.fault("expire_session", path="/webhooks", method="GET")
    result = place.run("--json")
    answers = json.loads(result.stdout)
    assert answers["server"]["signs_in_with"] == "ConnectedApp"
    assert answers["answers"]["calls.webhooks"] == {"answer": False, "detail": "401002"}
    assert answers["answers"]["calls.projects"]["answer"] is True


# With content of its own

DOCUMENTED = {
    "publish.hyper_connection": True,
    "publish.as_job": True,
    "overwrite.keeps_id": True,
    "overwrite.adds_revision": True,
    "overwrite.moves_updated_at": True,
    "overwrite.keeps_tags": False,
    "overwrite.keeps_description": True,
    "overwrite.keeps_certification": True,
    "overwrite.new_connections": True,
    "transfer.download_is_package": True,
    "transfer.ranges": True,
    "transfer.empty_piece": True,
    "patch.replaces_keys": True,
    "patch.update": True,
    "patch.upsert": True,
    "patch.replace": True,
    "patch.all_or_nothing": True,
    "patch.failed_notes": False,
    "patch.null_equals_null": False,
    "patch.op_is": False,
    "patch.request_once": True,
    "patch.request_reused": True,
    "patch.moves_updated_at": True,
    "patch.adds_revision": False,
    "refresh.moves_updated_at": True,
    "refresh.adds_revision": False,
    "refresh.queued_once": True,
    "refresh.notes_rows": True,
    "refresh.full_type": True,
    "increment.type": True,
    "increment.reads_last_again": False,
}


def test_the_answers_are_what_the_stand_in_documents_and_nothing_is_left(place: Place, hyper: Any):
    # Long enough for a second refresh to come while the first one is queued.
    place.admin.set(job_seconds=0.1)
    orders = extract(place, hyper, "Orders", increment_key="ID")
    place.server.jobs.wait_for_job(place.server.datasources.refresh(orders), timeout=60)
    refreshed_at = place.server.datasources.get_by_id(orders.id).updated_at
    for name in (LEFT, NOT_OURS):
        bare(place, hyper, name)
    project = place.project.name
    result = place.run("--scratch", project, "--copy-of", f"{project}/Orders", "--json")
    assert result.exit_code == 0, result.stderr
    answers = {key: answer["answer"] for key, answer in json.loads(result.stdout)["answers"].items()}
    assert {key: answers[key] for key in DOCUMENTED} == DOCUMENTED
    assert f"deleting {LEFT}, left by an earlier probe" in result.stderr
    assert place.names == {"Orders", NOT_OURS}
    assert place.server.datasources.get_by_id(orders.id).updated_at == refreshed_at
    for name in ("TABLEAU_TOKEN_SECRET", "TABLEAU_SERVER_URL", "SNOWFLAKE_PASSWORD"):
        assert os.environ[name] not in result.stdout
    # Every question that is not for hands, and not for other content, has an answer.
    askable = {key for key, doubt in doubts().items() if doubt.settled_by in ("read", "scratch", "copy")}
    # Unless other tests left tasks, there is none to look at.
    assert {key for key in askable if answers[key] is None} <= {"tasks.types"}


def test_a_torn_batch_and_an_extract_without_increments_are_told_as_found(place: Place, hyper: Any):
    extract(place, hyper, "Orders", increment_key=None)
    # The third batch is the one that is to fail.
    place.admin.fault("torn_job", path="tir-probe-", skip=2, actions=1, notes="cut off")
    project = place.project.name
    answers = place.answers("--scratch", project, "--copy-of", f"{project}/Orders")
    assert (answers["patch.all_or_nothing"], answers["patch.replaces_keys"]) == (False, True)
    assert answers["increment.full_if_not_set_up"] is not None
    assert place.names == {"Orders"}


def test_a_refused_question_stays_open_and_the_others_are_asked(place: Place):
    place.admin.fault("status", status=403, code="403004", method="PATCH", path="/data", times=100)
    result = place.run("--scratch", place.project.name, "--json")
    answers = json.loads(result.stdout)["answers"]
    assert answers["patch.replaces_keys"] == {"answer": None, "detail": "403004"}
    assert answers["transfer.ranges"]["answer"] is True
    assert place.names == set()


def test_a_server_that_goes_down_ends_the_probe_and_nothing_is_left(place: Place):
    place.admin.fault("status", status=503, method="POST", path="/fileUploads", times=100)
    result = place.run("--scratch", place.project.name, retry=QUICK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is in trouble" in result.stderr
    assert place.names == set()


def test_what_could_not_be_deleted_is_named_and_deleted_by_the_next_probe(place: Place):
    place.admin.fault("status", status=503, method="PUT", path="/datasources/", times=100)
    place.admin.fault("status", status=403, code="403004", method="DELETE", path="/datasources/")
    result = place.run("--scratch", place.project.name, retry=QUICK)
    (left,) = place.names
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{left} may be left in project {place.project.name!r}: delete it by hand" in result.stderr
    result = place.run("--scratch", place.project.name, retry=QUICK)
    assert f"deleting {left}, left by an earlier probe" in result.stderr
    assert place.names == set()


def test_after_ctrl_c_a_publish_that_is_queued_does_not_stay(place: Place):
    log = place.folder / "log"
    place.admin.fault("slow_job", path="tir-probe-", seconds=2)
    command = [sys.executable, "-m", "tir_dagster.cli.main", "probe-server", "--scratch", place.project.name]
    with log.open("wb") as lines:
        started = subprocess.Popen(command, stdout=lines, stderr=lines, start_new_session=True, env=dict(os.environ))
        try:
            wait_for(lambda: place.admin.faults() == [], "the job that publishes", log=log)
            os.killpg(started.pid, signal.SIGINT)
            assert started.wait(timeout=60) == 130, log.read_text()
        finally:
            started.kill()
            started.wait()
    assert "of this probe" in log.read_text()
    running = ("Pending", "InProgress")
    wait_for(lambda: not any(job.status in running for job in TSC.Pager(place.server.jobs)), "the end of all jobs")
    assert place.names == set()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--copy-of", "a/b"], 2, "also needs --scratch"),
        (["--snowflake-scratch", "A.B.C"], 2, "write DATABASE.SCHEMA"),
        (["--scratch", "no such project"], 1, "There is no project 'no such project'"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_asked(place: Place, options: list[str], code: int, words: str):
    result = place.run(*options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr


# Snowflake


def test_snowflake_answers_as_the_embedded_warehouse_documents(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TABLEAU_SERVER_URL")
    left, schema = "TIR_PROBE_0123456789AB", f"PROBES.{place.schema}"
    with place.sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {schema}.{left} (K NUMBER(38,0))")
        answers = place.answers("--table", f"{schema}.V", "--table", f"{schema}.T", "--snowflake-scratch", schema)
        tables = {row[1] for row in cursor.execute(f"SHOW TABLES IN SCHEMA {schema}").fetchall()}
    documented = {
        "clock_microseconds": True,
        "missing_object": True,
        "future_at": True,
        "before_creation": True,
        "quoted_token": True,
        "untracked": True,
        "view_token": True,
        "view_at": True,
        "noop_update": False,
        "token_on_ddl": False,
        "last_ddl_on_comment": True,
        "last_ddl_on_rows": False,
        "past_has_new_column": True,
    }
    assert {key: answers[f"snowflake.{key}"] for key in documented} == documented
    assert tables == {"T"}
