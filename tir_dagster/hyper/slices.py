"""The slice of a row in Hyper's SQL, and the ranges of slices that are purged together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tir_dagster.errors import ExtractError, SourceError
from tir_dagster.hyper.casts import FileColumn, Loaded
from tir_dagster.hyper.engine import literal, quoted
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import ALL, SliceBy, slice_column, slice_range

_SLICED_BY = (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)


def slice_sql_hyper(slices: SliceBy, columns: Sequence[Column], stored: Mapping[str, FileColumn]) -> str:
    """The slice's name as Hyper's SQL; the same names that Snowflake and Spark give."""
    column = slice_column(slices, columns)
    if column is None:
        return literal(ALL)
    if slices.by == "value":
        return _value(column, stored[column.name])
    moment = f"CAST({wall_time(column, stored[column.name], slices.zone)} AS TIMESTAMP)"
    if slices.by == "week":
        moment = f"DATE_TRUNC('week', {moment})"
    return f"TO_CHAR({moment}, '{'YYYY-MM' if slices.by == 'month' else 'YYYY-MM-DD'}')"


def _value(source: Column, stored: FileColumn) -> str:
    if source.kind is Kind.INTEGER:
        # An extract that people built may hold whole numbers as others.
        return f"CAST(CAST({quoted(stored.name)} AS BIGINT) AS TEXT)"
    return f"CASE WHEN STRPOS({stored.comparable}, {literal(chr(92))}) = 0 THEN NULLIF({stored.comparable}, '') END"


def wall_time(source: Column, stored: FileColumn, zone: str) -> str:
    """What a clock in that zone showed; an extract stores moments in UTC."""
    name = quoted(stored.name)
    if source.kind is not Kind.INSTANT:
        return name
    moment = name if stored.type == "TIMESTAMPTZ" else f"({name} AT TIME ZONE 'UTC')"
    return f"({moment} AT TIME ZONE {literal(zone)})"


_EDGES = {"DATE": "DATE '{}'", "TIMESTAMP": "TIMESTAMP '{} 00:00:00'", "TIMESTAMPTZ": "TIMESTAMPTZ '{} 00:00:00+00'"}


def slice_bounds_hyper(
    slices: SliceBy, columns: Sequence[Column], stored: Mapping[str, FileColumn], names: Collection[str | None]
) -> str:
    """A condition that all rows of these slices meet, on the bare column: Hyper skips blocks and computes no text.

    A day wider on both sides, so that it holds in every zone: others meet it, too.
    """
    column = slice_column(slices, columns)
    if column is None or slices.by == "value":
        return "TRUE"
    name, edge = quoted(stored[column.name].name), _EDGES[stored[column.name].type]
    tests = [f"{name} IS NULL"] if None in names else []
    for key in sorted(key for key in names if key is not None):
        try:
            begin, end = slice_range(slices, key) or (None, None)
            begin, end = begin and begin - timedelta(days=1), end and end + timedelta(days=1)
        except (SourceError, OverflowError):
            # A year that Python does not have.
            return "TRUE"
        within = [f"{name} {test} {edge.format(day.isoformat())}" for test, day in ((">=", begin), ("<", end)) if day]
        tests.append(f"({' AND '.join(within)})")
    return f"({' OR '.join(tests) or 'FALSE'})"


@dataclass(frozen=True)
class SliceRanges:
    """The rows of some slices: half-open ranges of the slice column as ISO text, read in `zone` for moments.

    `nulls` adds rows without a value; the last slice of all time has no end.
    """

    column: str
    ranges: tuple[tuple[str, str | None], ...]
    nulls: bool = False
    zone: str = "UTC"

    def condition(self, column: Loaded) -> str | None:
        """The condition on the extract's rows, or None when nothing was named."""
        if column.source.kind not in _SLICED_BY:
            raise ExtractError(
                f"Slices by {self.column} need a date or timestamp; it is {column.source.kind.value}. Choose another slice column."
            )
        value = wall_time(column.source, column.stored, self.zone)
        parts = [
            f"({value} >= {_moment(begin)}{f' AND {value} < {_moment(end)}' if end else ''})"
            for begin, end in self.ranges
        ]
        if self.nulls:
            parts.append(f"{quoted(column.stored.name)} IS NULL")
        return " OR ".join(parts) or None


@dataclass(frozen=True)
class SliceValues:
    """The rows of some slices by value; None is the slice of rows without one."""

    column: str
    values: tuple[str | None, ...]

    def condition(self, column: Loaded) -> str | None:
        """The condition on the extract's rows, or None when nothing was named."""
        value = slice_sql_hyper(SliceBy(self.column, "value"), [column.source], {column.source.name: column.stored})
        literals = ", ".join(literal(slice_name) for slice_name in self.values if slice_name is not None)
        parts = [f"{value} IN ({literals})"] if literals else []
        parts += [f"({value}) IS NULL"] if None in self.values else []
        return " OR ".join(parts) or None


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ExtractError(
            f"{text!r} is not the edge of a slice. Write an ISO date or timestamp, such as 2024-01-31."
        ) from error
    return f"TIMESTAMP '{moment.replace(tzinfo=None).isoformat(sep=' ', timespec='microseconds')}'"
