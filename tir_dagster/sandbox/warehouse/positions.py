"""Columns of VALUES: COLUMN1, COLUMN2, … or by position, `$1` and `t.$1`, as Snowpark reads the rows of a local data frame."""

from __future__ import annotations

from collections.abc import Iterator

from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, unsupported
from tir_dagster.sandbox.warehouse.names import folded


def name_positions(tree: exp.Expr) -> None:
    """Put the names of columns in place of their positions, in place."""
    for values in list(tree.find_all(exp.Values)):
        if isinstance(values.parent, (exp.From, exp.Join)):
            _name_columns(values)
    if tree.find(exp.Parameter):
        for select in list(tree.find_all(exp.Select)):
            for position in list(_positions(select)):
                _resolve(select, position)


def _name_columns(values: exp.Values) -> None:
    """Give the columns the names that Snowflake gives them; fakesnow does it where the VALUES have no alias."""
    alias = values.args.get("alias")
    if alias is not None and not alias.args.get("columns"):
        numbers = range(1, len(_first_row(values)) + 1)
        alias.set("columns", [exp.to_identifier(f"COLUMN{number}", quoted=True) for number in numbers])


def _first_row(values: exp.Values) -> list[exp.Expr]:
    row = values.expressions[0]
    return list(row.expressions) if isinstance(row, exp.Tuple) else [row]


def _positions(select: exp.Select) -> Iterator[exp.Parameter]:
    """The positions that this SELECT uses itself, not those in its subqueries."""
    for node in select.walk(prune=lambda node: node is not select and isinstance(node, exp.Query)):
        if isinstance(node, exp.Parameter) and isinstance(node.this, exp.Literal) and not node.this.is_string:
            yield node


def _resolve(select: exp.Select, position: exp.Parameter) -> None:
    qualified = position.parent if isinstance(position.parent, exp.Column) else None
    table = qualified.args.get("table") if qualified is not None else None
    columns = _columns(select, table)
    number = int(position.this.name)
    if not 1 <= number <= len(columns):
        shown = f"{folded(table)}.${number}" if table is not None else f"${number}"
        raise SnowflakeError(904, "42000", f"SQL compilation error:\ninvalid identifier '{shown}'")
    named: exp.Expr = exp.Column(this=exp.to_identifier(columns[number - 1], quoted=True), table=table and table.copy())
    written = qualified or position
    if written.parent is select and written.arg_key == "expressions":
        named = exp.alias_(named, f"${number}", quoted=True)
    written.replace(named)


def _columns(select: exp.Select, table: exp.Identifier | None) -> list[str]:
    """The columns of the VALUES that a position counts; positions in anything else are refused."""
    sources = [select.args["from_"].this] if select.args.get("from_") else []
    sources += [join.this for join in select.args.get("joins") or []]
    if table is not None:
        sources = [source for source in sources if _alias(source) == folded(table)]
    if len(sources) != 1 or not isinstance(sources[0], exp.Values):
        raise unsupported("$1, $2, … of something other than VALUES")
    alias = sources[0].args.get("alias")
    if alias is None:
        return [f"COLUMN{number}" for number, _ in enumerate(_first_row(sources[0]), start=1)]
    return [folded(column) for column in alias.args["columns"]]


def _alias(source: exp.Expr) -> str:
    alias = source.args.get("alias")
    return folded(alias.this) if alias is not None and alias.this is not None else ""
