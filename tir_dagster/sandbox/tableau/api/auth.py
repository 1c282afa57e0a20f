"""Server info, signing in and out, sites and users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau import people
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.listing import page
from tir_dagster.sandbox.tableau.wire import Answer, ApiError, find, node, required, text_node
from tir_dagster.sandbox.tableau.xmltree import attribute

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET

OPERATIONS: list[Operation] = []


# The REST reference writes it in lower case, the client library does not.
@operation(OPERATIONS, "GET", "/serverinfo", signed_in=False)
@operation(OPERATIONS, "GET", "/serverInfo", signed_in=False)
def server_info(call: Call) -> Answer:
    settings = call.server.settings.current
    version = text_node("productVersion", settings.product_version)
    version.set("build", f"{settings.product_version}.sandbox")
    return Answer(content=(node("serverInfo", {}, version, text_node("restApiVersion", settings.rest_version)),))


@operation(OPERATIONS, "POST", "/auth/signin", signed_in=False)
def sign_in(call: Call) -> Answer:
    credentials = required(call.request, "credentials")
    site = find(credentials, "site")
    content_url = (attribute(site, "contentUrl") or "") if site is not None else ""
    given = {str(name): str(value) for name, value in credentials.attrib.items()}
    token, session = people.sign_in(call.server, given, content_url)
    return Answer(content=(_credentials(token, session, content_url),))


@operation(OPERATIONS, "POST", "/auth/switchSite")
def switch_site(call: Call) -> Answer:
    content_url = attribute(required(call.request, "site"), "contentUrl") or ""
    site = call.server.store.row("SELECT id FROM sites WHERE content_url = ?", content_url)
    if site is None:
        raise ApiError(404000, f"Site {content_url!r} could not be found.")
    token, session = people.open_session(call.server.store, call.session.user_id, site["id"], None, call.session.scopes)
    people.end_session(call.server.store, call.token or "")
    return Answer(content=(_credentials(token, session, content_url),))


def _credentials(token: str, session: people.Session, content_url: str) -> ET.Element:
    return node(
        "credentials",
        {"token": token},
        node("site", {"id": session.site_id, "contentUrl": content_url}),
        node("user", {"id": session.user_id}),
    )


@operation(OPERATIONS, "POST", "/auth/signout")
def sign_out(call: Call) -> Answer:
    people.end_session(call.server.store, call.token or "")
    return Answer(204)


def _site(row: Any, *, run_now: bool | None = None) -> ET.Element:
    shown = {"id": row["id"], "name": row["name"], "contentUrl": row["contentUrl"], "state": "Active"}
    return node("site", {**shown, "runNowEnabled": run_now})


@operation(OPERATIONS, "GET", "/sites")
def list_sites(call: Call) -> Answer:
    call.session.must_administer("list the sites")
    rows = call.server.store.rows("SELECT id, name, content_url AS contentUrl FROM sites ORDER BY name")
    return Answer(content=page([dict(row) for row in rows], call.query, "sites", _site))


@operation(OPERATIONS, "GET", "/sites/{site}")
def get_site(call: Call) -> Answer:
    column = {"name": "name", "contentUrl": "content_url"}.get(call.query.get("key", ""), "id")
    row = call.server.store.row(
        f"SELECT id, name, content_url AS contentUrl FROM sites WHERE {column} = ?", call.path["site"]
    )
    if row is None:
        raise ApiError(404000, f"Site {call.path['site']!r} could not be found.")
    if row["id"] != call.session.site_id:
        raise ApiError(403004, "The session belongs to another site.")
    return Answer(content=(_site(row, run_now=call.server.settings.current.run_now),))


_USERS = (
    "SELECT id, name, name AS fullName, role AS siteRole FROM users JOIN site_users ON user_id = id WHERE site_id = ?"
)


def _user(row: Any) -> ET.Element:
    shown = {name: row[name] for name in ("id", "name", "fullName", "siteRole")}
    return node("user", {**shown, "authSetting": "ServerDefault"}, node("domain", {"name": "local"}))


@operation(OPERATIONS, "GET", "S/users")
def list_users(call: Call) -> Answer:
    rows = call.server.store.rows(f"{_USERS} ORDER BY name", call.session.site_id)
    return Answer(content=page([dict(row) for row in rows], call.query, "users", _user))


@operation(OPERATIONS, "GET", "S/users/{user}")
def get_user(call: Call) -> Answer:
    row = call.server.store.row(f"{_USERS} AND id = ?", call.session.site_id, call.path["user"])
    if row is None:
        raise ApiError(404002, f"User {call.path['user']!r} could not be found.")
    return Answer(content=(_user(row),))
