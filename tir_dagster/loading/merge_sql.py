"""The SQL of each load mode, as text: which keys change, and the change itself. Pure: nothing here runs a statement.

Staged columns are C0, C1, … in the order of `Target.columns`; rows count only if their file is claimed in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tir_dagster.loading.tables import LEDGER_COLUMNS, LoadTables, Target, stored_value
from tir_dagster.snowflake.columns import Kind
from tir_dagster.snowflake.names import literal, quote


def listed(alias: str, names: Iterable[str]) -> str:
    """Return the columns as a list, each with the table's alias."""
    return ", ".join(f"{alias}.{name}" for name in names)


def repeated_key_reason(target: Target, *, together: bool) -> tuple[str, str]:
    """Return the reason for rejecting a repeated key: its text before and after the key's values."""
    names = ", ".join(target.name(place) for place in target.key)
    return f"key {names} = ", f" is more than once in the {'folder' if together else 'file'}"


def rejecting_duplicates(tables: LoadTables, *, together: bool) -> tuple[str, str]:
    """Return the statements that reject rows whose key is repeated in their file, or in all files together."""
    within = tables.keys if together else ["FILE_NO", *tables.keys]
    keys = ", ".join(within)
    repeated = f"SELECT {keys} FROM {tables.staged.sql} GROUP BY {keys} HAVING COUNT(*) > 1"
    same = " AND ".join(f"s.{name} = d.{name}" for name in within)
    key_text = " || ', ' || ".join(f"TO_VARCHAR(s.{name})" for name in tables.keys)
    begin, end = repeated_key_reason(tables.target, together=together)
    reason = f"{literal(begin)} || {key_text} || {literal(end)}"
    return (
        (
            f"INSERT INTO {tables.rejected.sql} (FILE_NO, LINE_NO, REASON, ROW_TEXT) "
            f"SELECT s.FILE_NO, s.LINE_NO, {reason}, NULL FROM {tables.staged.sql} s JOIN ({repeated}) d ON {same}"
        ),
        f"DELETE FROM {tables.staged.sql} s USING ({repeated}) d WHERE {same}",
    )


def claim(tables: LoadTables) -> str:
    """Return the statement that claims the files in the ledger; its row count shows how many were not claimed before."""
    names = [name for name in LEDGER_COLUMNS if name != "LOADED_AT"]
    return (
        f"MERGE INTO {tables.books.ledger.sql} l USING {tables.files.sql} f "
        "ON l.TARGET = f.TARGET AND l.PATH = f.PATH AND l.SEQ = f.SEQ "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(names)}, LOADED_AT) "
        f"VALUES ({listed('f', names)}, CURRENT_TIMESTAMP()::TIMESTAMP_TZ)"
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
    columns = listed("s", ("FILE_NO", "LINE_NO", "IS_DELETED", *tables.columns))
    rows = f"SELECT {columns} FROM {tables.staged.sql} s JOIN {tables.books.ledger.sql} l ON {_claimed(tables, 's')}"
    if not newest:
        return rows
    order = tables.target.order
    by = [*([f"s.C{order} DESC"] if order is not None else []), "s.FILE_NO DESC", "s.LINE_NO DESC"]
    return f"{rows} QUALIFY ROW_NUMBER() OVER (PARTITION BY {listed('s', newest)} ORDER BY {', '.join(by)}) = 1"


def stored_names(target: Target) -> str:
    return ", ".join(quote(target.name(place)) for place in target.stored)


def stored_values(target: Target, alias: str) -> str:
    return ", ".join(stored_value(target.columns[place], f"{alias}.C{place}") for place in target.stored)


def assignments(target: Target, alias: str) -> str:
    """Return the assignments of an update: every stored column that is no key, or the key if there is no other."""
    places = [place for place in target.stored if place not in target.key] or target.key
    return ", ".join(
        f"{quote(target.name(place))} = {stored_value(target.columns[place], f'{alias}.C{place}')}" for place in places
    )


def same_key(target: Target, left: str, right: str) -> str:
    return " AND ".join(f"{left}.{quote(target.name(place))} = {right}.C{place}" for place in target.key)


