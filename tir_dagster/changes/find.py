"""Which keys differ between the ledger and the source at one version: detectors propose, the ledger decides.

The logic is here and pure; a workbench (Spark and Snowflake in a refresh) reads rows and runs the set logic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tir_dagster.changes import sets

# Rows and key checksum by slice. Both are sums, so what a change does to them is arithmetic.
Stats = Mapping[str | None, tuple[int, int]]


class Workbench(Protocol):
    """Named relations of keyed rows (k0…, slice, hash, g0…), read from the source at one pinned version."""

    width: int
    groups: int

    def define(self, name: str, sql: str) -> None:
        """Give a query over the relations a name; its result does not change afterwards."""

    def count(self, relation: str) -> int: ...

    def read_touched(self, name: str, keys: str, candidates: Any, resync: Sequence[str | None]) -> None:
        """Name ALL rows of every candidate key, and of every key with a row in these slices; and all these keys.

        A candidate key may have no row any more.
        """

    def read_keys(self, name: str, slices: Sequence[str | None]) -> None:
        """Name the keys (k0…, slice) of all rows in these slices."""

    def read_rows(self, name: str, keys: str) -> None:
        """Name ALL rows of the keys in a relation."""

    def source_stats(self) -> Stats: ...

    def stats(self, relation: str) -> Stats: ...


@dataclass(frozen=True)
class Question:
    """What to look for: the detectors' candidates, as the workbench reads them.

    All rows of `compare` slices are candidates; those of `resync` slices are replaced, whatever the ledger says.
    """

    candidates: Any
    deletes: bool = True
    resync: tuple[str | None, ...] = ()
    compare: tuple[str | None, ...] = ()
    pending: bool = False

    @property
    def whole(self) -> tuple[str | None, ...]:
        """The slices that are looked at as a whole, each once."""
        return tuple(dict.fromkeys((*self.resync, *self.compare)))


@dataclass(frozen=True)
class Found:
    """The answer. On the workbench: `changed` (keys to replace), `fresh` (their rows), `ledger_after`."""

    keys: int
    purged: Stats
    appended: Stats
    source: Stats = field(default_factory=dict)
    unexplained: tuple[str | None, ...] = ()

    @property
    def slices(self) -> tuple[str | None, ...]:
        return tuple(sorted({**self.purged, **self.appended}, key=lambda name: (name is None, name or "")))

    def after(self, ledger: Stats) -> Stats:
        """The ledger's stats once the change is applied."""
        return _add(_add(ledger, self.purged, sign=-1), self.appended)


def find_changes(bench: Workbench, question: Question, ledger_stats: Stats) -> Found:
    """Find S, the keys whose content differs; the relations `ledger` and, if asked for, `pending` exist already."""
    width = bench.width
    bench.read_touched("touched", "touched_keys", question.candidates, question.whole)
    bench.define("touched_ledger", sets.having_keys("ledger", "touched_keys", width))
    bench.define("touched_changed", sets.differing_keys("touched", "touched_ledger", width))
    bench.define("touched_gone", sets.having_keys("touched_ledger", "touched_changed", width))
    bench.define("touched_fresh", sets.having_keys("touched", "touched_changed", width))

    check_all = question.deletes or bool(question.whole)
    source = bench.source_stats() if check_all else {}
    after_touched = _add(_add(ledger_stats, bench.stats("touched_gone"), sign=-1), bench.stats("touched_fresh"))
    suspects = _differing_slices(after_touched, source) if check_all else ()
    sought = bool(suspects or question.whole or question.pending)
    if sought:
        _seek(bench, question, suspects)
        parts = ["touched_changed", "sought_changed", *(["pending"] if question.pending else [])]
        if question.resync:
            # All of these slices, whatever the ledger says: a file that drifted from it is mended, too.
            bench.define("resync_touched", sets.in_slices("touched", question.resync))
            bench.define("resync_ledger", sets.in_slices("ledger", question.resync))
            parts += ["resync_ledger", "resync_touched"]
        bench.define("changed", sets.union_keys(parts, width))
        bench.define("candidates", "SELECT * FROM touched UNION ALL SELECT * FROM sought_rows")
    else:
        bench.define("changed", sets.distinct_keys("touched_changed", width))
        bench.define("candidates", "SELECT * FROM touched")
    bench.define("gone", _gone(width, sought=sought))
    bench.define("fresh", sets.having_keys("candidates", "changed", width))
    bench.define("ledger_after", sets.replaced("ledger", "changed", "fresh", width, bench.groups))

    purged, appended = bench.stats("gone"), bench.stats("fresh")
    found = Found(bench.count("changed"), purged, appended, source)
    unexplained = _differing_slices(found.after(ledger_stats), source) if check_all else ()
    return replace(found, unexplained=unexplained)


def _gone(width: int, *, sought: bool) -> str:
    """The ledger's rows of the changed keys. Each such key was touched or sought: no need to scan the ledger again."""
    touched = sets.having_keys("touched_ledger", "changed", width)
    return f"{touched} UNION ALL {sets.having_keys('sought_ledger', 'changed', width)}" if sought else touched


def _seek(bench: Workbench, question: Question, suspects: Sequence[str | None]) -> None:
    """Look keys up one by one: gone or new in suspect slices, gone from those looked at as a whole, pending from before.

    Touched keys need no look: all their rows are at hand. A key that only ever had rows in suspect slices, and is not
    among the source's keys of those, has no row anywhere: it is not asked for.
    """
    width = bench.width
    bench.define("ledger_touched", sets.replaced("ledger", "touched_changed", "touched_fresh", width, bench.groups))
    bench.read_keys("suspect_keys", suspects)
    bench.define("suspect_ledger", sets.in_slices("ledger_touched", suspects))
    bench.define("suspect_differing", sets.differing_keys("suspect_ledger", "suspect_keys", width, content=("slice",)))
    bench.define("whole_ledger", sets.in_slices("ledger", question.whole))
    anywhere = ["whole_ledger", *(["pending"] if question.pending else [])]
    bench.define("all_sought", sets.union_keys(["suspect_differing", *anywhere], width))
    bench.define("sought", sets.lacking_keys("all_sought", "touched_keys", width))
    bench.define("sought_ledger", sets.having_keys("ledger", "sought", width))
    bench.define("elsewhere", sets.in_slices("sought_ledger", suspects, inside=False))
    bench.define("still_there", sets.having_keys("sought", "suspect_keys", width))
    bench.define("perhaps", sets.union_keys(["still_there", "elsewhere", *anywhere], width))
    bench.define("perhaps_present", sets.having_keys("sought", "perhaps", width))
    bench.read_rows("sought_rows", "perhaps_present")
    bench.define("sought_changed", sets.differing_keys("sought_rows", "sought_ledger", width))


def _differing_slices(ledger: Stats, source: Stats) -> tuple[str | None, ...]:
    """Slices whose count or key checksum differs: only there can a key be missing or extra."""
    return tuple(name for name in {**ledger, **source} if ledger.get(name, (0, 0)) != source.get(name, (0, 0)))


def _add(one: Stats, other: Stats, *, sign: int = 1) -> Stats:
    total = dict(one)
    for name, (rows, checksum) in other.items():
        before = total.get(name, (0, 0))
        total[name] = (before[0] + sign * rows, before[1] + sign * checksum)
    return {name: value for name, value in total.items() if value != (0, 0)}
