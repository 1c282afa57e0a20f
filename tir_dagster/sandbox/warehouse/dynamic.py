"""Dynamic tables: made of a query, changed by their refreshes alone. CREATE, ALTER, DROP, SHOW and REFRESH, and when one is due."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sqlglot import exp

from tir_dagster.sandbox.warehouse import references
from tir_dagster.sandbox.warehouse.catalog import is_like, scopes
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, missing_object, unsupported
from tir_dagster.sandbox.warehouse.lake import DynamicFacts, Lake, parse_view, view_tables
from tir_dagster.sandbox.warehouse.names import TableName, parse, parse_name, point_to, quote, table_name

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.session import Session

_MODES = ("AUTO", "FULL", "INCREMENTAL")
_LAG = re.compile(r"\s*(\d+)\s+(second|minute|hour|day)s?\s*", re.IGNORECASE)
_SECONDS = {"SECOND": 1, "MINUTE": 60, "HOUR": 3600, "DAY": 86400}
_SHORTEST_SECONDS = 60
_NAME = r'(?P<name>(?:"(?:[^"]|"")+"|[\w$.])+)'
_ALTER = re.compile(
    rf"ALTER\s+DYNAMIC\s+TABLE\s+(?P<exists>IF\s+EXISTS\s+)?{_NAME}\s+(?P<action>.+)", re.IGNORECASE | re.DOTALL
)
_DROP = re.compile(rf"DROP\s+DYNAMIC\s+TABLE\s+(?P<exists>IF\s+EXISTS\s+)?{_NAME}\s*", re.IGNORECASE)
_SHOW = re.compile(r"SHOW\s+DYNAMIC\s+TABLES\b(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_OPTION = re.compile(r"(\w+)\s*=\s*(?:'([^']*)'|\"([^\"]+)\"|([\w$]+))\s*,?\s*")
_NEW_ROWS, _ADDED_ROWS = "_tir_dynamic_rows", "_tir_dynamic_added"


def _is_dynamic(tree: exp.Expr) -> bool:
    properties = tree.args.get("properties")
    return properties is not None and properties.find(exp.DynamicProperty) is not None


# CREATE


@contextmanager
def declared(session: Session, tree: exp.Expr, text: str) -> Iterator[None]:
    """Around a CREATE DYNAMIC TABLE: check its options, and remember them and the query of the new table."""
    if isinstance(tree, exp.Describe) and _is_dynamic(tree):
        tree.set("properties", None)
    if not (isinstance(tree, exp.Create) and _is_dynamic(tree)):
        yield
        return
    schema = tree.this if isinstance(tree.this, exp.Schema) else None
    name = table_name(schema.this if schema else tree.this, session.database, session.schema)
    query = _qualified_query(session, parse(text))
    options = {
        option.name.upper(): option.args["value"].name.upper()
        for option in tree.args["properties"].find_all(exp.Property)
        if isinstance(option.args.get("value"), exp.Expr)
    }
    columns = [part.name if part.args.get("quoted") else part.name.upper() for part in _column_names(schema)]
    facts = DynamicFacts(
        name,
        text=text.strip().rstrip(";").rstrip(),
        query=query.sql(dialect="snowflake"),
        target_lag=_lag(options),
        warehouse=_known_warehouse(session, options.get("WAREHOUSE", "")),
        refresh_mode=_mode(options.get("REFRESH_MODE", "AUTO"), query),
        owner=session.context.role,
    )
    is_filled = options.get("INITIALIZE", "ON_CREATE") == "ON_CREATE"
    _make_plain(tree, columns, is_filled=is_filled)
    before = session.lake.shape(name)
    sources = _tokens(session.lake, query)
    yield
    session.lake.record_commits(name.database)
    after = session.lake.shape(name)
    if after is None or (before is not None and before[0] == after[0]):
        return
    now = session.lake.now_us() if is_filled else None
    session.lake.note_dynamic(replace(facts, refreshed_us=now, sources=sources if is_filled else ""))
    if facts.refresh_mode == "INCREMENTAL":
        session.lake.set_change_tracking(name, on=True, since_created=True)
        for source in _sources(session.lake, query):
            session.lake.set_change_tracking(source, on=True)


def _column_names(schema: exp.Schema | None) -> list[exp.Expr]:
    return [part.this if isinstance(part, exp.ColumnDef) else part for part in schema.expressions] if schema else []


def _make_plain(tree: exp.Create, columns: list[str], *, is_filled: bool) -> None:
    """Let the statement create an ordinary table of the query's rows, or of none."""
    query: Any = tree.expression.unnest() if isinstance(tree.expression, exp.Subquery) else tree.expression
    if columns:
        alias = exp.TableAlias(
            this=exp.to_identifier("q"), columns=[exp.to_identifier(name, quoted=True) for name in columns]
        )
        query = exp.select("*").from_(exp.Subquery(this=query, alias=alias))
    elif not is_filled:
        query = exp.select("*").from_(query.subquery("q"))
    tree.set("expression", query if is_filled else query.limit(0))
    if isinstance(tree.this, exp.Schema):
        tree.set("this", tree.this.this)
    for option in list(tree.args["properties"].expressions):
        if isinstance(option, exp.DynamicProperty):
            option.pop()


