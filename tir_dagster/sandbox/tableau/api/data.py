"""Changing the data of a live-to-Hyper datasource in place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.api.jobs import job_element
from tir_dagster.sandbox.tableau.api.publish import find_upload
from tir_dagster.sandbox.tableau.batches import BatchError
from tir_dagster.sandbox.tableau.patching import check_live_to_hyper
from tir_dagster.sandbox.tableau.wire import Answer, ApiError

if TYPE_CHECKING:
    from tir_dagster.sandbox.tableau.store import Row

OPERATIONS: list[Operation] = []
SINCE = (3, 13)
_MB = 1024 * 1024


@operation(OPERATIONS, "PATCH", "S/datasources/{datasource}/data", json=True, since=SINCE)
def update_data(call: Call) -> Answer:
    return _queued(call, content.datasource(call.server, call.session, call.path["datasource"]))


@operation(OPERATIONS, "PATCH", "S/datasources/{datasource}/connections/{connection}/data", json=True, since=SINCE)
def update_connection_data(call: Call) -> Answer:
    source = content.datasource(call.server, call.session, call.path["datasource"])
    known = "SELECT 1 FROM connections WHERE id = ? AND datasource_id = ?"
    if call.server.store.row(known, call.path["connection"], source["id"]) is None:
        raise ApiError(404004, f"The connection {call.path['connection']!r} could not be found.")
    return _queued(call, source)


def _queued(call: Call, source: Row) -> Answer:
    call.session.must_write("change the data of datasources")
    request_id = call.headers.get("requestid", "").strip()
    if not request_id:
        raise ApiError(400000, "The header RequestID is missing.")
    actions = _actions(call.request)
    try:
        check_live_to_hyper(call.server, source["id"])
    except BatchError as error:
        # Which code a real server answers here is not documented.
        raise ApiError(400000, str(error)) from error
    upload_id, connection = call.query.get("uploadSessionId"), _connection(call, source)
    if upload_id is None:
        job = call.jobs.queue_patch(source, request_id, actions, lambda: None, connection=connection)
    else:
        with call.server.uploads.alone(upload_id):
            upload = find_upload(call, upload_id)
            stage = partial(_stage, call, upload)
            job = call.jobs.queue_patch(source, request_id, actions, stage, connection=connection)
    return Answer(202, (job_element(call, job),))


def _connection(call: Call, source: Row) -> str | None:
    """The connection whose data is changed: the named one, or the datasource's first."""
    first = "SELECT id FROM connections WHERE datasource_id = ? ORDER BY position"
    row = call.server.store.row(first, source["id"])
    return call.path.get("connection") or (row["id"] if row is not None else None)


def _actions(body: Any) -> list[dict[str, Any]]:
    actions = body.get("actions") if isinstance(body, dict) else None
    if not isinstance(actions, list) or not actions or not all(isinstance(action, dict) for action in actions):
        raise ApiError(400000, "The request's body is not {'actions': [...]} with at least one action.")
    return actions


def _stage(call: Call, upload: Row) -> str:
    """The payload, taken from its upload session, which is used up."""
    limit = call.server.settings.current.max_payload_mb
    if upload["size"] > limit * _MB:
        raise ApiError(413000, f"The payload has {upload['size']} bytes; the limit is {limit} MB.")
    content.check_quota(call.server, call.session.site_id, upload["size"])
    call.server.store.run("DELETE FROM uploads WHERE id = ?", upload["id"])
    file: str = upload["file"]
    return file
