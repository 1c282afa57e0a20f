"""What is sent and stored, and what becomes of alerts that could not be sent; test_problems.py has the decisions."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tir_dagster.spec.alerts import SlackAlerts
from tir_dagster_tests.alerts.reports import NOON, Desk, down, failed, refreshed


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "alerts")


def test_three_failures_and_a_recovery_are_one_story(desk):
    for number in (1, 2, 3):
        desk.tell(failed(f"run-{number}", at=NOON + number))
    desk.tell(refreshed("run-4", at=NOON + 600))
    assert desk.listener.kinds == ["failure", "repeat", "repeat", "recovery"]
    assert [event.remembered.get("story") for event in desk.listener.heard] == [None, "run-1", "run-1", "run-1"]
    assert len({event.key for event in desk.listener.heard}) == 1
    assert "failed 3 times" in desk.listener.heard[-1].text
    assert desk.storage.problems() == []


def test_who_is_not_told_of_a_server_leaves_word_that_it_answers(desk):
    """A command knows its own extract only, and the sensor finds its run told."""
    desk.tell(down("run-1", "orders"))
    command = Desk(desk.folder, desk.listener, extracts=("items",))
    done = refreshed("run-2", "items", NOON + 1, scopes=("tableau.example.com",))
    command.tell(done)
    assert desk.listener.kinds == ["failure", "success"]
    desk.tell(done)
    assert desk.listener.kinds == ["failure", "success", "recovery"]
    assert desk.storage.problems() == []


def test_a_success_of_the_day_whose_file_is_damaged_keeps_nobody_from_being_told(desk):
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success="daily"))
    desk.tell(refreshed("a"), refreshed("b", at=NOON + 1))
    next((desk.folder / "daily").glob("*.json")).write_text('{"to": "#mychannel"}', encoding="utf-8")
    desk.now += 86_400
    desk.tell(failed("c", at=NOON + 2))
    assert desk.listener.kinds == ["failure", "digest"]


def test_a_success_is_no_business_of_servicenow_even_if_it_is_out_of_reach(desk):
    desk.channels = ("servicenow:mygroup",)
    desk.listener.trouble = "not configured"
    assert desk.tell(refreshed("a")) == []


def test_a_days_message_that_could_not_be_told_is_tried_once_more_like_any_other(desk):
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success="daily"))
    desk.tell(refreshed("a"))
    desk.now += 86_400
    desk.listener.trouble = "no network"
    (note,) = desk.tell()
    assert "It is tried once more" in note.text
    desk.listener.trouble = ""
    desk.now += desk.alerts.retry_after
    desk.tell()
    assert desk.listener.kinds == ["digest"]


def test_links_carry_no_password_of_the_address_they_are_made_from(desk):
    url = "https://me:hunter2@dagster.example/runs/1"
    desk.tell(failed("a", run_url=url), refreshed("b", "items", NOON + 1, run_url=url, datasource_url=url))
    shown = {link for event in desk.listener.heard for link in event.links.values()}
    assert shown == {"https://dagster.example/runs/1"}


# What could not be told


def test_what_could_not_be_told_is_noted_and_tried_once_more(desk):
    desk.listener.trouble = "no network"
    (note,) = desk.tell(failed("run-1"))
    assert note.run_id == "run-1"
    assert "slack:#mychannel did not get" in note.text
    assert "no network" in note.text
    desk.listener.trouble = ""
    assert desk.tell() == []
    assert desk.listener.heard == [], "not before its time"
    desk.now += desk.alerts.retry_after
    desk.tell()
    desk.tell(refreshed("run-2", at=NOON + 999))
    assert desk.listener.kinds == ["failure", "recovery"]
    assert desk.listener.heard[1].remembered == {"story": "run-1"}, "the thread is that of the late message"


def test_what_could_not_be_told_twice_is_given_up_and_on_record(desk):
    desk.listener.trouble = "no network"
    desk.tell(failed("run-1"))
    desk.now += desk.alerts.retry_after
    (note,) = desk.tell()
    assert "It is not tried again" in note.text
    assert [line["why"] for line in desk.storage.load().given_up] == ["no network"]
    desk.now += desk.alerts.retry_after
    assert desk.tell() == []


def test_an_alert_that_waits_keeps_its_try_while_its_channel_fails_with_another(desk):
    desk.listener.trouble = "no network"
    desk.tell(failed("run-1"))
    desk.now += desk.alerts.retry_after
    (note,) = desk.tell(failed("run-2", "customers", desk.now))
    assert "customers" in note.text
    assert len(desk.storage.load().waiting) == 2


def test_what_is_over_before_it_could_be_told_is_told_as_over_only(desk):
    desk.listener.trouble = "no network"
    desk.tell(failed("run-1"))
    desk.listener.trouble = ""
    desk.tell(refreshed("run-2", at=NOON + 60))
    desk.now += desk.alerts.retry_after
    desk.tell()
    assert desk.listener.kinds == ["recovery"]


def test_a_channel_that_hangs_costs_less_than_the_timeout_and_is_waited_for_once(desk):
    released = threading.Event()
    desk.listener.told = lambda _: released.wait(30)
    begun = time.monotonic()
    notes = desk.tell(failed("run-1", "orders"), failed("run-2", "customers"))
    assert time.monotonic() - begun < desk.alerts.timeout
    released.set()
    assert ["did not answer in time" in note.text for note in notes] == [True, True]


def test_while_another_process_tells_people_a_report_is_left_to_it(desk):
    with desk.storage.locked(0):
        (note,) = desk.tell(failed("run-1", sentence="password=hunter2"))
    assert "another process" in note.text
    assert not [file for file in desk.folder.rglob("*.json") if "hunter2" in file.read_text()]
    desk.tell()
    assert [event.id for event in desk.listener.heard] == ["run-1"]


def test_a_report_that_was_left_and_is_in_the_history_too_is_told_once(desk):
    desk.storage.leave(failed("run-1"))
    desk.tell(failed("run-1"))
    assert desk.listener.kinds == ["failure"]


def test_a_report_that_was_left_stays_until_it_is_told(desk):
    desk.storage.leave(failed("run-1"))
    desk.storage.leave(failed("run-2", at=NOON + 1), slot="slot")
    (newer,) = [slot for slot in desk.storage.left_reports(desk.extracts) if slot == "slot"]
    desk.storage.drop_report(newer, "run-1")
    assert len(desk.storage.left_reports(desk.extracts)) == 2, "another one came into the slot"
    desk.tell()
    assert (desk.listener.kinds, desk.storage.left_reports(desk.extracts)) == (["failure", "repeat"], {})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"report": "Failure"}', '{"report": 5}'])
def test_damaged_files_cost_a_repeated_message_at_most(desk, content):
    desk.tell(failed("run-1"))
    for kind in ("open", "inbox", "pending", "daily"):
        (desk.folder / kind).mkdir(exist_ok=True)
        (desk.folder / kind / "damaged.json").write_text(content)
    (desk.folder / "told.json").write_text(content)
    desk.tell(failed("run-2", at=NOON + 1))
    assert desk.listener.heard[-1].id == "run-2"


def files_of_the_version_before(folder: Path) -> None:
    """An open problem with its thread, an alert that waits, a report that was left, a success of the day, and the rest."""
    event = {
        "kind": "repeat",
        "id": "run-2",
        "key": "orders/refresh",
        "extracts": ["orders"],
        "title": "t",
        "text": "x",
    }
    problem = {"key": "orders/refresh", "cause": "STEP_FAILED", "sentence": "It broke.", "since": NOON, "last": NOON}
    more = {"count": 2, "affected": {"orders": "refresh"}, "memory": {"slack:#mychannel": {"story": "run-1"}}}
    waiting = {"channel": "slack:#mychannel", "event": event, "due": NOON, "extract": "orders", "since": NOON}
    left = {
        "slot": "left",
        "report": "Failure",
        "id": "left",
        "extract": "items",
        "cause": "GUARD",
        "sentence": "It left.",
    }
    success = {
        "to": "#mychannel",
        "report": "Success",
        "id": "day",
        "extract": "items",
        "at": NOON - 86_400,
        "slices": [],
    }
    for name, value in {
        "open/376245088ea3cbbe0258ff2c.json": {**problem, **more, "scope": "", "latest": NOON},
        "pending/bb336afa92d6d2cc05637b38.json": waiting,
        "inbox/360f84035942243c6a36537a.json": {**left, "at": NOON, "next_step": "", "topic": None},
        "daily/06ac55e01454e4f7a8b5e403.json": success,
        "worked.json": {"customers": {"refresh": NOON}},
        "full.json": {"orders": 60.0},
        "told.json": ["run-1", "run-2"],
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def test_the_files_of_the_version_before_are_read_and_replaced(desk):
    files_of_the_version_before(desk.folder)
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success="daily"))
    desk.tell(failed("run-2"), failed("old", "customers", NOON - 1))
    assert [event.id.split("/")[0] for event in desk.listener.heard] == ["left", "run-2", "digest"]
    desk.tell(refreshed("run-3", at=NOON + 60), refreshed("run-4", "items", NOON + 60))
    recovery = desk.listener.heard[3]
    assert (recovery.remembered, recovery.facts["Took"]) == (
        {"story": "run-1"},
        "4.0 s (the last full refresh took 60 s)",
    )
    assert [list((desk.folder / kind).iterdir()) for kind in ("open", "pending", "inbox")] == [[], [], []]


# Secrets


def test_secrets_reach_neither_people_nor_files(desk):
    desk.env = {"SNOWFLAKE_PASSWORD": "s3cret!", "SLACK_BOT_TOKEN": "xoxb-1", "TABLEAU_TOKEN_NAME": "reporting"}
    desk.listener.trouble = "no way to xoxb-1"
    said = (
        "s3cret! at https://me:pw@host/x?sig=abc, password=hunter2; KEY = 'Ann''s' AND ID IN (4711, 18) for reporting"
    )
    notes = desk.tell(failed("run-1", sentence=said))
    desk.listener.trouble = ""
    desk.now += 1000
    desk.tell()
    written = json.dumps([note.text for note in notes]) + "".join(
        file.read_text() for file in desk.folder.rglob("*.json")
    )
    for text in (desk.listener.heard[0].text, written):
        assert not [word for word in ("s3cret", "xoxb-1", "me:pw", "sig=", "hunter2", "Ann", "4711") if word in text]
    assert "reporting" in desk.listener.heard[0].text, "a token's name is no secret"


def test_values_in_sql_are_shown_where_the_spec_says_so(desk):
    desk.alerts = replace(desk.alerts, show_values=True)
    desk.tell(failed("run-1", sentence="ID IN (17, 18)"))
    assert desk.listener.heard[0].text == "ID IN (17, 18)"
