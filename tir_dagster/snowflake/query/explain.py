"""A view in words, for `tir plan --explain`: its tables and joins, and which changes are refreshed by key and how."""

from __future__ import annotations

from collections.abc import Sequence

from tir_dagster.snowflake.query.model import OpenOrder, View, ViewTable

_ROLES = {"fact": "fact", "left": "optional", "inner": "mandatory", "read": "read"}


def explain(
    view: View, *, why_full: str | None = None, why_whole: str | None = None, key: Sequence[str] = ()
) -> list[str]:
    """What the query means for a refresh, a line for each thing worth knowing.

    The reasons are those that the text alone does not tell; `key` names what rows are replaced by, none: slices.
    """
    if why := why_full or view.why_full:
        return _full_lines(view, why)
    if why := why_whole or view.why_whole:
        return _whole_lines(view, why, ", ".join(key) or "slices")
    return [
        _kind(view),
        *(line for table in view.tables for line in _table_lines(table)),
        *_chains(view),
        *([f"group: {', '.join(view.group)}"] if view.kind == "aggregate" else []),
        "Refreshed by key:",
        *(f"  {line}" for table in view.tables for line in _change_lines(view, table)),
        "Loaded in full: the first time, and when the query or the tables' columns change.",
    ]


def _full_lines(view: View, why: str) -> list[str]:
    """A query of which only a full load is right."""
    return [
        f"Loaded in full at each change. {why}",
        *(["Its rows can differ though no table changed."] if view.restless else []),
        *(f"table {table.table}: any change of it" for table in view.tables),
    ]


def _whole_lines(view: View, why: str, key: str) -> list[str]:
    """A query that is compared as a whole, and why; what is asked because rows may tie in its orders."""
    tables = ", ".join(dict.fromkeys(str(table.table) for table in view.tables))
    how = (
        f"Any change of {tables}: the warehouse evaluates the query at both versions, and the keys ({key}) whose rows differ "
        "are replaced; without history every row is read and compared with the extract."
    )
    return [
        f"Compared as a whole: it is not taken apart into joins and groups. {why}",
        how,
        *(_order_line(order) for order in view.orders),
        "Loaded in full: the first time, and when the query or its columns change.",
    ]


def _order_line(order: OpenOrder) -> str:
    everything = "every row is read, once, and compared with the extract"
    if order.probe:
        return f"Rows may tie in {order.written}: the warehouse is asked whether any do; then {everything}."
    return f"Rows may tie in {order.written}: {everything}. Order by more columns to avoid that."


def _kind(view: View) -> str:
    if view.kind == "copy":
        return f"A copy of {view.fact.table}."
    joined = len(view.tables) - 1
    tables = f"{view.fact.table}" + (f" joined to {joined} more" if joined else "")
    return f"An aggregate over {tables}." if view.kind == "aggregate" else f"A join: {tables}."


def _table_lines(table: ViewTable) -> list[str]:
    keys = " and ".join(f"{key.parent}.{key.column} = {table.alias}.{key.key}" for key in table.on)
    unused = [name for name in table.columns if name not in table.used]
    return [
        f"{_ROLES[table.role]} {table.alias}: {table.table}" + (f", joined on {keys}" if keys else ""),
        f"  used: {', '.join(table.used) or 'no column, only that there is a row'}"
        + (f"; not used: {', '.join(unused)}" if unused else ""),
    ]


def _path(view: View, table: ViewTable) -> list[ViewTable]:
    """The tables from a dimension up to the fact."""
    by_alias = {view_table.alias: view_table for view_table in view.tables}
    path = [table]
    while path[-1].on:
        path.append(by_alias[path[-1].on[0].parent])
    return path


def _chains(view: View) -> list[str]:
    paths = [_path(view, table) for table in view.tables]
    return [f"chain: {' → '.join(table.alias for table in reversed(path))}" for path in paths if len(path) > 2]


def _change_lines(view: View, table: ViewTable) -> list[str]:
    target = "their groups, before and after," if view.kind == "aggregate" else "their row keys"
    if table.role == "fact":
        return [f"rows of {table.alias} that are new, changed or gone: {target} are replaced"]
    path = _path(view, table)
    steps = [
        " and ".join(f"{key.parent}.{key.column} = {child.alias}.{key.key}" for key in child.on) for child in path[:-1]
    ]
    effect = "turns defaults into values and back" if table.role == "left" else "brings or removes rows of the extract"
    search = f"found through {', then '.join(steps)}, with the keys before and after"
    unused = set(table.columns) - set(table.used)
    return [
        f"rows of {table.alias} that are new, changed or gone: {search}; one that appears or goes {effect}",
        *([f"a change of {table.alias}'s other columns changes nothing"] if unused else []),
    ]
