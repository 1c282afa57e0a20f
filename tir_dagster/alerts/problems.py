"""The decisions: which report opens, continues or ends a problem, who gets it, what is tried again. Pure: no files, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from tir_dagster.alerts.events import TOPICS, Event, Failure, Problem, Recovered, Report, Success
from tir_dagster.alerts.messages import digest_event, failure_event, recovery_event, success_event
from tir_dagster.spec.alerts import Alerts, Cause, Topic

# How often messages are repeated about a sensor that still cannot read, and about further extracts on a server that is down.
SENSOR_REPEAT_SECONDS, SERVER_REPEAT_SECONDS = 3600.0, 600.0
# A lost recovery would leave an incident open for ever: it is tried again for a day.
RECOVERY_TRIED_SECONDS = 86_400.0
HANDLED_KEPT, GIVEN_UP_KEPT = 2000, 200

K = TypeVar("K")
V = TypeVar("V")
# The alerts of each extract and load, by its name.
Settings = Mapping[str, Alerts]


@dataclass(frozen=True)
class WaitingAlert:
    """An event that a channel did not take; it is tried once more."""

    channel: str
    event: Event
    due: float
    # Whose settings name the channel.
    extract: str
    # When the first try failed.
    since: float = 0.0


@dataclass(frozen=True)
class AlertState:
    """Everything that is kept between reports; `storage` writes it as files."""

    # Open problems, by their keys.
    problems: Mapping[str, Problem] = field(default_factory=dict)
    # By channel and problem: a newer event of the same problem replaces one that waits.
    waiting: Mapping[tuple[str, str], WaitingAlert] = field(default_factory=dict)
    # Successes for the daily message, by Slack channel and id.
    collected: Mapping[tuple[str, str], Success] = field(default_factory=dict)
    # When things last worked, by extract and topic: an older failure is not sent.
    worked: Mapping[str, Mapping[Topic, float]] = field(default_factory=dict)
    # The duration of each extract's last full refresh, for comparison.
    full_seconds: Mapping[str, float] = field(default_factory=dict)
    given_up: tuple[Mapping[str, Any], ...] = ()
    # The ids of the newest reports that were handled.
    handled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alert:
    """An event to send, and the extract whose settings name the channels."""

    event: Event
    extract: str
    # What each channel returned for earlier events of the problem.
    memory: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # The only channel that gets it, if not all do.
    channel: str = ""
    # Kinds of channels that do not get it.
    skipped: tuple[str, ...] = ()

    def goes_to(self, channel: str) -> bool:
        return self.channel in ("", channel) and channel.partition(":")[0] not in self.skipped


@dataclass(frozen=True)
class Decision:
    """The state after a report, and the alerts to send."""

    state: AlertState
    alerts: tuple[Alert, ...] = ()
    # Recoveries to leave for the process that alerts for the affected extracts, by slot: a newer one replaces them.
    passed_on: Mapping[str, Recovered] = field(default_factory=dict)


def problem_key(failure: Failure, destination: tuple[str, ...]) -> str:
    """Return the key of one thread and one incident: of an extract, or of all extracts on a server that is down."""
    if failure.cause.is_whole_server:
        # Extracts with other recipients have their own thread.
        recipients = hashlib.sha256("\0".join(destination).encode()).hexdigest()[:6]
        server = "tableau" if failure.cause is Cause.SERVER_DOWN else "snowflake"
        return f"{server}/{failure.scope or 'server'}/{recipients}"
    return f"{failure.extract}/{failure.cause.topic}"


def new_groups(state: AlertState, reports: Sequence[Report], settings: Settings) -> list[list[Report]]:
    """Return reports that were not handled, in the order of time: failures of one problem together, unless a success is between."""
    # A report may be both left for the sensor and in the history.
    new = {report.id: report for report in reports if report.extract in settings and report.id not in state.handled}
    groups: list[list[Report]] = []
    growing: dict[str, list[Report]] = {}
    for report in sorted(new.values(), key=lambda report: report.at):
        if not isinstance(report, Failure):
            groups.append([report])
            growing = {}
            continue
        key = problem_key(report, settings[report.extract].destination)
        if key not in growing or report.extract in {member.extract for member in growing[key]}:
            growing[key] = []
            groups.append(growing[key])
        growing[key].append(report)
    return groups


def decide(state: AlertState, group: Sequence[Report], settings: Settings) -> Decision:
    """Return what a group of reports means: failures of one problem, or one success or recovery."""
    first = group[0]
    if isinstance(first, Failure):
        return _fail(state, cast("Sequence[Failure]", group), settings)
    return _end(state, first, settings)


# Failures


def _fail(state: AlertState, reported: Sequence[Failure], settings: Settings) -> Decision:
    # A sensor that cannot read reports at every tick: those ids are not kept, the reports are removed once read.
    handled = _handle(state, *(failure.id for failure in reported if failure.ends_with != "sensor"))
    # A late report about something that works again: not sent.
    failures = [
        failure for failure in reported if failure.at >= state.worked.get(failure.extract, {}).get(failure.ends_with, 0)
    ]
    if not failures:
        return Decision(handled)
    last = failures[-1]
    alerts = settings[last.extract]
    key = problem_key(last, alerts.destination)
    before = state.problems.get(key)
    known = before or Problem(key, last.cause.name, since=failures[0].at, last=last.at)
    due = is_due(failures, before, patience=alerts.patience)
    problem = replace(
        known,
        cause=last.cause.name,
        last=last.at if due else known.last,
        count=known.count + due,
        affected=_affected(known, failures),
        scope=last.scope if last.cause.is_whole_server else "",
        latest=max(last.at, known.latest),
    )
    alert = Alert(failure_event(key, failures, before), last.extract, problem.memory)
    return Decision(replace(handled, problems={**state.problems, key: problem}), (alert,) if due else ())


def is_due(failures: Sequence[Failure], before: Problem | None, *, patience: float) -> bool:
    """Whether to send a message: for each failure of an extract, but not for each extract on a server that is down."""
    now = failures[-1].at
    blind = all(failure.ends_with == "sensor" for failure in failures)
    if before is None or before.count == 0:
        since = min([failure.at for failure in failures] + ([before.since] if before else []))
        return not blind or now - since >= patience
    if blind:
        return now - before.last >= SENSOR_REPEAT_SECONDS
    if failures[0].cause.is_whole_server:
        # The extract that was affected first stands for all of them.
        first_again = next(iter(before.affected), "") in {failure.extract for failure in failures}
        return first_again or now - before.last >= SERVER_REPEAT_SECONDS
    return True


def _affected(problem: Problem, failures: Sequence[Failure]) -> dict[str, Topic]:
    """Return the affected extracts and what ends the problem; after a failed refresh or load, a sensor's read does not."""
    affected = dict(problem.affected)
    for failure in failures:
        known = affected.get(failure.extract)
        if known is None or not (known == "refresh" or failure.ends_with == "sensor"):
            affected[failure.extract] = failure.ends_with
    return affected


