"""The server's own refresh: started, waited for, told; also when the job vanishes or somebody else's is at work."""

from __future__ import annotations

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.refresh.deliveries.trigger import schedule_warnings
from tir_dagster.retries import RetryPolicy
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version
from tir_dagster.tableau.jobs import JobFailedError, JobVanishedError
from tir_dagster.tableau.refreshes import TriggeredRefresh, refresh_by_server, rows_in_notes, start_refresh
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tableau.helpers import kinds, put_on_schedule

LONG = 30  # seconds, more than any test waits


@pytest.fixture
def found(orders: Orders) -> FoundDatasource:
    """A datasource of a table with two rows, set up for increments, that the server can refresh."""
    return orders.create(connections=[orders.credential])


def refreshed(orders: Orders, found: FoundDatasource, *, incremental: bool = False) -> TriggeredRefresh:
    return refresh_by_server(orders.client, found, incremental=incremental, log=lambda _: None, timeout=3600)


def test_a_full_refresh_tells_its_job_its_rows_and_what_the_server_holds_now(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    done = refreshed(orders, found)
    assert (done.joined, done.rows) == (False, 2)
    assert done.seconds > 0
    assert orders.others.jobs.get_by_id(done.job_id).finish_code == TSC.JobItem.FinishCode.Success
    assert server_version(done.datasource) == server_version(orders.now()) != server_version(found)
    assert kinds(admin, orders) == ["refresh_extracts"]


def test_an_incremental_refresh_tells_what_it_appended(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    refreshed(orders, found)
    assert refreshed(orders, orders.now(), incremental=True).rows == 0
    assert kinds(admin, orders) == ["increment_extracts", "refresh_extracts"]


def test_a_failed_job_tells_its_notes(orders: Orders, found: FoundDatasource, admin: Admin) -> None:
    admin.fault("fail_job", path=found.id, notes="The warehouse is suspended.")
    with pytest.raises(
        JobFailedError,
        match=r"\(full refresh of datasource 'Orders' in project .*\) failed on the server: The warehouse is suspended\.",
    ):
        refreshed(orders, found)


def test_a_job_that_vanished_after_its_work_is_known_by_the_datasource(
    access: TableauAccess, orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    def pause(_: float) -> None:
        wait_for(lambda: server_version(orders.now()) != server_version(found), "the refresh to end")

    admin.fault("vanish_job", path="/jobs/")
    with TableauClient(access, retry=RetryPolicy(sleep=pause)) as client:
        done = refresh_by_server(client, found, incremental=False, log=lambda _: None, timeout=3600)
    assert admin.faults() == []
    assert done.rows is None
    assert server_version(done.datasource) != server_version(found)


def test_a_job_that_vanished_without_a_trace_is_an_error_that_says_so(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    admin.fault("slow_job", path=found.id, seconds=LONG)
    admin.fault("vanish_job", path="/jobs/")
    with pytest.raises(JobVanishedError, match="whether the refresh took place is unknown") as caught:
        refreshed(orders, found)
    assert "run again" in str(caught.value)
    orders.others.datasources.delete(found.id)  # ends the slow job: the server has few workers


@pytest.mark.parametrize("theirs_fails", [False, True])
def test_somebody_elses_refresh_is_waited_for_and_ours_follows(
    orders: Orders, found: FoundDatasource, admin: Admin, *, theirs_fails: bool
) -> None:
    admin.fault("slow_job", path=found.id, seconds=0.3)
    if theirs_fails:
        admin.fault("fail_job", path=found.id)
    theirs = start_refresh(orders.client, found, incremental=False)
    done = refreshed(orders, found)
    assert done.joined
    assert done.job_id != theirs.job_id, "theirs may have read the source before it changed"
    assert done.rows == 2


def test_somebody_elses_increment_does_not_stand_for_a_full_refresh(
    orders: Orders, found: FoundDatasource, admin: Admin
) -> None:
    refreshed(orders, found)
    admin.fault("slow_job", path=found.id, seconds=0.3)
    start_refresh(orders.client, found, incremental=True)
    assert refreshed(orders, orders.now()).joined
    assert kinds(admin, orders)[:2] == ["refresh_extracts", "increment_extracts"]


def test_schedules_of_tableau_are_warned_of(orders: Orders, found: FoundDatasource) -> None:
    assert schedule_warnings(orders.client, found) == ()
    put_on_schedule(orders, found, f"nights of {orders.project.name}", incremental=False)
    (warning,) = schedule_warnings(orders.client, found)
    assert warning.startswith("Tableau also runs a full refresh of datasource 'Orders'")
    assert f"schedule 'nights of {orders.project.name}', next at " in warning


@pytest.mark.parametrize(
    ("notes", "rows"),
    [
        ((), None),
        (("Finished refresh of extracts (new extract id:{4A1C}) for Data Source 'Orders'",), None),
        (("Finished refresh of extracts for Data Source 'Top 10 rows': 7 rows.",), 7),
        (("Finished refresh of extracts for Data Source 'Top 10 rows'",), None),
        (("x", "Appended 1,234 rows to the extract."), 1234),
        (("arrows 12 rowsets",), None),
    ],
)
def test_rows_are_told_only_by_notes_that_speak_of_rows(notes: tuple[str, ...], rows: int | None) -> None:
    assert rows_in_notes(notes) == rows
