"""Small staged Parquet files and looks into extracts, for the tests of this room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.hyper.engine import connect
from tir_dagster.snowflake.columns import Column, Kind

ARROW = {
    Kind.INTEGER: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.BOOLEAN: pa.bool_(),
    Kind.TEXT: pa.string(),
    Kind.JSON: pa.string(),
    Kind.TIME: pa.string(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.INSTANT: pa.timestamp("us", tz="UTC"),
}


def arrow_type(column: Column) -> pa.DataType:
    return pa.decimal128(column.precision, column.scale) if column.kind is Kind.DECIMAL else ARROW[column.kind]


def stage(
    path: Path, columns: Sequence[Column], rows: Sequence[Sequence[Any]], *, bookkeeping: bool = True
) -> list[Path]:
    """Write the rows as Spark stages them; columns stand in reverse, because their order must not matter."""
    data: dict[str, pa.Array] = {}
    if bookkeeping:
        data["__tir_slice"] = pa.array([None] * len(rows), pa.string())
        data["__tir_hash"] = pa.array(range(len(rows)), pa.int64())
    for place, column in reversed(list(enumerate(columns))):
        data[column.name] = pa.array([row[place] for row in rows], arrow_type(column))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(data), path)
    return [path]


def bag(path: Path, table: str = '"Extract"."Extract"', columns: str = "*") -> Counter[tuple[Any, ...]]:
    """The extract's rows as a bag; NaN as text, because it does not equal itself."""
    with connect(path) as connection:
        rows = connection.execute_list_query(f"SELECT {columns} FROM {table}")
    return Counter(tuple("nan" if value != value else value for value in row) for row in rows)  # noqa: PLR0124


def run(path: Path, *statements: str, create: bool = False, file_version: int | None = None) -> None:
    with connect(path, create=create, file_version=file_version) as connection:
        for statement in statements:
            connection.execute_command(statement)


def columns_of(declared: Mapping[str, str]) -> tuple[Column, ...]:
    return tuple(Column.from_snowflake(name, kind) for name, kind in declared.items())
