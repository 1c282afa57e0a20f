"""Views as people created them: their text and owner, secure ones, INFORMATION_SCHEMA.VIEWS, SHOW VIEWS, ALTER VIEW, GET_DDL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import missing_object, unsupported
from tir_dagster.sandbox.warehouse.lake import ViewFacts
from tir_dagster.sandbox.warehouse.names import TableName, folded, literal, parse_name, quote, table_name

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.lake import Lake
    from tir_dagster.sandbox.warehouse.session import Session

# The columns of INFORMATION_SCHEMA.VIEWS after its first one.
_VIEWS_COLUMNS = {
    "TABLE_SCHEMA": "v.schema_name",
    "TABLE_NAME": "v.view_name",
    "TABLE_OWNER": "v.owner",
    "VIEW_DEFINITION": "v.definition",
    "CHECK_OPTION": "'NONE'",
    "IS_UPDATABLE": "'NO'",
    "INSERTABLE_INTO": "'NO'",
    "IS_SECURE": "v.is_secure",
    "CREATED": "make_timestamptz(v.created_us)",
    "LAST_ALTERED": "make_timestamptz(v.ddl_us)",
    "LAST_DDL": "make_timestamptz(v.ddl_us)",
    "LAST_DDL_BY": "'SYSADMIN'",
    "COMMENT": "e.comment",
}
_COMMENTS = "_fs_global._fs_information_schema._fs_tables_ext"


def _is_view(tree: exp.Expr) -> bool:
    return str(tree.args.get("kind")).upper() == "VIEW"


@contextmanager
def declared(session: Session, tree: exp.Expr, text: str) -> Iterator[None]:
    """Around a CREATE VIEW: take out what DuckDB does not know, and remember the statement and its options."""
    properties = tree.args.get("properties")
    if not (isinstance(tree, exp.Create) and _is_view(tree)) or (
        properties is not None and properties.find(exp.TemporaryProperty)
    ):
        yield
        return
    name = table_name(
        tree.this.this if isinstance(tree.this, exp.Schema) else tree.this, session.database, session.schema
    )
    is_secure, is_tracked = _take_options(tree)
    before = session.lake.view(name)
    yield
    session.lake.record_commits(name.database)
    view = session.lake.view(name)
    if view is None or (before is not None and before.view_id == view.view_id):
        return
    written = text.strip().rstrip(";").rstrip()
    session.lake.note_view(name, text=written, owner=session.context.role, is_secure=is_secure)
    if is_tracked and (view := session.lake.view(name)) is not None:
        session.lake.set_view(view, is_tracked=True)


def _take_options(tree: exp.Create) -> tuple[bool, bool]:
    """Take the options off the statement; return whether the view is secure, and whether its changes are tracked."""
    is_secure = is_tracked = False
    properties = tree.args.get("properties")
    for option in list(properties.expressions) if properties is not None else []:
        if isinstance(option, exp.SecureProperty):
            is_secure = True
        elif option.name.upper() == "CHANGE_TRACKING":
            is_tracked = option.args["value"].sql().upper() == "TRUE"
        elif not isinstance(option, exp.CopyGrantsProperty):
            continue
        option.pop()
    if properties is not None and not properties.expressions:
        # fakesnow takes an empty list for a comment.
        tree.set("properties", None)
    return is_secure, is_tracked


def alter(session: Session, tree: exp.Expr) -> pa.Table | None:
    """Run ALTER VIEW … SET or UNSET SECURE or CHANGE_TRACKING, and give its answer; None for everything else."""
    actions = tree.args.get("actions") or []
    if not (isinstance(tree, exp.Alter) and _is_view(tree)) or len(actions) != 1:
        return None
    (action,) = actions
    is_unset = isinstance(action, exp.Set) and bool(action.args.get("unset"))
    if is_unset:
        options = {folded(option): False for option in action.expressions}
    elif isinstance(action, exp.AlterSet):
        options = {"SECURE": True} if action.find(exp.SecureProperty) else {}
        for option in action.find_all(exp.Property):
            if isinstance(option.args.get("value"), exp.Expr):
                options[option.name.upper()] = option.args["value"].sql().upper() == "TRUE"
    else:
        return None
    if not options or not options.keys() <= {"SECURE", "CHANGE_TRACKING"}:
        return None
    name = table_name(tree.this, session.database, session.schema)
    if (view := session.lake.view(name)) is None:
        if tree.args.get("exists"):
            return pa.table({"status": ["Statement executed successfully."]})
        raise missing_object("View", name)
    session.transaction.commit()
    session.lake.set_view(view, is_secure=options.get("SECURE"), is_tracked=options.get("CHANGE_TRACKING"))
    session.lake.note_ddl(name)
    return pa.table({"status": ["Statement executed successfully."]})


def shown_text(session: Session, view: ViewFacts) -> str | None:
    """The statement that created the view; of a secure view only its owner sees it."""
    return None if view.is_secure and view.owner != session.context.role else view.text


def information(session: Session, database: str) -> str:
    """INFORMATION_SCHEMA.VIEWS as a query."""
    rows = [
        f"({literal(view.name.schema)}, {literal(view.name.name)}, {literal(view.owner)}, {_literal(shown_text(session, view))}, "
        f"{literal('YES' if view.is_secure else 'NO')}, {view.created_us}, {view.ddl_us})"
        for view in session.lake.views(database)
    ]
    values = f"VALUES {', '.join(rows)}" if rows else "SELECT '', '', '', '', '', 0, 0 WHERE false"
    listed = ", ".join(f"{sql} AS {quote(name)}" for name, sql in _VIEWS_COLUMNS.items())
    return (
        f'SELECT {literal(database)} AS "TABLE_CATALOG", {listed} '
        f"FROM ({values}) v(schema_name, view_name, owner, definition, is_secure, created_us, ddl_us) "
        f"LEFT JOIN {_COMMENTS} e ON e.ext_table_catalog = {literal(database)} "
        "AND e.ext_table_schema = v.schema_name AND e.ext_table_name = v.view_name"
    )


def _literal(text: str | None) -> str:
    return "NULL::VARCHAR" if text is None else literal(text)


def shown(session: Session, views: list[ViewFacts], created: pa.Array, *, is_terse: bool) -> pa.Table:
    """What SHOW VIEWS says of these."""
    names = {
        "name": [view.name.name for view in views],
        "database_name": [view.name.database for view in views],
        "schema_name": [view.name.schema for view in views],
    }
    if is_terse:
        columns = {"name": names.pop("name"), "kind": ["VIEW" for _ in views], **names}
    else:
        comments = _comments(session.lake)
        columns = {
            "name": names.pop("name"),
            "reserved": ["" for _ in views],
            **names,
            "owner": [view.owner for view in views],
            "comment": [comments.get(view.name, "") for view in views],
            "text": [shown_text(session, view) or "" for view in views],
            "is_secure": [str(view.is_secure).lower() for view in views],
            "is_materialized": ["false" for _ in views],
            "owner_role_type": ["ROLE" for _ in views],
            "change_tracking": ["OFF" if view.tracked_since_us is None else "ON" for view in views],
        }
    return pa.table({"created_on": created, **{name: pa.array(of, pa.string()) for name, of in columns.items()}})


def _comments(lake: Lake) -> dict[TableName, str]:
    rows = lake.connection().execute(
        f"SELECT ext_table_catalog, ext_table_schema, ext_table_name, comment FROM {_COMMENTS} WHERE comment IS NOT NULL"
    )
    return {TableName(*name): comment for *name, comment in rows.fetchall()}


def get_ddl(session: Session, call: exp.Anonymous) -> exp.Expr:
    """The value of GET_DDL('VIEW', name)."""
    kind, name, *_ = [*(argument.name for argument in call.expressions), "", ""]
    if kind.upper() != "VIEW":
        raise unsupported(f"GET_DDL of {kind.upper() or 'nothing'}")
    table = parse_name(name, session.database, session.schema)
    view = session.lake.view(table)
    text = None if view is None else shown_text(session, view)
    if text is None:
        raise missing_object("View", table)
    return exp.Literal.string(f"{text};")
