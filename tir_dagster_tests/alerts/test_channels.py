"""Slack and ServiceNow over HTTP, by the real clients: one thread, one incident, and endpoints that misbehave."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.alerts.events import Report
from tir_dagster.alerts.sending import AlertSender, Note, channels_of
from tir_dagster.alerts.servicenow import ServiceNowAccess
from tir_dagster.alerts.storage import AlertStorage
from tir_dagster.orchestration.alerts.resources import ServiceNowResource, SlackAppResource, connect_by
from tir_dagster.spec.alerts import Alerts, ServiceNowAlerts, SlackAlerts
from tir_dagster_tests.alerts.reports import NOON, failed, refreshed
from tir_dagster_tests.conftest import People, Sandbox

ALERTS = Alerts(slack=SlackAlerts("#mychannel"), servicenow=ServiceNowAlerts(group="mygroup"), timeout=2.0)
SLACK, TABLE = "/slack/api/chat.postMessage", "/api/now/table/incident"


class Desk:
    """Tells the sandbox's people, as a command does."""

    def __init__(self, folder: Path, sandbox: Sandbox, **servicenow: Any) -> None:
        self.storage = AlertStorage(folder / "alerts")
        identity = sandbox.identity
        self.slack = {"token": identity.slack_token, "api_url": sandbox.env["SLACK_API_URL"]}
        basic = {"username": identity.servicenow_user, "password": identity.servicenow_password}
        self.servicenow = {"url": sandbox.people_url, **(servicenow or basic)}
        self.alerts, self.later = ALERTS, 0.0

    def tell(self, *reports: Report) -> list[Note]:
        connect = connect_by(SlackAppResource(**self.slack), ServiceNowResource(**self.servicenow))
        return AlertSender(
            self.storage,
            {"orders": self.alerts},
            connect,
            seconds=self.alerts.timeout,
            env={},
            clock=lambda: time.time() + self.later,
        ).send(reports)


@pytest.fixture
def desk(tmp_path: Path, sandbox: Sandbox) -> Desk:
    return Desk(tmp_path, sandbox)


def test_three_failures_and_a_recovery_are_one_thread_and_one_incident(desk: Desk, people: People):
    assert not any(desk.tell(failed(f"run-{n}", at=NOON + n)) for n in (1, 2, 3))
    assert desk.tell(refreshed("run-4", at=NOON + 60)) == []
    first, *answers = people.messages()
    assert first["thread_ts"] is None
    assert [answer["thread_ts"] for answer in answers] == [first["ts"]] * 3
    assert [answer["reply_broadcast"] for answer in answers] == [False, False, True]
    (incident,) = people.incidents()
    assert (incident["state"], bool(incident["resolved_at"]), len(incident["notes"])) == ("6", True, 2)
    assert incident["close_code"] == "Solution provided"
    assert "failed 3 times" in incident["close_notes"]


def test_where_somebody_deleted_the_thread_a_new_one_begins(desk: Desk, people: People):
    desk.tell(failed("run-1"))
    people.forget()
    for n in (2, 3):
        assert desk.tell(failed(f"run-{n}", at=NOON + n)) == []
    first, answer = people.messages()
    assert (first["thread_ts"], answer["thread_ts"]) == (None, first["ts"])


def test_a_second_story_is_a_second_incident(desk: Desk, people: People):
    desk.tell(failed("run-1"), refreshed("run-2", at=NOON + 1))
    desk.tell(failed("run-3", at=NOON + 2))
    assert [bool(incident["resolved_at"]) for incident in people.incidents()] == [True, False]


def test_an_incident_is_found_again_where_all_memory_is_lost(
    desk: Desk, people: People, tmp_path: Path, sandbox: Sandbox
):
    desk.tell(failed("run-1"))
    Desk(tmp_path / "elsewhere", sandbox).tell(failed("run-2", at=NOON + 1))
    (incident,) = people.incidents()
    assert len(incident["notes"]) == 1


def test_an_answer_that_got_lost_makes_no_second_incident(desk: Desk, people: People):
    people.fault("cut", when="after", method="POST", path=f"{TABLE}$")
    assert desk.tell(failed("run-1")) == []
    (incident,) = people.incidents()
    assert len(incident["notes"]) == 1, "the second try found the incident of the first"


def test_a_message_whose_answer_is_late_is_not_sent_again_at_once(desk: Desk, people: People):
    people.fault("cut", when="after", path="chat.postMessage")
    (note,) = desk.tell(failed("run-1"))
    assert "slack" in note.text
    assert len(people.messages()) == 1


