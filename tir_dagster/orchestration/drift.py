"""Drift on record: failed checks of the confirmed version say which slices the next refresh replaces, or that it loads all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dagster as dg

from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.errors import EQUALS_SOURCE, SERVER_HOLDS_IT
from tir_dagster.orchestration.names import ExtractKeys
from tir_dagster.refresh.state.records import Confirmation

# Metadata of a check that failed: the version it looked at, or started from; what differs; whether it was a repair.
VERSION, DIFFERENT, REPAIR = "tir/version", "tir/different_slices", "tir/repair"


@dataclass(frozen=True)
class Drift:
    """The slices in which the confirmed version differs from the source; `unrepaired` when replacing them did not help."""

    slices: tuple[str | None, ...]
    unrepaired: bool = False


def known_drift(instance: dg.DagsterInstance, keys: ExtractKeys, confirmed: Confirmation | None) -> Drift | None:
    """What the last verification, or the gate of a refresh that failed, found in the confirmed version.

    A version that was published since is another one: what was found in the old one no longer counts.
    """
    if confirmed is None:
        return None
    assets = (keys.published_datasource, keys.purged_extract)
    found = [_failure(instance, key, EQUALS_SOURCE, confirmed.version) for key in assets]
    # What the server holds may have keys that neither the source nor our own version knows: replacing does not reach them.
    found.append(_other_rows(instance, keys, confirmed.version))
    failed = [one for one in found if one is not None]
    if not failed:
        return None
    slices = {_name(label) for one in failed for label in one.get(DIFFERENT, ())}
    repaired = any(one.get(REPAIR) for one in failed)
    return Drift(tuple(sorted(slices, key=lambda name: (name is None, name or ""))), repaired or not slices)


def _other_rows(instance: dg.DagsterInstance, keys: ExtractKeys, version: str) -> dict[str, Any] | None:
    failed = _failure(instance, keys.published_datasource, SERVER_HOLDS_IT, version)
    return None if failed is None else {**failed, REPAIR: True}


def verified_drift(instance: dg.DagsterInstance, keys: ExtractKeys, confirmed: Confirmation | None) -> str | None:
    """A text for the source sensor when a verification found drift; what a gate found is asked for again anyway."""
    if confirmed is None:
        return None
    checks = (EQUALS_SOURCE, SERVER_HOLDS_IT)
    failed = (_failure(instance, keys.published_datasource, name, confirmed.version) for name in checks)
    return None if all(one is None for one in failed) else f"drift@{confirmed.version}"


def _failure(instance: dg.DagsterInstance, asset: dg.AssetKey, check: str, version: str) -> dict[str, Any] | None:
    """The metadata of the asset's last check of that name, if it failed at that version as an error."""
    key = dg.AssetCheckKey(asset, check)
    record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    event = record.event if record else None
    data = event.dagster_event.event_specific_data if event and event.dagster_event else None
    # While it runs there is only the word that it was planned.
    if not isinstance(data, dg.AssetCheckEvaluation) or data.passed or data.severity is not dg.AssetCheckSeverity.ERROR:
        return None
    metadata = {name: getattr(entry, "value", None) for name, entry in data.metadata.items()}
    return metadata if metadata.get(VERSION) == version else None


def _name(label: str) -> str | None:
    return None if label == slice_label(NO_SLICE_KEY) else label
