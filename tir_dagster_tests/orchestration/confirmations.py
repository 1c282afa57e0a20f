"""Confirmations as a publish would have left them."""

from __future__ import annotations

from tir_dagster.changes.plan import SourceState
from tir_dagster.refresh.state.records import Confirmation


def moment(minute: int) -> str:
    return f"2026-01-01T00:{minute:02d}:00.000000+00:00"


def confirmation(*change_sets: str, minute: int = 0, token: str = "t", definition: str = "d") -> Confirmation:
    return Confirmation(
        extract="orders",
        version="v00000001",
        source_version=moment(minute),
        known=SourceState(definition, "s", "i", token),
        watermark=None,
        datasource_id="1",
        server_version="1",
        fingerprint="f",
        rows=1,
        change_sets=change_sets,
    )
