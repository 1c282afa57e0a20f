"""Waiting for jobs, starting refreshes, joining those that run."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.jobs import (
    FinishedJob,
    JobCancelledError,
    JobFailedError,
    JobTimeoutError,
    JobVanishedError,
    cancel_job,
    changes_since,
    wait_for_job,
)
from tir_dagster.tableau.publishing import ByJob
from tir_dagster.tableau.refreshes import start_refresh
from tir_dagster.tableau.tasks import refresh_tasks
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tableau.helpers import PASSING


@pytest.fixture
def found(orders: Orders) -> FoundDatasource:
    """A datasource that the server can refresh."""
    return orders.create(connections=[orders.credential])


def refreshed(client: TableauClient, found: FoundDatasource, *, incremental: bool = False) -> FinishedJob:
    started = start_refresh(client, found, incremental=incremental)
    return wait_for_job(client, started.job_id, what="refresh of Orders")


def kind_of(orders: Orders, job: FinishedJob) -> str:
    """What the server ran, by its own list."""
    return next(item.type for item in orders.others.jobs.filter(title="Orders") if item.id == job.id)


def test_a_refresh_runs_to_its_end_and_moves_the_version(orders: Orders, found: FoundDatasource) -> None:
    refreshed(orders.client, found)
    assert server_version(orders.now()) != server_version(found)
    assert orders.now().revision == found.revision, "a refresh is no revision"


def test_an_incremental_refresh_is_asked_for_as_one(orders: Orders, found: FoundDatasource) -> None:
    full = refreshed(orders.client, found)
    increment = refreshed(orders.client, found, incremental=True)
    assert [kind_of(orders, job) for job in (full, increment)] == ["refresh_extracts", "increment_extracts"]


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("path", ["/refresh$", r"/jobs/[^/]+$"])
def test_a_refresh_survives_what_passes(
    orders: Orders, found: FoundDatasource, admin: Admin, path: str, fault: dict[str, Any]
) -> None:
    admin.set(job_seconds=0.05)
    admin.fault(path=path, **fault)
    refreshed(orders.client, found)
    assert admin.faults() == []


def test_a_failed_job_tells_its_notes(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("fail_job", path="/Orders$", notes="The warehouse is suspended.")
    with pytest.raises(
        JobFailedError, match=r"\(refresh of Orders\) failed on the server: The warehouse is suspended\."
    ):
        refreshed(orders.client, found)


def test_a_failed_job_without_notes_says_that_the_server_gives_no_reason(orders: Orders, packages: Path) -> None:
    broken = packages / "broken.tdsx"
    broken.write_bytes(b"PK\x03\x04 nothing")
    item = TSC.DatasourceItem(orders.project.id, "Broken")
    job = orders.others.datasources.publish(item, str(broken), "CreateNew", as_job=True)
    with pytest.raises(JobFailedError, match=r"failed on the server, which gives no reason over REST\.") as caught:
        wait_for_job(orders.client, job.id, what="publish of Broken")
    assert "note" not in str(caught.value)


def test_a_job_cancelled_on_the_server_is_told(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("slow_job", path="/Orders$", seconds=30)
    started = start_refresh(orders.client, found, incremental=False)
    orders.others.jobs.cancel(started.job_id)
    with pytest.raises(JobCancelledError, match="was cancelled on the server: Job canceled by a user"):
        wait_for_job(orders.client, started.job_id, what="refresh of Orders")


@pytest.mark.parametrize("code", ["404031", "400031"])
def test_a_job_that_the_server_has_forgotten_is_told(
    orders: Orders, found: FoundDatasource, admin: Admin, code: str
) -> None:
    admin.fault("vanish_job", path="/jobs/", code=code)
    with pytest.raises(JobVanishedError, match="Look at the data"):
        refreshed(orders.client, found)


def test_a_job_that_takes_too_long_is_told_and_goes_on(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("slow_job", path="/Orders$", seconds=30)
    started = start_refresh(orders.client, found, incremental=False)
    with pytest.raises(JobTimeoutError, match="still runs after"):
        wait_for_job(orders.client, started.job_id, what="refresh of Orders", timeout=0.1)
    assert orders.others.jobs.get_by_id(started.job_id).completed_at is None
    orders.others.jobs.cancel(started.job_id)


def test_the_wait_backs_off_and_ends_in_time(
    access: TableauAccess, orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.fault("slow_job", path="/Orders$", seconds=30)
    started, now, naps = start_refresh(orders.client, found, incremental=False), [0.0], []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    fake = RetryPolicy(sleep=sleep, clock=lambda: now[0], chance=lambda: 0.0)
    with (
        TableauClient(access, retry=fake, poll=Backoff(1, 4)) as client,
        pytest.raises(JobTimeoutError, match="after 12 s"),
    ):
        wait_for_job(client, started.job_id, what="refresh", timeout=12)
    assert naps == [1, 2, 4, 4, 1]
    orders.others.jobs.cancel(started.job_id)


def test_polls_begin_short_and_grow_slowly_except_where_tableau_cloud_asks_for_patience(access: TableauAccess) -> None:
    pauses = [TableauClient(access).poll.seconds(number) for number in range(1, 200)]
    waited = list(itertools.accumulate(pauses))
    assert pauses[0] <= 0.1
    assert max(pauses) == 30.0
    late = [pause for pause, since in zip(pauses[10:], waited[9:], strict=False) if pause > 0.15 * since]
    assert not late, "a job is noticed soon after its end, however long it ran"
    cloud = TableauAccess("https://eu-1.online.tableau.com", "site", access.identity)
    assert [TableauClient(cloud).poll.seconds(1, chance=chance) for chance in (0.0, 1.0)] == [5.0, 5.0]


def test_the_time_that_a_job_takes_is_counted_as_the_servers(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.set(job_seconds=0.3)
    before = orders.client.waited_seconds
    refreshed(orders.client, found)
    assert orders.client.waited_seconds - before >= 0.3


def test_a_wait_within_a_wait_counts_once(access: TableauAccess, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    client = TableauClient(access)
    with client.waiting(), client.waiting():
        pass
    assert client.waited_seconds == 10.0


def test_a_server_that_restarts_meanwhile_does_not_end_the_wait(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.set(job_seconds=0.05)
    started = start_refresh(orders.client, found, incremental=False)
    admin.fault("cut", when="before", path=rf"/jobs/{started.job_id}$", times=7)
    assert orders.client.retry.tries < 7, "one look gives up earlier than that"
    wait_for_job(orders.client, started.job_id, what="refresh of Orders")
    assert admin.faults() == []


def test_a_server_that_stays_out_of_reach_ends_the_wait(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    started = start_refresh(orders.client, found, incremental=False)
    admin.fault("cut", when="before", path=rf"/jobs/{started.job_id}$", times=99)
    with pytest.raises(DatasourceError, match="is in trouble"):
        wait_for_job(orders.client, started.job_id, what="refresh of Orders", out_of_reach=0)


def test_a_job_is_cancelled_when_asked(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("slow_job", path="/Orders$", seconds=30)
    started = start_refresh(orders.client, found, incremental=False)
    cancel_job(orders.client, started.job_id, what="refresh of Orders")
    assert orders.others.jobs.get_by_id(started.job_id).finish_code == TSC.JobItem.FinishCode.Cancelled


def test_refreshes_change_a_datasource_by_jobs_and_publishes_show_in_its_version(
    orders: Orders, found: FoundDatasource, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also where the server tells of which datasource a job is that publishes.
    monkeypatch.setattr("tir_dagster.tableau.jobs.is_job_of", lambda *_: True)
    taken: list[str] = []
    before = orders.overwrite(connections=[orders.credential], by_job=ByJob(0, 30.0, taken.append))
    refresh = refreshed(orders.client, before)
    listed = {job.id for job in orders.others.jobs.filter(title="Orders")}
    assert listed >= {*taken, refresh.id}
    since = datetime(2025, 1, 1, tzinfo=UTC)
    known = [job.id for job in orders.others.jobs.filter(title="Orders") if job.id not in (*taken, refresh.id)]
    assert changes_since(orders.client, found, since, own=known) == (refresh.id,)


def test_a_refresh_that_is_queued_already_is_joined(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("slow_job", path="/Orders$", seconds=0.3)
    theirs = orders.others.datasources.refresh(found.id)
    assert theirs is not None
    started = start_refresh(orders.client, found, incremental=False)
    assert (started.job_id, started.joined) == (theirs.id, True)
    wait_for_job(orders.client, started.job_id, what="refresh of Orders")


def test_a_queued_refresh_that_cannot_be_found_is_told(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("status", path="/refresh$", status=409, code="409093", times=9)
    with pytest.raises(DatasourceError, match="has a refresh in its queue already, and it is not in the list"):
        start_refresh(orders.client, found, incremental=False)


def test_a_queued_refresh_of_which_we_may_see_no_list_is_told(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.fault("status", path="/refresh$", status=409, code="409093", times=9)
    admin.fault("status", path="/jobs$", status=403, code="403004", times=9)
    with pytest.raises(DatasourceError, match="only an administrator's token sees the jobs of others"):
        start_refresh(orders.client, found, incremental=False)


def test_a_server_without_jobs_is_not_taken_for_one_that_forgot(
    orders: Orders, found: FoundDatasource, admin: Admin, quick: RetryPolicy, sandbox: Sandbox
) -> None:
    admin.set(rest_version="2.5")
    with (
        older_client(sandbox, quick) as client,
        pytest.raises(RefusedError, match=r"refused \(404950\), its REST version .* It takes a newer Tableau Server"),
    ):
        wait_for_job(client, "4711", what="refresh of Orders")


def test_a_queued_refresh_that_has_just_ended_is_followed_by_our_own(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.fault("status", path="/refresh$", status=409, code="409093")
    assert not start_refresh(orders.client, found, incremental=False).joined


def test_an_older_server_is_never_asked_for_an_increment_it_would_make_a_full_refresh(
    orders: Orders, found: FoundDatasource, admin: Admin, quick: RetryPolicy, sandbox: Sandbox
) -> None:
    admin.set(rest_version="3.24")
    with (
        older_client(sandbox, quick) as client,
        pytest.raises(DatasourceError, match=r"speaks REST 3\.24 .* needs 3\.25"),
    ):
        start_refresh(client, found, incremental=True)


def test_an_older_server_runs_an_incremental_task_that_is_set_up(
    orders: Orders, found: FoundDatasource, admin: Admin, quick: RetryPolicy, sandbox: Sandbox
) -> None:
    target = TSC.models.target.Target(found.id, "datasource")
    for kind in ("FullRefresh", "IncrementalRefresh"):
        task = TSC.TaskItem("", kind, 50, target=target)
        orders.others.tasks.create(task)
    admin.set(rest_version="3.24")
    with older_client(sandbox, quick) as client:
        assert sorted(task.incremental for task in refresh_tasks(client, found)) == [False, True]
        full, increment = refreshed(client, found), refreshed(client, found, incremental=True)
    admin.set(rest_version="3.26")
    assert [kind_of(orders, job) for job in (full, increment)] == ["refresh_extracts", "increment_extracts"]


def older_client(sandbox: Sandbox, quick: RetryPolicy) -> TableauClient:
    """A client that signs in now, and so learns the server's version now."""
    token = TableauToken(*sandbox.new_token())
    access = TableauAccess(sandbox.tableau_url, sandbox.identity.site, token)
    return TableauClient(access, retry=quick, poll=Backoff(0.02, 0.05))
