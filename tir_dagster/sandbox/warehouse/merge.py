"""MERGE and INSERT OVERWRITE as plain statements in one transaction; rows keep their identity through an update."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import duplicate_row, unsupported
from tir_dagster.sandbox.warehouse.names import folded, quote

CANDIDATES = '"temp"."main"."_merge_candidates"'
REPLACEMENT = '"temp"."main"."_overwrite_rows"'

# Runs a statement and gives its rows; the statement is a Snowflake tree, or DuckDB text.
Run = Callable[[exp.Expr], None]
RunText = Callable[[str], list[tuple[int, ...]]]


def run_merge(merge: exp.Merge, target: str, run: Run, run_text: RunText, *, strict: bool) -> dict[str, int]:
    """Apply the MERGE; gives the number of rows by operation, in Snowflake's order.

    Every expression of every clause is computed first, against the rows as they are, into one table of candidates. A row
    that several of them would change is an error, or takes any one of them if the session is not `strict`.
    """
    clauses: list[exp.When] = list(merge.args["whens"].expressions)
    run(_candidates(merge, clauses))
    # NULL counts: in DuckDB max() over no rows is NULL.
    if run_text(f"SELECT 1 FROM {CANDIDATES} WHERE row_id IS NOT NULL GROUP BY row_id HAVING count(*) > 1 LIMIT 1"):
        if strict:
            raise duplicate_row()
        run_text(
            f"DELETE FROM {CANDIDATES} WHERE row_id IS NOT NULL "
            f"AND rowid NOT IN (SELECT max(rowid) FROM {CANDIDATES} GROUP BY row_id)"
        )
    counts: dict[str, int] = {}
    for operation in ("inserted", "updated", "deleted"):
        for index, clause in enumerate(clauses):
            if _operation(clause) == operation:
                sql = _mutation(clause, index, target)
                (affected,) = run_text(sql)[0]
                counts[operation] = counts.get(operation, 0) + affected
    run_text(f"DROP TABLE IF EXISTS {CANDIDATES}")
    return counts


def count_multi_joined(update: exp.Update, run: Run, run_text: RunText) -> int:
    """How many rows an UPDATE … FROM would change by more than one row of its source."""
    source = update.args.get("from_")
    if source is None:
        return 0
    target = update.this
    row_id = exp.column(
        "rowid",
        table=exp.to_identifier(target.alias_or_name, quoted=bool(_alias(target).args.get("quoted"))),
        quoted=True,
    )
    joined = (
        exp.select(exp.alias_(row_id, "row_id", quoted=True))
        .from_(target.copy())
        .join(source.this.copy(), join_type="CROSS")
    )
    if (condition := update.args.get("where")) is not None:
        joined = joined.where(condition.this.copy())
    run(_create_temp(CANDIDATES, joined))
    counted = run_text(f"SELECT count(*) FROM (SELECT 1 FROM {CANDIDATES} GROUP BY row_id HAVING count(*) > 1)")
    run_text(f"DROP TABLE {CANDIDATES}")
    return counted[0][0]


def run_overwrite(insert: exp.Insert, target: str, run: Run, run_text: RunText) -> int:
    """INSERT OVERWRITE: all old rows go, the new ones come; the query is read before anything goes."""
    query = insert.expression
    run(_create_temp(REPLACEMENT, query.copy()))
    run_text(f"DELETE FROM {target}")
    columns = insert.this.expressions if isinstance(insert.this, exp.Schema) else []
    listed = f" ({', '.join(quote(folded(column)) for column in columns)})" if columns else ""
    (inserted,) = run_text(f"INSERT INTO {target}{listed} SELECT * FROM {REPLACEMENT}")[0]
    run_text(f"DROP TABLE {REPLACEMENT}")
    return inserted


def _candidates(merge: exp.Merge, clauses: list[exp.When]) -> exp.Expr:
    """CREATE TEMP TABLE AS: matched pairs and unmatched source rows, the clause that takes them, its new values."""
    target, source = merge.this, merge.args["using"]
    target_alias = exp.to_identifier(target.alias_or_name, quoted=bool(_alias(target).args.get("quoted")))
    row_id = exp.column("rowid", table=target_alias, quoted=True)
    choice = exp.Case()
    values: list[exp.Expr] = []
    for index, clause in enumerate(clauses):
        test: exp.Expr = row_id.copy().is_(exp.null())
        test = test.not_() if clause.args.get("matched") else test
        if condition := clause.args.get("condition"):
            matched = clause.args.get("matched")
            test = exp.and_(test, condition.copy() if matched else _of_source(condition.copy(), source))
        choice = choice.when(test, exp.Literal.number(index))
        new_values = _values(clause)
        if not clause.args.get("matched"):
            new_values = [_of_source(value, source) for value in new_values]
        values += [exp.alias_(value, f"v{index}_{at}", quoted=True) for at, value in enumerate(new_values)]
    query = (
        exp.select(exp.alias_(row_id, "row_id", quoted=True), exp.alias_(choice, "clause", quoted=True), *values)
        .from_(source.copy())
        .join(target.copy(), on=merge.args["on"].copy(), join_type="LEFT")
    )
    wanted = (
        exp.select("*")
        .from_(query.subquery("candidates"))
        .where(exp.column("clause", quoted=True).is_(exp.null()).not_())
    )
    return _create_temp(CANDIDATES, wanted)


def _of_source(value: exp.Expr, source: exp.Expr) -> exp.Expr:
    """The expression of a NOT MATCHED clause: a column without a table is the source's, also where both have it."""
    if not source.alias_or_name:
        return value
    table = exp.to_identifier(source.alias_or_name, quoted=bool(_alias(source).args.get("quoted")))

    def qualified(node: exp.Expr) -> exp.Expr:
        plain = isinstance(node, exp.Column) and not node.table and node.find_ancestor(exp.Query) is None
        return exp.Column(this=node.this, table=table.copy()) if plain else node

    return value.transform(qualified)


