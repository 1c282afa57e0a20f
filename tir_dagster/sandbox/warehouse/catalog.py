"""DDL and catalogue statements that need more than fakesnow knows: databases, table options, keys, SHOW TABLES."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from fakesnow.transforms import stage
from sqlglot import exp

from tir_dagster.sandbox.warehouse import comments, functions, limits, views
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, missing_object, unsupported
from tir_dagster.sandbox.warehouse.names import TableName, folded, literal, quote, table_name

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.lake import Lake, TableFacts
    from tir_dagster.sandbox.warehouse.session import Session

_DEFAULTS = {"CHANGE_TRACKING": "FALSE", "DATA_RETENTION_TIME_IN_DAYS": "1"}
_UTC_TIME = pa.timestamp("us", tz="UTC")
_KEYS = (exp.PrimaryKeyColumnConstraint, exp.UniqueColumnConstraint, exp.Reference)
# The columns of INFORMATION_SCHEMA.TABLES after its first one.
_TABLES_COLUMNS = {
    "TABLE_SCHEMA": "f.schema_name",
    "TABLE_NAME": "f.table_name",
    "TABLE_OWNER": "'SYSADMIN'",
    "TABLE_TYPE": "f.table_type",
    "IS_TRANSIENT": "CASE WHEN f.is_transient THEN 'YES' ELSE 'NO' END",
    "CLUSTERING_KEY": "NULL::VARCHAR",
    "ROW_COUNT": "f.row_count",
    "BYTES": "CASE f.table_type WHEN 'BASE TABLE' THEN 0 END",
    "RETENTION_TIME": "CAST(f.retention_days AS BIGINT)",
    "SELF_REFERENCING_COLUMN_NAME": "NULL::VARCHAR",
    "REFERENCE_GENERATION": "NULL::VARCHAR",
    "USER_DEFINED_TYPE_CATALOG": "NULL::VARCHAR",
    "USER_DEFINED_TYPE_SCHEMA": "NULL::VARCHAR",
    "USER_DEFINED_TYPE_NAME": "NULL::VARCHAR",
    "IS_INSERTABLE_INTO": "CASE WHEN f.is_dynamic THEN 'NO' ELSE 'YES' END",
    "IS_TYPED": "'YES'",
    "COMMIT_ACTION": "NULL::VARCHAR",
    "CREATED": "make_timestamptz(f.created_us)",
    "LAST_ALTERED": "make_timestamptz(f.altered_us)",
    "LAST_DDL": "make_timestamptz(f.ddl_us)",
    "LAST_DDL_BY": "'SYSADMIN'",
    "AUTO_CLUSTERING_ON": "'NO'",
    "COMMENT": "e.comment",
    "IS_TEMPORARY": "'NO'",
    "IS_ICEBERG": "'NO'",
    "IS_DYNAMIC": "CASE WHEN f.is_dynamic THEN 'YES' ELSE 'NO' END",
    "IS_IMMUTABLE": "'NO'",
    "IS_HYBRID": "'NO'",
}
_ABSENT = re.compile(
    r"(?:CREATE|ALTER|DROP|UNDROP|EXECUTE)\s+(?:OR\s+(?:REPLACE|ALTER)\s+)?(?:SECURE\s+)?"
    r"(?P<kind>STREAM|TASK|PIPE|ALERT|PROCEDURE|FUNCTION|EXTERNAL\s+TABLE|MATERIALIZED\s+VIEW|ICEBERG\s+TABLE|HYBRID\s+TABLE|EVENT\s+TABLE"
    r"|NETWORK\s+\w+|\w+\s+POLICY|\w+\s+INTEGRATION|SHARE|SECRET|STREAMLIT|NOTEBOOK|USER)\b",
    re.IGNORECASE,
)
_ABSENT_KINDS = ("SEQUENCE", "PROCEDURE", "FUNCTION")
MOST_RETENTION_DAYS, MOST_TRANSIENT_DAYS = 90, 1
_TABLE_KEYS = (exp.PrimaryKey, exp.UniqueColumnConstraint, exp.ForeignKey)


def run(session: Session, tree: exp.Expr) -> pa.Table | None:
    """Run the statement if it is one of these and give its answer; None when fakesnow shall run it."""
    if isinstance(tree, (exp.Create, exp.Drop)) and str(tree.args.get("kind")).upper() == "DATABASE":
        return _database(session, tree)
    if isinstance(tree, exp.Drop) and str(tree.args.get("kind")).upper() == "STAGE":
        return _drop_stage(session, tree)
    if comments.run(session, tree):
        return _status("Statement executed successfully.")
    if isinstance(tree, exp.Alter) and tree.args.get("kind") == "TABLE":
        if table_name(tree.this, session.database, session.schema) in session.temporary_tables():
            raise unsupported("ALTER of a temporary table")
        return _alter(session, tree)
    if (altered := views.alter(session, tree)) is not None:
        return altered
    if isinstance(tree, exp.Show):
        return _show(session, tree)
    if (answer := functions.run(session, tree)) is not None:
        return answer
    if isinstance(tree, (exp.Create, exp.Drop)) and str(tree.args.get("kind")).upper() in _ABSENT_KINDS:
        raise unsupported(str(tree.args["kind"]).upper())
    if isinstance(tree, (exp.Grant, exp.Revoke)) or _uses_secondary_roles(tree):
        # Whoever has signed in may do everything here.
        return _status("Statement executed successfully.")
    return _command(tree)


def _uses_secondary_roles(tree: exp.Expr) -> bool:
    return isinstance(tree, exp.Use) and str(tree.args.get("kind")).upper() == "SECONDARY ROLES"


def _command(tree: exp.Expr) -> pa.Table | None:
    """Statements that sqlglot does not parse, by their words."""
    if not isinstance(tree, exp.Command):
        return None
    text = f"{tree.name} {tree.expression}"
    if re.match(r"(GRANT|REVOKE)\b", text, re.IGNORECASE):
        return _status("Statement executed successfully.")
    if absent := _ABSENT.match(text):
        raise unsupported(" ".join(absent["kind"].upper().split()))
    if re.match(r"(EXPLAIN|CALL|SHOW)\b", text, re.IGNORECASE):
        raise unsupported(" ".join(text.split()[:2]).upper() if text.upper().startswith("SHOW") else tree.name.upper())
    return None


def _drop_stage(session: Session, tree: exp.Drop) -> pa.Table:
    name = table_name(tree.this, session.database, session.schema)
    gone = session.lake.connection().execute(
        "DELETE FROM _fs_global._fs_information_schema._fs_stages "
        "WHERE database_name = ? AND schema_name = ? AND name = ? RETURNING name",
        [name.database, name.schema, name.name],
    )
    if not gone.fetchall() and not tree.args.get("exists"):
        raise missing_object("Stage", name)
    shutil.rmtree(stage.internal_dir(str(name)), ignore_errors=True)
    return _status(f"{name.name} successfully dropped.")


def _database(session: Session, tree: exp.Expr) -> pa.Table:
    name = folded(tree.this.this)
    exists = bool(tree.args.get("exists"))
    session.transaction.commit()
    if isinstance(tree, exp.Drop):
        session.lake.drop_database(name, exists_ok=exists)
        return _status(f"{name} successfully dropped.")
    made = session.lake.create_database(name, replace=bool(tree.args.get("replace")), exists_ok=exists)
    session.fake.cursor().execute(f"USE SCHEMA {quote(name)}.PUBLIC")
    return _status(f"Database {name} successfully created." if made else f"{name} already exists, statement succeeded.")


def _alter(session: Session, tree: exp.Alter) -> pa.Table | None:
    actions = tree.args.get("actions") or []
    if len(actions) != 1:
        return None
    name = table_name(tree.this, session.database, session.schema)
    if tree.args.get("exists") and _table_id(session.lake, name) is None:
        return _status("Statement executed successfully.")
    if isinstance(actions[0], exp.Set) and actions[0].args.get("unset"):
        session.transaction.commit()
        unset = {folded(option) for option in actions[0].expressions}
        set_options(session.lake, name, {option: _DEFAULTS[option] for option in unset & _DEFAULTS.keys()})
        session.lake.note_ddl(name)
        return _status("Statement executed successfully.")
    if isinstance(actions[0], exp.AlterSet):
        session.transaction.commit()
        set_options(session.lake, name, table_options(actions[0]))
        session.lake.note_ddl(name)
        return _status("Statement executed successfully.")
    if isinstance(actions[0], exp.SwapTable):
        session.transaction.commit()
        _swap(session, name, table_name(actions[0].this, session.database, session.schema))
        return _status("Statement executed successfully.")
    return None


def _swap(session: Session, one: TableName, other: TableName) -> None:
    for name in (one, other):
        session.lake.table_id(name)
    if (one.database, one.schema) != (other.database, other.schema):
        raise SnowflakeError(2, "0A000", "Unsupported feature 'SWAP WITH a table of another schema'.")
    beside = TableName(one.database, one.schema, "_TIR_SWAP")

    def swap() -> None:
        for source, target in ((one, beside), (other, one), (beside, other)):
            session.duck.execute(f"ALTER TABLE {source.quoted} RENAME TO {quote(target.name)}")

    session.transaction.run(swap, autocommit=True)


def set_options(lake: Lake, name: TableName, options: dict[str, str], *, created: bool = False) -> None:
    """Change tracking and retention of a table; other options change nothing here."""
    check_retention(options, is_transient=lake.facts(name).is_transient)
    if "CHANGE_TRACKING" in options:
        lake.set_change_tracking(name, on=options["CHANGE_TRACKING"] == "TRUE", since_created=created)
    if "DATA_RETENTION_TIME_IN_DAYS" in options:
        lake.set_retention(name, float(options["DATA_RETENTION_TIME_IN_DAYS"]))


def check_retention(options: dict[str, str], *, is_transient: bool) -> None:
    """Refuse a retention beyond what Snowflake keeps: 90 days, of transient and temporary tables 1."""
    days = options.get("DATA_RETENTION_TIME_IN_DAYS", "0")
    if not days.isdigit() or int(days) > (MOST_TRANSIENT_DAYS if is_transient else MOST_RETENTION_DAYS):
        raise SnowflakeError(
            1008,
            "22023",
            f"SQL compilation error:\ninvalid value [{days}] for parameter 'DATA_RETENTION_TIME_IN_DAYS'",
        )


def table_options(node: exp.Expr) -> dict[str, str]:
    return {
        prop.name.upper(): prop.args["value"].sql().strip("'").upper()
        for prop in node.find_all(exp.Property)
        if isinstance(prop.args.get("value"), exp.Expr)
    }


@contextmanager
def declared(session: Session, tree: exp.Expr) -> Iterator[None]:
    """Around a CREATE TABLE: take out what DuckLake cannot hold, and remember it of the new table."""
    if not (isinstance(tree, exp.Create) and str(tree.args.get("kind")).upper() == "TABLE"):
        yield
        return
    schema = tree.this if isinstance(tree.this, exp.Schema) else None
    name = table_name(schema.this if schema else tree.this, session.database, session.schema)
    properties = tree.args.get("properties")
    options = table_options(properties) if properties else {}
    is_transient = properties is not None and properties.find(exp.TransientProperty) is not None
    check_retention(options, is_transient=is_transient)
    sizes = limits_of_new(session, tree)
    selected = tree.expression if isinstance(tree.expression, exp.Query) else None
    # Another number of columns than declared is for fakesnow to refuse.
    if schema and sizes and selected and (selected.is_star or len(selected.selects) == len(schema.expressions)):
        named = [folded(column if isinstance(column, exp.Identifier) else column.this) for column in schema.expressions]
        tree.set("expression", limits.changed_query(tree.expression, limits.changes(sizes), named))
    copy_source(tree)
    tree.set("properties", _comment(properties) if properties else None)
    key = take_keys(schema) if schema else []
    before = _table_id(session.lake, name)
    yield
    session.lake.record_commits(name.database)
    if _table_id(session.lake, name) != before:
        set_options(session.lake, name, options, created=True)
        session.lake.set_limits(name, sizes, of=sizes)
        if is_transient:
            session.lake.set_transient(name)
        if key:
            session.lake.set_primary_key(name, key)


def limits_of_new(session: Session, tree: exp.Create) -> limits.Limits:
    """What the columns of a new table limit: as it declares them, or as the table that it is a copy of has them."""
    properties = tree.args.get("properties")
    like = properties.find(exp.LikeProperty) if properties is not None else None
    source = tree.args["clone"].this if tree.args.get("clone") is not None else like.this if like is not None else None
    if isinstance(source, exp.Table):
        return session.column_limits(table_name(source, session.database, session.schema))
    return limits.declared_columns(tree.this.expressions) if isinstance(tree.this, exp.Schema) else {}


def note_altered_limits(session: Session, tree: exp.Alter) -> None:
    """After an ALTER TABLE that added columns or changed their types."""
    actions = tree.args.get("actions") or []
    changed = {
        folded(action.this): limits.declared(action.args.get("kind") or action.args.get("dtype"))
        for action in actions
        if isinstance(action, exp.ColumnDef) or (isinstance(action, exp.AlterColumn) and action.args.get("dtype"))
    }
    if changed:
        name = table_name(tree.this, session.database, session.schema)
        session.lake.set_limits(name, {at: limit for at, limit in changed.items() if limit is not None}, of=changed)


def _comment(properties: exp.Properties) -> exp.Properties | None:
    """Of a new table's properties its comment, which fakesnow keeps."""
    for comment in properties.find_all(exp.SchemaCommentProperty):
        return exp.Properties(expressions=[exp.SchemaCommentProperty(this=exp.Literal.string(str(comment.this.this)))])
    return None


