"""The extract file: reads its table, creates files from staged rows, rebuilds files to free space."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tir_dagster.errors import ROWS_ADD_UP, ExtractError, VerificationError
from tir_dagster.files import need_space, replaced_file, total_bytes
from tir_dagster.hyper.casts import FileColumn, Loaded, check_staged, pair_columns
from tir_dagster.hyper.engine import DEFAULT_FILE_VERSION, connect, first_line, literal, parquet, python_value, quoted
from tir_dagster.snowflake.columns import Column

EXTRACT_SCHEMA = "Extract"
EXTRACT_TABLE = "Extract"
# A table of a Hyper file by schema and name.
TableId = tuple[str, str]
# Rows grow when they leave Parquet's encodings; small files are mostly Hyper's own pages.
_GROWTH = 4
_SMALLEST = 1024 * 1024
_VERSION_BYTE = 10


@dataclass(frozen=True)
class ExtractTable:
    """A data table of an extract file; `bytes` are the whole file's."""

    schema: str
    name: str
    columns: tuple[FileColumn, ...]
    rows: int
    file_version: int
    bytes: int

    @property
    def id(self) -> TableId:
        return self.schema, self.name

    @property
    def sql(self) -> str:
        return quoted(self.schema, self.name)


def describe(path: Path, table: TableId | None = None) -> ExtractTable:
    """Return this table of the file, or its only one; raise ExtractError if there is no such table, or a file of another kind.

    Hyper writes to a file whenever it opens it, so its modification time says nothing about its rows.
    """
    with _opened(path) as connection:
        return look_at(connection, path, table)


def describe_all(path: Path) -> tuple[ExtractTable, ...]:
    """Return all tables of the file, sorted by their names."""
    with _opened(path) as connection:
        return tuple(look_at(connection, path, table) for table in _tables(connection))


def _opened(path: Path) -> AbstractContextManager[Any]:
    if not path.is_file():
        raise ExtractError(f"There is no extract at {path}. Run a full refresh to make one.")
    return connect(path)


def look_at(connection: Any, path: Path, table: TableId | None = None) -> ExtractTable:
    """Describe a table through a connection that is open already."""
    schema, name = _only_table(connection, path) if table is None else _checked(connection, path, table)
    return ExtractTable(
        schema=schema,
        name=name,
        columns=_columns(connection, schema, name),
        rows=int(connection.execute_scalar_query(f"SELECT COUNT(*) FROM {quoted(schema, name)}")),
        file_version=_file_version(path),
        bytes=path.stat().st_size,
    )


def _tables(connection: Any) -> list[TableId]:
    catalog = connection.catalog
    return sorted(
        (schema.name.unescaped, table.name.unescaped)
        for schema in catalog.get_schema_names()
        for table in catalog.get_table_names(schema)
    )


def _only_table(connection: Any, path: Path) -> TableId:
    tables = _tables(connection)
    if len(tables) == 1:
        return tables[0]
    raise ExtractError(
        f"{path} holds {len(tables)} tables ({_listed(tables)}), and the spec declares one. Declare each of them under `tables` in "
        "the spec, store the extract as one table, or use the delivery `trigger`."
    )


def _checked(connection: Any, path: Path, table: TableId) -> TableId:
    tables = _tables(connection)
    if table in tables:
        return table
    raise ExtractError(
        f"{path} has no table {quoted(*table)}; it holds {_listed(tables)}. Run a full refresh to make the file anew."
    )


def _listed(tables: Sequence[TableId]) -> str:
    return ", ".join(quoted(*table) for table in tables) or "none"


def _columns(connection: Any, schema: str, name: str) -> tuple[FileColumn, ...]:
    from tableauhyperapi import Nullability, TableName

    return tuple(
        FileColumn(
            name=column.name.unescaped,
            type=_sql_type(column.type),
            nullable=column.nullability is Nullability.NULLABLE,
            collation=column.collation,
        )
        for column in connection.catalog.get_table_definition(TableName(schema, name)).columns
    )


_SQL_TYPES = {
    "BIG_INT": "BIGINT",
    "INT": "INTEGER",
    "SMALL_INT": "SMALLINT",
    "DOUBLE": "DOUBLE PRECISION",
    "FLOAT": "REAL",
    "BOOL": "BOOLEAN",
    "BYTES": "BYTEA",
    "TIMESTAMP_TZ": "TIMESTAMPTZ",
}


def _sql_type(described: Any) -> str:
    text = str(described).replace(" ", "")
    return _SQL_TYPES.get(text, text)


def _file_version(path: Path) -> int:
    with path.open("rb") as file:
        return file.read(_VERSION_BYTE + 1)[_VERSION_BYTE]


