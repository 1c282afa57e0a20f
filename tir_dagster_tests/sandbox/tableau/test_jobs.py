"""Jobs from their queue to their end, and tasks and schedules that start them."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.models import BackgroundJobItem
from tableauserverclient.models.target import Target
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, Source

ID, DAY = Column("ID", "NUMBER(38,0)"), Column("DAY", "DATE")
FinishCode, Status = TSC.JobItem.FinishCode, BackgroundJobItem.Status


@pytest.fixture
def datasource(publisher: Publisher, source: Source) -> Any:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0), DAY DATE)")
    source.sql("INSERT INTO {t} VALUES (1, '2023-01-01')")
    package = source.package(ID, DAY, increment_key="DAY")
    return publisher.publish(package, connection_credentials=publisher.credentials)


def status_of(publisher: Publisher, job_id: str) -> str:
    return next(job.status for job in publisher.server.jobs.filter() if job.id == job_id)


def test_a_job_waits_runs_and_ends(publisher: Publisher, datasource: Any, admin: Admin) -> None:
    admin.set(job_seconds=1)
    job = publisher.server.datasources.refresh(datasource)
    assert (job.type, job.finish_code, job.completed_at) == ("RefreshExtract", -1, None)
    seen = [status_of(publisher, job.id)]
    wait_for(lambda: seen.append(status_of(publisher, job.id)) or seen[-1] == Status.Success, "the job's success")
    assert list(dict.fromkeys(seen)) == [Status.Pending, Status.InProgress, Status.Success]
    done = publisher.server.jobs.get_by_id(job.id)
    assert done.created_at <= done.started_at <= done.completed_at
    assert (done.finish_code, done.progress, done.datasource_name) == (FinishCode.Success, "100", "Orders")


def test_a_second_refresh_is_not_queued_while_one_waits_or_runs(
    publisher: Publisher, datasource: Any, admin: Admin
) -> None:
    admin.set(job_seconds=0.4)
    admin.fault("slow_job", path=datasource.id, seconds=0.6)
    job = publisher.server.datasources.refresh(datasource)
    # The client turns 409093 into None.
    assert publisher.server.datasources.refresh(datasource) is None
    wait_for(lambda: status_of(publisher, job.id) == Status.InProgress, "the job to run")
    assert publisher.server.datasources.refresh(datasource) is None
    running = [item for item in publisher.server.jobs.filter(status="InProgress") if item.title == "Orders"]
    assert job.id in {item.id for item in running}
    assert publisher.finished(job.id).finish_code == FinishCode.Success
    assert publisher.server.datasources.refresh(datasource) is not None


def test_the_job_list_is_filtered_by_status_and_kind(publisher: Publisher, datasource: Any) -> None:
    full = publisher.refresh(datasource)
    increment = publisher.refresh(datasource, incremental=True)

    def listed(**filters: str) -> set[str]:
        return {job.id for job in publisher.server.jobs.filter(**filters)}

    assert full.id in listed(job_type="refresh_extracts", status="Success")
    assert increment.id in listed(job_type="increment_extracts")
    assert full.id not in listed(job_type="increment_extracts")
    assert full.id not in listed(status="Failed")


@pytest.mark.parametrize("running", [False, True], ids=["waiting", "running"])
def test_a_cancelled_job_changes_nothing(
    publisher: Publisher, datasource: Any, admin: Admin, look: Looker, *, running: bool
) -> None:
    admin.fault("slow_job", path=datasource.id, seconds=30)
    admin.set(job_seconds=0.2 if running else 60)
    job = publisher.server.datasources.refresh(datasource)
    if running:
        wait_for(lambda: status_of(publisher, job.id) == Status.InProgress, "the job to run")
    publisher.server.jobs.cancel(job.id)
    assert publisher.finished(job.id).finish_code == FinishCode.Cancelled
    assert look.events(publisher.download(datasource)) == []


def test_a_job_made_to_fail_tells_its_notes(publisher: Publisher, datasource: Any, admin: Admin) -> None:
    admin.fault("fail_job", path=datasource.id, notes="The backgrounder ran out of memory.")
    job = publisher.refresh(datasource)
    assert (job.finish_code, job.notes) == (FinishCode.Failed, ["The backgrounder ran out of memory."])
    assert publisher.refresh(datasource).finish_code == FinishCode.Success


@pytest.mark.parametrize("code", [None, "400031"])
def test_a_finished_job_may_vanish(publisher: Publisher, datasource: Any, admin: Admin, code: str | None) -> None:
    job = publisher.refresh(datasource)
    admin.fault("vanish_job", path=job.id, code=code)
    for _ in range(2):
        with pytest.raises(ServerResponseError, match=code or "404"):
            publisher.server.jobs.get_by_id(job.id)
    assert job.id not in {item.id for item in publisher.server.jobs.filter()}


def test_jobs_are_forgotten_after_a_while(publisher: Publisher, datasource: Any, admin: Admin) -> None:
    job = publisher.refresh(datasource)
    admin.set(job_keep_seconds=0)
    with pytest.raises(ServerResponseError, match="404"):
        publisher.server.jobs.get_by_id(job.id)


def test_a_publish_during_a_refresh_wins(
    publisher: Publisher, datasource: Any, source: Source, admin: Admin, look: Looker
) -> None:
    admin.set(job_seconds=0.1)
    # The refresh reads its package before the warehouse answers; the publish falls into that moment.
    source.sql("INSERT INTO {t} SELECT SEQ8(), NULL FROM TABLE(GENERATOR(ROWCOUNT => 300000))")
    job = publisher.server.datasources.refresh(datasource)
    wait_for(lambda: status_of(publisher, job.id) != Status.Pending, "the job to run")
    package = source.package(ID, DAY)
    while publisher.server.jobs.get_by_id(job.id).completed_at is None:
        publisher.publish(package, mode=OVERWRITE, connection_credentials=publisher.credentials)
    done = publisher.finished(job.id)
    assert (done.finish_code, "was published again" in done.notes[0]) == (FinishCode.Failed, True)
    assert publisher.download(datasource).read_bytes() == package.read_bytes()


def test_deleting_a_datasource_fails_its_jobs(publisher: Publisher, datasource: Any, admin: Admin) -> None:
    admin.set(job_seconds=30)
    job = publisher.server.datasources.refresh(datasource)
    publisher.server.datasources.delete(datasource.id)
    done = publisher.finished(job.id)
    assert (done.finish_code, "was deleted" in done.notes[0]) == (FinishCode.Failed, True)


def schedule_item(name: str) -> TSC.ScheduleItem:
    interval = TSC.DailyInterval(start_time=dt.time(3, 0))
    return TSC.ScheduleItem(name, 50, TSC.ScheduleItem.Type.Extract, TSC.ScheduleItem.ExecutionOrder.Parallel, interval)


def test_a_schedule_is_created_listed_and_moved(publisher: Publisher) -> None:
    schedules = publisher.server.schedules
    created = schedules.create(schedule_item(f"nightly {publisher.project.name}"))
    listed, pagination = schedules.get()
    assert created.id in {item.id for item in listed}
    assert pagination.total_available == len(listed)
    created.interval_item = TSC.DailyInterval(start_time=dt.time(4, 30))
    schedules.update(created)
    assert schedules.get_by_id(created.id).interval_item.start_time == dt.time(4, 30)


def test_a_task_on_a_schedule_is_run_by_hand(publisher: Publisher, datasource: Any, look: Looker) -> None:
    server = publisher.server
    schedule = server.schedules.create(schedule_item(f"tasks {publisher.project.name}"))
    assert server.schedules.add_to_schedule(schedule.id, datasource=datasource) == []
    tasks, _ = server.tasks.get()
    task = next(item for item in tasks if item.target.id == datasource.id)
    assert (task.schedule_id, task.task_type) == (schedule.id, TSC.TaskItem.Type.ExtractRefresh)
    job = publisher.finished(_job_id(server.tasks.run(task)))
    assert job.finish_code == FinishCode.Success
    assert look.events(publisher.download(datasource)) == [("create", "#2023-01-01#", "1")]
    extracts, _ = server.schedules.get_extract_refresh_tasks(schedule.id)
    assert [item.datasource_id for item in extracts] == [datasource.id]
    server.tasks.delete(task.id)
    with pytest.raises(ServerResponseError, match="404"):
        server.tasks.get_by_id(task.id)


def test_an_incremental_task_increments(publisher: Publisher, datasource: Any, source: Source, look: Looker) -> None:
    publisher.refresh(datasource)
    source.sql("INSERT INTO {t} VALUES (2, '2023-01-02')")
    item = TSC.TaskItem(None, "IncrementalRefresh", None, target=Target(datasource.id, "datasource"))
    item.schedule_item = TSC.ScheduleItem(None, None, None, None, TSC.DailyInterval(start_time=dt.time(3, 0)))
    publisher.server.tasks.create(item)
    task = next(entry for entry in publisher.server.tasks.get()[0] if entry.target.id == datasource.id)
    assert task.task_type == "IncrementExtractTask"
    publisher.finished(_job_id(publisher.server.tasks.run(task)))
    assert look.events(publisher.download(datasource))[1:] == [("increment", "#2023-01-02#", "1")]


def _job_id(answer: bytes) -> str:
    return re.search(rb'job id="([^"]+)"', answer)[1].decode()
