"""What a detection starts from: hints that were reported since the last one, and a version of the source that shows them."""

from __future__ import annotations

import dagster as dg

from tir_dagster.changes.relation import read_tables
from tir_dagster.orchestration.flow import Looked, Refresher
from tir_dagster.orchestration.reported import fresh_reports
from tir_dagster.orchestration.steps import Prepared
from tir_dagster.source.versions import SourceVersion


def prepare_detection(refresher: Refresher, looked: Looked, instance: dg.DagsterInstance) -> Prepared:
    """In this order: a hint that comes after the version is pinned tells of something that the version may not show."""
    reports: frozenset[int] = frozenset()
    if looked.confirmed is not None:
        since = SourceVersion.parse(looked.confirmed.source_version).moment
        known = refresher.change_sets.looked_at(looked.confirmed.version)
        reports = fresh_reports(instance, read_tables(refresher.spec), since=since, looked=known)
    return Prepared(looked, refresher.survey(looked), reports)
