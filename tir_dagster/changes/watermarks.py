"""Watermarks: the highest one at a version, and the lowest one of candidates."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import sql_literal

# A time without a zone may be any wall clock's.
_FURTHEST_CLOCK = timedelta(hours=14)
# A mark is repeated within so long of the moment at which a clock is set back: by two hours at most.
_REPEATED = timedelta(hours=3)
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


def lower_bound(column: Column, highest: str, *, read_at: datetime, look_back: float) -> str:
    """The highest mark minus the look-back, as an SQL literal; numbers have no look-back.

    A stamp in the future would hide every update until then: it counts as the moment it was read at. A time without a
    zone is in the future only where no clock on earth shows it yet; where a clock on earth was just set back, its marks
    are repeated, so the look-back is longer by that.
    """
    back, wall = timedelta(seconds=look_back), read_at.replace(tzinfo=None)
    if column.kind is Kind.DATE:
        day = date.fromisoformat(highest)
        day = day if day <= (wall + _FURTHEST_CLOCK).date() else (wall - _FURTHEST_CLOCK).date()
        return sql_literal(column, day - timedelta(days=-(-back // timedelta(days=1))))
    if column.kind in (Kind.TIMESTAMP, Kind.INSTANT):
        stamp = datetime.fromisoformat(highest)
        if stamp.tzinfo:
            return sql_literal(column, min(stamp, read_at) - back)
        local = stamp if stamp <= wall + _FURTHEST_CLOCK else wall - _FURTHEST_CLOCK
        return sql_literal(column, local - back - _set_back(read_at))
    return sql_literal(column, highest)


def _set_back(moment: datetime) -> timedelta:
    """The most by which any clock on earth is set back around that moment; on most days nothing."""

    def offset(moment: datetime, zone: ZoneInfo) -> timedelta:
        return moment.astimezone(zone).utcoffset() or timedelta()

    before, after = moment - _REPEATED, moment + _REPEATED
    return max((offset(before, zone) - offset(after, zone) for zone in _zones()), default=timedelta())


@cache
def _zones() -> tuple[ZoneInfo, ...]:
    return tuple(map(ZoneInfo, sorted(available_timezones())))
