"""Incremental refreshes on new, old and very old servers; by schedules that really run; and never a full one instead."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version
from tir_dagster.tableau.jobs import JobFailedError, JobTimeoutError, wait_for_job
from tir_dagster.tableau.refreshes import (
    FullRefreshError,
    Route,
    Way,
    find_route,
    start_incremental_refresh,
    start_refresh,
)
from tir_dagster.tableau.tasks import (
    RunState,
    find_schedule,
    move_schedule,
    next_slot,
    scheduled_refreshes,
    scheduled_run,
    soonest_slot,
    wait_for_scheduled_run,
)
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tableau.helpers import kinds, put_on_schedule

WHAT = "refresh of Orders"
LONG = 30  # seconds, more than any test waits


@pytest.fixture
def found(orders: Orders) -> FoundDatasource:
    """A datasource that the server can refresh, refreshed once."""
    created = orders.create(connections=[orders.credential])
    wait_for_job(orders.client, start_refresh(orders.client, created, incremental=False).job_id, what=WHAT)
    return orders.now()


@pytest.fixture
def speaking(sandbox: Sandbox, quick: RetryPolicy, admin: Admin) -> Iterator[Callable[[str], TableauClient]]:
    """A client of the server as it was when it spoke that version."""
    with ExitStack() as stack:

        def sign_in(version: str) -> TableauClient:
            admin.set(rest_version=version)
            access = TableauAccess(sandbox.tableau_url, sandbox.identity.site, TableauToken(*sandbox.new_token()))
            return stack.enter_context(TableauClient(access, retry=quick, poll=Backoff(0.02, 0.05)))

        yield sign_in


@pytest.fixture
def schedule(orders: Orders, found: FoundDatasource) -> Any:
    """A schedule of its own for the datasource's incremental task."""
    return put_on_schedule(orders, found, f"increments of {orders.project.name}")


