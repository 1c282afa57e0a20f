"""Result batches of the connector as Arrow tables of the declared types: every row, or an error that names the column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind

_TYPES = {
    Kind.INTEGER: pa.int64(),
    Kind.FLOAT: pa.float64(),
    Kind.BOOLEAN: pa.bool_(),
    Kind.TEXT: pa.string(),
    Kind.DATE: pa.date32(),
    Kind.TIME: pa.string(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.INSTANT: pa.timestamp("us", tz="UTC"),
    Kind.JSON: pa.string(),
}
# Integers of an extract lie between minus this and one less than this.
_TWO_63 = 2**63


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type that stands for Column.spark."""
    return pa.decimal128(column.precision, column.scale) if column.kind is Kind.DECIMAL else _TYPES[column.kind]


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The schema with every column nullable, whatever the table says: Spark compares schemas, and a join adds NULLs."""
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in columns])


def fetch(batch: Any, columns: Sequence[Column]) -> pa.Table:
    """Download a result batch and convert it. The connector retries; a batch that stays short is an error."""
    for _ in range(2):
        # Nanoseconds, the default, end in the year 2262; tables say 9999-12-31.
        table = batch.to_arrow(force_microsecond_precision=True)
        # to_arrow() does not compare with what the server promised: a cut body that still parses loses rows.
        if table.num_rows == batch.rowcount:
            # The connector gives an empty batch types of its own making.
            return convert(table, columns) if table.num_rows else arrow_schema(columns).empty_table()
    raise SourceError(
        f"A part of the result holds {table.num_rows} rows, but Snowflake announced {batch.rowcount}. "
        "Check network and proxy, then run again."
    )


def convert(table: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """The columns by name, in the declared order and types."""
    arrays = [_converted(table.column(_position(table.column_names, column)), column) for column in columns]
    return pa.table(arrays, schema=arrow_schema(columns))


def _position(names: list[str], column: Column) -> int:
    same = [at for at, name in enumerate(names) if name == column.name]
    alike = same or [at for at, name in enumerate(names) if name.upper() == column.name.upper()]
    if len(alike) != 1:
        raise SourceError(
            f"The query gives column {column.name} {len(alike)} times among {', '.join(names)}. "
            "Give each column that is read one name of its own."
        )
    return alike[0]


def _converted(values: pa.ChunkedArray, column: Column) -> pa.ChunkedArray:
    target_type = arrow_type(column)
    if values.type == target_type:
        return values
    if column.kind in (Kind.TIMESTAMP, Kind.INSTANT) and not _same_zonedness(values.type, column.kind):
        raise SourceError(
            f"Column {column.name} is declared as {column.kind.value} but arrives as {values.type}. "
            "Cast it in the query, or describe the table again."
        )
    try:
        if column.kind is Kind.TIME:
            return _time_text(values)
        # Only finer fractions of a second may be cut off; a number must keep its value.
        return values.cast(target_type, safe=not pa.types.is_timestamp(target_type))
    except pa.ArrowException as error:
        raise _misfit(column, values, error) from None


def _same_zonedness(arrived: pa.DataType, kind: Kind) -> bool:
    return pa.types.is_timestamp(arrived) and (arrived.tz is not None) == (kind is Kind.INSTANT)


def _time_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_string(values.type):
        return values
    return pc.cast(values.cast(pa.time64("us"), safe=False), pa.string())


def _misfit(column: Column, values: pa.ChunkedArray, error: Exception) -> SourceError:
    beyond = _beyond_64_bits(values) if column.kind is Kind.INTEGER else None
    if beyond is not None:
        return SourceError(
            f"Column {column.name} holds an integer beyond 64 bits, {beyond}, which a Tableau extract cannot hold. "
            "Leave the column out, or cast it to VARCHAR or FLOAT in a `query:` or a view."
        )
    return SourceError(
        f"Column {column.name} is declared as {column.spark} but arrives as {values.type} ({error}). "
        "Describe the table again; if it did not change, leave the column out."
    )


def _beyond_64_bits(values: pa.ChunkedArray) -> int | None:
    """The first integer that needs more than 64 bits; None if there is none."""
    if not pa.types.is_decimal(values.type):
        return None
    whole = (int(value) for value in values.drop_null().to_pylist())
    return next((value for value in whole if not -_TWO_63 <= value < _TWO_63), None)