@dataclass(frozen=True)
class NewTable:
    """A table to create: its columns by source name, and its staged rows; `names` as for pair_columns."""

    columns: Sequence[Column]
    rows: Sequence[Path]
    names: Mapping[str, str] | None = None
    id: TableId | None = None
    # Columns by source name that hold no NULL: others may, as in the files Tableau writes, because a source may break its own NOT NULL.
    not_null: Collection[str] = ()

    def empty(self, file_version: int) -> ExtractTable:
        """Describe it without rows."""
        renamed = self.names or {}
        stored = tuple(
            FileColumn(renamed.get(column.name, column.name), column.hyper, nullable=column.name not in self.not_null)
            for column in self.columns
        )
        return ExtractTable(*(self.id or (EXTRACT_SCHEMA, EXTRACT_TABLE)), stored, 0, file_version, 0)


def create_tables(
    target: Path,
    tables: Sequence[NewTable],
    *,
    template: Path | None = None,
    file_version: int = DEFAULT_FILE_VERSION,
) -> tuple[ExtractTable, ...]:
    """A new extract of exactly the staged rows of these tables, in place of whatever was at `target`.

    Tables, columns, types, nullability and file version are those of the `template`, if there is one; none of its rows.
    """
    empty = [describe(template, table.id) if template else table.empty(file_version) for table in tables]
    pairs = [
        pair_columns(table.columns, stored.columns, path=target, names=table.names)
        for table, stored in zip(tables, empty, strict=True)
    ]
    for table in tables:
        check_staged(table.rows, [column.name for column in table.columns])
    need_space(target.parent, _GROWTH * total_bytes([file for table in tables for file in table.rows]) + _SMALLEST)
    with replaced_file(target) as beside:
        with connect(beside, create=True, file_version=empty[0].file_version) as connection:
            appended = []
            for table, stored, loaded in zip(tables, empty, pairs, strict=True):
                connection.catalog.create_schema_if_not_exists(stored.schema)
                connection.execute_command(_create_table(stored.schema, stored.name, stored.columns))
                appended.append(append_rows(connection, stored.sql, loaded, table.rows, path=target))
        created = tuple(describe(beside, stored.id) for stored in empty)
        for table_created, count in zip(created, appended, strict=True):
            check_count(target, table_created.rows, count)
    return created


def create_extract(
    target: Path,
    columns: Sequence[Column],
    rows: Sequence[Path],
    *,
    names: Mapping[str, str] | None = None,
    file_version: int = DEFAULT_FILE_VERSION,
) -> ExtractTable:
    """The same for an extract of one table."""
    return create_tables(target, [NewTable(columns, rows, names)], file_version=file_version)[0]


def create_like(
    target: Path,
    template: Path,
    columns: Sequence[Column],
    rows: Sequence[Path],
    *,
    names: Mapping[str, str] | None = None,
) -> ExtractTable:
    """The same with the layout of another extract."""
    return create_tables(target, [NewTable(columns, rows, names)], template=template)[0]


def _create_table(schema: str, name: str, columns: Sequence[FileColumn]) -> str:
    body = ", ".join(
        quoted(column.name)
        + f" {column.type}"
        + (f" COLLATE {quoted(column.collation)}" if column.collation else "")
        + ("" if column.nullable else " NOT NULL")
        for column in columns
    )
    return f"CREATE TABLE {quoted(schema, name)} ({body})"


def append_rows(
    connection: Any,
    table: str,
    loaded: Sequence[Loaded],
    rows: Sequence[Path],
    *,
    path: Path,
    unless: Callable[[str], str] | None = None,
) -> int:
    """Add the staged rows, column by column by name: a positional insert would swap columns in silence.

    `unless` leaves some out: it makes what follows FROM of the files.
    """
    if not rows:
        return 0
    from tableauhyperapi import HyperException

    into = ", ".join(quoted(column.stored.name) for column in loaded)
    values = ", ".join(column.value for column in loaded)
    try:
        staged = parquet(rows) if unless is None else unless(parquet(rows))
        added = connection.execute_command(f"INSERT INTO {table} ({into}) SELECT {values} FROM {staged}")
    except HyperException as error:
        with contextlib.suppress(HyperException):
            connection.execute_command("ROLLBACK")
        raise ExtractError(
            f"{_unfit(connection, loaded, rows)} into the extract {path}: {first_line(error)}. Nothing was replaced. "
            "Run a full refresh into a new extract, or correct the values in the source."
        ) from error
    return int(added or 0)


def _unfit(connection: Any, loaded: Sequence[Loaded], rows: Sequence[Path]) -> str:
    """Find the column whose number overflowed by trying them one by one: Hyper does not name it."""
    from tableauhyperapi import HyperException

    unfit = []
    for column in loaded:
        try:
            connection.execute_scalar_query(f"SELECT COUNT({column.value}) FROM {parquet(rows)}")
        except HyperException:
            unfit.append(f"{column.source.name} ({column.source.spark} into {column.stored.type})")
    return f"Values of {', '.join(unfit)} do not fit" if unfit else "The staged rows do not fit"


