"""Sending alerts: which report opens, continues or ends a trouble, who gets it, and what happens if that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import cast

from tir_dagster.alerts.events import Channel, Event, Failure, Recovered, Report, Success, trouble_key
from tir_dagster.alerts.memory import Book, BusyError, Pending, Trouble
from tir_dagster.alerts.messages import digest_event, failure_event, recovery_event, success_event
from tir_dagster.alerts.retries import Persistence
from tir_dagster.alerts.text import one_line, scrub, shortened, span, without_user
from tir_dagster.spec.alerts import Alerts, Topic

# How often messages are repeated about a sensor that still cannot read, and about further extracts on a server that is down.
SENSOR_REPEAT_SECONDS, SERVER_REPEAT_SECONDS = 3600.0, 600.0
# The part of the time in which channels may answer, and the part in which they may try; the rest is for saving their
# answers.
_ANSWER_SHARE, _TRY_SHARE = 0.8, 0.7
_DAY_SECONDS = 86_400.0

# Creates a channel when it is used: one that cannot be created must not stop the others.
MakeChannel = Callable[[], Channel]
Connect = Callable[[Alerts, Persistence], Mapping[str, MakeChannel]]


@dataclass(frozen=True)
class Note:
    """A note about the sending itself, and the run it belongs to."""

    text: str
    run_id: str = ""


def in_groups(reports: Sequence[Report], key_of: Callable[[Failure], str]) -> list[list[Report]]:
    """Group reports in the order of time: failures with one cause together, unless a success is between them."""
    groups: list[list[Report]] = []
    open_groups: dict[str, list[Report]] = {}
    for report in sorted(reports, key=lambda report: report.at):
        if not isinstance(report, Failure):
            groups.append([report])
            open_groups = {}
            continue
        key = key_of(report)
        group = open_groups.get(key)
        if group is not None and report.extract not in {member.extract for member in group}:
            group.append(report)
        else:
            open_groups[key] = [report]
            groups.append(open_groups[key])
    return groups


def is_due(failures: Sequence[Failure], before: Trouble | None, *, patience: float, now: float) -> bool:
    """Whether to send a message now: for each failure of an extract, but not for each extract on a server that is down."""
    blind = all(failure.ends_with == "sensor" for failure in failures)
    if before is None or before.count == 0:
        since = min([failure.at for failure in failures] + ([before.since] if before else []))
        return not blind or now - since >= patience
    if blind:
        return now - before.last >= SENSOR_REPEAT_SECONDS
    if failures[0].cause.is_whole_server:
        # The extract that was affected first stands for all of them.
        speaks = next(iter(before.affected), "") in {failure.extract for failure in failures}
        return speaks or now - before.last >= SERVER_REPEAT_SECONDS
    return True


def _affected(before: Trouble | None, failures: Sequence[Failure]) -> dict[str, Topic]:
    """Return the affected extracts and what ends the trouble; after a failed refresh or load, a sensor's read does not."""
    affected = dict(before.affected) if before else {}
    for failure in failures:
        known = affected.get(failure.extract)
        if known is None or not (known == "refresh" or failure.ends_with == "sensor"):
            affected[failure.extract] = failure.ends_with
    return affected


