"""Webhooks on Tableau Server: register, list and remove them, and read the events that they send."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from defusedxml.ElementTree import fromstring

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.failures import RefusedError

# The server knows no webhook of that id.
_NO_SUCH = "400113"
T = TypeVar("T")
SUCCEEDED, FAILED = "DatasourceRefreshSucceeded", "DatasourceRefreshFailed"
SECRET_VARIABLE = "TIR_WEBHOOK_SECRET"
SINCE = (3, 6)
# The client's names of the events.
_EVENTS = {SUCCEEDED: "datasource-refresh-succeeded", FAILED: "datasource-refresh-failed"}
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,200}")
_HIDDEN = "***"


@dataclass(frozen=True)
class Webhook:
    """A webhook that we registered. Its address ends with the secret, so its text does not show the address."""

    id: str
    name: str
    event: str
    url: str = field(repr=False)
    enabled: bool = True
    # Why the server disabled it.
    reason: str = ""

    @property
    def shown_url(self) -> str:
        return f"{self.url.rpartition('/')[0]}/{_HIDDEN}"


def webhook_secret(env: Mapping[str, str]) -> str:
    """Return the last part of the receiver's address. Tableau signs nothing, so the address is the only proof."""
    secret = env.get(SECRET_VARIABLE, "").strip()
    if not _SECRET.fullmatch(secret):
        what = "is not set" if not secret else "is not 32 to 200 letters, digits, hyphens or underscores"
        raise DatasourceError(
            f"Webhooks need a secret that nobody can guess, and {SECRET_VARIABLE} {what}. Create one with"
            f' `export {SECRET_VARIABLE}="$(openssl rand -hex 32)"`, and use the same one for `register` and `listen`.'
        )
    return secret


