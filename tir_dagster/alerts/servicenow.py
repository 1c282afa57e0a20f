"""ServiceNow: one incident per problem, by three plain HTTP calls; notes while it lasts, resolved when it ends."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

from tir_dagster.alerts.events import Event
from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.text import one_line, shortened
from tir_dagster.spec.alerts import ServiceNowAlerts
from tir_dagster.trust import authorities

INCIDENTS = "/api/now/table/incident"
RESOLVED = "6"
_LEVELS = {"high": "1", "medium": "2", "low": "3"}
_LONGEST_KEY = 100


@dataclass(frozen=True)
class ServiceNowAccess:
    """An instance and one way to sign in: a token, a client with or without a user (OAuth), or a user (basic)."""

    # An address may hold a password of its own.
    url: str = field(repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def problem(self) -> str | None:
        """Return what is missing to sign in; None if nothing is."""
        if not self.url:
            return "set SERVICENOW_URL"
        if self.token or (self.client_id and self.client_secret) or (self.username and self.password):
            return None
        return (
            "set SERVICENOW_USERNAME and SERVICENOW_PASSWORD, or SERVICENOW_CLIENT_ID and SERVICENOW_CLIENT_SECRET, "
            "or SERVICENOW_TOKEN"
        )


class _Bearer(requests.auth.AuthBase):
    """As `auth` and not as a header, which an entry of .netrc for the host would replace."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


