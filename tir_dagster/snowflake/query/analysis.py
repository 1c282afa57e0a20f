"""From a query's text to what it means for a refresh: tables, joins, outputs, filters and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.limits import check_parts, check_shape, check_source, is_aggregate, is_restless, is_sum
from tir_dagster.snowflake.query.model import RESERVED, ColumnRead, JoinKey, Role, View, ViewColumn, ViewTable
from tir_dagster.snowflake.query.names import Meaning, NameScope, SourceTable, reads
from tir_dagster.snowflake.query.repeatable import open_orders, why_unrepeatable
from tir_dagster.snowflake.query.text import (
    NotTakenApart,
    Query,
    ViewError,
    folded,
    mark_spans,
    parse_query,
    too_deep,
    written,
)


@lru_cache(maxsize=64)
def tables_of(sql: str) -> tuple[TableName, ...]:
    """All tables that the query reads, wherever they stand in it, each once."""
    return parse_query(sql).tables


def analyse(sql: str, table_columns: Mapping[TableName, Sequence[str]]) -> View:
    """Analyse the query, given each table's columns as stored; raise ViewError where it is wrong."""
    query = parse_query(sql)
    for reference in query.references:
        if reference.table not in table_columns:
            problem = f"there is no table {reference.table}, or the role may not see it. Check the name and the grants."
            raise query.error_at(reference.start, problem)
    if not query.references:
        raise ViewError("it reads no table, so that nothing in it ever changes. Name the table to show.")
    try:
        return _view(query, table_columns)
    except RecursionError:
        raise too_deep() from None


def _view(query: Query, table_columns: Mapping[TableName, Sequence[str]]) -> View:
    try:
        return _analysed(query, table_columns)
    except NotTakenApart as reason:
        return _untouched(query, table_columns, str(reason))


def _analysed(query: Query, table_columns: Mapping[TableName, Sequence[str]]) -> View:
    select = check_shape(query.tree)
    for join in select.args.get("joins") or ():
        check_join(join)
    check_parts(select)
    mark_spans(query, select)
    scope = NameScope(query)
    joined = joined_tables(select, scope, table_columns)
    raw = _raw_outputs(select, scope)
    outputs = [OutputColumn(name, scope.resolve(node, raw)) for name, node in raw.items()]
    where = _where(select, scope, raw)
    group, having = grouping(select, scope, raw, outputs)
    conditions = [part for part in (where, having, *(joined_table.condition for joined_table in joined)) if part]
    used = {read for part in (*conditions, *(output.meaning for output in outputs)) for read in reads(part.tree)}
    return View(
        kind="aggregate" if group is not None else "join" if len(joined) > 1 else "copy",
        tables=tuple(_table(joined_table, used) for joined_table in joined),
        columns=tuple(_view_column(output) for output in outputs),
        group=group or (),
        where=where.sql if where else None,
        having=having.sql if having else None,
        having_reads=reads(having.tree) if having else (),
        orders=open_orders(query),
    )


def _table(joined: Joined, used: set[ColumnRead]) -> ViewTable:
    source = joined.source
    return ViewTable(
        alias=source.alias,
        table=source.table,
        role=joined.role,
        on=joined.on,
        used=tuple(name for name in source.columns if (source.alias, name) in used),
        columns=source.columns,
        condition=joined.condition.sql if joined.condition else None,
    )


def _view_column(output: OutputColumn) -> ViewColumn:
    return ViewColumn(output.name, output.meaning.sql, reads(output.meaning.tree), output.aggregate)


def _raw_outputs(select: exp.Select, scope: NameScope) -> dict[str, exp.Expr]:
    """Each output's name and expression as written, with * replaced by what it stands for."""
    outputs: dict[str, exp.Expr] = {}
    for node in select.expressions:
        for name, expression in _named_outputs(scope, node):
            if name in outputs:
                raise scope.query.error(
                    node,
                    f"two output columns are called {name}. Give one of them another name with AS, or leave it out.",
                )
            if name.startswith(RESERVED):
                raise scope.query.error(
                    node, f"{name}: names that begin with {RESERVED} are taken. Give it another with AS."
                )
            outputs[name] = expression
    return outputs


def _named_outputs(scope: NameScope, node: exp.Expr) -> list[tuple[str, exp.Expr]]:
    star = node.this if isinstance(node, exp.Column) else node
    if isinstance(star, exp.Star):
        if star.args.get("replace") or star.args.get("ilike"):
            raise NotTakenApart("* with REPLACE or ILIKE is not analysed")
        return scope.star(node)
    if isinstance(node, exp.Alias):
        return [(folded(node.args["alias"]), node.this)]
    if isinstance(node, exp.Column):
        return [(folded(node.this), node)]
    raise scope.query.error(node, f"{written(node)} has no name. Give it a name with AS.")


