"""Slices by the values of a column: dynamic partitions that come when a change set touches them and go when nothing is left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from tir_dagster.orchestration.partitions import REST, UNFINISHED, fits, partitions_in_flight, slice_partitions_name
from tir_dagster.spec.extract import ExtractSpec

# On the newest event of `published_datasource`: the slices that have rows.
HELD = "tir/held_slices"


def held(rows: Mapping[str, int]) -> list[str]:
    """The partitions that a version's slices need."""
    return sorted(name for name, count in rows.items() if count and fits(name))


def slices_to_add(existing: Collection[str], touched: Iterable[str | None]) -> list[str]:
    """The partitions that a change set needs and that are not there; one for the rest, so that every run has one."""
    named = sorted({name for name in touched if name is not None and fits(name)})
    return [name for name in dict.fromkeys((REST, *named)) if name not in existing]


def slices_to_remove(
    existing: Iterable[str], *, held: Collection[str], wanted: Collection[str | None], in_flight: Collection[str]
) -> list[str]:
    """The partitions whose slices have no rows, are not about to get any, and have no run in flight."""
    return [name for name in existing if name != REST and not any(name in kept for kept in (held, wanted, in_flight))]


def known_slices(instance: dg.DagsterInstance, spec: ExtractSpec) -> list[str]:
    """The partitions in the order in which they came: ranges of them follow it. None where slices are not values."""
    return [] if spec.slices.by != "value" else list(instance.get_dynamic_partitions(slice_partitions_name(spec)))


def add_slices(instance: dg.DagsterInstance, spec: ExtractSpec, touched: Iterable[str | None]) -> list[str]:
    """Add the partitions that are missing; gives all of them, in the order of their ranges."""
    missing = slices_to_add(known_slices(instance, spec), touched)
    if missing and spec.slices.by == "value":
        instance.add_dynamic_partitions(slice_partitions_name(spec), missing)
    return known_slices(instance, spec)


def going_slices(
    instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey, wanted: Collection[str | None]
) -> list[str]:
    """The partitions that may be removed now; none before the first publish, nor while a backfill has runs to start."""
    kept = _held(instance, published) if spec.slices.by == "value" else None
    if kept is None or _backfilling(instance):
        return []
    existing = known_slices(instance, spec)
    unfinished = instance.get_runs(filters=dg.RunsFilter(statuses=UNFINISHED))
    busy = partitions_in_flight((run.tags for run in unfinished), existing)
    return slices_to_remove(existing, held=kept, wanted=wanted, in_flight=busy)


def retire_slices(instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey) -> list[str]:
    """Remove the partitions of slices that are gone; gives their names. Their events stay in the history."""
    going = going_slices(instance, spec, published, ())
    for name in going:
        instance.delete_dynamic_partition(slice_partitions_name(spec), name)
    return going


def slice_requests(
    instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey, touched: Sequence[str]
) -> tuple[list[str], list[Any]]:
    """The slices by value that there will be, in the order of their ranges; and a sensor's requests that make it so."""
    if spec.slices.by != "value":
        return [], []
    partitions = dg.DynamicPartitionsDefinition(name=slice_partitions_name(spec))
    existing = known_slices(instance, spec)
    coming = slices_to_add(existing, touched) if touched else []
    going = going_slices(instance, spec, published, touched)
    requests: list[Any] = [partitions.build_add_request(coming)] if coming else []
    requests += [partitions.build_delete_request(going)] if going else []
    return [name for name in [*existing, *coming] if name not in going], requests


def _held(instance: dg.DagsterInstance, published: dg.AssetKey) -> Sequence[str] | None:
    for record in instance.fetch_materializations(published, limit=1).records:
        event = record.asset_materialization
        found = getattr(event.metadata.get(HELD), "value", None) if event else None
        if isinstance(found, list):
            return found
    return None


def _backfilling(instance: dg.DagsterInstance) -> bool:
    # Here: it brings half of Dagster's daemon along.
    from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus  # noqa: PLC0415

    return bool(instance.get_backfills(BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED]), limit=1))
