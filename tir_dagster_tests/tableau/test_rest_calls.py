"""The REST calls that the product says it makes are those that it makes, and docs/rest-calls.md tells them as they are."""

from __future__ import annotations

import datetime as dt
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.cli.setup.doctor import is_administrator
from tir_dagster.probe.doubts import Findings
from tir_dagster.probe.scratch import ScratchDatasource
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, look_for_datasource, reread
from tir_dagster.tableau.jobs import cancel_job, wait_for_job
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.refreshes import start_incremental_refresh, start_refresh
from tir_dagster.tableau.settings import LostConnection, repair_connection
from tir_dagster.tableau.tasks import find_schedule, move_schedule
from tir_dagster.tableau.transfer import download
from tir_dagster.tableau.webhooks import our_webhooks, register_webhooks, remove_webhooks
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.rest_calls import COMMAND, FILE, PLAYED, PLAYED_ALONE, PRODUCT, made, served, text
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tableau.helpers import put_on_schedule


def test_the_table_in_the_docs_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), f"run `{COMMAND}`"


def test_every_call_of_the_product_is_served_and_fault_tested() -> None:
    assert made() == PLAYED_ALONE.union(*PLAYED.values())
    assert made() <= served().keys()


# What no refresh does unless it must


@dataclass(frozen=True)
class Stage:
    """The datasource, and the product's client, which signs in for each scene."""

    access: TableauAccess
    retry: RetryPolicy
    orders: Orders
    found: FoundDatasource
    admin: Admin

    @contextmanager
    def client(self) -> Iterator[TableauClient]:
        with TableauClient(self.access, retry=self.retry, poll=Backoff(0.02, 0.05)) as client:
            yield client


def stop_a_job(stage: Stage) -> None:
    stage.admin.fault("slow_job", path=stage.found.id, seconds=30)
    with stage.client() as client:
        started = start_refresh(client, stage.found, incremental=False)
        cancel_job(client, started.job_id, what="a refresh")


def run_a_task(stage: Stage) -> None:
    stage.admin.set(rest_version="3.24")
    with stage.client() as client:
        started = start_incremental_refresh(client, stage.found)
        wait_for_job(client, started.job_id, what="a refresh")


def move_the_schedule(stage: Stage) -> None:
    slot = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).replace(second=0, microsecond=0)
    with stage.client() as client:
        assert move_schedule(client, find_schedule(client, stage.found), slot).next_run_at == slot


def use_webhooks(stage: Stage) -> None:
    label = stage.orders.project.id[:8]
    with stage.client() as client:
        made = register_webhooks(client, label, "https://hooks.example.com/secret")
        assert remove_webhooks(client, label) == made
        assert our_webhooks(client, label) == []


def fetch_a_revision(stage: Stage) -> None:
    stage.orders.publish_by_others()
    with tempfile.TemporaryDirectory() as folder, stage.client() as client:
        now = reread(client, stage.found)
        assert now is not None
        assert download(client, now, Path(folder) / "old.tdsx", revision=1).is_file()


def mend_a_connection(stage: Stage) -> None:
    (wanted,) = stage.found.connections
    lost = LostConnection(wanted, wanted, stage.orders.credential)
    with stage.client() as client:
        client.call(partial(repair_connection, stage.found, lost), doing="repair a connection")


def delete_what_a_probe_left(stage: Stage) -> None:
    project, name = stage.orders.project, f"tir-probe-{'0' * 12}"
    with tempfile.TemporaryDirectory() as folder, stage.client() as client:
        publish(client, stage.orders.packages / "ours.tdsx", project=project, name=name)
        with ScratchDatasource(client, project, Findings(print), Path(folder)).deleted():
            assert look_for_datasource(client, project=project, name=name) is None


def read_the_own_role(stage: Stage) -> None:
    with stage.client() as client:
        assert is_administrator(client) is True


SCENES: dict[Callable[[Stage], None], frozenset[str]] = {
    stop_a_job: frozenset({"cancel_job"}),
    run_a_task: frozenset({"run_task"}),
    move_the_schedule: frozenset({"list_schedules", "update_schedule", "list_extracts"}),
    fetch_a_revision: frozenset({"download_revision"}),
    mend_a_connection: frozenset({"update_connection"}),
    delete_what_a_probe_left: frozenset({"delete_datasource"}),
    read_the_own_role: frozenset({"get_user"}),
    use_webhooks: frozenset({"list_webhooks", "create_webhook", "delete_webhook"}),
}


def test_the_scenes_are_those_that_the_table_names() -> None:
    assert frozenset().union(*SCENES.values()) == PLAYED_ALONE


@pytest.fixture
def stage(sandbox: Sandbox, quick: RetryPolicy, orders: Orders, admin: Admin) -> Stage:
    admin.set(job_seconds=0.01)
    found = orders.create(connections=[orders.credential])
    put_on_schedule(orders, found, f"increments of {orders.project.name}")
    # Not the token of the other client here: they would share a session, and one version.
    access = TableauAccess(sandbox.tableau_url, sandbox.identity.site, TableauToken(*sandbox.new_token()))
    return Stage(access, quick, orders, found, admin)


@pytest.mark.parametrize("play", SCENES, ids=lambda play: play.__name__)
def test_a_call_that_no_refresh_makes_is_made_and_survives_a_fault(stage: Stage, play: Callable[[Stage], None]) -> None:
    stage.admin.forget_calls()
    play(stage)
    assert SCENES[play] <= routes(stage.admin)
    for name in sorted(SCENES[play]):
        one = served()[name]
        path = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(one.path))
        stage.admin.fault("status", status=429, retry_after=0, method=one.method, path=f"^{path}$")
        stage.admin.forget_calls()
        play(stage)
        struck = [call for call in stage.admin.calls() if call["fault"]]
        assert [(call["method"], call["status"]) for call in struck] == [(one.method, 429)], name


def test_a_webhook_whose_removal_was_not_answered_is_removed(stage: Stage) -> None:
    stage.admin.fault("cut", method="DELETE", path="/webhooks/", when="after")
    use_webhooks(stage)
    assert stage.admin.faults() == []


def routes(admin: Admin) -> set[str]:
    """What the product asked for; what the test's own client did is left out."""
    calls: list[dict[str, Any]] = admin.calls()
    return {call["route"] for call in calls if call["agent"].startswith(f"{PRODUCT}/")}
