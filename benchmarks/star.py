"""What was found of joined extracts beside stars: a first load of each, and what one changed row of a dimension moves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import KeptValues

JOINED, STAR = "joined", "star"
WAYS = tuple((shape, delivery) for shape in (JOINED, STAR) for delivery in ("republish", "patch"))


@dataclass(frozen=True)
class Result:
    """One way: its first load, and the refresh after the change. `server` is what Tableau's stand-in itself did of the seconds."""

    shape: str
    delivery: str
    load_seconds: float = 0.0
    extract_bytes: int = 0
    keys: int = 0
    removed: int = 0
    added: int = 0
    rows_read: int = 0
    bytes_read: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    server: float = 0.0
    equal: bool = False
    error: str | None = None

    @property
    def way(self) -> tuple[str, str]:
        return (self.shape, self.delivery)

    @property
    def ok(self) -> bool:
        return self.equal and self.error is None


_ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("first load, s", lambda result: f"{result.load_seconds:,.1f}"),
    ("extract, MB", lambda result: f"{result.extract_bytes / 1e6:,.1f}"),
    ("keys", lambda result: f"{result.keys:,}"),
    ("rows removed", lambda result: f"{result.removed:,}"),
    ("rows added", lambda result: f"{result.added:,}"),
    ("rows read", lambda result: f"{result.rows_read:,}"),
    ("bytes read", lambda result: f"{result.bytes_read:,}"),
    ("bytes sent", lambda result: f"{result.bytes_sent:,}"),
    ("seconds", lambda result: f"{result.seconds:,.1f}"),
    ("  of it, the server", lambda result: f"{result.server:,.1f}"),
)


@dataclass(frozen=True)
class StarReport:
    """All ways of one run."""

    asked: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    results: Sequence[Result]

    @property
    def equal(self) -> bool:
        return {result.way for result in self.results if result.ok} == set(WAYS)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> StarReport:
        known = {name: item for name, item in value.items() if name != "equal"}
        return StarReport(**{**known, "results": tuple(Result(**result) for result in value["results"])})

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        shown = [result for result in self.results if result.error is None]
        yield f"One row of a dimension of {self.asked['dimension']:,} rows changed, to which {self.asked['facts']:,} facts refer"
        yield f"  {'':<20}" + "".join(f"{f'{result.shape}, {result.delivery}':>19}" for result in shown)
        for name, value in _ROWS:
            yield f"  {name:<20}" + "".join(f"{value(result):>19}" for result in shown)
        yield from (f"FAILED: {' by '.join(result.way)}: {result.error}" for result in self.results if result.error)
        wrong = [" by ".join(result.way) for result in shown if not result.equal]
        yield f"Published: {'NOT equal to the source: ' + ', '.join(wrong) if wrong else 'equal to the source'}"


class StarStore:
    """The ways of a run, kept as soon as they are measured."""

    def __init__(self, file: Path, asked: Mapping[str, Any], setting: Mapping[str, Any], *, resume: bool) -> None:
        self._kept = KeptValues(file, asked, setting, resume=resume)
        results = [Result(**value) for value in self._kept.values]
        # What failed gets another chance when a run is resumed.
        self.known = {result.way: result for result in results if result.ok}
        self._kept.keep_only(asdict(result) for result in self.known.values())

    def add(self, result: Result) -> None:
        self.known[result.way] = result
        self._kept.add(asdict(result))

    def report(self) -> StarReport:
        return StarReport(**self._kept.head, results=tuple(self.known[way] for way in WAYS if way in self.known))
