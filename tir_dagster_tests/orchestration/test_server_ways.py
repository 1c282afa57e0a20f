"""Loads by servers of every age: directly, by a task, by a schedule at its time and not before; never a full one in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.refresh.deliveries import server as by_server
from tir_dagster.refresh.deliveries.server import LEAD_SECONDS
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.tasks import soonest_slot
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.conftest import download
from tir_dagster_tests.orchestration.served import Clock, Done, Served
from tir_dagster_tests.sandbox.tableau.helpers import Admin, forget_credentials, save_key_pair
from tir_dagster_tests.tableau.helpers import put_on_schedule

# Longer than any pause between two looks: such a sleep is the wait for a schedule.
LONG = 45.0
BERLIN = "Europe/Berlin"
SLICED = {"slices": {"column": "I", "by": "month", "start": "2025-03", "zone": BERLIN}}


@pytest.fixture(scope="module")
def clock(sandbox: Sandbox) -> Clock:
    return Clock.of_server(sandbox.tableau_url)


@pytest.fixture(scope="module")
def loaded(sandbox, spark, clock, tmp_path_factory) -> Iterator[Served]:
    served = Served(sandbox, spark, tmp_path_factory.mktemp("ways"), settings=SLICED, server_clock=clock)
    served.refresh()
    yield served
    served.close()


@pytest.fixture
def admin(sandbox: Sandbox, clock: Clock) -> Iterator[Admin]:
    """The server's settings are back to normal after the test; its clock goes on."""
    admin = Admin(sandbox.tableau_url)
    yield admin
    admin.clear_faults()
    admin.set(**{**asdict(Settings()), "clock_offset_seconds": clock.ahead})


@pytest.fixture(scope="module", autouse=True)
def clock_back(sandbox: Sandbox) -> Iterator[None]:
    yield
    Admin(sandbox.tableau_url).set(clock_offset_seconds=0.0)


@pytest.fixture
def served(loaded: Served, clock: Clock, admin: Admin) -> Iterator[Served]:
    """The same extract, equal to its source, without tasks on the server."""
    remove_tasks(loaded)
    loaded.declare(settings=SLICED)
    loaded.refresh()
    yield loaded
    clock.listen = lambda _: None


def remove_tasks(served: Served) -> None:
    with served.sandbox.tableau() as server:
        for task in TSC.Pager(server.tasks):
            if task.target is not None and task.target.id == served.datasource_id:
                server.tasks.delete(task.id)


def schedule(served: Served, *, incremental: bool = True) -> Any:
    """A task of the datasource on a schedule that is called like it, and would not run by itself within this test."""
    assert served.server_clock is not None
    start = (served.server_clock.now() + timedelta(hours=12)).time().replace(second=0, microsecond=0)
    with served.sandbox.tableau() as server:
        orders, datasource = SimpleNamespace(others=server), SimpleNamespace(id=served.datasource_id)
        return put_on_schedule(orders, datasource, served.name, incremental=incremental, start=start)


def change(served: Served) -> Counter:
    """An update of the newest rows; what people see until it is loaded."""
    seen = served.published_rows()
    served.act(("update", 22, f"'change {served.clock}'"))
    served.act(("update", 23, f"'change {served.clock}'"))
    return seen


def rests(served: Served) -> None:
    assert served.published_rows() == served.source_rows()
    assert served.refresh().decision == "none", "a second refresh found something to do"


def newest_job(served: Served, server: TSC.Server) -> Any:
    """Datasources of other files may have the same name, and jobs of theirs are newer where they moved the clock."""
    named = server.jobs.filter(title=served.name)
    return next(job for job in named if server.jobs.get_by_id(job.id).datasource_id == served.datasource_id)


def newest_job_type(served: Served, admin: Admin) -> str:
    admin.set(rest_version="3.26")
    with served.sandbox.tableau() as server:
        return newest_job(served, server).type


def is_incremental(done: Done) -> bool:
    return (done.decision, done.reason) == ("incremental", None)


