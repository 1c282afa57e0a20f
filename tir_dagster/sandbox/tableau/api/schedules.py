"""Schedules and the extract refresh tasks on them."""

from __future__ import annotations

import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.api.jobs import job_element, must_run_now
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.store import Row, insert, update
from tir_dagster.sandbox.tableau.timetable import ACTIVE, next_run_of
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, moment, node, required, whole_number
from tir_dagster.sandbox.tableau.xmltree import attribute, children

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []
_FREQUENCIES = ("Hourly", "Daily", "Weekly", "Monthly")
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d")


def _frequency_details(element: Any) -> str:
    """A schedule's times as JSON: start, end, and the intervals' attributes."""
    details = find(element, "frequencyDetails")
    if details is None:
        return "{}"
    value: dict[str, Any] = {}
    for name in ("start", "end"):
        if (text := attribute(details, name)) is not None:
            if not _TIME.fullmatch(text):
                raise ApiError(400000, f"Invalid {name} time: {text!r}")
            value[name] = text
    intervals = find(details, "intervals")
    value["intervals"] = [
        {str(name): str(text) for name, text in interval.attrib.items()}
        for interval in (children(intervals, "interval") if intervals is not None else ())
    ]
    return json.dumps(value)


def _details_element(text: str) -> ET.Element:
    value = json.loads(text)
    intervals = node("intervals", {}, *(node("interval", interval) for interval in value.get("intervals", [])))
    return node("frequencyDetails", {"start": value.get("start", "00:00:00"), "end": value.get("end")}, intervals)


def _next_run(call: Call, frequency: str | None, details: str) -> float | None:
    try:
        return next_run_of(call.server, frequency, details)
    except (ValueError, OverflowError) as error:
        raise ApiError(400000, f"Invalid intervals: {error}") from error


def _schedule_row(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "state": row["state"],
        "priority": row["priority"],
        "createdAt": moment(row["created"]),
        "updatedAt": moment(row["updated"]),
        "type": row["kind"],
        "frequency": row["frequency"],
        "executionOrder": row["execution_order"],
        "nextRunAt": moment(row["next_run"]) if row["state"] == ACTIVE else None,
        "details": row["details"],
    }


def _schedule(row: Any) -> ET.Element:
    return node("schedule", _shown(row), _details_element(row["details"]))


def _shown(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "details"}


def _find_schedule(call: Call) -> Row:
    row = call.server.store.row("SELECT * FROM schedules WHERE id = ?", call.path["schedule"])
    if row is None:
        raise ApiError(404021, f"Schedule {call.path['schedule']!r} could not be found.")
    return row


@operation(OPERATIONS, "GET", "/schedules")
def list_schedules(call: Call) -> Answer:
    call.session.must_administer("list the schedules")
    rows = call.server.store.rows("SELECT * FROM schedules ORDER BY name")
    # The list tells no times of day: those are in the answer about one schedule.
    shown = [_schedule_row(row) for row in rows]
    return Answer(content=page(shown, call.query, "schedules", lambda row: node("schedule", _shown(row))))


@operation(OPERATIONS, "GET", "/schedules/{schedule}", since=(3, 8))
def get_schedule(call: Call) -> Answer:
    return Answer(content=(_schedule(_schedule_row(_find_schedule(call))),))


@operation(OPERATIONS, "POST", "/schedules")
def create_schedule(call: Call) -> Answer:
    call.session.must_administer("create schedules")
    asked = required(call.request, "schedule")
    name, frequency = attribute(asked, "name") or "", attribute(asked, "frequency") or ""
    if not name or frequency not in _FREQUENCIES:
        raise ApiError(400000, f"A schedule needs a name and one of the frequencies {list(_FREQUENCIES)}.")
    schedule_id, now, details = str(uuid.uuid4()), call.server.now(), _frequency_details(asked)
    with call.server.store.transaction() as db:
        if db.execute("SELECT 1 FROM schedules WHERE name = ?", (name,)).fetchone():
            raise ApiError(409006, f"A schedule named {name!r} already exists.")
        insert(
            db,
            "schedules",
            id=schedule_id,
            name=name,
            priority=_priority(asked, 50),
            kind=attribute(asked, "type") or "Extract",
            state=ACTIVE,
            execution_order=attribute(asked, "executionOrder") or "Parallel",
            frequency=frequency,
            details=details,
            created=now,
            updated=now,
            next_run=_next_run(call, frequency, details),
        )
    row = call.server.store.row("SELECT * FROM schedules WHERE id = ?", schedule_id)
    assert row is not None
    return Answer(201, (_schedule(_schedule_row(row)),))


