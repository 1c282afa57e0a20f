"""A datasource's connections and the credentials embedded in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.sign_in_methods import check_authentication, method_of, saved_secret
from tir_dagster.sandbox.tableau.store import Row, update
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, is_true, node, required
from tir_dagster.sandbox.tableau.xmltree import attribute, descendants

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []


def _connection(row: Row) -> ET.Element:
    """A connection without its password: nobody ever gets that back."""
    return node(
        "connection",
        {
            "id": row["id"],
            "type": row["kind"],
            "serverAddress": row["server"] or "",
            "serverPort": row["port"] or None,
            "userName": row["username"] or "",
            "embedPassword": bool(row["embed"]),
            "queryTaggingEnabled": False,
            "authenticationType": row["authentication"],
        },
    )


def _rows(call: Call) -> list[Row]:
    source = content.datasource(call.server, call.session, call.path["datasource"])
    return call.server.store.rows("SELECT * FROM connections WHERE datasource_id = ? ORDER BY position", source["id"])


@operation(OPERATIONS, "GET", "S/datasources/{datasource}/connections")
def list_connections(call: Call) -> Answer:
    return Answer(content=(node("connections", {}, *(_connection(row) for row in _rows(call))),))


@operation(OPERATIONS, "PUT", "S/datasources/{datasource}/connections/{connection}")
def update_connection(call: Call) -> Answer:
    rows = [row for row in _rows(call) if row["id"] == call.path["connection"]]
    return Answer(content=tuple(_changed(call, rows)))


@operation(OPERATIONS, "PUT", "S/datasources/{datasource}/connections")
def update_connections(call: Call) -> Answer:
    wanted = {(element.text or "").strip() for element in descendants(call.request, "connectionLUID")}
    rows = [row for row in _rows(call) if row["id"] in wanted]
    return Answer(content=(node("connections", {}, *_changed(call, rows)),))


def _changed(call: Call, rows: list[Row]) -> list[ET.Element]:
    call.session.must_write("change connections")
    if not rows:
        raise ApiError(404004, "The connection could not be found.")
    asked = required(call.request, "connection")
    with call.server.store.transaction() as db:
        for row in rows:
            update(db, "connections", row["id"], **_changes(call, db, row, asked))
    changed = {row["id"] for row in rows}
    return [_connection(row) for row in _rows(call) if row["id"] in changed]


def _changes(call: Call, db: Any, row: Row, asked: Any) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, column in (
        ("serverAddress", "server"),
        ("serverPort", "port"),
        ("userName", "username"),
        ("authenticationType", "authentication"),
    ):
        if (value := attribute(asked, name)) is not None:
            changes[column] = value
    if "authentication" in changes:
        check_authentication(row, changes["authentication"], call.version)
    embed = attribute(asked, "embedPassword")
    changes["embed"] = row["embed"] if embed is None else int(is_true(embed))
    changes["password"] = _secret(call, db, row, {**dict(row), **changes}, attribute(asked, "password"))
    return changes


def _secret(call: Call, db: Any, before: Row, after: dict[str, Any], password: str | None) -> str | None:
    """What the connection signs in with: a password, or what the caller has saved for this server and user, if anything.

    A real server accepts the change also if nothing is saved, and refreshes fail.
    """
    method = method_of(after["authentication"])
    if not after["embed"]:
        return None
    if method != "password":
        return saved_secret(db, call.session.user_id, method, after["server"], after["username"])
    if password is None and method_of(before["authentication"]) == "password":
        return str(before["password"]) if before["password"] is not None else None
    return password
