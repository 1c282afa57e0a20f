"""The tables of a load: the target with its columns, the bookkeeping beside it, and the session's temporary ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tir_dagster.errors import LoadError, SpecError
from tir_dagster.loading.values import LoadColumn
from tir_dagster.snowflake.columns import Column, Kind, UnheldTypeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.spec.load import LoadSpec

_COUNT = re.compile(r"\(\s*(\d+)\s*\)")
LEDGER_COLUMNS = {
    **dict.fromkeys(("TARGET", "LOAD", "LOAD_ID", "PATH"), "VARCHAR"),
    "SEQ": "NUMBER(38,0)",
    "FILE_NO": "NUMBER(38,0)",
    **dict.fromkeys(("STAMP", "DIGEST", "ORDER_KEY", "STATUS"), "VARCHAR"),
    **dict.fromkeys(("BYTES", "ROWS_LOADED", "ROWS_REJECTED"), "NUMBER(38,0)"),
    "LOADED_AT": "TIMESTAMP_TZ",
}
LOADS_COLUMNS = {
    **dict.fromkeys(("LOAD", "LOAD_ID", "TARGET", "MODE"), "VARCHAR"),
    **dict.fromkeys(("FILES", "ROWS_READ", "ROWS_REJECTED"), "NUMBER(38,0)"),
    **dict.fromkeys(("ROWS_INSERTED", "ROWS_UPDATED", "ROWS_DELETED"), "NUMBER(38,0)"),
    "CHANGED": "VARCHAR",
    "LOADED_AT": "TIMESTAMP_TZ",
}
REJECTS_COLUMNS = {
    **dict.fromkeys(("LOAD", "LOAD_ID", "PATH"), "VARCHAR"),
    "LINE": "NUMBER(38,0)",
    "REASON": "VARCHAR",
    "ROW_TEXT": "VARCHAR",
    "REJECTED_AT": "TIMESTAMP_TZ",
}


@dataclass(frozen=True)
class Bookkeeping:
    """The tables with the records of files, loads and rejected rows, and the stage of the loads.

    Records of files and deleted rows belong to the table, not to the load: a load may be renamed, or be one of several.
    """

    load: str
    table: TableName
    ledger: TableName
    loads: TableName
    rejects: TableName
    stage: TableName

    @staticmethod
    def of(spec: LoadSpec) -> Bookkeeping:
        table = TableName.parse(spec.table)
        home = TableName.parse(f"{spec.bookkeeping}.X") if spec.bookkeeping else table
        names = ("TIR_LOADED_FILES", "TIR_LOADS", "TIR_REJECTED_ROWS", "TIR_STAGE")
        return Bookkeeping(spec.name, table, *(replace(home, name=name) for name in names))

    def graves(self, columns: Sequence[str]) -> TableName:
        """Return the table with the deleted keys; `columns` are those of the key and of the version."""
        # The digest tells tables of equal names in other schemas apart, and other keys.
        digest = hashlib.sha1("\n".join([str(self.table), *columns]).encode(), usedforsecurity=False).hexdigest()[:8]
        return replace(self.ledger, name=f"TIR_DELETED_{self.table.name[:200]}_{digest.upper()}")


@dataclass(frozen=True)
class Target:
    """The table, the columns of the files, and their roles; places are positions in `columns`."""

    table: TableName
    columns: tuple[LoadColumn, ...]
    # Places of the columns that the table has.
    stored: tuple[int, ...]
    key: tuple[int, ...] = ()
    order: int | None = None
    flag: int | None = None
    # For scd2: the table's names of valid_from, valid_to and is_current.
    history: tuple[str, str, str] | None = None

    def name(self, place: int) -> str:
        return self.columns[place].column.name

    @property
    def grave(self) -> list[str]:
        """The columns that identify a recorded deletion: the key and the version."""
        return [self.name(place) for place in (*self.key, *([] if self.order is None else [self.order]))]

    def needed(self) -> tuple[tuple[int, str], ...]:
        """Return the places that must not be NULL, each with the reason for rejecting the row."""
        rules = [(place, f"key column {self.name(place)} is NULL") for place in self.key]
        if self.order is not None:
            rules.append((self.order, f"order column {self.name(self.order)} is NULL"))
        return tuple(rules)


@dataclass(frozen=True)
class LoadTables:
    """All tables in the statements of one load; those of its session are named after it."""

    target: Target
    books: Bookkeeping
    load_id: str
    staged: TableName
    rejected: TableName
    files: TableName
    changed: TableName
    timeline: TableName

    @staticmethod
    def of(target: Target, books: Bookkeeping, load_id: str) -> LoadTables:
        names = (f"TIR_{what}_{load_id}" for what in ("STAGED", "REJECTED", "FILES", "CHANGED", "TIMELINE"))
        temporary = (replace(books.ledger, name=name.replace("-", "_").upper()) for name in names)
        return LoadTables(target, books, load_id, *temporary)

    @property
    def graves(self) -> TableName:
        return self.books.graves(self.target.grave)

    @property
    def columns(self) -> list[str]:
        return [f"C{at}" for at in range(len(self.target.columns))]

    @property
    def keys(self) -> list[str]:
        return [f"C{at}" for at in self.target.key]


def target_of(spec: LoadSpec, described: Sequence[tuple[str, str]]) -> Target:
    """Match the spec with the table's columns (name and declared type); raise SpecError if they do not fit."""
    table, table_types = TableName.parse(spec.table), dict(described)
    history = _history(spec, table_types)
    if spec.columns:
        declared = {_named(name, table_types): (name, kind) for name, kind in spec.columns.items()}
    else:
        declared = {name: (name, kind) for name, kind in table_types.items() if name not in (history or ())}
    for special in (spec.order_by, spec.delete_flag):
        if special and _named(special, table_types) not in declared and special not in declared:
            # Not a column of the table: only the files have it.
            kind = table_types[history[0]] if history and special == spec.order_by else "VARCHAR"
            declared[special] = (special, kind)
    try:
        columns = tuple(
            _file_column(name, file_name, kind, table_types) for name, (file_name, kind) in declared.items()
        )
    except UnheldTypeError as error:
        message = str(error).partition(", which")[0]
        raise SpecError(
            f"{spec.name}: {spec.table}: {message}, which no load supports. Name the other columns, with their types, under "
            "`columns` in the load's spec."
        ) from None
    places = {column.column.name: at for at, column in enumerate(columns)}

    def place(field: str, name: str, *, in_table: bool) -> int:
        at = places.get(name, places.get(name.upper()))
        if at is None or (in_table and not {name, name.upper()} & table_types.keys()):
            raise SpecError(
                f"{spec.name}: {field} names {name}, which {spec.table} does not have. It has "
                f"{', '.join(table_types if in_table else places)}: correct the spec."
            )
        return at

    # Only a merge compares versions with the table; scd2 keeps a version's time in valid_from.
    order = place("order_by", spec.order_by, in_table=spec.mode == "merge") if spec.order_by else None
    target = Target(
        table,
        columns,
        stored=tuple(at for name, at in places.items() if name in table_types),
        key=tuple(place("key", name, in_table=True) for name in spec.key),
        order=order,
        flag=place("delete_flag", spec.delete_flag, in_table=False) if spec.delete_flag else None,
        history=history,
    )
    for at in target.key:
        if columns[at].column.kind is Kind.JSON:
            # JSON values cannot be compared reliably.
            raise LoadError(f"{table}: {target.name(at)} holds JSON and cannot be a key. Choose another key.")
    return target


