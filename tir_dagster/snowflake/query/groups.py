"""How a query's rows are grouped: which outputs name a group, and whether that can be said at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from tir_dagster.snowflake.query.limits import is_aggregate
from tir_dagster.snowflake.query.names import Meaning, Scope
from tir_dagster.snowflake.query.text import NotIncremental, folded, written


@dataclass(frozen=True)
class Output:
    """An output column: its name and its expression, resolved."""

    name: str
    meaning: Meaning

    @property
    def aggregate(self) -> bool:
        return any(is_aggregate(node) for node in self.meaning.tree.walk())


def grouping(
    select: exp.Select, scope: Scope, raw: Mapping[str, exp.Expr], outputs: Sequence[Output]
) -> tuple[tuple[str, ...] | None, Meaning | None]:
    """The outputs that name a group, None if rows are not grouped; and the condition on groups."""
    group, having = select.args.get("group"), select.args.get("having")
    if not group and not having and not any(output.aggregate for output in outputs):
        return (tuple(raw) if select.args.get("distinct") else None), None
    names = _group_names(group, scope, raw, outputs) if group else ()
    if not names:
        raise NotIncremental("it makes one total of all rows, which every change changes")
    meaning = _having(having, scope, raw, outputs) if having else None
    grouped = {written(output.meaning.tree.unnest()) for output in outputs if output.name in names}
    for part in (*(output.meaning for output in outputs), *([meaning] if meaning else [])):
        if column := _ungrouped(part.tree, grouped):
            raise scope.query.error(
                column,
                f"{column.table}.{column.name} is neither grouped nor aggregated. Add it to GROUP BY, or aggregate it.",
            )
    return names, meaning


def _group_names(
    group: exp.Group, scope: Scope, raw: Mapping[str, exp.Expr], outputs: Sequence[Output]
) -> tuple[str, ...]:
    if group.args.get("all"):
        return tuple(output.name for output in outputs if not output.aggregate)
    found = dict.fromkeys(_group_output(node, scope, raw, outputs) for node in group.expressions)
    if wrong := [output.name for output in found if output.aggregate]:
        raise scope.query.error(group, f"GROUP BY names {wrong[0]}, which is an aggregate. Group by other columns.")
    return tuple(output.name for output in found)


def _group_output(node: exp.Expr, scope: Scope, raw: Mapping[str, exp.Expr], outputs: Sequence[Output]) -> Output:
    """The output that a part of GROUP BY means: by position, by name or by expression."""
    bare = node.unnest()
    if isinstance(bare, exp.Literal) and bare.name.isdigit():
        if not 1 <= int(bare.name) <= len(outputs):
            raise scope.query.error(bare, f"GROUP BY {bare.name}: there are {len(outputs)} output columns.")
        return outputs[int(bare.name) - 1]
    meaning = written(scope.resolve(node, raw).tree.unnest())
    for output in outputs:
        if written(output.meaning.tree.unnest()) == meaning:
            return output
    if isinstance(bare, exp.Column) and folded(bare.this) in raw:
        raise NotIncremental(
            f"GROUP BY {written(bare)} means the column {meaning}, not the output of that name, and that column is no output: "
            "to group by the output, write its position or its expression"
        )
    raise NotIncremental(f"it groups by {meaning}, which is not among its outputs")


def _having(having: exp.Expr, scope: Scope, raw: Mapping[str, exp.Expr], outputs: Sequence[Output]) -> Meaning:
    meanings = {output.name: output.meaning.sql for output in outputs}
    for column in having.find_all(exp.Column):
        name = folded(column.this)
        unclear = (
            not column.args.get("table")
            and name in meanings
            and scope.owners(name)
            and not _is_inside_aggregate(column)
        )
        if unclear and scope.resolve(column).sql != meanings[name]:
            raise NotIncremental(f"{name} in HAVING may mean the column or the output of that name")
    return scope.resolve(having.this, raw)


def _is_inside_aggregate(node: exp.Expr) -> bool:
    above: exp.Expr | None = node
    while above := above.parent if above else None:
        if is_aggregate(above) or isinstance(above, exp.WithinGroup):
            return True
    return False


def _ungrouped(node: exp.Expr, grouped: set[str]) -> exp.Column | None:
    """A column outside of every aggregate and every group expression."""
    if is_aggregate(node) or isinstance(node, exp.WithinGroup) or written(node) in grouped:
        return None
    if isinstance(node, exp.Column):
        return node
    return next((found for part in node.iter_expressions() if (found := _ungrouped(part, grouped))), None)
