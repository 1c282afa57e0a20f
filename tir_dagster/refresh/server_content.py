"""The server's content compared with local versions, and what it tells of the last publish."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.hyper.content import content_digests, content_fingerprints, joined_digest
from tir_dagster.hyper.package.package import read_package
from tir_dagster.hyper.payload import carries_keys, row_digest, same_layout
from tir_dagster.hyper.purge import replace_rows
from tir_dagster.hyper.replace import staged_changes
from tir_dagster.refresh.context import RefreshContext, remove, shapes_of
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.refresh.state.notes import Compared
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import Version
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, ServerVersion
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.outcome import PublishOutcome


class NotAsIntendedError(DatasourceError):
    """The server's rows are not the published ones."""


def compare_content(
    context: RefreshContext,
    client: TableauClient,
    datasource: FoundDatasource,
    version: Version,
    folder: Path,
    intent: Intent | None = None,
    *,
    exactly: bool = False,
) -> Compared:
    """Download the server's file and compare it; `exactly`: also tell apart different rows with equal sums."""
    try:
        shell, hyper = fetch_shell(client, datasource, folder, several=version.tables != ("",), log=context.log)
        digests = version_digests(hyper, version)
        if exactly and version.manifest["fingerprint"] in digests and not same_rows(hyper, version):
            digests = ()
        heals = intent is not None and intent.patch and _heals(context, hyper, intent, version, folder)
        alike, bare = same_layout(hyper, version.extract), read_package(shell).is_bare
        keyed = all(carries_keys(hyper, shape) for shape in shapes_of(version).values())
        return Compared(digests, heals, keyed, alike, bare)
    finally:
        remove(folder)


def version_digests(hyper: Path, version: Version) -> tuple[str, ...]:
    """Return the digests of a file that should hold the version's tables, in every form that a version may have recorded."""
    shapes = shapes_of(version)
    digests = {table: content_digests(content_fingerprints(hyper, shape), shape) for table, shape in shapes.items()}
    if version.tables == ("",):
        return digests[""]
    # No earlier release had several tables.
    return (joined_digest({table: forms[0] for table, forms in digests.items()}),)


def check_content(
    context: RefreshContext,
    client: TableauClient,
    datasource: FoundDatasource,
    version: Version,
    *,
    exactly: bool = True,
) -> None:
    """Raise NotAsIntendedError unless the server holds the version's rows: nothing else is confirmed."""
    context.log("something may have changed on the server meanwhile: comparing its rows")
    compared = compare_content(context, client, datasource, version, context.work / "compared", exactly=exactly)
    if version.manifest["fingerprint"] not in compared.fingerprints:
        raise NotAsIntendedError(
            f"{context.spec.name}: the rows of {datasource.shown} on {client.where} are not what they must be after this refresh."
            " Nothing is confirmed. Run again: the next refresh compares what is there, and brings the same keys."
        )


def check_delivered(
    context: RefreshContext, client: TableauClient, datasource: FoundDatasource, version: Version
) -> tuple[str, ...]:
    """Check the rows after a whole publish; return a warning if this user may not download them."""
    # Tableau's own refreshes may write equal values in another form.
    exactly = context.spec.delivery == "patch"
    try:
        check_content(context, client, datasource, version, exactly=exactly)
    except RefusedError as error:
        # A user who may not download does not see the revisions either, and could never confirm anything.
        return (f"{error} So a publish by somebody else right after this one would not be noticed.",)
    return ()


def changes_known_until(confirmed: Confirmation) -> datetime | None:
    """Return until when, by the server's clock, the confirmed rows show what jobs changed; None if it is unknown."""
    moments = [datetime.fromisoformat(confirmed.jobs_until)] if confirmed.jobs_until else []
    with suppress(ValueError):
        updated = ServerVersion.parse(confirmed.server_version).updated_at
        moments += [updated] if updated else []
    return max(moments, default=None)


def is_change_of(context: RefreshContext, intent: Intent, version: Version) -> bool:
    """Whether the version was made from this change set as it is now; a run may have replaced it."""
    pending = (change_set for change_set in context.change_sets.pending() if change_set.id == intent.change_set)
    change_set = next(pending, None)
    if change_set is None or change_set.decision != "incremental":
        return False
    return change_set.source_version == version.manifest["source_version"]


def _heals(context: RefreshContext, hyper: Path, intent: Intent, version: Version, folder: Path) -> bool:
    """Whether sending the same keys again to what the server holds gives what was intended."""
    if not is_change_of(context, intent, version):
        return False
    change_set, healed = context.change_sets.get(intent.change_set), folder / "healed.hyper"
    try:
        folders = context.change_sets.path(change_set.id)
        changes = staged_changes(change_set, folders, shapes_of(version))
        replace_rows(hyper, healed, [change.as_rows() for change in changes.values()])
        return same_rows(healed, version)
    except MachineError:
        # Not compared: the content may be ours.
        raise
    except ExtractError:
        return False


def same_rows(hyper: Path, version: Version) -> bool:
    """Whether a file holds exactly the rows of the version, in every table."""
    shapes = shapes_of(version).values()
    return all(row_digest(hyper, shape) == row_digest(version.extract, shape) for shape in shapes)


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
