"""Automation conditions, for extracts that choose them instead of the sensors' runs (`automation: condition`)."""

from __future__ import annotations

from typing import Any

import dagster as dg

from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.orchestration.partitions import slice_partitions
from tir_dagster.spec.extract import ExtractSpec

Condition = dg.AutomationCondition[Any]


def purged_condition(spec: ExtractSpec, keys: ExtractKeys) -> Condition:
    """The source was updated since the last run: one run, on the newest slice only.

    A run on one slice brings the whole extract up to date. `eager()` would replay every slice at each update.
    """
    source = dg.AssetSelection.assets(keys.source_table)
    updated = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.newly_updated()).allow(source)
    due = updated.since_last_handled() & ~dg.AutomationCondition.in_progress()
    return due & dg.AutomationCondition.in_latest_time_window() if slice_partitions(spec.slices) else due


def published_condition() -> Condition:
    """What it is made from was updated. Not `eager()`, which waits until every slice was materialized once."""
    updated = dg.AutomationCondition.any_deps_updated().since_last_handled()
    return updated & ~dg.AutomationCondition.in_progress()
