"""How the time of refreshes by key grows with the extract while the change stays the same: `--growth`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import BY_KEY, FULL, Case, Goal
from benchmarks.run import measuring

KEYS = 10_000
# Refreshes before the one that is measured: as many as versions are kept, and one more. From then on the oldest file is
# brought forward instead of copying the newest one, as in every refresh that follows.
_BEFORE = 4
_DETECTOR = "watermark"
Say = Callable[[str], None]


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of a line through the logarithms: 0 does not grow, 1 grows as the size does."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(value, 0.001)) for value in seconds]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


@dataclass(frozen=True)
class GrowthReport:
    """Refreshes of as many keys, by the size of the extract."""

    keys: int
    cores: int
    load: float
    cases: Mapping[int, Case]
    equal: bool

    @property
    def goals(self) -> list[Goal]:
        sizes, cases = list(self.cases), list(self.cases.values())
        if len(sizes) < 2:
            return []
        return [
            Goal("patch: exponent of our own time over size", exponent(sizes, [case.own for case in cases]), 0.15, ""),
            Goal(
                "verify: exponent over size",
                exponent(sizes, [case.stage("verify").seconds for case in cases]),
                0.2,
                "",
            ),
        ]

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [{**entry, "size": size} for size, case in self.cases.items() for entry in case.entries]

    def as_dict(self) -> dict[str, Any]:
        goals = [
            {"what": goal.what, "reached": goal.reached, "goal": goal.goal, "met": goal.met} for goal in self.goals
        ]
        return {"keys": self.keys, "cores": self.cores, "load": self.load, "goals": goals, "entries": self.entries}

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"Refreshes by patch, {self.keys:,} changed keys, each the fifth after a full one; {self.cores} cores, load {self.load:.1f} before the run"
        yield f"  {'stage':<22}{''.join(f'{size:>12,}' for size in self.cases)}"
        cases = list(self.cases.values())
        for name in dict.fromkeys(stage.name for case in cases for stage in case.stages):
            yield f"  {name:<22}{''.join(f'{case.stage(name).seconds:>12.2f}' for case in cases)}"
        yield f"  {'(server)':<22}{''.join(f'{case.server:>12.2f}' for case in cases)}"
        yield f"  {'our own':<22}{''.join(f'{case.own:>12.2f}' for case in cases)}"
        yield from (goal.as_text() for goal in self.goals)
        yield f"Published: {'equal to the source' if self.equal else 'NOT equal to the source'} at every size"


def run_growth(folder: Path, sizes: Sequence[int], *, seed: int, progress: Say) -> GrowthReport:
    """Measure a refresh by patch for each size, of the same number of keys."""
    load = os.getloadavg()[0]
    cases: dict[int, Case] = {}
    equal = True
    keys = min(KEYS, min(sizes) // 10)
    with measuring(folder, progress) as bench:
        bench.warm_up(["patch"])
        for size in sorted(sizes):
            bench.seed(size, seed)
            bench.refresh(FULL, "patch", _DETECTOR)
            for _ in range(_BEFORE + 1):
                bench.change(keys)
                cases[size] = bench.refresh(BY_KEY, "patch", _DETECTOR).case
            equal = equal and bench.compare("patch").equal
    return GrowthReport(keys, os.cpu_count() or 1, round(load, 2), cases, equal)