def _qualified_query(session: Session, tree: exp.Expr) -> exp.Expr:
    """The query of the new table, with full names: a refresh in another session means the same tables."""
    query = tree.expression.copy()
    query = query.unnest() if isinstance(query, exp.Subquery) else query
    if not isinstance(query, exp.Query):
        raise SnowflakeError(1003, "42000", "SQL compilation error:\nsyntax error: a dynamic table is made AS a query.")
    inner = {cte.alias.upper() for cte in query.find_all(exp.CTE)}
    for table in query.find_all(exp.Table):
        if isinstance(table.this, exp.Identifier) and (table.db or table.name.upper() not in inner):
            full = table_name(table, session.database, session.schema)
            if full in session.temporary_tables():
                raise unsupported("a dynamic table over a temporary table")
            if table.args.get("alias") is None:
                table.set("alias", exp.TableAlias(this=exp.to_identifier(full.name, quoted=True)))
            point_to(table, (full.database, full.schema, full.name))
    return query


def _lag(options: dict[str, str]) -> str:
    lag = options.get("TARGET_LAG", "")
    found = _LAG.fullmatch(lag)
    if not lag:
        raise SnowflakeError(1420, "22023", "SQL compilation error:\nMissing option(s): [TARGET_LAG]")
    if lag != "DOWNSTREAM" and (found is None or lag_seconds(lag) < _SHORTEST_SECONDS):
        raise SnowflakeError(
            1420,
            "22023",
            f"SQL compilation error:\ninvalid value [{lag}] for parameter 'TARGET_LAG': DOWNSTREAM, or 1 minute and more.",
        )
    return lag if found is None else f"{found[1]} {found[2].lower()}{'' if found[1] == '1' else 's'}"


def lag_seconds(lag: str) -> float:
    """The seconds of a target lag; one that follows others has none of its own."""
    found = _LAG.fullmatch(lag)
    return float("inf") if found is None else int(found[1]) * _SECONDS[found[2].upper()]


def _known_warehouse(session: Session, name: str) -> str:
    """The warehouse that the refreshes use: the session's own one, or one that somebody created."""
    if not name:
        raise SnowflakeError(1420, "22023", "SQL compilation error:\nMissing option(s): [WAREHOUSE]")
    if name != (session.context.warehouse or "").upper() and name not in session.lake.names("WAREHOUSE"):
        raise SnowflakeError(
            2043,
            "02000",
            f"SQL compilation error:\nWarehouse '{name}' does not exist, or operation cannot be performed.",
        )
    return name