def _priority(asked: Any, default: int) -> int:
    text = attribute(asked, "priority") or str(default)
    priority = whole_number(text)
    if priority is None or not 1 <= priority <= 100:
        raise ApiError(400000, f"Invalid priority: {text!r}")
    return priority


@operation(OPERATIONS, "PUT", "/schedules/{schedule}")
def update_schedule(call: Call) -> Answer:
    call.session.must_administer("change schedules")
    row, asked = _find_schedule(call), required(call.request, "schedule")
    changes: dict[str, Any] = {"updated": call.server.now(), "priority": _priority(asked, row["priority"])}
    for name, column in (("name", "name"), ("state", "state"), ("executionOrder", "execution_order")):
        if value := attribute(asked, name):
            changes[column] = value
    if (frequency := attribute(asked, "frequency")) in _FREQUENCIES:
        changes["frequency"] = frequency
    if find(asked, "frequencyDetails") is not None:
        changes["details"] = _frequency_details(asked)
    changed = {**dict(row), **changes}
    changes["next_run"] = _next_run(call, changed["frequency"], changed["details"])
    with call.server.store.transaction() as db:
        update(db, "schedules", row["id"], **changes)
    return Answer(content=(_schedule(_schedule_row(_find_schedule(call))),))


@operation(OPERATIONS, "PUT", "S/schedules/{schedule}/datasources", since=(2, 8))
def add_to_schedule(call: Call) -> Answer:
    call.session.must_write("schedule refreshes")
    schedule = _find_schedule(call)
    asked = required(call.request, "task", "extractRefresh")
    task_id = _create_task(call, asked, schedule_id=schedule["id"], priority=schedule["priority"])
    return Answer(content=(_task(_find_task(call, task_id)),))


@operation(OPERATIONS, "GET", "S/schedules/{schedule}/extracts")
def list_extracts(call: Call) -> Answer:
    schedule = _find_schedule(call)
    rows = call.server.store.rows(
        "SELECT * FROM tasks WHERE schedule_id = ? AND site_id = ?", schedule["id"], call.session.site_id
    )
    return Answer(content=page([dict(row) for row in rows], call.query, "extracts", _extract))


def _extract(row: Any) -> ET.Element:
    source = node("datasource", {"id": row["datasource_id"]})
    return node("extract", {"id": row["id"], "priority": row["priority"], "type": _kind(row)}, source)


def _kind(row: Any) -> str:
    return "IncrementalRefresh" if row["incremental"] else "FullRefresh"


_TASKS = """
SELECT t.*, s.name AS schedule_name, s.state, s.kind, s.frequency AS schedule_frequency,
    s.details AS schedule_details, s.created, s.updated, s.priority AS schedule_priority, s.execution_order,
    s.next_run AS schedule_next_run
FROM tasks t LEFT JOIN schedules s ON s.id = t.schedule_id WHERE t.site_id = ?
"""


def _find_task(call: Call, task_id: str) -> Row:
    row = call.server.store.row(f"{_TASKS} AND t.id = ?", call.session.site_id, task_id)
    if row is None:
        raise ApiError(404012, f"Task {task_id!r} could not be found.")
    return row


