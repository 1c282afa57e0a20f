"""`tir demo` and `tir dev`, as a new user runs them: on a home of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner, Result

from tir_dagster.cli.main import tir
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SandboxHome
from tir_dagster_tests.processes import free_port, wait_for


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A TIR_HOME without anything in it; whatever was started there is stopped."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIR_HOME", str(folder))
        for name in [
            name
            for name in os.environ
            if name.startswith(("SNOWFLAKE_", "TABLEAU_", "SLACK_", "SERVICENOW_", "TIR_", "DAGSTER_HOME"))
            and name != "TIR_HOME"
        ]:
            patch.delenv(name)
        # What the demo sets is gone afterwards, too.
        kept = dict(os.environ)
        try:
            yield folder
        finally:
            processes.stop(SandboxHome(folder / "sandbox"))
            os.environ.clear()
            os.environ.update(kept)


@pytest.fixture(scope="module")
def demo(home) -> Result:
    """The demo, run once for all tests that look at what it printed or left."""
    result = CliRunner().invoke(tir, ["demo", "--rows", "2000"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_the_demo_ends_equal_and_shows_where_tableaus_own_increment_is_wrong(demo):
    assert re.search(r"2\. Full load: .*\n +2,000 rows in [\d.]+ s \(FIRST_LOAD\)", demo.output), demo.output
    steps = (
        "lands in the bucket",
        "order_files_arrival saw it; loaded",
        "orders_source saw",
        "orders_refresh published",
    )
    timed = ".*".join(rf" [\d.]+ s  [^\n]*{step}" for step in steps)
    assert re.search(timed, demo.output, re.DOTALL), "by sensors, from the file on"
    assert re.search(r"mydatasource  .* rows, +0 of them wrong or missing: equal in every slice", demo.output)
    twin = re.search(r"mydatasource_by_tableau .* rows, +([\d,]+) of them wrong or missing: wrong in", demo.output)
    assert twin is not None, demo.output
    assert int(twin[1].replace(",", "")) > 0
    assert re.search(r"2\d{3}-\d\d +\d+ purged, \d+ appended", demo.output), "keys by slice"
    assert re.search(r"seconds +[\d.]+ +[\d.]+ +[\d.]+x", demo.output), "beside a full refresh"
    assert re.search(r"mydatasource_by_server  .* rows, +0 of them wrong or missing: equal in every slice", demo.output)
    assert re.search(r"server +[\d.]+ s +published without [\d,]+ rows from 20\d\d-\d\d-\d\d on", demo.output)
    assert re.search(r"#mychannel:\n +\| orders: refreshed \(incremental\)\n", demo.output), "people were told"


def test_dev_shows_the_extract_and_the_history_of_the_demo(demo, tmp_path: Path):
    port = free_port()
    command = [sys.executable, "-m", "tir_dagster.cli.main", "dev", "--port", str(port)]
    with (tmp_path / "dev.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ})
    try:
        nodes = wait_for(
            lambda: asset_nodes(port, running), "the page", seconds=180, pause=0.5, log=tmp_path / "dev.log"
        )
    finally:
        os.killpg(running.pid, signal.SIGINT)
        try:
            running.wait(timeout=60)
        finally:
            # `dagster dev` may leave its children behind; they are in our group.
            if group_lives(running.pid):
                os.killpg(running.pid, signal.SIGKILL)
    assert "Slack and ServiceNow: http://127.0.0.1:" in (tmp_path / "dev.log").read_text()
    keys = {tuple(node["assetKey"]["path"]): node for node in nodes}
    assert set(keys) == {
        (extract, name)
        for extract in ("orders", "orders_by_server")
        for name in ("source_table", "changed_keys", "purged_extract", "published_datasource")
    } | {("order_files", "landed_files"), ("order_files", "source_table")}
    assert keys["orders", "published_datasource"]["assetMaterializations"], "what the demo published is in the history"


@pytest.mark.long
def test_the_failing_demo_opens_an_incident_and_resolves_it(demo):
    done = CliRunner().invoke(tir, ["demo", "--fail", "--rows", "1000"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"#mychannel:\n +\| orders: the refresh failed\n", done.output)
    assert "the published datasource is unchanged, data as of" in done.output
    assert re.search(r"INC\d+ for mygroup: orders: the refresh failed \(open\)", done.output)
    assert "in the thread of the failure" in done.output
    assert re.search(r"INC\d+ for mygroup: orders: the refresh failed \(resolved, ", done.output)


QUERY = "{ assetNodes { assetKey { path } assetMaterializations(limit: 1) { runId } } }"


def asset_nodes(port: int, running: subprocess.Popen) -> list[dict]:
    assert running.poll() is None, "it ended"
    try:
        answer = requests.post(f"http://127.0.0.1:{port}/graphql", json={"query": QUERY}, timeout=30).json()
    except requests.RequestException:
        return []
    return (answer.get("data") or {}).get("assetNodes", [])


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
