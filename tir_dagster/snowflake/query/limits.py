"""What keeps a query from being refreshed by key: the shapes and functions whose rows depend on more than their keys."""

from __future__ import annotations

from sqlglot import exp

from tir_dagster.snowflake.query.functions import (
    CHANCE,
    CLOCK,
    LOOSE_AGGREGATES,
    ORDERED_AGGREGATES,
    PLAIN_AGGREGATES,
    SCALARS,
)
from tir_dagster.snowflake.query.text import NotIncremental, written

_CLAUSES = {"expressions", "distinct", "from_", "joins", "where", "group", "having", "order"}
# What a clause means for a refresh by key; others are only named.
_CLAUSE_REASONS = {
    "with_": "it has a WITH clause",
    "qualify": "QUALIFY keeps a row for what other rows are",
    "windows": "a window lets one row depend on others",
    "limit": "LIMIT or TOP keeps a row for what other rows are",
    "offset": "OFFSET keeps a row for what other rows are",
    "sample": "SAMPLE takes other rows each time",
    "laterals": "it joins a table function",
    "pivots": "PIVOT makes columns of rows",
}
_PARTS = (
    exp.Select, exp.From, exp.Join, exp.Table, exp.TableAlias, exp.Identifier, exp.Alias, exp.Column, exp.Star,
    exp.Where, exp.Group, exp.Having, exp.Distinct, exp.Order, exp.Ordered, exp.WithinGroup, exp.Anonymous,
    exp.Literal, exp.RawString, exp.Boolean, exp.Null, exp.Var, exp.Paren, exp.Tuple, exp.Case, exp.If, exp.Cast,
    exp.DataType, exp.DataTypeParam, exp.Extract, exp.Interval, exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT,
    exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Between, exp.In, exp.Is, exp.Like, exp.ILike,
    exp.Any, exp.All, exp.Escape, exp.RegexpLike, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.DPipe, exp.Neg,
    exp.Bracket, exp.JSONExtract, exp.JSONPath, exp.JSONPathRoot, exp.JSONPathKey, exp.JSONPathSubscript,
)  # fmt: skip
_SESSION_PARTS = (exp.CurrentUser, exp.CurrentRole)
_CLOCK_PARTS = (exp.CurrentDate, exp.CurrentTime, exp.CurrentTimestamp, exp.Localtime, exp.Localtimestamp)


def is_aggregate(node: exp.Expr) -> bool:
    """Whether it is the call of an aggregate function."""
    return isinstance(node, exp.Anonymous) and node.name.upper() in PLAIN_AGGREGATES | ORDERED_AGGREGATES


def is_restless(tree: exp.Expr) -> bool:
    """Whether anything in it depends on the clock, on chance or on who asks."""
    names = (call.name.upper() for call in tree.find_all(exp.Anonymous))
    by_name = any(name in CLOCK | CHANCE or name.startswith("CURRENT_") for name in names)
    return by_name or tree.find(*_CLOCK_PARTS, *_SESSION_PARTS, exp.TableSample) is not None


def check_shape(tree: exp.Query) -> exp.Select:
    """The one SELECT over plain tables; or else why the query is only loaded in full."""
    if not isinstance(tree, exp.Select):
        raise NotIncremental("it puts several SELECTs together")
    for clause, reason in _CLAUSE_REASONS.items():
        if clause in {"with_", "laterals", "pivots"} and tree.args.get(clause):
            raise NotIncremental(reason)
    if sum(1 for _ in tree.find_all(exp.Query)) > 1:
        raise NotIncremental("it has a subquery")
    sources = [tree.args["from_"].this] if tree.args.get("from_") else []
    for source in (*sources, *(join.this for join in tree.args.get("joins") or ())):
        check_source(source)
    if not sources:
        raise NotIncremental("it has no FROM clause")
    return tree


def check_source(source: exp.Expr) -> None:
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise NotIncremental(
            "it reads from something other than a table: joins in brackets, or a table function (what that reads elsewhere "
            "is not watched)"
        )
    odd = {name for name, value in source.args.items() if value} - {"this", "db", "catalog", "alias"}
    if odd & {"sample"}:
        raise NotIncremental(_CLAUSE_REASONS["sample"])
    if odd:
        raise NotIncremental(f"{written(source)} is more than a table")
    if source.args.get("alias") and source.args["alias"].args.get("columns"):
        raise NotIncremental(f"{source.alias} gives a table's columns other names")


def check_parts(select: exp.Select) -> None:
    """Every clause and expression must be one whose meaning for a refresh by key is known."""
    for clause, value in select.args.items():
        if value and clause not in _CLAUSES:
            raise NotIncremental(_CLAUSE_REASONS.get(clause, f"its {clause.strip('_').upper()} clause is not analysed"))
    distinct, group = select.args.get("distinct"), select.args.get("group")
    if distinct and distinct.args.get("on"):
        raise NotIncremental("DISTINCT ON keeps one of several rows")
    if group and any(group.args.get(name) for name in ("grouping_sets", "cube", "rollup", "totals")):
        raise NotIncremental("GROUPING SETS, ROLLUP and CUBE put one row into several groups")
    for clause in _CLAUSES - {"order"}:
        for part in _listed(select.args.get(clause)):
            for node in part.walk():
                _check_part(node)


def _listed(value: object) -> list[exp.Expr]:
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, exp.Expr)]


def _check_part(node: exp.Expr) -> None:
    if isinstance(node, exp.Window):
        raise NotIncremental("a window function lets one row depend on others")
    if isinstance(node, _CLOCK_PARTS):
        raise NotIncremental(f"{written(node)} is another value at each refresh")
    if isinstance(node, _SESSION_PARTS):
        raise NotIncremental(f"{written(node)} depends on who asks")
    if not isinstance(node, _PARTS):
        raise NotIncremental(f"{_shortened(node)} is not analysed")
    if isinstance(node, exp.Anonymous):
        _check_function(node)
    whole = node.this if isinstance(node, exp.Column) else node
    if isinstance(whole, exp.Star) and not _is_listed_star(node):
        raise NotIncremental("a * inside an expression reads columns that are not named")


def _is_listed_star(star: exp.Expr) -> bool:
    above = star.parent
    if isinstance(star, exp.Star) and isinstance(above, exp.Column):
        star, above = above, above.parent
    counted = isinstance(above, exp.Anonymous) and above.name.upper() == "COUNT" and isinstance(star, exp.Star)
    return counted or isinstance(above, exp.Select)


def _check_function(call: exp.Anonymous) -> None:
    name = "" if isinstance(call.this, exp.Identifier) else call.name.upper()
    if name in CLOCK:
        raise NotIncremental(f"{name} is another value at each refresh")
    if name in CHANCE:
        raise NotIncremental(f"{name} gives other values each time")
    if name.startswith("CURRENT_"):
        raise NotIncremental(f"{name} depends on who asks")
    if name in ORDERED_AGGREGATES and not isinstance(call.parent, exp.WithinGroup):
        raise NotIncremental(f"{name} without WITHIN GROUP (ORDER BY …) takes the rows in any order")
    if name in LOOSE_AGGREGATES:
        raise NotIncremental(f"{name} may give another value for the same rows")
    if name not in SCALARS | PLAIN_AGGREGATES | ORDERED_AGGREGATES:
        raise NotIncremental(
            f"{_shortened(call)}: the function is not known to give the same value for the same row "
            "(what a function of your own reads elsewhere is not watched)"
        )


def _shortened(node: exp.Expr) -> str:
    text = written(node)
    return text if len(text) <= 40 else f"{text[:39]}…"
