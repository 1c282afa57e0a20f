"""Publishing a datasource, in one request or after an upload in pieces."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.api.content import datasource_element
from tir_dagster.sandbox.tableau.api.jobs import job_element
from tir_dagster.sandbox.tableau.content import Credentials, Publication, check_publication
from tir_dagster.sandbox.tableau.multipart import copy_range
from tir_dagster.sandbox.tableau.publishing import KINDS, StagedPublish, publish_staged
from tir_dagster.sandbox.tableau.store import Row, insert
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, node, required
from tir_dagster.sandbox.tableau.xmltree import attribute

if TYPE_CHECKING:
    from pathlib import Path

OPERATIONS: list[Operation] = []


@operation(OPERATIONS, "POST", "S/fileUploads")
def start_upload(call: Call) -> Answer:
    call.session.must_write("upload files")
    call.server.drop_old_uploads()
    upload_id = f"{secrets.randbelow(9000) + 1000}:{secrets.token_hex(16)}-1:0"
    file = call.server.new_incoming()
    file.touch()
    with call.server.store.transaction() as db:
        insert(
            db,
            "uploads",
            id=upload_id,
            site_id=call.session.site_id,
            user_id=call.session.user_id,
            file=file.name,
            size=0,
            created=time.time(),
        )
    return Answer(201, (node("fileUpload", {"uploadSessionId": upload_id, "fileSize": 0}),))


def find_upload(call: Call, upload_id: str) -> Row:
    row = call.server.store.row(
        "SELECT * FROM uploads WHERE id = ? AND site_id = ? AND user_id = ?",
        upload_id,
        call.session.site_id,
        call.session.user_id,
    )
    if row is None or row["created"] < call.server.oldest_upload:
        raise ApiError(404015, f"The upload session {upload_id!r} could not be found.")
    return row


@operation(OPERATIONS, "PUT", "S/fileUploads/{upload}", multipart=True)
def append_upload(call: Call) -> Answer:
    if call.file is None:
        raise ApiError(400000, "The request has no part named 'tableau_file'.")
    # Two pieces sent at once would both be written at the same place: only the first one counts.
    with call.server.uploads.alone(call.path["upload"]):
        row = find_upload(call, call.path["upload"])
        size = row["size"] + call.file.stat().st_size
        if size > call.server.max_bytes:
            raise ApiError(413000, "The uploaded file is too large.")
        _append(call.server.incoming(row["file"]), row["size"], call.file)
        call.server.store.run("UPDATE uploads SET size = ? WHERE id = ?", size, row["id"])
    return Answer(content=(node("fileUpload", {"uploadSessionId": row["id"], "fileSize": size // (1024 * 1024)}),))


def _append(target: Path, start: int, piece: Path) -> None:
    """Write from the recorded size on: what a crash left behind it is overwritten."""
    with target.open("r+b") as out, piece.open("rb") as source:
        out.truncate(start)
        copy_range(source, 0, piece.stat().st_size, out, start)


@operation(OPERATIONS, "POST", "S/datasources", multipart=True)
def publish(call: Call) -> Answer:
    call.session.must_write("publish datasources")
    asked = required(call.request, "datasource")
    kind = call.query.get("datasourceType", "tdsx").lower()
    if kind not in KINDS:
        raise ApiError(400000, f"Files of type {kind!r} cannot be published; known are {list(KINDS)}.")
    if is_true(call.query.get("append")) or is_true(call.query.get("replace")):
        raise ApiError(400000, "Publishing to append or replace data is not supported here; use overwrite.")
    publication = _publication(call, asked)
    check_publication(call.server, call.session, publication)
    staged = StagedPublish(publication, stage_file(call), kind)
    if is_true(call.query.get("asJob")):
        return Answer(202, (job_element(call, call.jobs.queue_publish(call.session, staged)),))
    datasource_id = publish_staged(call.server, call.session, staged)
    return Answer(201, (datasource_element(call, datasource_id),))


def _publication(call: Call, asked: Any) -> Publication:
    project = find(asked, "project")
    name = (attribute(asked, "name") or "").strip()
    if not name:
        raise ApiError(400000, "A datasource needs a name.")
    certified = attribute(asked, "isCertified")
    return Publication(
        name=name,
        project_id=(attribute(project, "id") if project is not None else None) or default_project(call),
        overwrite=is_true(call.query.get("overwrite")),
        description=attribute(asked, "description"),
        certified=None if certified is None else is_true(certified),
        certification_note=attribute(asked, "certificationNote"),
        credentials=_credentials(asked),
    )


def default_project(call: Call) -> str:
    row = call.server.store.row(
        "SELECT id FROM projects WHERE site_id = ? AND parent_id IS NULL AND name = 'default'", call.session.site_id
    )
    if row is None:
        raise ApiError(404005, "The default project could not be found.")
    project_id: str = row["id"]
    return project_id


def _credentials(asked: Any) -> Credentials | None:
    element = find(asked, "connectionCredentials")
    if element is None:
        return None
    return Credentials(
        attribute(element, "name") or "",
        attribute(element, "password") or "",
        is_true(attribute(element, "embed")),
        is_true(attribute(element, "oAuth")),
    )


def stage_file(call: Call) -> str:
    """The file to publish, under a name of its own among the incoming ones: from this request or from an upload."""
    upload_id = call.query.get("uploadSessionId")
    if upload_id is None:
        if call.file is None:
            raise ApiError(400000, "The request has no part with the file to publish.")
        staged = call.server.new_incoming()
        call.file.replace(staged)
        return staged.name
    # The session is used up: a publish that failed starts with a new upload.
    with call.server.uploads.alone(upload_id):
        row = find_upload(call, upload_id)
        call.server.store.run("DELETE FROM uploads WHERE id = ?", upload_id)
    file: str = row["file"]
    return file
