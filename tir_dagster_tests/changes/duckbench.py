"""A workbench over the small warehouse: DuckDB reads the rows that a query shows or groups, SQLite runs the set logic.

SQLite, because it settles a handful of rows in a tenth of the time that DuckDB takes to plan it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from tir_dagster.changes import sets
from tir_dagster.changes.candidates import Candidates
from tir_dagster.changes.find import Stats
from tir_dagster.source.names import quote
from tir_dagster.source.pinned import PinnedSource
from tir_dagster.source.slices import slice_filter_snowflake, slice_sql_snowflake
from tir_dagster_tests.changes.warehouse import Warehouse

Values = tuple[Any, ...]


def plain(values: Iterable[Any]) -> Values:
    """Values as SQLite keeps them: it knows no dates."""
    return tuple(value.isoformat() if isinstance(value, date) else value for value in values)


class DuckBench:
    """Relations of keyed rows; `base` has all rows of the source at its version."""

    def __init__(self, warehouse: Warehouse, source: PinnedSource) -> None:
        self.width, self.groups = len(source.key) or 1, len(source.group)
        self._warehouse, self._source = warehouse, source
        self._sets = sqlite3.connect(":memory:")
        self._columns = sets.row_columns(self.width, self.groups)
        self._read_base()

    def _read_base(self) -> None:
        source = self._source
        listed = [*source.columns, *source.key, *source.group]
        named = ", ".join(quote(column.name) for column in listed)
        sliced = slice_sql_snowflake(source.slices, source.columns)
        rows = self._warehouse.query(f"SELECT {sliced}, {named} FROM {source.sql}")
        shown, keyed = len(source.columns) + 1, len(source.columns) + 1 + len(source.key)
        # Rows of equal hashes are equal in all columns.
        self._shown = {hash_of(row[1:shown]): row[1:shown] for row in rows}
        self.load(
            "base",
            [
                (*(row[shown:keyed] or row[:1]), row[0], hash_of(row[1:shown]), *row[keyed:])
                for row in rows
            ],
        )  # fmt: skip

    def load(self, name: str, rows: Iterable[Sequence[Any]], *, keys_only: bool = False) -> None:
        """Make a relation of rows, or of keys."""
        columns = sets.key_columns(self.width) if keys_only else self._columns
        self._sets.execute(f"DROP TABLE IF EXISTS {name}")
        self._sets.execute(f"CREATE TABLE {name} ({columns})")
        marks = ", ".join("?" for _ in columns.split(","))
        self._sets.executemany(f"INSERT INTO {name} VALUES ({marks})", map(plain, rows))

    # What the product asks for

    def define(self, name: str, sql: str) -> None:
        self._sets.execute(f"DROP TABLE IF EXISTS {name}")
        self._sets.execute(f"CREATE TABLE {name} AS {sql}")

    def count(self, relation: str) -> int:
        return int(self.rows(f"SELECT COUNT(*) FROM {relation}")[0][0])

    def read_touched(self, name: str, keys: str, candidates: Candidates, resync: Sequence[str | None]) -> None:
        if candidates.everything or (candidates.named and not self._source.key):
            self.define(name, "SELECT * FROM base")
            self.define(keys, sets.distinct_keys(name, self.width))
            return
        self.load("named_keys", self._named(candidates.named), keys_only=True)
        present = [*self._present(candidates, resync), *self._named(candidates.differing)]
        self.load("present_keys", present, keys_only=True)
        self.define("candidate_keys", sets.union_keys(["present_keys", "named_keys"], self.width))
        self.read_rows(name, "candidate_keys")
        self.define(keys, sets.union_keys([name, "named_keys"], self.width))

    def _named(self, queries: Sequence[str]) -> set[Values]:
        return {row for query in queries for row in self._warehouse.query(query)}

    def _present(self, candidates: Candidates, resync: Sequence[str | None]) -> list[Values]:
        """Keys of candidates among the rows that are there, as the warehouse finds them."""
        source, tests = self._source, [one.sql for one in candidates.referring]
        if candidates.since is not None and source.watermark is not None:
            mark = quote(source.watermark.name)
            tests += [f"{mark} >= {candidates.since}", f"{mark} IS NULL"]
        if resync:
            tests.append(slice_filter_snowflake(source.slices, source.columns, resync))
        if not tests:
            return []
        keys = [quote(column.name) for column in source.key]
        listed = ", ".join(keys or [slice_sql_snowflake(source.slices, source.columns)])
        return self._warehouse.query(f"SELECT {listed} FROM {source.sql} WHERE {' OR '.join(tests)}")

    def read_keys(self, name: str, slices: Sequence[str | None]) -> None:
        self.define(name, sets.in_slices("base", slices, columns=f"{sets.key_columns(self.width)}, slice"))

    def read_rows(self, name: str, keys: str) -> None:
        same = " AND ".join(f"s.k{at} IS NOT DISTINCT FROM r.k{at}" for at in range(self.width))
        chosen = f"EXISTS (SELECT 1 FROM {keys} s WHERE {same})"
        self.define(name, f"SELECT {self._columns} FROM base r WHERE {chosen}")

    def source_stats(self) -> Stats:
        return self.stats("base")

    def stats(self, relation: str) -> Stats:
        found = self.rows(f"SELECT {sets.key_columns(self.width)}, slice FROM {relation}")
        return stats_of([(row[:-1], row[-1]) for row in found])

    # What came of it

    def rows(self, sql: str) -> list[Values]:
        return self._sets.execute(sql).fetchall()

    def keys(self, relation: str) -> set[Values]:
        return set(self.rows(f"SELECT {sets.key_columns(self.width)} FROM {relation}"))

    def ledger_rows(self, relation: str) -> list[Values]:
        return self.rows(f"SELECT {self._columns} FROM {relation}")

    def shown_rows(self, relation: str) -> list[Values]:
        """The source's rows that the rows of a relation stand for, as often as they are there."""
        return [self._shown[row[0]] for row in self.rows(f"SELECT hash FROM {relation}")]


def hash_of(values: Sequence[Any]) -> int:
    return int.from_bytes(hashlib.md5(repr(values).encode()).digest()[:7], "big")


def stats_of(pairs: Iterable[tuple[Values, str | None]]) -> Stats:
    by_slice: dict[str | None, list[int]] = defaultdict(list)
    for key, name in pairs:
        by_slice[name].append(hash_of(key))
    return {name: (len(keys), sum(keys)) for name, keys in by_slice.items()}
