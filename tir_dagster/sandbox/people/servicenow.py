"""ServiceNow's table API for incidents, basic and OAuth sign-in; errors in its own form."""

from __future__ import annotations

import base64
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tir_dagster.sandbox.home import Identity
from tir_dagster.sandbox.people.store import RESOLVED, Store

TABLE = "/api/now/table/incident"

Answer = tuple[int, dict[str, Any]]


@dataclass
class ServiceNow:
    """The instance: who may come in, and its incidents."""

    store: Store
    identity: Identity
    tokens: set[str] = field(default_factory=set)

    def token(self, body: bytes) -> Answer:
        """`/oauth_token.do`: for a client alone, or for a client and a user."""
        asked = {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}
        client = (asked.get("client_id"), asked.get("client_secret"))
        user = (asked.get("username"), asked.get("password"))
        known = client == (self.identity.servicenow_client_id, self.identity.servicenow_client_secret)
        grant = asked.get("grant_type")
        if not known or not (grant == "client_credentials" or (grant == "password" and user == self._user())):
            return 401, {"error": "access_denied", "error_description": "access_denied"}
        made = secrets.token_urlsafe(24)
        self.tokens.add(made)
        return 200, {"access_token": made, "token_type": "Bearer", "expires_in": 1799, "scope": "useraccount"}

    def incidents(self, method: str, rest: str, query: Any, authorization: str, body: bytes) -> Answer:
        """All calls of the table."""
        if not self._may(authorization):
            return _error(401, "User Not Authenticated", "Required to provide Auth information")
        if method == "GET" and not rest:
            return self._find(query)
        try:
            fields = json.loads(body or b"{}")
        except ValueError:
            return _error(400, "Exception while reading request", "The payload is not valid JSON")
        if not isinstance(fields, dict):
            return _error(400, "Exception while reading request", "The payload is not valid JSON")
        if method == "POST" and not rest:
            return 201, {"result": _shown(self.store.create(fields))}
        if method == "PATCH" and rest:
            return self._change(rest, fields)
        return _error(405, "Method not supported", f"{method} is not supported here")

    def _find(self, query: Any) -> Answer:
        terms = [term.partition("=") for term in str(query.get("sysparm_query", "")).split("^") if term]
        if not all(sign for _, sign, _ in terms):
            return _error(400, "Invalid query", "The sandbox knows terms of the form name=value and name!=value only")
        wanted = [(name.removesuffix("!"), not name.endswith("!"), text) for name, _, text in terms]
        limit = str(query.get("sysparm_limit") or 10_000)
        if not re.fullmatch("[0-9]{1,9}", limit):
            return _error(400, "Invalid query", "sysparm_limit is not a number")
        found = self.store.find(wanted, int(limit))
        return 200, {"result": [_shown(one) for one in found]}

    def _change(self, sys_id: str, fields: dict[str, Any]) -> Answer:
        if str(fields.get("state")) == RESOLVED and not (fields.get("close_code") and fields.get("close_notes")):
            # A rule that comes with the product: nobody resolves an incident without saying how.
            said = "Data Policy Exception: close_code and close_notes are mandatory"
            return _error(403, "Operation Failed", said)
        changed = self.store.change(sys_id, fields)
        if changed is None:
            return _error(404, "No Record found", "Record doesn't exist or ACL restricts the record retrieval")
        return 200, {"result": _shown(changed)}

    def _user(self) -> tuple[str, str]:
        return self.identity.servicenow_user, self.identity.servicenow_password

    def _may(self, authorization: str) -> bool:
        kind, _, rest = authorization.partition(" ")
        if kind == "Bearer":
            return rest in self.tokens
        try:
            name, _, password = base64.b64decode(rest, validate=True).decode().partition(":")
        except ValueError:
            return False
        return kind == "Basic" and (name, password) == self._user()


def _shown(incident: dict[str, Any]) -> dict[str, Any]:
    """As the table shows it: the journal is another table's."""
    return {name: value for name, value in incident.items() if name != "notes"}


def _error(status: int, message: str, detail: str) -> Answer:
    return status, {"error": {"message": message, "detail": detail}, "status": "failure"}