def copy_source(tree: exp.Create) -> None:
    """CLONE and LIKE as queries: fakesnow forgets OR REPLACE with the one, and does not know the other."""
    properties = tree.args.get("properties")
    like = properties.find(exp.LikeProperty) if properties is not None else None
    if (clone := tree.args.get("clone")) is not None:
        tree.set("clone", None)
        tree.set("expression", exp.select("*").from_(clone.this))
    elif like is not None:
        tree.set("expression", exp.select("*").from_(like.this).limit(0))


def _table_id(lake: Lake, name: TableName) -> int | None:
    try:
        return lake.table_id(name)
    except SnowflakeError:
        return None


def take_keys(schema: exp.Schema) -> list[str]:
    """Drop key clauses, which Snowflake does not enforce either; gives the primary key's columns."""
    key: list[str] = []
    for column in schema.find_all(exp.ColumnDef):
        kept = []
        for constraint in column.args.get("constraints") or []:
            kind = constraint.args.get("kind")
            if isinstance(kind, exp.PrimaryKeyColumnConstraint):
                key.append(folded(column.this))
            if not isinstance(kind, _KEYS):
                kept.append(constraint)
        column.set("constraints", kept)
    columns = []
    for item in schema.expressions:
        clause = item.expressions[0] if isinstance(item, exp.Constraint) and item.expressions else item
        if isinstance(clause, exp.PrimaryKey):
            key = [
                folded(part if isinstance(part, exp.Identifier) else part.find(exp.Identifier))
                for part in clause.expressions
            ]
        if not isinstance(clause, _TABLE_KEYS):
            columns.append(item)
    schema.set("expressions", columns)
    return key


