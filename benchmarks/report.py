"""What the bench found: stages beside their limits, as values, as text and as JSON. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Parts of a stage, which are in its seconds already.
PARTS = ("publish_server",)
STAGES = ("look", "survey", "spark", "detect", "shell", "apply", "verify", "publish")
REST = "Dagster and the rest"
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
    limit: Limit | None = None

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.limit.seconds if self.limit and self.limit.seconds else None

    def as_dict(self) -> dict[str, Any]:
        limit = {**asdict(self.limit), "seconds": round(self.limit.seconds, 4)} if self.limit else None
        return {"name": self.name, "seconds": round(self.seconds, 3), "limit": limit, "ratio": _rounded(self.ratio)}


@dataclass(frozen=True)
class Refresh:
    """One refresh by the pipeline."""

    decision: str
    seconds: float
    stages: tuple[Stage, ...]
    rows_read: int
    rows_purged: int
    rows_appended: int
    bytes_published: int

    @property
    def limits(self) -> float:
        return sum(stage.limit.seconds for stage in self.stages if stage.limit)

    @property
    def total(self) -> Stage:
        """All of it beside all its limits together: what is left to win."""
        return Stage("total", self.seconds, Limit("all limits together", self.limits) if self.limits else None)

    def as_dict(self) -> dict[str, Any]:
        value = asdict(self)
        stages = [stage.as_dict() for stage in self.stages]
        return {**value, "stages": stages, "limits": round(self.limits, 4), "ratio": _rounded(self.total.ratio)}


def staged(seconds: Mapping[str, float], total: float, limits: Mapping[str, Limit]) -> tuple[Stage, ...]:
    """The stages in the order of the flow, known ones first, and what none of them accounts for."""
    apart = [name for name in seconds if name not in STAGES and name not in PARTS]
    names = [*(name for name in STAGES if name in seconds), *apart]
    stages = [Stage(name, seconds[name], limits.get(name)) for name in names]
    return (*stages, Stage(REST, total - sum(stage.seconds for stage in stages)))


@dataclass(frozen=True)
class Report:
    """One run of the bench."""

    rows: int
    changed: float
    seed: int
    cores: int
    load: float  # what else the machine was doing when the run began: the mean number of busy processes
    change: Mapping[str, int]
    first: Refresh
    by_key: Refresh
    full: Refresh
    file_bytes: int
    scale: tuple[Stage, ...]
    equal_by_key: bool
    equal_full: bool
    slices: int

    @property
    def equal(self) -> bool:
        return self.equal_by_key and self.equal_full

    @property
    def ratio(self) -> float:
        return self.by_key.seconds / self.full.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("rows", "changed", "seed", "cores", "load")},
            "change": dict(self.change),
            **{name: getattr(self, name).as_dict() for name in ("first", "full", "by_key")},
            "file_bytes": self.file_bytes,
            "scale": [stage.as_dict() for stage in self.scale],
            "by_key_against_full": {
                "seconds": _rounded(self.ratio),
                "rows_read": _rounded(self.by_key.rows_read / max(self.full.rows_read, 1), 4),
                "bytes_published": _rounded(self.by_key.bytes_published / max(self.full.bytes_published, 1), 4),
            },
            **{name: getattr(self, name) for name in ("slices", "equal_by_key", "equal_full", "equal")},
        }

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        told = ", ".join(f"{count:,} {kind}" for kind, count in self.change.items())
        yield f"{self.rows:,} orders, {self.changed:g} % of the keys changed ({told}); seed {self.seed}"
        yield f"{self.cores} cores, load {self.load:.1f} before the run"
        started = sum(stage.seconds for stage in self.first.stages if stage.name == "spark")
        yield f"First load, cold: {self.first.seconds:.1f} s, of which Spark's start {started:.1f} s"
        yield from _table("Full refresh, warm", self.full)
        yield from _table("Refresh by key, warm", self.by_key)
        yield f"\nFor scale, the Hyper file of {self.file_bytes / 1e6:,.1f} MB"
        yield from map(_line, self.scale)
        yield f"\n  {'':<22}{'by key':>12}{'full':>12}{'ratio':>8}"
        yield _beside("seconds", self.by_key.seconds, self.full.seconds)
        yield _beside("whole rows read", self.by_key.rows_read, self.full.rows_read)
        yield _beside("MB published", self.by_key.bytes_published / 1e6, self.full.bytes_published / 1e6)
        for name, equal in (("by key", self.equal_by_key), ("full", self.equal_full)):
            verdict = "equal to the source in all" if equal else "NOT equal to the source, compared by"
            yield f"Published {name}: {verdict} {self.slices} slices"


def _table(title: str, refresh: Refresh) -> Iterator[str]:
    yield f"\n{title}: {refresh.rows_purged:,} rows purged, {refresh.rows_appended:,} appended"
    yield f"  {'stage':<22}{'seconds':>9}{'limit':>9}{'ratio':>8}  the limit is"
    yield from map(_line, (*refresh.stages, refresh.total))


def _line(stage: Stage) -> str:
    limit, ratio = stage.limit, stage.ratio
    beside = f"{limit.seconds:>9.2f}" if limit else f"{_NO_NUMBER:>9}"
    times = f"{ratio:>7.1f}x" if ratio is not None else f"{_NO_NUMBER:>8}"
    return f"  {stage.name:<22}{stage.seconds:>9.2f}{beside}{times}  {limit.what if limit else ''}".rstrip()


def _beside(name: str, by_key: float, full: float) -> str:
    digits = 0 if isinstance(by_key, int) else 1
    return f"  {name:<22}{by_key:>12,.{digits}f}{full:>12,.{digits}f}{by_key / full if full else 0:>7.2f}x"


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
