"""The delivery `server` in a refresh: Tableau loads what changed, and what it loaded is compared with our own version."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tir_dagster.changes.plan import Reason
from tir_dagster.changes.state import ChangeSet
from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.republish import ServerLook, credentials_for, fetch_shell, look_at_server
from tir_dagster.datasource.server_load import Affected, Load, Loaded, load_by_server, put_back
from tir_dagster.errors import DatasourceError
from tir_dagster.extract.apply import SHELL, Shape, content_digest, content_fingerprints, least_changed, new_version
from tir_dagster.extract.package import read_package
from tir_dagster.extract.versions import Version
from tir_dagster.orchestration.steps import Looked, Published, crash_after, known_of, remove, shape_of
from tir_dagster.source.names import TableName
from tir_dagster.source.versions import probe

if TYPE_CHECKING:
    from tir_dagster.orchestration.flow import Refresher


class ByServer:
    """The steps of a refresher that differ where the server itself loads the rows.

    The version is applied and verified locally as for any delivery: it is what Tableau must come to.
    """

    def __init__(self, flow: Refresher) -> None:
        self._flow = flow
        self._hole: str | None = None

    def put_back(self, client: TableauClient, server: ServerLook, kept: Version) -> ServerLook:
        """An earlier run ended while rows were missing on the server: first of all, people get them back."""
        assert server.found is not None
        load = self._load(server, kept.folder / SHELL, kept.extract)
        put_back(client, load, read_package(load.shell), server.found)
        self._flow.log("the datasource is whole again")
        return look_at_server(client, self._flow.spec)

    def publish(self, looked: Looked, version: Version) -> Published:
        """Let Tableau load what changed; what it loaded must be what the version holds."""
        self._hole = None
        change_set = self._flow.change_sets.get(version.manifest["change_set"])
        shape = shape_of(version)
        self._flow.intend(looked, version)
        with self._flow.stages.timed("publish"), TableauClient(self._flow.tableau) as client:
            load = self._load_of(looked, version, change_set, shape)
            loaded = load_by_server(client, load, log=self._flow.log)
        crash_after("published")
        with self._flow.stages.timed("compare"):
            digest = content_digest(content_fingerprints(loaded.hyper, shape))
        if digest == self._hole:
            self._fill_hole(load, loaded)
        lag = self._lag(version, loaded, digest)
        settled = self._settled_version(version, loaded)
        if loaded.reason is not None:
            self._flow.full_reason = loaded.reason.name
        self._flow.warnings += loaded.warnings
        confirmation = self._flow.confirmation_of(settled, ServerLook(looked.server.project, loaded.found))
        if lag is not None:
            # The change set stays pending: its keys are looked at again, from the same value on.
            kept = tuple(name for name in confirmation.change_sets if name != change_set.id)
            confirmation = replace(confirmation, fingerprint=digest, lag=lag, change_sets=kept)
        remove(self._flow.folder / "publish")
        return Published(confirmation, loaded.found, tuple(self._flow.warnings))

    def _fill_hole(self, load: Load, loaded: Loaded) -> NoReturn:
        """A job that was forgotten, or began before our publish: the rows it should have loaded are still missing."""
        with TableauClient(self._flow.tableau) as client:
            put_back(client, load, read_package(load.shell), loaded.found)
        raise DatasourceError(
            f"{self._flow.spec.name}: Tableau's refresh ended without loading the rows that were purged. The datasource is "
            "as it was before. Look at the server's jobs page, then refresh again."
        )

    def _load_of(self, looked: Looked, version: Version, change_set: ChangeSet, shape: Shape) -> Load:
        shell, hyper = self._servers_files(looked)
        full = Reason[change_set.reason or "REQUESTED"] if change_set.decision == "full" else None
        folder = self._flow.change_sets.path(change_set.id)

        def affected(column: str) -> Affected:
            sides = [version.extract, *([looked.base.extract] if looked.base else [])]
            found = [least_changed(side, column, change_set, folder, shape) for side in sides]
            return Affected(_least(text for text, _ in found), sum(nulls for _, nulls in found))

        def before_hole(purged: Path) -> None:
            self._hole = content_digest(content_fingerprints(purged, shape))
            self._flow.intend(looked, version, hole=self._hole)
            crash_after("intended")

        def is_hole(hyper: Path) -> bool:
            return content_digest(content_fingerprints(hyper, shape)) == self._hole

        lag = looked.confirmed.lag if looked.confirmed else None
        load = self._load(looked.server, shell, hyper)
        return replace(load, full=full, affected=affected, lag=lag, before_hole=before_hole, is_hole=is_hole)

    def _load(self, server: ServerLook, shell: Path, hyper: Path) -> Load:
        folder = self._flow.folder / "publish"
        folder.mkdir(parents=True, exist_ok=True)
        return Load(
            spec=self._flow.spec,
            look=server,
            shell=shell,
            hyper=hyper,
            credentials=credentials_for(self._flow.spec, server.found, self._flow.env),
            folder=folder,
            full=None,
            affected=lambda _: Affected(None, 0),
            lag=None,
            before_hole=lambda _: None,
            is_hole=lambda _: False,
        )

    def _servers_files(self, looked: Looked) -> tuple[Path, Path]:
        """The package and the Hyper file as the server holds them: its own, if it shows later rows than ours."""
        if looked.confirmed is not None and looked.confirmed.lag is not None and looked.server.found is not None:
            with TableauClient(self._flow.tableau) as client:
                return fetch_shell(client, looked.server.found, self._flow.folder / "download")
        shell, hyper = self._flow.shell(looked)
        if shell is None or hyper is None:
            raise DatasourceError(
                f"{self._flow.spec.name}: the delivery `server` needs a datasource that Tableau refreshes, and there is none "
                f"{self._flow.spec.datasource.name!r} in project {self._flow.spec.datasource.project!r}. Publish it from Tableau, or "
                "use the delivery `republish`, which creates it."
            )
        return shell, hyper

    def _lag(self, version: Version, loaded: Loaded, digest: str) -> str | None:
        """From where on the server shows a later moment than the version; an error if it shows something else."""
        if digest == version.manifest["fingerprint"]:
            return None
        table = TableName.parse(self._flow.spec.source)
        quiet = probe(self._flow.snowflake, [table])[table].token == known_of(version).token
        if not quiet and loaded.since is None:
            raise DatasourceError(
                f"{self._flow.spec.name}: {table} changed while Tableau loaded all of it. People see what it loaded; nothing is "
                f"confirmed. Run tir refresh {self._flow.spec.name} again when the source is quiet."
            )
        if quiet:
            raise DatasourceError(
                f"{self._flow.spec.name}: what Tableau loaded differs from {table}, which has not changed since. Nothing is "
                "confirmed. Compare the datasource's own filters and increment key with the spec, then run "
                f"tir refresh {self._flow.spec.name} --full."
            )
        self._flow.log(f"{table} changed while Tableau read it: the next refresh reads again from {loaded.since} on")
        return loaded.since

    def _settled_version(self, version: Version, loaded: Loaded) -> Version:
        """The version again, with the package as the server has it now: its refresh events are what comes next."""
        with new_version(self._flow.versions) as workspace:
            shutil.copyfile(version.extract, workspace.extract)
            shutil.copyfile(loaded.shell, workspace.folder / SHELL)
            files = [path.relative_to(version.folder) for path in sorted(version.ledger.rglob("*")) if path.is_file()]
            self._flow.versions.adopt(workspace, version, [str(path) for path in files])
            return self._flow.versions.commit(workspace, {**version.manifest, "from_server": True}, after=version.id)


def _least(texts: Iterable[str | None]) -> str | None:
    """Texts of one kind: dates and times sort as text, whole numbers by their value."""
    given = [text for text in texts if text is not None]
    whole = all(text.lstrip("-").isdigit() for text in given)
    return min(given, key=int if whole else str, default=None)
