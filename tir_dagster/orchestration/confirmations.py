"""Confirmations in Dagster's event log: one event of `published_datasource` says what the server shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import dagster as dg

from tir_dagster.refresh.state.records import Confirmation

CONFIRMATION = "tir/confirmation"
# People may report events by hand; ours is among the newest ones.
_LOOK_BACK = 200


def last_confirmation(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Confirmation | None:
    """The newest event with complete metadata, whatever became of its run; None when there is none."""
    return next(confirmations(instance, asset_key), None)


def confirmations(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> Iterator[Confirmation]:
    """The newest ones, the newest first."""
    for record in instance.fetch_materializations(asset_key, limit=_LOOK_BACK).records:
        materialization = record.asset_materialization
        entry = materialization.metadata.get(CONFIRMATION) if materialization else None
        text = getattr(entry, "value", None)
        if isinstance(text, str):
            with suppress(ValueError, TypeError):
                yield Confirmation.from_json(text)
