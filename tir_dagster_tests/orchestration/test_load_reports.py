"""The examples of docs/loading.md for loads done elsewhere, run against Dagster's own webserver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import requests

from tir_dagster.orchestration.sensing.reported import newest_report
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.processes import answers, free_port, wait_for

DOCS = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")
TABLE = TableName("MYDB", "MYSCHEMA", "MYTABLE")
SOURCE = dg.AssetKey(["orders", "source_table"])


def example(after: str) -> str:
    """The indented block after this line of the docs."""
    block = DOCS.partition(after)[2].lstrip("\n")
    lines = re.match(r"(?:    .*\n|\n)+", block)
    assert lines, f"docs/loading.md has no example after {after!r}"
    return re.sub(r"^    ", "", lines[0], flags=re.MULTILINE).strip() + "\n"


@pytest.fixture(scope="module")
def webserver(tmp_path_factory):
    """Dagster's webserver with a history of its own; it needs no definitions to take reports."""
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    (home / "empty.py").write_text("import dagster as dg\n\ndefs = dg.Definitions()\n", encoding="utf-8")
    port = free_port()
    command = [str(Path(sys.executable).with_name("dagster-webserver")), "-f", "empty.py", "-p", str(port)]
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=home, env={**os.environ, "DAGSTER_HOME": str(home)}, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(url), "the webserver", seconds=120, pause=0.2, log=home / "log")
        with dg.DagsterInstance.from_config(str(home)) as instance:
            yield url, instance
    finally:
        server.terminate()
        server.wait(30)


def latest(instance: dg.DagsterInstance) -> dict:
    event = instance.get_latest_materialization_event(SOURCE).asset_materialization
    return {name: entry.value for name, entry in event.metadata.items()}


def test_the_last_lines_of_a_glue_job_report_a_hint(webserver):
    url, instance = webserver
    script = example("The last lines of a Glue job, or of any Python task in Airflow:\n")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "DAGSTER_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "200", done.stderr
    assert latest(instance)["tir/hint"]["scope"] == {"equal": {"ORDER_DATE": "2026-01-05"}}
    assert newest_report(instance, [TABLE], since=datetime.now(UTC) - timedelta(minutes=5))


def test_the_task_of_a_step_function_reports_a_hint(webserver):
    """What the service sends for such a state: the method, headers and body to the endpoint."""
    url, instance = webserver
    state = json.loads(example("A state of Step Functions, after the state that loads:\n"))
    asked = state["Parameters"]
    assert state["Resource"] == "arn:aws:states:::http:invoke"
    path = asked["ApiEndpoint"].removeprefix("https://dagster.example.com")
    answer = requests.request(
        asked["Method"], url + path, headers=asked["Headers"], data=json.dumps(asked["RequestBody"]), timeout=30
    )
    assert answer.ok, answer.text
    assert latest(instance)["tir/hint"] == asked["RequestBody"]["metadata"]["tir/hint"]


def test_a_load_without_a_hint_is_reported_by_one_request(webserver):
    url, instance = webserver
    command = example("A dbt job without a hint, from a shell:\n")
    done = subprocess.run(command, shell=True, env={**os.environ, "DAGSTER_URL": url}, timeout=60, check=False)
    assert done.returncode == 0
    assert "tir/hint" not in latest(instance)
