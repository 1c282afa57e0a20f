"""Slices as Dagster partitions, change sets as dynamic ones, and the range of slices that one run covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import dagster as dg

from tir_dagster.errors import SpecError
from tir_dagster.spec import ExtractSpec, Slices

RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
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


def covering_range(spec: ExtractSpec, touched: Iterable[str | None]) -> dict[str, str]:
    """Run tags for the smallest range that covers the touched slices; the newest slice when none of them has one."""
    partitions = slice_partitions(spec.slices)
    if partitions is None:
        return {}
    keys = list(partitions.get_partition_keys())
    known = sorted(keys.index(name) for name in set(touched) if name in keys) or [len(keys) - 1]
    return {RANGE_START: keys[known[0]], RANGE_END: keys[known[-1]]}


def slices_between(spec: ExtractSpec, text: str) -> list[str]:
    """The slices FROM..TO of a command line; a reversed, unknown or malformed range is refused."""
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
