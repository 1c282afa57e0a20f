"""Reports of failures, successes and recoveries, and the event that every channel gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias, get_args

from tir_dagster.spec.alerts import Cause, Topic

TOPICS: tuple[Topic, ...] = get_args(Topic)


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
    next_step: str = ""
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

    @property
    def changed(self) -> bool:
        return self.published

    def ends(self, topic: Topic) -> bool:
        """Whether it ends a trouble of this kind, for its own extract."""
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
class Event:
    """The event that a channel gets: plain text, without secrets, not escaped for any medium."""

    kind: Literal["success", "failure", "repeat", "recovery", "digest"]
    id: str
    # The trouble it belongs to: all events of one key belong together.
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
    # What this channel returned for earlier events of this trouble.
    remembered: Mapping[str, str] = field(default_factory=dict)


class Channel(Protocol):
    """A channel to people. Raise any exception if the message failed: it is tried once more later."""

    def told(self, event: Event) -> Mapping[str, str] | None:
        """Send the event; what is returned is in `event.remembered` of later events of the same trouble."""


def trouble_key(failure: Failure, destination: tuple[str, ...]) -> str:
    """Return the key of one thread and one incident: of an extract, or of all extracts on a server that is down."""
    if failure.cause.is_whole_server:
        # Extracts with other recipients have their own thread.
        people = hashlib.sha256("\0".join(destination).encode()).hexdigest()[:6]
        server = "tableau" if failure.cause is Cause.SERVER_DOWN else "snowflake"
        return f"{server}/{failure.scope or 'server'}/{people}"
    return f"{failure.extract}/{failure.cause.topic}"


def to_json(report: Report) -> dict[str, Any]:
    value = asdict(report)
    if isinstance(report, Failure):
        value["cause"] = report.cause.name
    return {"report": type(report).__name__, **value}


def from_json(value: Mapping[str, Any]) -> Report:
    """Read a report; raise ValueError, KeyError or TypeError if it is none."""
    cls: Any = {"Failure": Failure, "Success": Success, "Recovered": Recovered}[value["report"]]
    values = {name: value[name] for name in {attribute.name for attribute in fields(cls)} & value.keys()}
    if cls is Failure:
        values["cause"] = Cause[values["cause"]]
    for name in {"slices", "warnings", "scopes"} & values.keys():
        values[name] = tuple(values[name])
    report: Report = cls(**values)
    return report


def event_from_json(value: Mapping[str, Any]) -> Event:
    return Event(**{**value, "extracts": tuple(value["extracts"])})
