"""The work of `tir revisions`: list and fetch the server's revisions of a datasource and the versions kept on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from tir_dagster.errors import DatasourceError
from tir_dagster.files import copy_file, need_space, replaced_file
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import confirmations
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.context import tableau_for
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import MANIFEST_FILE, VersionStore
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.calls import Use
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    Revision,
    ServerVersion,
    find_datasource,
    find_project,
    look_for_datasource,
    server_version,
)
from tir_dagster.tableau.transfer import download, tell_progress


@dataclass(frozen=True)
class ServerRevision:
    """One publish on the server. `rows` is known only for publishes by this project."""

    number: int
    published_at: str | None
    bytes: int | None
    rows: int | None
    current: bool
    confirmed: bool


@dataclass(frozen=True)
class KeptVersion:
    """One version on this machine's disk."""

    id: str
    made_at: str
    bytes: int
    rows: int | None
    source_version: str | None
    confirmed: bool


@dataclass(frozen=True)
class RevisionList:
    """Revisions and versions of an extract, newest first. `revisions` is None if the server shows no history."""

    extract: str
    datasource_id: str | None
    revisions: list[ServerRevision] | None
    versions: list[KeptVersion]


def version_store(spec: ExtractSpec) -> VersionStore:
    return VersionStore(tir_home() / "extracts" / spec.name / "versions")


def _client(spec: ExtractSpec) -> TableauClient:
    uses = frozenset({Use.LOOK, Use.DOWNLOAD, Use.REVISIONS})
    return TableauClient(tableau_for(TableauAccess.from_environment(os.environ), spec, uses))


def list_revisions(spec: ExtractSpec, instance: dg.DagsterInstance) -> RevisionList:
    """Return the server's revisions of the extract's datasource, and the versions kept on this machine."""
    confirmed = list(confirmations(instance, extract_keys(spec).published_datasource))
    last = confirmed[0] if confirmed else None
    with _client(spec) as client:
        project = find_project(client, spec.datasource.project)
        datasource = look_for_datasource(client, project=project, name=spec.datasource.name)
    kept = [
        KeptVersion(
            id=version.id,
            made_at=_utc_text(datetime.fromtimestamp((version.folder / MANIFEST_FILE).stat().st_mtime, UTC)),
            bytes=version.extract.stat().st_size,
            rows=version.manifest.get("rows"),
            source_version=version.manifest.get("source_version"),
            confirmed=last is not None and last.version == version.id,
        )
        for version in reversed(version_store(spec).versions())
    ]
    if datasource is None:
        return RevisionList(spec.name, None, [], kept)
    if datasource.history is None:
        return RevisionList(spec.name, datasource.id, None, kept)
    # The oldest first, so that of two confirmations of one revision the newer one counts.
    rows = {_revision_of(confirmation, datasource): confirmation.rows for confirmation in reversed(confirmed)}
    revisions = [
        ServerRevision(
            number=revision.number,
            published_at=_utc_text(revision.published_at) if revision.published_at else None,
            bytes=revision.size_bytes,
            rows=rows.get(revision.number),
            current=revision.number == datasource.revision,
            confirmed=last is not None and _is_confirmed(revision, last, datasource),
        )
        for revision in _newest_first(datasource)
    ]
    return RevisionList(spec.name, datasource.id, revisions, kept)


def _is_confirmed(revision: Revision, last: Confirmation, datasource: FoundDatasource) -> bool:
    if _revision_of(last, datasource) != revision.number:
        return False
    # A refresh on the server changes the content of the current revision.
    return revision.number != datasource.revision or last.server_version == str(server_version(datasource))


def fetch_version(spec: ExtractSpec, version_id: str, target: Path) -> str:
    """Copy the Hyper file of a kept version; return a sentence for the user."""
    store = version_store(spec)
    known = [version.id for version in store.versions()]
    if version_id not in known:
        raise DatasourceError(
            f"{spec.name} has no version {version_id} in {store.folder}. Choose one of these: {', '.join(known) or 'none are kept'}."
        )
    source = store.get(version_id).extract
    need_space(target.parent, source.stat().st_size)
    with replaced_file(target) as beside:
        copy_file(source, beside)
    return f"The Hyper file of {spec.name} {version_id} is in {target}"


def fetch_revision(spec: ExtractSpec, number: int, target: Path, log: Callable[[str], None]) -> str:
    """Download the package of a revision; return a sentence for the user."""
    with _client(spec) as client:
        project = find_project(client, spec.datasource.project)
        datasource = find_datasource(client, project=project, name=spec.datasource.name)
        known = [revision.number for revision in _newest_first(datasource)]
        if datasource.history is not None and number not in known:
            raise DatasourceError(
                f"{datasource.shown} on {client.where} has no revision {number}. Choose one of these: {', '.join(map(str, known))}."
            )
        progress = tell_progress(log, "downloading", clock=client.retry.clock)
        download(client, datasource, target, revision=number, progress=progress)
    return f"Revision {number} of {datasource.shown} is in {target}"


def _newest_first(datasource: FoundDatasource) -> list[Revision]:
    return sorted(datasource.history or (), key=lambda revision: revision.number, reverse=True)


def _revision_of(confirmation: Confirmation, datasource: FoundDatasource) -> int | None:
    """Return the confirmed revision of this datasource; None if it was another datasource or is unknown."""
    try:
        version = ServerVersion.parse(confirmation.server_version)
    except ValueError:
        return None
    return version.revision if version.datasource_id == datasource.id else None


def _utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