def _mode(asked: str, query: exp.Expr) -> str:
    if asked not in _MODES:
        raise SnowflakeError(
            1420, "22023", f"SQL compilation error:\ninvalid value [{asked}] for parameter 'REFRESH_MODE'"
        )
    part = _part_for_full_refresh(query)
    if asked == "INCREMENTAL" and part:
        raise SnowflakeError(
            2, "0A000", f"SQL compilation error:\nDynamic Table with refresh mode INCREMENTAL is not supported: {part}."
        )
    return "FULL" if asked == "FULL" or part else "INCREMENTAL"


def _part_for_full_refresh(query: exp.Expr) -> str | None:
    """What in the query lets Snowflake refresh a dynamic table in full only."""
    for node in query.walk():
        if isinstance(node, exp.Query) and isinstance(node.parent, (exp.In, exp.Exists, exp.Predicate)):
            return "subqueries outside of FROM"
        if isinstance(node, (exp.Except, exp.Intersect, exp.Limit, exp.TableSample, exp.Pivot)):
            return node.key.upper()
        if isinstance(node, (exp.CurrentDate, exp.CurrentTimestamp, exp.CurrentTime, exp.Rand, exp.CurrentUser)):
            return "functions of the clock, of chance or of the user"
    return None


# What it reads


def _sources(lake: Lake, query: exp.Expr) -> list[TableName]:
    """The tables behind the query, also those behind views."""
    tables: dict[TableName, None] = {}
    inner = {cte.alias.upper() for cte in query.find_all(exp.CTE)}
    pending = [
        table_name(table, None, None)
        for table in query.find_all(exp.Table)
        if isinstance(table.this, exp.Identifier) and (table.db or table.name.upper() not in inner)
    ]
    while pending:
        name = pending.pop()
        if (view := lake.view(name)) is not None:
            pending += [behind for _, behind in view_tables(view, parse_view(view))]
        else:
            lake.table_id(name)
            tables[name] = None
    return list(tables)


def _tokens(lake: Lake, query: exp.Expr) -> str:
    """A text that changes when a table behind the query does."""
    return ",".join(sorted(f"{name}={lake.changed_us(name)}" for name in _sources(lake, query)))


def _dynamic_tables(lake: Lake, names: list[TableName]) -> list[DynamicFacts]:
    return [facts for name in names if (facts := lake.dynamic(name)) is not None]


# REFRESH


def refresh(session: Session, facts: DynamicFacts) -> None:
    """Bring the table to what its query shows now, after the dynamic tables behind it; nothing is written if nothing changed."""
    lake, query = session.lake, parse(facts.query)
    for upstream in _dynamic_tables(lake, _sources(lake, query)):
        refresh(session, upstream)
    sources = _tokens(lake, query)
    if facts.refreshed_us is None or sources != facts.sources:
        session.transaction.lock(str(facts.name), session.is_cancelled)
        session.transaction.run(lambda: _rewrite(session, facts, query), autocommit=True)
    lake.note_dynamic(replace(facts, refreshed_us=lake.now_us(), sources=sources))


def _rewrite(session: Session, facts: DynamicFacts, query: exp.Expr) -> None:
    """In full: all rows go and come; incrementally: only those that are there too often or not often enough."""
    target = facts.name.quoted
    columns = [quote(column.name) for column in session.lake.columns(facts.name, session.lake.table_id(facts.name))]
    names = ", ".join(columns)
    _put_aside(session, query)
    execute = session.duck.execute
    if facts.refresh_mode == "FULL":
        execute(f"DELETE FROM {target}")
        execute(f"INSERT INTO {target} SELECT * FROM temp.main.{_NEW_ROWS}")
    else:
        execute(
            f"CREATE OR REPLACE TEMP TABLE {_ADDED_ROWS} AS SELECT * FROM temp.main.{_NEW_ROWS} EXCEPT ALL SELECT * FROM {target}"
        )
        numbered = (
            f"SELECT rowid AS _tir_place, {names}, row_number() OVER (PARTITION BY {names}) AS _tir_n FROM {target}"
        )
        wanted = f"SELECT {names}, count(*) AS _tir_count FROM (SELECT * FROM temp.main.{_NEW_ROWS}) AS w({names}) GROUP BY ALL"
        same = " AND ".join(f"o.{column} IS NOT DISTINCT FROM w.{column}" for column in columns)
        execute(
            f"DELETE FROM {target} WHERE rowid IN (SELECT _tir_place FROM ({numbered}) o LEFT JOIN ({wanted}) w ON {same} "
            "WHERE _tir_n > coalesce(_tir_count, 0))"
        )
        execute(f"INSERT INTO {target} SELECT * FROM temp.main.{_ADDED_ROWS}")
        execute(f"DROP TABLE temp.main.{_ADDED_ROWS}")
    execute(f"DROP TABLE temp.main.{_NEW_ROWS}")


