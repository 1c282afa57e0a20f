"""Dagster partitions: slices, change sets as dynamic partitions, and the range of slices that one run covers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from tir_dagster.errors import SpecError
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.tables import Slices

RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
PARTITION = "dagster/partition"
# This many settled change sets stay visible as partitions: about one page in the UI.
KEEP_CHANGE_SETS = 100
# For slices by value: the partition of rows without a value, or with a value that cannot be a partition's name.
REST = "(rest)"
# Dagster refuses these in a partition's name; longer names are not useful.
_REFUSED, MOST_LETTERS = re.compile(r"\.\.\.|[\x00-\x1f]"), 200
# Measured with SQLite: .05 to .1 seconds for each event.
SENSIBLE_SLICES, SECONDS_PER_EVENT = 500, 0.1
_FINISHED = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
UNFINISHED = [status for status in dg.DagsterRunStatus if status not in _FINISHED]
_FORMATS = {"month": "%Y-%m", "week": "%Y-%m-%d", "day": "%Y-%m-%d"}


def change_set_partitions(spec: ExtractSpec) -> dg.DynamicPartitionsDefinition:
    """Return the partitions of `changed_keys`: one per change set, added when its detection starts."""
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_change_sets")


def slice_partitions_name(spec: ExtractSpec) -> str:
    return f"{spec.name}_slices"


def extract_partitions(spec: ExtractSpec) -> dg.PartitionsDefinition[str] | None:
    """Return the partitions of `purged_extract`: one per slice; those by value are added and removed with the values."""
    if spec.main.slices.by == "value":
        return dg.DynamicPartitionsDefinition(name=slice_partitions_name(spec))
    return slice_partitions(spec.main.slices)


def slice_partitions(slices: Slices) -> dg.TimeWindowPartitionsDefinition | None:
    """Return one partition per slice of time, including the current one; rows outside of them belong to every run."""
    if slices.by in ("value", "none") or slices.start is None:
        return None
    start = slices.start[:7] if slices.by == "month" else slices.start
    common = {"fmt": _FORMATS[slices.by], "timezone": slices.zone, "end_offset": 1}
    if slices.by == "month":
        return dg.MonthlyPartitionsDefinition(start_date=start, **common)  # type: ignore[arg-type]
    if slices.by == "week":
        # Weeks start on Monday, as in the slices' names.
        return dg.WeeklyPartitionsDefinition(start_date=start, day_offset=1, **common)  # type: ignore[arg-type]
    return dg.DailyPartitionsDefinition(start_date=start, **common)  # type: ignore[arg-type]


def warn_of_many_slices(spec: ExtractSpec) -> None:
    """Warn when the definitions load: each slice of a run is one event, and the UI draws all of them."""
    partitions = slice_partitions(spec.main.slices)
    count = 0 if partitions is None else partitions.get_num_partitions()
    if count > SENSIBLE_SLICES:
        warnings.warn(many_slices(spec, count), category=ManySlicesWarning, stacklevel=3)


def many_slices(spec: ExtractSpec, count: int) -> str:
    """Return the warning about too many slices."""
    way = "a coarser unit, or start later: older rows still belong to the extract"
    return (
        f"{spec.name} has {count:,} slices by {spec.main.slices.by}. A run over all of them writes as many events, about "
        f"{count * SECONDS_PER_EVENT:.0f} seconds of bookkeeping. Slice by "
        f"{'a column with fewer values' if spec.main.slices.by == 'value' else way}."
    )


class ManySlicesWarning(UserWarning):
    """An extract is cut into more slices than is sensible."""


def _known(spec: ExtractSpec, values: Sequence[str]) -> list[str]:
    """Return all slices in the order of ranges; `values` are those of slices by value."""
    partitions = slice_partitions(spec.main.slices)
    return list(values) if partitions is None else list(partitions.get_partition_keys())


def covering_range(spec: ExtractSpec, touched: Iterable[str | None], known: Sequence[str] = ()) -> dict[str, str]:
    """Run tags for the smallest range that covers the touched slices; the newest slice when none of them has one.

    `known` are the partitions of slices by value, in the order of their creation; if none is touched, the rest's is used.
    """
    if spec.main.slices.by == "none":
        return {}
    keys = _known(spec, known)
    fallback = keys.index(REST) if REST in keys else len(keys) - 1
    names = {name if name is not None and fits(name) else REST for name in touched}
    positions = sorted(keys.index(name) for name in names if name in keys) or [fallback]
    return {RANGE_START: keys[positions[0]], RANGE_END: keys[positions[-1]]}


def slices_of_run(spec: ExtractSpec, tags: Mapping[str, str], known: Sequence[str] = ()) -> list[str]:
    """Return the slices of a run, read from its tags; none for an extract without slices.

    Invalid ranges are refused here, because Dagster accepts them: it runs a reversed range on no partition, and shortens one
    that ends in the future.
    """
    if spec.main.slices.by == "none":
        return []
    if PARTITION in tags:
        return [tags[PARTITION]]
    if RANGE_START not in tags or RANGE_END not in tags:
        raise SpecError(
            f"{spec.name}: the run names no slice, and purged_extract is partitioned by {spec.main.slices.by}. Choose the "
            f"slices to re-sync, or run tir refresh {spec.name}."
        )
    return _range(spec, tags[RANGE_START], tags[RANGE_END], _known(spec, known))


def slices_between(spec: ExtractSpec, text: str, known: Sequence[str] = ()) -> list[str]:
    """Return the slices of a command line: FROM..TO, or values separated by commas; raise SpecError for unknown ones."""
    if spec.main.slices.by == "none":
        raise SpecError(f"{spec.name} has no slices. Leave --slices out, or declare `slices:` in the spec.")
    keys = _known(spec, known)
    if spec.main.slices.by == "value":
        names = [text] if text in keys else [name.strip() for name in text.split(",")]
        _check_known(spec, names, keys)
        return list(dict.fromkeys(names))
    if not re.fullmatch(r"[\w-]+(\.\.[\w-]+)?", text):
        raise SpecError(f"{text!r} is not a range. Write FROM..TO, such as 2025-03..2025-05, or one slice.")
    first, dots, last = text.partition("..")
    return _range(spec, first, last if dots else first, keys)


def _range(spec: ExtractSpec, first: str, last: str, keys: Sequence[str]) -> list[str]:
    """Return all slices from the first to the last; raise SpecError if the range is reversed or unknown."""
    _check_known(spec, (first, last), keys)
    if keys.index(first) > keys.index(last):
        raise SpecError(
            f"{spec.name}: the range {first}..{last} is reversed. Write the earlier slice first: {last}..{first}."
        )
    return list(keys[keys.index(first) : keys.index(last) + 1])


def _check_known(spec: ExtractSpec, names: Iterable[str], keys: Sequence[str]) -> None:
    for name in names:
        if name in keys:
            continue
        if spec.main.slices.by != "value":
            raise SpecError(
                f"{spec.name} has no slice {name!r}: its slices are {keys[0]} to {keys[-1]}, by {spec.main.slices.by}."
            )
        listed = ", ".join(keys[:_LISTED]) + (", …" if len(keys) > _LISTED else "")
        raise SpecError(
            f"{spec.name} has no slice {name!r}: its slices are the values of {spec.main.slices.column} that it holds, "
            f"{listed or 'none before the first refresh'}. A new value gets its slice with the next refresh."
        )


_LISTED = 20


def fits(name: str | None) -> bool:
    """Return whether a slice by value can be a partition; otherwise it belongs to the rest, which is part of every run."""
    return name is not None and len(name) <= MOST_LETTERS and not _REFUSED.search(name)


def rest_of(spec: ExtractSpec, known: Sequence[str], present: Iterable[str | None]) -> list[str | None]:
    """Return the slices in `present` without a partition: no date, before the first, after the last; no value or no valid name."""
    if spec.main.slices.by == "value":
        return [name for name in present if not fits(name)]
    partitions = slice_partitions(spec.main.slices)
    keys = set(partitions.get_partition_keys()) if partitions else set(known)
    return [name for name in present if name is None or name not in keys]


def partitions_to_retire(
    existing: Iterable[str], *, pending: Collection[str], in_flight: Collection[str], keep: int = KEEP_CHANGE_SETS
) -> list[str]:
    """Return the change sets whose partitions may be removed: not among the newest, not pending, and without a run in flight."""
    newest_first = sorted(existing, reverse=True)
    return sorted(name for name in newest_first[keep:] if name not in pending and name not in in_flight)


def partitions_in_flight(runs: Iterable[Mapping[str, str]], existing: Iterable[str]) -> set[str]:
    """Return the partitions of unfinished runs, from the runs' tags: single ones, or ranges in the order of `existing`."""
    names = list(existing)
    busy: set[str] = set()
    for tags in runs:
        busy |= {tags[PARTITION]} if PARTITION in tags else set()
        if tags.get(RANGE_START) in names and tags.get(RANGE_END) in names:
            first, last = sorted((names.index(tags[RANGE_START]), names.index(tags[RANGE_END])))
            busy |= set(names[first : last + 1])
    return busy


