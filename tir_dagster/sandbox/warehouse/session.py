"""One client session: its context and transaction, and how each kind of statement runs."""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import duckdb
import fakesnow.info_schema
import fakesnow.transforms
import pyarrow as pa
from fakesnow.conn import FakeSnowflakeConnection
from fakesnow.cursor import FakeSnowflakeCursor
from fakesnow.statement_type import DML_TYPE_IDS, statement_type_id
from sqlglot import exp

from tir_dagster.sandbox.warehouse import (
    catalog,
    dynamic,
    limits,
    meaning,
    merge,
    parameters,
    references,
    roles,
    staged_parquet,
    stages,
    temporary,
    views,
)
from tir_dagster.sandbox.warehouse.dialect import bind_identifiers, duckdb_text, name_columns, name_stages
from tir_dagster.sandbox.warehouse.errors import (
    TIMED_OUT,
    SnowflakeError,
    cancelled,
    duplicate_row,
    from_exception,
    purged_copy,
    timed_out,
    unsupported,
)
from tir_dagster.sandbox.warehouse.lake import Description, Lake
from tir_dagster.sandbox.warehouse.locks import TableLocks
from tir_dagster.sandbox.warehouse.names import TableName, literal, parse, quote, table_name, temporary_name
from tir_dagster.sandbox.warehouse.results import ROWS_PER_READ, Result, ResultStore
from tir_dagster.sandbox.warehouse.transaction import Transaction


def _exact_aggregate(expression: exp.Expr) -> exp.Expr:
    """In place of fakesnow's cast of every sum to a float: DuckDB's own sums are exact, only their name differs."""
    if isinstance(expression, (exp.Sum, exp.Avg)) and isinstance(expression.parent, exp.Select):
        name = f"{expression.sql_name()}({expression.this.sql(dialect='snowflake').upper()})"
        return exp.alias_(expression, name, quoted=True)
    return expression


def _keep_comment(catalog: str, schema: str, table: str, comment: str | None) -> str:
    """In place of fakesnow's statement, which a quote in the comment would end, and which takes none for the word None."""
    names = ", ".join(literal(name) for name in (catalog, schema, table))
    text = "NULL" if comment is None else literal(comment)
    return (
        f"INSERT INTO _fs_global._fs_information_schema._fs_tables_ext VALUES ({names}, {text}) "
        "ON CONFLICT (ext_table_catalog, ext_table_schema, ext_table_name) DO UPDATE SET comment = excluded.comment"
    )


fakesnow.transforms.numeric_agg_implicit_cast = _exact_aggregate
fakesnow.info_schema.insert_table_comment_sql = _keep_comment

_START = re.compile(r"\s*START\s+TRANSACTION\b", re.IGNORECASE)
_PUBLIC_KEY = re.compile(r"\s*ALTER\s+USER\s+(\S+)\s+SET\s+RSA_PUBLIC_KEY\s*=\s*'([^']*)'", re.IGNORECASE)
_numbers = itertools.count(1)


# Where fakesnow keeps it.
_SCHEMA_NAMES = {"INFORMATION_SCHEMA": "_FS_INFORMATION_SCHEMA"}
_OF_OTHER_KINDS = ("show_", "create_", "alter_", "list_stage", "put_stage", "extract_comment_", "drop_schema_")


