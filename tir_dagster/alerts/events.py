"""The values of alerts: reports of failures, successes and recoveries, open problems, and the event that channels get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from tir_dagster.spec.alerts import Cause, Topic

TOPICS: tuple[Topic, ...] = get_args(Topic)
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The failure of an extract or a load. `id` is the run's, or another one that is the same when it is reported twice."""

    id: str
    extract: str
    cause: Cause
    sentence: str
    at: float
    step: str = ""
    # The server, if the cause affects every extract on it.
    scope: str = ""
    run_id: str = ""
    run_url: str = ""
    datasource: str = ""
    unaffected: str = ""
    # A sensor's report of a server that is down ends with the sensor's next good read.
    topic: Topic | None = None

    @property
    def ends_with(self) -> Topic:
        return self.topic or self.cause.topic


@dataclass(frozen=True)
class Success:
    """A refresh, or a load, that ended well; `published` is false when there was nothing to do."""

    id: str
    extract: str
    at: float
    datasource: str = ""
    datasource_url: str = ""
    run_id: str = ""
    run_url: str = ""
    published: bool = False
    decision: str = "none"
    reason: str = ""
    # The reason in words.
    why: str = ""
    rows_purged: int = 0
    rows_appended: int = 0
    rows: int | None = None
    slices: tuple[str, ...] = ()
    seconds: float = 0.0
    as_of: str = ""
    warnings: tuple[str, ...] = ()
    of: Literal["refresh", "load"] = "refresh"
    # What a load reports instead of rows purged and appended.
    facts: Mapping[str, str] = field(default_factory=dict)
    # The servers that answered on the way.
    scopes: tuple[str, ...] = ()

    def ends(self, topic: Topic) -> bool:
        """Whether it ends a problem of this kind, for its own extract."""
        if self.of == "load":
            return topic in ("load", "sensor")
        if topic in ("drift", "freshness"):
            # Only a new publish makes the extract fresher or different.
            return self.published and (topic == "freshness" or self.decision == "full")
        return topic in ("refresh", "sensor")


@dataclass(frozen=True)
class Recovered:
    """Something other than a refresh works again: a sensor reads, drift was repaired."""

    id: str
    extract: str
    topic: Topic
    at: float
    scopes: tuple[str, ...] = ()

    def ends(self, topic: Topic) -> bool:
        return topic == self.topic


Report: TypeAlias = Failure | Success | Recovered


@dataclass(frozen=True)
class Problem:
    """A problem that is not known to be over: one thread and one incident."""

    key: str
    # The name of its latest cause.
    cause: str
    since: float
    # When the last message was sent.
    last: float
    # How many messages were sent; 0 while a sensor's patience lasts.
    count: int = 0
    # The affected extracts, and what ends the problem for each.
    affected: Mapping[str, Topic] = field(default_factory=dict)
    # What each channel returned: a thread, an incident.
    memory: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Which server is down, if one is.
    scope: str = ""
    # The newest failure, sent or not: an older success ends nothing.
    latest: float = 0.0

    def affected_after(self, report: Success | Recovered) -> Mapping[str, Topic]:
        """Return the extracts that are still affected after this report.

        Any refresh that reached the server shows that the server is back. A sensor's read ends the problem only for
        extracts that a sensor reported: a refresh may sign in as another user.
        """
        if report.at < self.latest:
            return self.affected
        answers = bool(self.scope) and self.scope in report.scopes
        if answers and (isinstance(report, Success) or report.topic == "server"):
            return {}
        return {
            name: topic
            for name, topic in self.affected.items()
            if not (name == report.extract and report.ends(topic)) and not (answers and topic == "sensor")
        }


@dataclass(frozen=True)
class Event:
    """The event that a channel gets: plain text, without secrets, not escaped for any medium."""

    kind: Literal["success", "failure", "repeat", "recovery", "digest"]
    id: str
    # The problem it belongs to: all events of one key belong together.
    key: str
    extracts: tuple[str, ...]
    title: str
    text: str
    cause: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    next_step: str = ""
    datasource: str = ""
    run_id: str = ""
    # What this channel returned for earlier events of this problem.
    remembered: Mapping[str, str] = field(default_factory=dict)


class Channel(Protocol):
    """A channel to people. Raise any exception if the message failed: it is tried once more later."""

    def told(self, event: Event) -> Mapping[str, str] | None:
        """Send the event; what is returned is in `event.remembered` of later events of the same problem."""


def to_json(report: Report) -> dict[str, Any]:
    cause = {"cause": report.cause.name} if isinstance(report, Failure) else {}
    return {"report": type(report).__name__, **asdict(report), **cause}


def from_json(value: Mapping[str, Any]) -> Report:
    """Read a report; raise ValueError, KeyError or TypeError if it is none."""
    if value["report"] == "Failure":
        return read_fields(Failure, {**value, "cause": Cause[value["cause"]]})
    cls: Any = {"Success": Success, "Recovered": Recovered}[value["report"]]
    report: Report = read_fields(cls, value)
    return report


def read_fields(cls: type[T], value: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON: lists become tuples, and fields of other releases are ignored."""
    names = {attribute.name for attribute in fields(cls)} & value.keys()  # type: ignore[arg-type]
    return cls(**{name: tuple(value[name]) if isinstance(value[name], list) else value[name] for name in names})
