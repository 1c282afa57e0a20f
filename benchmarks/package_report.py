"""What the bench of packages found, as values, as text and as JSON. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

UNPACK, PURGE, PACK, PUBLISH = STEPS = ("download and unpack", "purge", "pack", "publish")
_NO_NUMBER = "-"
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Way:
    """One way from the download to the publish, in a process of its own.

    Memory is what Linux counted for the process at its highest, in bytes: Hyper's own process apart, and of ours also
    what it held before the work began. Elsewhere nobody counts it.
    """

    seconds: Mapping[str, float]
    rows: int
    bytes_published: int
    peak: int | None
    before: int | None
    hyper_peak: int | None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Way:
        return Way(**value)


@dataclass(frozen=True)
class PackageReport:
    """One run: the package that both ways began with, and what they made of it."""

    rows: int
    hyper_bytes: int
    package_bytes: int
    purged: int
    increment_value: str
    cores: int
    load: float
    ours: Way
    plain: Way
    equal: bool

    @property
    def slowest_network(self) -> float | None:
        """Megabits a second below which the bytes that deflating saves outweigh its time; None where it never pays."""
        more, saved = self.ours.bytes_published - self.plain.bytes_published, self.plain.total - self.ours.total
        return more * 8 / saved / _MEGABYTE if more > 0 and saved > 0 else None

    def as_dict(self) -> dict[str, Any]:
        ways = {name: {**asdict(way), "total": round(way.total, 3)} for name, way in self._ways().items()}
        ratio = round(self.ours.total / self.plain.total, 3) if self.plain.total else None
        return {**asdict(self), **ways, "ours_against_plain": ratio, "slowest_network": self.slowest_network}

    def _ways(self) -> dict[str, Way]:
        return {"ours": self.ours, "plain": self.plain}

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        share = 100 * self.purged / self.rows
        yield (
            f"An extract of {_mb(self.hyper_bytes)} MB ({self.rows:,} rows) in a package of {_mb(self.package_bytes)} MB, "
            f"deflated as servers keep it; {self.purged:,} rows purged ({share:.1f} %)"
        )
        yield f"{self.cores} cores, load {self.load:.1f} before the run; plain: unzip all, DELETE, deflate all"
        yield f"\n  {'':<24}{'ours':>10}{'plain':>10}{'ratio':>8}"
        for step in STEPS:
            yield _beside(step, self.ours.seconds[step], self.plain.seconds[step], digits=2)
        yield _beside("seconds", self.ours.total, self.plain.total)
        yield _beside("MB published", self.ours.bytes_published / _MEGABYTE, self.plain.bytes_published / _MEGABYTE)
        yield _memory("peak MB of the process", self.ours.peak, self.plain.peak)
        yield _memory("  before the work", self.ours.before, self.plain.before)
        yield _memory("peak MB of hyperd", self.ours.hyper_peak, self.plain.hyper_peak)
        if self.ours.peak is None:
            yield "Memory is counted on Linux only."
        if self.slowest_network is not None:
            yield f"Deflating would pay over less than {self.slowest_network:,.0f} Mbit/s."
        verdict = "equal to what had to remain" if self.equal else "NOT what had to remain"
        yield f"Published by both: {self.ours.rows:,} rows up to {self.increment_value}: {verdict}"


def _mb(count: int) -> str:
    return f"{count / _MEGABYTE:,.0f}"


def _memory(name: str, ours: int | None, plain: int | None) -> str:
    if ours is None or plain is None:
        return f"  {name:<24}{_NO_NUMBER:>10}{_NO_NUMBER:>10}{_NO_NUMBER:>8}"
    return _beside(name, ours / _MEGABYTE, plain / _MEGABYTE, digits=0)


def _beside(name: str, ours: float, plain: float, *, digits: int = 1) -> str:
    ratio = f"{ours / plain:>7.2f}x" if plain else f"{_NO_NUMBER:>8}"
    return f"  {name:<24}{ours:>10,.{digits}f}{plain:>10,.{digits}f}{ratio}"
