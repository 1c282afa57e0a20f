"""Slices as Dagster partitions, change sets as dynamic ones, and the range of slices that one run covers."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

import dagster as dg

from tir_dagster.errors import SpecError
from tir_dagster.spec import ExtractSpec, Slices

RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
PARTITION = "dagster/partition"
# Settled change sets stay visible as partitions for a while: a page in the UI, not a history.
KEEP_CHANGE_SETS = 100
# Measured with SQLite: .05 to .1 seconds for each event.
SENSIBLE_SLICES, SECONDS_PER_EVENT = 500, 0.1
_FINISHED = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
UNFINISHED = [status for status in dg.DagsterRunStatus if status not in _FINISHED]
_FORMATS = {"month": "%Y-%m", "week": "%Y-%m-%d", "day": "%Y-%m-%d"}


def change_set_partitions(spec: ExtractSpec) -> dg.DynamicPartitionsDefinition:
    """One partition per change set, added when its detection starts."""
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_change_sets")


def slice_partitions(slices: Slices) -> dg.TimeWindowPartitionsDefinition | None:
    """One partition per slice, the current one included; rows outside of them belong to every run."""
    if slices.by == "none" or slices.start is None:
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
    """Told when the definitions load: each slice of a run is an event of its own, and the UI draws them all."""
    partitions = slice_partitions(spec.slices)
    count = 0 if partitions is None else partitions.get_num_partitions()
    if count > SENSIBLE_SLICES:
        warnings.warn(
            f"{spec.name} has {count:,} slices by {spec.slices.by}. A run over all of them writes as many events, about "
            f"{count * SECONDS_PER_EVENT:.0f} seconds of bookkeeping. Slice by a coarser unit, or start later: older rows "
            "still belong to the extract.",
            category=ManySlicesWarning,
            stacklevel=3,
        )


class ManySlicesWarning(UserWarning):
    """An extract is cut into more slices than is sensible."""


def covering_range(spec: ExtractSpec, touched: Iterable[str | None]) -> dict[str, str]:
    """Run tags for the smallest range that covers the touched slices; the newest slice when none of them has one."""
    partitions = slice_partitions(spec.slices)
    if partitions is None:
        return {}
    keys = list(partitions.get_partition_keys())
    known = sorted(keys.index(name) for name in set(touched) if name in keys) or [len(keys) - 1]
    return {RANGE_START: keys[known[0]], RANGE_END: keys[known[-1]]}


def slices_of_run(spec: ExtractSpec, tags: Mapping[str, str]) -> list[str]:
    """The slices that a run is for, by its tags; none for an extract without slices.

    Refused here because Dagster is silent: it runs a reversed range on no partition at all, and cuts one that ends
    in the future.
    """
    if slice_partitions(spec.slices) is None:
        return []
    if PARTITION in tags:
        return [tags[PARTITION]]
    if RANGE_START not in tags or RANGE_END not in tags:
        raise SpecError(
            f"{spec.name}: the run names no slice, and purged_extract is partitioned by {spec.slices.by}. Choose the "
            f"slices to re-sync, or run tir refresh {spec.name}."
        )
    return slices_between(spec, f"{tags[RANGE_START]}..{tags[RANGE_END]}")


def slices_between(spec: ExtractSpec, text: str) -> list[str]:
    """The slices FROM..TO of a command line or a run; a reversed, unknown or malformed range is refused."""
    partitions = slice_partitions(spec.slices)
    if partitions is None:
        raise SpecError(f"{spec.name} has no slices. Leave --slices out, or declare `slices:` in the spec.")
    first, dots, last = text.partition("..")
    if not dots:
        last = first
    keys = list(partitions.get_partition_keys())
    for name in (first, last):
        if name not in keys:
            raise SpecError(
                f"{spec.name} has no slice {name!r}: its slices are {keys[0]} to {keys[-1]}, by {spec.slices.by}."
            )
    if keys.index(first) > keys.index(last):
        raise SpecError(f"{spec.name}: the range {text} is reversed. Write the earlier slice first: {last}..{first}.")
    return keys[keys.index(first) : keys.index(last) + 1]


def rest_of(spec: ExtractSpec, known: Sequence[str], present: Iterable[str | None]) -> list[str | None]:
    """The slices with rows that no partition stands for: no date, before the first, after the last."""
    partitions = slice_partitions(spec.slices)
    keys = set(partitions.get_partition_keys()) if partitions else set(known)
    return [name for name in present if name is None or name not in keys]


def partitions_to_retire(
    existing: Iterable[str], *, pending: Collection[str], in_flight: Collection[str], keep: int = KEEP_CHANGE_SETS
) -> list[str]:
    """Change sets whose partitions may go: beyond the newest ones, and neither pending nor with a run in flight."""
    newest_first = sorted(existing, reverse=True)
    return sorted(name for name in newest_first[keep:] if name not in pending and name not in in_flight)


def partitions_in_flight(runs: Iterable[Mapping[str, str]], existing: Iterable[str]) -> set[str]:
    """The partitions that unfinished runs, given by their tags, are for: one by one or by range."""
    names = sorted(existing)
    busy: set[str] = set()
    for tags in runs:
        busy |= {tags[PARTITION]} if PARTITION in tags else set()
        if tags.get(RANGE_START) in names and tags.get(RANGE_END) in names:
            first, last = sorted((tags[RANGE_START], tags[RANGE_END]))
            busy |= {name for name in names if first <= name <= last}
    return busy


def retire_change_sets(instance: dg.DagsterInstance, spec: ExtractSpec, *, pending: Collection[str]) -> list[str]:
    """Delete the partitions of long-settled change sets; gives their names. Their events stay in the history."""
    partitions = str(change_set_partitions(spec).name)
    existing = instance.get_dynamic_partitions(partitions)
    if len(existing) <= KEEP_CHANGE_SETS:
        return []
    unfinished = instance.get_runs(filters=dg.RunsFilter(statuses=UNFINISHED))
    busy = partitions_in_flight((run.tags for run in unfinished), existing)
    going = partitions_to_retire(existing, pending=pending, in_flight=busy)
    for name in going:
        instance.delete_dynamic_partition(partitions, name)
    return going
