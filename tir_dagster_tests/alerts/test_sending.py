"""Which reports people hear of, as one story each, and what becomes of what they could not be told."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tir_dagster.alerts.events import Recovered
from tir_dagster.alerts.problems import SENSOR_REPEAT_SECONDS, SERVER_REPEAT_SECONDS, last_boundary, problem_key
from tir_dagster.spec.alerts import Alerts, Cause, OthersAlerts, SlackAlerts
from tir_dagster_tests.alerts.reports import NOON, Desk, down, failed, refreshed


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "alerts")


def blind(at: float, extract: str = "orders"):
    return failed(f"{extract}/blind/{at}", extract, at, cause=Cause.SENSOR_BLIND)


# One story


def test_three_failures_and_a_recovery_are_one_story(desk):
    for number in (1, 2, 3):
        desk.tell(failed(f"run-{number}", at=NOON + number))
    desk.tell(refreshed("run-4", at=NOON + 600))
    assert desk.listener.kinds == ["failure", "repeat", "repeat", "recovery"]
    assert [event.remembered.get("story") for event in desk.listener.heard] == [None, "run-1", "run-1", "run-1"]
    assert len({event.key for event in desk.listener.heard}) == 1
    assert "failed 3 times" in desk.listener.heard[-1].text
    assert desk.storage.problems() == []


def test_a_report_repeated_by_a_tick_that_was_cut_off_is_told_once(desk):
    desk.tell(failed("run-1"))
    desk.tell(failed("run-1"), refreshed("run-2", at=NOON + 1))
    desk.tell(refreshed("run-2", at=NOON + 1))
    assert desk.listener.kinds == ["failure", "recovery"]


def test_extracts_have_stories_of_their_own(desk):
    desk.tell(failed("run-1", "orders"), failed("run-2", "customers"))
    desk.tell(refreshed("run-3", "orders", NOON + 5))
    assert desk.listener.kinds == ["failure", "failure", "recovery"]
    assert [trouble.key for trouble in desk.storage.problems()] == ["customers/refresh"]


def test_another_cause_of_the_same_extract_belongs_to_the_same_story(desk):
    desk.tell(failed("run-1"), failed("run-2", at=NOON + 1, cause=Cause.GUARD))
    assert desk.listener.kinds == ["failure", "repeat"]


def test_drift_is_ended_by_its_own_recovery_or_a_full_refresh_only(desk):
    desk.tell(failed("drift-1", cause=Cause.DRIFT))
    desk.tell(refreshed("run-1", at=NOON + 1))
    assert desk.listener.kinds == ["failure", "success"]
    desk.tell(Recovered("repaired", "orders", "drift", NOON + 2))
    assert desk.listener.kinds == ["failure", "success", "recovery"]
    desk.tell(failed("drift-2", at=NOON + 3, cause=Cause.DRIFT), refreshed("run-2", at=NOON + 4, decision="full"))
    assert desk.listener.kinds[3:] == ["failure", "recovery"]


def test_a_failure_that_is_told_after_a_newer_success_is_no_news(desk):
    desk.tell(refreshed("run-2", at=NOON + 10))
    desk.tell(failed("run-1", at=NOON))
    assert (desk.listener.kinds, desk.storage.problems()) == (["success"], [])
    desk.tell(failed("run-3", at=NOON + 11))
    assert desk.listener.kinds == ["success", "failure"]


def test_a_success_that_is_told_after_a_newer_failure_ends_nothing(desk):
    desk.tell(failed("run-2", at=NOON + 10))
    desk.tell(refreshed("run-1", at=NOON))
    assert [trouble.key for trouble in desk.storage.problems()] == ["orders/refresh"]
    assert "recovery" not in desk.listener.kinds


def test_what_was_not_published_ends_no_staleness(desk):
    desk.tell(failed("stale", cause=Cause.STALE))
    desk.tell(refreshed("run-1", at=NOON + 1, published=False, decision="none"))
    assert desk.listener.kinds == ["failure"]
    desk.tell(refreshed("run-2", at=NOON + 2))
    assert desk.listener.kinds == ["failure", "recovery"]


def test_a_load_has_a_story_of_its_own_which_a_load_ends(desk):
    desk.tell(failed("run-1", cause=Cause.LOAD_FAILED, datasource="DB.S.T"), refreshed("run-2", at=NOON + 1))
    assert desk.listener.heard[0].facts["Table"] == "DB.S.T"
    assert desk.listener.heard[0].next_step.endswith("tir load orders.")
    desk.tell(refreshed("run-3", at=NOON + 2, of="load", facts={"Files": "2"}))
    assert desk.listener.kinds == ["failure", "success", "recovery"]
    assert desk.listener.heard[-1].title == "orders: the load works again"
    assert desk.listener.heard[-1].facts["Files"] == "2"


# A whole server


def test_a_server_that_is_down_is_one_message_for_all_its_extracts(desk):
    desk.tell(*(down(f"run-{name}", name) for name in desk.extracts))
    (event,) = desk.listener.heard
    assert event.extracts == desk.extracts
    assert event.title.startswith("tableau.example.com: Tableau Server cannot be reached")


def test_extracts_that_fail_later_on_the_same_server_join_its_story_quietly(desk):
    desk.tell(down("run-1", "orders"))
    desk.tell(down("run-2", "customers", NOON + 30))
    assert desk.listener.kinds == ["failure"]
    desk.tell(down("run-3", "items", NOON + SERVER_REPEAT_SECONDS + 31))
    assert desk.listener.heard[-1].extracts == desk.extracts


def test_the_extract_that_was_hit_first_speaks_at_each_failure(desk):
    desk.tell(down("run-1", "orders"))
    desk.tell(down("run-2", "orders", NOON + 1))
    assert desk.listener.kinds == ["failure", "repeat"]


def test_a_server_is_back_with_the_first_refresh_that_reaches_it_whoevers_it_is(desk):
    desk.tell(down("run-1", "orders"), down("run-2", "customers"))
    desk.tell(refreshed("run-3", "items", NOON + 1, scopes=("another.example.com",)))
    desk.tell(refreshed("run-4", "items", NOON + 2, scopes=("tableau.example.com",)))
    assert desk.listener.kinds == ["failure", "success", "recovery"]
    assert desk.listener.heard[-1].title == "tableau.example.com: the server answers again"
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


def test_where_nobody_knows_which_server_answered_each_extract_ends_it_for_itself(desk):
    desk.tell(down("run-1", "orders"), down("run-2", "customers"))
    desk.tell(refreshed("run-3", "orders", NOON + 1))
    assert "recovery" not in desk.listener.kinds
    desk.tell(refreshed("run-4", "customers", NOON + 2))
    assert desk.listener.kinds == ["failure", "success", "recovery"]


def test_of_a_server_that_is_down_each_extract_says_what_it_knows_and_no_more(desk):
    desk.tell(
        down("run-1", "orders", unaffected="unchanged"), down("run-2", "items", unaffected="a publish was under way")
    )
    assert desk.listener.heard[0].facts["Unaffected"] == "orders: unchanged; items: a publish was under way"
    desk.tell(down("run-3", "orders", NOON + 1, unaffected="unchanged"))
    assert desk.listener.heard[1].facts["Unaffected"] == "orders: unchanged", "of the other one nothing is known by now"


def test_other_people_hear_of_a_server_by_themselves():
    one, other = (Alerts(slack=SlackAlerts(name)).destination for name in ("#a", "#b"))
    assert problem_key(down("run-1", "orders"), one) != problem_key(down("run-1", "orders"), other)
    assert problem_key(failed("run-1"), one) == problem_key(failed("run-1"), other) == "orders/refresh"


# A blind sensor


def test_a_sensor_that_misses_a_tick_is_not_worth_a_message(desk):
    desk.tell(blind(NOON))
    desk.tell(Recovered("r", "orders", "sensor", NOON + 30))
    assert (desk.listener.heard, desk.storage.problems()) == ([], [])


def test_a_sensor_that_stays_blind_is_told_after_some_patience_and_then_hourly(desk):
    for seconds in range(0, 330, 30):
        desk.tell(blind(NOON + seconds))
    assert desk.listener.kinds == ["failure"]
    desk.tell(blind(NOON + 300 + SENSOR_REPEAT_SECONDS))
    assert desk.listener.kinds == ["failure", "repeat"]
    desk.tell(Recovered("r", "orders", "sensor", NOON + 5000))
    assert desk.listener.kinds[-1] == "recovery"


@pytest.mark.parametrize("topic", ["refresh", "load"])
def test_where_a_refresh_or_a_load_failed_too_a_good_read_ends_nothing(desk, topic):
    server = {"cause": Cause.WAREHOUSE_DOWN, "scope": "account"}
    desk.tell(failed("run-1", topic=topic, **server))
    desk.tell(failed("b", at=NOON + 1, topic="sensor", **server))
    desk.tell(Recovered("r", "orders", "sensor", NOON + 2))
    assert desk.listener.kinds == ["failure"]
    desk.tell(refreshed("run-2", at=NOON + 3, of=topic))
    assert desk.listener.kinds == ["failure", "recovery"]


# Successes


@pytest.mark.parametrize(("policy", "told"), [("always", ["a", "b"]), ("changed", ["a"]), ("never", []), ("daily", [])])
def test_successes_are_told_as_the_spec_says(desk, policy, told):
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success=policy))
    desk.now = NOON + 60
    desk.tell(refreshed("a"), refreshed("b", at=NOON + 1, published=False, decision="none"))
    assert [event.id for event in desk.listener.heard] == told


@pytest.mark.parametrize("policy", ["always", "daily"])
def test_people_of_somebody_else_hear_of_failures_and_their_end_only(desk, policy):
    desk.by_name = {"files": OthersAlerts(slack=SlackAlerts("#mychannel", on_success=policy), channels=("my:Own",))}
    desk.channels = ("slack:#mychannel", "channel:my:Own")
    desk.tell(refreshed("a", "files"), failed("b", "files", NOON + 1), refreshed("c", "files", NOON + 2))
    desk.now += 86_400
    desk.tell()
    assert desk.listener.kinds == ["failure", "failure", "recovery", "recovery"]


def test_a_days_successes_are_one_message_at_its_time(desk):
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success="daily", daily_at="18:00"))
    desk.tell(refreshed("a"), refreshed("b", "customers", NOON + 1), refreshed("c", at=NOON + 2, published=False))
    desk.now = last_boundary(NOON + 86_400, "18:00") + 1
    desk.tell(refreshed("d", at=desk.now))
    (event,) = desk.listener.heard
    assert (event.kind, event.extracts) == ("digest", ("orders", "customers"))
    assert event.facts["orders"] == "1 of 2 published; 5 rows purged, 7 appended"
    desk.tell()
    assert len(desk.listener.heard) == 1


def test_a_success_of_the_day_whose_file_is_damaged_keeps_nobody_from_being_told(desk):
    desk.alerts = replace(desk.alerts, slack=SlackAlerts("#mychannel", on_success="daily"))
    desk.tell(refreshed("a"), refreshed("b", at=NOON + 1))
    next((desk.folder / "daily").glob("*.json")).write_text('{"to": "#mychannel"}', encoding="utf-8")
    desk.now += 86_400
    desk.tell(failed("c", at=NOON + 2))
    assert desk.listener.kinds == ["failure", "digest"]


def test_extracts_of_one_channel_with_times_of_their_own_are_told_together_when_both_are_due(desk):
    slack = SlackAlerts("#mychannel", on_success="daily", daily_at="06:00")
    evening = replace(desk.alerts, slack=replace(slack, daily_at="18:00"))
    desk.alerts = replace(desk.alerts, slack=slack)
    desk.by_name = {"customers": evening}
    desk.tell(refreshed("a"), refreshed("b", "customers", NOON + 1))
    desk.now = last_boundary(NOON + 86_400, "18:00") + 60
    desk.tell(refreshed("c", "customers", at=desk.now))
    assert [event.extracts for event in desk.listener.heard] == [("customers",)], "the other one's time has not come"
    desk.now += 86_400
    desk.tell()
    assert [event.extracts for event in desk.listener.heard[1:]] == [("orders", "customers")]


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


def test_a_full_refresh_is_what_later_ones_are_compared_with(desk):
    desk.tell(refreshed("a", decision="full", seconds=60.0))
    desk.tell(refreshed("b", at=NOON + 1))
    assert "the last full refresh took 60 s" in desk.listener.heard[1].facts["Took"]
    assert (
        desk.listener.heard[1].text == "7 of 1,000 rows moved: 99.3% of the rows and 56 s saved against a full refresh."
    )


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
