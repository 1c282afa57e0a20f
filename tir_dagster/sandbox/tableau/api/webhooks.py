"""Webhooks: creating, listing, testing, changing and deleting them."""

from __future__ import annotations

import http.client
import uuid
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.store import Row, insert, update
from tir_dagster.sandbox.tableau.webhooks import EVENTS, checked_url, post
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, is_true, node, required, text_node
from tir_dagster.sandbox.tableau.xmltree import attribute, bare

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []
SINCE = (3, 6)
_WEBHOOKS = "SELECT w.*, u.name AS owner_name FROM webhooks w JOIN users u ON u.id = w.owner_id WHERE w.site_id = ?"


def _webhook(row: Row) -> ET.Element:
    element = next(event.element for event in EVENTS if event.name == row["event"])
    destination = node("webhook-destination-http", {"method": "POST", "url": row["url"]})
    return node(
        "webhook",
        {
            "id": row["id"],
            "name": row["name"],
            "event": row["event"],
            "isEnabled": bool(row["enabled"]),
            "statusChangeReason": row["reason"],
        },
        node("webhook-source", {}, node(element)),
        node("webhook-destination", {}, destination),
        node("owner", {"id": row["owner_id"], "name": row["owner_name"]}),
    )


def _wanted(call: Call) -> Row:
    call.session.must_administer("use webhooks")
    row = call.server.store.row(f"{_WEBHOOKS} AND w.id = ?", call.session.site_id, call.path["webhook"])
    if row is None:
        raise ApiError(400113, f"Webhook {call.path['webhook']!r} could not be found.")
    return row


def _event(asked: Any) -> str | None:
    """The event's name: from the attribute, from the element that names the source, or from both if they agree."""
    source = find(asked, "webhook-source")
    elements = [bare(element.tag) for element in source] if source is not None else []
    names = [event.name for event in EVENTS if event.element in elements]
    if len(names) < len(elements):
        raise ApiError(400000, f"Unknown webhook source {elements}; known are {[event.element for event in EVENTS]}.")
    if (given := attribute(asked, "event")) is not None:
        names.append(given)
    if not names:
        return None
    if len(set(names)) > 1 or names[0] not in {event.name for event in EVENTS}:
        raise ApiError(400000, f"Not one event of {[event.name for event in EVENTS]}: {names}.")
    return names[0]


def _url(asked: Any) -> str | None:
    destination = find(asked, "webhook-destination-http")
    if destination is None:
        return None
    if (attribute(destination, "method") or "POST") != "POST":
        raise ApiError(400000, "A webhook is delivered by POST.")
    return checked_url(attribute(destination, "url") or "")


@operation(OPERATIONS, "POST", "S/webhooks", since=SINCE)
def create_webhook(call: Call) -> Answer:
    call.session.must_administer("create webhooks")
    asked = required(call.request, "webhook")
    name, event, url = (attribute(asked, "name") or "").strip(), _event(asked), _url(asked)
    if not name or event is None or url is None:
        raise ApiError(400000, "A webhook needs a name, an event and a destination.")
    webhook_id = str(uuid.uuid4())
    with call.server.store.transaction() as db:
        insert(
            db,
            "webhooks",
            id=webhook_id,
            site_id=call.session.site_id,
            name=name,
            event=event,
            url=url,
            owner_id=call.session.user_id,
            enabled=int(attribute(asked, "isEnabled") in (None, "true")),
            reason="",
        )
    row = call.server.store.row(f"{_WEBHOOKS} AND w.id = ?", call.session.site_id, webhook_id)
    assert row is not None
    return Answer(201, (_webhook(row),), {"Location": f"{call.url}/{webhook_id}"})


@operation(OPERATIONS, "GET", "S/webhooks", since=SINCE)
def list_webhooks(call: Call) -> Answer:
    """All of them: this list has no pages."""
    call.session.must_administer("list webhooks")
    rows = call.server.store.rows(f"{_WEBHOOKS} ORDER BY w.rowid", call.session.site_id)
    return Answer(content=(node("webhooks", {}, *(_webhook(row) for row in rows)),))


@operation(OPERATIONS, "GET", "S/webhooks/{webhook}", since=SINCE)
def get_webhook(call: Call) -> Answer:
    return Answer(content=(_webhook(_wanted(call)),))


@operation(OPERATIONS, "PUT", "S/webhooks/{webhook}", since=SINCE)
def update_webhook(call: Call) -> Answer:
    """The way to enable one again that was disabled."""
    row, asked = _wanted(call), required(call.request, "webhook")
    enabled, reason = attribute(asked, "isEnabled"), attribute(asked, "statusChangeReason")
    given: dict[str, Any] = {
        "name": attribute(asked, "name") or None,
        "event": _event(asked),
        "url": _url(asked),
        "enabled": None if enabled is None else int(is_true(enabled)),
        "reason": reason if reason is not None else None if enabled is None else "",
    }
    if changes := {name: value for name, value in given.items() if value is not None}:
        with call.server.store.transaction() as db:
            update(db, "webhooks", row["id"], **changes)
    return Answer(content=(_webhook(_wanted(call)),))


@operation(OPERATIONS, "DELETE", "S/webhooks/{webhook}", since=SINCE)
def delete_webhook(call: Call) -> Answer:
    call.server.store.run("DELETE FROM webhooks WHERE id = ?", _wanted(call)["id"])
    return Answer(204)


@operation(OPERATIONS, "GET", "S/webhooks/{webhook}/test", since=SINCE)
def test_webhook(call: Call) -> Answer:
    """Send an empty payload, and tell what the destination answered."""
    row = _wanted(call)
    try:
        status, text = post(row["url"], b"{}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ApiError(400000, f"The destination {row['url']!r} did not answer: {error}") from error
    return Answer(content=(node("webhookTestResult", {"id": row["id"], "status": status}, text_node("body", text)),))
