"""A plain model of what a table must hold after files were loaded: dicts and lists, no SQL."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A row of a file: key, value, version (a day of January), and whether it says that the key is gone."""

    key: int
    value: str | None
    version: int
    gone: bool = False


@dataclass
class Model:
    """Files by path with their rows, and the table that loads make of them."""

    mode: str
    ordered: bool = True
    there: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    ledger: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    received: list[tuple[Row, int]] = field(default_factory=list)
    newest: str = ""
    snapshot: tuple[Row, ...] = ()

    def land(self, path: str, rows: tuple[Row, ...]) -> None:
        self.there[path] = rows

    def load(self) -> None:
        new = [path for path in sorted(self.there) if self.ledger.get(path) != self.there[path]]
        for path in new:
            self.ledger[path] = self.there[path]
            self.received += [(row, len(self.received) + at) for at, row in enumerate(self.there[path])]
        if new and max(new) >= self.newest:
            self.newest = max(new)
            self.snapshot = self.there[self.newest]

    def table(self) -> Counter[tuple[Any, ...]]:
        return Counter(getattr(self, f"_{self.mode}")())

    def _append(self) -> list[tuple[Any, ...]]:
        return [(row.key, row.value, row.version) for row, _ in self.received]

    def _truncate(self) -> list[tuple[Any, ...]]:
        last = {row.key: row for row, _ in self._in_order((row, at) for at, row in enumerate(self.snapshot))}
        return [(row.key, row.value, row.version) for row in last.values()]

    def _merge(self) -> list[tuple[Any, ...]]:
        last = {row.key: row for row, _ in self._in_order(self.received)}
        return [(row.key, row.value, row.version) for row in last.values() if not row.gone]

    def _in_order(self, rows: Any) -> list[tuple[Row, int]]:
        return sorted(rows, key=lambda one: (one[0].version if self.ordered else 0, one[1]))

    def _scd2(self) -> list[tuple[Any, ...]]:
        """A row from its version to the next one of its key; the last one received of a key and version counts."""
        versions: dict[int, dict[int, Row]] = {}
        for row, _ in self.received:
            versions.setdefault(row.key, {})[row.version] = row
        told = []
        for found in versions.values():
            times = sorted(found)
            for at, time in enumerate(times):
                until = times[at + 1] if at + 1 < len(times) else None
                if not found[time].gone:
                    told.append((found[time].key, found[time].value, time, until, until is None))
        return told
