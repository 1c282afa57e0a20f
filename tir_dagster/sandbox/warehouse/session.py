"""One client session: its context and transaction, and how each kind of statement runs."""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import duckdb
import fakesnow.transforms
import pyarrow as pa
from fakesnow.conn import FakeSnowflakeConnection
from fakesnow.cursor import FakeSnowflakeCursor
from fakesnow.statement_type import DML_TYPE_IDS, statement_type_id
from sqlglot import exp

from tir_dagster.sandbox.warehouse import catalog, merge, references
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, from_exception
from tir_dagster.sandbox.warehouse.lake import Lake
from tir_dagster.sandbox.warehouse.locks import Holder, TableLocks
from tir_dagster.sandbox.warehouse.names import TableName, literal, parse, quote, table_name
from tir_dagster.sandbox.warehouse.results import ROWS_PER_CHUNK, Result, ResultStore


def _exact_aggregate(expression: exp.Expr) -> exp.Expr:
    """In place of fakesnow's cast of every sum to a float: DuckDB's own sums are exact, only their name differs."""
    if isinstance(expression, (exp.Sum, exp.Avg)) and isinstance(expression.parent, exp.Select):
        name = f"{expression.sql_name()}({expression.this.sql(dialect='snowflake').upper()})"
        return exp.alias_(expression, name, quoted=True)
    return expression


fakesnow.transforms.numeric_agg_implicit_cast = _exact_aggregate

_START = re.compile(r"\s*START\s+TRANSACTION\b", re.IGNORECASE)
_PUBLIC_KEY = re.compile(r"\s*ALTER\s+USER\s+(\S+)\s+SET\s+RSA_PUBLIC_KEY\s*=\s*'([^']*)'", re.IGNORECASE)
_numbers = itertools.count(1)


class NoCache(dict[str, Any]):
    """fakesnow would keep every result for ever; ours are in the result store."""

    def __setitem__(self, key: str, value: Any) -> None:
        del key, value


@dataclass(frozen=True)
class Answer:
    """What a statement answered: its result, Snowflake's number for its kind, and upload data if it was a PUT."""

    result: Result
    type_id: int
    upload: dict[str, Any] | None = None


@dataclass
class Context:
    """What `USE`, `ALTER SESSION` and the login set."""

    user: str
    database: str | None = None
    schema: str | None = None
    role: str = "SYSADMIN"
    warehouse: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)


