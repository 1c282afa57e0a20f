"""Workbooks as the store holds them: what a .twb says of its sheets, dashboards and datasources, and who shows what of it.

Only what lists and lineage need is kept: nothing is drawn, and no workbook has an extract of its own.
"""

from __future__ import annotations

import copy
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import MAX_DOCUMENT_BYTES, BadPackageError, Package
from tir_dagster.sandbox.tableau.content import project
from tir_dagster.sandbox.tableau.store import Row, insert, update
from tir_dagster.sandbox.tableau.wire import ApiError
from tir_dagster.sandbox.tableau.xmltree import (
    UnsafeXmlError,
    attribute,
    bare,
    children,
    descendants,
    first,
    parse,
    serialise,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tir_dagster.sandbox.tableau.people import Session
    from tir_dagster.sandbox.tableau.server import Server

KINDS = ("twb", "twbx")
WORKSHEET, DASHBOARD = "worksheet", "dashboard"


@dataclass(frozen=True)
class EmbeddedDatasource:
    """A datasource of a workbook: it names a published one by its content URL, or has a document of its own."""

    name: str
    caption: str
    published: str | None
    document: bytes


@dataclass(frozen=True)
class Sheet:
    """A worksheet with the names of the workbook's datasources that it uses, or a dashboard with those of its sheets."""

    name: str
    kind: str
    uses: tuple[str, ...]
    hidden: bool


class WorkbookDocument:
    """A parsed .twb."""

    def __init__(self, text: bytes) -> None:
        try:
            self._root = parse(text)
        except UnsafeXmlError as error:
            raise BadPackageError(f"The .twb file was refused: {error}.") from error
        if bare(self._root.tag) != "workbook":
            raise BadPackageError(f"The .twb file describes a {bare(self._root.tag)}, not a workbook.")

    def datasources(self) -> list[EmbeddedDatasource]:
        return [
            _embedded(element)
            for element in self._listed("datasources", "datasource")
            if attribute(element, "name") != "Parameters"
        ]

    def sheets(self) -> list[Sheet]:
        """Worksheets, then dashboards, each in the order of the document."""
        hidden = {
            attribute(window, "name") for window in descendants(self._root, "window") if _is_true(window, "hidden")
        }
        worksheets = [
            Sheet(name, WORKSHEET, tuple(_used_datasources(element)), name in hidden)
            for element in self._listed("worksheets", "worksheet")
            if (name := attribute(element, "name"))
        ]
        known = {sheet.name for sheet in worksheets}
        dashboards = [
            Sheet(name, DASHBOARD, tuple(_zones(element, known)), name in hidden)
            for element in self._listed("dashboards", "dashboard")
            if (name := attribute(element, "name"))
        ]
        return worksheets + dashboards

    def _listed(self, holder: str, tag: str) -> list[Any]:
        element = first(self._root, holder)
        return [] if element is None else list(children(element, tag))


def _is_true(element: Any, name: str) -> bool:
    return (attribute(element, name) or "").lower() == "true"


def _embedded(element: Any) -> EmbeddedDatasource:
    name, connection = attribute(element, "name") or "", first(element, "connection")
    published = None
    if connection is not None and attribute(connection, "class") == "sqlproxy":
        location = first(element, "repository-location")
        published = attribute(connection, "dbname") or (attribute(location, "id") if location is not None else None)
    # A copy is the root of its own tree: the element's tree is the whole workbook.
    document = serialise(copy.deepcopy(element))
    return EmbeddedDatasource(name, attribute(element, "caption") or name, published, document)


def _used_datasources(worksheet: Any) -> list[str]:
    holders = [holder for view in descendants(worksheet, "view") for holder in children(view, "datasources")]
    names = (attribute(element, "name") or "" for holder in holders for element in children(holder, "datasource"))
    return list(dict.fromkeys(names))


def _zones(dashboard: Any, worksheets: set[str]) -> list[str]:
    """The worksheets that a dashboard shows; zones of other kinds (text, images, filters) name none."""
    names = (attribute(zone, "name") or "" for zone in descendants(dashboard, "zone"))
    return [name for name in dict.fromkeys(names) if name in worksheets]


def read_file(path: Path, kind: str, *, max_bytes: int) -> tuple[bytes, WorkbookDocument]:
    """The text of the .twb and what it says; BadPackageError if it cannot be published here."""
    if kind == "twb":
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise BadPackageError("The .twb file is too large.")
        text = path.read_bytes()
    else:
        with Package(path, max_bytes=max_bytes) as package:
            if any(name.lower().endswith((".hyper", ".tde")) for name in package.names()):
                raise BadPackageError("Workbooks with extracts of their own are not kept here; publish a datasource.")
            text = package.document(".twb")
    document = WorkbookDocument(text)
    if not document.sheets():
        raise BadPackageError("The workbook has no sheet.")
    return text, document


@dataclass(frozen=True)
class WorkbookPublication:
    """A publish of a workbook as asked for, apart from its file."""

    name: str
    project_id: str
    overwrite: bool
    description: str | None
    show_tabs: bool
    # Sheets to hide, beside those that the document itself hides.
    hidden: frozenset[str] = frozenset()


def check_workbook(server: Server, session: Session, asked: WorkbookPublication) -> Row | None:
    """The workbook that would be overwritten, if any."""
    project(server, session, asked.project_id)
    existing = server.store.row(
        "SELECT * FROM workbooks WHERE project_id = ? AND name = ?", asked.project_id, asked.name
    )
    if existing is not None and not asked.overwrite:
        raise ApiError(403007, f"A workbook named {asked.name!r} already exists. Use overwrite to replace it.")
    return existing


def publish_workbook(server: Server, session: Session, asked: WorkbookPublication, *, file: Path, kind: str) -> str:
    """Keep the workbook and its views in one transaction; the workbook's id. Overwriting keeps the ids of both."""
    try:
        text, document = read_file(file, kind, max_bytes=server.max_bytes)
    except BadPackageError as error:
        raise ApiError(400011, f"There was a problem publishing the file '{asked.name}'. {error}") from error
    shown = [sheet for sheet in document.sheets() if not sheet.hidden and sheet.name not in asked.hidden]
    now = server.now()
    with server.store.transaction() as db:
        existing = check_workbook(server, session, asked)
        workbook_id: str = existing["id"] if existing is not None else str(uuid.uuid4())
        if existing is None:
            insert(
                db,
                "workbooks",
                id=workbook_id,
                site_id=session.site_id,
                project_id=asked.project_id,
                name=asked.name,
                content_url=_free_url(db, "workbooks", "site_id", session.site_id, asked.name),
                created=now,
                owner_id=session.user_id,
                show_tabs=0,
                size=0,
                document=b"",
                updated=now,
            )
        changes = {"owner_id": session.user_id, "show_tabs": int(asked.show_tabs), "size": file.stat().st_size}
        update(db, "workbooks", workbook_id, **changes, document=text, updated=now)
        if asked.description is not None:
            update(db, "workbooks", workbook_id, description=asked.description)
        _replace_views(db, workbook_id, shown, now=now)
    return workbook_id


def _replace_views(db: Any, workbook_id: str, shown: list[Sheet], *, now: float) -> None:
    """A view per sheet that is shown; one that was there under its name keeps its id and its address."""
    wanted = {sheet.name: sheet for sheet in shown}
    kept = {row["name"]: row["id"] for row in db.execute("SELECT * FROM views WHERE workbook_id = ?", (workbook_id,))}
    for name, view_id in kept.items():
        if name not in wanted:
            db.execute("DELETE FROM views WHERE id = ?", (view_id,))
    for position, sheet in enumerate(wanted.values()):
        if sheet.name in kept:
            update(db, "views", kept[sheet.name], position=position, kind=sheet.kind, updated=now)
            continue
        insert(
            db,
            "views",
            id=str(uuid.uuid4()),
            workbook_id=workbook_id,
            name=sheet.name,
            content_url=_free_url(db, "views", "workbook_id", workbook_id, sheet.name),
            kind=sheet.kind,
            position=position,
            created=now,
            updated=now,
        )


def _free_url(db: Any, table: str, owner: str, owner_id: str, name: str) -> str:
    """The name without what an address cannot have, numbered where another one has it already."""
    slug = re.sub(r"[^A-Za-z0-9_-]", "", name) or table.removesuffix("s").capitalize()
    rows = db.execute(f"SELECT content_url FROM {table} WHERE {owner} = ?", (owner_id,))
    taken = {row["content_url"] for row in rows}
    return next(url for number in range(len(taken) + 1) if (url := f"{slug}_{number}" if number else slug) not in taken)
