"""The SQL of `scd2`: every version of a row, with the time in which it was valid.

The table depends only on the set of versions received: for each key and time the last one received counts; a deletion is
a version without a row. So a late version is inserted between its neighbours.
"""

from __future__ import annotations

from tir_dagster.loading.merge_sql import (
    LoadTables,
    assignments,
    differs,
    incoming,
    same_key,
    stored_names,
    stored_values,
)
from tir_dagster.loading.tables import Target
from tir_dagster.snowflake.names import quote


def _order(target: Target) -> str:
    assert target.order is not None
    return f"C{target.order}"


def _valid(target: Target) -> tuple[str, str, str]:
    assert target.history is not None
    valid_from, valid_to, is_current = (quote(name) for name in target.history)
    return valid_from, valid_to, is_current


def timeline(tables: LoadTables, *, graves: bool) -> str:
    """Return the statement that lists all versions of the keys in the files, each with the time of the next version."""
    target, order = tables.target, _order(tables.target)
    keys = ", ".join(tables.keys)
    rows = incoming(tables, newest=[*dict.fromkeys([*tables.keys, order])])
    events = [
        f"SELECT {', '.join(tables.columns)}, {order} AS AT_TIME, IS_DELETED, TRUE AS FRESH FROM inc",
        (
            # A version that the table holds twice is one version: a MERGE takes no row twice.
            f"SELECT DISTINCT {_from_table(tables)}, t.{_valid(target)[0]}, FALSE, FALSE FROM {target.table.sql} t "
            f"JOIN touched k ON {same_key(target, 't', 'k')} WHERE NOT EXISTS "
            f"(SELECT 1 FROM inc s WHERE {same_key(target, 't', 's')} AND s.{order} = t.{_valid(target)[0]})"
        ),
    ]
    if graves:
        deleted_at = f"g.{quote(target.name(target.order or 0))}"
        events.append(
            f"SELECT {_from_graves(tables)}, {deleted_at}, TRUE, FALSE FROM {tables.graves.sql} g "
            f"JOIN touched k ON {same_key(target, 'g', 'k')} WHERE NOT EXISTS "
            f"(SELECT 1 FROM inc s WHERE {same_key(target, 'g', 's')} AND s.{order} = {deleted_at})"
        )
    listed = ", ".join([*tables.columns, "AT_TIME", "IS_DELETED", "FRESH", "NEXT_TIME"])
    return (
        f"INSERT INTO {tables.timeline.sql} ({listed}) WITH inc AS ({rows}), "
        f"touched AS (SELECT DISTINCT {keys} FROM inc), events AS ({' UNION ALL '.join(events)}) "
        f"SELECT {', '.join(tables.columns)}, AT_TIME, IS_DELETED, FRESH, "
        f"LEAD(AT_TIME) OVER (PARTITION BY {keys} ORDER BY AT_TIME) FROM events"
    )


def _from_table(tables: LoadTables) -> str:
    """Return the columns of stored versions: only the keys, because old values stay as they are."""
    target = tables.target
    return ", ".join(f"t.{quote(target.name(at))}" if at in target.key else "NULL" for at in range(len(target.columns)))


def _from_graves(tables: LoadTables) -> str:
    target = tables.target
    return ", ".join(f"g.{quote(target.name(at))}" if at in target.key else "NULL" for at in range(len(target.columns)))


def _moved(target: Target) -> str:
    """Return the condition that a stored version gets other values, or another end."""
    _, valid_to, is_current = _valid(target)
    ended = f"t.{valid_to} IS DISTINCT FROM c.NEXT_TIME OR t.{is_current} IS DISTINCT FROM (c.NEXT_TIME IS NULL)"
    return f"((c.FRESH AND {differs(target, 't', 'c')}) OR {ended})"


def _same_version(target: Target) -> str:
    return f"{same_key(target, 't', 'c')} AND t.{_valid(target)[0]} = c.AT_TIME"


def changed_versions(tables: LoadTables) -> str:
    """Return the statement that lists the keys of which any version changes."""
    target = tables.target
    stored_version = f"t.{_valid(target)[0]}"
    keys = ", ".join(f"c.{name}" for name in tables.keys)
    return (
        f"INSERT INTO {tables.changed.sql} (ACTION, {', '.join(tables.keys)}) SELECT DISTINCT 'U', {keys} "
        f"FROM {tables.timeline.sql} c LEFT JOIN {target.table.sql} t ON {_same_version(target)} "
        f"WHERE ({stored_version} IS NULL AND NOT c.IS_DELETED) OR ({stored_version} IS NOT NULL AND (c.IS_DELETED OR {_moved(target)}))"
    )


def planned_versions(tables: LoadTables) -> str:
    """Return the SELECT of how many versions are to be inserted, updated and deleted."""
    target = tables.target
    is_stored = f"t.{_valid(target)[0]} IS NOT NULL"
    return (
        f"SELECT COUNT_IF(NOT {is_stored} AND NOT c.IS_DELETED), COUNT_IF({is_stored} AND NOT c.IS_DELETED AND {_moved(target)}), "
        f"COUNT_IF({is_stored} AND c.IS_DELETED) "
        f"FROM {tables.timeline.sql} c LEFT JOIN {target.table.sql} t ON {_same_version(target)}"
    )


def write_versions(tables: LoadTables, *, graves: bool) -> list[str]:
    target = tables.target
    valid_from, valid_to, is_current = _valid(target)
    ended = f"{valid_to} = c.NEXT_TIME, {is_current} = (c.NEXT_TIME IS NULL)"
    fresh = ", ".join(part for part in (assignments(target, "c"), ended) if part)
    statements = [
        (
            f"MERGE INTO {target.table.sql} t USING {tables.timeline.sql} c ON {_same_version(target)} "
            "WHEN MATCHED AND c.IS_DELETED THEN DELETE "
            f"WHEN MATCHED AND c.FRESH AND {_moved(target)} THEN UPDATE SET {fresh} "
            f"WHEN MATCHED AND {_moved(target)} THEN UPDATE SET {ended} "
            f"WHEN NOT MATCHED AND NOT c.IS_DELETED THEN INSERT ({stored_names(target)}, {valid_from}, {valid_to}, {is_current}) "
            f"VALUES ({stored_values(target, 'c')}, c.AT_TIME, c.NEXT_TIME, c.NEXT_TIME IS NULL)"
        )
    ]
    return [*statements, _bury(tables)] if graves else statements


def _bury(tables: LoadTables) -> str:
    """Return the statement that records each deletion with its time, until a version of the same time arrives."""
    target = tables.target
    order = quote(target.name(target.order or 0))
    names = ", ".join([*(quote(target.name(place)) for place in target.key), order])
    values = ", ".join([*(f"c.C{place}" for place in target.key), "c.AT_TIME"])
    return (
        f"MERGE INTO {tables.graves.sql} g USING (SELECT * FROM {tables.timeline.sql} WHERE FRESH) c "
        f"ON {same_key(target, 'g', 'c')} AND g.{order} = c.AT_TIME "
        f"WHEN MATCHED AND NOT c.IS_DELETED THEN DELETE "
        f"WHEN NOT MATCHED AND c.IS_DELETED THEN INSERT ({names}) VALUES ({values})"
    )