@pytest.fixture
def by_key_pair(served: Served, admin: Admin) -> Iterator[Served]:
    """The extract with a spec that names a key pair, on a server that knows them; a password again after the test."""
    admin.set(rest_version="3.27")
    save_key_pair(served.sandbox)
    key_pair = {"method": "key_pair", "username_env": "SNOWFLAKE_USER"}
    served.declare(settings=SLICED, datasource={"credentials": key_pair})
    yield served
    forget_credentials(served.url)
    with served.sandbox.tableau() as server:
        item = connection_of(served, server)
        item.username, item.password = served.env["SNOWFLAKE_USER"], served.env["SNOWFLAKE_PASSWORD"]
        item.embed_password, item.auth_type = True, "Username Password"
        server.datasources.update_connection(server.datasources.get_by_id(served.datasource_id), item)


def connection_of(served: Served, server: TSC.Server) -> TSC.ConnectionItem:
    datasource = server.datasources.get_by_id(served.datasource_id)
    server.datasources.populate_connections(datasource)
    (connection,) = datasource.connections
    return connection


def test_a_connection_by_key_pair_reads_the_source_again_after_each_publish(by_key_pair):
    for _ in range(2):
        change(by_key_pair)
        assert is_incremental(by_key_pair.refresh())
        assert by_key_pair.refresher.warnings == []
        with by_key_pair.sandbox.tableau() as server:
            connection = connection_of(by_key_pair, server)
        assert (connection.auth_type, connection.embed_password) == ("auth-keypair", True)
    rests(by_key_pair)


@pytest.mark.long
def test_a_key_pair_that_is_not_saved_fails_the_refresh_and_people_get_their_rows_back(by_key_pair):
    forget_credentials(by_key_pair.url)
    seen = change(by_key_pair)
    with pytest.raises(DatasourceError, match="a saved key pair is required"):
        by_key_pair.refresh()
    assert by_key_pair.published_rows() == seen
    save_key_pair(by_key_pair.sandbox)
    assert is_incremental(by_key_pair.refresh())
    rests(by_key_pair)


def test_an_older_server_runs_the_incremental_task(served, admin):
    schedule(served)
    change(served)
    admin.set(rest_version="3.24")
    assert is_incremental(served.refresh())
    assert newest_job_type(served, admin) == "increment_extracts"
    (warning,) = served.refresher.warnings
    assert warning.endswith("Suspend its schedule: the task is run from here when it is needed.")
    rests(served)


@pytest.mark.long
def test_an_older_server_without_an_incremental_task_is_left_alone(served, admin):
    schedule(served, incremental=False)
    before = change(served)
    admin.set(rest_version="3.24")
    with pytest.raises(DatasourceError, match="no incremental refresh task"):
        served.refresh()
    assert served.published_rows() == before
    admin.set(rest_version="3.26")
    assert is_incremental(served.refresh())
    (warning,) = served.refresher.warnings
    assert "a full refresh of this datasource on its own" in warning
    rests(served)


def waits(served: Served, clock: Clock) -> list[tuple[datetime, Counter]]:
    """Fills with the end of each long sleep and what people see when it begins."""
    seen: list[tuple[datetime, Counter]] = []
    # Right after a time at which schedules can run: however slow this machine is, the next one is far away.
    clock.sleep((soonest_slot(clock.now()) - clock.now()).total_seconds() + 1)

    def listen(seconds: float) -> None:
        if seconds > LONG:
            seen.append((clock.now() + timedelta(seconds=seconds), served.published_rows()))

    clock.listen = listen
    return seen


@pytest.mark.parametrize("version", ["3.26", pytest.param("3.0", marks=pytest.mark.long)])
def test_where_runs_by_hand_are_forbidden_the_schedule_is_moved_and_awaited(served, clock, admin, version):
    schedule(served)
    before = change(served)
    admin.set(run_now=False, rest_version=version)
    waited = waits(served, clock)
    assert is_incremental(served.refresh())
    ((until, seen),) = waited
    assert seen == before, "people see everything until the schedule's time"
    assert (until + timedelta(seconds=LEAD_SECONDS + 2)).minute % 5 == 0
    assert newest_job_type(served, admin) == "increment_extracts"
    assert served.refresher.warnings == [], "a schedule that is moved from here is no surprise"
    rests(served)


def test_a_server_that_lists_no_tasks_is_served_by_its_schedule(served, clock, admin):
    schedule(served)
    before = change(served)
    admin.set(rest_version="2.5")
    waited = waits(served, clock)
    assert is_incremental(served.refresh())
    assert [seen for _, seen in waited] == [before]
    assert newest_job_type(served, admin) == "increment_extracts"
    rests(served)


