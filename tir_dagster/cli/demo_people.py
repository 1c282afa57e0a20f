"""What `tir demo` shows of the sandbox's Slack and ServiceNow, and how it makes a refresh fail."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import requests

_SECONDS = 30
# What a server answers whose token lost its right to publish; not worth repeating, so the demo does not wait.
_REFUSED = {"kind": "status", "method": "POST", "path": "/(datasources|fileUploads)$", "times": 1000}
_REASON = {"status": 403, "code": "403004", "message": "Publishing is forbidden for this user."}


@contextmanager
def refusing_publishes(env: Mapping[str, str]) -> Iterator[None]:
    """Inside the block the Tableau stand-in takes no publish."""
    faults = f"{env['TABLEAU_SERVER_URL']}/sandbox/faults"
    requests.post(faults, json={**_REFUSED, **_REASON}, timeout=_SECONDS).raise_for_status()
    try:
        yield
    finally:
        requests.delete(faults, timeout=_SECONDS).raise_for_status()


def last_message(env: Mapping[str, str]) -> str:
    """The newest message as text."""
    messages = _kept(env, "messages")
    if not messages:
        return "(nobody was told)"
    message = messages[-1]
    where = f"#{message['channel']}{', in the thread of the failure' if message.get('thread_ts') else ''}"
    texts = [line for block in message["blocks"] for line in _lines(block)]
    return "\n".join([f"{where}:", *(f"| {line}" for line in texts)])


def last_incident(env: Mapping[str, str]) -> str:
    incidents = _kept(env, "incidents")
    if not incidents:
        return "(there is no incident)"
    one = incidents[-1]
    state = f"resolved, {one['close_notes']}" if one["resolved_at"] else "open"
    return f"{one['number']} for {one['assignment_group']}: {one['short_description']} ({state})"


def open_incident(env: Mapping[str, str]) -> str | None:
    """The number of the newest incident that is not resolved."""
    return next((one["number"] for one in reversed(_kept(env, "incidents")) if not one["resolved_at"]), None)


def is_resolved(env: Mapping[str, str], number: str | None) -> bool:
    """Whether this very incident is: an earlier demo may have left others."""
    return any(one["number"] == number and one["resolved_at"] for one in _kept(env, "incidents"))


def _kept(env: Mapping[str, str], what: str) -> list[dict[str, Any]]:
    answer = requests.get(f"{env['SERVICENOW_URL']}/sandbox/{what}", timeout=_SECONDS)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()[what]
    return found


def _lines(block: dict[str, Any]) -> list[str]:
    """Slack's markup as plain lines."""
    if block.get("fields"):
        return [": ".join(_plain(one["text"])) for one in block["fields"]]
    texts = [block["text"]] if "text" in block else block.get("elements", [])
    return [line for one in texts for line in _plain(one["text"])]


def _plain(text: str) -> list[str]:
    text = re.sub(r"<([^|>]+)\|([^>]*)>", r"\2: \1", text)
    text = re.sub(r":[a-z_]+: |(?<!\w)\*|\*(?!\w)", "", text)
    return [line for line in html.unescape(text).splitlines() if line]
