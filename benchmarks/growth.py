"""How the time of refreshes grows with the extract while the change stays the same, and with the change while the extract does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.kept import KeptValues
from benchmarks.machine import setting_lines
from benchmarks.report import QUIET_PERIOD, Case, Goal

KEYS = 10_000
SHARES = (0.01, 0.1, 1.0, 10.0)
OWN, WAREHOUSE, SERVER = "our own", "the warehouse", "the server"
# Stages that are shown one by one; the others are small.
STAGES = ("detect", "apply", "verify", "publish")


@dataclass(frozen=True)
class Fit:
    """A line through the logarithms: seconds = factor x size ^ exponent. 0 does not grow, 1 grows as the size does."""

    factor: float
    exponent: float

    def at(self, size: float) -> float:
        return self.factor * float(size**self.exponent)


def fit(points: Mapping[int, float]) -> Fit:
    """Least squares on the logarithms of sizes and seconds."""
    # Less than a millisecond is noise.
    xs, ys = [math.log(size) for size in points], [math.log(max(seconds, 0.001)) for seconds in points.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    exponent = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    return Fit(math.exp(y - exponent * x), exponent)


@dataclass(frozen=True)
class Point:
    """One refresh: so many changed keys in an extract of so many rows.

    `own` is our own time without what the warehouse (`warehouse`) and Tableau's server (`server`) did themselves.
    """

    rows: int
    keys: int
    delivery: str
    own: float = 0.0
    warehouse: float = 0.0
    server: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    bytes_published: int = 0
    extract_bytes: int = 0
    equal: bool = True
    error: str | None = None

    @property
    def total(self) -> float:
        return self.own + self.warehouse + self.server

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Point:
        return Point(**value)

    @staticmethod
    def of(case: Case, *, rows: int, keys: int, name: str, extract_bytes: int) -> Point:
        stages = {stage.name: round(stage.seconds, 3) for stage in case.stages if stage.name != QUIET_PERIOD}
        return Point(
            rows=rows,
            keys=keys,
            delivery=name,
            own=round(case.own, 3),
            warehouse=round(case.waited("warehouse"), 3),
            server=round(case.server, 3),
            stages=stages,
            bytes_published=case.stage("publish").bytes or 0,
            extract_bytes=extract_bytes,
        )


@dataclass(frozen=True)
class Growth:
    """One run: `keys` changed at every size; at the size `fixed`, also other numbers of keys."""

    keys: int
    fixed: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    points: Sequence[Point]

    @property
    def equal(self) -> bool:
        return all(point.equal and point.error is None for point in self.points)

    @property
    def good(self) -> list[Point]:
        return [point for point in self.points if point.error is None]

    @property
    def deliveries(self) -> list[str]:
        return list(dict.fromkeys(point.delivery for point in self.good))

    def along(self, axis: str, delivery: str) -> dict[int, Point]:
        """The points of a delivery by rows, or by changed keys."""
        if axis == "rows":
            return {
                p.rows: p
                for p in sorted(self.good, key=lambda p: p.rows)
                if p.delivery == delivery and p.keys == self.keys
            }
        return {
            p.keys: p
            for p in sorted(self.good, key=lambda p: p.keys)
            if p.delivery == delivery and p.rows == self.fixed
        }

    def parts(self, axis: str, delivery: str) -> dict[str, dict[int, float]]:
        """Seconds of each part of a refresh along an axis: of our own time, the warehouse, the server, and single stages."""
        points = self.along(axis, delivery)
        parts = {
            OWN: {x: point.own for x, point in points.items()},
            WAREHOUSE: {x: point.warehouse for x, point in points.items()},
            SERVER: {x: point.server for x, point in points.items()},
        }
        parts |= {name: {x: point.stages.get(name, 0.0) for x, point in points.items()} for name in STAGES}
        return {name: seconds for name, seconds in parts.items() if any(value >= 0.005 for value in seconds.values())}

    def lines(self, axis: str) -> dict[str, dict[int, float]]:
        """What the picture shows: our own time and the server's by delivery."""
        return {
            f"{delivery}, {part}": seconds
            for delivery in self.deliveries
            for part, seconds in self.parts(axis, delivery).items()
            if part in (OWN, SERVER)
        }

    def fits(self, axis: str) -> dict[str, Fit]:
        return {name: fit(points) for name, points in self.lines(axis).items() if len(points) > 1}

    def title(self, axis: str) -> str:
        if axis == "rows":
            return f"{self.keys:,} changed keys in larger and larger extracts"
        return f"more and more changed keys in an extract of {self.fixed:,} rows"

    @property
    def goals(self) -> list[Goal]:
        parts = self.parts("rows", "patch")
        if len(parts.get(OWN, {})) < 2:
            return []
        return [
            Goal("patch: exponent of our own time over size", fit(parts[OWN]).exponent, 0.15, ""),
            Goal("verify: exponent over size", fit(parts["verify"]).exponent if "verify" in parts else 0.0, 0.2, ""),
        ]

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [asdict(point) for point in self.points]

    def as_dict(self) -> dict[str, Any]:
        head = {"keys": self.keys, "fixed": self.fixed, "machine": dict(self.machine), "versions": dict(self.versions)}
        return {**head, "date": self.date, "points": self.entries}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Growth:
        names = {each.name for each in fields(Growth)}
        known = {name: item for name, item in value.items() if name in names}
        return Growth(**{**known, "points": tuple(map(Point.from_dict, value["points"]))})

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for axis in ("rows", "keys"):
            yield from self._table(axis, markdown=False)
        yield from (goal.as_text() for goal in self.goals)
        yield from (
            f"FAILED: {p.delivery}, {p.rows:,} rows, {p.keys:,} keys: {p.error}" for p in self.points if p.error
        )
        yield f"Published: {'equal to the source' if self.equal else 'NOT equal to the source'} at every size"

    def as_markdown(self) -> str:
        lines = setting_lines(self.machine, self.versions, self.date)
        for axis in ("rows", "keys"):
            lines += self._table(axis, markdown=True)
        return "\n".join([*lines, "", *(f"- {' '.join(goal.as_text().split())}" for goal in self.goals)])

    def _table(self, axis: str, *, markdown: bool) -> Iterator[str]:
        """Seconds by part and size, and the exponent of each part."""
        sizes = sorted({x for delivery in self.deliveries for x in self.along(axis, delivery)})
        if len(sizes) < 2:
            return
        yield f"\n**{self.title(axis)}**, seconds\n" if markdown else f"\n{self.title(axis)}, seconds"
        heads = [*(f"{size:,}" for size in sizes), "exponent"]
        if markdown:
            yield f"| | {' | '.join(heads)} |"
            yield f"|---|{'--:|' * len(heads)}"
        else:
            yield f"  {'':<26}{''.join(f'{head:>13}' for head in heads)}"
        for delivery in self.deliveries:
            for part, seconds in self.parts(axis, delivery).items():
                cells = [f"{seconds[size]:.2f}" if size in seconds else "-" for size in sizes]
                cells.append(f"{fit(seconds).exponent:.2f}" if len(seconds) > 1 else "-")
                name = f"{delivery}: {part}"
                yield (
                    f"| {name} | {' | '.join(cells)} |"
                    if markdown
                    else f"  {name:<26}{''.join(f'{cell:>13}' for cell in cells)}"
                )


def keys_at(rows: int, *, keys: int, fixed: int, shares: Sequence[float]) -> list[int]:
    """How many keys change at this size, one after the other: the fixed number, and at the fixed size every share."""
    wanted = {keys} | ({round(rows * share / 100) for share in shares} if rows == fixed else set())
    return sorted(count for count in wanted if 8 <= count <= rows * 0.3)


class PointStore:
    """The points of a run, kept as soon as they exist. A later run may ask for other sizes, and gets its own only."""

    def __init__(self, file: Path, seed: int, setting: Mapping[str, Any], *, resume: bool) -> None:
        self._kept = KeptValues(file, {"seed": seed}, setting, resume=resume)
        points = map(Point.from_dict, self._kept.values)
        # What failed gets another chance when a run is resumed.
        self.points = [point for point in points if point.error is None]
        self._kept.keep_only(map(asdict, self.points))

    @property
    def setting(self) -> dict[str, Any]:
        return self._kept.setting

    def add(self, point: Point) -> None:
        self.points.append(point)
        self._kept.add(asdict(point))

    def has(self, rows: int, keys: int, delivery: str) -> bool:
        return any((p.rows, p.keys, p.delivery) == (rows, keys, delivery) for p in self.points)


Say = Callable[[str], None]