def asked_for(clock: Clock, *, hours: float) -> datetime:
    return (clock.now() + timedelta(hours=hours)).replace(second=0, microsecond=0)


def declare_schedule(served: Served, slot: datetime) -> None:
    at = slot.astimezone(ZoneInfo(BERLIN)).strftime("%H:%M")
    served.declare(settings=SLICED, datasource={"schedule": at})


@pytest.mark.long
def test_a_time_asked_for_is_kept_to_whatever_the_servers_zone(served, clock, admin):
    created = schedule(served)
    admin.set(time_zone="Asia/Kolkata")
    slot = asked_for(clock, hours=2)
    declare_schedule(served, slot)
    before = change(served)
    waited = waits(served, clock)
    assert is_incremental(served.refresh())
    ((until, seen),) = waited
    assert seen == before, "people see everything until the schedule's time"
    assert abs(until + timedelta(seconds=LEAD_SECONDS) - slot) < timedelta(seconds=2)
    assert newest_job_type(served, admin) == "increment_extracts"
    rests(served)
    with served.sandbox.tableau() as server:
        assert server.schedules.get_by_id(created.id).next_run_at == slot + timedelta(days=1)
    before = change(served)
    assert is_incremental(served.refresh()), "the next one waits for the next day"
    assert len(waited) == 2
    assert waited[1][1] == before
    assert clock.now() > slot + timedelta(days=1)
    rests(served)


@pytest.mark.long
def test_rows_that_are_only_new_come_by_schedule_without_a_publish(served, clock, admin):
    schedule(served)
    declare_schedule(served, asked_for(clock, hours=1))
    served.act(("insert", 100 + served.clock, "'2026-01-01'::DATE", "'new'"))
    assert is_incremental(served.refresh())
    assert not [line for line in served.lines if "publishing" in line]
    rests(served)
    served.act(("delete from", "'2026-01-01'::DATE"))
    assert is_incremental(served.refresh())
    rests(served)


def test_a_scheduled_refresh_that_fails_gives_people_their_rows_back(served, clock, admin):
    schedule(served)
    declare_schedule(served, asked_for(clock, hours=1))
    before = change(served)
    admin.fault("fail_job", path=f"/{served.name}$", notes="The warehouse is suspended.")
    with pytest.raises(
        DatasourceError, match=r"warehouse is suspended.*is as it was before: for \d+ s people did not see 2"
    ):
        served.refresh()
    assert served.published_rows() == before
    assert is_incremental(served.refresh())
    rests(served)


def test_a_time_asked_for_without_a_schedule_is_refused_before_anything_is_touched(served, clock):
    declare_schedule(served, asked_for(clock, hours=1))
    before = change(served)
    # Schedules cannot be deleted: an earlier test may have left one without a task.
    with pytest.raises(DatasourceError, match=f"There is no schedule '{served.name}'|has no refresh of"):
        served.refresh()
    schedule(served, incremental=False)
    with pytest.raises(DatasourceError, match=r"has a full refresh of .* Put an incremental refresh"):
        served.refresh()
    assert served.published_rows() == before


@pytest.mark.long
def test_a_publish_that_came_after_the_schedules_time_moves_it_again(served, clock, admin):
    schedule(served)
    slot = asked_for(clock, hours=1)
    declare_schedule(served, slot)
    change(served)

    def slow(line: str) -> None:
        if line.startswith("publishing without"):
            clock.late = 120.0

    assert is_incremental(served.refresh(listen=slow))
    assert [line for line in served.lines if line.startswith("published after the schedule's time: moved to")]
    rests(served)


@pytest.mark.long
def test_a_refresh_of_the_schedule_before_our_publish_is_no_hole_and_no_false_alarm(served, clock, admin):
    schedule(served)
    declare_schedule(served, asked_for(clock, hours=1))
    before = change(served)

    def too_late(line: str) -> None:
        if line.startswith("publishing without"):
            clock.sleep(LEAD_SECONDS + 5)
            while newest_status(served) != "Success":
                clock.sleep(1)

    with pytest.raises(DatasourceError, match="Nothing was put back") as caught:
        served.refresh(listen=too_late)
    assert "not see" not in str(caught.value)
    assert served.published_rows() == before
    assert is_incremental(served.refresh())
    rests(served)


