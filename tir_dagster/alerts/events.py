"""What there is to tell: failures by cause, successes, recoveries; and the event that every channel gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias, get_args

from tir_dagster.spec.alerts import Cause, Topic

TOPICS: tuple[Topic, ...] = get_args(Topic)


@dataclass(frozen=True)
class Failure:
    """One extract's failure, or one load's. `id` is the run's, or anything else that is the same when it is reported twice."""

    id: str
    extract: str
    cause: Cause
    sentence: str
    at: float
    step: str = ""
    # Which server, for a cause that hits every extract on it.
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
    # What a load tells instead of rows purged and appended.
    facts: Mapping[str, str] = field(default_factory=dict)
    # The servers that answered on the way.
    scopes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return self.published

    def ends(self, topic: Topic) -> bool:
        """Whether trouble of this kind is over with it, for its own extract."""
        if self.of == "load":
            return topic in ("load", "sensor")
        if topic in ("drift", "freshness"):
            # What is not published anew is neither fresher nor another one.
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
    """What a channel is told: plain text, without secrets, not escaped for any medium."""

    kind: Literal["success", "failure", "repeat", "recovery", "digest"]
    id: str
    # The trouble it belongs to: all events of one key are one story.
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
    # What this channel returned when it was told of this trouble before.
    remembered: Mapping[str, str] = field(default_factory=dict)


class Channel(Protocol):
    """Somebody to tell. Raise any exception if that failed: it is tried once more later."""

    def told(self, event: Event) -> Mapping[str, str] | None:
        """Tell people; what is returned is in `event.remembered` when the same trouble goes on or ends."""


def trouble_key(failure: Failure, destination: tuple[str, ...]) -> str:
    """One key is one thread and one incident: of an extract, or of all extracts that a server takes with it."""
    if failure.cause.is_whole_server:
        # Extracts that other people hear of make a story of their own.
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
    """ValueError, KeyError or TypeError for what is no report."""
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
