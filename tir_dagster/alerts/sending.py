"""Sending alerts: decide on reports, ask the channels in bounded time, store the result."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from slack_sdk import WebClient

from tir_dagster.addresses import without_credentials
from tir_dagster.alerts import problems
from tir_dagster.alerts.events import Channel, Event, Failure, Report, Success
from tir_dagster.alerts.problems import Alert, AlertState, Decision, Settings, WaitingAlert
from tir_dagster.alerts.retries import ChannelError, Persistence
from tir_dagster.alerts.servicenow import ServiceNowAccess, ServiceNowChannel
from tir_dagster.alerts.slack import SlackChannel
from tir_dagster.alerts.storage import AlertStorage, BusyError
from tir_dagster.alerts.text import one_line, scrub, shortened, span
from tir_dagster.spec.alerts import Alerts, ServiceNowAlerts

# The part of the time in which channels may answer, and the part in which they may try; the rest is for saving their
# answers.
_ANSWER_SHARE, _TRY_SHARE = 0.8, 0.7

# Creates a channel when it is used: one that cannot be created must not stop the others.
MakeChannel = Callable[[], Channel]
Connect = Callable[[Alerts, Persistence], Mapping[str, MakeChannel]]
# What a channel returned, or why it failed.
Answer = Mapping[str, str] | str


@dataclass(frozen=True)
class Note:
    """A note about the sending itself, and the run it belongs to."""

    text: str
    run_id: str = ""


class AlertSender:
    """Sends alerts about some extracts within some seconds, and stores the state of the alerts."""

    def __init__(
        self,
        storage: AlertStorage,
        settings: Settings,
        connect: Connect,
        *,
        seconds: float,
        env: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._settings = settings
        self._connect = connect
        self._env = env
        self._clock = clock
        self._deadline = time.monotonic() + seconds * _ANSWER_SHARE
        self._state = AlertState()
        self._notes: list[Note] = []
        # Channels that did not answer, and why: they are not tried again in this round.
        self._silent: dict[str, str] = {}

    def send(self, reports: Sequence[Report]) -> list[Note]:
        """Send what was not sent before, what other processes left, and what is due once more.

        A failed channel raises nothing: it is noted, and tried once more later.
        """
        cleaned = [self._clean(report) for report in reports if report.extract in self._settings]
        try:
            with self._storage.locked(self._seconds_left() / 2):
                self._state = self._storage.load()
                left = self._storage.left_reports(self._settings)
                known = [*cleaned, *map(self._clean, left.values())]
                for group in problems.new_groups(self._state, known, self._settings):
                    self._carry_out(problems.decide(self._state, group, self._settings))
                for slot, report in left.items():
                    self._storage.drop_report(slot, report.id)
                for waiting in sorted(self._state.waiting.values(), key=lambda waiting: waiting.due):
                    self._try_again(waiting)
                while digest := problems.next_digest(self._state, self._settings, self._clock()):
                    self._carry_out(digest)
        except BusyError:
            for report in cleaned:
                self._storage.leave(report)
            self._notes.append(Note("another process is sending alerts; it or the sensor sends this one, too"))
        return self._notes

    def _clean(self, report: Report) -> Report:
        """Return the report without secrets and, unless the spec shows them, without values: people and files get it."""
        clean = partial(scrub, env=self._env, show_values=self._settings[report.extract].show_values)
        if isinstance(report, Failure):
            return replace(report, sentence=clean(report.sentence), run_url=without_credentials(report.run_url))
        if isinstance(report, Success):
            return replace(
                report,
                warnings=tuple(map(clean, report.warnings)),
                run_url=without_credentials(report.run_url),
                datasource_url=without_credentials(report.datasource_url),
            )
        return report

    def _carry_out(self, decision: Decision) -> None:
        """Send the alerts of a decision, then store it: if this process dies in between, they are sent again."""
        before, self._state = self._state, decision.state
        for alert in decision.alerts:
            self._send_alert(alert)
        for slot, recovery in decision.passed_on.items():
            self._storage.leave(recovery, slot=slot)
        self._storage.save(before, self._state)

    def _try_again(self, waiting: WaitingAlert) -> None:
        """Send once more what failed, if it is due."""
        if waiting.due > self._clock() or waiting.extract not in self._settings or self._seconds_left() <= 0:
            return
        if waiting.channel in self._silent:
            # It has just failed with another event: this event keeps its try.
            return
        if waiting.channel in self._makers(waiting.extract):
            problem = self._state.problems.get(waiting.event.key)
            memory = problem.memory if problem else {}
            again = Alert(waiting.event, waiting.extract, memory, channel=waiting.channel)
            self._carry_out(Decision(self._state, (again,)))
        else:
            why = "the spec no longer names this channel"
            self._carry_out(Decision(problems.give_up(self._state, waiting, why, self._clock())))

    def _send_alert(self, alert: Alert) -> None:
        """Send the event to the extract's channels in parallel, and remember their answers."""
        makers = {name: make for name, make in self._makers(alert.extract).items() if alert.goes_to(name)}
        events = {
            name: replace(alert.event, remembered=alert.memory.get(name, alert.event.remembered)) for name in makers
        }
        answers = self._ask(makers, events, self._settings[alert.extract].timeout * _ANSWER_SHARE)
        for name, answer in answers.items():
            if isinstance(answer, str):
                self._not_delivered(name, events[name], alert.extract, answer)
            else:
                self._state = problems.delivered(self._state, events[name], name, answer)

    def _not_delivered(self, channel: str, event: Event, extract: str, why: str) -> None:
        why = shortened(one_line(scrub(why, self._env)), 300)
        now, retry_after = self._clock(), self._settings[extract].retry_after
        failed = WaitingAlert(channel, event, now + retry_after, extract, now)
        self._state, again = problems.not_delivered(self._state, failed, why, now)
        later = f"It is tried once more in {span(retry_after)}, by the alerts sensor."
        more = later if again else "It is not tried again."
        self._notes.append(Note(f"{channel} did not get {event.title!r}: {why}. {more}", event.run_id))

    def _ask(self, makers: Mapping[str, MakeChannel], events: Mapping[str, Event], seconds: float) -> dict[str, Answer]:
        """Return the answer of each channel; each runs in a thread, because it may hang."""
        answers: dict[str, Answer] = {}
        threads = {}
        for name, make in makers.items():
            # Without time it is not started at all: a message that is sent after the time limit would be sent twice.
            if name not in self._silent and self._seconds_left() > 0:
                target = partial(_answer, name, make, events[name], answers)
                threads[name] = threading.Thread(target=target, daemon=True)
                threads[name].start()
        deadline = time.monotonic() + min(self._seconds_left(), seconds)
        for name, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            answer = answers.get(name, "it did not answer in time")
            if isinstance(answer, str):
                self._silent[name] = answer
        return {name: self._silent.get(name) or answers.get(name, "there was no time left") for name in makers}

    def _makers(self, extract: str) -> Mapping[str, MakeChannel]:
        alerts = self._settings[extract]
        seconds = max(0.1, min(alerts.timeout * _TRY_SHARE, self._seconds_left() * _TRY_SHARE / _ANSWER_SHARE))
        return self._connect(alerts, Persistence(attempts=int(alerts.attempts), seconds=seconds))

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _answer(name: str, make: MakeChannel, event: Event, answers: dict[str, Answer]) -> None:
    try:
        answers[name] = dict(make().told(event) or {})
    except Exception as error:
        answers[name] = str(error) or type(error).__name__


