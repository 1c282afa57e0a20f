"""Refreshes reported by Tableau's webhooks: recorded as observations of `published_datasource`, read by the source sensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg

from tir_dagster.orchestration.metadata import CONFIRMATION, last_confirmation
from tir_dagster.refresh.state.lease import lease_holder
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.webhooks import SUCCEEDED, WebhookEvent

EVENT, AT, DURING = "tir/webhook_event", "tir/webhook_at", "tir/during_our_refresh"
_URI = "dagster/uri"
_PUBLISHED = "published_datasource"
# Tableau may repeat an event within hours; a datasource is not refreshed more often than this in that time.
_LOOK_BACK = 200


def instance_label(instance: dg.DagsterInstance) -> str:
    """Return a short label of this Dagster history; all processes that share the history get the same label."""
    # Only SQL storages have an id; all storages of open-source Dagster are SQL storages.
    ask = getattr(instance.run_storage, "get_run_storage_id", None)
    return str(ask())[:8] if ask is not None else "dagster"


class Observer:
    """Records events as observations, one at a time, so that an event that arrives twice is recorded once."""

    def __init__(self, instance: dg.DagsterInstance, home: Path) -> None:
        self._instance = instance
        self._home = home
        self._lock = threading.Lock()

    def note(self, event: WebhookEvent) -> str:
        """Record the event; return a line for the log."""
        with self._lock:
            concerned = list(self._concerned(event.datasource_id))
            if not concerned:
                return f"{event.name!r} does not belong to an extract here"
            return "; ".join(self._note(key, confirmed, event) for key, confirmed in concerned)

    def _concerned(self, datasource_id: str) -> Iterator[tuple[dg.AssetKey, Confirmation]]:
        """Yield the assets whose last confirmation is about this datasource, whichever file or project declares them."""
        for record in self._instance.get_asset_records():
            key = record.asset_entry.asset_key
            if key.path[-1] == _PUBLISHED or _is_confirmed(record):
                confirmed = last_confirmation(self._instance, key)
                if confirmed is not None and confirmed.datasource_id == datasource_id:
                    yield key, confirmed

    def _note(self, key: dg.AssetKey, confirmed: Confirmation, event: WebhookEvent) -> str:
        event_metadata = {EVENT: event.kind, AT: event.at.isoformat()}
        if any(event_metadata.items() <= metadata.items() for metadata in _observed(self._instance, key)):
            return f"{key.to_user_string()}: {event.kind} of {event.at:%H:%M:%S} was recorded before"
        lease = self._home / "extracts" / confirmed.extract / "lease.json"
        datasource = {"tir/resource_name": event.name, "tir/datasource_id": event.datasource_id}
        link = _link(self._instance, key)
        self._instance.report_runless_asset_event(
            dg.AssetObservation(
                key,
                description=f"Tableau {'refreshed' if event.succeeded else 'failed to refresh'} the datasource.",
                metadata={**event_metadata, **datasource, **link, DURING: lease_holder(lease) is not None},
            )
        )
        return f"{key.to_user_string()}: {event.kind} recorded"


def _is_confirmed(record: Any) -> bool:
    """Return whether the asset's newest event is a confirmation; an extract may use a custom asset key."""
    event = record.asset_entry.last_materialization
    return (
        event is not None
        and event.asset_materialization is not None
        and CONFIRMATION in event.asset_materialization.metadata
    )


def refreshed_elsewhere(
    instance: dg.DagsterInstance, spec: ExtractSpec, key: dg.AssetKey, *, since: datetime
) -> str | None:
    """Return a text that changes with each refresh by others since that time; None if there is none.

    Tableau also reports refreshes that the delivery `server` started: refreshes during a run of this extract count as these.
    `republish` and `patch` start no refresh on the server. With `trigger`, every refresh is fine.
    """
    if spec.delivery == "trigger":
        return None
    records_filter = dg.AssetRecordsFilter(asset_key=key, after_timestamp=since.timestamp())
    for metadata in _observed(instance, records_filter):
        by_this_project = spec.delivery == "server" and metadata.get(DURING) is True
        if metadata.get(EVENT) == SUCCEEDED and not by_this_project:
            return f"refreshed@{metadata.get(AT)}"
    return None


def _observed(
    instance: dg.DagsterInstance, records_filter: dg.AssetKey | dg.AssetRecordsFilter
) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the newest observations, newest first."""
    for record in instance.fetch_observations(records_filter, limit=_LOOK_BACK).records:
        event = record.asset_observation
        if event is not None:
            yield {name: value.value for name, value in event.metadata.items()}


def _link(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    """Return the datasource's URL from the last event that has one, as metadata."""
    for record in instance.fetch_materializations(key, limit=_LOOK_BACK).records:
        event = record.asset_materialization
        if event is not None and _URI in event.metadata:
            return {_URI: event.metadata[_URI]}
    return {}
