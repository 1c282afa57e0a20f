"""Subscriptions: who is sent which view or workbook. The stand-in keeps them, and sends nothing."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.store import insert
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, node, required
from tir_dagster.sandbox.tableau.xmltree import attribute

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []
_SUBSCRIPTIONS = "SELECT * FROM subscriptions WHERE site_id = ?"


def _subscription(row: Any) -> ET.Element:
    return node(
        "subscription",
        {"id": row["id"], "subject": row["subject"]},
        node("content", {"id": row["target_id"], "type": row["target_kind"]}),
        node("schedule", {"id": row["schedule_id"]}),
        node("user", {"id": row["user_id"]}),
    )


@operation(OPERATIONS, "GET", "S/subscriptions", since=(2, 3))
def list_subscriptions(call: Call) -> Answer:
    rows = call.server.store.rows(f"{_SUBSCRIPTIONS} ORDER BY rowid", call.session.site_id)
    return Answer(content=page([dict(row) for row in rows], call.query, "subscriptions", _subscription))


@operation(OPERATIONS, "POST", "S/subscriptions", since=(2, 3))
def create_subscription(call: Call) -> Answer:
    call.session.must_write("subscribe people")
    asked = required(call.request, "subscription")
    target, subscription_id = required(asked, "content"), str(uuid.uuid4())
    with call.server.store.transaction() as db:
        insert(
            db,
            "subscriptions",
            id=subscription_id,
            site_id=call.session.site_id,
            subject=attribute(asked, "subject") or "",
            target_id=attribute(target, "id") or "",
            target_kind=attribute(target, "type") or "",
            schedule_id=attribute(required(asked, "schedule"), "id") or "",
            user_id=attribute(required(asked, "user"), "id") or "",
        )
    row = call.server.store.row(f"{_SUBSCRIPTIONS} AND id = ?", call.session.site_id, subscription_id)
    return Answer(201, (_subscription(row),))


@operation(OPERATIONS, "DELETE", "S/subscriptions/{subscription}", since=(2, 3))
def delete_subscription(call: Call) -> Answer:
    call.session.must_write("unsubscribe people")
    wanted = (call.session.site_id, call.path["subscription"])
    if call.server.store.row(f"{_SUBSCRIPTIONS} AND id = ?", *wanted) is None:
        raise ApiError(404020, f"Subscription {wanted[1]!r} could not be found.")
    call.server.store.run("DELETE FROM subscriptions WHERE site_id = ? AND id = ?", *wanted)
    return Answer(204)
