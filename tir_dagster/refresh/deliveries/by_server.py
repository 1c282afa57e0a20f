"""The delivery `server` in a refresh: Tableau loads what changed, and what it loaded is compared with our own version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.plan import Reason
from tir_dagster.changes.relation import read_tables
from tir_dagster.durable import copy_file
from tir_dagster.errors import DatasourceError, ExtractError
from tir_dagster.hyper.content import content_digest, content_digests, content_fingerprints
from tir_dagster.hyper.increment import least_difference
from tir_dagster.hyper.package.package import NO_VALUE, read_package
from tir_dagster.hyper.replace import Shape, least_changed
from tir_dagster.refresh.apply import new_version
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import (
    Looked,
    Published,
    RefreshContext,
    ServerLook,
    crash_after,
    known_of,
    publishing,
    remove,
    shape_of,
)
from tir_dagster.refresh.datasource import credentials_for, fetch_shell, look_at_server, server_package
from tir_dagster.refresh.deliveries.overwrite import Place, put_back
from tir_dagster.refresh.deliveries.server_load import Loaded, load_by_server
from tir_dagster.refresh.deliveries.suffix_load import Affected, Load
from tir_dagster.refresh.state.versions import SHELL, Version
from tir_dagster.snowflake.versions import combined_token, probe
from tir_dagster.tableau.client import TableauClient

_COMPARE = (
    "Look at the server's jobs page, and compare the datasource's own filters and increment key with the spec; then run"
)


class ByServer:
    """The steps of a refresher that differ where the server itself loads the rows.

    The version is applied and verified locally as for any delivery: it is what Tableau must come to.
    """

    def __init__(self, context: RefreshContext) -> None:
        self._context = context
        self._hole: str | None = None

    def put_back(self, client: TableauClient, server: ServerLook, kept: Version) -> ServerLook:
        """An earlier run ended while rows were missing on the server: first of all, people get them back."""
        assert server.found is not None
        put_back(client, self._place(server), server.found, shell=kept.folder / SHELL, hyper=kept.extract)
        self._context.log("the datasource is whole again")
        return look_at_server(client, self._context.spec)

    def publish(self, looked: Looked, version: Version) -> Published:
        """Let Tableau load what changed; what it loaded must be what the version holds."""
        self._hole = None
        change_set = self._context.change_sets.get(version.manifest["change_set"])
        shape = shape_of(version)
        intend(self._context, looked, version)
        with publishing(self._context) as client:
            load = self._load(looked, version, change_set, shape)
            loaded = load_by_server(client, load, log=self._context.log)
        crash_after("published")
        with self._context.stages.timed("compare"):
            digests = content_digests(content_fingerprints(loaded.hyper, shape), shape)
            same = version.manifest["fingerprint"] in digests
            lag = None if same else self._lag(version, load, loaded, digests[0])
        settled = self._settled_version(version, loaded)
        confirmation = confirmation_of(self._context, settled, ServerLook(looked.server.project, loaded.found))
        if lag is not None:
            self._keep_pending(change_set)
            kept = tuple(name for name in confirmation.change_sets if name != change_set.id)
            confirmation = replace(confirmation, fingerprint=digests[0], lag=lag, change_sets=kept)
        remove(load.place.folder)
        return Published(confirmation, loaded.found, loaded.warnings, full_reason=loaded.reason)

    def _put_back_and_tell(self, load: Load, loaded: Loaded, what: str) -> NoReturn:
        """Rows are missing or wrong, and we know what was right: people get that back."""
        name = self._context.spec.name
        if self._hole is None:
            raise DatasourceError(f"{name}: {what} Nothing is confirmed. {_COMPARE} tir refresh {name} --full.")
        with TableauClient(self._context.tableau) as client:
            put_back(client, load.place, loaded.found, shell=load.shell, hyper=load.hyper)
        raise DatasourceError(f"{name}: {what} The datasource is as it was before. {_COMPARE} tir refresh {name}.")

    def _load(self, looked: Looked, version: Version, change_set: ChangeSet, shape: Shape) -> Load:
        shell, hyper = self._servers_files(looked)
        folder = self._context.change_sets.path(change_set.id)

        def affected(column: str) -> Affected:
            sides = [version.extract, *([looked.base.extract] if looked.base else [])]
            found = [least_changed(side, column, change_set, folder, shape) for side in sides]
            return Affected(_least(text for text, _ in found), sum(nulls for _, nulls in found))

        def before_hole(purged: Path) -> None:
            digests = content_digests(content_fingerprints(purged, shape), shape)
            self._hole = digests[0]
            # Where rows were only deleted nothing will be loaded: what looks like a hole is how it must be.
            whole = version.manifest["fingerprint"] in digests
            intend(self._context, looked, version, hole=None if whole else self._hole)
            crash_after("intended")

        def is_hole(hyper: Path) -> bool:
            return content_digest(content_fingerprints(hyper, shape)) == self._hole

        return Load(
            place=self._place(looked.server),
            shell=shell,
            hyper=hyper,
            full=Reason[change_set.reason or "REQUESTED"] if change_set.decision == "full" else None,
            affected=affected,
            differing=lambda column: _first_difference(hyper, version, column),
            lag=looked.confirmed.lag if looked.confirmed else None,
            before_hole=before_hole,
            is_hole=is_hole,
            now=self._context.now,
        )

    def _place(self, server: ServerLook) -> Place:
        context, folder = self._context, self._context.work / "publish"
        folder.mkdir(parents=True, exist_ok=True)
        credentials = credentials_for(context.spec, server.found, context.env)
        return Place(context.spec, server, credentials, folder, context.folder, context.check_lease, context.log)

    def _servers_files(self, looked: Looked) -> tuple[Path, Path]:
        """The package and the Hyper file as the server holds them: its own, if it shows later rows than ours."""
        if looked.confirmed is not None and looked.confirmed.lag is not None and looked.server.found is not None:
            with TableauClient(self._context.tableau) as client:
                return fetch_shell(client, looked.server.found, self._context.work / "download", log=self._context.log)
        shell, hyper = server_package(self._context, looked)
        if shell is None or hyper is None:
            raise DatasourceError(
                f"{self._context.spec.name}: the delivery `server` needs a datasource that Tableau refreshes, and there is none "
                f"{self._context.spec.datasource.name!r} in project {self._context.spec.datasource.project!r}. Publish it from Tableau, or "
                "use the delivery `republish`, which creates it."
            )
        return shell, hyper

    def _lag(self, version: Version, load: Load, loaded: Loaded, digest: str) -> str:
        """From where on the server shows a later moment than the version; an error if it shows something else.

        Only the rows tell, because what came and went meanwhile is in no version: whatever differs between the two now, or
        will change after the version, lies at or above the literal or among the changed keys. `%null%` where no literal
        is small enough: then everything is loaded again.
        """
        tables = read_tables(self._context.spec)
        named = ", ".join(map(str, tables))
        before, after = read_package(load.shell), read_package(loaded.shell)
        if digest == self._hole and before.events[-1].started == after.events[-1].started:
            # A job that was forgotten, or began before our publish.
            self._put_back_and_tell(load, loaded, "Tableau's refresh ended without loading the rows that were purged.")
        if combined_token(probe(self._context.snowflake, tables).items()) == known_of(version).token:
            what = f"what Tableau loaded differs from {named}, which has not changed since."
            self._put_back_and_tell(load, loaded, what)
        column = after.increment_column
        lag = (_first_difference(loaded.hyper, version, column) if column else None) or NO_VALUE
        again = "loads everything again" if lag == NO_VALUE else f"reads again from {lag} on"
        self._context.log(f"{named} changed while Tableau read it: the next refresh {again}")
        return lag

    def _keep_pending(self, change_set: ChangeSet) -> None:
        """The change set stays, without its keys, which are applied: so that the next refresh does not find nothing to do.

        What came and went while Tableau read is in no version of ours, and yet on the server.
        """
        store = self._context.change_sets
        said = f"{self._context.spec.name}: the source changed while Tableau read it."
        with store.staging(change_set.id) as folder:
            store.commit(
                replace(
                    change_set,
                    decision="incremental",
                    reason=None,
                    keys=0,
                    rows=0,
                    purged={},
                    appended={},
                    sentence=said,
                ),
                folder,
            )

    def _settled_version(self, version: Version, loaded: Loaded) -> Version:
        """The version again, with the package as the server has it now: its refresh events are what comes next."""
        with new_version(self._context.versions) as workspace:
            copy_file(version.extract, workspace.extract)
            copy_file(loaded.shell, workspace.folder / SHELL)
            return self._context.versions.commit(workspace, {**version.manifest, "from_server": True}, after=version.id)


def _first_difference(hyper: Path, version: Version, column: str) -> str | None:
    """The literal of the smallest increment value at which what the server holds differs from the version."""
    try:
        return least_difference(hyper, version.extract, column=column)
    except ExtractError:
        # Not even the columns are the same.
        return NO_VALUE


def _least(texts: Iterable[str | None]) -> str | None:
    """Texts of one kind: dates and times sort as text, whole numbers by their value."""
    given = [text for text in texts if text is not None]
    whole = all(text.lstrip("-").isdigit() for text in given)
    return min(given, key=int if whole else str, default=None)
