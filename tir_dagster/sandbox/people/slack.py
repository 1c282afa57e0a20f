"""Slack's Web API as far as messages go: answers are 200 with `ok` false and a word, as Slack gives them."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qs

from tir_dagster.sandbox.people.store import Store

BLOCKS = {"section", "context", "header", "divider", "actions"}
MOST_BLOCKS, MOST_TEXT, MOST_FIELD, MOST_FIELDS = 50, 3000, 2000, 10
_CHANNEL = re.compile(r"#?[a-z0-9_-]{1,80}|[CG][A-Z0-9]{8,}")


def answer(store: Store, method: str, headers: Any, body: bytes, token: str) -> dict[str, Any]:
    """One call of the Web API."""
    asked = arguments(headers.get("content-type", ""), body)
    given = headers.get("authorization", "").removeprefix("Bearer ") or str(asked.get("token", ""))
    if not given:
        return _error("not_authed")
    if given != token:
        return _error("invalid_auth")
    if method == "auth.test":
        return {"ok": True, "team": "sandbox", "user": "tir", "bot_id": "B00000001"}
    if method != "chat.postMessage":
        return _error("unknown_method")
    return _post(store, asked)


def arguments(content_type: str, body: bytes) -> dict[str, Any]:
    """Clients send JSON or a form, in which lists are JSON again."""
    if content_type.startswith("application/json"):
        try:
            value = json.loads(body or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}
    form: dict[str, Any] = {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}
    if "blocks" in form:
        try:
            form["blocks"] = json.loads(form["blocks"])
        except ValueError:
            form["blocks"] = "?"
    return form


def _post(store: Store, asked: dict[str, Any]) -> dict[str, Any]:
    channel, blocks = str(asked.get("channel", "")), asked.get("blocks") or []
    if not _CHANNEL.fullmatch(channel):
        return _error("channel_not_found")
    if not asked.get("text") and not blocks:
        return _error("no_text")
    if problem := problem_of(blocks):
        return {**_error("invalid_blocks"), "response_metadata": {"messages": [problem]}}
    message = {
        "text": str(asked.get("text", "")),
        "blocks": blocks,
        "thread_ts": asked.get("thread_ts"),
        "reply_broadcast": asked.get("reply_broadcast") in (True, "true", "1"),
    }
    kept = store.post(channel.lstrip("#"), message)
    if kept is None:
        return _error("thread_not_found")
    return {"ok": True, "channel": channel, "ts": kept["ts"], "message": kept}


def problem_of(blocks: Any) -> str | None:
    """What Slack would refuse: unknown kinds, too many, too long, empty."""
    if not isinstance(blocks, list) or len(blocks) > MOST_BLOCKS:
        return f"blocks are a list of at most {MOST_BLOCKS}"
    for at, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") not in BLOCKS:
            return f"block {at} is of no known type"
        if len(block.get("fields", ())) > MOST_FIELDS:
            return f"block {at} has more than {MOST_FIELDS} fields"
        if any(len(text) > MOST_FIELD for text in texts_of({"fields": block.get("fields", ())})):
            return f"a field of block {at} is longer than {MOST_FIELD}"
        if any(not text or len(text) > MOST_TEXT for text in texts_of(block)):
            return f"a text of block {at} is empty or longer than {MOST_TEXT}"
    return None


def texts_of(block: dict[str, Any]) -> list[str]:
    """The texts of a block, in the order they are read."""
    entries = [block.get("text"), *block.get("fields", ()), *block.get("elements", ())]
    texts = [entry.get("text") for entry in entries if isinstance(entry, dict)]
    return [text.get("text", "") if isinstance(text, dict) else str(text or "") for text in texts]


def _error(word: str) -> dict[str, Any]:
    return {"ok": False, "error": word}