def test_a_new_server_is_asked_directly(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    assert find_route(orders.client, found) == Route(Way.DIRECT)
    started = start_incremental_refresh(orders.client, found)
    assert (started.joined, started.incremental) == (False, True)
    wait_for_job(orders.client, started.job_id, what=WHAT)
    assert kinds(admin, orders)[0] == "increment_extracts"


def test_an_older_server_runs_the_incremental_task(
    orders: Orders, found: FoundDatasource, schedule: Any, speaking: Any, admin: Admin
) -> None:
    put_on_schedule(orders, found, f"nights of {orders.project.name}", incremental=False)
    client = speaking("3.24")
    route = find_route(client, found)
    assert route.task is not None
    assert (route.way, route.task.incremental, route.task.schedule_id) == (Way.TASK, True, schedule.id)
    started = start_incremental_refresh(client, found)
    wait_for_job(client, started.job_id, what=WHAT)
    assert started.incremental is True
    assert kinds(admin, orders)[0] == "increment_extracts"


def test_an_older_server_without_an_incremental_task_is_left_alone(
    orders: Orders, found: FoundDatasource, speaking: Any, admin: Admin
) -> None:
    put_on_schedule(orders, found, f"nights of {orders.project.name}", incremental=False)
    client = speaking("3.24")
    with pytest.raises(DatasourceError, match=r"no incremental refresh task\. Open the datasource on the server"):
        find_route(client, found)
    with pytest.raises(DatasourceError, match="would refresh everything instead"):
        start_incremental_refresh(client, found)
    assert kinds(admin, orders) == ["refresh_extracts"], "only the first one, of the fixture"


def test_a_full_refresh_begun_instead_is_stopped_and_told(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("slow_job", path=found.id, seconds=LONG)
    admin.set(ignore_incremental=True)
    with pytest.raises(FullRefreshError, match=r"began a full refresh .* was cancelled") as error:
        start_incremental_refresh(orders.client, found)
    # By its id: other tests' datasources have this name, too, and jobs of the same second.
    (stopped,) = [job for job in orders.others.jobs.filter(title="Orders") if f"job {job.id} was" in str(error.value)]
    assert (stopped.type, stopped.status) == ("refresh_extracts", "Cancelled")


@pytest.mark.parametrize("incremental", [True, False])
def test_a_running_refresh_is_joined_and_its_kind_told(
    orders: Orders, found: FoundDatasource, admin: Admin, *, incremental: bool
) -> None:
    admin.fault("slow_job", path=found.id, seconds=0.3)
    theirs = orders.others.datasources.refresh(found.id, incremental)
    started = start_incremental_refresh(orders.client, found)
    assert theirs is not None
    assert (started.job_id, started.joined, started.incremental) == (theirs.id, True, incremental)
    wait_for_job(orders.client, started.job_id, what=WHAT)


def test_a_site_that_forbids_runs_by_hand_leaves_the_schedule(
    orders: Orders, found: FoundDatasource, schedule: Any, admin: Admin
) -> None:
    admin.set(run_now=False)
    assert find_route(orders.client, found).way is Way.SCHEDULE


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("at", "zone", "now", "slot"),
    [
        (dt.time(6, 30), "UTC", "2024-01-01T06:29:00+00:00", "2024-01-01T06:30:00+00:00"),
        (dt.time(6, 30), "UTC", "2024-01-01T06:30:00+00:00", "2024-01-02T06:30:00+00:00"),
        (dt.time(0, 30), BERLIN, "2024-01-01T23:00:00+00:00", "2024-01-01T23:30:00+00:00"),
        (dt.time(6, 30), BERLIN, "2024-03-30T12:00:00+00:00", "2024-03-31T04:30:00+00:00"),
        (dt.time(6, 30), BERLIN, "2024-10-26T12:00:00+00:00", "2024-10-27T05:30:00+00:00"),
        (dt.time(2, 30), BERLIN, "2024-03-30T12:00:00+00:00", "2024-03-31T01:30:00+00:00"),
    ],
)
def test_the_next_slot_is_by_the_clocks_of_its_zone(at: dt.time, zone: str, now: str, slot: str) -> None:
    assert next_slot(at, zone, now=dt.datetime.fromisoformat(now)) == dt.datetime.fromisoformat(slot)


@pytest.mark.parametrize(
    ("now", "slot"),
    [("12:00:00", "12:05:00"), ("12:03:59", "12:05:00"), ("12:04:01", "12:10:00"), ("23:58:00", "00:00:00")],
)
def test_the_soonest_slot_leaves_time_to_tell_the_server(now: str, slot: str) -> None:
    found = soonest_slot(dt.datetime.fromisoformat(f"2024-01-01T{now}+00:00"))
    assert f"{found:%H:%M:%S}" == slot


def in_an_hour() -> dt.datetime:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).replace(second=0, microsecond=0)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/Los_Angeles"])
def test_a_schedule_is_moved_to_the_moment_whatever_the_servers_zone(
    orders: Orders, found: FoundDatasource, schedule: Any, admin: Admin, zone: str
) -> None:
    admin.set(time_zone=zone)
    slot = in_an_hour()
    moved = move_schedule(orders.client, find_schedule(orders.client, found), slot)
    assert (moved.id, moved.next_run_at) == (schedule.id, slot)
    start = orders.others.schedules.get_by_id(schedule.id).interval_item.start_time
    assert start == slot.astimezone(ZoneInfo(zone)).time()


def test_a_slot_that_has_passed_on_the_server_is_told(orders: Orders, found: FoundDatasource, schedule: Any) -> None:
    passed = in_an_hour() - dt.timedelta(hours=2)
    with pytest.raises(DatasourceError, match="Compare the server's clock"):
        move_schedule(orders.client, find_schedule(orders.client, found), passed)


def test_a_suspended_schedule_cannot_be_moved_to_a_moment(
    orders: Orders, found: FoundDatasource, schedule: Any
) -> None:
    schedule.state = TSC.ScheduleItem.State.Suspended
    orders.others.schedules.update(schedule)
    with pytest.raises(DatasourceError, match="but its next run is never"):
        move_schedule(orders.client, find_schedule(orders.client, found), in_an_hour())


def test_the_schedule_that_is_named_is_taken(orders: Orders, found: FoundDatasource, schedule: Any) -> None:
    named = put_on_schedule(orders, found, f"named {orders.project.name}")
    assert find_schedule(orders.client, found, name=named.name).id == named.id
    with pytest.raises(DatasourceError, match="There is no schedule 'nowhere'"):
        find_schedule(orders.client, found, name="nowhere")


def test_a_schedule_with_other_work_is_not_moved(orders: Orders, found: FoundDatasource, schedule: Any) -> None:
    second = orders.others.datasources.publish(
        TSC.DatasourceItem(orders.project.id, "Second"), str(orders.packages / "ours.tdsx"), "CreateNew"
    )
    orders.others.schedules.add_to_schedule(schedule.id, datasource=second)
    with pytest.raises(DatasourceError, match="also refreshes 1 others, which would be moved with it"):
        find_schedule(orders.client, found)