class ServiceNowChannel:
    """Incidents for one group: opened, continued and resolved."""

    def __init__(self, access: ServiceNowAccess, alerts: ServiceNowAlerts, persistence: Persistence) -> None:
        self._access = access
        self._alerts = alerts
        self._persistence = persistence
        self._session = requests.Session()
        self._session.verify = authorities()
        self._bearer = access.token
        self._deadline = 0.0

    def told(self, event: Event) -> Mapping[str, str] | None:
        """Open, add to or resolve the problem's incident; ignore successes."""
        if event.kind in ("success", "digest"):
            return None
        return self._persistence.run(lambda seconds: self._once(event, seconds))

    def check(self) -> None:
        """Read the list of incidents; raise ChannelError if it cannot be read. Nothing is written."""
        self._persistence.run(self._check_once)

    def _check_once(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._find(correlation_id("tir doctor"))

    def _once(self, event: Event, seconds: float) -> Mapping[str, str] | None:
        """Look for the incident first, so that a lost answer does not create a second one."""
        self._deadline = time.monotonic() + seconds
        sys_id = self._find(correlation_id(event.key))
        if event.kind == "recovery":
            if sys_id is not None:
                notes = f"{event.title}. {event.text}"
                resolved = {"state": RESOLVED, "close_code": self._alerts.close_code, "close_notes": notes}
                self._write("PATCH", f"{INCIDENTS}/{sys_id}", resolved)
            return None
        if sys_id is not None:
            notes = f"{event.title}\n{description(event)}"
            return self._write("PATCH", f"{INCIDENTS}/{sys_id}", {"work_notes": notes})
        return self._write("POST", INCIDENTS, incident_fields(event, self._alerts))

    def _find(self, ident: str) -> str | None:
        """Return the open incident of this problem."""
        # A resolved incident stays active until it is closed days later: a new failure gets a new incident.
        query = {"sysparm_query": f"correlation_id={ident}^active=true^state!=6", "sysparm_limit": "1"}
        incidents = self._call("GET", INCIDENTS, params=query)
        return str(incidents[0]["sys_id"]) if isinstance(incidents, list) and incidents else None

    def _write(self, method: str, path: str, fields: Mapping[str, str]) -> Mapping[str, str]:
        incident = self._call(method, path, json=dict(fields))
        if not isinstance(incident, dict) or not incident.get("sys_id"):
            raise ChannelError("ServiceNow did not answer the way its table API does", passing=True)
        return {"sys_id": str(incident["sys_id"]), "number": str(incident.get("number", ""))}

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = self._send(method, path, **self._signed(), **options)
        if answer.status_code == 401 and self._bearer and not self._access.token:
            self._bearer = None
            answer = self._send(method, path, **self._signed(), **options)
        if answer.status_code not in (200, 201):
            raise _refused(answer)
        try:
            return answer.json()["result"]
        except (ValueError, KeyError, TypeError):
            raise ChannelError("ServiceNow did not answer the way its table API does", passing=True) from None

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            return self._session.request(
                method,
                self._access.url.rstrip("/") + path,
                timeout=max(0.1, self._deadline - time.monotonic()),
                headers={"Accept": "application/json"},
                # A login page must not be taken for an answer.
                allow_redirects=False,
                **options,
            )
        except requests.Timeout:
            raise ChannelError("ServiceNow did not answer in time", passing=True) from None
        except requests.exceptions.SSLError:
            raise ChannelError(
                "ServiceNow cannot be reached: its certificate is not trusted; if your own authority signs it, set REQUESTS_CA_BUNDLE",
                passing=True,
            ) from None
        except requests.RequestException as error:
            # Without its text, which may hold the address with its credentials.
            reason = f"ServiceNow cannot be reached: {type(error).__name__}; check SERVICENOW_URL, network and proxy"
            raise ChannelError(reason, passing=True) from None

    def _signed(self) -> dict[str, Any]:
        access = self._access
        if not self._bearer and access.client_id:
            self._bearer = self._fetch_token()
        if self._bearer:
            return {"auth": _Bearer(self._bearer)}
        return {"auth": (access.username or "", access.password or "")}

    def _fetch_token(self) -> str:
        access = self._access
        form = {"client_id": access.client_id, "client_secret": access.client_secret}
        if access.username:
            form |= {"grant_type": "password", "username": access.username, "password": access.password}
        else:
            form |= {"grant_type": "client_credentials"}
        answer = self._send("POST", "/oauth_token.do", data=form)
        try:
            return str(answer.json()["access_token"])
        except (ValueError, KeyError, TypeError):
            raise _refused(answer) from None


def _refused(answer: requests.Response) -> ChannelError:
    status = answer.status_code
    if status == 429:
        try:
            wait = max(0.0, float(answer.headers.get("Retry-After", "")))
        except ValueError:
            wait = None
        return ChannelError("ServiceNow asks for fewer calls (429)", passing=True, wait=wait)
    if status in (401, 403):
        check = "check SERVICENOW_USERNAME and its roles, or the token, or which fields a rule wants"
        return ChannelError(f"ServiceNow refused ({status}); {check}{_error_text(answer)}")
    return ChannelError(f"ServiceNow failed ({status}){_error_text(answer)}", passing=status >= 500)


def _error_text(answer: requests.Response) -> str:
    """Return ServiceNow's error text in one short line."""
    try:
        error = answer.json()["error"]
        words = [error.get("message"), error.get("detail")] if isinstance(error, dict) else [error]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {shortened(one_line(' '.join(str(word) for word in words if word)), 200)}"


def correlation_id(key: str) -> str:
    """Return the problem's id in ServiceNow, without `^`, which would end the query that finds it."""
    name = f"tir/{key.replace('^', '_')}"
    if len(name) <= _LONGEST_KEY:
        return name
    return f"{name[: _LONGEST_KEY - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def incident_fields(event: Event, alerts: ServiceNowAlerts) -> dict[str, str]:
    """A new incident; custom fields come last and cannot replace ours."""
    severity = alerts.severity(event.cause)
    known = {"extract": event.extracts[0], "datasource": event.datasource, "cause": event.cause, "run_id": event.run_id}
    return {
        **{name: _fill(text, known) for name, text in alerts.fields.items()},
        "short_description": shortened(event.title, 160),
        "description": description(event),
        "urgency": _LEVELS[severity.urgency],
        "impact": _LEVELS[severity.impact],
        "assignment_group": alerts.group,
        "correlation_id": correlation_id(event.key),
        "correlation_display": "tir_dagster",
    }


def _fill(text: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def description(event: Event) -> str:
    """Return cause, facts, next steps and links, one per line."""
    lines = [event.text, "", *(f"{name}: {value}" for name, value in event.facts.items())]
    lines += ["", f"What to do: {event.next_step}"] if event.next_step else []
    return "\n".join([*lines, *(f"{label}: {url}" for label, url in event.links.items())]).strip()