class InPlace:
    """A tree whose transformations change it: fakesnow's seventy would copy it seventy times."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._is_data = isinstance(tree, (exp.Query, exp.Insert, exp.Update, exp.Delete))

    def transform(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> InPlace:
        code = change.__code__
        # A third of them is about statements of other kinds.
        if self._is_data and any(name.startswith(_OF_OTHER_KINDS) for name in (code.co_name, *code.co_names)):
            return self
        self.tree = self.tree.transform(change, *args, copy=False, **kwargs)
        return self


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
    account: str = "SANDBOX"
    # What differs from Snowflake's defaults, or was set to them; and what UNSET goes back to.
    parameters: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


class Session:
    """A connection's server side. Statements of one session run one after the other."""

    def __init__(self, lake: Lake, locks: TableLocks, results: ResultStore, context: Context) -> None:
        self.number = next(_numbers)
        self.context = context
        self.last_query_id = ""
        self.last_used = time.monotonic()
        self.lake = lake
        self.duck = lake.connection()
        self.transaction = Transaction(self.number, self.duck, lake, locks)
        self._locks = locks
        self.results = results
        self._state = threading.Lock()
        self._current = ""
        self._cancelled = False
        self._cancelled_early: set[str] = set()
        self.temporary: set[TableName] = set()
        self.temporary_limits: dict[TableName, limits.Limits] = {}
        # Told of database and schema it would look each of them up among all there are.
        self.fake = FakeSnowflakeConnection(self.duck, NoCache(), create_database=False, create_schema=False)
        self._begin_at(context.database, context.schema)
        self._keep_time()

    def _begin_at(self, database: str | None, schema: str | None) -> None:
        """What the login asks for, as far as it exists; the rest is an error when it is needed."""
        self.fake.database = database and database.upper()
        self.fake._schema = schema and _SCHEMA_NAMES.get(schema.upper(), schema.upper())  # noqa: SLF001
        if not self.fake.database or self.fake.database not in self.lake.databases():
            return
        self.fake.database_set = True
        for there in (self.fake._schema, "main"):  # noqa: SLF001
            with suppress(duckdb.CatalogException):
                if there:
                    self.duck.execute(f"SET schema = {literal(f'{self.fake.database}.{there}')}")
                    self.fake.schema_set = there != "main"
                    return

    @property
    def database(self) -> str | None:
        return self.fake.database if self.fake.database_set else None

    @property
    def schema(self) -> str | None:
        return self.fake.schema if self.fake.schema_set else None

    def parameter(self, name: str) -> Any:
        """The value that a session parameter has for this session."""
        return self.context.parameters.get(name, parameters.PARAMETERS[name].default)

    def set_parameter(self, name: str, value: Any) -> None:
        """Set a session parameter; None takes it back to the default of the user or the account."""
        value = self.context.defaults.get(name) if value is None else value
        if value is None:
            self.context.parameters.pop(name, None)
        else:
            self.context.parameters[name] = value
        if name == "TIMEZONE":
            self._keep_time()

    def _keep_time(self) -> None:
        self.duck.execute(f"SET TimeZone = {literal(str(self.parameter('TIMEZONE')))}")

    def close(self) -> None:
        with self.transaction.busy:
            self.transaction.rollback()
            self.duck.close()

    def interrupt(self) -> None:
        """Cancel whatever runs."""
        with self._state:
            self._cancel_current()

    def cancel(self, query_id: str) -> None:
        """Cancel this statement: running, waiting for a lock, or waiting for its turn; never a later one."""
        with self._state:
            if self._current == query_id:
                self._cancel_current()
            else:
                self._cancelled_early.add(query_id)

    def _cancel_current(self) -> None:
        if self._current:
            self._cancelled = True
            self.duck.interrupt()
            self._locks.wake()

    def is_cancelled(self) -> bool:
        return self._cancelled

    def check_cancelled(self) -> None:
        if self._cancelled:
            raise cancelled()

    def execute(
        self, sql: str, query_id: str, params: Any = None, batch: Sequence[tuple[Any, ...]] | None = None
    ) -> Answer:
        """Run one statement; any failure is a SnowflakeError."""
        with self._statement(query_id):
            answer = self._execute(sql, query_id, params, batch)
            self.last_query_id = query_id
            self.results.remember(answer.result)
            return answer

    def refresh_due_tables(self) -> None:
        """Refresh the dynamic tables whose time has come; one that fails is tried again the next time."""
        for facts in dynamic.due(self.lake):
            with suppress(SnowflakeError), self._statement(new_query_id()):
                dynamic.refresh(self, facts)

    def describe(self, sql: str, query_id: str) -> Answer:
        """The columns a query would have, without running it."""
        with self._statement(query_id):
            self.transaction.check()
            tree = parse(self.fake.variables.inline_variables(sql))
            meaning.apply(self, tree)
            if isinstance(tree, exp.Query):
                described = tree.transform(lambda node: exp.null() if isinstance(node, exp.Placeholder) else node)
                return self._query(name_columns(described, sql), query_id, None, describe_only=True)
            columns = self.fake.cursor()._describe_only(sql)  # noqa: SLF001
            if columns is None:
                return self._execute(sql, query_id, None, None)
            return Answer(
                self.results.keep(query_id, [(row[0], row[1]) for row in columns], iter(())), statement_type_id(tree)
            )

    @contextmanager
    def _statement(self, query_id: str) -> Iterator[None]:
        """The session's turn for one statement: it can be cancelled, and its failure leaves the session usable."""
        with self.transaction.busy:
            self.last_used = time.monotonic()
            with self._state:
                self._current = query_id
                self._cancelled = query_id in self._cancelled_early
                self._cancelled_early.discard(query_id)
            try:
                self.check_cancelled()
                with self._time_limit(query_id):
                    yield
            except Exception as error:
                was_cancelled = self._end_of_cancelling()
                self.transaction.recover()
                self._go(self._place())
                if self.parameter("TRANSACTION_ABORT_ON_ERROR"):
                    self.transaction.abort(from_exception(error).message)
                too_slow = isinstance(error, SnowflakeError) and error.code == TIMED_OUT
                raise cancelled() if was_cancelled and not too_slow else from_exception(error) from error
            finally:
                self._end_of_cancelling()
                self.last_used = time.monotonic()
                self.transaction.touch()

    @contextmanager
    def _time_limit(self, query_id: str) -> Iterator[None]:
        """STATEMENT_TIMEOUT_IN_SECONDS: 0 stands for Snowflake's longest, which is as good as none."""
        seconds = self.context.parameters.get("STATEMENT_TIMEOUT_IN_SECONDS")
        if not seconds:
            yield
            return
        passed = threading.Event()

        def end() -> None:
            passed.set()
            self.cancel(query_id)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            yield
        except Exception as error:
            raise timed_out(seconds) if passed.is_set() else error from error
        finally:
            timer.cancel()

    def _end_of_cancelling(self) -> bool:
        """From here on a cancel comes too late; says whether one came in time."""
        with self._state:
            self._current = ""
            was_cancelled, self._cancelled = self._cancelled, False
            return was_cancelled

    def _execute(self, sql: str, query_id: str, params: Any, batch: Sequence[tuple[Any, ...]] | None) -> Answer:
        if _START.match(sql):
            sql = "BEGIN"
        if found := _PUBLIC_KEY.match(sql):
            self.lake.set_public_key(found[1].strip('"').upper(), found[2])
            return self._status("Statement executed successfully.", query_id, exp.Alter())
        for run in (parameters.run, roles.run):
            if (answer := run(self, sql)) is not None:
                return self._table(answer, query_id, exp.Alter())
        tree = parse(self.fake.variables.inline_variables(sql))
        if not isinstance(tree, (exp.Transaction, exp.Commit, exp.Rollback)):
            self.transaction.check()
        meaning.apply(self, tree)
        params = list(params) if isinstance(params, tuple) else params
        bind_identifiers(tree, params)
        if isinstance(tree, (exp.Transaction, exp.Commit, exp.Rollback)):
            self._transact(tree)
            return self._status("Statement executed successfully.", query_id, tree)
        if (special := dynamic.run(self, tree)) is not None or (special := catalog.run(self, tree)) is not None:
            return self._table(special, query_id, tree)
        if (upload := stages.put(self, tree, params)) is not None:
            return Answer(Result(query_id, [], rows=[]), 0, upload)
        if (removed := stages.remove(self, tree)) is not None:
            names = pa.array(removed, pa.string())
            results = pa.array(["removed"] * len(removed), pa.string())
            return self._table(pa.table({"name": names, "result": results}), query_id, tree)
        if isinstance(tree, exp.Query):
            return self._query(name_columns(tree, sql), query_id, params)
        if isinstance(tree, (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.TruncateTable, exp.Copy)):
            return self._change(tree, query_id, params, batch)
        return self._other(tree, query_id, params, sql)

    # Transactions and context

    def _transact(self, tree: exp.Expr) -> None:
        if isinstance(tree, exp.Transaction):
            self.transaction.begin()
        elif isinstance(tree, exp.Commit):
            self.transaction.commit()
        else:
            self.transaction.rollback()

    def _changing(self, change: Callable[[], Any], *, once: bool = False) -> Any:
        """Make a change in the session's transaction; made again, it still means the same database and schema."""
        place = self._place()

        done = False

        def here() -> Any:
            nonlocal done
            if done and once:
                raise purged_copy()
            with self._at(place):
                done, answer = True, change()
                return answer

        return self.transaction.run(here, autocommit=bool(self.parameter("AUTOCOMMIT")))

    def _place(self) -> tuple[str | None, str | None]:
        return self.database, self.schema

    @contextmanager
    def _at(self, place: tuple[str | None, str | None]) -> Iterator[None]:
        now = self._place()
        if now == place:
            yield
            return
        self._go(place)
        try:
            yield
        finally:
            self._go(now)

    def _go(self, place: tuple[str | None, str | None]) -> None:
        database, schema = place
        self.fake.database_set, self.fake.schema_set = bool(database), bool(schema)
        self.fake.database = database or self.fake.database
        self.fake._schema = schema or self.fake._schema  # noqa: SLF001
        schema_now = f"{database}.{schema or 'main'}" if database else "memory.main"
        # In a transaction that DuckDB has ended this fails too; the session does it again once it has recovered.
        with suppress(duckdb.Error):
            self.duck.execute(f"SET schema = {literal(schema_now)}")

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
            self._go(self._place())

    # Statements

    def _query(self, tree: exp.Expr, query_id: str, params: Any, *, describe_only: bool = False) -> Answer:
        type_id = statement_type_id(tree)
        with references.resolved(self, tree, params) as resolved:
            cursor = self._checked_cursor(resolved)
            transformed = _translated(cursor, resolved, params)
            if scanned := transformed.args.get("result_scan_sfqid"):
                if (earlier := self.results.recall(scanned)) is None:
                    raise SnowflakeError(709, "02000", f"Statement {scanned} not found")
                return Answer(earlier, type_id)
            if transformed.args.get("seed"):
                cursor._execute(transformed, params)  # noqa: SLF001
                return self._fetched(cursor, query_id, tree)
            sql = duckdb_text(transformed)
            columns, sql = _presentable(self.duck, sql, params)
            if describe_only:
                return Answer(self.results.keep(query_id, columns, iter(())), type_id)
            reader = self.duck.execute(sql, params or None).to_arrow_reader(ROWS_PER_READ)
            batches = _first_rows(self._unless_cancelled(reader), self.parameter("ROWS_PER_RESULTSET"))
            return Answer(self.results.keep(query_id, columns, batches), type_id)

    def _unless_cancelled(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.check_cancelled()
            yield batch

    def _change(self, tree: exp.Expr, query_id: str, params: Any, batch: Sequence[tuple[Any, ...]] | None) -> Answer:
        target = self._target(tree)
        dynamic.refuse_change(self.lake, target)
        if (folder := stages.copied_folder(self, tree)) is not None:
            return self._copied(
                tree, target, query_id, lambda place: stages.copy(self, tree, place, folder, self.column_limits(target))
            )
        if (chosen := staged_parquet.selection(self, tree, params)) is not None:
            answer = self._copied(
                tree,
                target,
                query_id,
                lambda place: staged_parquet.copy(self, chosen, place, self.column_limits(target)),
            )
            staged_parquet.purge(chosen.files)
            return answer
        if isinstance(tree, exp.Copy):
            name_stages(tree)
            # fakesnow knows COPY's options in upper case only.
            for word in (word for option in tree.find_all(exp.CopyParameter) for word in option.find_all(exp.Var)):
                word.set("this", word.name.upper())
        if isinstance(tree, exp.TruncateTable):
            with suppress(SnowflakeError) if tree.args.get("exists") else _always():
                if target not in self.temporary_tables():
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
        columns = [(f"number of {operation}", "BIGINT") for operation in answer]
        kept = self.results.keep(query_id, columns, iter(()))
        return Answer(Result(query_id, kept.rowtype, 1, rows=rows), statement_type_id(tree))

    def _copied(
        self, tree: exp.Expr, target: TableName, query_id: str, copy: Callable[[str], list[list[str | None]]]
    ) -> Answer:
        """Run a COPY into this table, whose name in DuckDB `copy` gets, and answer with its report."""
        is_temporary = target in self.temporary_tables()
        if not is_temporary:
            self.lake.table_id(target)
        place = self._duck_name(target, temporary=is_temporary)
        rows = self._changing(lambda: copy(place))
        if not rows:
            return self._status("Copy executed with 0 files processed.", query_id, tree)
        kept = self.results.keep(query_id, [(name, "VARCHAR") for name in stages.REPORT], iter(()))
        return Answer(Result(query_id, kept.rowtype, len(rows), rows=rows), statement_type_id(tree))

    def _duck_name(self, target: TableName, *, temporary: bool) -> str:
        return f"temp.main.{quote(temporary_name(target))}" if temporary else target.quoted

    def _target(self, tree: exp.Expr) -> TableName:
        table = tree.expressions[0] if isinstance(tree, exp.TruncateTable) else tree.this
        table = table.this if isinstance(table, exp.Schema) else table
        if not isinstance(table, exp.Table):
            raise SnowflakeError(1003, "42000", "SQL compilation error:\nsyntax error: a table name is expected.")
        return table_name(table, self.database, self.schema)

    def _locked_change(
        self, tree: exp.Expr, target: TableName, params: Any, batch: Sequence[tuple[Any, ...]] | None = None
    ) -> Any:
        overwrites = isinstance(tree, exp.Insert) and bool(tree.args.get("overwrite"))
        if target in self.temporary_tables():
            if isinstance(tree, exp.Copy):
                raise unsupported("COPY INTO a temporary table")
            return self._changing(lambda: self._changed(tree, target, params, batch))
        self.lake.table_id(target)
        if overwrites or not isinstance(tree, (exp.Insert, exp.Copy)):
            self.transaction.lock(str(target), self.is_cancelled)
        # A change that takes its files away cannot be made again.
        once = isinstance(tree, exp.Copy) and "PURGE" in {option.name.upper() for option in tree.args["params"]}
        return self._changing(lambda: self._changed(tree, target, params, batch), once=once)

    def _changed(self, tree: exp.Expr, target: TableName, params: Any, batch: Sequence[tuple[Any, ...]] | None) -> Any:
        # fakesnow takes the parameters it uses out of the list; a change that is made again needs them again.
        params = params.copy() if isinstance(params, list) else params
        overwrites = isinstance(tree, exp.Insert) and bool(tree.args.get("overwrite"))
        quoted = self._duck_name(target, temporary=target in self.temporary_tables())
        with self._looking_into(target.database if isinstance(tree, exp.Copy) else ""):
            if isinstance(tree, exp.Merge):
                with self._resolved_change(tree, target, params) as resolved:
                    strict = self.parameter("ERROR_ON_NONDETERMINISTIC_MERGE")
                    plainly = lambda node: self.run_plainly(node, params)  # noqa: E731
                    counts = merge.run_merge(resolved, quoted, plainly, self._text, strict=strict)
                    return {f"rows {operation}": count for operation, count in counts.items()}
            if overwrites:
                with self._resolved_change(tree, target, params) as resolved:
                    read = lambda node: self.run_plainly(node, params)  # noqa: E731
                    return {"rows inserted": merge.run_overwrite(resolved, quoted, read, self._text)}
            with self._resolved_change(tree, target, params) as resolved:
                if batch is not None:
                    return {"rows inserted": self._insert_rows(resolved, batch)}
                if isinstance(tree, exp.Update):
                    return self._updated(resolved, params)
                cursor = self._run(resolved, params)
                if isinstance(tree, exp.Copy):
                    for statement in limits.repair(quoted, self.column_limits(target)):
                        self.duck.execute(statement)
                    return cursor
                return {"rows inserted" if isinstance(tree, exp.Insert) else "rows deleted": cursor.rowcount or 0}

    def _updated(self, tree: exp.Update, params: Any) -> dict[str, int]:
        bound = params.copy() if isinstance(params, list) else params
        several = merge.count_multi_joined(tree, lambda node: self.run_plainly(node, bound), self._text)
        if several and self.parameter("ERROR_ON_NONDETERMINISTIC_UPDATE"):
            raise duplicate_row()
        return {"rows updated": self._run(tree, params).rowcount or 0, "multi-joined rows updated": several}

    @contextmanager
    def _resolved_change(self, tree: exp.Expr, target: TableName, params: Any) -> Iterator[Any]:
        """The statement as it can run, with values that keep to the declared types of their columns."""
        with references.resolved(self, tree, params) as resolved:
            keeping, readers = limits.changes(self.column_limits(target)), meaning.readers(self)
            if keeping or readers:
                place = self._duck_name(target, temporary=target in self.temporary)
                columns = {row[0]: row[1] for row in self.duck.execute(f"DESCRIBE {place}").fetchall()}
                reading = {name: readers[kind] for name, kind in columns.items() if kind in readers}
                for changes in (reading, keeping):
                    if changes:
                        limits.change_stored(resolved, changes, list(columns))
            yield resolved

    def column_limits(self, name: TableName) -> limits.Limits:
        """What the declared types of a table's columns limit."""
        return self.temporary_limits.get(name, {}) if name in self.temporary else self.lake.column_limits(name)

    def _insert_rows(self, tree: exp.Insert, batch: Sequence[tuple[Any, ...]]) -> int:
        """One statement with bound arrays: many rows at a time where it is a plain VALUES, else row by row."""
        cursor = self._checked_cursor(tree)
        text = duckdb_text(translated := _translated(cursor, tree, list(batch[0])))
        values = translated.expression
        row = duckdb_text(values.expressions[0]) if isinstance(values, exp.Values) else ""
        if not row or len(values.expressions) > 1 or not text.endswith(row):
            inserted = 0
            for bound in batch:
                self.check_cancelled()
                inserted += self._run(tree.copy(), list(bound)).rowcount or 0
            return inserted
        head = text.removesuffix(row)
        return sum(self._insert_some(head, row, batch[at : at + 200]) for at in range(0, len(batch), 200))

    def _insert_some(self, head: str, row: str, batch: Sequence[tuple[Any, ...]]) -> int:
        self.check_cancelled()
        bound = [value for values in batch for value in values]
        counted = self.duck.execute(head + ", ".join([row] * len(batch)), bound).fetchone()
        return int(counted[0]) if counted else 0

    def _other(self, tree: exp.Expr, query_id: str, params: Any, text: str) -> Answer:
        """DDL, SHOW, DESCRIBE, USE, PUT and the rest: fakesnow's way; DDL ends the transaction, as in Snowflake."""
        if (answer := temporary.run(self, tree, params)) is not None:
            return self._table(answer, query_id, tree)
        if isinstance(tree, (exp.Create, exp.Drop, exp.Alter, exp.Comment)):
            self.transaction.commit()
        with (
            self.lake.committing(),
            references.resolved(self, tree, params) as resolved,
            dynamic.declared(self, resolved, text),
            catalog.declared(self, resolved),
            views.declared(self, resolved, text),
        ):
            if (described := _described(resolved)) is not None:
                return self._description(resolved, table_name(described, self.database, self.schema), query_id, params)
            cursor = self._run(resolved, params)
            answer = self._fetched(cursor, query_id, tree)
            if isinstance(tree, exp.Alter) and isinstance(tree.this, exp.Table) and tree.args.get("kind") == "TABLE":
                self.lake.record_commits(table_name(tree.this, self.database, self.schema).database)
                catalog.note_altered_limits(self, tree)
            if isinstance(tree, (exp.Comment, exp.Alter)) and isinstance(tree.this, exp.Table):
                self._note_ddl(table_name(tree.this, self.database, self.schema))
            upload = (cursor._last_transformed or exp.null()).args.get("put_stage_data")  # noqa: SLF001
            return Answer(Result(query_id, [], rows=[]), 0, upload) if upload else answer

    def _note_ddl(self, name: TableName) -> None:
        """A comment makes no version."""
        with suppress(SnowflakeError):
            # Of a schema there is nothing to note, and a renamed table is another one's name.
            self.lake.note_ddl(name)

    def _description(self, tree: exp.Expr, name: TableName, query_id: str, params: Any) -> Answer:
        """What DESCRIBE says of a table or view; about a table, fakesnow is asked once for each version of the schema."""
        shape, key = self.lake.shape(name), (name, tree.sql(dialect="snowflake"))
        known = self.lake.descriptions.get(key)
        if shape is None or known is None or known.shape != shape:
            with self._looking_into(name.database):
                columns, rows = _told(self._run(tree, params))
            if shape is not None:
                self.lake.descriptions[key] = Description(shape, columns, rows)
        else:
            columns, rows = known.columns, known.rows
        if rows is not None and (sizes := self.column_limits(name)):
            described = zip(rows["name"].to_pylist(), rows["type"].to_pylist(), strict=True)
            kinds = [sizes[column].shown(kind) if column in sizes else kind for column, kind in described]
            rows = rows.set_column(rows.column_names.index("type"), "type", pa.array(kinds, pa.string()))
        batches = rows.combine_chunks().to_batches() if rows is not None else []
        return Answer(self.results.keep(query_id, columns, iter(batches)), statement_type_id(tree))

    # fakesnow and DuckDB

    def _checked_cursor(self, tree: exp.Expr) -> FakeSnowflakeCursor:
        cursor = self.fake.cursor()
        cursor.check_db_and_schema(tree)
        return cursor

    def _run(self, tree: exp.Expr, params: Any) -> FakeSnowflakeCursor:
        cursor = self._checked_cursor(tree)
        for statement in cursor._transform_explode(tree):  # noqa: SLF001
            transformed = _translated(cursor, statement, params)
            if isinstance(transformed, (exp.Insert, exp.Update, exp.Delete)):
                duckdb_text(transformed)
            elif isinstance(transformed, exp.Create) and isinstance(transformed.expression, exp.Query):
                duckdb_text(transformed.expression)
            cursor._execute(transformed, params if transformed.find(exp.Placeholder) else None)  # noqa: SLF001
        return cursor

    def run_plainly(self, tree: exp.Expr, params: Any) -> None:
        """Without fakesnow's bookkeeping, which expects every new table to be in the session's database."""
        transformed = _translated(self._checked_cursor(tree), tree, params)
        self.duck.execute(duckdb_text(transformed), params if params and transformed.find(exp.Placeholder) else None)

    def temporary_tables(self) -> set[TableName]:
        """Those of this session, and its views. What was created in a transaction goes with it when that is rolled back."""
        for name in list(self.temporary):
            if temporary.stored_kind(self.duck, name) is None:
                self.temporary.discard(name)
        return self.temporary

    def _text(self, sql: str) -> list[tuple[int, ...]]:
        return self.duck.execute(sql).fetchall()

    def evaluate(self, expression: exp.Expr, wrap: str) -> Any:
        """The value of an expression, computed as this session would; `wrap` is DuckDB text around it."""
        transformed = _translated(self.fake.cursor(), exp.select(expression.copy()), None)
        row = self.duck.execute(wrap.format(transformed.expressions[0].sql(dialect="duckdb"))).fetchone()
        return row[0] if row else None

    # Answers

    def _fetched(self, cursor: FakeSnowflakeCursor, query_id: str, tree: exp.Expr) -> Answer:
        columns, table = _told(cursor)
        type_id = statement_type_id(tree)
        if table is not None and type_id in DML_TYPE_IDS:
            rows = [[None if value is None else str(value) for value in row.values()] for row in table.to_pylist()]
            kept = self.results.keep(query_id, columns, iter(()))
            return Answer(Result(query_id, kept.rowtype, len(rows), rows=rows), type_id)
        batches = table.combine_chunks().to_batches() if table is not None else []
        return Answer(self.results.keep(query_id, columns, iter(batches)), type_id)

    def _status(self, message: str, query_id: str, tree: exp.Expr) -> Answer:
        return self._table(pa.table({"status": [message]}), query_id, tree)

    def _table(self, table: pa.Table, query_id: str, tree: exp.Expr) -> Answer:
        columns = [
            (name, _DUCK_TYPES[str(kind)]) for name, kind in zip(table.column_names, table.schema.types, strict=True)
        ]
        return Answer(
            self.results.keep(query_id, columns, iter(table.combine_chunks().to_batches())), statement_type_id(tree)
        )


def _first_rows(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """All rows where there is no limit."""
    if not limit:
        yield from batches
        return
    for batch in batches:
        yield batch.slice(0, limit)
        limit -= batch.num_rows
        if limit <= 0:
            return


def _told(cursor: FakeSnowflakeCursor) -> tuple[list[tuple[str, str]], pa.Table | None]:
    """The columns and the rows of a cursor's last statement."""
    rows = cursor._arrow_table  # noqa: SLF001
    return [(row[0], row[1]) for row in cursor._describe_last_sql()], rows  # noqa: SLF001


def _described(tree: exp.Expr) -> exp.Table | None:
    """The table or view that a statement describes."""
    return tree.find(exp.Table) if isinstance(tree, exp.Describe) else None


def _translated(cursor: FakeSnowflakeCursor, tree: exp.Expr, params: Any) -> Any:
    """The translation by fakesnow of a Snowflake tree to DuckDB's dialect."""
    done: Any = cursor._transform(InPlace(tree.copy()), params)  # noqa: SLF001
    return done.tree


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
