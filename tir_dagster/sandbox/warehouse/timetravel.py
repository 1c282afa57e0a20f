"""Reading the past: AT, BEFORE and CHANGES as queries over DuckLake's versions, with Snowflake's refusals."""

from __future__ import annotations

import sqlglot
from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import (
    SnowflakeError,
    beyond_time_travel,
    in_the_future,
    unsupported,
    untracked,
)
from tir_dagster.sandbox.warehouse.lake import DAY_US, Lake, TableFacts, ViewFacts, parse_view, view_tables
from tir_dagster.sandbox.warehouse.names import TableName, literal, quote


def rows_at(lake: Lake, name: TableName, time_us: int) -> str:
    """The table's rows as of the time, under the columns it has now, as Snowflake shows them."""
    if (view := lake.view(name)) is not None:
        return _view_rows_at(lake, view, time_us)
    facts = lake.facts(name)
    _check_reachable(facts, time_us, lake.now_us())
    version = _version(lake, name, time_us)
    columns = ", ".join(_columns_then(lake, facts, version))
    return f"SELECT {columns} FROM {lake.name_at(name, facts.table_id, version).quoted} AT (VERSION => {version})"


def _view_rows_at(lake: Lake, view: ViewFacts, time_us: int) -> str:
    """What a view would have shown as of the time, by the query that it has now."""
    tree = parse_view(view)
    for table, name in view_tables(view, tree):
        past = sqlglot.parse_one(rows_at(lake, name, time_us), read="duckdb")
        table.replace(
            exp.Subquery(this=past, alias=exp.TableAlias(this=exp.to_identifier(table.alias_or_name, quoted=True)))
        )
    query = tree.sql(dialect="duckdb")
    columns = ", ".join(map(quote, view.columns))
    return f"SELECT * FROM ({query}) AS v({columns})" if columns else query


def net_changes(lake: Lake, name: TableName, since_us: int, until_us: int, *, append_only: bool) -> str:
    """What it takes to get from the table at one time to the table at the other, row by row.

    A row has at most one old image and one new image, its first and its last in the interval. Both, and different:
    an update, shown as DELETE and INSERT. Both, and equal: nothing. Row ids are DuckLake's, which an UPDATE keeps.
    """
    if (view := lake.view(name)) is not None:
        return _view_changes(lake, view, since_us, until_us, append_only=append_only)
    facts = lake.facts(name)
    if (dynamic := lake.dynamic(name)) is not None and dynamic.refresh_mode == "FULL":
        raise SnowflakeError(
            2,
            "0A000",
            f"SQL compilation error:\nChange tracking is not supported on dynamic table '{name}' with refresh mode FULL.",
        )
    now_us = lake.now_us()
    _check_reachable(facts, since_us, now_us)
    _check_reachable(facts, until_us, now_us)
    if facts.tracked_since_us is None or since_us < facts.tracked_since_us:
        raise untracked(name)
    first, last = (_version(lake, name, time_us) for time_us in (since_us, until_us))
    names = [column.name for column in lake.columns(name, facts.table_id)]
    then = lake.name_at(name, facts.table_id, last)
    shown = _columns_then(lake, facts, last)
    row_id = f"sha1({literal(f'{name.database}:{facts.table_id}:')} || rowid)"
    metadata = 'action AS "METADATA$ACTION", is_update AS "METADATA$ISUPDATE", row_id AS "METADATA$ROW_ID"'
    if last <= first:
        nothing = ", ".join(_columns_then(lake, facts, last))
        return (
            f'SELECT *, \'INSERT\' AS "METADATA$ACTION", false AS "METADATA$ISUPDATE", \'\' AS "METADATA$ROW_ID" '
            f"FROM (SELECT {nothing} FROM {then.quoted} AT (VERSION => {last}) WHERE false)"
        )
    changes = (
        f"ducklake_table_changes({literal(name.database)}, {literal(then.schema)}, {literal(then.name)}, "
        f"{first + 1}, {last})"
    )
    if append_only:
        images = f"""
            SELECT {", ".join(shown)}, 'INSERT' AS action, false AS is_update, {row_id} AS row_id
            FROM {changes} WHERE change_type = 'insert'"""
    else:
        struct = ", ".join(
            f"{quote(column)} := {source}" for column, source in zip(names, _sources(shown), strict=True)
        )
        images = f"""
            SELECT unnest(CASE action WHEN 'DELETE' THEN old ELSE new END), action, is_update, row_id FROM (
                SELECT *, old IS NOT NULL AND new IS NOT NULL AS is_update,
                    unnest(CASE WHEN old IS NULL THEN ['INSERT'] WHEN new IS NULL THEN ['DELETE']
                        ELSE ['DELETE', 'INSERT'] END) AS action
                FROM (
                    SELECT {row_id} AS row_id,
                        arg_min(CASE WHEN NOT added THEN image END, position) FILTER (WHERE is_first) AS old,
                        arg_max(CASE WHEN added THEN image END, position) FILTER (WHERE is_last) AS new
                    FROM (
                        SELECT *, position = min(position) OVER (PARTITION BY rowid) AS is_first,
                            position = max(position) OVER (PARTITION BY rowid) AS is_last
                        FROM (
                            SELECT rowid, struct_pack({struct}) AS image,
                                change_type IN ('insert', 'update_postimage') AS added,
                                snapshot_id * 2 + CASE WHEN change_type IN ('insert', 'update_postimage')
                                    THEN 1 ELSE 0 END AS position
                            FROM {changes}))
                    GROUP BY rowid)
                WHERE old IS DISTINCT FROM new)"""
    listed = ", ".join(quote(column) for column in names)
    return f"SELECT {listed}, {metadata} FROM ({images})"


