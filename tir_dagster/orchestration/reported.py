"""Hints that somebody reported to Dagster: metadata of materializations of a `source_table`, posted when a load ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.changes.described import checked_hints
from tir_dagster.changes.hints import ChangeType, Hint, HintError, Unknown, parse_hints
from tir_dagster.orchestration.upstream import CLOCKS, materializations
from tir_dagster.source.names import TableName

if TYPE_CHECKING:
    from tir_dagster.changes.relation import Relation
    from tir_dagster.source.connection import SnowflakeAccess

HINT = "tir/hint"
_SOURCE_TABLE = "source_table"


def reported_hints(
    instance: dg.DagsterInstance, relation: Relation, access: SnowflakeAccess, *, since: datetime
) -> tuple[tuple[Hint, ...], tuple[str, ...]]:
    """The hints at the extract's tables since that moment, whichever extract's `source_table` they were reported at.

    A load reports when it has ended, so a report younger than the version that an extract shows is news to it. What cannot be
    understood counts as a change of anything, with a warning: nobody waits for its answer, and it may not block a refresh.
    """
    hints: list[Hint] = []
    warnings: list[str] = []
    for report in _reports(instance, since - CLOCKS):
        where = f"{HINT} at {report.key.to_user_string()}"
        try:
            mine = [hint for hint in parse_hints(report.value, where) if hint.table in relation.tables]
            hints += checked_hints(mine, relation, access)
        except HintError as error:
            warnings.append(f"A reported hint was not understood, so every row is compared: {error}")
            hints.append(Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()))
    return tuple(dict.fromkeys(hints)), tuple(warnings)


def newest_report(instance: dg.DagsterInstance, tables: Collection[TableName], *, since: datetime) -> str | None:
    """A text that changes with each hint reported at one of the tables since that moment; None if there is none."""
    stamps = [
        f"{report.key.to_user_string()}@{report.stamp}"
        for report in _reports(instance, since)
        if _concerns(report.value, tables)
    ]
    return max(stamps, default=None)


def fresh_reports(
    instance: dg.DagsterInstance, tables: Collection[TableName], *, since: datetime, looked: Collection[int]
) -> frozenset[int]:
    """The numbers of the hints reported at one of the tables since that moment, without those that were looked at.

    Ask before a version is pinned: then what they tell of is in it.
    """
    return frozenset(
        report.number
        for report in _reports(instance, since)
        if report.number not in looked and _concerns(report.value, tables)
    )


def _concerns(value: Any, tables: Collection[TableName]) -> bool:
    try:
        return any(hint.table in tables for hint in parse_hints(value, HINT))
    except HintError:
        # Nobody knows what it means: it may mean these.
        return True


@dataclass(frozen=True)
class _Report:
    """A hint in Dagster's log: where it was reported, what it says, when, and its number there."""

    key: dg.AssetKey
    value: Any
    stamp: float
    number: int


def _reports(instance: dg.DagsterInstance, since: datetime) -> Iterator[_Report]:
    for key in instance.all_asset_keys():
        if key.path[-1] != _SOURCE_TABLE:
            continue
        for record in materializations(instance, key, since):
            event = record.asset_materialization
            entry = event.metadata.get(HINT) if event else None
            if entry is not None:
                yield _Report(key, entry.value, record.timestamp, record.storage_id)
