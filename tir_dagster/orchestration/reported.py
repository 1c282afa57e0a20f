"""Hints that somebody reported to Dagster: metadata of materializations of a `source_table`, posted when a load ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.changes.described import checked_hints
from tir_dagster.changes.hints import ChangeType, Hint, HintError, Unknown, parse_hints
from tir_dagster.source.names import TableName

if TYPE_CHECKING:
    from tir_dagster.changes.relation import Relation
    from tir_dagster.source.connection import SnowflakeAccess

HINT = "tir/hint"
_SOURCE_TABLE = "source_table"
_PAGE = 500
# Reports bear Dagster's time, versions the warehouse's; a hint that is looked at twice moves nothing.
_CLOCKS = timedelta(minutes=10)


def reported_hints(
    instance: dg.DagsterInstance, relation: Relation, access: SnowflakeAccess, *, since: datetime
) -> tuple[tuple[Hint, ...], tuple[str, ...]]:
    """The hints at the extract's tables since that moment, whichever extract's `source_table` they were reported at.

    A load reports when it has ended, so a report younger than the version that an extract shows is news to it. What cannot be
    understood counts as a change of anything, with a warning: nobody waits for its answer, and it may not block a refresh.
    """
    hints: list[Hint] = []
    warnings: list[str] = []
    for key, value in _reports(instance, since - _CLOCKS):
        where = f"{HINT} at {key.to_user_string()}"
        try:
            mine = [hint for hint in parse_hints(value, where) if hint.table in relation.tables]
            hints += checked_hints(mine, relation, access)
        except HintError as error:
            warnings.append(f"A reported hint was not understood, so every row is compared: {error}")
            hints.append(Hint(relation.table, ChangeType.MIXED_CHANGES, Unknown()))
    return tuple(dict.fromkeys(hints)), tuple(warnings)


def newest_report(instance: dg.DagsterInstance, tables: Collection[TableName], *, since: datetime) -> str | None:
    """A text that changes with each hint reported at one of the tables since that moment; None if there is none."""
    stamps = [
        f"{key.to_user_string()}@{stamp}" for key, value, stamp in _events(instance, since) if _concerns(value, tables)
    ]
    return max(stamps, default=None)


def _concerns(value: Any, tables: Collection[TableName]) -> bool:
    try:
        return any(hint.table in tables for hint in parse_hints(value, HINT))
    except HintError:
        # Nobody knows what it means: it may mean these.
        return True


def _reports(instance: dg.DagsterInstance, since: datetime) -> Iterator[tuple[dg.AssetKey, Any]]:
    for key, value, _ in _events(instance, since):
        yield key, value


def _events(instance: dg.DagsterInstance, since: datetime) -> Iterator[tuple[dg.AssetKey, Any, float]]:
    for key in instance.all_asset_keys():
        if key.path[-1] != _SOURCE_TABLE:
            continue
        wanted = dg.AssetRecordsFilter(asset_key=key, after_timestamp=since.timestamp())
        cursor, more = None, True
        while more:
            found = instance.fetch_materializations(wanted, limit=_PAGE, cursor=cursor)
            cursor, more = found.cursor, found.has_more
            for record in found.records:
                event = record.asset_materialization
                entry = event.metadata.get(HINT) if event else None
                if entry is not None:
                    yield key, entry.value, record.timestamp
