"""What fakesnow cannot resolve in a statement: past versions, INFORMATION_SCHEMA.TABLES, system and context functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import duckdb
from fakesnow.params import pop_qmark_param
from sqlglot import exp

from tir_dagster.sandbox.warehouse import staged_parquet, views
from tir_dagster.sandbox.warehouse.catalog import tables_view
from tir_dagster.sandbox.warehouse.dialect import corrected
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, unsupported
from tir_dagster.sandbox.warehouse.limits import limit_casts
from tir_dagster.sandbox.warehouse.names import (
    TableName,
    folded,
    parse_name,
    point_to,
    quote,
    table_name,
    temporary_name,
)
from tir_dagster.sandbox.warehouse.timetravel import clause_kind, net_changes, rows_at

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.session import Session

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_views = itertools.count(1)
# Context functions that sqlglot knows by name; the others come as anonymous calls.
_PARSED: dict[type[exp.Expr], str] = {
    exp.CurrentRole: "CURRENT_ROLE",
    exp.CurrentWarehouse: "CURRENT_WAREHOUSE",
    exp.CurrentUser: "CURRENT_USER",
    exp.CurrentDatabase: "CURRENT_DATABASE",
    exp.CurrentSchema: "CURRENT_SCHEMA",
    exp.CurrentAccount: "CURRENT_ACCOUNT",
    exp.CurrentRegion: "CURRENT_REGION",
    exp.CurrentSession: "CURRENT_SESSION",
}


@contextmanager
def resolved(session: Session, tree: exp.Expr, params: Any) -> Iterator[Any]:
    """The statement with every such reference replaced; the temporary views it needs live as long as the block."""
    tree = limit_casts(corrected(tree.copy()))
    staged_parquet.infer(session, tree, params)
    temporary = session.temporary_tables()
    copied = session.transaction.open
    replaced = []
    uninitialized = session.lake.uninitialized
    for table in list(tree.find_all(exp.Table)):
        if uninitialized and not isinstance(tree, (exp.Drop, exp.Describe)):
            _refuse_uninitialized(uninitialized, _meant(session, tree, table))
        if (sql := _view_sql(session, tree, table, params)) is not None:
            if isinstance(tree, exp.Create) and str(tree.args.get("kind")).upper() == "VIEW":
                raise unsupported("a view over past versions or INFORMATION_SCHEMA.TABLES")
            replaced.append(_replace(session, table, sql))
        elif temporary and (name := _meant(session, tree, table)) in temporary:
            assert name is not None
            _refer_to_temporary(tree, table, name)
    registered = [
        _read_result(session, scan, query)
        for scan in list(tree.find_all(exp.TableFromRows))
        if (query := _scanned(tree, scan))
    ]
    for call in list(tree.find_all(exp.Anonymous, *_PARSED)):
        if (value := _constant(session, call)) is not None:
            if call is tree:
                tree = value
            call.replace(value)
    try:
        yield tree
    finally:
        for result in registered:
            with suppress(duckdb.Error):
                session.duck.unregister(result)
        for view in replaced:
            with suppress(duckdb.Error):
                session.duck.execute(f"DROP {'TABLE' if copied else 'VIEW'} IF EXISTS {view}")


def _scanned(tree: exp.Expr, scan: exp.TableFromRows) -> str | None:
    """The query whose result a part of the statement reads; fakesnow answers a statement that reads nothing else."""
    call, clause = scan.this, scan.parent
    is_scan = isinstance(call, exp.Anonymous) and call.name.upper() == "RESULT_SCAN" and call.expressions
    if not is_scan or (clause is not None and clause.parent is tree):
        return None
    return str(call.expressions[0].name)


def _read_result(session: Session, scan: exp.TableFromRows, query: str) -> str:
    """Put a kept result in the place of its RESULT_SCAN; return the name under which this session reads it."""
    name = f"_tir_{next(_views)}"
    session.duck.register(name, session.results.table(query, session.duck))
    alias = scan.args.get("alias") or exp.TableAlias(this=exp.to_identifier(name, quoted=True))
    scan.replace(exp.Table(this=exp.to_identifier(name, quoted=True), alias=alias))
    return name


def _refuse_uninitialized(uninitialized: set[TableName], name: TableName | None) -> None:
    """Raise if a dynamic table is read before its first refresh."""
    if name in uninitialized:
        raise SnowflakeError(
            1,
            "42000",
            f"SQL compilation error:\nDynamic Table '{name}' is not initialized. Please run a manual refresh or wait for a "
            "scheduled refresh before querying.",
        )


def _meant(session: Session, tree: exp.Expr, table: exp.Table) -> TableName | None:
    """The table a reference means; None for a name that the statement itself defines, and for what it creates."""
    is_name = isinstance(table.this, (exp.Identifier, exp.DynamicIdentifier))
    created = isinstance(tree, exp.Create) and table in (tree.this, tree.this.this)
    defined = not table.db and table.name.upper() in {cte.alias.upper() for cte in tree.find_all(exp.CTE)}
    if not is_name or created or defined:
        return None
    try:
        return table_name(table, session.database, session.schema)
    except SnowflakeError:
        return None


def qualify(session: Session, tree: exp.Expr) -> None:
    """Give every table its full name, in place: what is kept under the statement's text outlives a USE."""
    for table in list(tree.find_all(exp.Table)):
        if (name := _meant(session, tree, table)) is not None:
            _alias_by_name(table)
            point_to(table, (name.database, name.schema, name.name))


