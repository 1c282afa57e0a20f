"""Past refreshes of an extract, from Dagster's log and the state folder; and what they let a refresh of some rows expect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import dagster as dg

from tir_dagster.changes.change_set import slice_label
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import PROFILE, confirmed_events
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.state.history import HistoryEntry, HistoryStore
from tir_dagster.spec.extract import ExtractSpec

# A part of the stage `publish`, shown beside it.
_WITHIN = "publish_server"
# An estimate is the middle of so many refreshes that moved about as many rows.
_LIKE = 5


@dataclass(frozen=True)
class PastRefresh:
    """One confirmed refresh; what Dagster or the state folder no longer know is None or empty."""

    version: str
    at: float
    run_id: str
    source_version: str
    rows: int
    decision: str
    reason: str | None = None
    keys: int | None = None
    rows_purged: int | None = None
    rows_appended: int | None = None
    # By slice, as people see its name: rows removed and added.
    slices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    # Downloaded from the warehouse, and sent to the server.
    bytes_read: int | None = None
    bytes_sent: int | None = None
    extract_bytes: int | None = None
    # The size past which the file is built anew.
    rebuilt_above: int | None = None
    slices_compared: int | None = None
    warnings: tuple[str, ...] = ()


def past_refreshes(spec: ExtractSpec, instance: dg.DagsterInstance, *, limit: int = 200) -> list[PastRefresh]:
    """Return the confirmed refreshes, the newest first."""
    keys = extract_keys(spec)
    events = list(confirmed_events(instance, keys.published_datasource))[:limit]
    detections: dict[str, tuple[str, dict[str, Any]]] = {}
    for record in instance.fetch_materializations(keys.changed_keys, limit=2 * limit).records if events else ():
        if record.asset_materialization is not None and record.partition_key:
            values = {
                name: getattr(entry, "value", None) for name, entry in record.asset_materialization.metadata.items()
            }
            detections.setdefault(record.partition_key, (record.run_id, values))
    entries = {
        entry.version: entry for entry in HistoryStore(tir_home() / "extracts" / spec.name / "history").entries()
    }
    run_ids = {event.run_id for event in events} | {run_id for run_id, _ in detections.values()}
    durations = _durations(instance, run_ids)
    past = []
    for event in events:
        change_set = max(event.confirmation.change_sets, default="")
        run_id, detection = detections.get(change_set, ("", {}))
        past.append(_refresh(event, detection, run_id, entries.get(event.confirmation.version), durations))
    return past


def _durations(instance: dg.DagsterInstance, run_ids: set[str]) -> dict[str, float]:
    records = instance.get_run_records(dg.RunsFilter(run_ids=sorted(run_ids - {""}))) if run_ids - {""} else ()
    return {
        record.dagster_run.run_id: record.end_time - record.start_time
        for record in records
        if record.start_time is not None and record.end_time is not None
    }


def _refresh(
    event: Any, detection: Mapping[str, Any], run_id: str, entry: HistoryEntry | None, durations: Mapping[str, float]
) -> PastRefresh:
    confirmation, metadata = event.confirmation, event.metadata
    manifest: Mapping[str, Any] = entry.manifest if entry else {}
    change_set = entry.change_set if entry else None
    stages = dict(detection.get("tir/stages") or {})
    for stage, seconds in (metadata.get("tir/stages") or {}).items():
        stages[stage] = stages.get(stage, 0.0) + seconds
    if "apply" not in stages:
        # The steps of a run by hand share their stages; otherwise purged_extract had its own.
        for stage, seconds in (manifest.get("seconds") or {}).items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    stages.pop(_WITHIN, None)
    taken = [durations[run] for run in {event.run_id, run_id} if run in durations]
    slices = (
        {}
        if change_set is None
        else {
            slice_label(name): (change_set.purged.get(name, 0), change_set.appended.get(name, 0))
            for name in sorted({**change_set.purged, **change_set.appended})
        }
    )
    read = [
        stage.get("bytes")
        for stage in [*(detection.get(PROFILE) or ()), *(metadata.get(PROFILE) or ())]
        if stage["stage"] == "detect"
    ]
    return PastRefresh(
        version=confirmation.version,
        at=event.timestamp,
        run_id=event.run_id,
        source_version=confirmation.source_version,
        rows=confirmation.rows,
        decision=str(
            metadata.get("tir/decision") or manifest.get("decision") or detection.get("tir/decision") or "unknown"
        ),
        reason=metadata.get("tir/reason") or detection.get("tir/reason") or (change_set.reason if change_set else None),
        keys=metadata.get("tir/keys"),
        rows_purged=_first(metadata.get("tir/rows_purged"), manifest.get("rows_purged")),
        rows_appended=_first(metadata.get("tir/rows_appended"), manifest.get("rows_appended")),
        slices=slices,
        seconds=sum(taken) if taken else sum(stages.values()) or None,
        stages=stages,
        bytes_read=sum(filter(None, read)) if read else None,
        bytes_sent=metadata.get("tir/bytes_sent"),
        extract_bytes=_bytes(metadata.get("tir/extract_megabytes")),
        rebuilt_above=_bytes(metadata.get("tir/rebuilt_above_megabytes")),
        slices_compared=len(manifest["compared"]) if "compared" in manifest else None,
        warnings=tuple(metadata.get("tir/warnings") or ()),
    )


def _bytes(size: float | None) -> int | None:
    return None if size is None else round(size * 1e6)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True)
class Estimate:
    """What a refresh may take: the middle of earlier ones of its kind."""

    seconds: float
    bytes_read: int | None
    bytes_sent: int | None
    # How many refreshes it is the middle of, and the fewest and most rows that these added.
    refreshes: int
    rows: tuple[int, int]

    def sentence(self) -> str:
        """Return the estimate in words."""
        parts = [f"about {self.seconds:,.0f} s" if self.seconds >= 1 else "about a second"]
        parts += [f"{megabytes(self.bytes_read)} read"] if self.bytes_read is not None else []
        parts += [f"{megabytes(self.bytes_sent)} sent"] if self.bytes_sent is not None else []
        fewest, most = self.rows
        rows = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        like = "the last one" if self.refreshes == 1 else f"{self.refreshes} earlier ones"
        return f"{', '.join(parts)} (from {like}, which added {rows} rows)"


def estimate(past: Sequence[PastRefresh], decision: str, rows: int | None) -> Estimate | None:
    """Return what a refresh that adds so many rows may take; None if there was none of its kind."""
    known = [(one, one.seconds, one.rows_appended or 0) for one in past if one.decision == decision and one.seconds]
    if rows is not None:
        known.sort(key=lambda entry: abs(math.log((entry[2] + 1) / (rows + 1))))
    nearest = known[:_LIKE]
    if not nearest:
        return None
    per_row = [one.bytes_read / moved for one, _, moved in nearest if one.bytes_read is not None and moved]
    sent = [one.bytes_sent for one, _, _ in nearest if one.bytes_sent is not None]
    return Estimate(
        seconds=median(seconds for _, seconds, _ in nearest),
        bytes_read=round(median(per_row) * rows) if per_row and rows is not None else None,
        bytes_sent=round(median(sent)) if sent else None,
        refreshes=len(nearest),
        rows=(min(moved for _, _, moved in nearest), max(moved for _, _, moved in nearest)),
    )


def megabytes(size: float) -> str:
    """Return a size for people."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
