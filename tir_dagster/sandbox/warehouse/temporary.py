"""Temporary tables and views: DuckDB's own, seen by their session only, in front of permanent ones of the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
from fakesnow.rowtype import describe_as_rowtype
from sqlglot import exp

from tir_dagster.sandbox.warehouse import references
from tir_dagster.sandbox.warehouse.catalog import (
    check_retention,
    copy_source,
    limits_of_new,
    table_options,
    take_keys,
)
from tir_dagster.sandbox.warehouse.errors import object_exists, wrong_type
from tir_dagster.sandbox.warehouse.names import TableName, point_to, quote, table_name, temporary_name

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.session import Session


def run(session: Session, tree: exp.Expr, params: Any) -> pa.Table | None:
    """Run the statement if it creates, drops or describes a temporary table or view, and give its answer."""
    if isinstance(tree, exp.Create) and creates_temporary(tree):
        return _create(session, tree, params)
    table = tree.find(exp.Table) if isinstance(tree, (exp.Drop, exp.Describe)) else None
    if table is None or not session.temporary or _kind(tree) not in ("TABLE", "VIEW"):
        return None
    name = table_name(table, session.database, session.schema)
    if name not in session.temporary_tables():
        return None
    return _drop(session, tree, name) if isinstance(tree, exp.Drop) else _describe(session, name)


def creates_temporary(tree: exp.Expr) -> bool:
    properties = tree.args.get("properties") if isinstance(tree, exp.Create) else None
    return (
        properties is not None
        and _kind(tree) in ("TABLE", "VIEW")
        and properties.find(exp.TemporaryProperty) is not None
    )


def _kind(tree: exp.Expr) -> str:
    return str(tree.args.get("kind")).upper()


def _create(session: Session, tree: exp.Create, params: Any) -> pa.Table:
    """Unlike other DDL this leaves the open transaction alone."""
    target = tree.this.this if isinstance(tree.this, exp.Schema) else tree.this
    name = table_name(target, session.database, session.schema)
    if name in session.temporary_tables() and not tree.args.get("replace"):
        if tree.args.get("exists"):
            return _status(f"{name.name} already exists, statement succeeded.")
        raise object_exists(name)

    sizes = limits_of_new(session, tree)
    properties = tree.args.get("properties")
    check_retention(table_options(properties) if properties is not None else {}, is_transient=True)

    def create() -> None:
        with references.resolved(session, tree, list(params) if params else params) as resolved:
            _make_local(resolved, name)
            if _kind(tree) == "VIEW":
                references.qualify(session, resolved)
            # One name may have been a table and become a view, which DuckDB refuses to replace.
            _drop_any(session, name)
            session.run_plainly(resolved, list(params) if params else params)
        session.temporary.add(name)
        session.temporary_limits[name] = sizes

    session.transaction.run(create, autocommit=True)
    return _status(f"{_kind(tree).capitalize()} {name.name} successfully created.")


def _make_local(tree: exp.Create, name: TableName) -> None:
    schema = tree.this if isinstance(tree.this, exp.Schema) else None
    if schema is not None:
        take_keys(schema)
        _take_comments(schema)
    copy_source(tree)
    tree.set("properties", exp.Properties(expressions=[exp.TemporaryProperty()]))
    point_to(schema.this if schema is not None else tree.this, ("temp", "main", temporary_name(name)))


def _take_comments(schema: exp.Schema) -> None:
    for column in schema.find_all(exp.ColumnDef):
        constraints = column.args.get("constraints") or []
        kept = [each for each in constraints if not isinstance(each.args.get("kind"), exp.CommentColumnConstraint)]
        column.set("constraints", kept)


def _drop(session: Session, tree: exp.Drop, name: TableName) -> pa.Table:
    stored = stored_kind(session.duck, name)
    if stored != _kind(tree):
        raise wrong_type(stored, _kind(tree))

    def drop() -> None:
        _drop_any(session, name)
        session.temporary.discard(name)

    session.transaction.run(drop, autocommit=True)
    return _status(f"{name.name} successfully dropped.")


def _drop_any(session: Session, name: TableName) -> None:
    if (stored := stored_kind(session.duck, name)) is not None:
        session.duck.execute(f"DROP {stored} temp.main.{quote(temporary_name(name))}")


def stored_kind(duck: duckdb.DuckDBPyConnection, name: TableName) -> str | None:
    """Whether DuckDB has this temporary name as a TABLE or a VIEW, or not at all (None)."""
    # DuckDB's own lists of tables would ask DuckLake about every permanent one. Only a table has row ids.
    try:
        duck.execute(f"SELECT rowid FROM temp.main.{quote(temporary_name(name))} LIMIT 0")
    except duckdb.CatalogException as error:
        # Of a view the missing table may be one that it reads.
        return None if str(error).startswith(f"Catalog Error: Table with name {temporary_name(name)} does") else "VIEW"
    except duckdb.BinderException:
        return "VIEW"
    return "TABLE"


def _describe(session: Session, name: TableName) -> pa.Table:
    rows = session.duck.execute(f"DESCRIBE temp.main.{quote(temporary_name(name))}").fetchall()
    kinds = describe_as_rowtype([(row[0], row[1], None, None, None, None) for row in rows])
    sizes = session.column_limits(name)
    shown = [
        sizes[row[0]].shown(_shown(kind)) if row[0] in sizes else _shown(kind)
        for row, kind in zip(rows, kinds, strict=True)
    ]
    return pa.table(
        {
            "name": pa.array([row[0] for row in rows], pa.string()),
            "type": pa.array(shown, pa.string()),
            "kind": pa.array(["COLUMN" for _ in rows], pa.string()),
            "null?": pa.array(["Y" if row[2] == "YES" else "N" for row in rows], pa.string()),
            "default": pa.array([row[4] for row in rows], pa.string()),
            "primary key": pa.array(["N" for _ in rows], pa.string()),
        }
    )


def _shown(kind: Any) -> str:
    shown = str(kind["type"]).upper()
    if shown == "FIXED":
        return f"NUMBER({kind['precision']},{kind['scale']})"
    if shown == "TEXT":
        return "VARCHAR(16777216)"
    return f"{shown}(9)" if shown.startswith("TIME") else {"REAL": "FLOAT"}.get(shown, shown)


def _status(message: str) -> pa.Table:
    return pa.table({"status": [message]})