def _named(name: str, table_types: dict[str, str]) -> str:
    """Return the table's own spelling of the name: exact, or else in upper case."""
    return name if name in table_types or name.upper() not in table_types else name.upper()


def _file_column(name: str, file_name: str, kind: str, table_types: dict[str, str]) -> LoadColumn:
    # If the table has the column, its type counts: staged values must fit there.
    declared = table_types.get(name, kind)
    column = Column.from_snowflake(name, declared)
    match = _COUNT.search(declared)
    count = int(match[1]) if match else None
    moments = (Kind.TIME, Kind.TIMESTAMP, Kind.INSTANT)
    return LoadColumn(
        file_name,
        column,
        length=count if column.kind is Kind.TEXT else None,
        digits=count if column.kind in moments else None,
    )


def _history(spec: LoadSpec, table_types: dict[str, str]) -> tuple[str, str, str] | None:
    if spec.mode != "scd2":
        return None
    names = [
        _named(name, table_types) for name in (spec.history.valid_from, spec.history.valid_to, spec.history.is_current)
    ]
    if missing := [name for name in names if name not in table_types]:
        raise SpecError(
            f"{spec.name}: {spec.table} has no column {', '.join(missing)}, which scd2 needs. Add it, or name it under `history`."
        )
    return names[0], names[1], names[2]


def stage_type(column: LoadColumn) -> str:
    """Return the type of a staged column; JSON is text until it is stored."""
    table_column = column.column
    # With the table's precision: otherwise a staged version would look newer than its own stored, rounded value.
    digits = "" if column.digits is None else f"({column.digits})"
    return {
        Kind.INTEGER: f"NUMBER({table_column.precision or 38},0)",
        Kind.DECIMAL: f"NUMBER({table_column.precision},{table_column.scale})",
        Kind.FLOAT: "FLOAT",
        Kind.BOOLEAN: "BOOLEAN",
        Kind.DATE: "DATE",
        Kind.TIME: f"TIME{digits}",
        Kind.TIMESTAMP: f"TIMESTAMP_NTZ{digits}",
        Kind.INSTANT: f"TIMESTAMP_TZ{digits}",
    }.get(table_column.kind, "VARCHAR")


def stored_value(column: LoadColumn, expression: str) -> str:
    """Return the expression of a staged column as the table stores it."""
    return f"PARSE_JSON({expression})" if column.column.kind is Kind.JSON else expression


def create(table: TableName, columns: dict[str, str], *, temporary: bool = False) -> str:
    """Return the statement that creates a table of ours; its texts compare by their bytes, whatever collation the schema has as default."""
    body = ", ".join(f"{quote(name)} {kind}" for name, kind in columns.items())
    words = "CREATE OR REPLACE TEMPORARY TABLE" if temporary else "CREATE TABLE IF NOT EXISTS"
    return f"{words} {table.sql} ({body}) DEFAULT_DDL_COLLATION = ''"