def retire_change_sets(
    instance: dg.DagsterInstance,
    spec: ExtractSpec,
    changed_keys: dg.AssetKey,
    *,
    pending: Collection[str],
    settled: str = "",
) -> list[str]:
    """Delete the partitions of old settled change sets and of failed earlier detections; return their names.

    Their events stay in the history. `settled` is the newest published change set, or one whose detection found nothing.
    Earlier detections without a change set are superseded by it, and Dagster would show them as failed or missing forever.
    """
    partitions = str(change_set_partitions(spec).name)
    existing = instance.get_dynamic_partitions(partitions)
    earlier = [name for name in existing if name < settled]
    unstaged = set(earlier) - instance.get_materialized_partitions(changed_keys) if earlier else set()
    if len(existing) <= KEEP_CHANGE_SETS and not unstaged:
        return []
    unfinished = instance.get_runs(filters=dg.RunsFilter(statuses=UNFINISHED))
    busy = partitions_in_flight((run.tags for run in unfinished), sorted(existing))
    old = partitions_to_retire(existing, pending=pending, in_flight=busy)
    retired = sorted({*old, *(unstaged - busy - set(pending))})
    for name in retired:
        instance.delete_dynamic_partition(partitions, name)
    return retired


def failed_slices(instance: dg.DagsterInstance, spec: ExtractSpec, purged_extract: dg.AssetKey) -> list[str]:
    """Return the slices that Dagster shows as failed: no run on them has succeeded since."""
    partitions = extract_partitions(spec)
    if partitions is None:
        return []
    names = partitions.get_partition_keys(dynamic_partitions_store=instance)
    statuses = instance.get_status_by_partition(purged_extract, names, partitions) or {}
    return [name for name, status in statuses.items() if status is not None and status.value == "FAILED"]