def _alias(table: exp.Expr) -> exp.Expr:
    alias = table.args.get("alias")
    found = alias.this if alias is not None else table.this
    if not isinstance(found, exp.Expr):
        raise unsupported("MERGE INTO something that is not a table")
    return found


def _operation(clause: exp.When) -> str:
    then = clause.args["then"]
    if isinstance(then, exp.Insert):
        return "inserted"
    return "updated" if isinstance(then, exp.Update) else "deleted"


def _values(clause: exp.When) -> list[exp.Expr]:
    then = clause.args["then"]
    if isinstance(then, exp.Update):
        return [assignment.expression.copy() for assignment in then.expressions]
    if isinstance(then, exp.Insert):
        return [value.copy() for value in then.expression.expressions]
    return []


def _mutation(clause: exp.When, index: int, target: str) -> str:
    then = clause.args["then"]
    rows = f"{CANDIDATES} AS candidate WHERE candidate.clause = {index}"
    if isinstance(then, exp.Insert):
        columns = then.this.expressions if then.this is not None else []
        listed = f" ({', '.join(quote(folded(column)) for column in columns)})" if columns else ""
        values = ", ".join(f"v{index}_{at}" for at, _ in enumerate(_values(clause)))
        return f"INSERT INTO {target}{listed} SELECT {values} FROM {rows}"
    if isinstance(then, exp.Update):
        assignments = ", ".join(
            f"{quote(folded(assignment.this.this))} = candidate.v{index}_{at}"
            for at, assignment in enumerate(then.expressions)
        )
        return f"UPDATE {target} AS target SET {assignments} FROM {rows} AND target.rowid = candidate.row_id"
    return f"DELETE FROM {target} WHERE rowid IN (SELECT candidate.row_id FROM {rows})"


def _create_temp(name: str, query: exp.Expr) -> exp.Create:
    return exp.Create(
        this=exp.to_table(name, dialect="duckdb"),
        kind="TABLE",
        replace=True,
        expression=query,
        properties=exp.Properties(expressions=[exp.TemporaryProperty()]),
    )
