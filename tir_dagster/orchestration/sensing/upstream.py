"""Upstream assets that fill the source: their partitions map to slices, their materializations are hints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import dagster as dg

from tir_dagster.snowflake.slices import SliceBy, slice_of
from tir_dagster.spec.extract import ExtractSpec, Upstream
from tir_dagster.spec.tables import Slices

_PAGE = 500
# Events have Dagster's time, versions the warehouse's. Allow for this difference; used events are known by number.
CLOCKS = timedelta(minutes=10)
# Formats of time partition keys, Dagster's own formats first.
_FORMATS = ("%Y-%m-%d-%H:%M", "%Y-%m-%d", "%Y-%m", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y%m%d")


@dataclass(frozen=True)
class UpstreamChanges:
    """Slices to compare because of upstream materializations; `unclear` names assets whose partition is not understood."""

    slices: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


def upstream_keys(spec: ExtractSpec) -> list[dg.AssetKey]:
    return [dg.AssetKey(key.split("/")) for key in spec.upstream]


def upstream_deps(spec: ExtractSpec) -> list[dg.AssetDep]:
    """Return the dependencies of `purged_extract`: Dagster shows which partitions a slice is made of."""
    return [
        dg.AssetDep(key, partition_mapping=_mapping(upstream))
        for key, upstream in zip(upstream_keys(spec), spec.upstream.values(), strict=True)
    ]


def source_dep(spec: ExtractSpec, source_table: dg.AssetKey) -> dg.AssetDep:
    """Return the dependency of `changed_keys` on the source; on all partitions if the source is an upstream asset."""
    everything = dg.AllPartitionMapping() if source_table in upstream_keys(spec) else None
    return dg.AssetDep(source_table, partition_mapping=everything)


def _mapping(upstream: Upstream) -> dg.PartitionMapping | None:
    if upstream.timed:
        # The asset's partitions may begin later than the slices, and end before the current slice.
        return dg.TimeWindowPartitionMapping(allow_nonexistent_upstream_partitions=True)
    return dg.IdentityPartitionMapping() if upstream.partitions == "value" else None


def upstream_changes(
    instance: dg.DagsterInstance, spec: ExtractSpec, *, since: datetime, used: Collection[int] = ()
) -> UpstreamChanges:
    """Return what was materialized since that moment, by slice. Comparing a slice twice does no harm."""
    slices: dict[str, None] = {}
    unclear: list[str] = []
    for key, upstream, record in _materialized(instance, spec, since):
        if upstream.partitions == "none" or record.storage_id in used:
            continue
        partition_slices = slices_of_partition(spec.main.slices, upstream, record.partition_key)
        slices |= dict.fromkeys(partition_slices or ())
        if partition_slices is None:
            unclear.append(f"{key.to_user_string()} ({record.partition_key or 'without a partition'})")
    return UpstreamChanges(tuple(sorted(slices)), tuple(dict.fromkeys(unclear)))


def announcements(
    instance: dg.DagsterInstance, spec: ExtractSpec, *, since: datetime, used: Collection[int] = ()
) -> tuple[str, ...]:
    """Name the materializations since that moment that were not yet used."""
    events = ((key, record) for key, _, record in _materialized(instance, spec, since) if record.storage_id not in used)
    return tuple(f"the materialization of {key.to_user_string()} in run {record.run_id}" for key, record in events)


def newest_materialization(
    instance: dg.DagsterInstance, spec: ExtractSpec, *, since: datetime, used: Collection[int] = ()
) -> str | None:
    """Return a text that changes with each materialization that was not yet used; None if there is none."""
    stamps = [
        f"{key.to_user_string()}@{record.timestamp}"
        for key, _, record in _materialized(instance, spec, since)
        if record.storage_id not in used
    ]
    return max(stamps, default=None)


def materialization_stamps(instance: dg.DagsterInstance, spec: ExtractSpec, *, since: datetime) -> dict[int, float]:
    """Return number and time of each upstream materialization in Dagster's log."""
    return {record.storage_id: record.timestamp for _, _, record in _materialized(instance, spec, since)}


def _materialized(
    instance: dg.DagsterInstance, spec: ExtractSpec, since: datetime
) -> Iterator[tuple[dg.AssetKey, Upstream, dg.EventLogRecord]]:
    """Yield all materializations that may be later than this moment of the warehouse; Dagster's clock may be behind."""
    for key, upstream in zip(upstream_keys(spec), spec.upstream.values(), strict=True):
        yield from ((key, upstream, record) for record in materializations(instance, key, since - CLOCKS))


def slices_of_partition(slices: Slices, upstream: Upstream, partition: str | None) -> list[str] | None:
    """Return the slices that may contain rows of the partition; None if its key cannot be read."""
    if upstream.partitions == "value":
        return None if partition is None else [partition]
    begin = _moment(partition or "")
    if begin is None:
        return None
    slice_zone = ZoneInfo(slices.zone)
    upstream_zone = ZoneInfo(upstream.zone or slices.zone)
    first = begin.replace(tzinfo=upstream_zone).astimezone(slice_zone)
    # The end belongs to the next partition.
    last = (_end(upstream, begin).replace(tzinfo=upstream_zone) - timedelta(microseconds=1)).astimezone(slice_zone)
    by = SliceBy(slices.column, slices.by, slices.zone)
    days = [first.date() + timedelta(days=at) for at in range((last.date() - first.date()).days + 1)]
    return list(dict.fromkeys(name for day in days if (name := slice_of(by, day)) is not None))


def _moment(partition: str) -> datetime | None:
    for form in _FORMATS:
        with suppress(ValueError):
            return datetime.strptime(partition, form)  # noqa: DTZ007 - its zone is the upstream's
    return None


def _end(upstream: Upstream, begin: datetime) -> datetime:
    if upstream.partitions == "month":
        return (begin.replace(day=1) + timedelta(days=32)).replace(day=1)
    return begin + {"hour": timedelta(hours=1), "week": timedelta(days=7)}.get(upstream.partitions, timedelta(days=1))


def materializations(instance: dg.DagsterInstance, key: dg.AssetKey, since: datetime) -> Iterator[dg.EventLogRecord]:
    """Yield all materializations of the asset since that moment, newest first."""
    records_filter = dg.AssetRecordsFilter(asset_key=key, after_timestamp=since.timestamp())
    cursor, more = None, True
    while more:
        page = instance.fetch_materializations(records_filter, limit=_PAGE, cursor=cursor)
        cursor, more = page.cursor, page.has_more
        yield from page.records
