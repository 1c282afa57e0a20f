"""How the tables of a query are joined: which column of which earlier table refers to each, and by what key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.model import JoinKey, Role
from tir_dagster.snowflake.query.names import Meaning, Scope, Source, reads
from tir_dagster.snowflake.query.text import NotIncremental, Query, folded, written

_JOIN_PARTS = {"this", "on", "using", "side", "kind", "method", "match_condition", "directed"}


@dataclass(frozen=True)
class Joined:
    """A table of the query and how it is joined to those before it."""

    source: Source
    role: Role
    on: tuple[JoinKey, ...] = ()
    condition: Meaning | None = None


def check_join(query: Query, join: exp.Join) -> None:
    """Refuse a join that has no equality by its very kind."""
    advice = "Write LEFT JOIN or INNER JOIN … ON with an equality of columns."
    kind = " ".join(word for word in (join.method, join.side, join.kind) if word)
    odd = {name for name, value in join.args.items() if value} - _JOIN_PARTS
    if odd:
        raise NotIncremental(f"the join of {written(join.this)} has {', '.join(sorted(odd))}, which is not analysed")
    if join.method == "ASOF":
        raise NotIncremental("an ASOF join takes the nearest of several rows")
    if join.method or join.side not in {"", "LEFT"} or join.kind not in {"", "INNER", "OUTER"}:
        raise query.error(join.this, f"a {kind} join of {written(join.this)} is not supported. {advice}")
    if not join.args.get("on") and not join.args.get("using"):
        raise query.error(join.this, f"{written(join.this)} is joined without a condition. {advice}")


def joined_tables(select: exp.Select, scope: Scope, known: Mapping[TableName, Sequence[str]]) -> list[Joined]:
    tables = [Joined(scope.add(select.args["from_"].this, known), "fact")]
    for join in select.args.get("joins") or ():
        # The left side of USING is looked for among the tables before the joined one.
        sides = [(name, _left_of_using(scope, name)) for name in join.args.get("using") or ()]
        source = scope.add(join.this, known)
        condition = _using(scope, source, sides) if sides else scope.resolve(join.args["on"])
        role: Role = "left" if join.side == "LEFT" else "inner"
        tables.append(Joined(source, role, _join_keys(scope.query, join, source.alias, condition.tree), condition))
    return tables


def _left_of_using(scope: Scope, name: exp.Expr) -> Meaning:
    return scope.resolve(exp.Column(this=name.copy()))


def _using(scope: Scope, source: Source, sides: Sequence[tuple[exp.Expr, Meaning]]) -> Meaning:
    parts = []
    for name, left in sides:
        right = scope.resolve(exp.Column(this=name.copy(), table=exp.to_identifier(source.alias, quoted=True)))
        equality = exp.EQ(this=left.tree, expression=right.tree)
        parts.append(Meaning(equality, f"{left.sql} = {right.sql}"))
    for name, _ in sides:
        scope.merged.setdefault(folded(name), set()).add(source.alias)
    return Meaning(exp.and_(*(part.tree for part in parts), copy=False), " AND ".join(part.sql for part in parts))


def _join_keys(query: Query, join: exp.Join, alias: str, condition: exp.Expr) -> tuple[JoinKey, ...]:
    """The equalities between the joined table and its parent; further conditions only narrow the join."""
    equalities = [part for part in _conjuncts(condition) if isinstance(part, exp.EQ)]
    keys = tuple(key for part in equalities if (key := _join_key(part, alias)))
    if parents := sorted({key.parent for key in keys}):
        if len(parents) > 1:
            raise NotIncremental(f"{alias} is joined on columns of {' and '.join(parents)}, not of one table")
        return keys
    if any(_compares(part, alias) for part in equalities):
        raise NotIncremental(f"{alias} is joined on expressions, not on columns: {written(condition)}")
    raise query.error(
        join.this,
        f"{alias} is joined without an equality between one of its columns and a column of an earlier table. "
        "Join it ON such an equality; further conditions may follow it with AND.",
    )


def _conjuncts(condition: exp.Expr) -> list[exp.Expr]:
    bare = condition.unnest()
    if isinstance(bare, exp.And):
        return [part for side in (bare.this, bare.expression) for part in _conjuncts(side)]
    return [bare]


def _join_key(equality: exp.EQ, alias: str) -> JoinKey | None:
    sides = [equality.this.unnest(), equality.expression.unnest()]
    if not all(isinstance(side, exp.Column) for side in sides):
        return None
    own = [side.name for side in sides if side.table == alias]
    other = [side for side in sides if side.table != alias]
    return JoinKey(other[0].table, other[0].name, own[0]) if own and other else None


def _compares(equality: exp.EQ, alias: str) -> bool:
    """Whether the equality has the joined table on one side and earlier tables on the other."""
    sides = [{table for table, _ in reads(side)} for side in (equality.this, equality.expression)]
    return all(sides) and sum(side == {alias} for side in sides) == 1 and sum(alias in side for side in sides) == 1