def _show(session: Session, tree: exp.Show) -> pa.Table | None:
    kind = tree.name.upper()
    scope, scope_kind = tree.args.get("scope"), str(tree.args.get("scope_kind") or "").upper()
    if isinstance(scope, exp.Table) and scope_kind in ("DATABASE", "SCHEMA"):
        functions.check_exists(session, scope, scope_kind)
    if kind == "VIEWS":
        known = [
            view
            for database, schema in scopes(session, tree)
            for view in session.lake.views(database)
            if schema in (None, view.name.schema) and is_like(tree, view.name.name)
        ]
        created = pa.array([_moment(view.created_us) for view in known], _UTC_TIME)
        return views.shown(session, known, created, is_terse=bool(tree.args.get("terse")))
    if kind not in ("TABLES", "PRIMARY KEYS"):
        return None
    facts = [fact for fact in _in_scope(session, tree) if is_like(tree, fact.name.name)]
    return _tables(session.lake, facts) if kind == "TABLES" else _primary_keys(facts)


def is_like(tree: exp.Show, name: str) -> bool:
    """Whether the name fits the statement's LIKE, if it has one."""
    if not (like := tree.args.get("like")):
        return True
    return fnmatch.fnmatchcase(name.upper(), like.name.upper().replace("%", "*").replace("_", "?"))


