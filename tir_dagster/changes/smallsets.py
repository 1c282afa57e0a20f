"""Small relations in the driver: the few thousand keys of a usual change are settled in SQLite, without a Spark job each.

Integers and texts are kept as they are; any other key as the text that key checksums are made of, one text per value,
so that equality is Spark's.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from tir_dagster.changes.find import Stats
from tir_dagster.source.columns import Column, Kind

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DIGITS = str.maketrans("abcdef", "012345")

_PLAIN = frozenset({Kind.INTEGER, Kind.TEXT})

# k0, k1, …, slice, hash; the hash is NULL where only keys were read.
KeyedRow = tuple[Any, ...]


class SmallSets:
    """Relations of keyed rows in memory."""

    def __init__(self, key: Sequence[Column]) -> None:
        self._key = tuple(key)
        self._width = len(self._key) or 1
        self._plain = all(column.kind in _PLAIN for column in self._key)
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self.names: set[str] = set()

    def close(self) -> None:
        self._database.close()

    def put(self, name: str, rows: Iterable[KeyedRow]) -> None:
        """Keep rows as Spark gives them."""
        columns = ", ".join([*(f"k{at}" for at in range(self._width)), "slice", "hash"])
        self._drop(name)
        self._database.execute(f"CREATE TABLE {name} ({columns})")
        marks = ", ".join("?" * (self._width + 2))
        kept = rows if self._plain else ((*self._texts(row), *row[self._width :]) for row in rows)
        self._database.executemany(f"INSERT INTO {name} VALUES ({marks})", kept)
        self._ready(name)

    def define(self, name: str, sql: str) -> None:
        self._drop(name)
        self._database.execute(f"CREATE TABLE {name} AS {sql}")
        self._ready(name)

    def show(self, name: str, sql: str) -> None:
        """Give a query a name without computing it: for relations as large as the ledger that are used once."""
        self._drop(name)
        self._database.execute(f"CREATE VIEW {name} AS {sql}")
        self.names.add(name)

    def _ready(self, name: str) -> None:
        """With an index: without one, every key of one relation would be compared with every key of the other."""
        listed = ", ".join(f"k{at}" for at in range(self._width))
        self._database.execute(f"CREATE INDEX {name}_keys ON {name} ({listed})")
        self.names.add(name)

    def _drop(self, name: str) -> None:
        for kind in ("TABLE", "VIEW"):
            if self.rows(f"SELECT 1 FROM sqlite_master WHERE name = '{name}' AND type = '{kind.lower()}'"):
                self._database.execute(f"DROP {kind} {name}")
        self.names.discard(name)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._database.execute(sql).fetchall()

    def count(self, name: str) -> int:
        return int(self.rows(f"SELECT COUNT(*) FROM {name}")[0][0])

    def columns(self, name: str) -> list[str]:
        return [row[1] for row in self.rows(f"PRAGMA table_info({name})")]

    def keys(self, name: str) -> list[tuple[Any, ...]]:
        """The keys of a relation, as values of their columns."""
        listed = ", ".join(f"k{at}" for at in range(self._width))
        return list(self.valued(self.rows(f"SELECT {listed} FROM {name}")))

    def valued(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        """Rows with their keys as values of the key columns; what follows the key stays as it is."""
        return rows if self._plain else ((*self._values(row), *row[self._width :]) for row in rows)

    def stats(self, name: str) -> Stats:
        """Rows and key checksum by slice: the numbers that Snowflake and Spark give for the same keys."""
        listed = ", ".join(f"k{at}" for at in range(self._width))
        found: dict[str | None, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for *texts, slice_name in self.rows(f"SELECT {listed}, slice FROM {name}"):
            rows, checksum = found[slice_name]
            found[slice_name] = (rows + 1, checksum + (key_number(texts, self._key) if self._key else 0))
        return dict(found)

    def _values(self, row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(_value(kept, column) for kept, column in zip(row, self._key, strict=False))

    def _texts(self, row: KeyedRow) -> tuple[Any, ...]:
        return tuple(_kept(value, column) for value, column in zip(row, self._key, strict=False))


def _kept(value: Any, column: Column) -> Any:
    return value if column.kind in _PLAIN else key_text(value, column)


def key_number(texts: Sequence[Any], key: Sequence[Column]) -> int:
    """One key as a number: see `source.keychecks`, whose SQL gives the same."""
    parts = (_escaped(text, column) for text, column in zip(texts, key, strict=True))
    digest = hashlib.md5("|".join(parts).encode()).hexdigest()
    return int(digest.translate(_DIGITS)[:18])


def _escaped(text: Any, column: Column) -> str:
    if text is None:
        return "~"
    if column.kind is Kind.INTEGER:
        return str(text)
    if column.kind is Kind.TIME:
        moment = time.fromisoformat(text)
        seconds = (moment.hour * 60 + moment.minute) * 60 + moment.second
        return str(seconds * 1_000_000 + moment.microsecond)
    return str(text).replace("~", "~0").replace("|", "~1") if column.kind is Kind.TEXT else text


def key_text(value: Any, column: Column) -> str | None:
    """A key value as one text; values that are equal have one text."""
    if value is None:
        return None
    match column.kind:
        case Kind.BOOLEAN:
            return "true" if value else "false"
        case Kind.TIMESTAMP:
            return str((value.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND)
        case Kind.INSTANT:
            # Spark gives a moment as local time without a zone.
            return str((value.astimezone(UTC) - _EPOCH) // _MICROSECOND)
        case Kind.DECIMAL:
            return str(Decimal(value).quantize(Decimal(1).scaleb(-column.scale)))
    return value.isoformat() if isinstance(value, date) else str(value)


def _value(text: Any, column: Column) -> Any:
    if text is None:
        return None
    match column.kind:
        case Kind.DECIMAL:
            return Decimal(text)
        case Kind.BOOLEAN:
            return text == "true"
        case Kind.DATE:
            return date.fromisoformat(text)
        case Kind.TIMESTAMP:
            return (_EPOCH + int(text) * _MICROSECOND).replace(tzinfo=None)
        case Kind.INSTANT:
            return _EPOCH + int(text) * _MICROSECOND
    return text
