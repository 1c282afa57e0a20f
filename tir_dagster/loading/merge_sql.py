"""The SQL of each load mode, as text: which keys change, and the change itself. Pure: nothing here runs a statement.

Staged columns are C0, C1, … in the order of `Target.columns`; rows count only if their file is claimed in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tir_dagster.loading.tables import Bookkeeping, Target, stored_value
from tir_dagster.snowflake.columns import Kind
from tir_dagster.snowflake.names import TableName, literal, quote


@dataclass(frozen=True)
class LoadTables:
    """All tables in the statements of one load."""

    target: Target
    books: Bookkeeping
    load_id: str

    @property
    def staged(self) -> TableName:
        return self.books.temporary("STAGED", self.load_id)

    @property
    def rejected(self) -> TableName:
        return self.books.temporary("REJECTED", self.load_id)

    @property
    def files(self) -> TableName:
        return self.books.temporary("FILES", self.load_id)

    @property
    def changed(self) -> TableName:
        return self.books.temporary("CHANGED", self.load_id)

    @property
    def timeline(self) -> TableName:
        return self.books.temporary("TIMELINE", self.load_id)

    @property
    def graves(self) -> TableName:
        return self.books.graves(self.target.grave())

    @property
    def columns(self) -> list[str]:
        return [f"C{at}" for at in range(len(self.target.columns))]

    @property
    def keys(self) -> list[str]:
        return [f"C{at}" for at in self.target.key]


def rejecting_duplicates(tables: LoadTables, *, together: bool) -> tuple[str, str]:
    """Return the statements that reject rows whose key is repeated in their file, or in all files together."""
    within = tables.keys if together else ["FILE_NO", *tables.keys]
    keys = ", ".join(within)
    repeated = f"SELECT {keys} FROM {tables.staged.sql} GROUP BY {keys} HAVING COUNT(*) > 1"
    same = " AND ".join(f"s.{name} = d.{name}" for name in within)
    key_text = " || ', ' || ".join(f"TO_VARCHAR(s.{name})" for name in tables.keys)
    key_names = ", ".join(tables.target.name(place) for place in tables.target.key)
    where = "folder" if together else "file"
    reason = f"{literal(f'key {key_names} = ')} || {key_text} || {literal(f' is more than once in the {where}')}"
    return (
        (
            f"INSERT INTO {tables.rejected.sql} (FILE_NO, LINE_NO, REASON, ROW_TEXT) "
            f"SELECT s.FILE_NO, s.LINE_NO, {reason}, NULL FROM {tables.staged.sql} s JOIN ({repeated}) d ON {same}"
        ),
        f"DELETE FROM {tables.staged.sql} s USING ({repeated}) d WHERE {same}",
    )


def claim(tables: LoadTables) -> str:
    """Return the statement that claims the files in the ledger; its row count shows how many were not claimed before."""
    names = ("TARGET", "LOAD", "LOAD_ID", "PATH", "SEQ", "FILE_NO", "STAMP", "DIGEST", "ORDER_KEY", "STATUS", "BYTES")
    counts = ("ROWS_LOADED", "ROWS_REJECTED")
    listed = ", ".join([*names, *counts, "LOADED_AT"])
    values = ", ".join([*(f"f.{name}" for name in (*names, *counts)), "CURRENT_TIMESTAMP()::TIMESTAMP_TZ"])
    return (
        f"MERGE INTO {tables.books.ledger.sql} l USING {tables.files.sql} f "
        "ON l.TARGET = f.TARGET AND l.PATH = f.PATH AND l.SEQ = f.SEQ "
        f"WHEN NOT MATCHED THEN INSERT ({listed}) VALUES ({values})"
    )


def rejects(tables: LoadTables) -> str:
    """Return the statement that stores the rejected rows of claimed files."""
    return (
        f"INSERT INTO {tables.books.rejects.sql} (LOAD, LOAD_ID, PATH, LINE, REASON, ROW_TEXT, REJECTED_AT) "
        f"SELECT l.LOAD, l.LOAD_ID, l.PATH, r.LINE_NO, r.REASON, r.ROW_TEXT, CURRENT_TIMESTAMP()::TIMESTAMP_TZ "
        f"FROM {tables.rejected.sql} r JOIN {tables.books.ledger.sql} l ON {_claimed(tables, 'r')}"
    )


def _claimed(tables: LoadTables, alias: str) -> str:
    return f"l.LOAD_ID = {literal(tables.load_id)} AND l.FILE_NO = {alias}.FILE_NO"


def incoming(tables: LoadTables, *, newest: Sequence[str] = ()) -> str:
    """Return the SELECT of the rows of claimed files; of rows with equal `newest` columns only the last one."""
    listed = ", ".join(f"s.{name}" for name in ("FILE_NO", "LINE_NO", "IS_DELETED", *tables.columns))
    rows = f"SELECT {listed} FROM {tables.staged.sql} s JOIN {tables.books.ledger.sql} l ON {_claimed(tables, 's')}"
    if not newest:
        return rows
    order = tables.target.order
    by = [*([f"s.C{order} DESC"] if order is not None else []), "s.FILE_NO DESC", "s.LINE_NO DESC"]
    parts = ", ".join(f"s.{name}" for name in newest)
    return f"{rows} QUALIFY ROW_NUMBER() OVER (PARTITION BY {parts} ORDER BY {', '.join(by)}) = 1"


def stored_names(target: Target) -> str:
    return ", ".join(quote(target.name(place)) for place in target.stored)


def stored_values(target: Target, alias: str) -> str:
    return ", ".join(stored_value(target.columns[place], f"{alias}.C{place}") for place in target.stored)


def assignments(target: Target, alias: str) -> str:
    """Return the assignments of an update: every stored column that is no key."""
    return ", ".join(
        f"{quote(target.name(place))} = {stored_value(target.columns[place], f'{alias}.C{place}')}"
        for place in target.stored
        if place not in target.key
    )


def same_key(target: Target, left: str, right: str) -> str:
    return " AND ".join(f"{left}.{quote(target.name(place))} = {right}.C{place}" for place in target.key)


def differs(target: Target, left: str, right: str) -> str:
    """Return the condition that any stored column except the key differs; NULL counts as a value."""
    places = [place for place in target.stored if place not in target.key]
    tests = [
        f"{_compared(target, place, f'{left}.{quote(target.name(place))}')} IS DISTINCT FROM "
        f"{_compared(target, place, stored_value(target.columns[place], f'{right}.C{place}'))}"
        for place in places
    ]
    return f"({' OR '.join(tests)})" if tests else "FALSE"


def _compared(target: Target, place: int, expression: str) -> str:
    """Return the expression to compare: JSON by its text, because Snowflake does not compare objects."""
    return f"TO_JSON({expression})" if target.columns[place].column.kind is Kind.JSON else expression


def append(tables: LoadTables) -> list[str]:
    target = tables.target
    return [
        (
            f"INSERT INTO {target.table.sql} ({stored_names(target)}) "
            f"SELECT {stored_values(target, 's')} FROM ({incoming(tables)}) s"
        )
    ]


def appended_keys(tables: LoadTables) -> str:
    listed = ", ".join(f"s.{name}" for name in tables.keys)
    return f"INSERT INTO {tables.changed.sql} (ACTION, {', '.join(tables.keys)}) SELECT DISTINCT 'I', {listed} FROM ({incoming(tables)}) s"


def replaced_keys(tables: LoadTables) -> str:
    """Return the statement that lists the keys which a new content of the whole table changes."""
    target = tables.target
    keys = ", ".join(f"COALESCE(s.C{place}, t.{quote(target.name(place))})" for place in target.key)
    first = target.key[0]
    gone, new = f"s.C{first} IS NULL", f"t.{quote(target.name(first))} IS NULL"
    parts = ", ".join(f"s.{name}" for name in tables.keys)
    return (
        f"INSERT INTO {tables.changed.sql} (ACTION, {', '.join(tables.keys)}) "
        f"SELECT DISTINCT CASE WHEN {gone} THEN 'D' WHEN {new} THEN 'I' ELSE 'U' END, {keys} "
        f"FROM ({incoming(tables, newest=tables.keys)}) s FULL OUTER JOIN {target.table.sql} t "
        # The content has each key once; a table that has it more often differs, though each of its rows is the same.
        f"ON {same_key(target, 't', 's')} QUALIFY {gone} OR {new} OR {differs(target, 't', 's')} "
        f"OR COUNT(*) OVER (PARTITION BY {parts}) > 1"
    )


def replace(tables: LoadTables) -> list[str]:
    """Return the statements that replace all rows in one transaction; TRUNCATE would commit it."""
    target = tables.target
    return [
        f"DELETE FROM {target.table.sql}",
        (
            f"INSERT INTO {target.table.sql} ({stored_names(target)}) "
            f"SELECT {stored_values(target, 's')} FROM ({incoming(tables, newest=tables.keys)}) s"
        ),
    ]


def merged_rows(tables: LoadTables, *, graves: bool) -> str:
    """Return the statement that lists the rows to write: not older than the stored or deleted row, and different."""
    target, stored_key = tables.target, f"t.{quote(tables.target.name(tables.target.key[0]))}"
    columns = ", ".join(f"s.{name}" for name in tables.columns)
    tests = [
        f"({stored_key} IS NOT NULL OR NOT s.IS_DELETED)",
        f"(s.IS_DELETED OR {stored_key} IS NULL OR {differs(target, 't', 's')})",
    ]
    joined = ""
    if target.order is not None:
        tests.append(f"({stored_key} IS NULL OR {_not_older(target, 's')})")
        if graves:
            joined = f"LEFT JOIN {tables.graves.sql} g ON {same_key(target, 'g', 's')}"
            deleted_at = f"g.{quote(target.name(target.order))}"
            tests.append(f"({deleted_at} IS NULL OR s.C{target.order} >= {deleted_at})")
    parts = ", ".join(f"s.{name}" for name in tables.keys)
    return (
        f"INSERT INTO {tables.changed.sql} (ACTION, {', '.join(tables.columns)}) "
        f"SELECT CASE WHEN s.IS_DELETED THEN 'D' WHEN {stored_key} IS NULL THEN 'I' ELSE 'U' END, {columns} "
        f"FROM ({incoming(tables, newest=tables.keys)}) s "
        f"LEFT JOIN {target.table.sql} t ON {same_key(target, 't', 's')} {joined} "
        # A table that has a key twice gets one change for it.
        f"WHERE {' AND '.join(tests)} QUALIFY ROW_NUMBER() OVER (PARTITION BY {parts} ORDER BY {parts}) = 1"
    )


def _not_older(target: Target, alias: str) -> str:
    """Return the condition that the incoming version is not older than the stored one."""
    current = f"t.{quote(target.name(target.order or 0))}"
    return f"{current} IS NULL OR {alias}.C{target.order} >= {current}"


def merge(tables: LoadTables, *, graves: bool) -> list[str]:
    target = tables.target
    changes = assignments(target, "c")
    # Checked again: somebody else may have written a newer version meanwhile.
    newer = "" if target.order is None else f" AND ({_not_older(target, 'c')})"
    update = f"WHEN MATCHED AND c.ACTION = 'U'{newer} THEN UPDATE SET {changes} " if changes else ""
    statements = [
        (
            f"MERGE INTO {target.table.sql} t USING {tables.changed.sql} c ON {same_key(target, 't', 'c')} "
            f"WHEN MATCHED AND c.ACTION = 'D'{newer} THEN DELETE {update}"
            f"WHEN NOT MATCHED AND c.ACTION = 'I' THEN INSERT ({stored_names(target)}) VALUES ({stored_values(target, 'c')})"
        )
    ]
    return [*statements, _bury(tables)] if graves and target.flag is not None else statements


def _bury(tables: LoadTables) -> str:
    """Return the statement that records the newest deletion of each key: a late older version must not restore it."""
    target = tables.target
    assert target.order is not None
    order = quote(target.name(target.order))
    names = ", ".join([*(quote(target.name(place)) for place in target.key), order])
    values = ", ".join(f"s.C{place}" for place in (*target.key, target.order))
    return (
        f"MERGE INTO {tables.graves.sql} g USING "
        f"(SELECT * FROM ({incoming(tables, newest=tables.keys)}) WHERE IS_DELETED) s ON {same_key(target, 'g', 's')} "
        f"WHEN MATCHED AND s.C{target.order} > g.{order} THEN UPDATE SET {order} = s.C{target.order} "
        f"WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({values})"
    )


def grave_columns(target: Target) -> str:
    """Return the SELECT from which the table of deleted keys takes its types."""
    assert target.order is not None
    listed = [quote(target.name(place)) for place in target.key]
    order = quote(target.history[0]) if target.history else quote(target.name(target.order))
    return (
        f"SELECT {', '.join(listed)}, {order} AS {quote(target.name(target.order))} FROM {target.table.sql} WHERE 1 = 0"
    )