# The channels of an extract, by the names in its spec; the clients are passed in


def channels_of(
    alerts: Alerts,
    persistence: Persistence,
    *,
    slack: Callable[[], WebClient],
    servicenow: ServiceNowAccess,
) -> Mapping[str, MakeChannel]:
    """Return a function for each channel that creates it: a wrong setting fails only its own channel, when it is used."""
    makers: dict[str, MakeChannel] = {}
    if alerts.slack is not None:
        channel = alerts.slack.channel
        makers[f"slack:{channel}"] = lambda: SlackChannel(slack(), channel, persistence)
    if alerts.servicenow is not None:
        make = partial(_servicenow_channel, servicenow, alerts.servicenow, persistence)
        makers[f"servicenow:{alerts.servicenow.group}"] = make
    return {**makers, **{f"channel:{name}": partial(_custom_channel, name) for name in alerts.channels}}


def _servicenow_channel(access: ServiceNowAccess, alerts: ServiceNowAlerts, persistence: Persistence) -> Channel:
    if problem := access.problem():
        raise ChannelError(f"ServiceNow is not configured: {problem}")
    return ServiceNowChannel(access, alerts, persistence)


def _custom_channel(name: str) -> Channel:
    """Create a channel from the user's own code: a class or a function without arguments, module:name."""
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ChannelError(f"{name} cannot be loaded: {error}; check `channels` in the spec's `alerts`") from error
    return cast("Channel", make())