def differs(target: Target, left: str, right: str) -> str:
    """Return the condition that any stored column except the key differs; NULL counts as a value."""

    def compared(place: int, expression: str) -> str:
        # JSON by its text, because Snowflake does not compare objects.
        return f"TO_JSON({expression})" if target.columns[place].column.kind is Kind.JSON else expression

    tests = [
        f"{compared(place, f'{left}.{quote(target.name(place))}')} IS DISTINCT FROM "
        f"{compared(place, stored_value(target.columns[place], f'{right}.C{place}'))}"
        for place in target.stored
        if place not in target.key
    ]
    return f"({' OR '.join(tests)})" if tests else "FALSE"


def insert(tables: LoadTables, *, newest: Sequence[str] = ()) -> str:
    """Return the statement that adds the rows of claimed files; of rows with equal `newest` columns only the last one."""
    target = tables.target
    return (
        f"INSERT INTO {target.table.sql} ({stored_names(target)}) "
        f"SELECT {stored_values(target, 's')} FROM ({incoming(tables, newest=newest)}) s"
    )


def note_changes(tables: LoadTables, columns: Sequence[str]) -> str:
    """Return the beginning of a statement that lists changes by their action and these columns."""
    return f"INSERT INTO {tables.changed.sql} (ACTION, {', '.join(columns)})"


def appended_keys(tables: LoadTables) -> str:
    keys = listed("s", tables.keys)
    return f"{note_changes(tables, tables.keys)} SELECT DISTINCT 'I', {keys} FROM ({incoming(tables)}) s"


def replaced_keys(tables: LoadTables) -> str:
    """Return the statement that lists the keys which a new content of the whole table changes."""
    target = tables.target
    keys = ", ".join(f"COALESCE(s.C{place}, t.{quote(target.name(place))})" for place in target.key)
    first = target.key[0]
    removed, new = f"s.C{first} IS NULL", f"t.{quote(target.name(first))} IS NULL"
    return (
        f"{note_changes(tables, tables.keys)} "
        f"SELECT DISTINCT CASE WHEN {removed} THEN 'D' WHEN {new} THEN 'I' ELSE 'U' END, {keys} "
        f"FROM ({incoming(tables, newest=tables.keys)}) s FULL OUTER JOIN {target.table.sql} t "
        # The content has each key once; a table that has it more often differs, though each of its rows is the same.
        f"ON {same_key(target, 't', 's')} QUALIFY {removed} OR {new} OR {differs(target, 't', 's')} "
        f"OR COUNT(*) OVER (PARTITION BY {listed('s', tables.keys)}) > 1"
    )


def replace(tables: LoadTables) -> tuple[str, str]:
    """Return the statements that replace all rows in one transaction; TRUNCATE would commit it."""
    return f"DELETE FROM {tables.target.table.sql}", insert(tables, newest=tables.keys)


def merged_rows(tables: LoadTables) -> str:
    """Return the statement that lists the rows to write: not older than the stored or deleted row, and different."""
    target, stored_key = tables.target, f"t.{quote(tables.target.name(tables.target.key[0]))}"
    tests = [
        f"({stored_key} IS NOT NULL OR NOT s.IS_DELETED)",
        f"(s.IS_DELETED OR {stored_key} IS NULL OR {differs(target, 't', 's')})",
    ]
    joined = ""
    if target.order is not None:
        joined = f"LEFT JOIN {tables.graves.sql} g ON {same_key(target, 'g', 's')}"
        deleted_at = f"g.{quote(target.name(target.order))}"
        tests.append(f"({stored_key} IS NULL OR {_not_older(target, 's')})")
        tests.append(f"({deleted_at} IS NULL OR s.C{target.order} >= {deleted_at})")
    keys = listed("s", tables.keys)
    return (
        f"{note_changes(tables, tables.columns)} "
        f"SELECT CASE WHEN s.IS_DELETED THEN 'D' WHEN {stored_key} IS NULL THEN 'I' ELSE 'U' END, "
        f"{listed('s', tables.columns)} FROM ({incoming(tables, newest=tables.keys)}) s "
        f"LEFT JOIN {target.table.sql} t ON {same_key(target, 't', 's')} {joined} "
        # A table that has a key twice gets one change for it.
        f"WHERE {' AND '.join(tests)} QUALIFY ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY {keys}) = 1"
    )