def receiver_url(address: str, secret: str) -> str:
    """Return the address to register: https, or http on this machine for a sandbox."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        parts, host = urlsplit(""), ""
    secret_in_it = has_credentials(address)
    if parts.scheme not in ("http", "https") or not host or secret_in_it or parts.query or parts.fragment:
        receiver = "The address" if secret_in_it else repr(address)
        raise DatasourceError(
            f"{receiver} is not an address that Tableau Server can call. Give the address at which the"
            " receiver is reached, such as https://hooks.example.com/tir, without user, query or fragment."
        )
    if parts.scheme == "http" and not _is_loopback(host):
        raise DatasourceError(
            f"{address!r} is not https, and Tableau Server calls nothing else. Put a proxy with a valid certificate in"
            " front of `tir webhooks listen`, and give its address."
        )
    return f"{address.rstrip('/')}/{secret}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def our_webhooks(client: TableauClient, label: str) -> list[Webhook]:
    """Return the webhooks that were registered under this label, as the server shows them now."""
    names = {_name(label, event): event for event in _EVENTS}
    webhooks = _call(client, _listed, doing="list the webhooks")
    return [_webhook(item, marks, names[item.name]) for item, marks in webhooks if item.name in names]


def _listed(server: Any) -> list[tuple[Any, Mapping[str, str]]]:
    """Return each webhook with the attributes that the client drops: whether it is enabled, and why not."""
    content = server.webhooks.get_request(server.webhooks.baseurl).content
    marks = {
        element.get("id"): dict(element.attrib)
        for element in fromstring(content).iterfind(".//t:webhook", namespaces=server.namespace)
    }
    return [(item, marks.get(item.id, {})) for item in TSC.WebhookItem.from_response(content, server.namespace)]


def _webhook(item: Any, marks: Mapping[str, str], event: str) -> Webhook:
    is_registered_event = item.event == _EVENTS[event]
    return Webhook(
        id=str(item.id),
        name=str(item.name),
        event=event if is_registered_event else str(item.event),
        url=item.url or "",
        enabled=marks.get("isEnabled", "true").casefold() != "false",
        reason=marks.get("statusChangeReason", ""),
    )


def register_webhooks(client: TableauClient, label: str, url: str) -> list[Webhook]:
    """Register one enabled webhook per event at this address; keep the ones that are right already."""
    registered = our_webhooks(client, label)
    kept = {
        hook.event: hook for hook in reversed(registered) if hook.enabled and hook.url == url and hook.event in _EVENTS
    }
    for hook in registered:
        if hook not in kept.values():
            _delete(client, hook)
    return [kept.get(event) or _create(client, _name(label, event), event, url) for event in _EVENTS]


def remove_webhooks(client: TableauClient, label: str) -> list[Webhook]:
    """Remove the webhooks of this label; return them."""
    registered = our_webhooks(client, label)
    for hook in registered:
        _delete(client, hook)
    return registered


def _create(client: TableauClient, name: str, event: str, url: str) -> Webhook:
    item = TSC.WebhookItem()
    item.name, item.url, item.event = name, url, _EVENTS[event]
    # Not repeated if the answer is lost: the next registration finds it.
    webhook = _call(
        client,
        lambda server: server.webhooks.create(item),
        doing=f"register webhook {name!r}",
        secret=url.rpartition("/")[2],
        repeat=False,
    )
    return Webhook(str(webhook.id), name, event, url)


def _delete(client: TableauClient, hook: Webhook) -> None:
    try:
        _call(client, lambda server: server.webhooks.delete(hook.id), doing=f"remove webhook {hook.name!r}")
    except RefusedError as error:
        # Somebody else removed it, or our own first request did and its answer was lost.
        if error.code != _NO_SUCH and not error.code.startswith("404"):
            raise


def _name(label: str, event: str) -> str:
    return f"tir_dagster {label} {event}"


def _call(client: TableauClient, action: Callable[[Any], T], *, doing: str, secret: str = "", repeat: bool = True) -> T:
    if client.rest_version < SINCE:
        version = ".".join(map(str, client.rest_version))
        raise DatasourceError(
            f"Could not {doing}: {client.where} speaks REST {version}, and webhooks came with"
            f" {'.'.join(map(str, SINCE))} (Tableau Server 2019.4). Upgrade it, or use no webhooks."
        )
    try:
        return client.call(action, doing=doing, repeat=repeat)
    except DatasourceError as error:
        # Without its cause: it may quote the address, and that ends with the secret.
        message = str(error).replace(secret, _HIDDEN) if secret else str(error)
        if not isinstance(error, RefusedError):
            raise DatasourceError(message) from None
        hint = " Only administrators of the site use webhooks." if error.code.startswith("403") else ""
        raise RefusedError(f"{message}{hint}", code=error.code) from None


_LONGEST_NAME = 300


class BadEventError(ValueError):
    """The body is not an event of Tableau."""


@dataclass(frozen=True)
class WebhookEvent:
    """A refresh of one datasource that ended. `at` is the server's time, in UTC."""

    kind: str
    datasource_id: str
    name: str
    at: datetime

    @property
    def succeeded(self) -> bool:
        return self.kind == SUCCEEDED


def read_event(body: bytes) -> WebhookEvent | None:
    """Return the refresh that the body describes; None for other events, and for the empty body of a test."""
    value = _object(body)
    if not value:
        return None
    kind = _text(value, "event_type")
    if kind not in (SUCCEEDED, FAILED):
        return None
    resource_name = value.get("resource_name")
    datasource_name = resource_name[:_LONGEST_NAME] if isinstance(resource_name, str) else ""
    return WebhookEvent(kind, _text(value, "resource_luid"), datasource_name, _moment(_text(value, "created_at")))


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadEventError("the body is not JSON") from error
    if not isinstance(value, dict):
        raise BadEventError("the body is not a JSON object")
    return value


def _text(value: dict[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_NAME:
        raise BadEventError(f"{name} is not a text of 1 to {_LONGEST_NAME} characters")
    return text


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise BadEventError("created_at is not a time") from error
