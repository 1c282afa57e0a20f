"""What a detection starts from: hints, upstream materializations and drift since the last one, and a version that shows them."""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg

from tir_dagster.changes.plan import Reason
from tir_dagster.changes.relation import read_tables
from tir_dagster.orchestration.drift import known_drift
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.reported import report_stamps
from tir_dagster.orchestration.upstream import CLOCKS, materialization_stamps, told_since
from tir_dagster.refresh.flow import Looked, Refresher
from tir_dagster.refresh.steps import Prepared
from tir_dagster.snowflake.versions import SourceVersion


def prepare_detection(
    refresher: Refresher, looked: Looked, instance: dg.DagsterInstance, keys: ExtractKeys
) -> Prepared:
    """In this order: a hint that comes after the version is pinned tells of something that the version may not show."""
    spec, confirmed = refresher.spec, looked.confirmed
    since = SourceVersion.parse(confirmed.source_version).moment if confirmed else datetime.now(UTC) - CLOCKS
    stamps = report_stamps(instance, read_tables(spec), since=since)
    stamps |= materialization_stamps(instance, spec, since=since)
    surveyed = refresher.survey(looked)
    # Older ones are not asked for again.
    oldest = (surveyed.version.moment - CLOCKS).timestamp()
    shown = frozenset(number for number, stamp in stamps.items() if stamp >= oldest)
    if confirmed is None:
        return Prepared(looked, surveyed, shown_reports=shown)
    used = refresher.change_sets.looked_at(confirmed.version).union(confirmed.reports)
    # After the version: what came meanwhile is compared now, and once more next time.
    told = told_since(instance, spec, since=since, used=used)
    for name in told.unclear:
        refresher.log(f"{name} was materialized, which says nothing of the slices: every row is compared")
    drift = known_drift(instance, keys, confirmed)
    return Prepared(
        looked,
        surveyed,
        frozenset(stamps) - used,
        shown,
        compare=told.slices,
        anything=bool(told.unclear),
        drifted=drift.slices if drift else (),
        owed=Reason.DRIFT_UNREPAIRED if drift and drift.unrepaired else None,
    )
