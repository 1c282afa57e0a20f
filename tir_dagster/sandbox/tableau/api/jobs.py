"""Refreshing, and the jobs it starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.jobs import GONE_CODE, PATCH, REFRESH
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, moment, node, text_node
from tir_dagster.sandbox.tableau.xmltree import attribute

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

    from tir_dagster.sandbox.tableau.store import Row

OPERATIONS: list[Operation] = []
INCREMENTAL_SINCE = (3, 25)


def job_element(call: Call, row: Row) -> ET.Element:
    """One job; `finishCode` appears when it is over. A job that publishes tells nothing more."""
    over = row["completed"] is not None
    element = node(
        "job",
        {
            "id": row["id"],
            "mode": "Asynchronous",
            "type": row["kind"],
            "progress": 100 if over else 0,
            "createdAt": moment(row["created"]),
            "startedAt": moment(row["started"]),
            "updatedAt": moment(row["completed"] or row["started"] or row["created"]),
            "completedAt": moment(row["completed"]),
            "finishCode": row["finish_code"],
        },
    )
    source = node("datasource", {"id": row["datasource_id"], "name": row["title"]})
    if row["kind"] == REFRESH:
        notes = [text_node("notes", row["notes"])] if row["notes"] else []
        element.append(node("extractRefreshJob", {}, *notes, source))
    elif row["kind"] == PATCH:
        luid = text_node("connectionLuid", json.loads(row["payload"]).get("connection") or "")
        # The schema demands this element; servers were seen to say nothing in it, not even why a change failed.
        told = row["notes"] if call.server.settings.current.change_notes else ""
        element.append(node("updateUploadedFileJob", {}, source, luid, text_node("notes", told)))
    return element


def must_run_now(call: Call) -> None:
    """The site may leave refreshes to the schedules; the code was not measured."""
    if not call.server.settings.current.run_now:
        raise ApiError(403004, "Running refreshes by hand is disabled on this site.")


@operation(OPERATIONS, "POST", "S/datasources/{datasource}/refresh", since=(2, 8))
def refresh(call: Call) -> Answer:
    call.session.must_write("refresh datasources")
    must_run_now(call)
    row = content.datasource(call.server, call.session, call.path["datasource"])
    asked = find(call.request, "extractRefresh")
    wants_increment = asked is not None and is_true(attribute(asked, "incremental"))
    # Servers before 3.25 do not know the attribute and refresh everything.
    knows = call.version >= INCREMENTAL_SINCE and not call.server.settings.current.ignore_incremental
    incremental = wants_increment and knows
    return Answer(202, (job_element(call, call.jobs.queue_refresh(row, incremental=incremental)),))


@operation(OPERATIONS, "GET", "S/jobs/{job}", since=(2, 6))
def get_job(call: Call) -> Answer:
    fault = call.server.faults.strike(("vanish_job",), "GET", call.url)
    row = call.jobs.find(call.session, call.path["job"])
    if fault is not None:
        call.jobs.forget(row["id"], int(fault.code or GONE_CODE))
        row = call.jobs.find(call.session, row["id"])
    return Answer(content=(job_element(call, row),))


@operation(OPERATIONS, "PUT", "S/jobs/{job}", since=(3, 1))
def cancel_job(call: Call) -> Answer:
    call.session.must_write("cancel jobs")
    call.jobs.cancel(call.jobs.find(call.session, call.path["job"])["id"])
    return Answer()


def _background_job_row(row: Row) -> dict[str, Any]:
    incremental = row["kind"] == REFRESH and json.loads(row["payload"]).get("incremental")
    kinds = {REFRESH: "increment_extracts" if incremental else "refresh_extracts", PATCH: "update_uploaded_file"}
    return {
        "id": row["id"],
        "status": row["state"],
        "createdAt": moment(row["created"]),
        "startedAt": moment(row["started"]),
        "endedAt": moment(row["completed"]),
        "completedAt": moment(row["completed"]),
        "priority": 50,
        "jobType": kinds.get(row["kind"], "publish_datasource"),
        "title": row["title"],
        "subtitle": "Data Source",
        "notes": row["notes"],
        "progress": 100 if row["completed"] is not None else 0,
    }


def _background_job(row: Any) -> ET.Element:
    hidden = ("completedAt", "notes", "progress")
    return node("backgroundJob", {name: value for name, value in row.items() if name not in hidden})


@operation(OPERATIONS, "GET", "S/jobs", since=(3, 1))
def list_jobs(call: Call) -> Answer:
    rows = [_background_job_row(row) for row in call.jobs.all(call.session)]
    return Answer(content=page(rows, call.query, "backgroundJobs", _background_job))
