"""The shapes of answers, as Tableau's schema and recorded answers have them: clients must not learn to rely on more."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Looker, Publisher, Source
from tir_dagster_tests.sandbox.tableau.live import LiveData, action

NOBODY = {"op": "eq", "target-col": "K", "const": {"type": "integer", "v": -1}}
NO_COLUMN = {**NOBODY, "target-col": "no such column"}
NAMESPACE = "{http://tableau.com/api}"


@pytest.fixture
def datasource(source: Source, publisher: Publisher) -> Any:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    return publisher.publish(source.package(Column("ID", "NUMBER(38,0)")), connection_credentials=publisher.credentials)


@pytest.fixture
def answer(publisher: Publisher) -> Callable[[str], ET.Element]:
    """What a GET of this path below the site answers, without namespaces."""

    def get(path: str) -> ET.Element:
        endpoint = publisher.server.datasources
        base = endpoint.baseurl.removesuffix("/datasources")
        root = ET.fromstring(endpoint.get_request(f"{base}/{path}").content)
        for element in root.iter():
            element.tag = element.tag.removeprefix(NAMESPACE)
        return root

    return get


def job_of(answer: Callable[[str], ET.Element], job_id: str) -> ET.Element:
    (job,) = answer(f"jobs/{job_id}")
    return job


def texts(element: ET.Element) -> list[tuple[str, str]]:
    return [(child.tag, child.text or "") for child in element]


@pytest.mark.parametrize("fails", [False, True])
def test_a_change_of_data_names_its_datasource_and_gives_no_notes(
    publisher: Publisher, look: Looker, answer: Any, *, fails: bool
) -> None:
    live = LiveData.publish(publisher, look, [(1, "a")])
    job = live.change(action("delete", NO_COLUMN if fails else NOBODY, source=False))
    (details,) = job_of(answer, job.id)
    (connection,) = answer(f"datasources/{live.datasource.id}/connections").iter("connection")
    assert (details.tag, job.finish_code) == ("updateUploadedFileJob", int(fails))
    assert texts(details) == [("datasource", ""), ("connectionLuid", connection.get("id")), ("notes", "")]
    assert details[0].attrib == {"id": live.datasource.id, "name": "Live"}


def test_a_change_of_data_tells_its_notes_if_the_server_is_set_so(
    publisher: Publisher, look: Looker, admin: Admin, answer: Any
) -> None:
    admin.set(change_notes=True)
    live = LiveData.publish(publisher, look, [(1, "a")])
    (details,) = job_of(answer, live.change(action("delete", NOBODY, source=False)).id)
    assert texts(details)[-1] == ("notes", "0 rows deleted")


def test_a_refresh_tells_its_notes_in_one_place_only(publisher: Publisher, datasource: Any, answer: Any) -> None:
    job = publisher.refresh(datasource)
    (details,) = job_of(answer, job.id)
    assert (details.tag, [child.tag for child in details]) == ("extractRefreshJob", ["notes", "datasource"])


def test_a_refresh_moves_the_time_of_the_last_update_unless_the_server_is_set_not_to_show_it(
    publisher: Publisher, datasource: Any, admin: Admin, answer: Any
) -> None:
    def shown() -> tuple[Any, Any]:
        (item,) = answer(f"datasources/{datasource.id}")
        (revision,) = answer(f"datasources/{datasource.id}/revisions").iter("revision")
        return item.get("updatedAt"), revision.get("sizeInBytes")

    seen = []
    for number, show in enumerate((True, False, True)):
        admin.set(changes_show=show, clock_offset_seconds=10.0 * number)
        publisher.refresh(datasource)
        seen.append(shown())
    assert seen[0][0] == seen[1][0] < seen[2][0]
    assert [size is None for _, size in seen] == [False, True, False]


def test_a_publish_that_is_a_job_tells_nothing_but_its_end(publisher: Publisher, datasource: Any, answer: Any) -> None:
    broken = publisher.folder / "broken.tdsx"
    broken.write_bytes(b"PK\x03\x04 nothing")
    job = publisher.finished(publisher.publish(broken, "Broken", as_job=True).id)
    assert (list(job_of(answer, job.id)), job.finish_code) == ([], TSC.JobItem.FinishCode.Failed)


def test_connections_have_no_empty_port_and_no_database(publisher: Publisher, datasource: Any, answer: Any) -> None:
    (connection,) = answer(f"datasources/{datasource.id}/connections").iter("connection")
    known = {"id", "type", "serverAddress", "userName", "embedPassword", "queryTaggingEnabled", "authenticationType"}
    assert set(connection.attrib) <= known
    (changed,) = answer(f"datasources/{datasource.id}/connections").iter("connections")
    assert {child.tag for child in changed} == {"connection"}


def test_tasks_come_without_pages_and_do_not_tell_their_last_run(
    publisher: Publisher, datasource: Any, answer: Any
) -> None:
    schedule = publisher.server.schedules.create(
        TSC.ScheduleItem(f"answers {publisher.project.name}", 50, "Extract", "Parallel", TSC.DailyInterval(dt.time(1)))
    )
    publisher.server.schedules.add_to_schedule(schedule.id, datasource=datasource)
    task = next(task for task in publisher.server.tasks.get()[0] if task.target.id == datasource.id)
    publisher.finished(TSC.JobItem.from_response(publisher.server.tasks.run(task), publisher.server.namespace)[0].id)
    root = answer("tasks/extractRefreshes")
    assert [child.tag for child in root] == ["tasks"]
    (element,) = (item for item in root.iter("extractRefresh") if item.get("id") == task.id)
    assert [child.tag for child in element] == ["schedule", "datasource"]


def test_the_list_of_schedules_tells_no_times_of_day_and_one_schedule_does(publisher: Publisher) -> None:
    interval = TSC.DailyInterval(dt.time(1))
    created = publisher.server.schedules.create(
        TSC.ScheduleItem(f"times {publisher.project.name}", 50, "Extract", "Parallel", interval)
    )
    listed = next(item for item in TSC.Pager(publisher.server.schedules) if item.id == created.id)
    assert (listed.interval_item, listed.next_run_at) == (None, created.next_run_at)
    assert publisher.server.schedules.get_by_id(created.id).interval_item.start_time == dt.time(1)


def test_a_created_task_is_answered_with_its_schedule_beside_it(publisher: Publisher, datasource: Any) -> None:
    item = TSC.TaskItem(None, "FullRefresh", None, target=TSC.models.target.Target(datasource.id, "datasource"))
    item.schedule_item = TSC.ScheduleItem(None, None, None, None, TSC.DailyInterval(dt.time(5), "Monday"))
    root = ET.fromstring(publisher.server.tasks.create(item))
    refresh, schedule = root
    assert (refresh.tag, refresh.get("type")) == (f"{NAMESPACE}extractRefresh", "FullRefresh")
    assert (schedule.tag, schedule[0].tag) == (f"{NAMESPACE}schedule", f"{NAMESPACE}frequencyDetails")