def check_count(path: Path, actual: int, expected: int) -> None:
    if actual != expected:
        raise VerificationError(
            f"{path}: {actual} rows were read back where {expected} were written. Nothing was replaced; run the refresh again.",
            check=ROWS_ADD_UP,
        )


def odd_keys(
    path: Path,
    key: Sequence[str],
    columns: Sequence[Column],
    *,
    names: Mapping[str, str] | None = None,
    table_id: TableId | None = None,
) -> tuple[int, int]:
    """Return how many rows have a NULL in the key, and how many keys without NULL have several rows."""
    table = describe(path, table_id)
    stored = {
        pair.source.name: pair.stored.name for pair in pair_columns(columns, table.columns, path=path, names=names)
    }
    listed = [quoted(stored[name]) for name in key]
    missing = " OR ".join(f"{name} IS NULL" for name in listed)
    together = ", ".join(listed)
    with connect(path) as connection:
        nulls = connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table.sql} WHERE {missing}")
        repeated = connection.execute_scalar_query(
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {table.sql} WHERE NOT ({missing}) GROUP BY {together} HAVING COUNT(*) > 1) AS odd"
        )
    return int(nulls), int(repeated)


def rows_of_key(
    path: Path,
    columns: Sequence[Column],
    key: Sequence[str],
    values: Sequence[Any],
    *,
    names: Mapping[str, str] | None = None,
    table_id: TableId | None = None,
) -> list[dict[str, Any]]:
    """Return the rows whose key columns have these values, by the names of the source's columns."""
    table = describe(path, table_id)
    pairs = {pair.source.name: pair.stored for pair in pair_columns(columns, table.columns, path=path, names=names)}
    conditions = []
    for name, value in zip(key, values, strict=True):
        same = "NULL" if value is None else f"CAST({literal(str(value))} AS {pairs[name].type})"
        conditions.append(f"{pairs[name].comparable} IS NOT DISTINCT FROM {same}")
    listed = ", ".join(quoted(stored.name) for stored in pairs.values())
    with connect(path) as connection:
        rows = connection.execute_list_query(f"SELECT {listed} FROM {table.sql} WHERE {' AND '.join(conditions)}")
    return [dict(zip(pairs, map(python_value, row), strict=True)) for row in rows]


@dataclass(frozen=True)
class Added:
    """A column that a copy has in addition to its base, and its value in Hyper's SQL."""

    name: str
    type: str
    value: str


def rebuild(base: Path, target: Path, *, added: Mapping[TableId, Added] | None = None) -> tuple[ExtractTable, ...]:
    """The same tables, rows, columns, types, nullability and file version in a new file without the space of purged rows."""
    tables = describe_all(base)
    need_space(target.parent, base.stat().st_size)
    with replaced_file(target) as beside:
        with connect(beside, create=True, file_version=tables[0].file_version) as connection:
            for table in tables:
                _copy_table(connection, table, base=base, beside=beside, added=(added or {}).get(table.id))
        rebuilt = describe_all(beside)
        for table, copy in zip(tables, rebuilt, strict=True):
            check_count(target, copy.rows, table.rows)
    return rebuilt


def _copy_table(connection: Any, table: ExtractTable, *, base: Path, beside: Path, added: Added | None) -> None:
    """Copy the rows; with two databases attached, every name includes its database."""
    new, old = beside.stem, f"{beside.stem}.old"
    connection.catalog.attach_database(str(base), alias=old)
    connection.catalog.create_schema_if_not_exists(_schema(new, table.schema))
    more = (FileColumn(added.name, added.type),) if added else ()
    create = _create_table(table.schema, table.name, (*table.columns, *more))
    connection.execute_command(create.replace(table.sql, quoted(new, table.schema, table.name), 1))
    names = [quoted(column.name) for column in table.columns]
    into = ", ".join([*names, *(quoted(column.name) for column in more)])
    values = ", ".join([*names, *([added.value] if added else [])])
    connection.execute_command(
        f"INSERT INTO {quoted(new, table.schema, table.name)} ({into})"
        f" SELECT {values} FROM {quoted(old, table.schema, table.name)}"
    )
    connection.catalog.detach_database(old)


def _schema(database: str, schema: str) -> Any:
    from tableauhyperapi import SchemaName

    return SchemaName(database, schema)


def needs_rebuild(path: Path, *, rows: int, bytes_per_row: float, limit: float = 1.5) -> bool:
    """Whether the file has grown past `limit` times the size these rows had when it was last built.

    Nothing gives space back in place, and a rebuild costs a full copy, so it is worth it for size only. Files whose
    excess is below a few megabytes are left alone: their size is Hyper's own pages.
    """
    return path.stat().st_size > rebuild_above(rows=rows, bytes_per_row=bytes_per_row, limit=limit)


def rebuild_above(*, rows: int, bytes_per_row: float, limit: float) -> float:
    """Return the size past which a file of so many rows is built anew."""
    expected = rows * bytes_per_row
    return max(limit * expected, expected + 8 * _SMALLEST)
