"""The page: a channel and the list of incidents, as a person would see them."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime
from typing import Any

# Drawn, because many machines have no font with emoji.
_SIGNS = {
    ":white_check_mark:": '<i class="sign good">✓</i>',
    ":red_circle:": '<i class="sign bad">!</i>',
    ":large_green_circle:": '<i class="sign good">↑</i>',
    ":calendar:": '<i class="sign">≡</i>',
}
_STATES = {"1": "New", "2": "In Progress", "3": "On Hold", "6": "Resolved", "7": "Closed", "8": "Canceled"}
_LEVELS = {"1": "1 - High", "2": "2 - Medium", "3": "3 - Low"}
_STYLE = """
:root { color-scheme: light; font: 15px/1.45 system-ui, "Noto Sans", "DejaVu Sans", sans-serif; color: #1d1c1d; }
body { margin: 0; background: #f4f4f6; }
header { background: #3f2a56; color: #fff; padding: .7rem 1.5rem; }
header b { font-size: 1.05rem; } header span { opacity: .75; margin-left: .6rem; }
main { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1.2rem; padding: 1.2rem 1.5rem; align-items: start; }
section.card { background: #fff; border: 1px solid #dcdce0; border-radius: 8px; padding: .4rem 1.2rem 1rem; margin-bottom: 1.2rem; }
h2 { font-size: 1.05rem; border-bottom: 1px solid #e8e8ec; padding-bottom: .5rem; margin: .6rem 0 .4rem; }
.message { display: grid; grid-template-columns: 36px minmax(0, 1fr); gap: .7rem; padding: .7rem 0; border-bottom: 1px solid #f0f0f3; }
.avatar { width: 36px; height: 36px; border-radius: 7px; background: #2e7d6b; color: #fff; display: grid; place-items: center; font-weight: 700; font-size: .8rem; }
.sign { display: inline-grid; place-items: center; width: 1.25em; height: 1.25em; border-radius: 50%; background: #5b6b7b; color: #fff; font: 700 .8em/1 sans-serif; margin-right: .15em; }
.sign.good { background: #2e9e5b; } .sign.bad { background: #c0392b; }
.who { font-weight: 700; } time { color: #6b6a6e; font-size: .8rem; margin-left: .4rem; font-weight: 400; }
.block { margin: .25rem 0; overflow-wrap: anywhere; white-space: pre-line; }
.fields { display: grid; grid-template-columns: 1fr 1fr; gap: .35rem 1.2rem; margin: .4rem 0; }
.context { color: #616064; font-size: .85rem; } a { color: #1264a3; text-decoration: none; }
.thread { border-left: 3px solid #dcdce0; margin: .5rem 0 0; padding-left: .9rem; }
.thread .message { border: 0; padding: .4rem 0; } .replies { color: #1264a3; font-size: .85rem; font-weight: 600; }
.incident { border: 1px solid #e3e3e8; border-left: 5px solid #c0392b; border-radius: 6px; padding: .6rem .9rem; margin: .7rem 0; }
.incident.ended { border-left-color: #2e9e5b; } .state { float: right; font-size: .8rem; padding: .1rem .55rem; border-radius: 9px; background: #fbe3e0; color: #8f2318; }
.ended .state { background: #def3e6; color: #1c6b3c; } dl { display: grid; grid-template-columns: auto 1fr; gap: .1rem .8rem; margin: .4rem 0; font-size: .87rem; }
dt { color: #6b6a6e; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line; } .none { color: #6b6a6e; }
ol { margin: .3rem 0 0; padding-left: 1.2rem; font-size: .87rem; }
"""


def page(messages: list[dict[str, Any]], incidents: list[dict[str, Any]]) -> str:
    """One HTML page; all text of others is escaped."""
    channels = dict.fromkeys(message["channel"] for message in messages) or {"mychannel": None}
    cards = "".join(_channel(name, [one for one in messages if one["channel"] == name]) for name in channels)
    listed = "".join(_incident(one) for one in reversed(incidents)) or '<p class="none">No incidents.</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>People in the sandbox</title>'
        f"<style>{_STYLE}</style></head><body><header><b>What people see</b><span>the sandbox's Slack and ServiceNow"
        f'</span></header><main><div>{cards}</div><div><section class="card"><h2>Incidents</h2>{listed}</section>'
        "</div></main></body></html>"
    )


def _channel(name: str, messages: list[dict[str, Any]]) -> str:
    tops = [one for one in messages if not one.get("thread_ts")]
    shown = "".join(_message(one, [m for m in messages if m.get("thread_ts") == one["ts"]]) for one in tops)
    nothing = '<p class="none">Nothing was posted yet.</p>'
    return f'<section class="card"><h2># {html.escape(name)}</h2>{shown or nothing}</section>'


def _message(message: dict[str, Any], replies: list[dict[str, Any]]) -> str:
    body = (
        "".join(_block(block) for block in message["blocks"]) or f'<div class="block">{mrkdwn(message["text"])}</div>'
    )
    at = f"{datetime.fromtimestamp(float(message['ts']), UTC):%Y-%m-%d %H:%M:%S} UTC"
    count = f"{len(replies)} {'reply' if len(replies) == 1 else 'replies'}"
    inner = "".join(_message(reply, []) for reply in replies)
    thread = f'<div class="thread"><span class="replies">{count}</span>{inner}</div>' if replies else ""
    who = f'<div class="who">tir<time>{at}</time></div>'
    return f'<div class="message"><div class="avatar">tir</div><div>{who}{body}{thread}</div></div>'


def _block(block: dict[str, Any]) -> str:
    if block.get("fields"):
        fields = "".join(f'<div class="block">{mrkdwn(one["text"])}</div>' for one in block["fields"])
        return f'<div class="fields">{fields}</div>'
    if block["type"] == "context":
        return f'<div class="block context">{" ".join(mrkdwn(one["text"]) for one in block["elements"])}</div>'
    return f'<div class="block">{mrkdwn(str((block.get("text") or {}).get("text", "")))}</div>'


def mrkdwn(text: str) -> str:
    """Slack's own text as HTML. It comes escaped; what a sender forgot to escape is escaped here."""
    safe = re.sub(r"&(?!(?:amp|lt|gt);)", "&amp;", text)
    links: list[str] = []

    def keep(found: re.Match[str]) -> str:
        links.append(f'<a href="{html.escape(html.unescape(found[1]))}">{found[2]}</a>')
        return f"\0{len(links) - 1}\0"

    safe = re.sub(r"<(https?://[^|>]+)\|([^<>]*)>", keep, safe)
    safe = safe.replace("<", "&lt;").replace(">", "&gt;")
    safe = re.sub(r"(?<![\w*])\*(\S(?:[^*\n]*\S)?)\*(?![\w*])", r"<b>\1</b>", safe)
    for name, sign in _SIGNS.items():
        safe = safe.replace(name, sign)
    return re.sub(r"\0(\d+)\0", lambda found: links[int(found[1])], safe)


def _incident(incident: dict[str, Any]) -> str:
    ended = bool(incident.get("resolved_at"))
    state = _STATES.get(str(incident["state"]), str(incident["state"]))
    facts = {
        "Assigned to": incident.get("assignment_group", ""),
        "Urgency": _LEVELS.get(str(incident.get("urgency")), ""),
        "Impact": _LEVELS.get(str(incident.get("impact")), ""),
        "Correlation": incident.get("correlation_id", ""),
        "Opened": f"{incident['opened_at']} UTC",
        "Description": incident.get("description", ""),
        "Close code": incident.get("close_code", "") if ended else "",
        "Close notes": incident.get("close_notes", "") if ended else "",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(str(text))}</dd>" for name, text in facts.items() if text)
    notes = "".join(f"<li>{html.escape(str(note['text']).splitlines()[0])}</li>" for note in incident["notes"])
    listed = f"<b>Work notes</b><ol>{notes}</ol>" if notes else ""
    title = html.escape(str(incident.get("short_description", "")))
    return (
        f'<div class="incident{" ended" if ended else ""}"><span class="state">{html.escape(state)}</span>'
        f"<b>{html.escape(incident['number'])}</b><div>{title}</div><dl>{rows}</dl>{listed}</div>"
    )
