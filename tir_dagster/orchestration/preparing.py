"""What a detection starts from: hints, upstream materializations and drift since the last one, and a version that shows them."""

from __future__ import annotations

import dagster as dg

from tir_dagster.changes.plan import Reason
from tir_dagster.changes.relation import read_tables
from tir_dagster.orchestration.drift import known_drift
from tir_dagster.orchestration.flow import Looked, Refresher
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.reported import fresh_reports
from tir_dagster.orchestration.steps import Prepared
from tir_dagster.orchestration.upstream import materialization_numbers, told_since
from tir_dagster.source.versions import SourceVersion


def prepare_detection(
    refresher: Refresher, looked: Looked, instance: dg.DagsterInstance, keys: ExtractKeys
) -> Prepared:
    """In this order: a hint that comes after the version is pinned tells of something that the version may not show."""
    if looked.confirmed is None:
        return Prepared(looked, refresher.survey(looked))
    spec = refresher.spec
    since = SourceVersion.parse(looked.confirmed.source_version).moment
    known = refresher.change_sets.looked_at(looked.confirmed.version)
    reports = fresh_reports(instance, read_tables(spec), since=since, looked=known)
    reports |= materialization_numbers(instance, spec, since=since) - known
    surveyed = refresher.survey(looked)
    # After the version: what came meanwhile is compared now, and once more next time.
    told = told_since(instance, spec, since=since)
    for name in told.unclear:
        refresher.log(f"{name} was materialized, which says nothing of the slices: every row is compared")
    drift = known_drift(instance, keys, looked.confirmed)
    return Prepared(
        looked,
        surveyed,
        reports,
        compare=told.slices,
        anything=bool(told.unclear),
        drifted=drift.slices if drift else (),
        owed=Reason.DRIFT_UNREPAIRED if drift and drift.unrepaired else None,
    )
