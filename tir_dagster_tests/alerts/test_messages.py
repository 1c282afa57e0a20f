"""What people read: Block Kit within Slack's limits, escaped; incidents with every field; values hidden."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tir_dagster.alerts.events import Event, from_json, to_json
from tir_dagster.alerts.messages import digest_event, failure_event, success_event
from tir_dagster.alerts.servicenow import correlation_id, incident_fields
from tir_dagster.alerts.slack import blocks
from tir_dagster.alerts.text import hide_values, mrkdwn, scrub
from tir_dagster.sandbox.people.slack import problem_of, texts_of
from tir_dagster.spec.alerts import Cause, ServiceNowAlerts, Severity
from tir_dagster_tests.alerts.reports import NOON, down, failed, refreshed


def all_text(event: Event) -> str:
    return "\n".join(text for block in blocks(event) for text in texts_of(block))


def test_a_success_says_what_changed_how_long_it_took_and_where_to_look():
    event = success_event(
        refreshed(
            "run", datasource_url="https://t/ds", run_url="https://d/runs/run", as_of="2025-03-01T10:00:00+00:00"
        ),
        full_seconds=64.0,
    )
    text = all_text(event)
    for expected in (
        "*orders: refreshed (incremental)*",
        "sales/Orders",
        "5 rows purged, 7 appended",
        "1: 2025-03",
        "4.0 s (the last full refresh took 64 s)",
        "2025-03-01 10:00 UTC",
        "<https://t/ds|Open the datasource>",
        "<https://d/runs/run|Open the run>",
        "saved against a full refresh",
    ):
        assert expected in text


def test_a_full_refresh_says_why():
    event = success_event(refreshed("run", decision="full", reason="FIRST_LOAD", why="it was never loaded"), None)
    assert event.facts["Full because"] == "it was never loaded"
    assert event.title == "orders: refreshed (full, FIRST_LOAD)"


def test_a_failure_says_cause_step_what_is_unaffected_and_what_to_do():
    report = failed(
        "run-1234-5678",
        cause=Cause.GUARD,
        step="orders / changed_keys",
        unaffected="the published datasource is unchanged, data as of 2025-03-01 10:00 UTC",
    )
    text = all_text(failure_event("orders/refresh", [report], None))
    for expected in (
        "stopped before it touched anything",
        "orders / changed_keys",
        "is unchanged, data as of",
        "Look at the source",
    ):
        assert expected in text


def test_text_of_users_cannot_mention_link_or_break_out_of_bold():
    hostile = "<!channel> *bold* <https://evil|here> & more"
    event = failure_event("k", [failed("r", "orders", sentence=hostile, step=hostile)], None)
    text = all_text(event)
    assert "<!channel>" not in text
    assert "<https://evil" not in text
    assert "&lt;!channel&gt; *bold* &lt;https://evil|here&gt; &amp; more" in text


@settings(max_examples=30)
@given(st.text(max_size=4000), st.text(max_size=300))
def test_every_message_is_one_that_slack_takes(sentence, name):
    failures = [
        failed("r", name or "x", sentence=sentence or "x", step=name, run_url=f"https://d/{name}", unaffected=sentence)
    ]
    success = refreshed(
        "s", name or "x", warnings=(sentence,) * 9, slices=(name,) * 30, datasource_url=f"https://t/{name}"
    )
    for event in (failure_event("k", failures, None), success_event(success, 1.0), digest_event([success] * 3, "day")):
        assert problem_of(blocks(event)) is None
        json.dumps(blocks(event))


def test_a_digest_of_many_extracts_is_still_a_message_that_slack_takes():
    event = digest_event([refreshed(f"r{n}", f"extract_{n}") for n in range(100)], "day")
    assert problem_of(blocks(event)) is None


@pytest.mark.parametrize("report", [failed("r", topic="sensor"), refreshed("s"), down("d", "orders")])
def test_a_report_survives_its_file(report):
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


def test_an_incident_has_group_severity_by_cause_and_custom_fields():
    alerts = ServiceNowAlerts(
        group="mygroup",
        urgency="low",
        by_cause={"server_down": Severity("high", "high")},
        fields={"u_extract": "{extract} ({cause})", "category": "software"},
    )
    fields = incident_fields(failure_event("orders/refresh", [failed("r", run_url="https://d/r")], None), alerts)
    assert (fields["urgency"], fields["impact"], fields["assignment_group"]) == ("3", "2", "mygroup")
    assert (fields["u_extract"], fields["category"]) == ("orders (step_failed)", "software")
    assert fields["correlation_id"] == "tir/orders/refresh"
    assert "The step broke" in fields["description"]
    assert "https://d/r" in fields["description"]
    assert "What to do: " in fields["description"]
    whole = incident_fields(failure_event("k", [down("r", "orders", NOON)], None), alerts)
    assert (whole["urgency"], whole["impact"]) == ("1", "1")


def test_long_names_of_troubles_stay_apart_and_fit_the_field():
    one, other = (correlation_id("x" * 200 + end) for end in ("a", "b"))
    assert one != other
    assert len(one) == 100
    assert "^" not in correlation_id("a^active=false")


TWICE = "Duplicate row detected during DML action Row Values: "


@pytest.mark.parametrize(
    ("sql", "shown"),
    [
        ("WHERE ID = 17 AND NAME <> 'O''Brien'", "WHERE ID = ? AND NAME <> ?"),
        ("ID IN (1, 2, NULL, 'x')", "ID IN (?)"),
        ("D BETWEEN '2024-01-01' AND '2024-02-01'", "D BETWEEN ? AND ?"),
        ("VALUES ('Ann', 5)", "VALUES (?)"),
        ("(A, B) IN ((1, 'Ann'), (2, 'Bob'))", "(A, B) IN (?)"),
        ("NAME IN ('Ann'::VARCHAR, 'Bob')", "NAME IN (?)"),
        ("NAME IN ('Ann', 'Bo", "NAME IN (?)"),
        ("VALUES (1, 'Ann'), (2, 'Bob') x", "VALUES (?) x"),
        ("Numeric value 'Ann' is not recognized", "Numeric value ? is not recognized"),
        ("String 'Ann' is too long and would be truncated", "String ? is too long and would be truncated"),
        ("Can't parse 'Ann' as date with format 'AUTO'", "Can't parse ? as date with format 'AUTO'"),
        ('Failed to cast variant value "Ann" to FIXED', "Failed to cast variant value ? to FIXED"),
        ('Duplicate row detected during DML action Row Values: ["Ann]", 17]', f"{TWICE}?"),
        ("a.csv:3: ID: 'Ann\\'s' is no whole number; ", "a.csv:3: ID: ? is no whole number; "),
        ('a.csv:3: ID: "Ann\'s" is longer than 2', "a.csv:3: ID: ? is longer than 2"),
        (
            "T has keys (ID) more than once: Ann (2 rows) and more. Rows",
            "T has keys (ID) more than once: ? and more. Rows",
        ),
        ("T has keys (ID) more than once: A. B (2 rows). Rows that", "T has keys (ID) more than once: ?. Rows that"),
        ("IN (SELECT ID FROM T)", "IN (SELECT ID FROM T)"),
        ("datasource 'Orders' in project 'sales'", "datasource 'Orders' in project 'sales'"),
        ("3 of 5 slices", "3 of 5 slices"),
    ],
)
def test_values_in_sql_are_hidden_and_names_are_not(sql, shown):
    assert hide_values(sql) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: …"),
        ("SNOWFLAKE_PASSWORD=hunter2 failed", "SNOWFLAKE_PASSWORD=… failed"),
        ("client_secret=abc&x=1", "client_secret=…&x=1"),
        ('{"password": "hunter2"}', '{"password": …}'),
        ("password='two words' now", "password=… now"),
    ],
)
def test_what_is_named_like_a_secret_is_taken_out(said, shown):
    assert scrub(said, {}, show_values=True) == shown


def test_of_two_secrets_that_begin_alike_nothing_is_left():
    assert scrub("got abcdefgh.", {"A_TOKEN": "abcd", "B_TOKEN": "abcdefgh"}) == "got …."


def test_an_address_keeps_its_host_and_loses_what_may_be_secret():
    text = scrub("see https://user:word@host.example/path?token=1&x=2 now", {})
    assert text == "see https://…@host.example/path?… now"


@given(st.text())
def test_escaped_text_holds_nothing_that_slack_reads(text):
    assert not {"<", ">"} & set(mrkdwn(text))
