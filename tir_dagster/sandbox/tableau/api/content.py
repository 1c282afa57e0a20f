"""Projects and datasources: listing, reading, changing, deleting, downloading."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Download, Operation, operation
from tir_dagster.sandbox.tableau.archive import Package
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.store import Row, update
from tir_dagster.sandbox.tableau.webhooks import DELETED, UPDATED, announce
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, moment, node, required, whole_number
from tir_dagster.sandbox.tableau.xmltree import attribute, children

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []

_DATASOURCES = """
SELECT d.*, p.name AS project_name, u.name AS owner_name, r.size FROM datasources d
JOIN projects p ON p.id = d.project_id JOIN users u ON u.id = d.owner_id
JOIN revisions r ON r.datasource_id = d.id AND r.number = d.revision
"""


def _datasource_row(row: Row) -> dict[str, Any]:
    """A datasource by the names the REST API filters, sorts and shows it under."""
    return {
        "id": row["id"],
        "name": row["name"],
        "contentUrl": row["content_url"],
        "type": row["kind"],
        "description": row["description"],
        "createdAt": moment(row["created"]),
        "updatedAt": moment(row["updated"]),
        "isCertified": bool(row["certified"]),
        "certificationNote": row["certification_note"],
        "hasExtracts": bool(row["has_extracts"]),
        "size": (row["size"] + 1024 * 1024 - 1) // (1024 * 1024),
        "projectName": row["project_name"],
        "ownerName": row["owner_name"],
        "projectId": row["project_id"],
        "ownerId": row["owner_id"],
        "tags": " ".join(json.loads(row["tags"])),
        "labels": json.loads(row["tags"]),
    }


_SHOWN = (
    "id",
    "name",
    "contentUrl",
    "type",
    "description",
    "createdAt",
    "updatedAt",
    "isCertified",
    "certificationNote",
    "hasExtracts",
    "size",
)


def _datasource(address: str, row: Any) -> ET.Element:
    return node(
        "datasource",
        {
            **{name: row[name] for name in _SHOWN},
            "encryptExtracts": False,
            "useRemoteQueryAgent": False,
            "webpageUrl": f"{address}/#/datasources/{row['contentUrl']}",
        },
        node("project", {"id": row["projectId"], "name": row["projectName"]}),
        node("owner", {"id": row["ownerId"], "name": row["ownerName"]}),
        node("tags", {}, *(node("tag", {"label": label}) for label in row["labels"])),
        node("askData", {"enablement": "SiteDefault"}),
    )


def datasource_element(call: Call, datasource_id: str) -> ET.Element:
    """One datasource as answers show it."""
    row = call.server.store.row(f"{_DATASOURCES} WHERE d.id = ?", datasource_id)
    if row is None:
        raise ApiError(404004, f"Datasource {datasource_id!r} could not be found.")
    return _datasource(call.address, _datasource_row(row))


def _project_row(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "description": row["description"] or "",
        "createdAt": moment(row["created"]),
        "updatedAt": moment(row["updated"]),
        "contentPermissions": row["content_permissions"],
        "parentProjectId": row["parent_id"],
        "topLevelProject": row["parent_id"] is None,
        "ownerId": row["owner_id"],
    }


def _project(row: Any, *, writeable: bool) -> ET.Element:
    shown = {name: value for name, value in row.items() if name != "ownerId"}
    return node("project", {**shown, "writeable": writeable}, node("owner", {"id": row["ownerId"]}))


@operation(OPERATIONS, "GET", "S/projects")
def list_projects(call: Call) -> Answer:
    rows = call.server.store.rows("SELECT * FROM projects WHERE site_id = ? ORDER BY created", call.session.site_id)
    # The project is "default", and clients look for "Default": the name is found in any case.
    shown = [_project_row(row) for row in rows]
    project = partial(_project, writeable=call.session.may_write)
    return Answer(content=page(shown, call.query, "projects", project, any_case={"name"}))


@operation(OPERATIONS, "POST", "S/projects")
def create_project(call: Call) -> Answer:
    call.session.must_write("create projects")
    attributes = {str(name): str(value) for name, value in required(call.request, "project").attrib.items()}
    row = content.create_project(call.server, call.session, attributes)
    return Answer(201, (_project(_project_row(row), writeable=True),))


@operation(OPERATIONS, "DELETE", "S/projects/{project}")
def delete_project(call: Call) -> Answer:
    """A project goes with everything in it, projects below it included."""
    call.session.must_administer("delete projects")
    wanted = content.project(call.server, call.session, call.path["project"])
    if wanted["parent_id"] is None and wanted["name"] == "default":
        raise ApiError(403004, "The default project cannot be deleted.")
    files: list[str] = []
    with call.server.store.transaction() as db:
        for project_id in _with_projects_below(db, wanted["id"]):
            for row in db.execute("SELECT * FROM datasources WHERE project_id = ?", (project_id,)).fetchall():
                files += _delete_datasource(call, db, row)
            db.execute("DELETE FROM workbooks WHERE project_id = ?", (project_id,))
            db.execute("DELETE FROM projects WHERE id = ?", (project_id,))
    call.server.drop_packages(files)
    return Answer(204)


def _with_projects_below(db: Any, project_id: str) -> list[str]:
    found = [project_id]
    for parent in found:
        found += [row["id"] for row in db.execute("SELECT id FROM projects WHERE parent_id = ?", (parent,))]
    return found


@operation(OPERATIONS, "GET", "S/datasources")
def list_datasources(call: Call) -> Answer:
    rows = call.server.store.rows(f"{_DATASOURCES} WHERE d.site_id = ? ORDER BY d.created, d.id", call.session.site_id)
    shown = partial(_datasource, call.address)
    return Answer(content=page([_datasource_row(row) for row in rows], call.query, "datasources", shown))


def _wanted(call: Call) -> Row:
    return content.datasource(call.server, call.session, call.path["datasource"])


@operation(OPERATIONS, "GET", "S/datasources/{datasource}")
def get_datasource(call: Call) -> Answer:
    return Answer(content=(datasource_element(call, _wanted(call)["id"]),))


@operation(OPERATIONS, "PUT", "S/datasources/{datasource}")
def update_datasource(call: Call) -> Answer:
    call.session.must_write("change datasources")
    row, asked = _wanted(call), required(call.request, "datasource")
    changes: dict[str, Any] = {"updated": call.server.now()}
    for name, column in (("name", "name"), ("description", "description"), ("certificationNote", "certification_note")):
        if (value := attribute(asked, name)) is not None:
            changes[column] = value
    if (certified := attribute(asked, "isCertified")) is not None:
        changes["certified"] = int(is_true(certified))
    if (project := find(asked, "project")) is not None and (project_id := attribute(project, "id")):
        changes["project_id"] = content.project(call.server, call.session, project_id)["id"]
    if (owner := find(asked, "owner")) is not None and (owner_id := attribute(owner, "id")) != row["owner_id"]:
        changes["owner_id"] = _new_owner(call, owner_id or "")
    with call.server.store.transaction() as db:
        place = (changes.get("project_id", row["project_id"]), changes.get("name", row["name"]), row["id"])
        if db.execute("SELECT 1 FROM datasources WHERE project_id = ? AND name = ? AND id <> ?", place).fetchone():
            raise ApiError(409006, f"A datasource named {place[1]!r} already exists in the project.")
        update(db, "datasources", row["id"], **changes)
        announce(call.server, db, UPDATED, row["id"])
    return Answer(content=(datasource_element(call, row["id"]),))


def _new_owner(call: Call, owner_id: str) -> str:
    call.session.must_administer("change the owner")
    known = "SELECT 1 FROM site_users WHERE site_id = ? AND user_id = ?"
    if call.server.store.row(known, call.session.site_id, owner_id) is None:
        raise ApiError(404002, f"User {owner_id!r} could not be found.")
    return owner_id


@operation(OPERATIONS, "DELETE", "S/datasources/{datasource}")
def delete_datasource(call: Call) -> Answer:
    call.session.must_write("delete datasources")
    row = _wanted(call)
    with call.server.store.transaction() as db:
        files = _delete_datasource(call, db, row)
    call.server.drop_packages(files)
    return Answer(204)


def _delete_datasource(call: Call, db: Any, row: Row) -> list[str]:
    """Delete it within a transaction; the files that nobody needs afterwards."""
    named = "SELECT file, published_file FROM revisions WHERE datasource_id = ?"
    files = [file for entry in db.execute(named, (row["id"],)) for file in entry if file]
    call.jobs.fail_jobs_of(row["id"], f"The data source {row['name']!r} was deleted.")
    announce(call.server, db, DELETED, row["id"])
    db.execute("DELETE FROM datasources WHERE id = ?", (row["id"],))
    return files


@operation(OPERATIONS, "PUT", "S/datasources/{datasource}/tags")
def add_tags(call: Call) -> Answer:
    call.session.must_write("tag datasources")
    row = _wanted(call)
    # A label with spaces or commas comes in double quotes and is one tag.
    given = [(attribute(tag, "label") or "").strip('"') for tag in children(required(call.request, "tags"), "tag")]
    with call.server.store.transaction() as db:
        labels = sorted({*json.loads(row["tags"]), *filter(None, given)})
        update(db, "datasources", row["id"], tags=json.dumps(labels))
    return Answer(content=(node("tags", {}, *(node("tag", {"label": label}) for label in labels)),))


@operation(OPERATIONS, "DELETE", "S/datasources/{datasource}/tags/{label:path}")
def delete_tag(call: Call) -> Answer:
    call.session.must_write("tag datasources")
    row = _wanted(call)
    labels = [label for label in json.loads(row["tags"]) if label != call.path["label"].strip('"')]
    with call.server.store.transaction() as db:
        update(db, "datasources", row["id"], tags=json.dumps(labels))
    return Answer(204)


@operation(OPERATIONS, "GET", "S/datasources/{datasource}/revisions")
def list_revisions(call: Call) -> Answer:
    source = _wanted(call)
    rows = call.server.store.rows(
        "SELECT r.*, u.name FROM revisions r JOIN users u ON u.id = publisher_id WHERE datasource_id = ? ORDER BY number",
        source["id"],
    )
    shown = [
        {
            "revisionNumber": row["number"],
            "publishedAt": moment(row["published"]),
            "deleted": bool(row["deleted"]),
            "current": row["number"] == source["revision"],
            "sizeInBytes": row["size"] if call.server.settings.current.changes_show else None,
            "publisher": (row["publisher_id"], row["name"]),
        }
        for row in rows
    ]
    return Answer(content=page(shown, call.query, "revisions", _revision))


def _revision(row: Any) -> ET.Element:
    publisher = node("publisher", {"id": row["publisher"][0], "name": row["publisher"][1]})
    return node("revision", {name: value for name, value in row.items() if name != "publisher"}, publisher)


@operation(OPERATIONS, "GET", "S/datasources/{datasource}/content")
def download(call: Call) -> Download:
    return _download(call, None)


@operation(OPERATIONS, "GET", "S/datasources/{datasource}/revisions/{revision}/content")
def download_revision(call: Call) -> Download:
    """What was published, without what refreshes made of it since."""
    return _download(call, _revision_number(call))


@operation(OPERATIONS, "DELETE", "S/datasources/{datasource}/revisions/{revision}", since=(2, 3))
def delete_revision(call: Call) -> Answer:
    call.session.must_write("remove revisions")
    content.delete_revision(call.server, _wanted(call), _revision_number(call))
    return Answer(204)


def _revision_number(call: Call) -> int:
    number = whole_number(call.path["revision"])
    if number is None:
        raise ApiError(400000, f"Not a revision number: {call.path['revision']!r}")
    return number


def _download(call: Call, number: int | None) -> Download:
    source = _wanted(call)
    # Looked up and opened under the lock: a refresh removes the file it replaced.
    with call.server.store.transaction() as db:
        row = content.revision(db, source["id"], _wanted(call)["revision"] if number is None else number)
        path = call.server.package((number and row["published_file"]) or row["file"])
        stream = path.open("rb")
    file_name = f"{source['name']}{path.suffix}"
    if is_true(call.query.get("includeExtract", "true")) or path.suffix != ".tdsx":
        size = os.fstat(stream.fileno()).st_size
        return Download(stream, size, file_name, f'"{path.name}"')
    with stream, tempfile.TemporaryDirectory(dir=call.server.scratch, prefix="download.") as folder:
        target = Path(folder) / "package.tdsx"
        Package(stream, max_bytes=call.server.max_bytes).without_extracts(target)
        return Download(target.open("rb"), target.stat().st_size, file_name)
