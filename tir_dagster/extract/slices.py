"""The slice of a row, in Hyper's SQL and in Snowflake's, and the ranges of slices that are purged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tir_dagster.errors import ExtractError
from tir_dagster.extract.casts import FileColumn, Loaded
from tir_dagster.extract.engine import literal, quoted
from tir_dagster.source.columns import Column, Kind

Grain = Literal["none", "day", "week", "month"]

# The one slice of an extract that is not sliced.
ALL = "all"
_SLICED_BY = (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)


@dataclass(frozen=True)
class Slicing:
    """How rows fall into slices: by a column's day, week (from Monday) or month; moments are read in `zone`."""

    grain: Grain = "none"
    column: str | None = None
    zone: str = "UTC"

    def in_extract(self, source: Column | None, stored: FileColumn | None) -> str:
        """The slice's name as Hyper SQL: '2024-01', a Monday '2024-01-29', a day '2024-01-31'; NULL stays NULL."""
        if self.grain == "none":
            return literal(ALL)
        assert source is not None
        assert stored is not None
        moment = f"CAST({wall_time(source, stored, self.zone)} AS TIMESTAMP)"
        if self.grain == "week":
            moment = f"DATE_TRUNC('week', {moment})"
        return f"TO_CHAR({moment}, '{self._format}')"

    def in_snowflake(self, source: Column | None, name: str) -> str:
        """The same name as Snowflake SQL, whatever the session's TIMEZONE and WEEK_START are."""
        if self.grain == "none":
            return f"'{ALL}'"
        assert source is not None
        moment = name
        if source.kind is Kind.INSTANT:
            moment = f"CONVERT_TIMEZONE({literal(self.zone)}, {name})"
        moment = f"CAST({moment} AS TIMESTAMP_NTZ)"
        if self.grain == "week":
            monday = f"DATEADD('day', 1 - DAYOFWEEKISO({moment}), CAST({moment} AS DATE))"
            moment = f"CAST({monday} AS TIMESTAMP_NTZ)"
        return f"TO_CHAR({moment}, '{self._format}')"

    @property
    def _format(self) -> str:
        return "YYYY-MM" if self.grain == "month" else "YYYY-MM-DD"

    def source_of(self, columns: Sequence[Column]) -> Column | None:
        """The column that slices, of a kind that can; None where nothing is sliced."""
        if self.grain == "none":
            return None
        found = next((column for column in columns if column.name == self.column), None)
        if found is None or found.kind not in _SLICED_BY:
            what = "is not in the extract" if found is None else f"is {found.kind.value}"
            raise ExtractError(
                f"Slices by {self.grain} need a date or timestamp column, and {self.column} {what}. "
                "Name another column under `slices:` in the extract's spec."
            )
        return found


def wall_time(source: Column, stored: FileColumn, zone: str) -> str:
    """What a clock in that zone showed; an extract stores moments in UTC."""
    name = quoted(stored.name)
    if source.kind is not Kind.INSTANT:
        return name
    moment = name if stored.type == "TIMESTAMPTZ" else f"({name} AT TIME ZONE 'UTC')"
    return f"({moment} AT TIME ZONE {literal(zone)})"


@dataclass(frozen=True)
class SliceRanges:
    """The rows of some slices: half-open ranges of the slice column as ISO text, read in `zone` for moments.

    `nulls` adds rows without a value; `outside` is the first and the end of all slices, and adds what lies beyond.
    """

    column: str
    ranges: tuple[tuple[str, str], ...]
    nulls: bool = False
    outside: tuple[str, str] | None = None
    zone: str = "UTC"

    def condition(self, column: Loaded) -> str | None:
        """The condition on the extract's rows, or None when nothing was named."""
        if column.source.kind not in _SLICED_BY:
            raise ExtractError(
                f"Slices by {self.column} need a date or timestamp; it is {column.source.kind.value}. Choose another slice column."
            )
        value = wall_time(column.source, column.stored, self.zone)
        parts = [f"({value} >= {_moment(begin)} AND {value} < {_moment(end)})" for begin, end in self.ranges]
        if self.nulls:
            parts.append(f"{quoted(column.stored.name)} IS NULL")
        if self.outside is not None:
            begin, end = self.outside
            parts.append(f"({value} < {_moment(begin)} OR {value} >= {_moment(end)})")
        return " OR ".join(parts) or None


def _moment(text: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ExtractError(
            f"{text!r} is not the edge of a slice. Write an ISO date or timestamp, such as 2024-01-31."
        ) from error
    return f"TIMESTAMP '{moment.replace(tzinfo=None).isoformat(sep=' ', timespec='microseconds')}'"
