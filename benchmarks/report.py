"""What the bench found: refreshes by stage beside their limits, as values, as text and as JSON. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

SERVER, TOTAL, QUIET_PERIOD = "server", "total", "quiet period"
DETECTORS, DELIVERIES = ("watermark", "feed", "diff"), ("republish", "patch")
FULL, BY_KEY, BY_KEY_1000 = "full", "by_key", "by_key_1000"
_TITLES = {FULL: "Full refresh", BY_KEY: "Refresh by key", BY_KEY_1000: "Refresh by key, at most 1,000 keys"}
_SHOWN = {"rest": "Dagster and the rest", SERVER: "(server's own work)", QUIET_PERIOD: "(quiet period)"}
WAREHOUSE = "warehouse"
_NO_NUMBER = "-"


@dataclass(frozen=True)
class Limit:
    """The same work with nothing around it: what was done, in how many seconds, on how many rows where that is known."""

    what: str
    seconds: float
    rows: int | None = None


@dataclass(frozen=True)
class Stage:
    """One part of a refresh, and its limit where it has one."""

    name: str
    seconds: float
    rows: int | None = None
    bytes: int | None = None
    waited_for: Mapping[str, float] = field(default_factory=dict)
    limit: Limit | None = None


@dataclass(frozen=True)
class Case:
    """One refresh. In no total: the stand-in's own work, `server`, and the quiet period, which the spec asks for."""

    refresh: str
    detector: str
    delivery: str
    stages: tuple[Stage, ...]
    server: float
    rows_purged: int = 0
    rows_appended: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def id(self) -> tuple[str, str, str]:
        return (self.refresh, self.detector, self.delivery)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Case:
        return Case(**{**value, "stages": tuple(_stage(stage) for stage in value["stages"])})

    @property
    def limits_by_stage(self) -> dict[str, Limit]:
        return {stage.name: stage.limit for stage in self.stages if stage.limit}

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages if stage.name != QUIET_PERIOD)

    @property
    def limits(self) -> float:
        return sum(stage.limit.seconds for stage in self.stages if stage.limit)

    @property
    def own(self) -> float:
        """Seconds without what the warehouse and the server took."""
        return self.seconds - self.waited(WAREHOUSE)

    @property
    def beside_limits(self) -> float:
        """Our own seconds, and the bare SELECT instead of all that the warehouse did to find the change and read it."""
        read = self.stage("detect").limit
        return self.own + (read.seconds if read else 0.0)

    def waited(self, whom: str) -> float:
        return sum(stage.waited_for.get(whom, 0.0) for stage in self.stages)

    def stage(self, name: str) -> Stage:
        return next((stage for stage in self.stages if stage.name == name), Stage(name, 0.0))

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The stages, the server's work and the total as bench.json has them."""
        total = Stage(TOTAL, self.seconds, self.rows_purged + self.rows_appended, self.stage("publish").bytes)
        named = {"refresh": self.refresh, "detector": self.detector, "delivery": self.delivery}
        stage_entries = [{**named, **_entry(stage)} for stage in (*self.stages, Stage(SERVER, self.server))]
        more = {"limit": round(self.limits, 4), "memory": dict(self.memory), "calls": dict(self.calls)}
        return [*stage_entries, {**named, **_entry(total), **more}]


def _stage(value: Mapping[str, Any]) -> Stage:
    limit = value.get("limit")
    return Stage(**{**value, "limit": Limit(**limit) if limit else None})


def _entry(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "seconds": round(stage.seconds, 3),
        "limit": round(stage.limit.seconds, 4) if stage.limit else None,
        "rows": stage.rows,
        "bytes": stage.bytes,
        "waited_for": {whom: round(seconds, 3) for whom, seconds in stage.waited_for.items()},
    }


def apart(stages: Iterable[Stage], server: float) -> tuple[Stage, ...]:
    """Show the quiet period as a stage of its own, and leave the server's work out of the publish."""
    separated: list[Stage] = []
    for stage in stages:
        waited = dict(stage.waited_for)
        quiet = waited.pop(QUIET_PERIOD, 0.0)
        # Never more than was waited: part of a job may be over before anybody asks for it.
        server_seconds = min(server, waited.get("Tableau", 0.0)) if stage.name == "publish" else 0.0
        if server_seconds:
            waited["Tableau"] -= server_seconds
        separated.append(replace(stage, seconds=stage.seconds - quiet - server_seconds, waited_for=waited))
        if quiet:
            separated.append(Stage(QUIET_PERIOD, quiet))
    return tuple(separated)