def _in_scope(session: Session, tree: exp.Show) -> Iterator[TableFacts]:
    scope = tree.args.get("scope")
    if str(tree.args.get("scope_kind") or "").upper() == "TABLE" and isinstance(scope, exp.Table):
        yield session.lake.facts(table_name(scope, session.database, session.schema))
        return
    for database, schema in scopes(session, tree):
        yield from (fact for fact in session.lake.all_facts(database) if schema in (None, fact.name.schema))


def scopes(session: Session, tree: exp.Show) -> Iterator[tuple[str, str | None]]:
    """The databases that a SHOW statement looks into, each with the one schema that it means or None for all."""
    scope, kind = tree.args.get("scope"), str(tree.args.get("scope_kind") or "").upper()
    schema: str | None = None
    databases = session.lake.databases()
    if kind == "DATABASE" and isinstance(scope, exp.Table):
        databases = [folded(scope.this)]
    elif kind == "SCHEMA" and isinstance(scope, exp.Table):
        databases, schema = [folded(scope.args.get("db")) or session.database or ""], folded(scope.this)
    elif kind != "ACCOUNT" and session.database:
        databases, schema = [session.database], session.schema if not kind or kind == "SCHEMA" else None
    for database in databases:
        if database not in session.lake.databases():
            raise SnowflakeError(
                2043, "02000", "SQL compilation error:\nObject does not exist, or operation cannot be performed."
            )
        yield database, schema


