"""Hints that were reported to Dagster: metadata of materializations of a `source_table`, posted at the end of a load."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.changes.hints import ChangeType, Hint, HintError, Unknown, parse_hints
from tir_dagster.changes.question import checked_hints
from tir_dagster.orchestration.sensing.upstream import CLOCKS, materializations
from tir_dagster.snowflake.names import TableName

if TYPE_CHECKING:
    from tir_dagster.changes.relation import Relation
    from tir_dagster.snowflake.connection import SnowflakeAccess

HINT = "tir/hint"
_SOURCE_TABLE = "source_table"


def reported_hints(
    instance: dg.DagsterInstance,
    relation: Relation,
    access: SnowflakeAccess,
    *,
    since: datetime,
    numbers: Collection[int],
) -> tuple[tuple[Hint, ...], tuple[str, ...]]:
    """Return the hints of these reports, whichever extract's `source_table` they were reported at; and warnings.

    A hint that cannot be read counts as a change of unknown rows, with a warning: the reporter gets no answer, and a bad
    hint must not block a refresh.
    """
    hints: list[Hint] = []
    warnings: list[str] = []
    for report in _reports(instance, since):
        if report.number not in numbers:
            continue
        where = f"{HINT} at {report.key.to_user_string()}"
        try:
            mine = [hint for hint in parse_hints(report.value, where) if hint.table in relation.tables]
            hints += checked_hints(mine, relation, access)
        except HintError as error:
            warnings.append(f"A reported hint was not understood, so every row is compared: {error}")
            hints.append(Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()))
    return tuple(dict.fromkeys(hints)), tuple(warnings)


def newest_report(
    instance: dg.DagsterInstance, tables: Collection[TableName], *, since: datetime, used: Collection[int] = ()
) -> str | None:
    """Return a text that changes with each hint reported at one of the tables and not yet used; None if there is none."""
    stamps = [
        f"{report.key.to_user_string()}@{report.stamp}"
        for report in _reports(instance, since)
        if report.number not in used and _concerns(report.value, tables)
    ]
    return max(stamps, default=None)


def report_stamps(instance: dg.DagsterInstance, tables: Collection[TableName], *, since: datetime) -> dict[int, float]:
    """Return number and time of each hint reported at one of the tables.

    Call before a version is pinned: a load reports after it ended, so the version contains its changes.
    """
    return {report.number: report.stamp for report in _reports(instance, since) if _concerns(report.value, tables)}


def _concerns(value: Any, tables: Collection[TableName]) -> bool:
    try:
        return any(hint.table in tables for hint in parse_hints(value, HINT))
    except HintError:
        # It cannot be read, so it may be about these tables.
        return True


@dataclass(frozen=True)
class _Report:
    """A hint in Dagster's log: asset, content, time, and its number in the log."""

    key: dg.AssetKey
    value: Any
    stamp: float
    number: int


def _reports(instance: dg.DagsterInstance, since: datetime) -> Iterator[_Report]:
    """Yield all reports that may be later than this moment of the warehouse; Dagster's clock may be behind."""
    for key in instance.all_asset_keys():
        if key.path[-1] != _SOURCE_TABLE:
            continue
        for record in materializations(instance, key, since - CLOCKS):
            event = record.asset_materialization
            entry = event.metadata.get(HINT) if event else None
            if entry is not None:
                yield _Report(key, entry.value, record.timestamp, record.storage_id)