def newest_status(served: Served) -> str:
    with served.sandbox.tableau() as server:
        job = newest_job(served, server)
        return str(job.status) if job.type == "increment_extracts" else ""


def test_a_full_refresh_begun_instead_is_stopped_and_people_get_their_rows_back(served, admin):
    before = change(served)
    admin.fault("slow_job", path=f"/{served.name}$", seconds=30, times=1)
    admin.set(ignore_incremental=True)
    with pytest.raises(DatasourceError, match=r"began a full refresh .* was cancelled.* is as it was before"):
        served.refresh()
    assert served.published_rows() == before
    # Where the job was stopped before it began, the fault still waits for one.
    admin.clear_faults()
    admin.set(ignore_incremental=False)
    assert is_incremental(served.refresh())
    rests(served)


@pytest.mark.long
def test_a_full_refresh_that_ended_before_it_could_be_stopped_is_told_and_found_by_the_next(served, admin):
    change(served)
    admin.fault("delay", method="GET", path="/jobs$", seconds=3)
    admin.set(ignore_incremental=True)
    with pytest.raises(DatasourceError, match=r"began a full refresh .* Nothing was put back") as caught:
        served.refresh()
    assert "not see" not in str(caught.value)
    rests(served)
    assert served.confirmed is not None


@pytest.mark.long
def test_a_full_refresh_that_nobody_told_of_is_seen_in_the_datasource(served, admin):
    change(served)
    admin.set(ignore_incremental=True)
    admin.fault("status", method="GET", path="/jobs$", status=403, code="403004", message="No.", times=9)
    assert is_incremental(served.refresh())
    (warning,) = served.refresher.warnings
    assert "refreshed all of datasource" in warning
    admin.clear_faults()
    rests(served)


@pytest.mark.long
def test_where_runs_by_hand_are_forbidden_a_full_refresh_is_an_error_that_says_so(served, admin):
    schedule(served)
    served.act(("insert", 100 + served.clock, "NULL", "'no date'"))
    before = served.published_rows()
    admin.set(run_now=False)
    with pytest.raises(DatasourceError, match=r"NULL_INCREMENT.* does not allow that to be started over REST"):
        served.refresh()
    assert served.published_rows() == before
    admin.set(run_now=True)
    done = served.refresh()
    assert (done.decision, done.reason) == ("full", "NULL_INCREMENT")
    rests(served)


@pytest.mark.parametrize(
    "old",
    [
        pytest.param({"run_now": False}, id="forbidden"),
        pytest.param({"rest_version": "2.5"}, id="very old", marks=pytest.mark.long),
    ],
)
def test_where_no_full_refresh_can_be_started_the_schedule_serves_from_the_first_load_on(
    sandbox, spark, clock, admin, tmp_path, old
):
    served = Served(sandbox, spark, tmp_path, server_clock=clock)
    schedule(served)
    before = change(served)
    admin.set(**old)
    waited = waits(served, clock)
    done = served.refresh()
    clock.listen = lambda _: None
    assert (done.reason, [seen for _, seen in waited]) == ("FIRST_LOAD", [before])
    assert newest_job_type(served, admin) == "increment_extracts"
    rests(served)
    served.close()


# Which rows an increment reads


def refreshes_of(served: Served, change: tuple[Any, ...]) -> int:
    """How often Tableau had to read until the change was loaded, and nothing was left to do."""
    served.act(change)
    before = _increments(served)
    assert is_incremental(served.refresh())
    rests(served)
    return _increments(served) - before


def _increments(served: Served) -> int:
    with served.sandbox.tableau() as server:
        named = server.jobs.filter(title=served.name, job_type="increment_extracts")
        return sum(server.jobs.get_by_id(job.id).datasource_id == served.datasource_id for job in named)


def test_a_server_that_reads_the_rows_of_the_last_value_in_their_place_is_served_as_any_other(served, admin):
    admin.set(increment_reads="from")
    assert refreshes_of(served, ("update", 21, f"'in place {served.clock}'")) == 1
    assert refreshes_of(served, ("insert", 200, "'2026-01-01'::DATE", "'new'")) == 1
    assert not served.confirmed.reads_again
    served.act(("delete", 200))


