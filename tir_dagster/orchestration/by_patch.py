"""The delivery `patch` in a refresh: the change set is sent, the local version follows what the server confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tir_dagster.changes.state import Aftermath, ChangeSet, Intent
from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.find import settled
from tir_dagster.datasource.found import FoundDatasource, server_version
from tir_dagster.datasource.jobs import JobCancelledError, JobFailedError, JobVanishedError
from tir_dagster.datasource.patch import Batch, Table, check_undisturbed, send_batch, still_the_same
from tir_dagster.datasource.republish import ServerLook, fetch_shell
from tir_dagster.errors import ExtractError
from tir_dagster.extract.apply import content_digest, content_fingerprints, replace_change
from tir_dagster.extract.hyperfile import describe
from tir_dagster.extract.payload import (
    KEYS_TABLE,
    PAYLOAD_SCHEMA,
    ROWS_TABLE,
    Payload,
    key_names,
    needs_key_column,
    with_key_column,
    write_payloads,
)
from tir_dagster.extract.versions import Version
from tir_dagster.orchestration.steps import Looked, Published, crash_after, remove, shape_of

if TYPE_CHECKING:
    from tir_dagster.orchestration.flow import Refresher

# A job that failed is sent once more: the batch replaces keys, so it heals whatever part of it was done.
_ATTEMPTS = 2
_JOB_SECONDS = 3600.0


class ByPatch:
    """The steps of a refresher that differ where only the change is sent.

    The version is applied and verified locally as for any delivery: it is what the server must come to.
    """

    def __init__(self, flow: Refresher) -> None:
        self._flow = flow

    def keyed(self, version: Version) -> bool:
        """Whether a whole publish gives the rows a key column, so that later changes can be sent alone."""
        return self._flow.spec.delivery == "patch" and needs_key_column(shape_of(version))

    @contextmanager
    def whole(self, version: Version) -> Iterator[Path]:
        """The Hyper file to publish whole."""
        if not self.keyed(version):
            yield version.extract
            return
        folder = self._folder()
        target = folder / "keyed.hyper"
        try:
            with_key_column(version.extract, target, shape_of(version))
            yield target
        finally:
            remove(folder)

    def fits(self, looked: Looked, version: Version) -> bool:
        """Whether the change alone can be sent; otherwise the whole file is, once."""
        if self._flow.spec.delivery != "patch" or looked.server.found is None:
            return False
        change_set = self._flow.change_sets.get(version.manifest["change_set"])
        if change_set.decision == "full" or looked.confirmed is None or change_set.base != looked.confirmed.version:
            return False
        if needs_key_column(shape_of(version)) and not looked.confirmed.keyed:
            self._flow.log("the published rows have no key that the server can test: publishing all of them, with one")
            return False
        return True

    def publish(self, looked: Looked, version: Version) -> Published:
        """Send the change set over exactly what was looked at."""
        assert looked.server.found is not None
        assert looked.confirmed is not None
        keyed = looked.confirmed.keyed
        self._flow.intend(looked, version, patch=True, keyed=keyed)
        with self._flow.stages.timed("publish"), TableauClient(self._flow.tableau) as client:
            still_the_same(client, looked.server.found)
            found = self._send(client, looked.server.found, version, keyed=keyed)
        crash_after("published")
        confirmation = self._flow.confirmation_of(version, ServerLook(looked.server.project, found), keyed=keyed)
        return Published(confirmation, found, ())

    def _send(self, client: TableauClient, found: FoundDatasource, version: Version, *, keyed: bool) -> FoundDatasource:
        folder = self._folder()
        try:
            payloads = self._payloads(version, folder, keyed=keyed)
            self._flow.sent_bytes = sum(payload.bytes for payload in payloads)
            for number, payload in enumerate(payloads, 1):
                self._send_one(client, found, version, payload, f"{number} of {len(payloads)}", folder)
        finally:
            remove(folder)
        now = settled(client, found)
        check_undisturbed(client, found, now)
        return now

    def _payloads(self, version: Version, folder: Path, *, keyed: bool) -> list[Payload]:
        change_set = self._change_set(version)
        return write_payloads(
            version.extract,
            folder,
            change_set,
            self._flow.change_sets.path(change_set.id),
            shape=shape_of(version),
            keyed=keyed,
            most_bytes=int(self._flow.spec.datasource.patch_limit_mb * 1_000_000),
        )

    def _send_one(
        self, client: TableauClient, found: FoundDatasource, version: Version, payload: Payload, part: str, folder: Path
    ) -> None:
        table = describe(version.extract)
        batch = Batch(
            payload=payload.path,
            target=Table(table.schema, table.name),
            keys=Table(PAYLOAD_SCHEMA, KEYS_TABLE),
            rows=Table(PAYLOAD_SCHEMA, ROWS_TABLE),
            key_columns=key_names(version.extract, shape_of(version)),
            # Which content it changes belongs to it: what somebody put back meanwhile must be changed again.
            identity=f"{self._flow.spec.name} {version.id} {version.manifest['change_set']} {part} {server_version(found)}",
        )
        sentence = f"sending {payload.keys:,} keys and {payload.rows:,} rows, {payload.bytes / 1e6:,.1f} MB ({part})"
        self._flow.log(sentence)
        try:
            notes = send_batch(
                client,
                found,
                batch,
                attempts=_ATTEMPTS,
                timeout=_JOB_SECONDS,
                sent=lambda: crash_after("sent"),
            )
        except JobVanishedError:
            self._flow.log("the server forgot the job: comparing its rows")
            self._compare(client, found, version, folder)
        else:
            self._flow.log(" ".join(["done on the server", *notes]))

    def _compare(self, client: TableauClient, found: FoundDatasource, version: Version, folder: Path) -> None:
        _, hyper = fetch_shell(client, found, folder / "compared")
        if content_digest(content_fingerprints(hyper, shape_of(version))) != version.manifest["fingerprint"]:
            raise JobVanishedError(
                f"{self._flow.spec.name}: the server forgot the job that changed {found.shown}, and its rows are not what they must"
                " be. Nothing is confirmed; the next refresh sends the same keys again."
            )

    # After a crash

    def heals(self, server_hyper: Path, intent: Intent, version: Version) -> bool:
        """Whether sending the same keys again to what the server holds gives what was intended."""
        folder = self._folder()
        try:
            change_set = self._change_set(version)
            staged = self._flow.change_sets.path(change_set.id)
            healed = folder / "healed.hyper"
            shape = shape_of(version)
            replace_change(server_hyper, healed, change_set, staged, shape)
            return content_digest(content_fingerprints(healed, shape)) == intent.fingerprint
        except ExtractError:
            return False
        finally:
            remove(folder)

    def finish(self, client: TableauClient, server: ServerLook, intent: Intent) -> tuple[Aftermath, ServerLook]:
        """Send again what a crash interrupted: under the same request id if the server still holds what it held then.

        A job that runs by now is joined so. Known to be over either way, it cannot come late and undo what the next
        refresh sends.
        """
        version = self._version(intent)
        if version is None or server.found is None:
            return Aftermath.NOT_LANDED, server
        try:
            found = self._send(client, server.found, version, keyed=intent.keyed)
        except (JobFailedError, JobCancelledError, JobVanishedError) as error:
            self._flow.log(f"{error} The next change set brings these keys again.")
            return Aftermath.NOT_LANDED, server
        return Aftermath.LANDED, ServerLook(server.project, found)

    def _version(self, intent: Intent) -> Version | None:
        """The version that was about to be sent, if it and its change set are still there."""
        found = next((one for one in self._flow.versions.versions() if one.id == intent.version), None)
        known = {one.id for one in self._flow.change_sets.pending()}
        return found if found is not None and intent.change_set in known else None

    def _change_set(self, version: Version) -> ChangeSet:
        return self._flow.change_sets.get(version.manifest["change_set"])

    def _folder(self) -> Path:
        folder = self._flow.folder / "patch"
        remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
