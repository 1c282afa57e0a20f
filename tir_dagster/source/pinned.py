"""A table at one version with all that a refresh asks of it, and values as Snowflake reads them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.names import TableName, literal
from tir_dagster.source.slices import SliceBy
from tir_dagster.source.versions import SourceVersion


@dataclass(frozen=True)
class PinnedTable:
    """What is read: a table's columns at a version, its row key, its slices and its watermark."""

    table: TableName
    columns: tuple[Column, ...]
    key: tuple[Column, ...]
    slices: SliceBy
    watermark: Column | None
    version: SourceVersion

    @property
    def pinned(self) -> str:
        return f"{self.table.sql} {self.version.sql}"


def sql_literal(column: Column, value: Any) -> str:
    """A value of the column as Snowflake reads it."""
    if value is None:
        return "NULL"
    match column.kind:
        case Kind.INTEGER | Kind.DECIMAL:
            return str(value)
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
