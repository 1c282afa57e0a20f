"""What the contest found, as values and as Markdown. Pure: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from benchmarks.contest_ways import BY_NAME, RECENT, SCATTERED, SCENARIOS, WAYS, Way
from benchmarks.machine import setting_lines

_NONE = "-"
_SHORT = (
    "republish_watermark", "patch", "full", "tableau_full", "tableau_incremental", "script_2021", "pandas_all", "pandas_changed",
    "pantab_all", "hyperleaup_all",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One repetition of one way.

    `seconds` is its own time: without the work that Tableau's server did itself, and without the quiet period that a spec
    asks for. `wall` also has the comparison.
    """

    scenario: str
    round: int
    way: str
    seconds: float = 0.0
    server: float = 0.0
    quiet: float = 0.0
    steps: Mapping[str, float] = field(default_factory=dict)
    bytes_published: int = 0
    peak: int | None = None
    rows: int = 0
    wrong: int = 0
    missing: int = 0
    orders: int = 0
    error: str | None = None
    wall: float = 0.0

    @property
    def id(self) -> tuple[str, int, str]:
        return (self.scenario, self.round, self.way)

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def total(self) -> float:
        """Seconds until people see what the way has made."""
        return self.seconds + self.server

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Result:
        known = {each.name for each in fields(Result)}
        return Result(**{name: item for name, item in value.items() if name in known})


@dataclass(frozen=True)
class Row:
    """A way's line: medians of its repetitions; its differences after the first change alone."""

    way: Way
    repetitions: int
    seconds: float
    server: float
    quiet: float
    bytes_published: int
    orders: int
    error: str | None

    @property
    def total(self) -> float:
        return self.seconds + self.server


@dataclass(frozen=True)
class Contest:
    """One run."""

    asked: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    results: Sequence[Result]

    @property
    def equal(self) -> bool:
        """Whether all of ours equal the source: what a run is worth nothing without."""
        ours = [result for result in self.results if BY_NAME[result.way].delivery]
        return all(result.ok and result.orders == 0 for result in ours)

    def as_dict(self) -> dict[str, Any]:
        head = {"asked": dict(self.asked), "machine": dict(self.machine), "versions": dict(self.versions)}
        results = [{each.name: getattr(result, each.name) for each in fields(Result)} for result in self.results]
        return {**head, "date": self.date, "results": results}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Contest:
        return Contest(**{**value, "results": tuple(map(Result.from_dict, value["results"]))})

    def rows(self, scenario: str) -> list[Row]:
        """The ways of a scenario that have results, in the order of WAYS."""
        rows = []
        for way in WAYS:
            results = [result for result in self.results if (result.scenario, result.way) == (scenario, way.name)]
            if results:
                rows.append(_row(way, results))
        return rows

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        asked = self.asked
        yield f"{asked['rows']:,} orders of 15 columns, {asked['changed']:g} % of the keys changed; medians of at most {asked['repetitions']} interleaved repetitions"
        yield ""
        yield from setting_lines(self.machine, self.versions, self.date)
        for scenario in SCENARIOS:
            if rows := self.rows(scenario):
                yield f"\n**{scenario.capitalize()}**: {SCENARIOS[scenario]}\n"
                yield from _table(rows)
        yield ""
        yield _NOTES


_NOTES = (
    "*Seconds* are the way's own, with what the warehouse took; *server* is what Tableau's server did itself, here its stand-in; "
    "*quiet* is the pause that our spec asks of a changing source, and is in no sum. *Wrong orders* are those whose published rows are "
    "not the source's, after the first change, compared row by row as bags. A way that takes more than a minute runs once."
)


def _row(way: Way, results: Sequence[Result]) -> Row:
    good = [result for result in results if result.ok]
    first = min(good, key=lambda result: result.round) if good else None
    return Row(
        way=way,
        repetitions=len(good),
        seconds=median([result.seconds for result in good]) if good else 0.0,
        server=median([result.server for result in good]) if good else 0.0,
        quiet=median([result.quiet for result in good]) if good else 0.0,
        bytes_published=round(median([result.bytes_published for result in good])) if good else 0,
        orders=first.orders if first else 0,
        error=next((result.error for result in results if result.error), None),
    )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| | seconds | server | together | quiet | MB sent | wrong orders | runs | |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    for row in rows:
        name = f"{row.way.family}: {row.way.title}"
        if not row.repetitions:
            yield f"| {name} | {' | '.join([_NONE] * 6)} | 0 | failed: {_cell(row.error or '')} |"
            continue
        numbers = [f"{row.seconds:,.1f}", f"{row.server:,.1f}", f"**{row.total:,.1f}**"]
        numbers += [f"{row.quiet:.1f}" if row.quiet else _NONE, f"{row.bytes_published / 1e6:,.1f}", f"{row.orders:,}"]
        remark = f"cannot do: {row.way.cannot}" if row.way.cannot else ""
        if row.error:
            remark += f" A repetition failed: {_cell(row.error)}"
        yield f"| {name} | {' | '.join(numbers)} | {row.repetitions} | {remark} |"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def short_table(contest: Contest) -> str:
    """A few ways in one line each, as the README shows them."""
    lines = [f"{'':<60}{'seconds':>9}{'server':>9}{'together':>10}{'wrong orders':>14}"]
    for scenario in (SCATTERED, RECENT):
        rows = [row for row in contest.rows(scenario) if row.repetitions and row.way.name in _SHORT]
        if rows:
            lines.append(f"{scenario}: {SCENARIOS[scenario]}")
        for row in rows:
            name = (
                row.way.title
                if row.way.delivery
                else f"{row.way.family if 'Tableau' in row.way.family else ''} {row.way.title}"
            )
            lines.append(
                f"  {name.strip():<58}{row.seconds:>9,.1f}{row.server:>9,.1f}{row.total:>10,.1f}{row.orders:>14,}"
            )
    return "\n".join(lines)
