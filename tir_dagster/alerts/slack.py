"""Slack: Block Kit messages, and the channel that posts them; what follows a failure goes into its thread."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError

from tir_dagster.alerts.events import Event
from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.text import mrkdwn, shortened

_SIGNS = {
    "success": ":white_check_mark:",
    "failure": ":red_circle:",
    "repeat": ":red_circle:",
    "recovery": ":large_green_circle:",
    "digest": ":calendar:",
}
# Slack refuses longer ones with invalid_blocks.
_SECTION, _FIELD, _FIELDS = 3000, 2000, 10
_PASSING = ("internal_error", "fatal_error", "service_unavailable", "ratelimited", "request_timeout")
_THREAD_GONE = (
    "thread_not_found",
    "message_not_found",
    "cannot_reply_to_message",
    "restricted_action_thread_locked",
)
_HINTS = {
    "invalid_auth": "check SLACK_BOT_TOKEN",
    "not_authed": "set SLACK_BOT_TOKEN",
    "account_inactive": "check SLACK_BOT_TOKEN",
    "token_revoked": "check SLACK_BOT_TOKEN",
    "channel_not_found": "check the channel in the spec's `alerts`",
    "not_in_channel": "invite the app to the channel",
    "missing_scope": "give the app the scope chat:write",
}


def blocks(event: Event) -> list[dict[str, Any]]:
    """Return the message as Block Kit blocks."""
    message_blocks = [_section(f"{_SIGNS[event.kind]} *{_bold(event.title)}*\n{mrkdwn(event.text)}")]
    facts = list(event.facts.items())
    for start in range(0, len(facts), _FIELDS):
        part = facts[start : start + _FIELDS]
        texts = [shortened(f"*{_bold(name)}*\n{mrkdwn(value)}", _FIELD) for name, value in part]
        message_blocks.append({"type": "section", "fields": [{"type": "mrkdwn", "text": text} for text in texts]})
    if event.next_step:
        message_blocks.append(_section(f"*What to do*\n{mrkdwn(event.next_step)}"))
    if event.links:
        linked = "  ·  ".join(f"<{_address(url)}|{mrkdwn(label)}>" for label, url in event.links.items())
        message_blocks.append(
            {"type": "context", "elements": [{"type": "mrkdwn", "text": shortened(linked, _SECTION)}]}
        )
    return message_blocks


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": shortened(text, _SECTION)}}


def _bold(text: str) -> str:
    """Return the text for bold: a star or a line break inside would end it."""
    return mrkdwn(" ".join(text.replace("*", "·").split()))


def _address(url: str) -> str:
    return url.replace("|", "%7C").replace(" ", "%20").replace("<", "%3C").replace(">", "%3E").replace("&", "&amp;")


class _ThreadGoneError(ChannelError):
    """The message of the thread is gone, or takes no answers."""


class SlackChannel:
    """One channel of a workspace; the client is dagster-slack's."""

    def __init__(self, client: WebClient, channel: str, persistence: Persistence) -> None:
        self._client = client
        self._channel = channel
        self._persistence = persistence

    def told(self, event: Event) -> Mapping[str, str] | None:
        """Post it: a new message, or an answer in the thread of the failure it belongs to."""
        thread = event.remembered.get("thread_ts")
        try:
            answer = self._persistence.run(lambda seconds: self._post(event, thread, seconds))
        except _ThreadGoneError:
            # Somebody deleted or locked the thread: post a new message, and continue there.
            thread = None
            answer = self._persistence.run(lambda seconds: self._post(event, None, seconds))
        if event.kind in ("failure", "repeat"):
            # Later messages answer the first message, never an answer.
            return {"thread_ts": thread or answer, "channel": self._channel}
        return None

    def _post(self, event: Event, thread: str | None, seconds: float) -> str:
        self._client.timeout = max(1, int(seconds))
        try:
            answer = self._client.chat_postMessage(
                channel=self._channel,
                text=mrkdwn(f"{event.title} {event.text}"),
                blocks=blocks(event),
                thread_ts=thread,
                # The whole channel saw the failure, so it also sees the recovery.
                reply_broadcast=bool(thread) and event.kind == "recovery",
                unfurl_links=False,
                unfurl_media=False,
            )
            return str(answer["ts"])
        except SlackApiError as error:
            raise _of_answer(error) from None
        except (SlackClientError, http.client.HTTPException, OSError, ValueError, KeyError) as error:
            raise _of_connection(error) from None


def _of_answer(error: SlackApiError) -> ChannelError:
    response = error.response
    status = getattr(response, "status_code", None) or (response.get("status") if isinstance(response, dict) else None)
    code = response.get("error") if hasattr(response, "get") and not isinstance(response.get("error"), bytes) else None
    if status == 429:
        headers = getattr(response, "headers", None) or {}
        wait = next((value for name, value in headers.items() if name.lower() == "retry-after"), None)
        return ChannelError("Slack asks for fewer calls (429)", passing=True, wait=_seconds(wait))
    if not isinstance(code, str) or not code or "<" in code:
        return ChannelError(f"Slack did not answer the way Slack does ({status})", passing=True)
    if code in _THREAD_GONE:
        return _ThreadGoneError(f"Slack refused: {code}")
    passing = code in _PASSING or (isinstance(status, int) and status >= 500)
    return ChannelError(f"Slack {'failed' if passing else 'refused'}: {code}{_hint(code)}", passing=passing)


def _hint(code: str) -> str:
    return f"; {_HINTS[code]}" if code in _HINTS else ""


def _seconds(text: Any) -> float | None:
    try:
        return max(0.0, float(str(text)))
    except ValueError:
        return None


def _of_connection(error: Exception) -> ChannelError:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        # It may have been posted: a second try could post it twice.
        return ChannelError("Slack did not answer in time")
    if isinstance(reason, ssl.SSLCertVerificationError):
        return ChannelError(
            "Slack cannot be reached: its certificate is not trusted; if your own authority signs it, set REQUESTS_CA_BUNDLE",
            passing=True,
        )
    refused = isinstance(error, URLError) or isinstance(reason, ConnectionRefusedError)
    return ChannelError(f"Slack cannot be reached: {type(reason).__name__}; check network and proxy", passing=refused)