def _not_older(target: Target, alias: str) -> str:
    """Return the condition that the incoming version is not older than the stored one."""
    current = f"t.{quote(target.name(target.order or 0))}"
    return f"{current} IS NULL OR {alias}.C{target.order} >= {current}"


def merge(tables: LoadTables) -> list[str]:
    """Return the MERGE of the listed rows, which answers with rows inserted, updated, deleted, and what follows it."""
    target = tables.target
    # Checked again: somebody else may have written a newer version meanwhile.
    newer = "" if target.order is None else f" AND ({_not_older(target, 'c')})"
    statement = (
        f"MERGE INTO {target.table.sql} t USING {tables.changed.sql} c ON {same_key(target, 't', 'c')} "
        f"WHEN MATCHED AND c.ACTION = 'D'{newer} THEN DELETE "
        f"WHEN MATCHED AND c.ACTION = 'U'{newer} THEN UPDATE SET {assignments(target, 'c')} "
        f"WHEN NOT MATCHED AND c.ACTION = 'I' THEN INSERT ({stored_names(target)}) VALUES ({stored_values(target, 'c')})"
    )
    return [statement] if target.order is None or target.flag is None else [statement, _bury(tables, target.order)]


def _bury(tables: LoadTables, order: int) -> str:
    """Return the statement that records the newest deletion of each key: a late older version must not restore it."""
    target = tables.target
    version = quote(target.name(order))
    return (
        f"MERGE INTO {tables.graves.sql} g USING "
        f"(SELECT * FROM ({incoming(tables, newest=tables.keys)}) WHERE IS_DELETED) s ON {same_key(target, 'g', 's')} "
        f"WHEN MATCHED AND s.C{order} > g.{version} THEN UPDATE SET {version} = s.C{order} "
        f"WHEN NOT MATCHED THEN INSERT ({', '.join(map(quote, target.grave))}) "
        f"VALUES ({listed('s', [*tables.keys, f'C{order}'])})"
    )


def grave_columns(target: Target) -> str:
    """Return the SELECT from which the table of deleted keys takes its types."""
    *keys, version = map(quote, target.grave)
    stored_version = quote(target.history[0]) if target.history else version
    return f"SELECT {', '.join(keys)}, {stored_version} AS {version} FROM {target.table.sql} WHERE 1 = 0"


# scd2: every version of a row, with the time in which it was valid. The table depends only on the set of versions received:
# for each key and time the last one received counts; a deletion is a version without a row. So a late version is inserted
# between its neighbours.


def _valid(target: Target) -> tuple[str, str, str]:
    assert target.history is not None
    valid_from, valid_to, is_current = (quote(name) for name in target.history)
    return valid_from, valid_to, is_current


def timeline(tables: LoadTables) -> str:
    """Return the statement that lists all versions of the keys in the files, each with the time of the next version."""
    target, order = tables.target, f"C{tables.target.order}"
    columns, keys = ", ".join(tables.columns), ", ".join(tables.keys)

    def known_versions(table: str, time: str, *, deleted: bool) -> str:
        """Select the recorded versions of the same keys, without those that the files bring again.

        Only their keys are selected, because old values stay as they are.
        """
        places = range(len(target.columns))
        selected = ", ".join(f"v.{quote(target.name(at))}" if at in target.key else "NULL" for at in places)
        # A version that the table holds twice is one version: a MERGE takes no row twice.
        return (
            f"SELECT DISTINCT {selected}, v.{time}, {deleted}, FALSE FROM {table} v "
            f"JOIN touched k ON {same_key(target, 'v', 'k')} WHERE NOT EXISTS "
            f"(SELECT 1 FROM inc s WHERE {same_key(target, 'v', 's')} AND s.{order} = v.{time})"
        )

    events = [
        f"SELECT {columns}, {order} AS AT_TIME, IS_DELETED, TRUE AS FRESH FROM inc",
        known_versions(target.table.sql, _valid(target)[0], deleted=False),
        known_versions(tables.graves.sql, quote(target.grave[-1]), deleted=True),
    ]
    return (
        f"INSERT INTO {tables.timeline.sql} ({columns}, AT_TIME, IS_DELETED, FRESH, NEXT_TIME) "
        f"WITH inc AS ({incoming(tables, newest=[*dict.fromkeys([*tables.keys, order])])}), "
        f"touched AS (SELECT DISTINCT {keys} FROM inc), events AS ({' UNION ALL '.join(events)}) "
        f"SELECT {columns}, AT_TIME, IS_DELETED, FRESH, "
        f"LEAD(AT_TIME) OVER (PARTITION BY {keys} ORDER BY AT_TIME) FROM events"
    )


