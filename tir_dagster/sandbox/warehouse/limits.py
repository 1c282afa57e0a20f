"""What a column's declared type refuses or cuts: texts longer than VARCHAR(n), fractions finer than TIMESTAMP(p) and TIME(p)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlglot import exp

from tir_dagster.sandbox.warehouse.names import folded, quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FITTING = "memory.main._tir_fitting"
_CUT = "memory.main._tir_cut"
# DuckDB holds microseconds; a row that is cut keeps the start of its tenth, hundredth or thousandth of a second.
MACROS = f"""
CREATE MACRO {_FITTING}(x, size) AS CASE WHEN length(CAST(x AS VARCHAR)) > size
    THEN error('String ''' || CAST(x AS VARCHAR) || ''' is too long and would be truncated') ELSE CAST(x AS VARCHAR) END;
CREATE MACRO {_CUT}(x TIMESTAMP, step) AS make_timestamp(epoch_us(x) - ((epoch_us(x) % step) + step) % step),
    (x TIMESTAMPTZ, step) AS make_timestamptz(epoch_us(x) - ((epoch_us(x) % step) + step) % step),
    (x TIME, step) AS x - to_microseconds(epoch_us(x) % step);
"""
_TYPE = exp.DataType.Type
_TEXTS = (_TYPE.VARCHAR, _TYPE.TEXT, _TYPE.CHAR, _TYPE.NVARCHAR, _TYPE.NCHAR)
_MOMENTS = {
    _TYPE.TIMESTAMP: "TIMESTAMP",
    _TYPE.TIMESTAMPNTZ: "TIMESTAMP",
    _TYPE.DATETIME: "TIMESTAMP",
    _TYPE.TIMESTAMPTZ: "TIMESTAMPTZ",
    _TYPE.TIMESTAMPLTZ: "TIMESTAMPTZ",
    _TYPE.TIME: "TIME",
}
LONGEST = 16_777_216
MOST_DIGITS = 9
_DIGITS_HELD = 6
# What a query is called whose columns are changed before they are stored.
STORED = "_TIR_STORED"


@dataclass(frozen=True)
class Limit:
    """The size in a declared type: `kind` is VARCHAR, or DuckDB's type of a moment."""

    kind: str
    size: int

    @property
    def matters(self) -> bool:
        """Whether values have to be looked at: DuckDB itself cuts off what is finer than microseconds."""
        return self.size < (LONGEST if self.kind == "VARCHAR" else _DIGITS_HELD)

    def shown(self, described: str) -> str:
        """The type as DESCRIBE says it; fakesnow says TIMESTAMP_NTZ(9) of all."""
        return f"{described.partition('(')[0]}({self.size})"

    def sql(self, value: str) -> str:
        """A value in DuckDB's SQL that keeps to the limit, or is an error."""
        if not self.matters:
            return value
        if self.kind == "VARCHAR":
            return f"{_FITTING}({value}, {self.size})"
        return f"{_CUT}(CAST({value} AS {self.kind}), {10 ** (_DIGITS_HELD - self.size)})"

    def apply(self, value: exp.Expr) -> exp.Expr:
        """The same for a value in a statement's tree."""
        if self.kind == "VARCHAR":
            return exp.Anonymous(this=_FITTING, expressions=[value.copy(), exp.Literal.number(self.size)])
        moment = exp.cast(value.copy(), {"TIMESTAMP": "TIMESTAMPNTZ"}.get(self.kind, self.kind))
        return exp.Anonymous(this=_CUT, expressions=[moment, exp.Literal.number(10 ** (_DIGITS_HELD - self.size))])


Limits = dict[str, Limit]
Change = Callable[[exp.Expr], exp.Expr]


def declared(kind: exp.Expr | None) -> Limit | None:
    """The limit in a declared type; None where it has none."""
    if not isinstance(kind, exp.DataType):
        return None
    sizes = [int(param.name) for param in kind.expressions if param.name.isdigit()]
    if kind.this in _TEXTS:
        size = sizes[0] if sizes else 1 if kind.this in (_TYPE.CHAR, _TYPE.NCHAR) else LONGEST
        return Limit("VARCHAR", size) if size < LONGEST else None
    if kind.this in _MOMENTS and sizes:
        return Limit(_MOMENTS[kind.this], sizes[0])
    return None


def declared_columns(definitions: Sequence[exp.Expr]) -> Limits:
    """The limits of column definitions, by the columns' names."""
    found = {
        folded(definition.this): declared(definition.args.get("kind"))
        for definition in definitions
        if isinstance(definition, exp.ColumnDef)
    }
    return {name: limit for name, limit in found.items() if limit is not None}


def changes(limits: Limits) -> dict[str, Change]:
    """What becomes of the values that a statement stores in these columns."""
    return {name: limit.apply for name, limit in limits.items() if limit.matters}


def change_stored(tree: Any, by_column: Mapping[str, Change], columns: Sequence[str]) -> None:
    """Change every value that an INSERT, UPDATE or MERGE stores, by its column; in place."""
    if isinstance(tree, exp.Insert):
        _change_inserted(tree, tree.expression, by_column, columns)
    elif isinstance(tree, exp.Update):
        _change_assigned(tree, by_column)
    elif isinstance(tree, exp.Merge):
        for clause in tree.args["whens"].expressions:
            then = clause.args["then"]
            if isinstance(then, exp.Update):
                _change_assigned(then, by_column)
            elif isinstance(then, exp.Insert):
                named = [folded(column) for column in then.this.expressions] if then.this is not None else columns
                _change_row(then.expression, by_column, named)


def limit_casts(tree: Any) -> Any:
    """The statement, in place, with casts that refuse or cut what their type does not hold."""
    for node in list(tree.find_all(exp.Cast)):
        limit = None if isinstance(node, exp.TryCast) else declared(node.to)
        if limit is None or not limit.matters or isinstance(node.to.parent, exp.ColumnDef):
            continue
        if node is tree:
            return limit.apply(node)
        node.replace(limit.apply(node))
    return tree


def changed_query(query: exp.Expr, by_column: Mapping[str, Change], columns: Sequence[str]) -> exp.Select:
    """A query whose columns, in this order, are changed so."""
    names = [exp.to_identifier(f"c{at}", quoted=True) for at, _ in enumerate(columns)]
    listed = [
        exp.alias_(_changed(by_column, column, exp.column(name.copy())), column, quoted=True)
        for column, name in zip(columns, names, strict=True)
    ]
    source = exp.Subquery(this=query.copy(), alias=exp.TableAlias(this=exp.to_identifier(STORED), columns=names))
    return exp.select(*listed).from_(source)


def _change_inserted(
    tree: exp.Insert, source: exp.Expr, by_column: Mapping[str, Change], columns: Sequence[str]
) -> None:
    named = [folded(column) for column in tree.this.expressions] if isinstance(tree.this, exp.Schema) else columns
    if not set(named) & by_column.keys():
        return
    if isinstance(source, exp.Values):
        for row in source.expressions:
            _change_row(row, by_column, named)
    elif isinstance(source, exp.Query):
        query = changed_query(source, by_column, named)
        # Further columns stay, so that they are too many for the table.
        names = [exp.to_identifier(f"c{at}", quoted=True) for at, _ in enumerate(named)]
        tree.set("expression", query.select(exp.Star(except_=names)))


def _change_row(row: exp.Expr, by_column: Mapping[str, Change], columns: Sequence[str]) -> None:
    if isinstance(row, exp.Tuple) and len(row.expressions) == len(columns):
        pairs = zip(columns, row.expressions, strict=True)
        row.set("expressions", [_changed(by_column, column, value) for column, value in pairs])


def _change_assigned(update: exp.Update, by_column: Mapping[str, Change]) -> None:
    for assignment in update.expressions:
        if isinstance(assignment, exp.EQ) and isinstance(assignment.this, exp.Column):
            name = folded(assignment.this.this)
            assignment.set("expression", _changed(by_column, name, assignment.expression))


def _changed(by_column: Mapping[str, Change], column: str, value: exp.Expr) -> exp.Expr:
    is_default = isinstance(value, exp.Var) and value.name.upper() == "DEFAULT"
    return by_column[column](value) if column in by_column and not is_default else value


def repair(table: str, limits: Limits) -> list[str]:
    """Statements after a load that looked at no limit: the first row beyond one is an error, finer fractions are cut."""
    checks = [
        f"SELECT max({limit.sql(quote(name))}) FROM {table}"
        for name, limit in limits.items()
        if limit.matters and limit.kind == "VARCHAR"
    ]
    cuts = [
        f"UPDATE {table} SET {quote(name)} = {limit.sql(quote(name))} WHERE {quote(name)} <> {limit.sql(quote(name))}"
        for name, limit in limits.items()
        if limit.matters and limit.kind != "VARCHAR"
    ]
    return checks + cuts