def _where(select: exp.Select, scope: NameScope, raw: Mapping[str, exp.Expr]) -> Meaning | None:
    where = select.args.get("where")
    meaning = scope.resolve(where.this, raw) if where else None
    if meaning and any(is_aggregate(node) for node in meaning.tree.walk()):
        raise scope.query.error(where, "WHERE cannot test an aggregate. Use HAVING.")
    return meaning


def _untouched(query: Query, table_columns: Mapping[TableName, Sequence[str]], why_whole: str) -> View:
    """A view whose text stays as it is: compared as a whole if it gives the same rows each time, else loaded in full."""
    why_full = why_unrepeatable(query.tree)
    return View(
        kind="opaque" if why_full else "whole",
        tables=tuple(
            ViewTable(str(table), table, "read", (), tuple(table_columns[table]), tuple(table_columns[table]))
            for table in query.tables
        ),
        columns=tuple(ViewColumn(name, "", (), aggregate=False) for name in _output_names(query, table_columns)),
        why_full=_sentence(why_full) if why_full else None,
        why_whole=None if why_full else _sentence(why_whole),
        text=tuple(query.pieces()),
        orders=() if why_full else open_orders(query),
        adds_up=not why_full and any(is_sum(node) for node in query.tree.walk()),
        restless=is_restless(query.tree),
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _output_names(query: Query, table_columns: Mapping[TableName, Sequence[str]]) -> Iterable[str]:
    """Return the names of the outputs; none if the text and the tables do not tell them."""
    select: exp.Expr = query.tree
    while isinstance(select, (exp.SetOperation, exp.Subquery)):
        select = select.this
    if not isinstance(select, exp.Select) or not select.args.get("from_"):
        return ()
    try:
        return _raw_outputs(select, _star_scope(query, select, table_columns))
    except NotTakenApart:
        return ()


def _star_scope(query: Query, select: exp.Select, table_columns: Mapping[TableName, Sequence[str]]) -> NameScope:
    """The tables that * can stand for, if it is used and they are plain."""
    scope = NameScope(query)
    if not any(node.is_star for node in select.expressions):
        return scope
    joins = select.args.get("joins") or []
    if any(join.args.get("using") or join.method for join in joins) or select.args.get("laterals"):
        raise NotTakenApart
    for source in (select.args["from_"].this, *(join.this for join in joins)):
        check_source(source)
        if not source.args.get("catalog"):
            raise NotTakenApart
        scope.add(source, table_columns)
    return scope


_JOIN_PARTS = {"this", "on", "using", "side", "kind", "method", "match_condition", "directed"}


@dataclass(frozen=True)
class Joined:
    """A table of the query and how it is joined to those before it."""

    source: SourceTable
    role: Role
    on: tuple[JoinKey, ...] = ()
    condition: Meaning | None = None


def check_join(join: exp.Join) -> None:
    """Raise NotTakenApart for a kind of join that has no equality."""
    kind = " ".join(word for word in (join.method, join.side, join.kind) if word)
    odd = {name for name, value in join.args.items() if value} - _JOIN_PARTS
    if odd:
        raise NotTakenApart(f"the join of {written(join.this)} has {', '.join(sorted(odd))}, which is not analysed")
    if join.method == "ASOF":
        raise NotTakenApart("an ASOF join takes the nearest of several rows")
    if join.method or join.side not in {"", "LEFT"} or join.kind not in {"", "INNER", "OUTER"}:
        raise NotTakenApart(f"it has a {kind} join of {written(join.this)}")
    if not join.args.get("on") and not join.args.get("using"):
        raise NotTakenApart(f"{written(join.this)} is joined without a condition")


def joined_tables(
    select: exp.Select, scope: NameScope, table_columns: Mapping[TableName, Sequence[str]]
) -> list[Joined]:
    tables = [Joined(scope.add(select.args["from_"].this, table_columns), "fact")]
    for join in select.args.get("joins") or ():
        # The left side of USING is looked for among the tables before the joined one.
        sides = [(name, _left_of_using(scope, name)) for name in join.args.get("using") or ()]
        source = scope.add(join.this, table_columns)
        condition = _using(scope, source, sides) if sides else scope.resolve(join.args["on"])
        role: Role = "left" if join.side == "LEFT" else "inner"
        tables.append(Joined(source, role, _join_keys(source.alias, condition.tree), condition))
    return tables


def _left_of_using(scope: NameScope, name: exp.Expr) -> Meaning:
    return scope.resolve(exp.Column(this=name.copy()))


def _using(scope: NameScope, source: SourceTable, sides: Sequence[tuple[exp.Expr, Meaning]]) -> Meaning:
    parts = []
    for name, left in sides:
        right = scope.resolve(exp.Column(this=name.copy(), table=exp.to_identifier(source.alias, quoted=True)))
        equality = exp.EQ(this=left.tree, expression=right.tree)
        parts.append(Meaning(equality, f"{left.sql} = {right.sql}"))
    for name, _ in sides:
        scope.merged.setdefault(folded(name), set()).add(source.alias)
    return Meaning(exp.and_(*(part.tree for part in parts), copy=False), " AND ".join(part.sql for part in parts))


def _join_keys(alias: str, condition: exp.Expr) -> tuple[JoinKey, ...]:
    """The equalities between the joined table and its parent; further conditions only narrow the join."""
    equalities = [part for part in _conjuncts(condition) if isinstance(part, exp.EQ)]
    keys = tuple(key for part in equalities if (key := _join_key(part, alias)))
    if parents := sorted({key.parent for key in keys}):
        if len(parents) > 1:
            raise NotTakenApart(f"{alias} is joined on columns of {' and '.join(parents)}, not of one table")
        return keys
    if any(_compares(part, alias) for part in equalities):
        raise NotTakenApart(f"{alias} is joined on expressions, not on columns: {written(condition)}")
    raise NotTakenApart(f"{alias} is joined without an equality of one of its columns and a column of an earlier table")


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
    parents = [side for side in sides if side.table != alias]
    return JoinKey(parents[0].table, parents[0].name, own[0]) if own and parents else None


def _compares(equality: exp.EQ, alias: str) -> bool:
    """Whether the equality has the joined table on one side and earlier tables on the other."""
    sides = [{table for table, _ in reads(side)} for side in (equality.this, equality.expression)]
    return all(sides) and sum(side == {alias} for side in sides) == 1 and sum(alias in side for side in sides) == 1


@dataclass(frozen=True)
class OutputColumn:
    """An output column: its name and its expression, resolved."""

    name: str
    meaning: Meaning

    @property
    def aggregate(self) -> bool:
        return any(is_aggregate(node) for node in self.meaning.tree.walk())


def grouping(
    select: exp.Select, scope: NameScope, raw: Mapping[str, exp.Expr], outputs: Sequence[OutputColumn]
) -> tuple[tuple[str, ...] | None, Meaning | None]:
    """The outputs that name a group, None if rows are not grouped; and the condition on groups."""
    group, having = select.args.get("group"), select.args.get("having")
    if not group and not having and not any(output.aggregate for output in outputs):
        return (tuple(raw) if select.args.get("distinct") else None), None
    names = _group_names(group, scope, raw, outputs) if group else ()
    if not names:
        raise NotTakenApart("it makes one total of all rows, which every change changes")
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
    group: exp.Group, scope: NameScope, raw: Mapping[str, exp.Expr], outputs: Sequence[OutputColumn]
) -> tuple[str, ...]:
    if group.args.get("all"):
        return tuple(output.name for output in outputs if not output.aggregate)
    grouped = dict.fromkeys(_group_output(node, scope, raw, outputs) for node in group.expressions)
    if wrong := [output.name for output in grouped if output.aggregate]:
        raise scope.query.error(group, f"GROUP BY names {wrong[0]}, which is an aggregate. Group by other columns.")
    return tuple(output.name for output in grouped)


def _group_output(
    node: exp.Expr, scope: NameScope, raw: Mapping[str, exp.Expr], outputs: Sequence[OutputColumn]
) -> OutputColumn:
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
        raise NotTakenApart(
            f"GROUP BY {written(bare)} means the column {meaning}, not the output of that name, and that column is no output: "
            "to group by the output, write its position or its expression"
        )
    raise NotTakenApart(f"it groups by {meaning}, which is not among its outputs")


def _having(
    having: exp.Expr, scope: NameScope, raw: Mapping[str, exp.Expr], outputs: Sequence[OutputColumn]
) -> Meaning:
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
            raise NotTakenApart(f"{name} in HAVING may mean the column or the output of that name")
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
    return next((ungrouped for part in node.iter_expressions() if (ungrouped := _ungrouped(part, grouped))), None)