def test_a_schedule_of_a_full_refresh_is_refused(orders: Orders, found: FoundDatasource) -> None:
    full = put_on_schedule(orders, found, f"full {orders.project.name}", incremental=False)
    with pytest.raises(DatasourceError, match=r"has a full refresh of .* Put an incremental refresh"):
        find_schedule(orders.client, found, name=full.name)
    empty = orders.others.schedules.create(
        TSC.ScheduleItem(f"empty {orders.project.name}", 50, "Extract", "Parallel", TSC.DailyInterval(dt.time(1)))
    )
    with pytest.raises(DatasourceError, match="has no refresh of"):
        find_schedule(orders.client, found, name=empty.name)


@pytest.mark.parametrize("version", ["3.26", "3.0", "2.5"], ids=["by job", "by task", "by version"])
def test_a_scheduled_refresh_is_waited_for_by_whatever_the_server_tells(
    orders: Orders, found: FoundDatasource, schedule: Any, speaking: Any, admin: Admin, version: str
) -> None:
    client = speaking(version)
    slot, before = in_an_hour(), server_version(found)
    moved = move_schedule(client, find_schedule(client, found, name=schedule.name), slot)
    assert scheduled_run(client, found, slot=slot, before=before).state is RunState.WAITING
    with pytest.raises(JobTimeoutError, match="it has not begun after 0 s"):
        wait_for_scheduled_run(client, found, slot=slot, before=before, timeout=0)
    admin.set(clock_offset_seconds=3700)
    run = wait_for_scheduled_run(client, found, slot=slot, before=before, timeout=LONG)
    assert run.state is RunState.DONE
    assert run.at is not None
    assert run.at >= slot == moved.next_run_at
    assert (run.job_id is not None) == (version == "3.26")
    assert kinds(admin, orders)[0] == "increment_extracts"


@pytest.mark.parametrize(("version", "error"), [("3.26", JobFailedError), ("3.0", DatasourceError)])
def test_a_scheduled_refresh_that_fails_is_told(
    orders: Orders, found: FoundDatasource, schedule: Any, speaking: Any, admin: Admin, version: str, error: Any
) -> None:
    client = speaking(version)
    slot, before = in_an_hour(), server_version(found)
    move_schedule(client, find_schedule(client, found, name=schedule.name), slot)
    admin.fault("fail_job", path=found.id, notes="The warehouse is suspended.")
    admin.set(clock_offset_seconds=3700)
    with pytest.raises(error, match=r"scheduled refresh of datasource 'Orders'.* failed"):
        wait_for_scheduled_run(client, found, slot=slot, before=before, timeout=LONG)


def test_earlier_failures_of_the_task_are_not_taken_for_one_of_this_run(
    orders: Orders, found: FoundDatasource, schedule: Any, speaking: Any, admin: Admin
) -> None:
    client = speaking("3.0")
    admin.fault("fail_job", path=found.id)
    with pytest.raises(JobFailedError):
        wait_for_job(client, start_refresh(client, found, incremental=True).job_id, what=WHAT)
    slot, before = in_an_hour(), server_version(found)
    moved = move_schedule(client, find_schedule(client, found, name=schedule.name), slot)
    assert moved.failures == 1
    admin.fault("slow_job", path=found.id, seconds=60)
    admin.set(clock_offset_seconds=3700)
    with pytest.raises(
        JobTimeoutError, match="it has begun, and the server does not show this user whether it has ended"
    ):
        wait_for_scheduled_run(client, found, slot=slot, before=before, failures=moved.failures, timeout=2)


def test_refreshes_that_tableau_runs_by_itself_are_warned_about(
    orders: Orders, found: FoundDatasource, schedule: Any
) -> None:
    target = TSC.models.target.Target(found.id, "datasource")
    orders.others.tasks.create(TSC.TaskItem("", "FullRefresh", 50, target=target))
    sleeping = put_on_schedule(orders, found, f"suspended {orders.project.name}")
    sleeping.state = TSC.ScheduleItem.State.Suspended
    orders.others.schedules.update(sleeping)
    (task,) = scheduled_refreshes(orders.client, found)
    assert task.schedule_id == schedule.id
    assert f"an incremental refresh of this datasource on its own (schedule {schedule.name!r}, next at " in task.warning
    assert "`trigger`" in task.warning
