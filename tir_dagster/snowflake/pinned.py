"""What a refresh reads at one version, a table or a query, and values as Snowflake reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import literal, quote
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.snowflake.versions import SourceVersion

_FINE = (Kind.TIMESTAMP, Kind.INSTANT)


@dataclass(frozen=True)
class PinnedSource:
    """The rows before aggregation: what is read and compared of them, their key, slices, groups and watermark."""

    # What follows FROM: a table with its version, or a query in brackets whose tables have it.
    sql: str
    columns: tuple[Column, ...]
    key: tuple[Column, ...]
    slices: SliceBy
    watermark: Column | None
    version: SourceVersion
    # The columns of the groups that the rows are aggregated to; none: the rows are shown as they are.
    group: tuple[Column, ...] = ()

    def select(self, where: str | None = None) -> str:
        """The query that reads the columns of all rows, or of those that meet a condition."""
        listed = ", ".join(quote(column.name) for column in self.columns)
        return f"SELECT {listed} FROM {self.sql}" + (f" WHERE {where}" if where else "")


def cut_sql(column: Column) -> str:
    """A key's column as the extract holds it: Snowflake keeps nanoseconds, Parquet and Hyper microseconds."""
    name = quote(column.name)
    return f"DATE_TRUNC('MICROSECOND', {name})" if column.kind in _FINE else name


def with_cut_keys(sql: str, key: Sequence[Column]) -> str:
    """What follows FROM, with the key's columns as the extract holds them: keys that it cannot tell apart are one key."""
    fine = ", ".join(f"{cut_sql(column)} AS {quote(column.name)}" for column in key if column.kind in _FINE)
    return f"(SELECT * REPLACE ({fine}) FROM {sql})" if fine else sql


def sql_literal(column: Column, value: Any) -> str:
    """A value of the column as Snowflake reads it."""
    if value is None:
        return "NULL"
    match column.kind:
        case Kind.INTEGER | Kind.DECIMAL:
            # Not 1E-8, which would be a float.
            return format(value, "f") if isinstance(value, Decimal) else str(value)
        case Kind.FLOAT:
            return f"{literal(str(value))}::FLOAT"
        case Kind.BOOLEAN:
            return "TRUE" if value else "FALSE"
        case Kind.DATE:
            return f"{literal(value.isoformat() if isinstance(value, date) else str(value))}::DATE"
        case Kind.TIMESTAMP:
            return f"{literal(_iso(value))}::TIMESTAMP_NTZ"
        case Kind.INSTANT:
            # Spark gives a moment as local time without a zone.
            moment = value.astimezone(UTC) if isinstance(value, datetime) else value
            return f"{literal(_iso(moment))}::TIMESTAMP_TZ"
        case Kind.TIME:
            return f"{literal(str(value))}::TIME"
        case Kind.TEXT:
            return literal(str(value))
    raise SourceError(f"Column {column.name} ({column.kind.value}) cannot be part of a row key or a watermark.")


def _iso(value: Any) -> str:
    return value.isoformat(timespec="microseconds") if isinstance(value, datetime) else str(value)