class Session:
    """A connection's server side. Statements of one session run one after the other."""

    def __init__(self, lake: Lake, locks: TableLocks, results: ResultStore, context: Context) -> None:
        self.number = next(_numbers)
        self.context = context
        self.last_query_id = ""
        self.last_used = time.monotonic()
        self.lake = lake
        self.duck = lake.connection()
        self._locks = locks
        self._results = results
        self._busy = threading.RLock()
        self._in_transaction = False
        self._aborted_as_idle = False
        self._holder = Holder(self.number, self._abort_if_idle)
        self._temporary: set[TableName] = set()
        self.fake = FakeSnowflakeConnection(
            self.duck,
            NoCache(),
            context.database,
            context.schema,
            create_database=False,
            create_schema=False,
        )

    @property
    def database(self) -> str | None:
        return self.fake.database if self.fake.database_set else None

    @property
    def schema(self) -> str | None:
        return self.fake.schema if self.fake.schema_set else None

    def close(self) -> None:
        with self._busy:
            self._rollback()
            for table in self._temporary:
                with suppress(duckdb.Error), self.lake.committing():
                    self.duck.execute(f"DROP TABLE IF EXISTS {table.quoted}")
            self.duck.close()

    def interrupt(self) -> None:
        self.duck.interrupt()

    def execute(
        self, sql: str, query_id: str, params: Any = None, batch: Sequence[tuple[Any, ...]] | None = None
    ) -> Answer:
        """Run one statement; any failure is a SnowflakeError."""
        with self._busy:
            self.last_used = time.monotonic()
            try:
                answer = self._execute(sql, query_id, params, batch)
            except Exception as error:
                raise from_exception(error) from error
            finally:
                self.last_used = time.monotonic()
            self.last_query_id = query_id
            self._results.remember(answer.result)
            return answer

    def describe(self, sql: str, query_id: str) -> Answer:
        """The columns a query would have, without running it."""
        with self._busy:
            try:
                tree = parse(self.fake.variables.inline_variables(sql))
                if isinstance(tree, exp.Query):
                    described = tree.transform(lambda node: exp.null() if isinstance(node, exp.Placeholder) else node)
                    return self._query(described, query_id, None, describe_only=True)
                cursor = self.fake.cursor()
                columns = cursor._describe_only(sql)  # noqa: SLF001
            except Exception as error:
                raise from_exception(error) from error
            if columns is None:
                return self.execute(sql, query_id)
            return Answer(
                self._results.keep(query_id, [(row[0], row[1]) for row in columns], iter(())), statement_type_id(tree)
            )

    def _execute(self, sql: str, query_id: str, params: Any, batch: Sequence[tuple[Any, ...]] | None) -> Answer:
        if found := _PUBLIC_KEY.match(sql):
            self.lake.set_public_key(found[1].strip('"').upper(), found[2])
            return self._status("Statement executed successfully.", query_id, exp.Alter())
        if _START.match(sql):
            sql = "BEGIN"
        tree = parse(self.fake.variables.inline_variables(sql))
        params = list(params) if isinstance(params, tuple) else params
        if isinstance(tree, (exp.Transaction, exp.Commit, exp.Rollback)):
            self._transact(tree)
            return self._status("Statement executed successfully.", query_id, tree)
        if (special := catalog.run(self, tree)) is not None:
            return self._table(special, query_id, tree)
        if isinstance(tree, exp.Query):
            return self._query(tree, query_id, params)
        if isinstance(tree, (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.TruncateTable, exp.Copy)):
            return self._change(tree, query_id, params, batch)
        return self._other(tree, query_id, params)

    # Transactions

    def _transact(self, tree: exp.Expr) -> None:
        if isinstance(tree, exp.Transaction):
            self._begin()
        elif self._aborted_as_idle:
            self._aborted_as_idle = False
            if isinstance(tree, exp.Commit):
                raise SnowflakeError(
                    625, "57014", "The transaction was rolled back: it was idle while it blocked another one."
                )
        elif isinstance(tree, exp.Commit):
            self._commit()
        else:
            self._rollback()

    def _begin(self) -> None:
        if not self._in_transaction:
            self.duck.begin()
            self._in_transaction = True

    def _commit(self) -> None:
        if not self._in_transaction:
            return
        try:
            with self.lake.committing():
                self.duck.commit()
        except duckdb.Error:
            with suppress(duckdb.Error):
                self.duck.rollback()
            raise
        finally:
            self._in_transaction = False
            self._locks.release(self._holder)

    def _rollback(self) -> None:
        if self._in_transaction:
            self._in_transaction = False
            with suppress(duckdb.Error):
                self.duck.rollback()
        self._locks.release(self._holder)

    def _abort_if_idle(self) -> bool:
        """Called by a session that waits for our locks: gives up a transaction nobody is working on."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            if self._in_transaction:
                self._aborted_as_idle = True
                self._rollback()
            return True
        finally:
            self._busy.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One statement's change: inside the open transaction, or in one of its own."""
        autocommit = self.context.parameters.get("AUTOCOMMIT", True)
        alone = not self._in_transaction
        self._begin()
        try:
            yield
        except BaseException:
            if alone:
                self._rollback()
            raise
        if alone and autocommit:
            self._commit()

    @contextmanager
    def _looking_into(self, database: str) -> Iterator[None]:
        """Run with another current database: there fakesnow seeks the tables it keeps about a qualified name."""
        if database == self.database or database not in self.lake.databases():
            yield
            return
        self.duck.execute(f"SET schema = {literal(f'{database}.main')}")
        try:
            yield
        finally:
            back = f"{self.database}.{self.schema or 'main'}" if self.database else "memory.main"
            self.duck.execute(f"SET schema = {literal(back)}")

    # Statements

    def _query(self, tree: exp.Expr, query_id: str, params: Any, *, describe_only: bool = False) -> Answer:
        type_id = statement_type_id(tree)
        with references.resolved(self, tree, params) as resolved:
            cursor = self._checked_cursor(resolved)
            transformed = cursor._transform(resolved, params)  # noqa: SLF001
            if scanned := transformed.args.get("result_scan_sfqid"):
                if (earlier := self._results.recall(scanned)) is None:
                    raise SnowflakeError(709, "02000", f"Statement {scanned} not found")
                return Answer(earlier, type_id)
            if transformed.args.get("seed"):
                cursor._execute(transformed, params)  # noqa: SLF001
                return self._fetched(cursor, query_id, tree)
            sql = transformed.sql(dialect="duckdb")
            columns, sql = _presentable(self.duck, sql, params)
            if describe_only:
                return Answer(self._results.keep(query_id, columns, iter(())), type_id)
            reader = self.duck.execute(sql, params or None).to_arrow_reader(ROWS_PER_CHUNK)
            return Answer(self._results.keep(query_id, columns, iter(reader)), type_id)

    def _change(self, tree: exp.Expr, query_id: str, params: Any, batch: Sequence[tuple[Any, ...]] | None) -> Answer:
        target = self._target(tree)
        if isinstance(tree, exp.Copy):
            # fakesnow knows COPY's options in upper case only.
            for word in (word for option in tree.find_all(exp.CopyParameter) for word in option.find_all(exp.Var)):
                word.set("this", word.name.upper())
        if isinstance(tree, exp.TruncateTable):
            with suppress(SnowflakeError) if tree.args.get("exists") else _always():
                self.lake.table_id(target)
                tree = exp.Delete(this=tree.expressions[0].copy())
            if isinstance(tree, exp.TruncateTable):
                return self._status("Statement executed successfully.", query_id, tree)
            self._locked_change(tree, target, None)
            return self._status("Statement executed successfully.", query_id, exp.TruncateTable())
        answer = self._locked_change(tree, target, params, batch)
        if isinstance(tree, exp.Copy) or not isinstance(answer, dict):
            return self._fetched(answer, query_id, tree)
        rows: list[list[str | None]] = [[str(count) for count in answer.values()]]
        columns = [(f"number of rows {operation}", "BIGINT") for operation in answer]
        kept = self._results.keep(query_id, columns, iter(()))
        return Answer(Result(query_id, kept.rowtype, 1, rows=rows), statement_type_id(tree))

    def _target(self, tree: exp.Expr) -> TableName:
        table = tree.expressions[0] if isinstance(tree, exp.TruncateTable) else tree.this
        table = table.this if isinstance(table, exp.Schema) else table
        if not isinstance(table, exp.Table):
            raise SnowflakeError(1003, "42000", "SQL compilation error:\nsyntax error: a table name is expected.")
        return table_name(table, self.database, self.schema)

    def _locked_change(
        self, tree: exp.Expr, target: TableName, params: Any, batch: Sequence[tuple[Any, ...]] | None = None
    ) -> Any:
        self.lake.table_id(target)
        overwrites = isinstance(tree, exp.Insert) and bool(tree.args.get("overwrite"))
        if overwrites or not isinstance(tree, (exp.Insert, exp.Copy)):
            self._locks.take(str(target), self._holder)
        with self._transaction(), self._looking_into(target.database if isinstance(tree, exp.Copy) else ""):
            if isinstance(tree, exp.Merge):
                with references.resolved(self, tree, params) as resolved:
                    return merge.run_merge(
                        resolved, target.quoted, lambda node: self._run_plainly(node, params), self._text
                    )
            if overwrites:
                with references.resolved(self, tree, params) as resolved:
                    read = lambda node: self._run_plainly(node, params)  # noqa: E731
                    return {"inserted": merge.run_overwrite(resolved, target.quoted, read, self._text)}
            with references.resolved(self, tree, params) as resolved:
                if batch is None:
                    cursor = self._run(resolved, params)
                    counts: dict[type[exp.Expr], str] = {
                        exp.Insert: "inserted",
                        exp.Update: "updated",
                        exp.Delete: "deleted",
                    }
                    if type(tree) in counts:
                        return {counts[type(tree)]: cursor.rowcount or 0}
                    return cursor
                return {"inserted": sum(self._run(resolved.copy(), list(row)).rowcount or 0 for row in batch)}

    def _other(self, tree: exp.Expr, query_id: str, params: Any) -> Answer:
        """DDL, SHOW, DESCRIBE, USE, PUT and the rest: fakesnow's way; DDL ends the transaction, as in Snowflake."""
        if isinstance(tree, (exp.Create, exp.Drop, exp.Alter, exp.Comment)):
            self._commit()
        with (
            self.lake.committing(),
            references.resolved(self, tree, params) as resolved,
            catalog.declared(self, resolved),
        ):
            described = resolved.find(exp.Table) if isinstance(resolved, exp.Describe) else None
            database = table_name(described, self.database, self.schema).database if described else ""
            with self._looking_into(database):
                cursor = self._run(resolved, params)
                answer = self._fetched(cursor, query_id, tree)
            if isinstance(tree, exp.Use):
                self._use(tree)
            upload = (cursor._last_transformed or exp.null()).args.get("put_stage_data")  # noqa: SLF001
            return Answer(Result(query_id, [], rows=[]), 0, upload) if upload else answer

    def _use(self, tree: exp.Use) -> None:
        kind = str(tree.args.get("kind") or "").upper()
        if kind == "ROLE":
            self.context.role = tree.this.name.upper()
        elif kind == "WAREHOUSE":
            self.context.warehouse = tree.this.name.upper()

    # fakesnow and DuckDB

    def _checked_cursor(self, tree: exp.Expr) -> FakeSnowflakeCursor:
        cursor = self.fake.cursor()
        cursor.check_db_and_schema(tree)
        return cursor

    def _run(self, tree: exp.Expr, params: Any) -> FakeSnowflakeCursor:
        cursor = self._checked_cursor(tree)
        for statement in cursor._transform_explode(tree):  # noqa: SLF001
            transformed = cursor._transform(statement, params)  # noqa: SLF001
            cursor._execute(transformed, params if transformed.find(exp.Placeholder) else None)  # noqa: SLF001
        return cursor

    def _run_plainly(self, tree: exp.Expr, params: Any) -> None:
        """Without fakesnow's bookkeeping, which expects every new table to be in the session's database."""
        transformed = self._checked_cursor(tree)._transform(tree, params)  # noqa: SLF001
        self.duck.execute(transformed.sql(dialect="duckdb"), params or None)

    def _text(self, sql: str) -> list[tuple[int, ...]]:
        return self.duck.execute(sql).fetchall()

    def evaluate(self, expression: exp.Expr, wrap: str) -> Any:
        """The value of an expression, computed as this session would; `wrap` is DuckDB text around it."""
        transformed = self.fake.cursor()._transform(exp.select(expression.copy()), None)  # noqa: SLF001
        row = self.duck.execute(wrap.format(transformed.expressions[0].sql(dialect="duckdb"))).fetchone()
        return row[0] if row else None

    def forget_on_close(self, table: TableName) -> None:
        self._temporary.add(table)

    # Answers

    def _fetched(self, cursor: FakeSnowflakeCursor, query_id: str, tree: exp.Expr) -> Answer:
        table = cursor._arrow_table  # noqa: SLF001
        columns = [(row[0], row[1]) for row in cursor._describe_last_sql()]  # noqa: SLF001
        type_id = statement_type_id(tree)
        if table is not None and type_id in DML_TYPE_IDS:
            rows = [[None if value is None else str(value) for value in row.values()] for row in table.to_pylist()]
            kept = self._results.keep(query_id, columns, iter(()))
            return Answer(Result(query_id, kept.rowtype, len(rows), rows=rows), type_id)
        batches = table.combine_chunks().to_batches() if table is not None else []
        return Answer(self._results.keep(query_id, columns, iter(batches)), type_id)

    def _status(self, message: str, query_id: str, tree: exp.Expr) -> Answer:
        return self._table(pa.table({"status": [message]}), query_id, tree)

    def _table(self, table: pa.Table, query_id: str, tree: exp.Expr) -> Answer:
        columns = [
            (name, _DUCK_TYPES[str(kind)]) for name, kind in zip(table.column_names, table.schema.types, strict=True)
        ]
        return Answer(
            self._results.keep(query_id, columns, iter(table.combine_chunks().to_batches())), statement_type_id(tree)
        )


