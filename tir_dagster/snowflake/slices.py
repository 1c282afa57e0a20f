"""Slices: the parts of an extract by month, week, day or value, computed the same way in Python and in Snowflake's SQL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import literal, quote

ALL = "all"
By = Literal["month", "week", "day", "value", "none"]
TIMED = ("month", "week", "day")
# SQL reads it as an escape in one engine and as itself in another: values with it are in no slice.
_BACKSLASH = chr(92)
_KEY = {"month": r"\d{4}-\d{2}", "week": r"\d{4}-\d{2}-\d{2}", "day": r"\d{4}-\d{2}-\d{2}", "none": ALL}


@dataclass(frozen=True)
class SliceBy:
    """How rows fall into slices: by the date in a column, in a stated time zone, or by its value; `none` is one for everything.

    A month is '2026-01', a week the date of its Monday, a day its date, a value its own text. A NULL in the column is in no
    slice, nor is an empty text.
    """

    column: str | None = None
    by: By = "none"
    zone: str = "UTC"

    def __post_init__(self) -> None:
        if (self.column is None) != (self.by == "none"):
            raise SourceError(
                f"Slices by {self.by} with column {self.column}: give both `column` and `by`, or neither."
            )
        try:
            ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError):
            raise SourceError(
                f"{self.zone!r} is not a time zone. Use a name such as UTC or Europe/Berlin for the slices."
            ) from None


def slice_of(slices: SliceBy, value: date | datetime | str | int | None) -> str | None:
    """The slice of one value. A datetime without a zone is taken as it stands."""
    if slices.by == "none":
        return ALL
    if value is None:
        return None
    if slices.by == "value":
        return None if _BACKSLASH in str(value) else str(value) or None
    assert isinstance(value, date)
    if isinstance(value, datetime):
        value = (value.astimezone(ZoneInfo(slices.zone)) if value.tzinfo else value).date()
    if slices.by == "week":
        value -= timedelta(days=value.weekday())
    return value.isoformat()[:7] if slices.by == "month" else value.isoformat()


def slice_range(slices: SliceBy, key: str) -> tuple[date, date | None] | None:
    """The slice's first day and the first day after it, in its zone; None for the one slice of everything.

    Nothing comes after the last day that Python has: there the range has no end.
    """
    problem = SourceError(
        f"{key!r} is not a slice by {slices.by}. A month is written 2026-01, a week as its Monday, a day as its date."
    )
    if not re.fullmatch(_KEY.get(slices.by, "(?!)"), key):
        raise problem
    if slices.by == "none":
        return None
    try:
        first = date.fromisoformat(f"{key}-01" if slices.by == "month" else key)
    except ValueError:
        raise problem from None
    if slice_of(slices, first) != key:
        raise problem
    try:
        if slices.by == "month":
            return first, (first + timedelta(days=31)).replace(day=1)
        return first, first + timedelta(days=7 if slices.by == "week" else 1)
    except OverflowError:  # 9999-12-31, the day that stands for "for ever" in many tables
        return first, None


_KINDS = {False: (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT), True: (Kind.TEXT, Kind.INTEGER)}


def slice_column(slices: SliceBy, columns: Sequence[Column]) -> Column | None:
    """The column that decides the slice, checked to hold what it is sliced by; None when there is one slice only."""
    if slices.column is None:
        return None
    column = next((column for column in columns if column.name == slices.column), None)
    if column is None or column.kind not in _KINDS[slices.by == "value"]:
        problem = "is missing" if column is None else f"holds {column.kind.value}"
        expected = "the values of a text or a whole number" if slices.by == "value" else "a DATE or TIMESTAMP column"
        raise SourceError(f"The slice column {slices.column} {problem}. Slice by {expected} of the extract.")
    return column


def slice_sql_snowflake(slices: SliceBy, columns: Sequence[Column]) -> str:
    """The slice as an expression of Snowflake's SQL."""
    column = slice_column(slices, columns)
    if column is None:
        return literal(ALL)
    if slices.by == "value":
        return _value_snowflake(column)
    day = f"CAST({_local_snowflake(column, slices.zone)} AS DATE)"
    if slices.by == "week":
        # DATE_TRUNC('week') would follow the session's WEEK_START.
        day = f"CAST(DATEADD(DAY, 1 - DAYOFWEEKISO({day}), {day}) AS DATE)"
    return f"TO_CHAR({day}, {literal('YYYY-MM' if slices.by == 'month' else 'YYYY-MM-DD')})"


def _value_snowflake(column: Column) -> str:
    name = quote(column.name)
    if column.kind is Kind.INTEGER:
        return f"CAST({name} AS VARCHAR)"
    return f"CASE WHEN POSITION({literal(_BACKSLASH)}, {name}) = 0 THEN NULLIF({name}, '') END"


def _local_snowflake(column: Column, zone: str) -> str:
    name = quote(column.name)
    if column.kind is Kind.INSTANT:
        return f"CONVERT_TIMEZONE({literal(zone)}, {name})"
    return name


def slice_filter_snowflake(slices: SliceBy, columns: Sequence[Column], keys: Sequence[str | None]) -> str:
    """A condition for the rows of these slices (None: rows in no slice) that lets Snowflake skip partitions."""
    column = slice_column(slices, columns)
    if column is None:
        return "TRUE" if ALL in keys else "FALSE"
    name, expression = quote(column.name), slice_sql_snowflake(slices, columns)
    if slices.by == "value":
        return _value_filter(name, expression, column, keys)
    tests = [f"{name} IS NULL"] if None in keys else []
    tests += [
        f"({' AND '.join([*_bounds(slices, column, key), f'{expression} = {literal(key)}'])})"
        for key in sorted({key for key in keys if key is not None})
    ]
    return f"({' OR '.join(tests)})" if tests else "FALSE"


def _value_filter(name: str, expression: str, column: Column, keys: Sequence[str | None]) -> str:
    named = sorted({key for key in keys if key is not None})
    tests = [f"{expression} IS NULL"] if None in keys else []
    if column.kind is Kind.INTEGER:
        # A name that is no number stands for no row.
        named = [key for key in named if re.fullmatch(r"-?\d+", key)]
    if named:
        # On the bare column, so that Snowflake skips partitions.
        tests.append(f"{name} IN ({', '.join(key if column.kind is Kind.INTEGER else literal(key) for key in named)})")
    return f"({' OR '.join(tests)})" if tests else "FALSE"


_LITERALS = {
    Kind.DATE: "'{}'::DATE",
    Kind.TIMESTAMP: "'{}T00:00:00'::TIMESTAMP_NTZ",
    Kind.INSTANT: "'{}T00:00:00+00:00'::TIMESTAMP_TZ",
}


def _bounds(slices: SliceBy, column: Column, key: str) -> Iterator[str]:
    """Conditions on the bare column, a day wider on both sides so that they hold in every zone."""
    days = slice_range(slices, key)
    for day, sign, test in zip(days or (), (-1, 1), (">=", "<"), strict=False):
        if day is None:
            continue
        with suppress(OverflowError):
            shifted = day + timedelta(days=sign)
            yield f"{quote(column.name)} {test} {_LITERALS[column.kind].format(shifted.isoformat())}"
