"""A workbench on SQLite: the same set logic as in a refresh, on tables small enough for thousands of histories."""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tir_dagster.changes.candidates import Candidates


@dataclass(frozen=True)
class Row:
    """A source row: key, slice (both may be NULL and repeat), a value, and a watermark that honest writers move."""

    key: int | None
    slice: str | None
    value: str | None
    stamp: int | None

    @property
    def hash(self) -> int:
        return int.from_bytes(hashlib.md5(repr((self.key, self.slice, self.value)).encode()).digest()[:7], "big")


def checksum(keys: Sequence[object]) -> int:
    return sum(int.from_bytes(hashlib.md5(repr(key).encode()).digest()[:6], "big") for key in keys)


class SmallBench:
    """Reads come from a Python list of rows; everything else is SQL."""

    def __init__(self, source: Sequence[Row], ledger: Sequence[Row], pending: Sequence[object] = ()) -> None:
        self.width = 1
        self.groups = 0
        self._database = sqlite3.connect(":memory:")
        self._source = list(source)
        self.reads: list[str] = []
        self._table("ledger", [(row.key, row.slice, row.hash) for row in ledger])
        self._table("pending", [(key, None, None) for key in pending])

    def _table(self, name: str, rows: list[tuple[object, object, object]]) -> None:
        self._database.execute(f"CREATE TABLE {name} (k0 BIGINT, slice VARCHAR, hash BIGINT)")
        if rows:
            self._database.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", rows)

    def define(self, name: str, sql: str) -> None:
        self._database.execute(f"CREATE TABLE {name} AS {sql}")

    def count(self, relation: str) -> int:
        return self._database.execute(f"SELECT count(*) FROM {relation}").fetchone()[0]

    def rows(self, relation: str) -> list[tuple[object, ...]]:
        return self._database.execute(f"SELECT * FROM {relation}").fetchall()

    def keys(self, relation: str) -> set[object]:
        return {row[0] for row in self.rows(relation)}

    def read_touched(self, name: str, keys: str, candidates: Candidates, resync: Sequence[str | None]) -> None:
        def touches(row: Row) -> bool:
            marked = candidates.since and (row.stamp is None or row.stamp >= int(candidates.since))
            return candidates.everything or bool(marked) or row.slice in resync

        self._read(name, {row.key for row in self._source if touches(row)})
        self.define(keys, f"SELECT DISTINCT k0 FROM {name}")

    def read_rows(self, name: str, keys: str) -> None:
        self._read(name, self.keys(keys))

    def _read(self, name: str, keys: set[object]) -> None:
        self.reads.append(name)
        self._table(name, [(row.key, row.slice, row.hash) for row in self._source if row.key in keys])

    def read_keys(self, name: str, slices: Sequence[str | None]) -> None:
        self._table(name, [(row.key, row.slice, None) for row in self._source if row.slice in slices])

    def source_stats(self):
        return stats_of([(row.key, row.slice) for row in self._source])

    def stats(self, relation: str):
        return stats_of(
            [(row[0], row[1]) for row in self._database.execute(f"SELECT k0, slice FROM {relation}").fetchall()]
        )


def stats_of(pairs):
    by_slice = defaultdict(list)
    for key, name in pairs:
        by_slice[name].append(key)
    return {name: (len(keys), checksum(keys)) for name, keys in by_slice.items()}


def bag(rows: Sequence[Row]) -> Counter:
    return Counter((row.key, row.slice, row.value) for row in rows)
