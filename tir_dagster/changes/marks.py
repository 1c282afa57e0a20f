"""Watermarks: how high one stood at a version, and from where on rows are candidates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import quote
from tir_dagster.source.pinned import sql_literal

# A time without a zone may be any wall clock's.
_FURTHEST_CLOCK = timedelta(hours=14)
# Their order tells nothing of the time: one that is far too high would hide all that follow.
NUMBERS = (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT)


def highest_mark(access: SnowflakeAccess, column: Column | None, source: str) -> str | None:
    """The highest mark in what follows FROM, as text that can be kept; None where no row has one."""
    if column is None:
        return None
    value = access.query(f"SELECT MAX({quote(column.name)}) FROM {source}")[0][0]
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).isoformat(timespec="microseconds")
    return None if value is None else str(value)


def differing_sql(keys: Sequence[str], content: Sequence[str], names: Sequence[str], *, new: str, old: str) -> str:
    """A query for the keys, under these names, whose bags of content differ between two versions; `new` and `old` follow FROM."""
    listed = [f"TIR_{at}" for at in range(len(keys) + len(content))]
    values = ", ".join(f"{value} AS {name}" for value, name in zip([*keys, *content], listed, strict=True))
    sides = f"SELECT {values}, 1 AS TIR_N FROM {new} UNION ALL SELECT {values}, -1 AS TIR_N FROM {old}"
    shown = ", ".join(f"{one} AS {quote(name)}" for one, name in zip(listed, names, strict=False))
    grouped = ", ".join(listed)
    return f"SELECT DISTINCT {shown} FROM (SELECT {grouped} FROM ({sides}) GROUP BY {grouped} HAVING SUM(TIR_N) <> 0)"


def lower_bound(column: Column, highest: str, *, read: datetime, look_back: float) -> str:
    """The highest mark minus the look-back, as an SQL literal; numbers have no look-back.

    A stamp in the future would hide every update until then: it counts as the moment it was read at. A time without a
    zone is in the future only where no clock on earth shows it yet.
    """
    back, wall = timedelta(seconds=look_back), read.replace(tzinfo=None)
    if column.kind is Kind.DATE:
        day = date.fromisoformat(highest)
        day = day if day <= (wall + _FURTHEST_CLOCK).date() else (wall - _FURTHEST_CLOCK).date()
        return sql_literal(column, day - timedelta(days=-(-back // timedelta(days=1))))
    if column.kind in (Kind.TIMESTAMP, Kind.INSTANT):
        stamp = datetime.fromisoformat(highest)
        if stamp.tzinfo:
            return sql_literal(column, min(stamp, read) - back)
        return sql_literal(column, (stamp if stamp <= wall + _FURTHEST_CLOCK else wall - _FURTHEST_CLOCK) - back)
    return sql_literal(column, highest)
