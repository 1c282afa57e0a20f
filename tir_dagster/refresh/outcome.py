"""The outcome of an interrupted publish, decided by the server's version and the fingerprints of its content."""

from __future__ import annotations

from collections.abc import Collection

from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.tableau.outcome import PublishOutcome


def outcome_by_content(
    *,
    intent: Intent | None,
    confirmed: Confirmation | None,
    server_version: str | None,
    server_fingerprints: Collection[str] = (),
    heals: bool = False,
) -> PublishOutcome:
    """Decide what happened to the last publish; the fingerprints are those of the server's content, if it was compared.

    They belong to one content, in every form that a version may have recorded. `heals` means that the same change, sent
    again to that content, would give the intended content.
    """
    if intent is not None:
        if server_version == intent.base_server_version:
            return PublishOutcome.NOT_LANDED
        if confirmed is not None and confirmed.fingerprint in server_fingerprints:
            # Published back, by us or by somebody else: what was there before is there again.
            return PublishOutcome.NOT_LANDED
        if intent.hole in server_fingerprints:
            return PublishOutcome.HOLE
        if intent.patch and heals and intent.fingerprint not in server_fingerprints:
            return PublishOutcome.PARTIAL
        return PublishOutcome.LANDED if intent.fingerprint in server_fingerprints else PublishOutcome.FOREIGN
    if confirmed is not None and server_version != confirmed.server_version:
        # A refresh that Tableau itself ran may have left the rows as they were.
        return PublishOutcome.CLEAN if confirmed.fingerprint in server_fingerprints else PublishOutcome.FOREIGN
    return PublishOutcome.CLEAN
