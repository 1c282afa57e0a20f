"""Slack and ServiceNow in `tir demo`: read messages and incidents from the sandbox, and make a refresh fail."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import requests

_SECONDS = 30
# The answer to a token without permission to publish; it is not retried, so the demo does not wait.
_REFUSED = {"kind": "status", "method": "POST", "path": "/(datasources|fileUploads)$", "times": 1000}
_REASON = {"status": 403, "code": "403004", "message": "Publishing is forbidden for this user."}


@contextmanager
def refusing_publishes(env: Mapping[str, str]) -> Iterator[None]:
    """Make the Tableau stand-in refuse every publish inside the block."""
    faults = f"{env['TABLEAU_SERVER_URL']}/sandbox/faults"
    requests.post(faults, json={**_REFUSED, **_REASON}, timeout=_SECONDS).raise_for_status()
    try:
        yield
    finally:
        requests.delete(faults, timeout=_SECONDS).raise_for_status()


def last_message(env: Mapping[str, str]) -> str:
    """Return the newest Slack message as text."""
    messages = received(env, "messages")
    return message_text(messages[-1]) if messages else "(no message)"


def message_text(message: Mapping[str, Any]) -> str:
    where = f"#{message['channel']}{', in the thread of the failure' if message.get('thread_ts') else ''}"
    texts = [line for block in message["blocks"] for line in _lines(block)]
    return "\n".join([f"{where}:", *(f"| {line}" for line in texts)])


def last_incident(env: Mapping[str, str]) -> str:
    incidents = received(env, "incidents")
    return incident_line(incidents[-1]) if incidents else "(no incident)"


def incident_line(incident: Mapping[str, Any]) -> str:
    state = f"resolved, {incident['close_notes']}" if incident["resolved_at"] else "open"
    return f"{incident['number']} for {incident['assignment_group']}: {incident['short_description']} ({state})"


def open_incident(env: Mapping[str, str]) -> str | None:
    """Return the number of the newest open incident."""
    return next(
        (incident["number"] for incident in reversed(received(env, "incidents")) if not incident["resolved_at"]), None
    )


def is_resolved(env: Mapping[str, str], number: str | None) -> bool:
    """Return whether this incident is resolved; an earlier demo may have left others."""
    return any(incident["number"] == number and incident["resolved_at"] for incident in received(env, "incidents"))


def received(env: Mapping[str, str], kind: str) -> list[dict[str, Any]]:
    """Return the messages or incidents that the sandbox received, the oldest first."""
    answer = requests.get(f"{env['SERVICENOW_URL']}/sandbox/{kind}", timeout=_SECONDS)
    answer.raise_for_status()
    entries: list[dict[str, Any]] = answer.json()[kind]
    return entries


def _lines(block: dict[str, Any]) -> list[str]:
    """Return a Slack block as plain lines."""
    if block.get("fields"):
        return [": ".join(_plain(element["text"])) for element in block["fields"]]
    texts = [block["text"]] if "text" in block else block.get("elements", [])
    return [line for element in texts for line in _plain(element["text"])]


def _plain(text: str) -> list[str]:
    text = re.sub(r"<([^|>]+)\|([^>]*)>", r"\2: \1", text)
    text = re.sub(r":[a-z_]+: |(?<!\w)\*|\*(?!\w)", "", text)
    return [line for line in html.unescape(text).splitlines() if line]
