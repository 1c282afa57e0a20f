"""Whether a query gives the same rows each time it reads the same tables, and the orders in it that ties may leave open.

Two readings of a query are compared with each other, and with the extract, only if they cannot differ by themselves. What
is not known to be repeatable is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sqlglot import exp

from tir_dagster.snowflake.query.limits import (
    ORDERED_AGGREGATES,
    PLAIN_AGGREGATES,
    PLAIN_PARTS,
    function_name,
    is_aggregate,
    shortened,
    unsteady_function,
    unsteady_part,
)
from tir_dagster.snowflake.query.model import OpenOrder
from tir_dagster.snowflake.query.text import Query, folded, written
from tir_dagster.snowflake.query.ties import tie_probe

_PARTS = (
    *PLAIN_PARTS, exp.With, exp.CTE, exp.SetOperation, exp.Subquery, exp.Exists, exp.Values, exp.Lateral, exp.Kwarg,
    exp.Window, exp.WindowSpec, exp.IgnoreNulls, exp.RespectNulls, exp.Qualify, exp.Limit, exp.Fetch, exp.LimitOptions,
    exp.Offset, exp.GroupingSets, exp.Cube, exp.Rollup, exp.Array, exp.Struct, exp.PropertyEQ, exp.Collate,
)  # fmt: skip
# Why others are not taken for repeatable; what is not named here is not known.
_REASONS: dict[type[exp.Expr], str] = {
    exp.TableSample: "SAMPLE takes other rows each time",
    exp.Pivot: "PIVOT and UNPIVOT are not analysed: their columns may depend on the rows",
    exp.MatchRecognize: "MATCH_RECOGNIZE is not analysed",
    exp.Connect: "CONNECT BY is not analysed: write a recursive WITH instead",
    exp.Parameter: "a variable, or a column by its position, is not analysed",
    exp.Lock: "it locks rows",
}
# Equal rows get equal values of these, in whichever order they come.
_RANKS = frozenset({"RANK", "DENSE_RANK", "PERCENT_RANK", "CUME_DIST", "RATIO_TO_REPORT"})
# The value of these depends on which of two rows that tie comes first.
_PLACES = frozenset(
    {"CONDITIONAL_CHANGE_EVENT", "CONDITIONAL_TRUE_EVENT", "FIRST_VALUE", "LAG", "LAST_VALUE", "LEAD", "NTH_VALUE", "NTILE",
     "ROW_NUMBER"}
)  # fmt: skip
# Table functions of their arguments alone; but SEQ, one of their columns, is any number.
_FLATTENING = frozenset({"FLATTEN", "SPLIT_TO_TABLE", "STRTOK_SPLIT_TO_TABLE"})
_GROUPING = frozenset({"GROUPING", "GROUPING_ID"})
# So much is shown of an order.
_SHOWN = 100


def why_unrepeatable(tree: exp.Expr) -> str | None:
    """Return why two readings of the same tables may differ; None where only ties in an order could cause that."""
    flattened = any(function_name(call) in _FLATTENING for call in tree.find_all(exp.Anonymous))
    for node in tree.walk():
        if why := _why(node, flattened=flattened):
            return why
    return None


def _why(node: exp.Expr, *, flattened: bool) -> str | None:
    if why := unsteady_part(node) or next((why for kind, why in _REASONS.items() if isinstance(node, kind)), None):
        return why
    if not isinstance(node, _PARTS):
        return f"{shortened(node)} is not analysed"
    match node:
        case exp.Anonymous():
            return _why_function(node)
        case exp.Column():
            return _why_column(node, flattened=flattened)
        case exp.Star() if flattened and isinstance(node.parent, (exp.Select, exp.Column)):
            return "* shows SEQ of a table function, which is another number each time"
        case exp.Join() if node.method == "ASOF":
            return "an ASOF join takes any of several nearest rows"
        case exp.Distinct() if node.args.get("on"):
            return "DISTINCT ON keeps one of several rows"
        case exp.Window():
            unordered = not node.args.get("order") and _depends_on_ties(node)
            return f"{shortened(node)} takes the rows in any order, as it has no ORDER BY" if unordered else None
        case exp.Query() if _is_cut(node) and not node.args.get("order"):
            return "LIMIT, TOP or OFFSET without ORDER BY takes any rows"
    return None


def _why_function(call: exp.Anonymous) -> str | None:
    name, above = function_name(call), call.parent
    while isinstance(above, (exp.IgnoreNulls, exp.RespectNulls)):
        above = above.parent
    windowed = isinstance(above, exp.Window) and name in _RANKS | _PLACES
    in_from = isinstance(above, (exp.Table, exp.Lateral)) or (
        isinstance(above, exp.Anonymous) and isinstance(above.parent, exp.Table)
    )
    if windowed or name in _GROUPING or (in_from and name in _FLATTENING | {"TABLE"}):
        return None
    return unsteady_function(call)


def _why_column(column: exp.Column, *, flattened: bool) -> str | None:
    name = column.name.upper()
    if name == "NEXTVAL" and column.args.get("table"):
        return f"{shortened(column)} is another number each time"
    if name == "SEQ" and flattened:
        return "SEQ of a table function is another number each time"
    return None


def _is_cut(node: exp.Expr) -> bool:
    return any(node.args.get(name) for name in ("limit", "offset", "fetch"))


def _depends_on_ties(window: exp.Window) -> bool:
    call = window.this
    while isinstance(call, (exp.IgnoreNulls, exp.RespectNulls)):
        call = call.this
    if isinstance(call, exp.WithinGroup):
        # Its own order is looked at for itself.
        return False
    name = function_name(call) if isinstance(call, exp.Anonymous) else ""
    if name in _RANKS:
        return False
    frame = window.args.get("spec")
    by_rows = frame is not None and str(frame.args.get("kind")).upper() != "RANGE"
    # Without a frame, an aggregate takes all rows that tie with the last one: by RANGE.
    return by_rows or name not in PLAIN_AGGREGATES | ORDERED_AGGREGATES


# Orders


def open_orders(query: Query) -> tuple[OpenOrder, ...]:
    """The orders in a query, repeatable otherwise, that decide what it shows, and in which different rows may tie."""
    return tuple(dict.fromkeys(_open_orders(query)))


def _open_orders(query: Query) -> Iterator[OpenOrder]:
    for node in query.tree.walk():
        match node:
            case exp.WithinGroup() if not _orders_its_own_values(node):
                yield OpenOrder(shortened(node, _SHOWN))
            case exp.Window() if _depends_on_ties(node):
                yield from _open_window(query, node)
            case exp.Query() if _is_cut(node) and not _covers_outputs(node):
                yield OpenOrder(f"{shortened(node.args['order'], _SHOWN).strip()} … LIMIT")


def _open_window(query: Query, window: exp.Window) -> Iterator[OpenOrder]:
    select = window.find_ancestor(exp.Select)
    if select is None or not _orders_groups(window, select):
        probe = () if select is None or _is_grouped(select) else tie_probe(query, select, window)
        yield OpenOrder(shortened(window, _SHOWN), probe)


def _orders_its_own_values(within: exp.WithinGroup) -> bool:
    """Whether values that tie are equal: LISTAGG(x) WITHIN GROUP (ORDER BY x). Only lists have an order."""
    call = within.this
    if not isinstance(call, exp.Anonymous) or function_name(call) not in ORDERED_AGGREGATES:
        return True
    keys = _Keys(ordered.this for ordered in within.expression.expressions)
    return all(keys.cover(value) for value in call.expressions)


def _orders_groups(window: exp.Window, select: exp.Select) -> bool:
    """Whether the rows are groups that the window tells apart: it is parted and ordered by all that they are grouped by."""
    group = select.args.get("group")
    if group is None or not _is_plain_group(group):
        return False
    keys = _Keys([*(window.args.get("partition_by") or ()), *_ordered(window)], alone=_is_alone(select))
    return all(keys.cover(expression) for expression in group.expressions)


def _covers_outputs(query: exp.Query) -> bool:
    """Whether rows that tie are equal in all outputs, so that it does not matter which of them are kept."""
    select: exp.Expr = query
    while isinstance(select, (exp.SetOperation, exp.Subquery)):
        select = select.this
    outputs = select.expressions if isinstance(select, exp.Select) else []
    unclear = any(output.find(exp.Star, exp.Query, exp.Window, exp.Collate) for output in outputs)
    if not outputs or unclear:
        return False
    if select is not query:
        # Of several SELECTs, only outputs can be named.
        names = [
            folded(output.args["alias"]) if isinstance(output, exp.Alias) else output.name.upper() for output in outputs
        ]
        outputs = [exp.column(exp.to_identifier(name, quoted=True)) for name in names]
    keys = _Keys(_order_terms(query, outputs), alone=select is query and _is_alone(select))
    return all(keys.cover(output.unalias()) for output in outputs)


def _order_terms(query: exp.Query, outputs: Sequence[exp.Expr]) -> Iterator[exp.Expr]:
    """The expressions that the parts of ORDER BY stand for, where that is certain."""
    by_alias = {folded(output.args["alias"]): output.this for output in outputs if isinstance(output, exp.Alias)}
    for key in _ordered(query):
        bare = key.unnest()
        if isinstance(bare, exp.Literal):
            if not bare.is_string and bare.name.isdigit() and 1 <= int(bare.name) <= len(outputs):
                yield outputs[int(bare.name) - 1].unalias()
            continue
        # The name of an output, or of a column: clear only if both are the same.
        output = (
            by_alias.get(folded(bare.this)) if isinstance(bare, exp.Column) and not bare.args.get("table") else None
        )
        if output is None or written(output) == written(bare):
            yield bare


def _is_grouped(select: exp.Select) -> bool:
    if select.args.get("group") or select.args.get("having"):
        return True
    return any(
        is_aggregate(node) and node.find_ancestor(exp.Select) is select and not _is_windowed(node)
        for part in select.expressions
        for node in part.walk()
    )


def _is_windowed(call: exp.Expr) -> bool:
    above = call.parent
    while isinstance(above, (exp.IgnoreNulls, exp.RespectNulls, exp.WithinGroup)):
        above = above.parent
    return isinstance(above, exp.Window)


def _is_plain_group(group: exp.Group) -> bool:
    """Whether each group has one row, named by expressions rather than by positions."""
    special = any(group.args.get(name) for name in ("all", "grouping_sets", "cube", "rollup", "totals"))
    return (
        bool(group.expressions)
        and not special
        and not any(expression.find(exp.Literal) for expression in group.expressions)
    )


def _is_alone(select: exp.Expr) -> bool:
    """Whether all columns are of one table."""
    return not select.args.get("joins") and not select.args.get("laterals")


def _ordered(node: exp.Expr) -> list[exp.Expr]:
    order = node.args.get("order")
    return [ordered.this for ordered in order.expressions] if order else []


class _Keys:
    """Expressions by which rows are told apart; `alone` says that all columns are of one table, whether it is named or not."""

    def __init__(self, keys: Iterable[exp.Expr], *, alone: bool = False) -> None:
        self._alone = alone
        self._texts = {self._text(key) for key in keys}

    def cover(self, value: exp.Expr) -> bool:
        """Whether rows with equal keys have equal values of this."""
        if self._text(value) in self._texts:
            return True
        if isinstance(value, (exp.Column, exp.Star, exp.Query)) or is_aggregate(value):
            return False
        return all(self.cover(part) for part in value.iter_expressions())

    def _text(self, node: exp.Expr) -> str:
        bare = node.unnest()
        if not isinstance(bare, exp.Column) or isinstance(bare.this, exp.Star):
            return written(bare)
        parts = bare.parts[-1:] if self._alone else bare.parts
        return ".".join(f'"{folded(part)}"' for part in parts)