def _refer_to_temporary(tree: exp.Expr, table: exp.Table, name: TableName) -> None:
    is_view = isinstance(tree, exp.Create) and str(tree.args.get("kind")).upper() == "VIEW"
    if is_view and tree.find(exp.TemporaryProperty) is None:
        raise unsupported("a view over a temporary table")
    target = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
    if not (isinstance(tree, exp.Insert) and table is target):
        _alias_by_name(table)
    point_to(table, ("temp", "main", temporary_name(name)))


def _alias_by_name(table: exp.Table) -> None:
    """Keep the name by which the statement speaks of the table."""
    if table.args.get("alias") is None:
        alias = exp.to_identifier(folded(table.this), quoted=True)
        table.set("alias", exp.TableAlias(this=alias))


def _view_sql(session: Session, tree: exp.Expr, table: exp.Table, params: Any) -> str | None:
    if (changes := table.args.get("changes")) is not None:
        for clause in (changes.args["at_before"], changes.args.get("end")):
            _check_constant(clause)
        since = _time_us(session, tree, changes.args["at_before"], params)
        end = changes.args.get("end")
        until = session.lake.now_us() if end is None else _time_us(session, tree, end, params)
        append_only = changes.args["information"].name.upper() == "APPEND_ONLY"
        name = _with_a_past(session, table)
        return net_changes(session.lake, name, since, until, append_only=append_only)
    if (when := table.args.get("when")) is not None:
        time_us = _time_us(session, tree, when, params)
        return rows_at(session.lake, _with_a_past(session, table), time_us)
    if folded(table.args.get("db")) == "INFORMATION_SCHEMA" and folded(table.this) in ("TABLES", "VIEWS"):
        database = folded(table.args.get("catalog")) or session.database
        if not database or database not in session.lake.databases():
            raise SnowflakeError(
                2003, "02000", f"SQL compilation error:\nDatabase '{database}' does not exist or not authorized."
            )
        of_views = folded(table.this) == "VIEWS"
        return views.information(session, database) if of_views else tables_view(session.lake, database)
    return None


def _with_a_past(session: Session, table: exp.Table) -> TableName:
    name = table_name(table, session.database, session.schema)
    if name in session.temporary_tables():
        raise unsupported("Time Travel of a temporary table")
    return name


def _replace(session: Session, table: exp.Table, sql: str) -> str:
    """Put a temporary view in the table's place, under the name by which the statement speaks of it."""
    view = f"_tir_{next(_views)}"
    if session.transaction.open:
        _copy_committed(session, view, sql)
    else:
        session.duck.execute(f"CREATE OR REPLACE TEMP VIEW {quote(view)} AS {sql}")
    _alias_by_name(table)
    point_to(table, ("temp", "main", view))
    table.set("when", None)
    table.set("changes", None)
    return f"temp.main.{quote(view)}"