_DUCK_TYPES = {
    "string": "VARCHAR",
    "int64": "BIGINT",
    "bool": "BOOLEAN",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
}

# DuckDB types that Snowflake does not have, and what it would show instead.
_SHOWN_AS = {
    "TINYINT": "BIGINT",
    "SMALLINT": "BIGINT",
    "UTINYINT": "BIGINT",
    "USMALLINT": "BIGINT",
    "UINTEGER": "BIGINT",
    "HUGEINT": "DECIMAL(38,0)",
    "UHUGEINT": "DECIMAL(38,0)",
    "UBIGINT": "DECIMAL(38,0)",
    "FLOAT": "DOUBLE",
    "UUID": "VARCHAR",
    "INTERVAL": "VARCHAR",
    "TIMESTAMP_S": "TIMESTAMP",
    "TIMESTAMP_MS": "TIMESTAMP",
    "TIMESTAMP_NS": "TIMESTAMP",
    '"NULL"': "VARCHAR",
}


def _presentable(duck: duckdb.DuckDBPyConnection, sql: str, params: Any) -> tuple[list[tuple[str, str]], str]:
    """The columns of the query, and the query with casts where DuckDB's type is not one of Snowflake's."""
    described = duck.execute(f"DESCRIBE {sql}", params or None).fetchall()
    columns = [(row[0], row[1]) for row in described]
    if not any(_shown_as(kind) != kind for _, kind in columns):
        return columns, sql
    names = ", ".join(f"c{at}" for at in range(len(columns)))
    casts = ", ".join(f"CAST(c{at} AS {_shown_as(kind)}) AS {quote(name)}" for at, (name, kind) in enumerate(columns))
    return [(name, _shown_as(kind)) for name, kind in columns], f"SELECT {casts} FROM ({sql}) AS q({names})"


def _shown_as(kind: str) -> str:
    if kind.endswith("]") or kind.startswith(("STRUCT", "MAP")):
        return "JSON"
    return _SHOWN_AS.get(kind, kind)


@contextmanager
def _always() -> Iterator[None]:
    yield


def new_query_id() -> str:
    return str(uuid.uuid4())
