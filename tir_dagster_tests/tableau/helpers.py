"""Faults that pass, schedules, and a disk that is full."""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses  # noqa: N812 - the name its own documentation uses  # noqa: N812 - the name its own documentation uses

from tir_dagster.tableau.datasources import (
    FoundDatasource,
)
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders


def put_on_schedule(
    orders: Orders, found: FoundDatasource, name: str, *, incremental: bool = True, start: dt.time = dt.time(3)
) -> Any:
    schedules = orders.others.schedules
    known = {item.name: item for item in TSC.Pager(schedules)}
    item = TSC.ScheduleItem(name, 50, "Extract", "Parallel", TSC.DailyInterval(start))
    schedule = known.get(name) or schedules.create(item)
    kind = "true" if incremental else "false"
    body = f'<tsRequest><task><extractRefresh incremental="{kind}"><datasource id="{found.id}"/></extractRefresh></task></tsRequest>'
    schedules.put_request(f"{schedules.siteurl}/{schedule.id}/datasources", body.encode())
    return schedule


def kinds(admin: Admin, orders: Orders) -> list[str]:
    """What the server ran on datasources of this name, newest first."""
    admin.set(rest_version="3.26")
    mine = {job.id: job for job in orders.others.jobs.filter(title="Orders")}
    ours = [job for job in mine.values() if orders.others.jobs.get_by_id(job.id).datasource_id == orders.now().id]
    return [job.type for job in ours]


class Disk(NamedTuple):
    total: int = 10**9
    used: int = 10**9
    free: int = 1_000_000


PASSING = [
    {"kind": "status", "status": 429, "retry_after": 3},
    {"kind": "status", "status": 502},
    {"kind": "cut", "when": "before"},
    {"kind": "cut", "when": "after"},
    {"kind": "cut", "when": "during"},
    {"kind": "expire_session"},
]