@dataclass(frozen=True)
class Goal:
    """What has to be reached, and what was."""

    what: str
    reached: float
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.reached >= self.goal if self.at_least else self.reached <= self.goal

    @property
    def verdict(self) -> str:
        return "met" if self.met else "NOT met"

    def as_text(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"  {self.what:<68}{self.reached:>9.2f} {self.unit:<2} {sign} {self.goal:>8.2f} {self.unit:<2}  {self.verdict}"


@dataclass(frozen=True)
class Report:
    """One run of the bench."""

    rows: int
    changed: float
    seed: int
    cores: int
    load: float  # what else the machine was doing when the run began: the mean number of busy processes
    cases: tuple[Case, ...]
    file_bytes: int
    copy: Limit  # a plain copy of the extract
    equal_by_delivery: Mapping[str, bool]
    slices: int

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Report:
        cases = tuple(Case.from_dict(case) for case in value["cases"])
        return Report(**{**value, "cases": cases, "copy": Limit(**value["copy"])})

    @property
    def equal(self) -> bool:
        return all(self.equal_by_delivery.values())

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [entry for case in self.cases for entry in case.entries]

    def as_dict(self) -> dict[str, Any]:
        named = ("rows", "changed", "seed", "cores", "load", "file_bytes", "slices", "equal")
        goals = [
            {"what": goal.what, "reached": goal.reached, "goal": goal.goal, "met": goal.met} for goal in self.goals
        ]
        return {**{name: getattr(self, name) for name in named}, "goals": goals, "entries": self.entries}

    def _cases(self, refresh: str, delivery: str) -> list[Case]:
        return [case for case in self.cases if (case.refresh, case.delivery) == (refresh, delivery)]

    @property
    def goals(self) -> list[Goal]:
        return list(self._goals())

    def _goals(self) -> Iterator[Goal]:
        full = next(iter(self._cases(FULL, "republish")), None)
        for case in self._cases(BY_KEY, "republish"):
            by = f"by key, republish, {case.detector}"
            yield Goal(f"{by}: ours and a bare SELECT, to all limits", _ratio(case.beside_limits, case.limits), 4, "x")
            if full is not None:
                yield Goal(f"{by}: faster than full, our own", _ratio(full.own, case.own), 8, "x", at_least=True)
                whole = _ratio(full.seconds, case.seconds)
                yield Goal(f"{by}: faster than full, with the warehouse", whole, 8, "x", at_least=True)
        if full is not None:
            yield Goal("full, republish: total, its limits together", _ratio(full.seconds, full.limits), 1.6, "x")
        for case in self._cases(BY_KEY_1000, "republish"):
            upload = case.stage("publish").limit
            least = self.copy.seconds + (upload.seconds if upload else 0.0)
            what = f"1,000 keys, republish, {case.detector}: 3 x (copy + upload) + 3 s"
            yield Goal(what, case.beside_limits, 3 * least + 3, "s")
        for case in self._cases(BY_KEY_1000, "patch"):
            yield Goal(f"1,000 keys, patch, {case.detector}: our own", case.own, 3, "s")
        if peaks := [case.memory["python"] for case in self.cases if "python" in case.memory]:
            yield Goal("peak memory of our Python process", max(peaks) / 1e6, 500, "MB")

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.rows:,} orders, {self.changed:g} % of the keys changed, scattered over all months; seed {self.seed}"
        yield f"{self.cores} cores, load {self.load:.1f} before the run; Spark warm; an extract of {self.file_bytes / 1e6:,.1f} MB"
        ordered = sorted(self.cases, key=lambda case: (list(_TITLES).index(case.refresh), case.delivery != "republish"))
        for _, cases in groupby(ordered, key=lambda case: (case.refresh, case.delivery)):
            yield from _table(list(cases))
        yield f"\nA plain copy of the Hyper file: {self.copy.seconds:.2f} s"
        yield "\nGoals (set for 10,000,000 orders, 1 % of the keys)"
        yield from (goal.as_text() for goal in self.goals)
        for delivery, equal in self.equal_by_delivery.items():
            verdict = "equal to the source in all" if equal else "NOT equal to the source, compared by"
            yield f"Published by {delivery}: {verdict} {self.slices} slices"


def _table(cases: Sequence[Case]) -> Iterator[str]:
    """Cases that differ by their detector only, side by side; the limit is the first one's."""
    first = cases[0]
    yield (
        f"\n{_TITLES[first.refresh]}, {first.delivery}: {first.rows_purged:,} rows purged, {first.rows_appended:,} appended"
    )
    # A full refresh looks for no changes.
    names = ["seconds"] if first.refresh == FULL else [case.detector for case in cases]
    yield f"  {'stage':<22}{''.join(f'{name:>11}' for name in names)}{'limit':>9}  the limit is"
    for name in dict.fromkeys(stage.name for case in cases for stage in case.stages if stage.name != QUIET_PERIOD):
        limit = first.stage(name).limit
        yield _line(name, [case.stage(name).seconds for case in cases], limit)
    limits = Limit("all limits together", first.limits) if first.limits else None
    yield _line(TOTAL, [case.seconds for case in cases], limits)
    yield _line("of it, the warehouse", [case.waited(WAREHOUSE) for case in cases], None)
    yield _line(QUIET_PERIOD, [case.stage(QUIET_PERIOD).seconds for case in cases], None)
    yield _line(SERVER, [case.server for case in cases], None)
    for kind in dict.fromkeys(kind for case in cases for kind in case.memory):
        cells = "".join(f"{case.memory.get(kind, 0) / 1e6:>11,.0f}" for case in cases)
        yield f"  {f'peak MB, {kind}':<22}{cells}"
    for whom in dict.fromkeys(whom for case in cases for whom in case.calls):
        cells = "".join(f"{case.calls.get(whom, 0):>11,}" for case in cases)
        yield f"  {f'calls, {whom}':<22}{cells}"


def _line(name: str, seconds: Sequence[float], limit: Limit | None) -> str:
    beside = f"{limit.seconds:>9.2f}" if limit else f"{_NO_NUMBER:>9}"
    cells = "".join(f"{value:>11.2f}" for value in seconds)
    return f"  {_SHOWN.get(name, name):<22}{cells}{beside}  {limit.what if limit else ''}".rstrip()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
