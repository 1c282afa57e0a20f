"""Which alerts a history of reports gives, and which problems stay open: decided without files, channels or a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tir_dagster.alerts.events import Event, Failure, Recovered, Report
from tir_dagster.alerts.problems import (
    RECOVERY_TRIED_SECONDS,
    SENSOR_REPEAT_SECONDS,
    SERVER_REPEAT_SECONDS,
    Alert,
    AlertState,
    Settings,
    WaitingAlert,
    decide,
    delivered,
    new_groups,
    next_digest,
    not_delivered,
    problem_key,
)
from tir_dagster.spec.alerts import Alerts, Cause, OthersAlerts, SlackAlerts
from tir_dagster_tests.alerts.reports import NOON, down, failed, refreshed

SLACK = SlackAlerts("#mychannel")
SETTINGS = dict.fromkeys(("orders", "customers", "items"), Alerts(slack=SLACK))
SERVER, SNOWFLAKE = "tableau.example.com", {"cause": Cause.WAREHOUSE_DOWN, "scope": "account"}


def blind(at: float, extract: str = "orders") -> Failure:
    return failed(f"{extract}/blind/{at}", extract, at, cause=Cause.SENSOR_BLIND)


def reads(at: float) -> Recovered:
    return Recovered("r", "orders", "sensor", at)


@dataclass
class History:
    """The state after the reports so far, and the alerts that they gave."""

    settings: Settings = field(default_factory=lambda: SETTINGS)
    state: AlertState = field(default_factory=AlertState)
    alerts: list[Alert] = field(default_factory=list)
    passed_on: dict[str, Recovered] = field(default_factory=dict)

    def add(self, *reports: Report) -> History:
        for group in new_groups(self.state, reports, self.settings):
            decision = decide(self.state, group, self.settings)
            self.state = decision.state
            self.alerts += decision.alerts
            self.passed_on |= decision.passed_on
        return self

    def digest(self, now: float) -> list[Alert]:
        digests = []
        while decision := next_digest(self.state, self.settings, now):
            self.state = decision.state
            digests += decision.alerts
        return digests

    @property
    def kinds(self) -> str:
        return " ".join(alert.event.kind for alert in self.alerts)

    @property
    def open(self) -> str:
        return " ".join(key.rpartition("/")[0] if key.startswith("tableau") else key for key in self.state.problems)


# Reports that arrive together are in one list.
CASES: dict[str, tuple[Sequence[Sequence[Report]], str, str]] = {
    "three failures and a success are one problem": (
        [[failed("1")], [failed("2", at=NOON + 1)], [failed("3", at=NOON + 2)], [refreshed("4", at=NOON + 600)]],
        "failure repeat repeat recovery",
        "",
    ),
    "a report that arrives twice is sent once": (
        [[failed("1")], [failed("1"), refreshed("2", at=NOON + 1)], [refreshed("2", at=NOON + 1)]],
        "failure recovery",
        "",
    ),
    "each extract has its own problem": (
        [[failed("1"), failed("2", "customers")], [refreshed("3", at=NOON + 5)]],
        "failure failure recovery",
        "customers/refresh",
    ),
    "another cause of the same extract belongs to its problem": (
        [[failed("1"), failed("2", at=NOON + 1, cause=Cause.GUARD)]],
        "failure repeat",
        "orders/refresh",
    ),
    "drift is not ended by an incremental refresh": (
        [[failed("1", cause=Cause.DRIFT)], [refreshed("2", at=NOON + 1)]],
        "failure success",
        "orders/drift",
    ),
    "drift is ended by its own recovery": (
        [[failed("1", cause=Cause.DRIFT)], [Recovered("2", "orders", "drift", NOON + 1)]],
        "failure recovery",
        "",
    ),
    "drift is ended by a full refresh": (
        [[failed("1", cause=Cause.DRIFT)], [refreshed("2", at=NOON + 1, decision="full")]],
        "failure recovery",
        "",
    ),
    "a failure that is found after a later success is not sent": (
        [[refreshed("2", at=NOON + 10)], [failed("1")]],
        "success",
        "",
    ),
    "a failure after a success is sent": (
        [[refreshed("2", at=NOON + 10)], [failed("3", at=NOON + 11)]],
        "success failure",
        "orders/refresh",
    ),
    "a success that is found after a later failure ends nothing": (
        [[failed("2", at=NOON + 10)], [refreshed("1")]],
        "failure success",
        "orders/refresh",
    ),
    "a stale extract stays stale if nothing is published": (
        [[failed("1", cause=Cause.STALE)], [refreshed("2", at=NOON + 1, published=False, decision="none")]],
        "failure",
        "orders/freshness",
    ),
    "a stale extract is fresh with the next publish": (
        [[failed("1", cause=Cause.STALE)], [refreshed("2", at=NOON + 1)]],
        "failure recovery",
        "",
    ),
    "a failed load is ended by a load, not by a refresh": (
        [
            [failed("1", cause=Cause.LOAD_FAILED), refreshed("2", at=NOON + 1)],
            [refreshed("3", at=NOON + 2, of="load")],
        ],
        "failure success recovery",
        "",
    ),
    "a server that is down is one problem of all its extracts": (
        [[down("1", "orders"), down("2", "customers"), down("3", "items")]],
        "failure",
        f"tableau/{SERVER}",
    ),
    "extracts that fail later on the same server are added quietly": (
        [[down("1", "orders")], [down("2", "customers", NOON + 30)]],
        "failure",
        f"tableau/{SERVER}",
    ),
    "the added extracts are named after ten minutes": (
        [[down("1", "orders")], [down("2", "items", NOON + SERVER_REPEAT_SECONDS)]],
        "failure repeat",
        f"tableau/{SERVER}",
    ),
    "every failure of the first affected extract is sent": (
        [[down("1", "orders")], [down("2", "orders", NOON + 1)]],
        "failure repeat",
        f"tableau/{SERVER}",
    ),
    "a server is back with the first refresh that reaches it": (
        [
            [down("1", "orders"), down("2", "customers")],
            [refreshed("3", "items", NOON + 1, scopes=("another.example.com",))],
            [refreshed("4", "items", NOON + 2, scopes=(SERVER,))],
        ],
        "failure success recovery",
        "",
    ),
    "failures before and after a success are two problems, also if they arrive together": (
        [[down("1", "orders"), refreshed("2", at=NOON + 1, scopes=(SERVER,)), down("3", "customers", NOON + 2)]],
        "failure recovery failure",
        f"tableau/{SERVER}",
    ),
    "without a known server, each extract ends it for itself": (
        [
            [down("1", "orders"), down("2", "customers")],
            [refreshed("3", "orders", NOON + 1)],
            [refreshed("4", "customers", NOON + 2)],
        ],
        "failure success recovery",
        "",
    ),
    "a sensor that misses a tick is not worth a message": ([[blind(NOON)], [reads(NOON + 30)]], "", ""),
    "a sensor that stays blind is reported after its patience": (
        [[blind(NOON + seconds)] for seconds in range(0, 330, 30)],
        "failure",
        "orders/sensor",
    ),
    "a blind sensor is reported again every hour, until it reads": (
        [[blind(NOON)], [blind(NOON + 300)], [blind(NOON + 300 + SENSOR_REPEAT_SECONDS)], [reads(NOON + 5000)]],
        "failure repeat recovery",
        "",
    ),
    "after a failed refresh, a sensor's read does not end the problem": (
        [[failed("1", **SNOWFLAKE)], [failed("2", at=NOON + 1, topic="sensor", **SNOWFLAKE)], [reads(NOON + 2)]],
        "failure",
        problem_key(failed("1", **SNOWFLAKE), SETTINGS["orders"].destination),
    ),
    "after a failed refresh, a verification that could compare does not end the problem": (
        [
            [down("1", "orders"), down("2", "orders", NOON + 1, topic="verification")],
            [Recovered("3", "orders", "verification", NOON + 2)],
        ],
        "failure repeat",
        f"tableau/{SERVER}",
    ),
    "one sensor's read shows that Snowflake answers all sensors": (
        [
            [failed(f"1/{name}", name, topic="sensor", **SNOWFLAKE) for name in ("orders", "items")],
            [failed(f"2/{name}", name, NOON + 300, topic="sensor", **SNOWFLAKE) for name in ("orders", "items")],
            [replace(reads(NOON + 301), scopes=("account",))],
        ],
        "failure recovery",
        "",
    ),
    "after a failed load, a sensor's read does not end the problem, a load does": (
        [
            [failed("1", topic="load", **SNOWFLAKE)],
            [failed("2", at=NOON + 1, topic="sensor", **SNOWFLAKE), reads(NOON + 2)],
            [refreshed("3", at=NOON + 3, of="load")],
        ],
        "failure recovery",
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_problems_open_continue_and_end(case):
    steps, kinds, still_open = CASES[case]
    history = History()
    for reports in steps:
        history.add(*reports)
    assert (history.kinds, history.open) == (kinds, still_open)


def test_an_alert_names_all_affected_extracts_and_what_each_of_them_knows():
    history = History().add(down("1", "orders", unaffected="unchanged"), down("2", "items", unaffected="publishing"))
    (alert,) = history.alerts
    assert alert.event.extracts == ("orders", "items")
    assert alert.event.title.startswith(f"{SERVER}: Tableau Server cannot be reached")
    assert alert.event.facts["Unaffected"] == "orders: unchanged; items: publishing"
    again = history.add(down("3", "orders", NOON + 1, unaffected="unchanged")).alerts[-1]
    assert again.event.facts["Unaffected"] == "orders: unchanged", "of the other one nothing is known by now"


def test_a_recovery_says_what_ended_and_how_long_it_took():
    server = History().add(down("1", "orders"), refreshed("2", "items", NOON + 60, scopes=(SERVER,))).alerts[-1]
    assert server.event.title == f"{SERVER}: the server answers again"
    assert server.event.text == "It had failed once since 2023-11-15 12:00 UTC, for 60 s."
    load = failed("1", cause=Cause.LOAD_FAILED, datasource="DB.S.T")
    first, last = History().add(load, refreshed("3", at=NOON + 2, of="load", facts={"Files": "2"})).alerts
    assert (first.event.facts["Table"], first.event.next_step[-16:]) == ("DB.S.T", "tir load orders.")
    assert (last.event.title, last.event.facts["Files"]) == ("orders: the load works again", "2")


def test_other_recipients_have_their_own_problem_of_a_server():
    one, other = (Alerts(slack=SlackAlerts(name)).destination for name in ("#a", "#b"))
    assert problem_key(down("1", "orders"), one) != problem_key(down("1", "orders"), other)
    assert problem_key(failed("1"), one) == problem_key(failed("1"), other) == "orders/refresh"


def test_a_recovery_for_unknown_extracts_is_passed_on():
    """A command knows only its own extract."""
    history = History().add(down("1", "orders"))
    command = History({"items": SETTINGS["items"]}, history.state)
    command.add(refreshed("2", "items", NOON + 1, scopes=(SERVER,)))
    assert (command.kinds, len(command.state.problems)) == ("success", 1)
    history.state = command.state
    assert history.add(*command.passed_on.values()).kinds == "failure recovery"
    assert history.open == ""


@pytest.mark.parametrize(("policy", "sent"), [("always", "a b"), ("changed", "a"), ("never", ""), ("daily", "")])
def test_successes_are_sent_to_slack_as_the_spec_says(policy, sent):
    history = History({"orders": Alerts(slack=replace(SLACK, on_success=policy))})
    history.add(refreshed("a"), refreshed("b", at=NOON + 1, published=False, decision="none"))
    assert " ".join(alert.event.id for alert in history.alerts if alert.goes_to("slack:#mychannel")) == sent
    assert [alert.event.id for alert in history.alerts if alert.goes_to("channel:my:Own")][:1] == ["a"]
    assert not [alert for alert in history.alerts if alert.goes_to("servicenow:mygroup")]


@pytest.mark.parametrize("policy", ["always", "daily"])
def test_recipients_of_another_spec_get_only_failures_and_recoveries(policy):
    history = History({"files": OthersAlerts(slack=replace(SLACK, on_success=policy))})
    history.add(refreshed("a", "files"), failed("b", "files", NOON + 1), refreshed("c", "files", NOON + 2))
    assert (history.kinds, history.digest(NOON + 86_400)) == ("failure recovery", [])


def test_the_successes_of_a_day_are_one_message_at_its_time():
    evening = Alerts(slack=replace(SLACK, on_success="daily", daily_at="18:00"))
    history = History({"orders": evening, "customers": evening})
    history.add(refreshed("a"), refreshed("b", "customers", NOON + 1), refreshed("c", at=NOON + 2, published=False))
    at_six = NOON + 6 * 3600
    assert history.digest(at_six - 1) == []
    (digest,) = history.add(refreshed("d", at=at_six)).digest(at_six)
    assert (digest.event.kind, digest.event.extracts) == ("digest", ("orders", "customers"))
    assert digest.event.facts["orders"] == "1 of 2 published; 5 rows purged, 7 appended"
    assert (digest.channel, history.digest(at_six)) == ("slack:#mychannel", [])


def test_extracts_of_one_channel_are_in_one_message_when_the_times_of_both_have_come():
    morning, evening = (Alerts(slack=SlackAlerts("#mychannel", "daily", at)) for at in ("06:00", "18:00"))
    history = History({"orders": morning, "customers": evening})
    history.add(refreshed("a"), refreshed("b", "customers", NOON + 1))
    (early,) = history.digest(NOON + 7 * 3600)
    history.add(refreshed("c", "customers", NOON + 7 * 3600))
    (late,) = history.digest(NOON + 31 * 3600)
    assert (early.event.extracts, late.event.extracts) == (("customers",), ("orders", "customers"))


def test_later_refreshes_are_compared_with_the_last_full_one():
    last = History().add(refreshed("a", decision="full", seconds=60.0), refreshed("b", at=NOON + 1)).alerts[-1]
    assert "the last full refresh took 60 s" in last.event.facts["Took"]
    assert last.event.text == "7 of 1,000 rows moved: 99.3% of the rows and 56 s saved against a full refresh."


@pytest.mark.parametrize(
    ("kind", "tries", "waits"),
    [
        ("failure", [0.0], True),
        ("failure", [0.0, 300.0], False),
        ("recovery", [0.0, 300.0, RECOVERY_TRIED_SECONDS], True),
        ("recovery", [0.0, RECOVERY_TRIED_SECONDS + 1], False),
    ],
)
def test_an_alert_is_tried_once_more_and_a_recovery_for_a_day(kind, tries, waits):
    event, state = Event(kind, "run-1", "orders/refresh", ("orders",), "It failed", ""), AlertState()
    for seconds in tries:
        at = NOON + seconds
        state, again = not_delivered(state, WaitingAlert("slack:#c", event, at + 300, "orders", at), "no network", at)
        assert again is (seconds != tries[-1] or waits)
    assert (len(state.waiting), [line["title"] for line in state.given_up]) == (waits, [] if waits else ["It failed"])


def test_a_newer_event_of_the_same_problem_replaces_one_that_waits():
    old, new = (Event("failure", ident, "orders/refresh", ("orders",), ident, "") for ident in ("run-1", "run-2"))
    state = AlertState()
    for event in (old, new):
        state, again = not_delivered(state, WaitingAlert("slack:#c", event, NOON, "orders", NOON), "no network", NOON)
        assert again
    assert [waiting.event for waiting in state.waiting.values()] == [new]
    assert delivered(state, new, "slack:#c", {}).waiting == {}
