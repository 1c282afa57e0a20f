"""From a query's text to what it means for a refresh: tables, joins, outputs, filters and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlglot import exp

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.groups import Output, grouping
from tir_dagster.snowflake.query.joins import Joined, check_join, joined_tables
from tir_dagster.snowflake.query.limits import check_parts, check_shape, check_source, is_aggregate, is_restless
from tir_dagster.snowflake.query.model import RESERVED, Read, View, ViewColumn, ViewTable
from tir_dagster.snowflake.query.names import Meaning, Scope, reads
from tir_dagster.snowflake.query.spans import mark_spans
from tir_dagster.snowflake.query.text import NotIncremental, Query, ViewError, folded, parse_query, too_deep, written


def tables_of(sql: str) -> tuple[TableName, ...]:
    """All tables that the query reads, wherever they stand in it, each once."""
    return parse_query(sql).tables


def analyse(sql: str, known: Mapping[TableName, Sequence[str]]) -> View:
    """What the query shows, given each table's columns as stored."""
    query = parse_query(sql)
    for reference in query.references:
        if reference.table not in known:
            problem = f"there is no table {reference.table}, or the role may not see it. Check the name and the grants."
            raise query.error_at(reference.start, problem)
    if not query.references:
        raise ViewError("it reads no table, so that nothing in it ever changes. Name the table to show.")
    try:
        return _view(query, known)
    except RecursionError:
        raise too_deep() from None


def _view(query: Query, known: Mapping[TableName, Sequence[str]]) -> View:
    try:
        return _analysed(query, known)
    except NotIncremental as reason:
        return _opaque(query, known, f"{str(reason)[0].upper()}{str(reason)[1:]}.")


def _analysed(query: Query, known: Mapping[TableName, Sequence[str]]) -> View:
    select = check_shape(query.tree)
    for join in select.args.get("joins") or ():
        check_join(query, join)
    check_parts(select)
    mark_spans(query, select)
    scope = Scope(query)
    joined = joined_tables(select, scope, known)
    raw = _raw_outputs(select, scope)
    outputs = [Output(name, scope.resolve(node, raw)) for name, node in raw.items()]
    where = _where(select, scope, raw)
    group, having = grouping(select, scope, raw, outputs)
    conditions = [part for part in (where, having, *(one.condition for one in joined)) if part]
    used = {read for part in (*conditions, *(output.meaning for output in outputs)) for read in reads(part.tree)}
    return View(
        kind="aggregate" if group is not None else "join" if len(joined) > 1 else "copy",
        tables=tuple(_table(one, used) for one in joined),
        columns=tuple(_view_column(output) for output in outputs),
        group=group or (),
        where=where.sql if where else None,
        having=having.sql if having else None,
        having_reads=reads(having.tree) if having else (),
    )


def _table(joined: Joined, used: set[Read]) -> ViewTable:
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


def _view_column(output: Output) -> ViewColumn:
    return ViewColumn(output.name, output.meaning.sql, reads(output.meaning.tree), output.aggregate)


def _raw_outputs(select: exp.Select, scope: Scope) -> dict[str, exp.Expr]:
    """Each output's name and expression as written, with * replaced by what it stands for."""
    found: dict[str, exp.Expr] = {}
    for node in select.expressions:
        for name, expression in _named(scope, node):
            if name in found:
                raise scope.query.error(
                    node,
                    f"two output columns are called {name}. Give one of them another name with AS, or leave it out.",
                )
            if name.startswith(RESERVED):
                raise scope.query.error(
                    node, f"{name}: names that begin with {RESERVED} are taken. Give it another with AS."
                )
            found[name] = expression
    return found


def _named(scope: Scope, node: exp.Expr) -> list[tuple[str, exp.Expr]]:
    star = node.this if isinstance(node, exp.Column) else node
    if isinstance(star, exp.Star):
        if star.args.get("replace") or star.args.get("ilike"):
            raise NotIncremental("* with REPLACE or ILIKE is not analysed")
        return scope.star(node)
    if isinstance(node, exp.Alias):
        return [(folded(node.args["alias"]), node.this)]
    if isinstance(node, exp.Column):
        return [(folded(node.this), node)]
    raise scope.query.error(node, f"{written(node)} has no name. Give it a name with AS.")


def _where(select: exp.Select, scope: Scope, raw: Mapping[str, exp.Expr]) -> Meaning | None:
    where = select.args.get("where")
    meaning = scope.resolve(where.this, raw) if where else None
    if meaning and any(is_aggregate(node) for node in meaning.tree.walk()):
        raise scope.query.error(where, "WHERE cannot test an aggregate. Use HAVING.")
    return meaning


def _opaque(query: Query, known: Mapping[TableName, Sequence[str]], why_full: str) -> View:
    """A view that is only ever read whole, in the user's own words."""
    return View(
        kind="opaque",
        tables=tuple(
            ViewTable(str(table), table, "read", (), tuple(known[table]), tuple(known[table])) for table in query.tables
        ),
        columns=tuple(ViewColumn(name, "", (), aggregate=False) for name in _opaque_names(query, known)),
        why_full=why_full,
        text=tuple(query.pieces()),
        restless=is_restless(query.tree),
    )


def _opaque_names(query: Query, known: Mapping[TableName, Sequence[str]]) -> Iterable[str]:
    """The names of an opaque view's outputs; none if they cannot be told from the text and the tables alone."""
    select: exp.Expr = query.tree
    while isinstance(select, (exp.SetOperation, exp.Subquery)):
        select = select.this
    if not isinstance(select, exp.Select) or not select.args.get("from_"):
        return ()
    try:
        return _raw_outputs(select, _star_scope(query, select, known))
    except NotIncremental:
        return ()


def _star_scope(query: Query, select: exp.Select, known: Mapping[TableName, Sequence[str]]) -> Scope:
    """The tables that * can stand for, if it is used and they are plain."""
    scope = Scope(query)
    if not any(node.is_star for node in select.expressions):
        return scope
    joins = select.args.get("joins") or []
    if any(join.args.get("using") or join.method for join in joins) or select.args.get("laterals"):
        raise NotIncremental
    for source in (select.args["from_"].this, *(join.this for join in joins)):
        check_source(source)
        if not source.args.get("catalog"):
            raise NotIncremental
        scope.add(source, known)
    return scope