# On the newest event of `published_datasource`: the slices that have rows.
HELD = "tir/held_slices"


def held(rows: Mapping[str, int]) -> list[str]:
    """Return the partitions of a version's slices that have rows."""
    return sorted(name for name, count in rows.items() if count and fits(name))


def slices_to_add(existing: Collection[str], touched: Iterable[str | None]) -> list[str]:
    """Return the missing partitions that a change set needs; always with one for the rest, so that every run has one."""
    named = sorted({name for name in touched if name is not None and fits(name)})
    return [name for name in dict.fromkeys((REST, *named)) if name not in existing]


def slices_to_remove(
    existing: Iterable[str], *, held: Collection[str], needed: Collection[str | None], in_flight: Collection[str]
) -> list[str]:
    """Return the partitions whose slices have no rows, will not get any, and have no run in flight."""
    return [name for name in existing if name != REST and not any(name in kept for kept in (held, needed, in_flight))]


def known_slices(instance: dg.DagsterInstance, spec: ExtractSpec) -> list[str]:
    """Return the partitions of slices by value in the order of their creation, which ranges follow; else an empty list."""
    return [] if spec.main.slices.by != "value" else list(instance.get_dynamic_partitions(slice_partitions_name(spec)))


def add_slices(instance: dg.DagsterInstance, spec: ExtractSpec, touched: Iterable[str | None]) -> list[str]:
    """Add the missing partitions; return all of them in the order of ranges."""
    missing = slices_to_add(known_slices(instance, spec), touched)
    if missing and spec.main.slices.by == "value":
        instance.add_dynamic_partitions(slice_partitions_name(spec), missing)
    return known_slices(instance, spec)


def removable_slices(
    instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey, needed: Collection[str | None]
) -> list[str]:
    """Return the partitions that may be removed now; none before the first publish, or while a backfill has runs to start."""
    kept = _held(instance, published) if spec.main.slices.by == "value" else None
    if kept is None or _backfilling(instance):
        return []
    existing = known_slices(instance, spec)
    unfinished = instance.get_runs(filters=dg.RunsFilter(statuses=UNFINISHED))
    busy = partitions_in_flight((run.tags for run in unfinished), existing)
    return slices_to_remove(existing, held=kept, needed=needed, in_flight=busy)


def retire_slices(instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey) -> list[str]:
    """Remove the partitions of slices without rows; return their names. Their events stay in the history."""
    retired = removable_slices(instance, spec, published, ())
    for name in retired:
        instance.delete_dynamic_partition(slice_partitions_name(spec), name)
    return retired


def slice_requests(
    instance: dg.DagsterInstance, spec: ExtractSpec, published: dg.AssetKey, touched: Sequence[str]
) -> tuple[list[str], list[Any]]:
    """Return the future slices by value in the order of ranges, and the requests by which a sensor adds and removes them."""
    if spec.main.slices.by != "value":
        return [], []
    partitions = dg.DynamicPartitionsDefinition(name=slice_partitions_name(spec))
    existing = known_slices(instance, spec)
    added = slices_to_add(existing, touched) if touched else []
    removed = removable_slices(instance, spec, published, touched)
    requests: list[Any] = [partitions.build_add_request(added)] if added else []
    requests += [partitions.build_delete_request(removed)] if removed else []
    return [name for name in [*existing, *added] if name not in removed], requests


def _held(instance: dg.DagsterInstance, published: dg.AssetKey) -> Sequence[str] | None:
    for record in instance.fetch_materializations(published, limit=1).records:
        event = record.asset_materialization
        slices = getattr(event.metadata.get(HELD), "value", None) if event else None
        if isinstance(slices, list):
            return slices
    return None


def _backfilling(instance: dg.DagsterInstance) -> bool:
    from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus

    return bool(instance.get_backfills(BulkActionsFilter(statuses=[BulkActionStatus.REQUESTED]), limit=1))
