"""When a schedule runs next: its frequency and details as the REST API words them, in the server's time zone."""

from __future__ import annotations

import calendar
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

# The 29th of February comes round within this many days.
_HORIZON_DAYS = 4 * 366


def next_run(frequency: str, details: Mapping[str, Any], *, after: float, zone: str) -> float | None:
    """The first moment after `after`; None for what is never due, such as the first Monday of a month (not modelled)."""
    place = ZoneInfo(zone)
    first = datetime.fromtimestamp(after, place).date()
    for number in range(_HORIZON_DAYS):
        day = first + timedelta(days=number)
        if _is_day(frequency, details, day):
            for moment in _times(frequency, details):
                found = datetime.combine(day, moment, place).timestamp()
                if found > after:
                    return found
    return None


def _intervals(details: Mapping[str, Any], name: str) -> list[str]:
    return [str(interval[name]) for interval in details.get("intervals", ()) if name in interval]


def _is_day(frequency: str, details: Mapping[str, Any], day: date) -> bool:
    if frequency == "Monthly":
        last = calendar.monthrange(day.year, day.month)[1]
        named = {last if text == "LastDay" else text for text in _intervals(details, "monthDay")}
        return str(day.day) in {str(text) for text in named}
    days = _intervals(details, "weekDay")
    if frequency == "Weekly":
        return calendar.day_name[day.weekday()] in days
    return not days or calendar.day_name[day.weekday()] in days


def _times(frequency: str, details: Mapping[str, Any]) -> Iterator[time]:
    """The times of one day; an end before the start means until midnight."""
    start = time.fromisoformat(details.get("start") or "00:00:00")
    step = _minutes(frequency, details)
    if step is None:
        yield start
        return
    end = time.fromisoformat(details.get("end") or "23:59:59")
    last = _of_day(end) if end > start else 24 * 60 - 1
    for minute in range(_of_day(start), last + 1, step):
        yield time(minute // 60, minute % 60, start.second)


def _of_day(moment: time) -> int:
    return moment.hour * 60 + moment.minute


def _minutes(frequency: str, details: Mapping[str, Any]) -> int | None:
    """The minutes between two runs of a day; None where it runs once."""
    if frequency not in ("Hourly", "Daily"):
        return None
    given = [60 * float(hours) for hours in _intervals(details, "hours")]
    given += [float(minutes) for minutes in _intervals(details, "minutes")]
    if not given:
        return 60 if frequency == "Hourly" else None
    return max(1, int(given[0]))
