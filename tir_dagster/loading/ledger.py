"""What the warehouse remembers of a load: files, rejected rows, loads and the keys they changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal

from tir_dagster.errors import LoadError
from tir_dagster.loading.choosing import Known
from tir_dagster.loading.merging import Places, grave_columns
from tir_dagster.loading.tables import LEDGER_COLUMNS, LOADS_COLUMNS, REJECTS_COLUMNS, Bookkeeping, Target, create
from tir_dagster.source.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.source.names import literal

Run = Callable[..., list[tuple[Any, ...]]]
ChangeKind = Literal["ADD_ROWS", "UPDATE_ROWS", "REMOVE_ROWS", "MIXED_CHANGES"]
# More keys are told as "many": a list of them would cost more than looking for them.
MOST_KEYS = 10_000
_KINDS: dict[str, ChangeKind] = {"I": "ADD_ROWS", "U": "UPDATE_ROWS", "D": "REMOVE_ROWS"}


@dataclass(frozen=True)
class Changed:
    """Which rows a load changed: the values of the key columns, or None when they are too many or there is no key."""

    kind: ChangeKind
    columns: tuple[str, ...] = ()
    keys: tuple[tuple[Any, ...], ...] | None = None

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "columns": self.columns, "keys": self.keys}, default=_plain)

    @staticmethod
    def from_json(text: str) -> Changed:
        read = json.loads(text)
        keys = read["keys"]
        return Changed(
            read["kind"], tuple(read["columns"]), None if keys is None else tuple(tuple(key) for key in keys)
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else str(value)
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    raise TypeError(f"a key of {type(value).__name__}")


@dataclass(frozen=True)
class Committed:
    """A load that is in the table."""

    load_id: str
    files: int
    rows: int
    rejected: int
    inserted: int
    updated: int
    deleted: int
    changed: Changed | None


@dataclass(frozen=True)
class Ledger:
    """The newest entry of every path, and the largest order key loaded; `exists` if anything was ever loaded."""

    known: dict[str, Known]
    newest: str | None = None
    exists: bool = True


def read_ledger(access: SnowflakeAccess, books: Bookkeeping) -> Ledger:
    query = (
        f"SELECT PATH, SEQ, STAMP, DIGEST, ORDER_KEY, STATUS FROM {books.ledger.sql} "
        f"WHERE LOAD = {literal(books.load)} ORDER BY SEQ"
    )
    try:
        rows = access.query(query)
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        return Ledger({}, exists=False)
    known = {str(path): Known(int(seq) + 1, stamp, digest) for path, seq, stamp, digest, _, _ in rows}
    return Ledger(known, max((row[4] for row in rows if row[5] == "LOADED"), default=None))


def prepare(run: Run, books: Bookkeeping, target: Target, *, exists: bool, graves: bool) -> None:
    """Make the tables and the stage that are not there yet; DDL, so never inside a load's transaction."""
    if graves:
        run(f"CREATE TABLE IF NOT EXISTS {books.graves.sql} AS {grave_columns(target)}")
    if not exists:
        run(create(books.loads, LOADS_COLUMNS))
        run(create(books.rejects, REJECTS_COLUMNS))
        run(f"CREATE STAGE IF NOT EXISTS {books.stage.sql}")
        # The last one: where it is, the others are.
        run(create(books.ledger, LEDGER_COLUMNS))


def changed_keys(run: Run, places: Places) -> Changed | None:
    """What the transaction has found to change; None if nothing."""
    target = places.target
    actions = [str(row[0]) for row in run(f"SELECT DISTINCT ACTION FROM {places.changed.sql}")]
    if not actions:
        return None
    kind = _KINDS[actions[0]] if len(actions) == 1 and target.history is None else "MIXED_CHANGES"
    keys = ", ".join(places.keys)
    found = run(f"SELECT DISTINCT {keys} FROM {places.changed.sql} ORDER BY {keys} LIMIT {MOST_KEYS + 1}")
    columns = tuple(target.name(place) for place in target.key)
    return Changed(kind, columns, tuple(tuple(row) for row in found) if len(found) <= MOST_KEYS else None)


def remember(run: Run, places: Places, mode: str, done: Committed) -> None:
    """The load itself, in its own transaction."""
    texts = [places.books.load, done.load_id, str(places.target.table), mode]
    counts = [done.files, done.rows, done.rejected, done.inserted, done.updated, done.deleted]
    changed = done.changed.to_json() if done.changed else None
    run(
        f"INSERT INTO {places.books.loads.sql} ({', '.join(LOADS_COLUMNS)}) SELECT "
        f"{', '.join(['%s'] * (len(texts) + len(counts) + 1))}, CURRENT_TIMESTAMP()::TIMESTAMP_TZ",
        [*texts, *counts, changed],
    )


def committed(
    access: SnowflakeAccess, books: Bookkeeping, *, since: str = "", only: str | None = None
) -> list[Committed]:
    """The loads after this one, the oldest first; or only this one, if it is there."""
    test = f"LOAD_ID = {literal(only)}" if only else f"LOAD_ID > {literal(since)}"
    listed = "LOAD_ID, FILES, ROWS_READ, ROWS_REJECTED, ROWS_INSERTED, ROWS_UPDATED, ROWS_DELETED, CHANGED"
    query = f"SELECT {listed} FROM {books.loads.sql} WHERE LOAD = {literal(books.load)} AND {test} ORDER BY LOAD_ID"
    try:
        rows = access.query(query)
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        return []
    return [_committed(row) for row in rows]


def _committed(row: Sequence[Any]) -> Committed:
    files, read, rejected, inserted, updated, deleted = (int(count) for count in row[1:7])
    changed = Changed.from_json(row[7]) if row[7] else None
    return Committed(str(row[0]), files, read, rejected, inserted, updated, deleted, changed)


def check_claimed(claimed: int, expected: int, load: str) -> None:
    if claimed != expected:
        raise LoadError(
            f"{load}: another load took {expected - claimed} of {expected} files at the same time. "
            "Nothing was loaded twice; run again."
        )
