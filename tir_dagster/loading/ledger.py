"""The records of loads in the warehouse: files, rejected rows, loads and the keys they changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Literal

from tir_dagster.loading.merge_sql import grave_columns
from tir_dagster.loading.selection import Known
from tir_dagster.loading.tables import (
    LEDGER_COLUMNS,
    LOADS_COLUMNS,
    REJECTS_COLUMNS,
    Bookkeeping,
    LoadTables,
    Target,
    create,
)
from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, literal

Run = Callable[..., list[tuple[Any, ...]]]
ChangeKind = Literal["ADD_ROWS", "UPDATE_ROWS", "REMOVE_ROWS", "MIXED_CHANGES"]
# More keys are not listed: the list would cost more than detecting them again.
MOST_KEYS = 10_000
# Long keys count by their text: Snowflake takes statements of up to a million bytes.
MOST_KEY_BYTES = 400_000
_KINDS: dict[str, ChangeKind] = {"I": "ADD_ROWS", "U": "UPDATE_ROWS", "D": "REMOVE_ROWS"}


@dataclass(frozen=True)
class Changed:
    """The rows that a load changed: the values of the key columns, or None if there are too many or there is no key."""

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

    load_id: str = ""
    rows: int = 0
    rejected: int = 0
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    changed: Changed | None = None


@dataclass(frozen=True)
class Ledger:
    """The newest entry of every path that came into the table, whichever load brought it.

    `newest` is the largest order key loaded from this load's place; `exists` if anything was ever loaded.
    """

    known: dict[str, Known]
    newest: str | None = None
    exists: bool = True


def read_ledger(access: SnowflakeAccess, books: Bookkeeping, *, below: str) -> Ledger:
    """Read the ledger of the load's table; `below` is the beginning of the paths of the load's own place."""
    columns, table = "PATH, SEQ, STAMP, DIGEST, ORDER_KEY, STATUS", literal(str(books.table))
    try:
        rows = access.query(f"SELECT {columns} FROM {books.ledger.sql} WHERE TARGET = {table} ORDER BY SEQ")
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        return Ledger({}, exists=False)
    known = {str(path): Known(int(seq) + 1, stamp, digest) for path, seq, stamp, digest, _, _ in rows}
    own_rows = [row for row in rows if row[5] == "LOADED" and str(row[0]).startswith(below)]
    return Ledger(known, max((row[4] for row in own_rows), default=None))


def newest_loaded(run: Run, tables: LoadTables, *, below: str) -> str | None:
    """Return the largest order key that other loads have loaded by now; call it inside the transaction."""
    rows = run(
        f"SELECT MAX(ORDER_KEY) FROM {tables.books.ledger.sql} WHERE TARGET = {literal(str(tables.books.table))} "
        f"AND STATUS = 'LOADED' AND STARTSWITH(PATH, {literal(below)}) AND LOAD_ID <> {literal(tables.load_id)}"
    )
    return None if rows[0][0] is None else str(rows[0][0])


def prepare(run: Run, books: Bookkeeping, target: Target, *, exists: bool, graves: bool) -> None:
    """Create the missing tables and the stage; this is DDL, so never inside a load's transaction."""
    if graves:
        run(f"CREATE TABLE IF NOT EXISTS {books.graves(target.grave).sql} AS {grave_columns(target)}")
    if not exists:
        run(create(books.loads, LOADS_COLUMNS))
        run(create(books.rejects, REJECTS_COLUMNS))
        run(f"CREATE STAGE IF NOT EXISTS {books.stage.sql}")
        # Last: if it exists, the others exist, too.
        run(create(books.ledger, LEDGER_COLUMNS))


def count_actions(run: Run, tables: LoadTables) -> dict[str, int]:
    """Return how many keys are to be inserted, updated and deleted: I, U, D."""
    rows = run(f"SELECT ACTION, COUNT(*) FROM {tables.changed.sql} GROUP BY ACTION")
    return {str(action): int(count) for action, count in rows}


def changed_keys(run: Run, tables: LoadTables, actions: Mapping[str, int]) -> Changed | None:
    """Return the keys that are to change; None if there are none."""
    target = tables.target
    if not actions:
        return None
    kind = _KINDS[next(iter(actions))] if len(actions) == 1 and target.history is None else "MIXED_CHANGES"
    keys = ", ".join(tables.keys)
    rows = run(f"SELECT DISTINCT {keys} FROM {tables.changed.sql} ORDER BY {keys} LIMIT {MOST_KEYS + 1}")
    columns = tuple(target.name(place) for place in target.key)
    return listable(Changed(kind, columns, tuple(tuple(row) for row in rows)))


def listable(changed: Changed) -> Changed:
    """Return the change with its keys, or without them if there are too many to list."""
    few = changed.keys is not None and len(changed.keys) <= MOST_KEYS
    return changed if few and len(changed.to_json().encode()) <= MOST_KEY_BYTES else replace(changed, keys=None)


def record_load(run: Run, tables: LoadTables, mode: str, done: Committed, *, files: int) -> None:
    """Record the load, inside its own transaction."""
    texts = [tables.books.load, done.load_id, str(tables.target.table), mode]
    counts = [files, done.rows, done.rejected, done.inserted, done.updated, done.deleted]
    values = [*texts, *counts, done.changed.to_json() if done.changed else None]
    run(
        f"INSERT INTO {beside_values(tables.books.loads)} ({', '.join(LOADS_COLUMNS)}) SELECT "
        f"{', '.join(['%s'] * len(values))}, CURRENT_TIMESTAMP()::TIMESTAMP_TZ",
        values,
    )


def beside_values(table: TableName) -> str:
    """Return the table's name for a statement with values, where the connector reads `%` as a placeholder."""
    return table.sql.replace("%", "%%")


def recent(access: SnowflakeAccess, books: Bookkeeping, *, most: int) -> list[str]:
    """Return the ids of the newest loads in the order of their commits, by the warehouse's clock."""
    rows = _loads(access, books, "LOAD_ID", f"ORDER BY LOADED_AT DESC, LOAD_ID DESC LIMIT {most}")
    return [str(row[0]) for row in reversed(rows)]


def committed(access: SnowflakeAccess, books: Bookkeeping, ids: Sequence[str]) -> list[Committed]:
    """Return those of these loads that were committed, in the order of their commits."""
    if not ids:
        return []
    columns = "LOAD_ID, ROWS_READ, ROWS_REJECTED, ROWS_INSERTED, ROWS_UPDATED, ROWS_DELETED, CHANGED"
    test = f"AND LOAD_ID IN ({', '.join(map(literal, ids))}) ORDER BY LOADED_AT, LOAD_ID"
    return [
        replace(Committed(*row), changed=Changed.from_json(row[-1]) if row[-1] else None)
        for row in _loads(access, books, columns, test)
    ]


def _loads(access: SnowflakeAccess, books: Bookkeeping, columns: str, test: str) -> list[tuple[Any, ...]]:
    """Query this load's records; there are none before the first load."""
    where = f"LOAD = {literal(books.load)} AND TARGET = {literal(str(books.table))}"
    try:
        return access.query(f"SELECT {columns} FROM {books.loads.sql} WHERE {where} {test}")
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        return []