def last_boundary(now: float, at: str) -> float:
    """Return the last moment at this time of day, in UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    hour, minute = map(int, at.split(":"))
    today = moment.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (today if today <= moment else today - timedelta(days=1)).timestamp()


class Teller:
    """Sends alerts about some extracts in bounded time, and keeps the state of the alerts."""

    def __init__(
        self,
        book: Book,
        alerts: Mapping[str, Alerts],
        connect: Connect,
        *,
        seconds: float,
        env: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = book
        self._alerts = alerts
        self._connect = connect
        self._env = env
        self._clock = clock
        self._deadline = time.monotonic() + seconds * _ANSWER_SHARE
        self._notes: list[Note] = []
        # Channels that did not answer are not tried again in this round.
        self._silent: dict[str, str] = {}

    def tell(self, reports: Sequence[Report]) -> list[Note]:
        """Send what was not sent before, what other processes left, and what is due once more.

        A failed channel raises nothing: it is noted, and tried once more later.
        """
        try:
            with self._book.locked(self._left() / 2):
                left = self._book.reports(self._alerts)
                self._tell([*reports, *left.values()])
                for slot, report in left.items():
                    self._book.drop_report(slot, report.id)
                self._try_again()
                self._tell_daily()
        except BusyError:
            for report in reports:
                if report.extract in self._alerts:
                    self._book.put(self._clean(report))
            self._notes.append(Note("another process is sending alerts; it or the sensor sends this one, too"))
        return self._notes

    def _tell(self, reports: Sequence[Report]) -> None:
        # A report may be both in the inbox and in the history.
        known = {
            report.id: report
            for report in reports
            if report.extract in self._alerts and not self._book.is_told(report.id)
        }
        for group in in_groups([self._clean(report) for report in known.values()], self._key):
            if isinstance(group[0], Failure):
                self._failed(cast("list[Failure]", group))
            else:
                self._ended(group[0])

    def _key(self, failure: Failure) -> str:
        return trouble_key(failure, self._alerts[failure.extract].destination)

    def _clean(self, report: Report) -> Report:
        """Return the report without secrets and, unless the spec shows them, without values: people and files get it."""
        show = self._alerts[report.extract].show_values

        def clean(text: str) -> str:
            return scrub(text, self._env, show_values=show)

        if isinstance(report, Failure):
            sentence, next_step = clean(report.sentence), clean(report.next_step)
            return replace(report, sentence=sentence, next_step=next_step, run_url=without_user(report.run_url))
        if isinstance(report, Success):
            return replace(
                report,
                warnings=tuple(map(clean, report.warnings)),
                run_url=without_user(report.run_url),
                datasource_url=without_user(report.datasource_url),
            )
        return report

    def _failed(self, reported: list[Failure]) -> None:
        # A late report about something that works again: not sent.
        failures = [
            failure for failure in reported if failure.at >= self._book.worked_at(failure.extract, failure.ends_with)
        ]
        if failures:
            self._keep_failed(failures)
        # A sensor that cannot read reports at every tick: those ids are not kept, the reports are removed once read.
        self._book.mark_told(*(failure.id for failure in reported if failure.ends_with != "sensor"))

    def _keep_failed(self, failures: list[Failure]) -> None:
        key, last = self._key(failures[-1]), failures[-1]
        alerts, before = self._alerts[last.extract], self._book.trouble(key)
        due = is_due(failures, before, patience=alerts.patience, now=last.at)
        trouble = Trouble(
            key=key,
            cause=last.cause.name,
            sentence=last.sentence,
            since=before.since if before else failures[0].at,
            last=last.at if due or before is None else before.last,
            count=(before.count if before else 0) + due,
            affected=_affected(before, failures),
            memory=before.memory if before else {},
            scope=last.scope if last.cause.is_whole_server else "",
            latest=max(last.at, before.latest if before else 0.0),
        )
        if due:
            trouble = self._deliver(failure_event(key, failures, before), last.extract, trouble)
        self._book.keep(trouble)

    def _ended(self, report: Success | Recovered) -> None:
        recovered = [self._left_by(report, trouble) for trouble in self._book.troubles()]
        self._book.note_worked(report)
        if isinstance(report, Success):
            full = self._book.full_seconds(report.extract)
            if report.published and report.decision == "full":
                self._book.note_full(report.extract, report.seconds)
            if not any(recovered):
                self._succeeded(report, full)
            self._book.mark_told(report.id)

    def _left_by(self, report: Success | Recovered, trouble: Trouble) -> bool:
        """Whether the report ended this trouble, and its recipients know."""
        left = trouble.left_by(report)
        # The recovery of a server goes to the affected extracts; another process sends it for those that we do not know.
        speaks = next((name for name in trouble.affected if name in self._alerts), None)
        if left == trouble.affected:
            return False
        if speaks is None:
            self._leave_to_others(report, trouble)
            return False
        if left:
            self._book.keep(replace(trouble, affected=left))
            return False
        if trouble.count:
            self._deliver(recovery_event(trouble, report, self._book.full_seconds(report.extract)), speaks, trouble)
        self._book.close(trouble.key)
        same_people = self._alerts[speaks].destination == self._alerts[report.extract].destination
        return trouble.count > 0 and same_people

    def _leave_to_others(self, report: Success | Recovered, trouble: Trouble) -> None:
        """Leave a report that the server answers again, for the process that alerts for the affected extracts."""
        slot = f"{trouble.key}/server"
        topic: Topic = "server" if isinstance(report, Success) else report.topic
        recovery = Recovered(f"{slot}/{report.id}", next(iter(trouble.affected)), topic, report.at, report.scopes)
        self._book.put(recovery, slot=slot)

    def _succeeded(self, success: Success, full: float | None) -> None:
        slack = self._alerts[success.extract].slack
        if not self._alerts[success.extract].hears_successes:
            return
        in_slack = slack is not None and (
            slack.on_success == "always" or (slack.on_success == "changed" and success.changed)
        )
        if slack is not None and slack.on_success == "daily":
            self._book.collect(slack.channel, success)
        # Incidents are for failures only: a success does not need ServiceNow.
        skipped = ["servicenow", *([] if in_slack else ["slack"])]
        if in_slack or success.changed:
            self._deliver(success_event(success, full), success.extract, None, skipped=skipped)

    # Delivery

    def _deliver(
        self,
        event: Event,
        extract: str,
        trouble: Trouble | None,
        *,
        skipped: Sequence[str] = (),
        only: str | None = None,
        last_try: bool = False,
    ) -> Trouble:
        """Send the event to the extract's channels in parallel; return the trouble with what they returned."""
        memory = trouble.memory if trouble else {}
        makers = {
            name: make
            for name, make in self._connect(self._alerts[extract], self._persistence(extract)).items()
            if name.partition(":")[0] not in skipped and only in (None, name)
        }
        events = {name: replace(event, remembered=memory.get(name, event.remembered)) for name in makers}
        answers = self._ask({name: (makers[name], events[name]) for name in makers}, extract)
        kept = trouble or Trouble(event.key, "", "", 0.0, 0.0)
        for name, answer in answers.items():
            if isinstance(answer, str):
                self._not_told(name, events[name], extract, answer, again=not last_try)
                continue
            self._book.drop_pending(name, event.key)
            kept = kept.remembering(name, answer) if answer else kept
        return kept

    def _ask(self, calls: Mapping[str, tuple[MakeChannel, Event]], extract: str) -> dict[str, Mapping[str, str] | str]:
        """Return what each channel returned, or why it failed; each runs in a thread, because it may hang."""
        if self._left() <= 0:
            # Not started at all: a message that is sent after the time limit would be sent twice.
            return {name: self._silent.get(name, "there was no time left") for name in calls}
        answers: dict[str, Mapping[str, str] | str] = {
            name: self._silent[name] for name in calls if name in self._silent
        }
        threads = []
        for name, (make, event) in calls.items():
            if name not in answers:
                thread = threading.Thread(target=_tell_channel, args=(name, make, event, answers), daemon=True)
                thread.start()
                threads.append((name, thread))
        deadline = time.monotonic() + min(self._left(), self._alerts[extract].timeout * _ANSWER_SHARE)
        for name, thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if name not in answers or isinstance(answers[name], str):
                self._silent[name] = str(answers.get(name, "it did not answer in time"))
        # A copy: a late thread must not change it.
        return {name: self._silent.get(name) or answers[name] for name in calls}

    def _not_told(self, name: str, event: Event, extract: str, why: str, *, again: bool) -> None:
        why = shortened(one_line(scrub(why, self._env)), 300)
        now = self._clock()
        since = [
            waiting.since for waiting in self._book.pending() if (waiting.channel, waiting.event.id) == (name, event.id)
        ]
        pending = Pending(name, event, now + self._alerts[extract].retry_after, extract, min(since, default=now))
        if again:
            self._book.postpone(pending)
            more = f"It is tried once more in {span(self._alerts[extract].retry_after)}, by the alerts sensor."
        else:
            self._book.give_up(pending, why)
            more = "It is not tried again."
        self._notes.append(Note(f"{name} did not get {event.title!r}: {why}. {more}", event.run_id))

    def _try_again(self) -> None:
        """Send once more what failed; after that it is given up and stays in that list."""
        for pending in self._book.pending():
            if pending.due > self._clock() or pending.extract not in self._alerts or self._left() <= 0:
                continue
            if pending.channel in self._silent:
                # It has just failed with another event: this event keeps its try.
                continue
            names = self._connect(self._alerts[pending.extract], self._persistence(pending.extract))
            if pending.channel not in names:
                self._book.give_up(pending, "the spec no longer names this channel")
                continue
            trouble = self._book.trouble(pending.event.key)
            # A lost recovery would leave an incident open for ever: it is tried again for a day.
            late = self._clock() - pending.since > _DAY_SECONDS
            last = pending.event.kind != "recovery" or late
            kept = self._deliver(pending.event, pending.extract, trouble, only=pending.channel, last_try=last)
            if trouble is not None:
                self._book.keep(kept)

    def _tell_daily(self) -> None:
        """Send one message to each channel, about all extracts whose time of day has come."""
        daily = {
            name: alerts.slack
            for name, alerts in self._alerts.items()
            if alerts.slack and alerts.slack.on_success == "daily"
        }
        for channel in sorted({slack.channel for slack in daily.values()}):
            until = {name: last_boundary(self._clock(), slack.daily_at) for name, slack in daily.items()}
            due = [success for success in self._book.collected(channel) if success.at < until.get(success.extract, 0.0)]
            if due:
                day = datetime.fromtimestamp(max(until[success.extract] for success in due), UTC)
                event = digest_event(cast("list[Success]", due), f"{day:%Y-%m-%d %H:%M}")
                self._deliver(event, due[0].extract, None, only=f"slack:{channel}")
                self._book.sent(channel, due)

    def _persistence(self, extract: str) -> Persistence:
        alerts = self._alerts[extract]
        seconds = max(0.1, min(alerts.timeout * _TRY_SHARE, self._left() * _TRY_SHARE / _ANSWER_SHARE))
        return Persistence(attempts=int(alerts.attempts), seconds=seconds)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _tell_channel(name: str, make: MakeChannel, event: Event, answers: dict[str, Mapping[str, str] | str]) -> None:
    try:
        answers[name] = dict(make().told(event) or {})
    except Exception as error:
        answers[name] = str(error) or type(error).__name__