def _tables(lake: Lake, facts: list[TableFacts]) -> pa.Table:
    dynamic = {
        known.name for database in {fact.name.database for fact in facts} for known in lake.dynamic_tables(database)
    }
    columns: dict[str, Any] = {
        "created_on": pa.array([_moment(fact.created_us) for fact in facts], _UTC_TIME),
        "name": pa.array([fact.name.name for fact in facts], pa.string()),
        "database_name": pa.array([fact.name.database for fact in facts], pa.string()),
        "schema_name": pa.array([fact.name.schema for fact in facts], pa.string()),
        "kind": pa.array(["TRANSIENT" if fact.is_transient else "TABLE" for fact in facts], pa.string()),
        "comment": pa.array(["" for _ in facts], pa.string()),
        "cluster_by": pa.array(["" for _ in facts], pa.string()),
        "rows": pa.array([lake.row_count(fact) for fact in facts], pa.int64()),
        "bytes": pa.array([0 for _ in facts], pa.int64()),
        "owner": pa.array(["SYSADMIN" for _ in facts], pa.string()),
        "retention_time": pa.array([f"{fact.retention_days:g}" for fact in facts], pa.string()),
        "automatic_clustering": pa.array(["OFF" for _ in facts], pa.string()),
        "change_tracking": pa.array(["OFF" if fact.tracked_since_us is None else "ON" for fact in facts], pa.string()),
        "is_dynamic": pa.array(["Y" if fact.name in dynamic else "N" for fact in facts], pa.string()),
    }
    return pa.table(columns)


def _primary_keys(facts: list[TableFacts]) -> pa.Table:
    rows = [(fact, at, column) for fact in facts for at, column in enumerate(fact.primary_key, start=1)]
    return pa.table(
        {
            "created_on": pa.array([_moment(fact.created_us) for fact, _, _ in rows], _UTC_TIME),
            "database_name": pa.array([fact.name.database for fact, _, _ in rows], pa.string()),
            "schema_name": pa.array([fact.name.schema for fact, _, _ in rows], pa.string()),
            "table_name": pa.array([fact.name.name for fact, _, _ in rows], pa.string()),
            "column_name": pa.array([column for _, _, column in rows], pa.string()),
            "key_sequence": pa.array([at for _, at, _ in rows], pa.int64()),
            "constraint_name": pa.array([f"SYS_CONSTRAINT_{fact.table_id}" for fact, _, _ in rows], pa.string()),
            "rely": pa.array(["false" for _ in rows], pa.string()),
            "comment": pa.array([None for _ in rows], pa.string()),
        }
    )


def tables_view(lake: Lake, database: str) -> str:
    """INFORMATION_SCHEMA.TABLES as a query. fakesnow's own view knows no times, and asks DuckLake about every table."""
    dynamic_names = {facts.name for facts in lake.dynamic_tables(database)}
    known = [
        f"({literal(fact.name.schema)}, {literal(fact.name.name)}, 'BASE TABLE', {lake.row_count(fact)}, "
        f"{fact.created_us}, {fact.altered_us}, {fact.ddl_us}, {fact.retention_days}, {fact.name in dynamic_names}, {fact.is_transient})"
        for fact in lake.all_facts(database)
    ]
    # A view has no rows and no past of its own, and what happens to its tables does not alter it.
    known += [
        f"({literal(view.name.schema)}, {literal(view.name.name)}, 'VIEW', NULL, "
        f"{view.created_us}, {view.ddl_us}, {view.ddl_us}, NULL, FALSE, FALSE)"
        for view in lake.views(database)
    ]
    values = f"VALUES {', '.join(known)}" if known else "SELECT '', '', '', 0, 0, 0, 0, 0, FALSE, FALSE WHERE false"
    listed = ", ".join(f"{sql} AS {quote(name)}" for name, sql in _TABLES_COLUMNS.items())
    return (
        f'SELECT {literal(database)} AS "TABLE_CATALOG", {listed} '
        f"FROM ({values}) "
        "f(schema_name, table_name, table_type, row_count, created_us, altered_us, ddl_us, retention_days, is_dynamic, is_transient) "
        "LEFT JOIN _fs_global._fs_information_schema._fs_tables_ext e "
        f"ON e.ext_table_catalog = {literal(database)} "
        "AND e.ext_table_schema = f.schema_name AND e.ext_table_name = f.table_name"
    )


def _moment(time_us: int) -> datetime:
    return datetime.fromtimestamp(time_us / 1_000_000, tz=UTC)


def _status(message: str) -> pa.Table:
    return pa.table({"status": [message]})