@pytest.mark.parametrize("grant", ["client_credentials", "password"])
def test_incidents_by_oauth(tmp_path: Path, sandbox: Sandbox, people: People, grant: str):
    identity = sandbox.identity
    client = {"client_id": identity.servicenow_client_id, "client_secret": identity.servicenow_client_secret}
    user = {"username": identity.servicenow_user, "password": identity.servicenow_password}
    desk = Desk(tmp_path, sandbox, **client, **(user if grant == "password" else {}))
    assert desk.tell(failed("run-1")) == []
    assert len(people.incidents()) == 1
    assert ("POST", "/oauth_token.do") in people.calls()


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"password": "wrong"}, "ServiceNow refused (401); check SERVICENOW_USERNAME"),
        ({"password": None}, "ServiceNow is not configured: set SERVICENOW_USERNAME and SERVICENOW_PASSWORD"),
        ({"url": ""}, "ServiceNow is not configured: set SERVICENOW_URL"),
        ({"url": "http://127.0.0.1:9"}, "ServiceNow cannot be reached: ConnectionError"),
        ({"client_id": "x", "client_secret": "y"}, "ServiceNow refused (401)"),
    ],
)
def test_a_servicenow_that_lets_nobody_in_is_noted_and_slack_is_told_all_the_same(
    desk: Desk, people: People, spoilt, told
):
    desk.servicenow |= spoilt
    (note,) = desk.tell(failed("run-1"))
    assert told in note.text
    assert len(people.messages()) == 1


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"token": "wrong"}, "Slack refused: invalid_auth; check SLACK_BOT_TOKEN"),
        ({"token": ""}, "Slack is not configured: set SLACK_BOT_TOKEN"),
        ({"api_url": "http://127.0.0.1:9/"}, "Slack cannot be reached: ConnectionRefusedError"),
    ],
)
def test_a_slack_that_lets_nobody_in_is_noted_and_servicenow_is_told_all_the_same(
    desk: Desk, people: People, spoilt, told
):
    desk.slack |= spoilt
    (note,) = desk.tell(failed("run-1"))
    assert told in note.text
    assert len(people.incidents()) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_error_is_tried_again_at_once(desk: Desk, people: People, status: int):
    for path in ("chat.postMessage", TABLE):
        people.fault("status", path=path, status=status, retry_after=0.1)
    assert desk.tell(failed("run-1")) == []
    assert (len(people.messages()), len(people.incidents())) == (1, 1)


PAGE = "<html><title>503</title>bad gateway</html>"
TROUBLES = {
    "429": {"kind": "status", "status": 429, "retry_after": 60},
    "500": {"kind": "status", "status": 500},
    "html": {"kind": "status", "status": 503, "message": PAGE},
    "cut": {"kind": "cut"},
    "slow": {"kind": "delay", "seconds": 30},
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_endpoints_in_trouble_cost_less_than_the_timeout_and_are_told_later(desk: Desk, people: People, trouble: str):
    people.fault(**TROUBLES[trouble], path="^/(slack|api)/", times=50)
    begun = time.monotonic()
    notes = desk.tell(failed("run-1"))
    assert time.monotonic() - begun < ALERTS.timeout
    assert sorted(note.text.partition(":")[0] for note in notes) == ["servicenow", "slack"]
    assert not any("<html" in note.text for note in notes)
    people.heal()
    desk.later = ALERTS.retry_after + 1
    assert desk.tell() == []
    assert (len(people.messages()), len(people.incidents())) == (1, 1)


@pytest.fixture
def login_page() -> Iterator[str]:
    """Something in between that answers everything with 200 and a page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Sign in</html>")

        do_POST = do_PATCH = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Not into the tests' output."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_login_page_is_no_answer(desk: Desk, login_page: str):
    desk.slack["api_url"], desk.servicenow["url"] = f"{login_page}/", login_page
    notes = desk.tell(failed("run-1"))
    assert len(notes) == 2
    assert all("did not answer the way" in note.text for note in notes), notes


def test_an_own_channel_that_cannot_be_loaded_is_noted_and_hurts_no_other(desk: Desk, people: People):
    desk.alerts = Alerts(slack=SlackAlerts("#mychannel"), channels=("no_such_module:Mail",), timeout=2.0)
    (note,) = desk.tell(failed("run-1"))
    assert "no_such_module:Mail cannot be loaded" in note.text
    assert len(people.messages()) == 1


def test_channels_are_named_by_whom_they_reach():
    alerts = Alerts(slack=SlackAlerts("#a"), servicenow=ServiceNowAlerts(group="g"), channels=("m:C",))
    made = channels_of(alerts, None, slack=None, servicenow=ServiceNowAccess(""))
    assert list(made) == ["slack:#a", "servicenow:g", "channel:m:C"]
