"""The `alerts` block of an extract spec: channels, events, urgency and time limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from tir_dagster.spec.declaration import Declaration, Duration, Texts

Level = Literal["high", "medium", "low"]
OnSuccess = Literal["always", "changed", "daily", "never"]

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# What an incident says itself; a custom field must not take its place.
_OURS = ("short_description", "description", "correlation_id", "correlation_display", "work_notes", "state")


@dataclass(frozen=True)
class SlackAlerts(Declaration):
    """The Slack channel, and the successes it gets; it always gets failures and recoveries."""

    channel: str
    """Name or id of the channel; the app must be in it."""
    on_success: OnSuccess = "changed"
    """Which successes are sent; `changed`: those that published something; `daily`: one message a day."""
    daily_at: str = "06:00"
    """When `daily` is sent, in UTC."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if not re.fullmatch(r"#?[^\s#@<>&]{1,80}", self.channel):
            yield "channel", f"{self.channel!r} is no channel; write its name or id, such as '#mychannel', in quotes"
        if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", self.daily_at):
            yield "daily_at", f"{self.daily_at!r} is no time of day; write one such as '06:00', in quotes"


@dataclass(frozen=True)
class Severity(Declaration):
    """How ServiceNow ranks an incident."""

    urgency: Level = "medium"
    """How soon somebody should look."""
    impact: Level = "medium"
    """How much depends on it."""


@dataclass(frozen=True)
class ServiceNowAlerts(Severity):
    """The group that gets ServiceNow incidents, and their fields."""

    group: str = ""
    """The assignment group: its name, or its `sys_id`."""
    by_cause: Mapping[str, Severity] = field(default_factory=dict)
    """Urgency and impact of single causes, such as `server_down`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Custom fields by name; {extract}, {datasource}, {cause} and {run_id} are filled in."""
    close_code: str = "Solution provided"
    """The close code of resolved incidents."""

    def severity(self, cause: str) -> Severity:
        return self.by_cause.get(cause, self)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.group:
            yield "group", "name the assignment group that gets the incidents"
        for name, text in self.fields.items():
            if name in _OURS:
                yield f"fields.{name}", "an incident says this itself; choose another field"
            elif unknown := set(re.findall(r"\{(\w*)\}", text)) - {"extract", "datasource", "cause", "run_id"}:
                yield (
                    f"fields.{name}",
                    f"{{{min(unknown)}}} is not known; known are {{extract}}, {{datasource}}, {{cause}} and {{run_id}}",
                )


@dataclass(frozen=True)
class Alerts(Declaration):
    """Who gets messages about an extract's refreshes."""

    slack: SlackAlerts | None = None
    servicenow: ServiceNowAlerts | None = None
    channels: Texts = ()
    """Your own channels as module:name, each made without arguments."""
    timeout: Duration = 10.0
    """How much time alerts may add to a refresh, at most."""
    attempts: float = 2.0
    """How often a call is tried within that time."""
    retry_after: Duration = 300.0
    """After this time the sensor tries once more to send an alert that failed."""
    patience: Duration = 300.0
    """How long a sensor may be unable to read before it is reported."""
    show_values: bool = False
    """Show values that errors quote from SQL, files and tables; they may be customers' keys."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in self.channels:
            if not _CLASS.fullmatch(name):
                yield "channels", f"{name!r} names no class; write module:name, such as my_alerts:Teams"
        if not 1 <= self.attempts <= 10 or self.attempts != int(self.attempts):
            yield "attempts", "give a whole number from 1 to 10"
        if not 1 <= self.timeout <= 40:
            yield "timeout", "give from 1 to 40 seconds: Dagster ends a sensor's tick after 60"
        if not (self.slack or self.servicenow or self.channels):
            yield "slack", "name somebody to tell: slack, servicenow or channels"
        causes = [cause.name.lower() for cause in Cause]
        for cause in self.servicenow.by_cause if self.servicenow else ():
            if cause not in causes:
                yield f"servicenow.by_cause.{cause}", f"unknown cause; known are {', '.join(causes)}"

    @property
    def hears_successes(self) -> bool:
        """Whether successes are sent to these people at all, whatever they want to hear of them."""
        return True

    @property
    def destination(self) -> tuple[str, ...]:
        """Where the messages go: extracts with one destination share the message about a server that is down."""
        slack, group = self.slack.channel if self.slack else "", self.servicenow.group if self.servicenow else ""
        return (slack, group, *self.channels)


@dataclass(frozen=True)
class OthersAlerts(Alerts):
    """Alerts for other teams, which get failures and recoveries only."""

    @property
    def hears_successes(self) -> bool:
        return False


# No problem ends with `server` alone: it says that a server answered somebody.
Topic = Literal["refresh", "load", "sensor", "drift", "freshness", "verification", "server"]


class Cause(Enum):
    """Why people are told; the value is the sentence's beginning."""

    STEP_FAILED = "the refresh failed"
    JOB_FAILED = "a Tableau job failed"
    CHECK_FAILED = "a blocking check failed"
    GUARD = "the refresh stopped before it touched anything"
    SPEC_UNFIT = "the spec and its source do not fit"
    SERVER_DOWN = "Tableau Server cannot be reached or lets nobody in"
    WAREHOUSE_DOWN = "Snowflake cannot be reached or lets nobody in"
    DRIFT = "the extract drifted from its source"
    STALE = "the extract is not as fresh as promised"
    SENSOR_BLIND = "the sensor cannot read the source"
    LOAD_FAILED = "the load failed"
    UNVERIFIED = "the verification could not be made"

    @property
    def topic(self) -> Topic:
        """The kind of success that resolves it: a refresh for most causes, a successful tick for a sensor's."""
        topics: dict[Cause, Topic] = {
            Cause.DRIFT: "drift",
            Cause.STALE: "freshness",
            Cause.SENSOR_BLIND: "sensor",
            Cause.LOAD_FAILED: "load",
            Cause.UNVERIFIED: "verification",
        }
        return topics.get(self, "refresh")

    @property
    def is_whole_server(self) -> bool:
        return self in (Cause.SERVER_DOWN, Cause.WAREHOUSE_DOWN)
