"""The SQL of `scd2`: every version of a row, with the time in which it was valid.

The table depends only on the set of versions received: for each key and time the last one received counts; a deletion is
a version without a row. So a late version is inserted between its neighbours.
"""

from __future__ import annotations

from tir_dagster.loading.merge_sql import (
    assignments,
    differs,
    incoming,
    listed,
    note_changes,
    same_key,
    stored_names,
    stored_values,
)
from tir_dagster.loading.tables import LoadTables, Target
from tir_dagster.snowflake.names import quote


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
