"""Intents before a publish, confirmations after it, and what a confirmation settles."""

from __future__ import annotations

from datetime import datetime

from tir_dagster.crash_points import crash_after
from tir_dagster.errors import TirError
from tir_dagster.refresh.context import (
    Looked,
    RefreshContext,
    ServerLook,
    known_of,
    lost_lease,
    remove,
)
from tir_dagster.refresh.state.notes import forget_partial_hints, note_partial_hints
from tir_dagster.refresh.state.records import Confirmation, Intent, TableState
from tir_dagster.refresh.state.versions import Version
from tir_dagster.tableau.datasources import shown_place


def intend(
    context: RefreshContext,
    looked: Looked,
    version: Version,
    *,
    hole: str | None = None,
    patch: bool = False,
    keyed: bool = False,
) -> None:
    """Write down what is about to be published, and what the server holds before."""
    context.check_lease()
    context.change_sets.intend(
        Intent(
            extract=context.spec.name,
            change_set=version.manifest["change_set"],
            version=version.id,
            base_server_version=str(looked.server.version) if looked.server.version else None,
            fingerprint=version.manifest["fingerprint"],
            known=known_of(version),
            hole=hole,
            patch=patch,
            keyed=keyed,
        )
    )


def confirmation_of(
    context: RefreshContext,
    version: Version,
    server: ServerLook,
    *,
    before: Confirmation | None,
    keyed: bool = False,
    jobs_until: datetime | None = None,
) -> Confirmation:
    """Return the record that the server shows this version now, with all that jobs changed until then.

    What the confirmation `before` tells of the server's ways stays known.
    """
    assert server.datasource is not None
    manifest = version.manifest
    return Confirmation(
        extract=context.spec.name,
        version=version.id,
        source_version=manifest["source_version"],
        known=known_of(version),
        watermark=manifest["watermark"],
        datasource_id=server.datasource.id,
        server_version=str(server.version),
        fingerprint=manifest["fingerprint"],
        rows=manifest["rows"],
        change_sets=tuple(manifest["change_sets"]),
        keyed=keyed,
        reports=tuple(manifest.get("reports", ())),
        datasource=shown_place(server.datasource.name, server.project.path, context.tableau.where),
        reads_again=before is not None and before.reads_again,
        jobs_until=jobs_until.isoformat() if jobs_until else None,
        parts={
            table: TableState(
                known_of(part), part.manifest["watermark"], part.manifest["fingerprint"], part.manifest["rows"]
            )
            for table in version.tables
            if table
            for part in [version.of(table)]
        },
    )


def settle(context: RefreshContext, confirmation: Confirmation) -> None:
    """Once the confirmation is on record: its change sets are no longer pending, old versions and scratch files go."""
    crash_after("confirmed")
    if lost_lease(context):
        # It is on record: the process that took over finds it, and may have its own intent by now.
        return
    settle_change_sets(context, confirmation)
    prune_versions(context, confirmation)
    crash_after("pruned")
    remove(context.work)
    remove(context.downloads)


def settle_change_sets(context: RefreshContext, confirmation: Confirmation) -> None:
    """Keep what made the confirmed version in the history; remove its change sets from the pending ones."""
    try:
        _keep_history(context, confirmation)
    except (OSError, TirError) as error:
        # The publish is on record; a refresh does not fail because `tir why` will know less.
        context.log(f"what this refresh replaced is not kept in the history: {error}")
    crash_after("remembered")
    context.change_sets.settle(confirmation.change_sets)
    crash_after("settled")


def _keep_history(context: RefreshContext, confirmation: Confirmation) -> None:
    version = context.known_version(confirmation.version)
    if version is not None:
        change_set_id = version.manifest["change_set"]
        made_of = next((found for found in context.change_sets.pending() if found.id == change_set_id), None)
        if context.spec.keep.history:
            context.history.add(version, context.change_sets.path(change_set_id), made_of, now=context.now())
        if made_of is not None and made_of.partial_hints:
            note_partial_hints(context.folder)
        elif made_of is not None and made_of.decision == "full":
            forget_partial_hints(context.folder)
    context.history.prune(days=context.spec.keep.history, now=context.now())


def prune_versions(context: RefreshContext, confirmed: Confirmation | None) -> None:
    """Remove old versions: also before a new one, or a publish that is refused again and again would fill the disk."""
    intent = context.change_sets.intent()
    protected = {record.version for record in (confirmed, intent) if record is not None}
    keep = context.spec.keep
    context.versions.prune(keep.versions, protected=protected, most_bytes=keep.size)