def _put_aside(session: Session, query: exp.Expr) -> None:
    create = exp.Create(
        this=exp.to_table("x"),
        kind="TABLE",
        replace=True,
        expression=query,
        properties=exp.Properties(expressions=[exp.TemporaryProperty()]),
    )
    with references.resolved(session, create, None) as resolved:
        point_to(resolved.this, ("temp", "main", _NEW_ROWS))
        session.run_plainly(resolved, None)


def due(lake: Lake) -> list[DynamicFacts]:
    """The dynamic tables that are older than half of their target lag."""
    now = lake.now_us()
    return [
        facts
        for database in lake.databases()
        for facts in lake.dynamic_tables(database)
        if not facts.is_suspended and (now - (facts.refreshed_us or 0)) / 1_000_000 > lag_seconds(facts.target_lag) / 2
    ]


# ALTER, DROP, SHOW


def run(session: Session, tree: exp.Expr) -> pa.Table | None:
    """Run ALTER, DROP or SHOW of dynamic tables and give its answer; None for every other statement.

    Before one is created, those that it reads are refreshed: later, its session holds the right to commit, and must not
    wait for another one's lock.
    """
    if isinstance(tree, exp.Create) and _is_dynamic(tree):
        for upstream in _dynamic_tables(session.lake, _sources(session.lake, _qualified_query(session, tree))):
            refresh(session, upstream)
    if not isinstance(tree, exp.Command):
        return None
    text = f"{tree.name} {tree.expression}".strip().rstrip(";").rstrip()
    if found := _ALTER.fullmatch(text):
        return _alter(session, found)
    if found := _DROP.fullmatch(text):
        if (facts := _named(session, found)) is not None:
            _commit(session, f"DROP TABLE {facts.name.quoted}")
        return _status(f"{found['name'].upper()} successfully dropped.")
    if found := _SHOW.fullmatch(text):
        return _show(session, parse(f"SHOW TABLES{found['rest']}"))
    return None


def _show(session: Session, show: exp.Expr) -> pa.Table:
    if not isinstance(show, exp.Show):
        raise unsupported("this form of SHOW DYNAMIC TABLES")
    return _listed(
        session,
        [
            facts
            for database, schema in scopes(session, show)
            for facts in session.lake.dynamic_tables(database)
            if schema in (None, facts.name.schema) and is_like(show, facts.name.name)
        ],
    )


def _named(session: Session, found: re.Match[str]) -> DynamicFacts | None:
    name = parse_name(found["name"], session.database, session.schema)
    if (facts := session.lake.dynamic(name)) is None and not found["exists"]:
        raise missing_object("Dynamic table", name)
    return facts


def _commit(session: Session, statement: str) -> None:
    session.transaction.commit()
    with session.lake.committing():
        session.duck.execute(statement)


