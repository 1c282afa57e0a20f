"""Schedules by the clock: when they run next, and that they really run."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.models.target import Target
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.sandbox.tableau.store import Store
from tir_dagster.sandbox.tableau.times import next_run
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Looker, Publisher, Source

ID, DAY = Column("ID", "NUMBER(38,0)"), Column("DAY", "DATE")
WEEKLY = {"start": "05:00:00", "intervals": [{"weekDay": "Monday"}, {"weekDay": "Friday"}]}
QUARTERS = {"start": "08:00:00", "end": "10:00:00", "intervals": [{"minutes": "15"}]}


def moment(text: str, zone: str = "UTC") -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("frequency", "details", "after", "expected"),
    [
        ("Daily", {"start": "03:00:00"}, "2024-01-31 02:59:59", "2024-01-31 03:00:00"),
        ("Daily", {"start": "03:00:00"}, "2024-01-31 03:00:00", "2024-02-01 03:00:00"),
        ("Daily", {}, "2024-12-31 12:00:00", "2025-01-01 00:00:00"),
        ("Weekly", WEEKLY, "2024-01-01 05:00:00", "2024-01-05 05:00:00"),
        ("Weekly", {"start": "05:00:00"}, "2024-01-01 05:00:00", None),
        ("Monthly", {"start": "01:00:00", "intervals": [{"monthDay": "31"}]}, "2024-04-01", "2024-05-31 01:00:00"),
        ("Monthly", {"start": "01:00:00", "intervals": [{"monthDay": "LastDay"}]}, "2024-02-01", "2024-02-29 01:00:00"),
        ("Hourly", QUARTERS, "2024-01-01 09:50:00", "2024-01-01 10:00:00"),
        ("Hourly", QUARTERS, "2024-01-01 10:00:00", "2024-01-02 08:00:00"),
        ("Hourly", {"start": "00:30:00", "intervals": [{"hours": "6"}]}, "2024-01-01 07:00", "2024-01-01 12:30:00"),
    ],
)
def test_a_schedule_tells_when_it_runs_next(
    frequency: str, details: dict[str, Any], after: str, expected: str | None
) -> None:
    found = next_run(frequency, details, after=moment(after), zone="UTC")
    assert found == (None if expected is None else moment(expected))


def test_times_are_in_the_servers_zone_also_when_its_clocks_change() -> None:
    before = moment("2024-03-30 04:00", "Europe/Berlin")
    found = next_run("Daily", {"start": "03:30:00"}, after=before, zone="Europe/Berlin")
    assert found == moment("2024-03-31 01:30:00")


@pytest.fixture
def datasource(publisher: Publisher, source: Source) -> Any:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    package = source.package(ID, DAY, increment_key="DAY")
    created = publisher.publish(package, connection_credentials=publisher.credentials)
    publisher.refresh(created)
    source.sql("INSERT INTO {t} VALUES (2, '2023-01-02')")
    return created


def in_two_hours() -> dt.time:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)).time().replace(second=0, microsecond=0)


def on_schedule(publisher: Publisher, datasource: Any, start: dt.time, *, incremental: bool) -> Any:
    """A schedule of its own with one task; the client cannot say that a task is incremental."""
    interval = TSC.DailyInterval(start_time=start)
    item = TSC.ScheduleItem(f"at {publisher.project.name}", 50, "Extract", "Parallel", interval)
    schedule = publisher.server.schedules.create(item)
    kind = ' incremental="true"' if incremental else ""
    body = (
        f'<tsRequest><task><extractRefresh{kind}><datasource id="{datasource.id}"/></extractRefresh></task></tsRequest>'
    )
    endpoint = publisher.server.schedules
    endpoint.put_request(f"{endpoint.siteurl}/{schedule.id}/datasources", body.encode())
    return schedule


def task_of(publisher: Publisher, datasource: Any) -> Any:
    return next(task for task in publisher.server.tasks.get()[0] if task.target.id == datasource.id)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_task_runs_when_its_schedule_is_due(
    publisher: Publisher, datasource: Any, look: Looker, admin: Admin, *, incremental: bool
) -> None:
    schedule = on_schedule(publisher, datasource, in_two_hours(), incremental=incremental)
    planned = publisher.server.schedules.get_by_id(schedule.id).next_run_at
    admin.set(clock_offset_seconds=3 * 3600)
    wait_for(lambda: len(look.rows(publisher.download(datasource))) == 2, "the scheduled refresh")
    kinds = [kind for kind, _, _ in look.events(publisher.download(datasource))]
    assert kinds == (["create", "increment"] if incremental else ["create"])
    following = publisher.server.schedules.get_by_id(schedule.id).next_run_at
    assert following == task_of(publisher, datasource).schedule_item.next_run_at == planned + dt.timedelta(days=1)


def test_a_suspended_schedule_does_not_run(publisher: Publisher, datasource: Any, look: Looker, admin: Admin) -> None:
    schedule = on_schedule(publisher, datasource, in_two_hours(), incremental=True)
    schedule.state = TSC.ScheduleItem.State.Suspended
    publisher.server.schedules.update(schedule)
    other = publisher.server.schedules.create(
        TSC.ScheduleItem(
            f"later {publisher.project.name}", 50, "Extract", "Parallel", TSC.DailyInterval(in_two_hours())
        )
    )
    planned = publisher.server.schedules.get_by_id(other.id).next_run_at
    admin.set(clock_offset_seconds=3 * 3600)
    wait_for(
        lambda: publisher.server.schedules.get_by_id(other.id).next_run_at > planned, "the clockwork to pass that time"
    )
    assert [kind for kind, _, _ in look.events(publisher.download(datasource))] == ["create"]
    assert publisher.server.schedules.get_by_id(schedule.id).next_run_at is None


def test_a_task_with_times_of_its_own_runs_as_well(
    publisher: Publisher, datasource: Any, look: Looker, admin: Admin
) -> None:
    item = TSC.TaskItem(None, "IncrementalRefresh", None, target=Target(datasource.id, "datasource"))
    item.schedule_item = TSC.ScheduleItem(None, None, None, None, TSC.DailyInterval(start_time=in_two_hours()))
    publisher.server.tasks.create(item)
    admin.set(clock_offset_seconds=3 * 3600)
    wait_for(lambda: len(look.events(publisher.download(datasource))) == 2, "the scheduled refresh")


def test_a_clock_that_is_moved_back_brings_the_plan_along(publisher: Publisher, admin: Admin) -> None:
    admin.set(clock_offset_seconds=10 * 86400)
    interval = TSC.DailyInterval(start_time=in_two_hours())
    item = TSC.ScheduleItem(f"back {publisher.project.name}", 50, "Extract", "Parallel", interval)
    schedule = publisher.server.schedules.create(item)
    assert schedule.next_run_at.timestamp() > time.time() + 9 * 86400
    admin.set(clock_offset_seconds=0)
    wait_for(
        lambda: publisher.server.schedules.get_by_id(schedule.id).next_run_at.timestamp() < time.time() + 86400,
        "the plan to follow the clock",
    )


def test_a_site_may_leave_refreshes_to_its_schedules(publisher: Publisher, datasource: Any, admin: Admin) -> None:
    on_schedule(publisher, datasource, in_two_hours(), incremental=True)
    admin.set(run_now=False)
    with pytest.raises(ServerResponseError, match="disabled on this site"):
        publisher.server.datasources.refresh(datasource)
    with pytest.raises(ServerResponseError, match="disabled on this site"):
        publisher.server.tasks.run(task_of(publisher, datasource))
    assert publisher.server.sites.get_by_id(publisher.server.site_id).run_now_enabled is False


@pytest.mark.parametrize(
    ("version", "call"), [("2.5", "tasks/extractRefreshes"), ("2.5", "jobs/1"), ("3.0", "jobs"), ("2.5", "nothing")]
)
def test_a_version_does_not_know_later_calls(publisher: Publisher, version: str, call: str) -> None:
    server = publisher.server
    url = f"{server.server_address}/api/{version}/sites/{server.site_id}/{call}"
    answer = requests.get(url, headers={"x-tableau-auth": server.auth_token}, timeout=30)
    assert (answer.status_code, "404950" in answer.text) == (404, True)


@pytest.mark.parametrize(
    "settings", [{"time_zone": "Nowhere"}, {"run_now": 1}, {"clock_offset_seconds": 1e12}, {"clock_offset_seconds": -1}]
)
def test_settings_that_cannot_be_are_refused(publisher: Publisher, settings: dict[str, Any]) -> None:
    url = f"{publisher.sandbox.tableau_url}/sandbox/settings"
    assert requests.put(url, json=settings, timeout=30).status_code == 400


def test_intervals_that_are_no_numbers_are_refused(publisher: Publisher) -> None:
    body = (
        '<tsRequest><schedule name="odd" type="Extract" frequency="Hourly"><frequencyDetails start="01:00:00">'
        '<intervals><interval hours="many"/></intervals></frequencyDetails></schedule></tsRequest>'
    )
    with pytest.raises(ServerResponseError, match="400000"):
        publisher.server.schedules.post_request(publisher.server.schedules.baseurl, body.encode())


def test_a_file_of_an_earlier_version_gets_the_columns_it_lacks(tmp_path: Path) -> None:
    store = Store(tmp_path / "server.sqlite")
    for table in ("schedules", "tasks"):
        store.run(f"ALTER TABLE {table} DROP COLUMN next_run")
    store.close()
    store = Store(tmp_path / "server.sqlite")
    assert store.rows("SELECT next_run FROM schedules UNION ALL SELECT next_run FROM tasks") == []
    store.close()