def _handle(state: AlertState, *idents: str) -> AlertState:
    others = [ident for ident in state.handled if ident not in idents]
    return replace(state, handled=tuple([*others, *idents][-HANDLED_KEPT:])) if idents else state


# Successes and recoveries


def _end(state: AlertState, report: Success | Recovered, settings: Settings) -> Decision:
    problems = dict(state.problems)
    alerts: list[Alert] = []
    passed_on: dict[str, Recovered] = {}
    full = state.full_seconds.get(report.extract)
    recipients_know = False
    for key, problem in state.problems.items():
        left = problem.affected_after(report)
        if left == problem.affected:
            continue
        # The recovery of a server goes to the affected extracts; another process sends it for those that we do not know.
        recipient = next((name for name in problem.affected if name in settings), None)
        if recipient is None:
            passed_on[f"{key}/server"] = _pass_on(problem, report)
        elif left:
            problems[key] = replace(problem, affected=left)
        else:
            del problems[key]
            if problem.count:
                alerts.append(Alert(recovery_event(problem, report, full), recipient, problem.memory))
                recipients_know |= settings[recipient].destination == settings[report.extract].destination
    worked = state.worked.get(report.extract, {})
    now_works = {topic: max(report.at, worked.get(topic, 0.0)) for topic in TOPICS if report.ends(topic)}
    after = replace(state, problems=problems, worked={**state.worked, report.extract: {**worked, **now_works}})
    if isinstance(report, Recovered):
        return Decision(after, tuple(alerts), passed_on)
    after = _handle(after, report.id)
    if report.published and report.decision == "full":
        after = replace(after, full_seconds={**state.full_seconds, report.extract: report.seconds})
    if not recipients_know and settings[report.extract].hears_successes:
        after, more = _succeed(after, report, settings[report.extract], full)
        alerts += more
    return Decision(after, tuple(alerts), passed_on)