def _task(row: Any) -> ET.Element:
    """A task; when it ran last is told by no answer."""
    element = node(
        "extractRefresh",
        {
            "id": row["id"],
            "priority": row["priority"],
            "consecutiveFailedCount": row["failed_count"],
            "type": "IncrementExtractTask" if row["incremental"] else "RefreshExtractTask",
            "incremental": bool(row["incremental"]),
        },
    )
    if row["schedule_id"]:
        shown = {
            "id": row["schedule_id"],
            "name": row["schedule_name"],
            "state": row["state"],
            "priority": row["schedule_priority"],
            "type": row["kind"],
            "frequency": row["schedule_frequency"],
            "executionOrder": row["execution_order"],
            "createdAt": moment(row["created"]),
            "updatedAt": moment(row["updated"]),
            "nextRunAt": moment(row["schedule_next_run"]),
        }
        element.append(node("schedule", shown, _details_element(row["schedule_details"])))
    elif row["frequency"]:
        element.append(_own_schedule(row))
    element.append(node("datasource", {"id": row["datasource_id"]}))
    return node("task", {}, element)


def _own_schedule(row: Any, **more: Any) -> ET.Element:
    shown = {"frequency": row["frequency"], "nextRunAt": moment(row["next_run"]), **more}
    return node("schedule", shown, _details_element(row["details"]))


def _create_task(
    call: Call, asked: Any, *, schedule_id: str | None, priority: int, frequency: str | None = None, details: str = "{}"
) -> str:
    source = content.datasource(call.server, call.session, attribute(required(asked, "datasource"), "id") or "")
    incremental = is_true(attribute(asked, "incremental")) or attribute(asked, "type") == "IncrementalRefresh"
    task_id = str(uuid.uuid4())
    with call.server.store.transaction() as db:
        insert(
            db,
            "tasks",
            id=task_id,
            site_id=call.session.site_id,
            datasource_id=source["id"],
            schedule_id=schedule_id,
            incremental=int(incremental),
            priority=priority,
            failed_count=0,
            frequency=frequency,
            details=details,
            next_run=_next_run(call, frequency, details),
        )
    return task_id


@operation(OPERATIONS, "GET", "S/tasks/extractRefreshes", since=(2, 6))
def list_tasks(call: Call) -> Answer:
    """All tasks of the site: this list has no pages."""
    rows = call.server.store.rows(f"{_TASKS} ORDER BY t.rowid", call.session.site_id)
    return Answer(content=(node("tasks", {}, *(_task(row) for row in rows)),))


@operation(OPERATIONS, "POST", "S/tasks/extractRefreshes", since=(3, 19))
def create_task(call: Call) -> Answer:
    """A task with times of its own, as Tableau Cloud has them."""
    call.session.must_write("schedule refreshes")
    schedule = find(call.request, "schedule")
    task_id = _create_task(
        call,
        required(call.request, "extractRefresh"),
        schedule_id=None,
        priority=50,
        frequency=attribute(schedule, "frequency") if schedule is not None else None,
        details=_frequency_details(schedule) if schedule is not None else "{}",
    )
    task, now = _find_task(call, task_id), moment(call.server.now())
    refresh = node(
        "extractRefresh", {"id": task_id, "type": _kind(task)}, node("datasource", {"id": task["datasource_id"]})
    )
    timed = (_own_schedule(task, createdAt=now, updatedAt=now),) if task["frequency"] else ()
    return Answer(201, (refresh, *timed))


@operation(OPERATIONS, "GET", "S/tasks/extractRefreshes/{task}", since=(2, 6))
def get_task(call: Call) -> Answer:
    return Answer(content=(_task(_find_task(call, call.path["task"])),))


@operation(OPERATIONS, "DELETE", "S/tasks/extractRefreshes/{task}", since=(3, 6))
def delete_task(call: Call) -> Answer:
    call.session.must_write("unschedule refreshes")
    task = _find_task(call, call.path["task"])
    call.server.store.run("DELETE FROM tasks WHERE id = ?", task["id"])
    return Answer(204)


@operation(OPERATIONS, "POST", "S/tasks/extractRefreshes/{task}/runNow", since=(2, 6))
def run_task(call: Call) -> Answer:
    call.session.must_write("run tasks")
    must_run_now(call)
    task = _find_task(call, call.path["task"])
    source = content.datasource(call.server, call.session, task["datasource_id"])
    return Answer(content=(job_element(call, call.jobs.run_task(task, source)),))
