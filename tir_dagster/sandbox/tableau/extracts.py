"""The server's Hyper process and what it asks of extract files."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tableauhyperapi import Connection, CreateMode, HyperException, HyperProcess, TableName, Telemetry

from tir_dagster.sandbox.tableau.document import NO_VALUE, ExtractColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_DATE = re.compile(r"#(\d{4}-\d{2}-\d{2})#")
_DATETIME = re.compile(r"#(\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}(?:\.\d+)?)#")
_INTEGER = re.compile(r"-?\d+")


class Hyper:
    """One process for the whole server, started when the first extract is touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None

    @contextlib.contextmanager
    def open(self, path: Path, *, create: bool = False) -> Iterator[Any]:
        with self._connect(path, CreateMode.CREATE if create else CreateMode.NONE) as connection:
            yield connection

    @contextlib.contextmanager
    def attached(self, files: Mapping[str, Path]) -> Iterator[Any]:
        """Several files at once, each under a name: then Hyper wants that name before every schema."""
        with self._connect() as connection:
            for name, path in files.items():
                connection.catalog.attach_database(path, name)
            yield connection

    def _connect(self, *which: Any) -> Any:
        try:
            return Connection(self._endpoint(), *which)
        except HyperException:
            if self._is_alive():
                raise
            # Somebody ended the process; the file was not touched yet, so trying again is safe.
            self.close()
            return Connection(self._endpoint(), *which)

    def _endpoint(self) -> Any:
        with self._lock:
            if self._process is None:
                # Without log_config Hyper litters the current folder with hyperd.log.
                self._process = HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""})
            return self._process.endpoint

    def _is_alive(self) -> bool:
        try:
            with Connection(self._endpoint()):
                return True
        except HyperException:
            return False

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(HyperException):
                    self._process.close()
                self._process = None


def quoted(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def columns_of(connection: Any, schema: str, table: str) -> list[str] | None:
    """The table's column names; None when there is no such table."""
    name = TableName(schema, table)
    if not connection.catalog.has_table(name):
        return None
    return [column.name.unescaped for column in connection.catalog.get_table_definition(name).columns]


@dataclass(frozen=True)
class StoredTable:
    """A table of a Hyper file."""

    schema: str
    name: str
    columns: tuple[str, ...]

    @property
    def place(self) -> tuple[str, str]:
        return self.schema, self.name

    @property
    def title(self) -> str:
        return f"[{self.schema}].[{self.name}]"


@dataclass(frozen=True)
class ForeignKey:
    """Columns of a table that refer to the primary key of another: assumed by Hyper, never checked."""

    table: StoredTable
    columns: tuple[str, ...]
    other: StoredTable
    other_columns: tuple[str, ...]


def stored_tables(connection: Any) -> list[StoredTable]:
    """Everything in the file."""
    places = [
        (name.schema_name.name.unescaped, name.name.unescaped)
        for schema in connection.catalog.get_schema_names()
        for name in connection.catalog.get_table_names(schema)
    ]
    return [StoredTable(*place, tuple(columns_of(connection, *place) or ())) for place in places]


def foreign_keys(connection: Any, tables: Sequence[StoredTable]) -> list[ForeignKey]:
    """The foreign keys that the file declares, in the order of their declaration for each table."""
    ask = connection.execute_list_query
    places = ask("SELECT t.oid, n.nspname, t.relname FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace")
    by_place = {table.place: table for table in tables}
    by_oid = {oid: by_place[schema, name] for oid, schema, name in places if (schema, name) in by_place}
    columns = {(oid, number): name for oid, number, name in ask("SELECT attrelid, attnum, attname FROM pg_attribute")}
    found = "FROM pg_constraint WHERE contype = 'f'"
    sides: list[dict[Any, list[str]]] = [defaultdict(list), defaultdict(list)]
    for side, table, numbers in zip(sides, ("conrelid", "confrelid"), ("conkey", "confkey"), strict=True):
        for owner, name, oid, number in ask(f"SELECT conrelid, conname, {table}, unnest({numbers}) {found}"):
            side[owner, name].append(columns[oid, number])
    return [
        ForeignKey(by_oid[owner], tuple(sides[0][owner, name]), by_oid[other], tuple(sides[1][owner, name]))
        for owner, name, other in ask(f"SELECT conrelid, conname, confrelid {found} ORDER BY conrelid, conname")
    ]


def create_table(connection: Any, schema: str, table: str, columns: Sequence[ExtractColumn]) -> None:
    connection.catalog.create_schema_if_not_exists(schema)
    body = ", ".join(f"{quoted(column.name)} {column.type.hyper}" for column in columns)
    connection.execute_command(f"CREATE TABLE {quoted(schema, table)} ({body})")


def drop_table(connection: Any, schema: str, table: str) -> None:
    connection.execute_command(f"DROP TABLE {quoted(schema, table)}")


def append_parquet(connection: Any, schema: str, table: str, columns: Sequence[ExtractColumn], file: Path) -> int:
    """Add the file's rows, by column name: a positional insert would swap columns in silence."""
    names = ", ".join(quoted(column.name) for column in columns)
    source = "'" + str(file).replace("'", "''") + "'"
    added: int | None = connection.execute_command(
        f"INSERT INTO {quoted(schema, table)} ({names}) SELECT {names} FROM external({source}, format => 'parquet')"
    )
    return added or 0


def row_count(connection: Any, schema: str, table: str) -> int:
    count: int = connection.execute_scalar_query(f"SELECT COUNT(*) FROM {quoted(schema, table)}")
    return count


def greatest(connection: Any, schema: str, table: str, column: str) -> str:
    """The column's greatest value as a .tds writes it: `#2001-01-01#`, `#2001-01-01 00:00:00#`, `17` or `%null%`."""
    value = connection.execute_scalar_query(f"SELECT MAX({quoted(column)}) FROM {quoted(schema, table)}")
    if value is None:
        return NO_VALUE
    if isinstance(value, int):
        return str(value)
    return f"#{str(value).removesuffix('.000000')}#"


def sql_literal(value: str) -> str | None:
    """An increment value in SQL, or None when it is not one."""
    if _INTEGER.fullmatch(value):
        return value
    if match := _DATE.fullmatch(value):
        return f"DATE '{match[1]}'"
    if match := _DATETIME.fullmatch(value):
        return f"TIMESTAMP '{match[1]}'"
    return None


def delete_at(connection: Any, schema: str, table: str, column: str, value: str) -> None:
    """Delete the rows that have this increment value."""
    connection.execute_command(f"DELETE FROM {quoted(schema, table)} WHERE {quoted(column)} = {sql_literal(value)}")


def reaches(connection: Any, schema: str, table: str, column: str, literal: str) -> bool:
    """Whether the column's greatest value is at least this one."""
    sql = f"SELECT MAX({quoted(column)}) >= {literal} FROM {quoted(schema, table)}"
    return connection.execute_scalar_query(sql) is True
