"""The profile of a refresh: each stage with its seconds, rows and bytes, and for whom it waited."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tir_dagster.measuring import Meter, Whom, metered

# What no stage accounts for: Dagster's bookkeeping, imports, and what a command does around its runs.
REST = "rest"
_SHOWN = {REST: "Dagster and the rest"}


@dataclass(frozen=True)
class StageProfile:
    """One stage; `rows` and `bytes` where it moved some, `waited_for` in seconds by whom."""

    stage: str
    seconds: float
    rows: int | None = None
    bytes: int | None = None
    waited_for: dict[Whom, float] = field(default_factory=dict)

    def __add__(self, other: StageProfile) -> StageProfile:
        waited = dict(self.waited_for)
        for whom, seconds in other.waited_for.items():
            waited[whom] = waited.get(whom, 0.0) + seconds
        return StageProfile(
            self.stage,
            self.seconds + other.seconds,
            _sum(self.rows, other.rows),
            _sum(self.bytes, other.bytes),
            waited,
        )

    def as_dict(self) -> dict[str, Any]:
        """As `--json` and metadata show it: times to the millisecond, waits that anybody would notice."""
        waited = {whom: round(seconds, 3) for whom, seconds in self.waited_for.items() if seconds >= 0.0005}
        return {**asdict(self), "seconds": round(self.seconds, 3), "waited_for": waited}


@dataclass
class Profile:
    """The stages of one refresh in the order in which they ended; one that ran several times is there as often."""

    ended: list[StageProfile] = field(default_factory=list)
    _inner_seconds: float = 0.0

    @contextmanager
    def timed(self, stage: str) -> Iterator[Meter]:
        """Time the block, without a stage inside of it, and collect what it moves and waits for."""
        begun, outer, self._inner_seconds = time.perf_counter(), self._inner_seconds, 0.0
        meter = Meter()
        try:
            with metered(meter):
                yield meter
        finally:
            spent = time.perf_counter() - begun
            own, self._inner_seconds = spent - self._inner_seconds, outer + spent
            self.ended.append(StageProfile(stage, own, meter.rows, meter.bytes, dict(meter.waited_for)))

    @property
    def stages(self) -> list[StageProfile]:
        """Each stage once."""
        return summed(self.ended)


def whole(stages: Iterable[StageProfile], seconds: float) -> list[StageProfile]:
    """Return each stage once, and what is left of so many seconds."""
    known = summed(stages)
    return [*known, StageProfile(REST, max(0.0, seconds - sum(stage.seconds for stage in known)))]


def summed(stages: Iterable[StageProfile]) -> list[StageProfile]:
    """Each stage once, in the order of the first times."""
    by_name: dict[str, StageProfile] = {}
    for stage in stages:
        known = by_name.get(stage.stage)
        by_name[stage.stage] = stage if known is None else known + stage
    return list(by_name.values())


def profile_table(stages: Iterable[StageProfile]) -> str:
    """The stages as a table for people."""
    lines = [f"{'stage':<22}{'seconds':>9}{'rows':>14}{'bytes':>16}  waited for"]
    lines += [
        f"{_SHOWN.get(stage.stage, stage.stage):<22}{stage.seconds:>9.2f}{_count(stage.rows):>14}"
        f"{_count(stage.bytes):>16}  {_waits(stage)}".rstrip()
        for stage in stages
    ]
    return "\n".join(lines)


def _waits(stage: StageProfile) -> str:
    waits = sorted(stage.waited_for.items(), key=lambda wait: -wait[1])
    return ", ".join(f"{whom} {seconds:.2f} s" for whom, seconds in waits if seconds >= 0.005)


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _sum(left: int | None, right: int | None) -> int | None:
    return left if right is None else right if left is None else left + right
