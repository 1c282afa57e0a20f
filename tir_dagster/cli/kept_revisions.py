"""The work of `tir revisions`: list and fetch the server's revisions of a datasource and the versions kept on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from tir_dagster.errors import DatasourceError
from tir_dagster.files import copy_file, need_space, replaced_file
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import confirmations
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.context import tableau_for as for_datasource
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import MANIFEST_FILE, Version, VersionStore
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
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

Log = Callable[[str], None]


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


class Revisions:
    """Read access to the revisions and versions of one extract."""

    def __init__(self, spec: ExtractSpec, instance: dg.DagsterInstance, log: Log) -> None:
        self.spec = spec
        self.versions = VersionStore(tir_home() / "extracts" / spec.name / "versions")
        self._tableau = for_datasource(TableauAccess.from_environment(os.environ), spec)
        self._confirmations = list(confirmations(instance, extract_keys(spec).published_datasource))
        self._log = log

    @property
    def _last(self) -> Confirmation | None:
        return self._confirmations[0] if self._confirmations else None

    def listed(self) -> RevisionList:
        with TableauClient(self._tableau) as client:
            project = find_project(client, self.spec.datasource.project)
            datasource = look_for_datasource(client, project=project, name=self.spec.datasource.name)
        kept = [self._kept(version) for version in reversed(self.versions.versions())]
        if datasource is None:
            return RevisionList(self.spec.name, None, [], kept)
        history = (
            None
            if datasource.history is None
            else [self._revision(revision, datasource) for revision in _newest_first(datasource)]
        )
        return RevisionList(self.spec.name, datasource.id, history, kept)

    def _revision(self, revision: Revision, datasource: FoundDatasource) -> ServerRevision:
        current = revision.number == datasource.revision
        confirmed = self._last is not None and _revision_of(self._last, datasource) == revision.number
        if current and confirmed:
            # A refresh on the server changes the content of a revision.
            confirmed = self._last is not None and self._last.server_version == str(server_version(datasource))
        return ServerRevision(
            number=revision.number,
            published_at=_utc_text(revision.published_at),
            bytes=revision.size_bytes,
            rows=self._rows(datasource).get(revision.number),
            current=current,
            confirmed=confirmed,
        )

    def _rows(self, datasource: FoundDatasource) -> Mapping[int | None, int]:
        # The oldest first, so that of two confirmations of one revision the newer one counts.
        return {
            _revision_of(confirmation, datasource): confirmation.rows for confirmation in reversed(self._confirmations)
        }

    def _kept(self, version: Version) -> KeptVersion:
        made_at = datetime.fromtimestamp((version.folder / MANIFEST_FILE).stat().st_mtime, UTC)
        return KeptVersion(
            id=version.id,
            made_at=_utc_text(made_at) or "",
            bytes=version.extract.stat().st_size,
            rows=version.manifest.get("rows"),
            source_version=version.manifest.get("source_version"),
            confirmed=self._last is not None and self._last.version == version.id,
        )

    def fetch_version(self, version_id: str, target: Path) -> str:
        """Copy the Hyper file of a kept version; return a sentence for the user."""
        known = [version.id for version in self.versions.versions()]
        if version_id not in known:
            raise DatasourceError(
                f"{self.spec.name} has no version {version_id} in {self.versions.folder}. Choose one of these: {', '.join(known) or 'none are kept'}."
            )
        source = self.versions.get(version_id).extract
        need_space(target.parent, source.stat().st_size)
        with replaced_file(target) as beside:
            copy_file(source, beside)
        return f"The Hyper file of {self.spec.name} {version_id} is in {target}"

    def fetch_revision(self, number: int, target: Path) -> str:
        """Download the package of a revision; return a sentence for the user."""
        with TableauClient(self._tableau) as client:
            project = find_project(client, self.spec.datasource.project)
            datasource = find_datasource(client, project=project, name=self.spec.datasource.name)
            known = [revision.number for revision in _newest_first(datasource)]
            if datasource.history is not None and number not in known:
                raise DatasourceError(
                    f"{datasource.shown} on {client.where} has no revision {number}. Choose one of these: {', '.join(map(str, known))}."
                )
            progress = tell_progress(self._log, "downloading", clock=client.retry.clock)
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


def _utc_text(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None