def _view_changes(lake: Lake, view: ViewFacts, since_us: int, until_us: int, *, append_only: bool) -> str:
    """The rows that a view shows at one time and not at the other; an update is a DELETE and an INSERT of other rows."""
    _check_tracked(lake, view, since_us)
    old, new = (_view_rows_at(lake, view, time_us) for time_us in (since_us, until_us))
    sides = [("INSERT", new, old)] if append_only else [("INSERT", new, old), ("DELETE", old, new)]
    return " UNION ALL ".join(
        f'SELECT *, {literal(action)} AS "METADATA$ACTION", false AS "METADATA$ISUPDATE", '
        f'sha1({literal(f"{view.name}:{action}:")} || row_number() OVER ()) AS "METADATA$ROW_ID" '
        f"FROM (SELECT * FROM ({some}) EXCEPT ALL SELECT * FROM ({others}))"
        for action, some, others in sides
    )


def _check_tracked(lake: Lake, view: ViewFacts, since_us: int) -> None:
    """Refuse a view that is not tracked, over a table that is not, or with a query whose changes Snowflake does not follow."""
    if view.tracked_since_us is None or since_us < view.tracked_since_us:
        raise untracked(view.name)
    tree = parse_view(view)
    if part := _untrackable_part(tree):
        raise SnowflakeError(
            2, "0A000", f"SQL compilation error:\nChange tracking is not supported on queries with {part}."
        )
    for _, name in view_tables(view, tree):
        if (behind := lake.view(name)) is not None:
            _check_tracked(lake, behind, since_us)
            continue
        tracked_since_us = lake.facts(name).tracked_since_us
        if tracked_since_us is None or since_us < tracked_since_us:
            raise untracked(name)


def _untrackable_part(tree: exp.Expr) -> str | None:
    """What in a view's query is beyond projections, filters, inner and cross joins, UNION ALL and subqueries in FROM."""
    for node in tree.walk():
        if isinstance(node, (exp.Group, exp.AggFunc)):
            return "aggregation"
        if isinstance(node, (exp.Window, exp.Qualify, exp.Limit, exp.Distinct)):
            return node.key.upper()
        if isinstance(node, exp.Join) and str(node.args.get("side") or ""):
            return f"{node.args['side']} OUTER joins"
        if isinstance(node, exp.SetOperation) and (not isinstance(node, exp.Union) or node.args.get("distinct")):
            return f"{node.key.upper()} of distinct rows"
        if isinstance(node, exp.Query) and isinstance(node.parent, (exp.In, exp.Exists, exp.Predicate)):
            return "subqueries outside of FROM"
    return None


def _check_reachable(facts: TableFacts, time_us: int, now_us: int) -> None:
    if time_us > now_us:
        raise in_the_future(facts.name)
    if time_us < facts.created_us or time_us < now_us - facts.retention_days * DAY_US:
        raise beyond_time_travel(facts.name)


def _version(lake: Lake, name: TableName, time_us: int) -> int:
    version = lake.version_at(name.database, time_us)
    if version < 0:
        raise beyond_time_travel(name)
    return version


def _columns_then(lake: Lake, facts: TableFacts, version: int) -> list[str]:
    """Select list that shows an old version under today's columns: renamed ones follow, added ones show their default."""
    then = {column.ident: column.name for column in lake.columns(facts.name, facts.table_id, version)}
    return [
        f"{quote(then[column.ident]) if column.ident in then else column.filling} AS {quote(column.name)}"
        for column in lake.columns(facts.name, facts.table_id)
    ]


def _sources(select_list: list[str]) -> list[str]:
    return [item.rsplit(" AS ", 1)[0] for item in select_list]


def clause_kind(clause: exp.HistoricalData) -> str:
    kind = str(clause.args.get("kind") or "").upper()
    if kind not in ("TIMESTAMP", "OFFSET"):
        raise unsupported(f"{clause.this} ({kind} => …)")
    if str(clause.this).upper() == "BEFORE":
        raise unsupported("BEFORE")
    return kind