def _moved(target: Target) -> str:
    """Return the condition that a stored version gets other values, or another end."""
    _, valid_to, is_current = _valid(target)
    ended = f"t.{valid_to} IS DISTINCT FROM c.NEXT_TIME OR t.{is_current} IS DISTINCT FROM (c.NEXT_TIME IS NULL)"
    return f"((c.FRESH AND {differs(target, 't', 'c')}) OR {ended})"


def _same_version(target: Target) -> str:
    return f"{same_key(target, 't', 'c')} AND t.{_valid(target)[0]} = c.AT_TIME"


def _with_stored(tables: LoadTables) -> str:
    """Return the FROM clause of all versions `c`, each with its stored version `t` if there is one."""
    return f"FROM {tables.timeline.sql} c LEFT JOIN {tables.target.table.sql} t ON {_same_version(tables.target)}"


def changed_versions(tables: LoadTables) -> str:
    """Return the statement that lists the keys of which any version changes."""
    stored_version = f"t.{_valid(tables.target)[0]}"
    return (
        f"{note_changes(tables, tables.keys)} SELECT DISTINCT 'U', {listed('c', tables.keys)} {_with_stored(tables)} "
        f"WHERE ({stored_version} IS NULL AND NOT c.IS_DELETED) "
        f"OR ({stored_version} IS NOT NULL AND (c.IS_DELETED OR {_moved(tables.target)}))"
    )


def planned_versions(tables: LoadTables) -> str:
    """Return the SELECT of how many versions are to be inserted, updated and deleted."""
    is_stored = f"t.{_valid(tables.target)[0]} IS NOT NULL"
    return (
        f"SELECT COUNT_IF(NOT {is_stored} AND NOT c.IS_DELETED), "
        f"COUNT_IF({is_stored} AND NOT c.IS_DELETED AND {_moved(tables.target)}), "
        f"COUNT_IF({is_stored} AND c.IS_DELETED) {_with_stored(tables)}"
    )


def write_versions(tables: LoadTables) -> list[str]:
    """Return the MERGE of the versions, which answers with rows inserted, updated, deleted, and that of the deletions."""
    target = tables.target
    valid_from, valid_to, is_current = _valid(target)
    ended = f"{valid_to} = c.NEXT_TIME, {is_current} = (c.NEXT_TIME IS NULL)"
    version = quote(target.grave[-1])
    return [
        (
            f"MERGE INTO {target.table.sql} t USING {tables.timeline.sql} c ON {_same_version(target)} "
            "WHEN MATCHED AND c.IS_DELETED THEN DELETE "
            f"WHEN MATCHED AND c.FRESH AND {_moved(target)} THEN UPDATE SET {assignments(target, 'c')}, {ended} "
            f"WHEN MATCHED AND {_moved(target)} THEN UPDATE SET {ended} "
            f"WHEN NOT MATCHED AND NOT c.IS_DELETED THEN INSERT ({stored_names(target)}, {valid_from}, {valid_to}, {is_current}) "
            f"VALUES ({stored_values(target, 'c')}, c.AT_TIME, c.NEXT_TIME, c.NEXT_TIME IS NULL)"
        ),
        # Each deletion is recorded with its time, until a version of the same time arrives.
        (
            f"MERGE INTO {tables.graves.sql} g USING (SELECT * FROM {tables.timeline.sql} WHERE FRESH) c "
            f"ON {same_key(target, 'g', 'c')} AND g.{version} = c.AT_TIME "
            f"WHEN MATCHED AND NOT c.IS_DELETED THEN DELETE "
            f"WHEN NOT MATCHED AND c.IS_DELETED THEN INSERT ({', '.join(map(quote, target.grave))}) "
            f"VALUES ({listed('c', [*tables.keys, 'AT_TIME'])})"
        ),
    ]