def _pass_on(problem: Problem, report: Success | Recovered) -> Recovered:
    topic: Topic = "server" if isinstance(report, Success) else report.topic
    ident = f"{problem.key}/server/{report.id}"
    return Recovered(ident, next(iter(problem.affected)), topic, report.at, report.scopes)


def _succeed(
    state: AlertState, success: Success, alerts: Alerts, full: float | None
) -> tuple[AlertState, Sequence[Alert]]:
    slack = alerts.slack
    if slack is not None and slack.on_success == "daily":
        state = replace(state, collected={**state.collected, (slack.channel, success.id): success})
    wanted = ("always", "changed") if success.published else ("always",)
    in_slack = slack is not None and slack.on_success in wanted
    if not (in_slack or success.published):
        return state, ()
    # Incidents are for failures only: a success does not need ServiceNow.
    skipped = ("servicenow",) if in_slack else ("servicenow", "slack")
    return state, [Alert(success_event(success, full), success.extract, skipped=skipped)]


def next_digest(state: AlertState, settings: Settings, now: float) -> Decision | None:
    """Return the next daily message, about all extracts of a Slack channel whose time of day has come."""
    until = {
        name: last_boundary(now, alerts.slack.daily_at)
        for name, alerts in settings.items()
        if alerts.slack and alerts.slack.on_success == "daily"
    }
    due = {key: success for key, success in state.collected.items() if success.at < until.get(success.extract, 0.0)}
    channel = min((channel for channel, _ in due), default=None)
    if channel is None:
        return None
    of_channel = {key: success for key, success in due.items() if key[0] == channel}
    successes = sorted(of_channel.values(), key=lambda success: success.at)
    day = datetime.fromtimestamp(max(until[success.extract] for success in successes), UTC)
    alert = Alert(digest_event(successes, f"{day:%Y-%m-%d %H:%M}"), successes[0].extract, channel=f"slack:{channel}")
    return Decision(replace(state, collected=_without(state.collected, *of_channel)), (alert,))


def last_boundary(now: float, at: str) -> float:
    """Return the last moment at this time of day, in UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    hour, minute = map(int, at.split(":"))
    today = moment.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (today if today <= moment else today - timedelta(days=1)).timestamp()


# The answers of channels


def delivered(state: AlertState, event: Event, channel: str, answer: Mapping[str, str]) -> AlertState:
    """Return the state after a channel took the event: nothing waits, and its answer is remembered."""
    state = replace(state, waiting=_without(state.waiting, (channel, event.key)))
    problem = state.problems.get(event.key)
    if problem is None or not answer:
        return state
    memory = {**problem.memory, channel: {**problem.memory.get(channel, {}), **answer}}
    return replace(state, problems={**state.problems, event.key: replace(problem, memory=memory)})


def not_delivered(state: AlertState, failed: WaitingAlert, why: str, now: float) -> tuple[AlertState, bool]:
    """Return the state after a channel did not take an event, and whether it is tried again."""
    key = (failed.channel, failed.event.key)
    earlier = state.waiting.get(key)
    if earlier is not None and earlier.event.id == failed.event.id:
        failed = replace(failed, since=earlier.since)
        if failed.event.kind != "recovery" or now - failed.since > RECOVERY_TRIED_SECONDS:
            return give_up(state, failed, why, now), False
    return replace(state, waiting={**state.waiting, key: failed}), True


def give_up(state: AlertState, waiting: WaitingAlert, why: str, now: float) -> AlertState:
    """Return the state without an event that could not be sent, but with a record of why."""
    line = {"channel": waiting.channel, "title": waiting.event.title, "why": why, "at": now}
    return replace(
        state,
        waiting=_without(state.waiting, (waiting.channel, waiting.event.key)),
        given_up=(*state.given_up, line)[-GIVEN_UP_KEPT:],
    )


def _without(values: Mapping[K, V], *keys: K) -> dict[K, V]:
    return {key: value for key, value in values.items() if key not in keys}