def _alter(session: Session, found: re.Match[str]) -> pa.Table:
    facts, action = _named(session, found), found["action"].strip()
    done = _status("Statement executed successfully.")
    if facts is None:
        return done
    session.transaction.commit()
    words = action.upper().split()
    if words == ["REFRESH"]:
        refresh(session, facts)
    elif words in (["SUSPEND"], ["RESUME"]):
        session.lake.note_dynamic(replace(facts, is_suspended=words == ["SUSPEND"]))
    elif words[:2] == ["RENAME", "TO"]:
        renamed = parse_name(action.split(None, 2)[2], facts.name.database, facts.name.schema)
        _commit(session, f"ALTER TABLE {facts.name.quoted} RENAME TO {quote(renamed.name)}")
    elif words[0] == "SET":
        _set(session, facts, action[3:])
    else:
        raise unsupported(f"ALTER DYNAMIC TABLE … {words[0]}")
    return done


def _set(session: Session, facts: DynamicFacts, text: str) -> None:
    options = {found[1].upper(): (found[2] or found[3] or found[4]).upper() for found in _OPTION.finditer(text)}
    if not options or _OPTION.sub("", text).strip() or not options.keys() <= {"TARGET_LAG", "WAREHOUSE"}:
        raise unsupported(f"ALTER DYNAMIC TABLE … SET {' '.join(options) or text.strip()}")
    lag = _lag(options) if "TARGET_LAG" in options else facts.target_lag
    used = _known_warehouse(session, options["WAREHOUSE"]) if "WAREHOUSE" in options else facts.warehouse
    session.lake.note_dynamic(replace(facts, target_lag=lag, warehouse=used))
    session.lake.note_ddl(facts.name)


def _listed(session: Session, dynamic: list[DynamicFacts]) -> pa.Table:
    """What SHOW DYNAMIC TABLES says of these."""
    facts = [session.lake.facts(one.name) for one in dynamic]
    columns: dict[str, list[Any]] = {
        "name": [one.name.name for one in dynamic],
        "database_name": [one.name.database for one in dynamic],
        "schema_name": [one.name.schema for one in dynamic],
        "cluster_by": ["" for _ in dynamic],
        "rows": [session.lake.row_count(fact) for fact in facts],
        "bytes": [0 for _ in dynamic],
        "owner": [one.owner for one in dynamic],
        "target_lag": [one.target_lag for one in dynamic],
        "refresh_mode": [one.refresh_mode for one in dynamic],
        "refresh_mode_reason": [None for _ in dynamic],
        "warehouse": [one.warehouse for one in dynamic],
        "comment": ["" for _ in dynamic],
        "text": [one.text for one in dynamic],
        "automatic_clustering": ["OFF" for _ in dynamic],
        "scheduling_state": ["SUSPENDED" if one.is_suspended else "ACTIVE" for one in dynamic],
        "last_suspended_on": [None for _ in dynamic],
        "is_clone": ["false" for _ in dynamic],
        "is_replica": ["false" for _ in dynamic],
        "is_iceberg": ["false" for _ in dynamic],
        "data_timestamp": [_moment(one.refreshed_us) for one in dynamic],
        "owner_role_type": ["ROLE" for _ in dynamic],
    }
    kinds = {"rows": pa.int64(), "bytes": pa.int64()} | dict.fromkeys(
        ("last_suspended_on", "data_timestamp"), pa.timestamp("us", tz="UTC")
    )
    created = pa.array([_moment(fact.created_us) for fact in facts], pa.timestamp("us", tz="UTC"))
    arrays = {name: pa.array(values, kinds.get(name, pa.string())) for name, values in columns.items()}
    return pa.table({"created_on": created, **arrays})


def _moment(time_us: int | None) -> datetime | None:
    return None if time_us is None else datetime.fromtimestamp(time_us / 1_000_000, tz=UTC)


def refuse_change(lake: Lake, name: TableName) -> None:
    """Raise if people want to change the rows of a dynamic table."""
    if lake.dynamic(name) is not None:
        raise SnowflakeError(
            1, "42000", f"SQL compilation error:\nDML operations are not allowed on dynamic table '{name}'."
        )


def _status(message: str) -> pa.Table:
    return pa.table({"status": [message]})
