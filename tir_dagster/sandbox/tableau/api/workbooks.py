"""Workbooks and their views: publishing, listing, reading, deleting. Nothing is drawn or exported."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import workbooks
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.api.publish import default_project, stage_file
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.store import Row
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, moment, node, required
from tir_dagster.sandbox.tableau.xmltree import attribute, descendants

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []

WORKBOOKS = """
SELECT w.*, w.rowid AS number, p.name AS project_name, u.name AS owner_name, s.content_url AS site_url,
    (SELECT id FROM views v WHERE v.workbook_id = w.id ORDER BY position LIMIT 1) AS default_view
FROM workbooks w JOIN projects p ON p.id = w.project_id JOIN users u ON u.id = w.owner_id
JOIN sites s ON s.id = w.site_id WHERE w.site_id = ?
"""
VIEWS = """
SELECT v.*, w.content_url AS workbook_url, w.name AS workbook_name, w.project_id, p.name AS project_name, w.owner_id,
    u.name AS owner_name
FROM views v JOIN workbooks w ON w.id = v.workbook_id JOIN projects p ON p.id = w.project_id
JOIN users u ON u.id = w.owner_id WHERE w.site_id = ?
"""


def _workbook_row(row: Row) -> dict[str, Any]:
    """A workbook by the names the REST API filters, sorts and shows it under."""
    return {
        "id": row["id"],
        "name": row["name"],
        "description": row["description"],
        "contentUrl": row["content_url"],
        "showTabs": bool(row["show_tabs"]),
        "size": (row["size"] + 1024 * 1024 - 1) // (1024 * 1024),
        "createdAt": moment(row["created"]),
        "updatedAt": moment(row["updated"]),
        "defaultViewId": row["default_view"],
        "page": f"/#/site/{row['site_url']}/workbooks/{row['number']}",
        "projectId": row["project_id"],
        "projectName": row["project_name"],
        "ownerId": row["owner_id"],
        "ownerName": row["owner_name"],
    }


_SHOWN = ("id", "name", "description", "contentUrl", "showTabs", "size", "createdAt", "updatedAt", "defaultViewId")


def _workbook(address: str, row: Any, *views: ET.Element) -> ET.Element:
    element = node(
        "workbook",
        {**{name: row[name] for name in _SHOWN}, "webpageUrl": f"{address}{row['page']}", "encryptExtracts": False},
        node("project", {"id": row["projectId"], "name": row["projectName"]}),
        node("owner", {"id": row["ownerId"], "name": row["ownerName"]}),
        node("tags"),
    )
    if views:
        element.append(node("views", {}, *views))
    return element


def _view_row(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "contentUrl": f"{row['workbook_url']}/sheets/{row['content_url']}",
        "createdAt": moment(row["created"]),
        "updatedAt": moment(row["updated"]),
        "viewUrlName": row["content_url"],
        "sheetType": row["kind"],
        "workbookId": row["workbook_id"],
        "workbookName": row["workbook_name"],
        "projectId": row["project_id"],
        "projectName": row["project_name"],
        "ownerId": row["owner_id"],
        "ownerName": row["owner_name"],
    }


_SHOWN_OF_VIEW = ("id", "name", "contentUrl", "createdAt", "updatedAt", "viewUrlName")


def _view(row: Any) -> ET.Element:
    """A view by itself, which names its workbook."""
    return node(
        "view",
        {name: row[name] for name in _SHOWN_OF_VIEW},
        node("workbook", {"id": row["workbookId"]}),
        node("owner", {"id": row["ownerId"]}),
        node("project", {"id": row["projectId"]}),
        node("tags"),
    )


def _view_of_workbook(row: Any) -> ET.Element:
    return node("view", {name: row[name] for name in _SHOWN_OF_VIEW}, node("tags"))


def _find_workbook(call: Call, workbook_id: str) -> Row:
    row = call.server.store.row(f"{WORKBOOKS} AND w.id = ?", call.session.site_id, workbook_id)
    if row is None:
        raise ApiError(404006, f"Workbook {workbook_id!r} could not be found.")
    return row


def _views_of(call: Call, workbook_id: str) -> list[dict[str, Any]]:
    rows = call.server.store.rows(
        f"{VIEWS} AND v.workbook_id = ? ORDER BY v.position", call.session.site_id, workbook_id
    )
    return [_view_row(row) for row in rows]


def _whole_workbook(call: Call, workbook_id: str) -> ET.Element:
    """A workbook with its views, as every answer about a single one shows it."""
    row = _workbook_row(_find_workbook(call, workbook_id))
    return _workbook(call.address, row, *(_view_of_workbook(view) for view in _views_of(call, workbook_id)))


@operation(OPERATIONS, "GET", "S/workbooks")
def list_workbooks(call: Call) -> Answer:
    rows = call.server.store.rows(f"{WORKBOOKS} ORDER BY w.created, w.id", call.session.site_id)
    shown = partial(_workbook, call.address)
    return Answer(content=page([_workbook_row(row) for row in rows], call.query, "workbooks", shown))


@operation(OPERATIONS, "POST", "S/workbooks", multipart=True)
def publish_workbook(call: Call) -> Answer:
    call.session.must_write("publish workbooks")
    asked = required(call.request, "workbook")
    kind = call.query.get("workbookType", "twbx").lower()
    if kind not in workbooks.KINDS:
        raise ApiError(400000, f"Files of type {kind!r} cannot be published; known are {list(workbooks.KINDS)}.")
    if is_true(call.query.get("asJob")):
        raise ApiError(400000, "Publishing a workbook as a job is not supported here.")
    name, project = (attribute(asked, "name") or "").strip(), find(asked, "project")
    if not name:
        raise ApiError(400000, "A workbook needs a name.")
    publication = workbooks.WorkbookPublication(
        name=name,
        project_id=(attribute(project, "id") if project is not None else None) or default_project(call),
        overwrite=is_true(call.query.get("overwrite")),
        description=attribute(asked, "description"),
        show_tabs=is_true(attribute(asked, "showTabs")),
        hidden=frozenset(
            attribute(view, "name") or "" for view in descendants(asked, "view") if is_true(attribute(view, "hidden"))
        ),
    )
    workbooks.check_workbook(call.server, call.session, publication)
    file = call.server.incoming(stage_file(call))
    try:
        workbook_id = workbooks.publish_workbook(call.server, call.session, publication, file=file, kind=kind)
    finally:
        file.unlink(missing_ok=True)
    return Answer(201, (_whole_workbook(call, workbook_id),))


@operation(OPERATIONS, "GET", "S/workbooks/{workbook}")
def get_workbook(call: Call) -> Answer:
    return Answer(content=(_whole_workbook(call, call.path["workbook"]),))


@operation(OPERATIONS, "DELETE", "S/workbooks/{workbook}")
def delete_workbook(call: Call) -> Answer:
    call.session.must_write("delete workbooks")
    call.server.store.run("DELETE FROM workbooks WHERE id = ?", _find_workbook(call, call.path["workbook"])["id"])
    return Answer(204)


@operation(OPERATIONS, "GET", "S/workbooks/{workbook}/views")
def list_views_of_workbook(call: Call) -> Answer:
    """All of them: this list has no pages."""
    workbook = _find_workbook(call, call.path["workbook"])
    return Answer(content=(node("views", {}, *(_view_of_workbook(view) for view in _views_of(call, workbook["id"]))),))


@operation(OPERATIONS, "GET", "S/views", since=(2, 2))
def list_views(call: Call) -> Answer:
    rows = call.server.store.rows(f"{VIEWS} ORDER BY w.created, v.position", call.session.site_id)
    return Answer(content=page([_view_row(row) for row in rows], call.query, "views", _view))


@operation(OPERATIONS, "GET", "S/views/{view}", since=(3, 1))
def get_view(call: Call) -> Answer:
    row = call.server.store.row(f"{VIEWS} AND v.id = ?", call.session.site_id, call.path["view"])
    if row is None:
        raise ApiError(404011, f"View {call.path['view']!r} could not be found.")
    return Answer(content=(_view(_view_row(row)),))
