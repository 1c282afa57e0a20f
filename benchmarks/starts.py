"""What was found of starts: a refresh in a new process beside one in a process that has everything loaded. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.report import Goal

# By the rows above which Spark is asked: what a start costs depends on it.
USUAL, BY_SPARK = "few rows are staged without Spark", "all rows by the Spark Connect server"


@dataclass(frozen=True)
class Starts:
    """Seconds of refreshes of the same kind of change, in turn; and the statements of a sensor's tick without a change."""

    rows: int
    keys: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    cold: Mapping[str, Sequence[float]]
    warm: Mapping[str, Sequence[float]]
    tick_statements: int
    equal: bool

    @property
    def goals(self) -> list[Goal]:
        ratios = [Goal(f"cold refresh to warm, {name}", self.ratio(name), 2.5, "x") for name in self.cold]
        return [*ratios, Goal("statements of a sensor's tick without a change", self.tick_statements, 1, "")]

    def ratio(self, name: str) -> float:
        return median(self.cold[name]) / median(self.warm[name])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Starts:
        return Starts(**value)

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.rows:,} orders, {self.keys:,} keys changed before each refresh; medians of {min(map(len, self.cold.values()))}"
        yield f"  {'seconds':<42}{'cold':>8}{'warm':>8}{'ratio':>8}"
        for name in self.cold:
            yield f"  {name:<42}{median(self.cold[name]):>8.1f}{median(self.warm[name]):>8.1f}{self.ratio(name):>8.2f}"
        yield from (goal.as_text() for goal in self.goals)
        yield f"Published: {'equal to the source' if self.equal else 'NOT equal to the source'}"
