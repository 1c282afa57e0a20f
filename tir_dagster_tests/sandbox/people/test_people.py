"""The stand-ins for Slack and ServiceNow refuse what the real ones refuse, keep what they got, and show it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import sync_playwright
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError

from tir_dagster.alerts.events import Problem
from tir_dagster.alerts.messages import failure_event, recovery_event, success_event
from tir_dagster.alerts.slack import blocks
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.people.page import mrkdwn, page
from tir_dagster.sandbox.people.store import Store
from tir_dagster_tests.alerts.reports import NOON, failed, refreshed
from tir_dagster_tests.conftest import People, Sandbox

ROOT = Path(__file__).parents[3]


@pytest.fixture
def slack(sandbox: Sandbox, people: People) -> WebClient:
    return WebClient(sandbox.identity.slack_token, base_url=sandbox.env["SLACK_API_URL"])


def refused(slack: WebClient, **message: Any) -> str:
    with pytest.raises(SlackApiError) as caught:
        slack.chat_postMessage(**{"channel": "#c", "text": "hello", **message})
    return caught.value.response["error"]


def section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def test_slack_keeps_messages_and_threads(slack: WebClient, people: People):
    first = slack.chat_postMessage(channel="#c", text="hello", blocks=[section("hello")])
    slack.chat_postMessage(channel="#c", text="again", thread_ts=first["ts"])
    assert [(one["text"], one["thread_ts"]) for one in people.messages()] == [("hello", None), ("again", first["ts"])]


def test_slack_refuses_what_slack_refuses(slack: WebClient, sandbox: Sandbox):
    assert refused(slack, channel="#no such channel") == "channel_not_found"
    assert refused(slack, thread_ts="1.000000") == "thread_not_found"
    assert refused(slack, blocks=[section("x" * 3001)]) == "invalid_blocks"
    assert refused(slack, blocks=[section("")]) == "invalid_blocks"
    assert refused(slack, blocks=[{"type": "video"}]) == "invalid_blocks"
    assert refused(WebClient("xoxb-wrong", base_url=sandbox.env["SLACK_API_URL"])) == "invalid_auth"


def incident(sandbox: Sandbox, method: str, path: str = "", **options: Any) -> requests.Response:
    who = (sandbox.identity.servicenow_user, sandbox.identity.servicenow_password)
    url = f"{sandbox.people_url}/api/now/table/incident{path}"
    return requests.request(method, url, timeout=30, **{"auth": who, **options})


def test_servicenow_finds_notes_and_resolves_incidents(sandbox: Sandbox, people: People):
    made = incident(sandbox, "POST", json={"short_description": "x", "correlation_id": "a/b", "sys_id": "mine"})
    assert made.status_code == 201
    sys_id = made.json()["result"]["sys_id"]
    assert sys_id != "mine"
    query = {"sysparm_query": "correlation_id=a/b^active=true^state!=6", "sysparm_limit": "1"}
    assert [one["sys_id"] for one in incident(sandbox, "GET", params=query).json()["result"]] == [sys_id]
    assert incident(sandbox, "PATCH", f"/{sys_id}", json={"work_notes": "more"}).json()["result"]["work_notes"] == ""
    without = incident(sandbox, "PATCH", f"/{sys_id}", json={"state": "6"})
    assert (without.status_code, "mandatory" in without.text) == (403, True)
    done = {"state": "6", "close_code": "Solution provided", "close_notes": "works"}
    assert incident(sandbox, "PATCH", f"/{sys_id}", json=done).status_code == 200
    assert incident(sandbox, "GET", params=query).json()["result"] == []
    (kept,) = people.incidents()
    assert [note["text"] for note in kept["notes"]] == ["more"]


def test_servicenow_refuses_strangers_and_what_it_cannot_read(sandbox: Sandbox, people: People):
    assert incident(sandbox, "GET", auth=("tir", "wrong")).status_code == 401
    assert incident(sandbox, "GET", auth=None).status_code == 401
    assert incident(sandbox, "GET", auth=None, headers={"Authorization": "Bearer made-up"}).status_code == 401
    assert incident(sandbox, "POST", data="{").status_code == 400
    assert incident(sandbox, "PATCH", "/nothing", json={"state": "2"}).status_code == 404


def test_what_people_got_is_there_after_a_restart(tmp_path: Path):
    store = Store(tmp_path)
    first = store.post("c", {"text": "hello", "blocks": []})
    store.create({"short_description": "x"})
    again = Store(tmp_path)
    assert (again.messages(), again.incidents()) == (store.messages(), store.incidents())
    assert again.post("c", {"text": "more", "blocks": []})["ts"] > first["ts"]
    assert again.create({})["number"] > store.incidents()[0]["number"]


def test_the_page_shows_slacks_text_and_nothing_of_it_becomes_html():
    assert mrkdwn("*bold* &lt;b&gt; <https://x/?a=1&amp;b=2|link>") == (
        '<b>bold</b> &lt;b&gt; <a href="https://x/?a=1&amp;b=2">link</a>'
    )
    hostile = "<script>alert(1)</script><javascript:alert(1)|x>"
    shown = page(
        [{"channel": hostile, "ts": "1.0", "text": hostile, "blocks": [section(hostile)]}],
        [
            {
                "number": hostile,
                "state": hostile,
                "opened_at": hostile,
                "notes": [{"text": hostile}],
                "description": hostile,
            }
        ],
    )
    assert "<script" not in shown
    assert "<javascript" not in shown


def tell_a_story(sandbox: Sandbox) -> None:
    """A success, a failure, its recovery."""
    slack = WebClient(sandbox.identity.slack_token, base_url=sandbox.env["SLACK_API_URL"])
    run = "http://127.0.0.1:3000/runs/1"
    success = refreshed("a", datasource_url="http://127.0.0.1/ds", run_url=run, as_of="2025-03-01T10:00:00+00:00")
    report = failed("b", sentence="Job 7 failed on the server: the disk is <full>. Run again.", run_url=run)
    failure = failure_event("orders/refresh", [report], None)
    problem = Problem("orders/refresh", "STEP_FAILED", NOON, NOON, 1, {"orders": "refresh"})
    recovery = recovery_event(problem, refreshed("c", at=NOON + 900), 60.0)
    for event in (success_event(success, 60.0), failure):
        posted = slack.chat_postMessage(channel="#mychannel", text=event.title, blocks=blocks(event))
    slack.chat_postMessage(channel="#mychannel", text=recovery.title, blocks=blocks(recovery), thread_ts=posted["ts"])
    fields = {"short_description": failure.title, "assignment_group": "mygroup", "description": failure.text}
    sys_id = incident(sandbox, "POST", json=fields).json()["result"]["sys_id"]
    done = {"state": "6", "close_code": "Solution provided", "close_notes": recovery.text, "work_notes": "again"}
    incident(sandbox, "PATCH", f"/{sys_id}", json=done)


def test_a_browser_shows_a_success_a_failure_and_its_recovery(sandbox: Sandbox, people: People):
    tell_a_story(sandbox)
    found = subprocess.run([ROOT / "scripts" / "find-chromium"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    picture = ROOT / "build" / "screenshots" / "people.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        shown_page = browser.new_page(viewport={"width": 1280, "height": 1000})
        shown_page.goto(f"{sandbox.people_url}/")
        shown_page.screenshot(path=picture)
        seen = shown_page.content()
        browser.close()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000, "a page with text, not an empty one"
    text = re.sub(r"<[^>]+>", " ", seen)
    for shown in (
        "# mychannel",
        "orders: refreshed",
        "orders: the refresh failed",
        "1 reply",
        "the refresh works again",
    ):
        assert shown in text
    assert "the disk is &lt;full&gt;" in text
    assert 'class="incident ended"' in seen


def test_the_sandbox_names_its_people(sandbox: Sandbox):
    env = processes.environment(sandbox.home)
    assert env["SLACK_API_URL"] == f"{env['SERVICENOW_URL']}/slack/api/"
    assert requests.get(env["SERVICENOW_URL"], timeout=30).headers["content-type"].startswith("text/html")