def test_a_server_that_reads_the_rows_of_the_last_value_twice_is_found_out_and_remembered(served, admin):
    admin.set(increment_reads="again")
    assert refreshes_of(served, ("update", 21, f"'twice {served.clock}'")) == 2, "the first try shows how it reads"
    assert served.confirmed.reads_again
    assert refreshes_of(served, ("insert", 300, "'2026-01-01'::DATE", "'new'")) == 1, "new rows alone, too"
    served.act(("update", 21, f"'confirmed late {served.clock}'"))
    served.refresh(until="published")
    served.refresh()
    assert served.confirmed.reads_again, "remembered after a late confirmation"
    served.declare(settings={**SLICED, "delivery": "republish"})
    served.act(("update", 21, f"'published whole {served.clock}'"))
    served.refresh()
    assert served.confirmed.reads_again, "and after a publish of all rows, as a rollback makes it"
    served.declare(settings=SLICED)
    # A server that replaces the rows of the last value is served so as well.
    admin.set(increment_reads="from", increment_beyond_data=True)
    assert refreshes_of(served, ("delete", 300)) == 1
    # Another release of the server, which reads on after the last value.
    admin.set(increment_reads="after", increment_beyond_data=True)
    assert refreshes_of(served, ("update", 21, f"'after {served.clock}'")) == 2
    assert not served.confirmed.reads_again


def test_new_rows_alone_on_a_server_that_reads_the_last_value_twice_are_not_doubled(served, admin):
    admin.set(increment_reads="again")
    assert refreshes_of(served, ("insert", 400, "'2026-01-01'::DATE", "'new'")) == 2
    admin.set(increment_reads="after", increment_beyond_data=True)
    assert refreshes_of(served, ("delete", 400)) == 2


def test_what_somebody_publishes_between_the_two_tries_stays(served, admin, monkeypatch):
    served.act(("update", 21, f"'between {served.clock}'"))
    admin.set(increment_reads="again")
    put_back, counters, theirs = by_server.put_back, [], []

    def put_back_and_publish(client: TableauClient, *args: Any, **files: Any) -> Any:
        restored = put_back(client, *args, **files)
        counters.append(client.counter)
        theirs.append(publish_by_others(served))
        return restored

    with monkeypatch.context() as people:
        people.setattr(by_server, "put_back", put_back_and_publish)
        with pytest.raises(DatasourceError, match=r"Nothing was put back, because somebody else"):
            served.refresh()
    with served.sandbox.tableau() as server:
        assert [server.datasources.get_by_id(served.datasource_id).updated_at] == theirs
    assert counters == [served.refresher.calls], "a site counts this publish, too"
    admin.set(increment_reads="after")
    served.refresh()
    rests(served)


def publish_by_others(served: Served) -> datetime:
    """Somebody publishes what is there, a second later; when, by the server's clock."""
    assert served.server_clock is not None
    served.server_clock.sleep(2)
    package = download(served.sandbox, served.name, served.folder / "theirs")
    user, password = served.env["SNOWFLAKE_USER"], served.env["SNOWFLAKE_PASSWORD"]
    with served.sandbox.tableau() as server:
        project = server.datasources.get_by_id(served.datasource_id).project_id
        credentials = TSC.ConnectionCredentials(user, password, embed=True)
        item = TSC.DatasourceItem(project, served.name)
        server.datasources.publish(item, str(package), "Overwrite", connection_credentials=credentials)
        return server.datasources.get_by_id(served.datasource_id).updated_at


def test_a_package_that_cannot_be_put_back_after_the_last_value_was_read_twice_is_told_and_healed(served, admin):
    served.act(("update", 21, f"'not put back {served.clock}'"))
    admin.set(increment_reads="again")
    # The hole is published, what is put back is not.
    admin.fault("status", method="POST", path="/datasources$", status=403, code="403004", skip=1, times=9)
    with pytest.raises(DatasourceError, match=r"read the rows of the last value twice, so people see wrong rows now"):
        served.refresh()
    admin.clear_faults()
    admin.set(increment_reads="after")
    served.refresh()
    rests(served)
