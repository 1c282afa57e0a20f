"""The SQL that a view is read by: its own SELECT with every table pinned, and its rows before aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.query.model import RESERVED, ColumnRead, View, ViewTable
from tir_dagster.snowflake.query.text import ViewError
from tir_dagster.snowflake.versions import SourceVersion

MARK = f"{RESERVED}MARK"


@dataclass(frozen=True)
class BaseSelect:
    """The rows before aggregation, one for each joined fact row, and what their columns are for.

    `key` names a row, `group` its group in an aggregate, `columns` all that can change it. The hidden ones are not
    compared: `mark` is the fact's watermark, `refers` the fact's columns that refer to each dimension joined to it.
    """

    sql: str
    key: tuple[str, ...]
    group: tuple[str, ...]
    columns: tuple[str, ...]
    mark: str | None
    refers: Mapping[str, tuple[str, ...]]


def view_sql(view: View, version: SourceVersion | None) -> str:
    """The view's SELECT with every table pinned to the version."""
    if view.text:
        return pinned_text(view.text, version)
    listed = ", ".join(_aliased(column.sql, column.name) for column in view.columns)
    # Grouping by all outputs is DISTINCT; by position, because a name in GROUP BY may mean a column as well.
    distinct = view.kind == "aggregate" and len(view.group) == len(view.columns) and not view.having
    sql = f"SELECT {'DISTINCT ' if distinct else ''}{listed} {_source(view, version)}"
    if view.kind == "aggregate" and not distinct:
        names = [column.name for column in view.columns]
        sql += f" GROUP BY {', '.join(str(names.index(name) + 1) for name in view.group)}"
    return f"{sql} HAVING {view.having}" if view.having else sql


def pinned_text(pieces: Iterable[str | TableName], version: SourceVersion | None) -> str:
    """The query's own text, with every table pinned to the version."""
    return "".join(piece if isinstance(piece, str) else _pinned(piece, version) for piece in pieces)


def base_sql(view: View, *, row_key: Sequence[str], watermark: str | None, version: SourceVersion | None) -> BaseSelect:
    """The rows behind the view, never aggregated. The row key names outputs; of an aggregate, columns of the fact."""
    if view.text:
        raise ViewError(
            f"it has no rows before aggregation that could be told apart. {view.why_whole or view.why_full}"
        )
    columns_sql = _aggregated(view, row_key) if view.kind == "aggregate" else {c.name: c.sql for c in view.columns}
    key = tuple(name for name in columns_sql if name.startswith(f"{RESERVED}K")) or _output_key(view, row_key)
    referring = {
        table.alias: {f"{RESERVED}R{at}_{part}": _sql((on.parent, on.column)) for part, on in enumerate(table.on)}
        for at, table in enumerate(_direct(view))
    }
    hidden = {MARK: _sql((view.fact.alias, _fact_column(view, watermark, "changes.watermark")))} if watermark else {}
    for columns in referring.values():
        hidden.update(columns)
    listed = ", ".join(_aliased(sql, name) for name, sql in {**columns_sql, **hidden}.items())
    return BaseSelect(
        sql=f"SELECT {listed} {_source(view, version)}",
        key=key,
        group=view.group,
        columns=tuple(columns_sql),
        mark=MARK if watermark else None,
        refers={alias: tuple(columns) for alias, columns in referring.items()},
    )


def _aggregated(view: View, row_key: Sequence[str]) -> dict[str, str]:
    """The fact's key, the group, and all columns that an aggregate or HAVING reads: what can change the group's row."""
    outputs = {column.name: column for column in view.columns}
    keys = [(view.fact.alias, _fact_column(view, name, "row_key")) for name in row_key]
    values = [read for column in view.columns if column.aggregate for read in column.reads]
    return {
        **_numbered("K", keys),
        **{name: outputs[name].sql for name in view.group},
        **_numbered("V", dict.fromkeys([*values, *view.having_reads])),
    }


def _numbered(letter: str, columns: Iterable[ColumnRead]) -> dict[str, str]:
    return {f"{RESERVED}{letter}{at}": _sql(column) for at, column in enumerate(columns)}


def _output_key(view: View, row_key: Sequence[str]) -> tuple[str, ...]:
    """The outputs that name a row. They may only depend on the fact: else a dimension's change would rename rows."""
    if view.kind == "aggregate":
        return ()
    outputs = {column.name: column for column in view.columns}
    names = tuple(name if name in outputs else name.upper() for name in row_key)
    for name in names:
        if name not in outputs:
            raise ViewError(f"row_key names {name}, which is no output column. There are {', '.join(outputs)}.")
        if foreign := [alias for alias, _ in outputs[name].reads if alias != view.fact.alias]:
            raise ViewError(
                f"row_key names {name}, which depends on {foreign[0]}. Name outputs of the first table, {view.fact.alias}, "
                f"alone (several rows may share a key), or put {foreign[0]} first in FROM."
            )
    return names


def _fact_column(view: View, name: str, field: str) -> str:
    stored_name = name if name in view.fact.columns else name.upper()
    if stored_name not in view.fact.columns:
        raise ViewError(
            f"{field} names {name}, which {view.fact.table} does not have. It has {', '.join(view.fact.columns)}."
        )
    return stored_name


def _direct(view: View) -> list[ViewTable]:
    """The dimensions that the fact itself refers to."""
    return [table for table in view.tables[1:] if table.on[0].parent == view.fact.alias]


def _source(view: View, version: SourceVersion | None) -> str:
    sql = f"FROM {_pinned(view.fact.table, version)} AS {quote(view.fact.alias)}"
    for table in view.tables[1:]:
        join = "LEFT JOIN" if table.role == "left" else "INNER JOIN"
        sql += f" {join} {_pinned(table.table, version)} AS {quote(table.alias)} ON {table.condition}"
    return f"{sql} WHERE {view.where}" if view.where else sql


def _pinned(table: TableName, version: SourceVersion | None) -> str:
    return f"{table.sql} {version.sql}" if version else table.sql


def _aliased(sql: str, name: str) -> str:
    return f"{sql} AS {quote(name)}"


def _sql(column: ColumnRead) -> str:
    return f"{quote(column[0])}.{quote(column[1])}"