def _copy_committed(session: Session, name: str, sql: str) -> None:
    """Read through another connection: inside its transaction DuckLake adds the transaction's own rows to any version,
    and does not know versions that others have committed since.
    """  # noqa: D205
    with session.lake.connection() as reader:
        rows = reader.execute(sql).to_arrow_reader()
        session.duck.register(f"{name}_rows", rows)
        try:
            session.duck.execute(f"CREATE TEMP TABLE {quote(name)} AS SELECT * FROM {quote(f'{name}_rows')}")
        finally:
            with suppress(duckdb.Error):
                session.duck.unregister(f"{name}_rows")


def _check_constant(clause: exp.HistoricalData | None) -> None:
    """Refuse a moment of CHANGES that has to be computed: Snowflake takes constants and variables there, unlike after AT."""
    if clause is not None and (clause.find(exp.Column, exp.CurrentTimestamp, exp.CurrentDate, exp.Localtimestamp)):
        raise SnowflakeError(
            1015, "22023", f"SQL compilation error:\nthe moment of {clause.this} in CHANGES needs to be constant."
        )


def _time_us(session: Session, tree: exp.Expr, clause: exp.HistoricalData, params: Any) -> int:
    """The moment an AT or END clause names, in microseconds since 1970."""
    kind = clause_kind(clause)
    for placeholder in list(clause.find_all(exp.Placeholder)):
        placeholder.replace(_bound(pop_qmark_param(params, tree, placeholder)))
    expression = clause.expression
    if kind == "OFFSET":
        return session.lake.now_us() + int(float(session.evaluate(expression, "SELECT {}")) * 1_000_000)
    if (written := _written_moment(expression)) is not None:
        return written
    moment = session.evaluate(expression, "SELECT epoch_us(CAST(({}) AS TIMESTAMPTZ))")
    if moment is None:
        raise SnowflakeError(1, "42000", "SQL compilation error:\nthe TIMESTAMP of an AT clause must not be NULL.")
    return int(moment)


def _written_moment(expression: exp.Expr) -> int | None:
    """The usual case, an ISO literal with its offset: no need to ask the database."""
    if not (isinstance(expression, exp.Cast) and isinstance(expression.this, exp.Literal)):
        return None
    try:
        moment = datetime.fromisoformat(expression.this.name)
    except ValueError:
        return None
    return (moment - _EPOCH) // timedelta(microseconds=1) if moment.tzinfo else None


def _bound(value: Any) -> exp.Expr:
    if isinstance(value, datetime):
        return exp.cast(exp.Literal.string(value.isoformat()), exp.DataType.Type.TIMESTAMPTZ)
    return exp.convert(value)


def _constant(session: Session, call: exp.Expr) -> exp.Expr | None:
    """The value of a function that only the server knows."""
    name = _PARSED.get(type(call)) or call.name.upper()
    if name == "SYSTEM$LAST_CHANGE_COMMIT_TIME":
        argument = call.expressions[0] if call.expressions else None
        if not isinstance(argument, exp.Literal):
            raise SnowflakeError(
                1015, "22023", f"SQL compilation error:\nargument 1 to function {name} needs to be constant."
            )
        changed_us = session.lake.changed_us(parse_name(argument.name, session.database, session.schema))
        return exp.cast(exp.Literal.number(changed_us * 1000), "DECIMAL(38, 0)")
    if name == "GET_DDL" and isinstance(call, exp.Anonymous):
        return views.get_ddl(session, call)
    if name == "SYSTEM$CANCEL_ALL_QUERIES":
        argument = call.expressions[0] if call.expressions else None
        if argument is None or argument.name != str(session.number):
            raise unsupported(f"{name} of another session")
        # Statements of a session run one after the other: while this one runs, no other does.
        return exp.Literal.string("0 cancelled.")
    values = {
        "CURRENT_ROLE": session.context.role,
        "CURRENT_WAREHOUSE": session.context.warehouse,
        "CURRENT_USER": session.context.user,
        "CURRENT_DATABASE": session.database,
        "CURRENT_SCHEMA": session.schema,
        "CURRENT_ACCOUNT": session.context.account,
        "CURRENT_SESSION": str(session.number),
        "CURRENT_REGION": "LOCAL",
        "LAST_QUERY_ID": session.last_query_id,
    }
    if name not in values:
        return None
    value = values[name]
    return exp.null() if value is None else exp.Literal.string(value)
