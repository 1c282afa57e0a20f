"""Airflow's Tableau operator and sensor refresh a datasource of the sandbox."""

from __future__ import annotations

import datetime as dt
import json
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jwt
import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster_tests.clients.conftest import ROOT, client_environment, run_client
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin

pytestmark = pytest.mark.client

REQUIREMENTS = ("apache-airflow==3.3.2", "apache-airflow-providers-tableau==5.7.1")
REFRESH = {
    "task": "TableauOperator",
    "resource": "datasources",
    "method": "refresh",
    "find": "mydatasource",
    "match_with": "name",
    "check_interval": 0.1,
}
SENSOR = {"task": "TableauJobStatusSensor"}

SPEC = """
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: 2024-12}
    changes: {watermark: UPDATED_AT, look_back: 10 minutes}
    datasource:
      project: myproject
      name: orders of Airflow
      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
"""


class Airflow:
    """Airflow's tasks, with connections from the environment, as a deployment may have them."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._programs = client_environment("airflow", *REQUIREMENTS)

    def run(self, *tasks: dict[str, Any], token: Path | None = None) -> list[dict[str, Any]]:
        """What became of each task; the connection is by user and password, or by a file with a token."""
        identity = self._sandbox.identity
        extra: dict[str, str] = {"site_id": identity.site}
        connection: dict[str, Any] = {"conn_type": "tableau", "host": self._sandbox.tableau_url, "extra": extra}
        if token is not None:
            extra.update(auth="jwt", jwt_file=str(token))
        else:
            connection.update(login=identity.tableau_user, password=identity.tableau_password)
        env = {"AIRFLOW_HOME": str(self._folder), "AIRFLOW_CONN_TABLEAU_DEFAULT": json.dumps(connection)}
        script = Path(__file__).with_name("airflow_tasks.py")
        done = run_client(self._programs / "python", script, json.dumps(tasks), env=env, folder=self._folder)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("OUTCOMES "))
        return json.loads(line.removeprefix("OUTCOMES "))


@pytest.fixture
def airflow(seeded: Sandbox, tmp_path: Path) -> Airflow:
    return Airflow(seeded, tmp_path)


@pytest.fixture
def admin(seeded: Sandbox) -> Iterator[Admin]:
    admin = Admin(seeded.tableau_url)
    yield admin
    admin.clear_faults()
    admin.set(**asdict(Settings()))


def job(sandbox: Sandbox, job_id: str) -> Any:
    with sandbox.tableau() as server:
        return server.jobs.get_by_id(job_id)


def test_the_operator_finds_a_datasource_refreshes_it_and_waits(airflow: Airflow, seeded: Sandbox) -> None:
    with seeded.tableau() as server:
        (source,) = server.datasources.filter(name=REFRESH["find"])
        by_id = {**REFRESH, "find": source.id, "match_with": "id"}
        outcomes = airflow.run(REFRESH, by_id, {**REFRESH, "incremental_refresh": True})
        jobs = [server.jobs.get_by_id(outcome["result"]) for outcome in outcomes]
        kinds = {job.id: job.type for job in TSC.Pager(server.jobs)}
    assert [(kinds[job.id], job.finish_code) for job in jobs] == [
        ("refresh_extracts", 0),
        ("refresh_extracts", 0),
        ("increment_extracts", 0),
    ]


def test_it_signs_in_by_a_connected_apps_token_too(airflow: Airflow, seeded: Sandbox, tmp_path: Path) -> None:
    identity = seeded.identity
    claims = {
        "iss": identity.connected_app_client_id,
        "exp": dt.datetime.now(dt.UTC) + dt.timedelta(minutes=5),
        "jti": str(uuid.uuid4()),
        "aud": "tableau",
        "sub": identity.tableau_user,
        "scp": ["tableau:content:read", "tableau:tasks:run", "tableau:jobs:read"],
    }
    headers = {"kid": identity.connected_app_secret_id, "iss": identity.connected_app_client_id}
    token = tmp_path / "token.jwt"
    token.write_text(jwt.encode(claims, identity.connected_app_secret_value, algorithm="HS256", headers=headers))
    (done,) = airflow.run(REFRESH, token=token)
    assert job(seeded, done["result"]).finish_code == 0
    # A token opens one session: the file must be written anew for every task.
    (refused,) = airflow.run(REFRESH, token=token)
    assert refused["error"] == "FailedSignInError"


def test_the_sensor_waits_for_the_job_that_an_operator_started(airflow: Airflow, seeded: Sandbox) -> None:
    started, watched = airflow.run({**REFRESH, "blocking_refresh": False}, SENSOR)
    assert "error" not in watched
    assert job(seeded, started["result"]).finish_code == 0


def test_a_failed_refresh_fails_the_operator_and_the_sensor(airflow: Airflow, admin: Admin) -> None:
    admin.fault("fail_job", path="mydatasource", notes="the warehouse is closed", times=2)
    blocking, started, watched = airflow.run(REFRESH, {**REFRESH, "blocking_refresh": False}, SENSOR)
    assert (blocking["error"], "result" in started, watched["error"]) == (
        "TableauJobFailedException",
        True,
        "TableauJobFailedException",
    )


def test_a_datasource_or_workbook_that_is_not_there_is_told_by_name(airflow: Airflow) -> None:
    outcomes = airflow.run({**REFRESH, "find": "nothing"}, {**REFRESH, "resource": "workbooks", "find": "nothing"})
    assert [outcome["message"] for outcome in outcomes] == [
        f"{resource} with name nothing not found!" for resource in ("datasources", "workbooks")
    ]


def test_a_bash_task_refreshes_an_extract_by_tir_and_fails_with_it(
    airflow: Airflow, seeded: Sandbox, tmp_path: Path
) -> None:
    specs = tmp_path / "extracts.yaml"
    specs.write_text(SPEC, encoding="utf-8")
    # The product's own programs and modules: Airflow's environment has neither.
    variables = {**seeded.env, "TIR_HOME": str(tmp_path / "tir"), "TIR_SPECS": str(specs), "PYTHONPATH": str(ROOT)}
    tir = Path(sys.executable).with_name("tir")
    refresh = {"task": "BashOperator", "bash_command": f"{tir} refresh orders", "env": variables, "append_env": True}
    done, unknown = airflow.run(refresh, {**refresh, "bash_command": f"{tir} refresh nothing"})
    assert "error" not in done, done
    with seeded.tableau() as server:
        (published,) = server.datasources.filter(name="orders of Airflow")
        server.datasources.delete(published.id)
    assert unknown["message"].startswith("Bash command failed.")
