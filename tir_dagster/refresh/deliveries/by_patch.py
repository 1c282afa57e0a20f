"""The delivery `patch` in a refresh: the change set is sent, the local version follows what the server confirmed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.hyper.content import content_digests, content_fingerprints
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.hyper.package.package import read_package
from tir_dagster.hyper.payload import (
    KEYS_TABLE,
    PAYLOAD_SCHEMA,
    ROWS_TABLE,
    Payload,
    carries_keys,
    key_names,
    needs_key_column,
    row_digest,
    same_layout,
    with_key_column,
    write_payloads,
)
from tir_dagster.hyper.replace import Shape, replace_change
from tir_dagster.measuring import moved
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import (
    Looked,
    Published,
    RefreshContext,
    ServerLook,
    crash_after,
    publishing,
    remove,
    shape_of,
)
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.deliveries.patch import (
    Batch,
    Table,
    check_unpublished,
    not_published_since,
    send_batch,
    still_the_same,
    what_is_left,
)
from tir_dagster.refresh.state.records import Aftermath, Intent
from tir_dagster.refresh.state.versions import SHELL, Version
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, settled
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError
from tir_dagster.tableau.jobs import JobCancelledError, JobFailedError, JobVanishedError, wait_for_job
from tir_dagster.tableau.upload import tell_progress

# A job that failed is sent once more: the batch replaces keys, so it heals whatever part of it was done.
_ATTEMPTS = 2
# A datasource that changed so much later than our job ended was changed by somebody else, too.
_LATER = timedelta(seconds=5)


class NotAsIntendedError(DatasourceError):
    """The change was sent, and the server's rows are not what they must be."""


# Why a change cannot be sent again: a whole publish brings it instead.
_IN_VAIN = (JobFailedError, JobCancelledError, JobVanishedError, RefusedError, ExtractError, NotAsIntendedError)


@dataclass(frozen=True)
class Sent:
    """What the server says after all parts: the datasource, and whether its rows must be compared to be sure."""

    found: FoundDatasource
    doubtful: bool


@dataclass(frozen=True)
class Compared:
    """What the server's file holds, beside a version of ours."""

    # Of its rows, in every form; none where it cannot be told, or where rows differ that look alike in sum.
    fingerprints: Sequence[str] = ()
    # An interrupted change, sent again, would make it right.
    heals: bool = False
    # Every row carries its purge key.
    keyed: bool = False
    # The table and its columns are what our changes are made for.
    alike: bool = False
    # People have made no document around it.
    bare: bool = False


@dataclass
class _Asking:
    """Whether a request of ours may be at work without our knowing."""

    taken: bool = False
    lost: bool = False

    def begin(self) -> None:
        """A request goes out. If the one before was taken, its job is over: otherwise there would be no other."""
        self.lost, self.taken = self.lost and not self.taken, False

    def lose(self) -> None:
        self.lost = True

    @property
    def open(self) -> bool:
        """One that was refused was not taken; one before it whose answer was lost may have been."""
        return self.taken or self.lost


class ByPatch:
    """The steps of a refresher that differ where only the change is sent.

    The version is applied and verified locally as for any delivery: it is what the server must come to. Only content
    that is known is patched: where a change may have arrived in part, the whole version is published instead.
    """

    def __init__(self, context: RefreshContext) -> None:
        self._context = context

    def keyed(self, version: Version) -> bool:
        """Whether a whole publish gives the rows a key column, so that later changes can be sent alone."""
        return self._context.spec.delivery == "patch" and self._needs_key(shape_of(version))

    def _needs_key(self, shape: Shape) -> bool:
        # What a query gives is NOT NULL only as far as somebody's reasoning about it goes.
        return self._context.spec.query is not None or needs_key_column(shape)

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
        confirmed, base = looked.confirmed, looked.base
        if self._context.spec.delivery != "patch" or looked.server.found is None or confirmed is None or base is None:
            return False
        change_set = self._change_set(version)
        if change_set.decision == "full" or change_set.base != confirmed.version:
            return False
        if looked.in_doubt:
            untouched = looked.server.version_text == confirmed.server_version
            why = "the server does not take changes" if untouched else "a change may have arrived in part"
            self._context.log(f"{why}: publishing all rows")
            return False
        if not looked.alike:
            self._context.log("somebody published the same rows in columns of other types: publishing all of them anew")
            return False
        # Old rows may have had no key where the new ones always do.
        if not confirmed.keyed and any(self._needs_key(shape_of(one)) for one in (base, version)):
            self._context.log(
                "the published rows have no key that the server can test: publishing all of them, with one"
            )
            return False
        return not (version.folder / SHELL).is_file()

    def publish(self, looked: Looked, version: Version) -> Published:
        """Send the change set over exactly what was looked at."""
        assert looked.server.found is not None
        assert looked.confirmed is not None
        keyed, folder = looked.confirmed.keyed, self._folder()
        with publishing(self._context) as client:
            try:
                # Before the intent: what cannot be sent at all leaves nothing behind.
                payloads = self._payloads(version, folder, keyed=keyed)
                intend(self._context, looked, version, patch=True, keyed=keyed)
                crash_after("intended")
                base = str(looked.server.version)
                sent = self._send(client, looked.server.found, version, payloads, base=base, keyed=keyed)
                if sent.doubtful:
                    self.check(client, sent.found, version, folder / "compared")
            finally:
                remove(folder)
        crash_after("published")
        confirmation = confirmation_of(
            self._context, version, ServerLook(looked.server.project, sent.found), keyed=keyed
        )
        return Published(confirmation, sent.found, sent_bytes=sum(payload.bytes for payload in payloads))

    def _payloads(self, version: Version, folder: Path, *, keyed: bool) -> list[Payload]:
        change_set = self._change_set(version)
        return write_payloads(
            version.extract,
            folder,
            change_set,
            self._context.change_sets.path(change_set.id),
            shape=shape_of(version),
            keyed=keyed,
            most_bytes=int(self._context.spec.datasource.patch_limit_mb * 1_000_000),
        )

    def _send(
        self,
        client: TableauClient,
        found: FoundDatasource,
        version: Version,
        payloads: list[Payload],
        *,
        base: str,
        keyed: bool,
    ) -> Sent:
        """All parts, one after the other. `base` is the server's version that they change: it belongs to their ids."""
        moved(rows=sum(payload.rows for payload in payloads), bytes=sum(payload.bytes for payload in payloads))
        table, columns = describe(version.extract), key_names(version.extract, shape_of(version), keyed=keyed)
        manifest = version.manifest
        whole = f"{self._context.spec.name} {version.id} {manifest['change_set']} {manifest['source_version']}"
        now, doubtful = found, False
        for number, payload in enumerate(payloads, 1):
            part = f"{number} of {len(payloads)}"
            batch = Batch(
                payload=payload.path,
                target=Table(table.schema, table.name),
                keys=Table(PAYLOAD_SCHEMA, KEYS_TABLE),
                rows=Table(PAYLOAD_SCHEMA, ROWS_TABLE),
                key_columns=columns,
                identity=f"{whole} {payload.part} {base}",
            )
            self._context.log(
                f"sending {payload.keys:,} keys and {payload.rows:,} rows, {payload.bytes / 1e6:,.1f} MB ({part})"
            )
            ended = None
            try:
                ended = self._send_one(client, found, now, version, batch)
            except JobVanishedError:
                self._context.log("the server forgot the job: its rows are compared at the end")
            now = settled(client, now)
            check_unpublished(client, found, now)
            doubtful = doubtful or _changed_later(now, ended) or now.revision is None
        return Sent(now, doubtful)

    def _send_one(
        self, client: TableauClient, found: FoundDatasource, now: FoundDatasource, version: Version, batch: Batch
    ) -> datetime | None:
        """One part, sent to what is there now; `found` is what was there before the first one."""
        asking = _Asking()

        def check() -> None:
            still_the_same(client, now, begun=now is not found)
            # Last: looking takes several calls, each of which a machine may sleep through.
            self._context.check_lease()
            asking.begin()

        def check_again() -> None:
            not_published_since(client, now)
            self._context.check_lease()
            asking.begin()

        def sent(job_id: str) -> None:
            asking.taken = True
            self._context.check_lease()
            self._context.change_sets.note_job(version.id, job_id)
            crash_after("sent")

        try:
            job = send_batch(
                client,
                now,
                batch,
                attempts=_ATTEMPTS,
                timeout=self._context.spec.datasource.job_timeout,
                check=check,
                check_again=check_again,
                lost=asking.lose,
                sent=sent,
                progress=tell_progress(self._context.log, "uploading", clock=client.retry.clock),
            )
        except (JobFailedError, JobCancelledError) as error:
            error.args = (f"{error} {what_is_left(client, found)}",)
            raise
        except RefusedError as error:
            if asking.open:
                # Who may not look at a job does not know what it will have changed, nor whether it is over.
                raise UnknownOutcomeError(
                    f"{error} The change may have been taken and still come: the next refresh looks."
                ) from error
            error.args = (f"{error} {what_is_left(client, found)}",)
            raise
        self._context.log(" ".join(["done on the server", *job.notes]))
        return job.ended_at

    def check(
        self, client: TableauClient, found: FoundDatasource, version: Version, folder: Path, *, exactly: bool = True
    ) -> None:
        """Compare; what is not as it must be is not confirmed."""
        self._context.log("something may have changed on the server meanwhile: comparing its rows")
        compared = self.compare(client, found, version, folder, exactly=exactly)
        if version.manifest["fingerprint"] not in compared.fingerprints:
            raise NotAsIntendedError(
                f"{self._context.spec.name}: the rows of {found.shown} on {client.where} are not what they must be after this refresh."
                " Nothing is confirmed. Run again: the next refresh compares what is there, and brings the same keys."
            )

    def check_delivered(self, client: TableauClient, found: FoundDatasource, version: Version) -> tuple[str, ...]:
        """After a whole publish that something may have followed; a warning where nobody may look."""
        # Tableau's own refreshes may write equal values in other words.
        exactly = self._context.spec.delivery == "patch"
        try:
            self.check(client, found, version, self._context.work / "compared", exactly=exactly)
        except RefusedError as error:
            # Who may not download is not shown the revisions, either, and could never confirm anything.
            return (f"{error} So a publish by somebody else right after this one would not be noticed.",)
        return ()

    def compare(
        self,
        client: TableauClient,
        found: FoundDatasource,
        version: Version,
        folder: Path,
        intent: Intent | None = None,
        *,
        exactly: bool = False,
    ) -> Compared:
        """Download what the server holds and look at it; `exactly`: rows that look alike in sum are told apart."""
        try:
            shell, hyper = fetch_shell(client, found, folder, log=self._context.log)
            shape = shape_of(version)
            digests = content_digests(content_fingerprints(hyper, shape), shape)
            if exactly and version.manifest["fingerprint"] in digests and not _same_rows(hyper, version):
                digests = ()
            heals = intent is not None and intent.patch and self._heals(hyper, intent, version, folder)
            alike, bare = same_layout(hyper, version.extract), read_package(shell).is_bare
            return Compared(digests, heals, carries_keys(hyper, shape), alike, bare)
        finally:
            remove(folder)

    def _heals(self, hyper: Path, intent: Intent, version: Version, folder: Path) -> bool:
        """Whether sending the same keys again to what the server holds gives what was intended."""
        if not self._is_of(intent, version):
            return False
        change_set, shape, healed = self._change_set(version), shape_of(version), folder / "healed.hyper"
        try:
            replace_change(hyper, healed, change_set, self._context.change_sets.path(change_set.id), shape)
            return _same_rows(healed, version)
        except MachineError:
            # Nobody has looked: it may well be ours.
            raise
        except ExtractError:
            return False

    # After a crash

    def finish(
        self, client: TableauClient, server: ServerLook, intent: Intent, verdict: Aftermath
    ) -> tuple[Aftermath, ServerLook]:
        """Send again what a crash interrupted, under the same request ids, so that a job at work is joined.

        Known to be over, it cannot come late and undo what the next refresh brings. PARTIAL where that is all that is
        known.
        """
        version = self._context.known_version(intent.version)
        if version is None or server.found is None or not self._is_of(intent, version):
            self.outlast(client, intent)
            return Aftermath.PARTIAL, look_at_server(client, self._context.spec)
        folder = self._folder()
        try:
            payloads = self._payloads(version, folder, keyed=intent.keyed)
            base = intent.base_server_version or ""
            sent = self._send(client, server.found, version, payloads, base=base, keyed=intent.keyed)
            # Where the server had moved before, its request ids may be of content that is gone.
            if sent.doubtful or verdict is Aftermath.PARTIAL or server.version_text != intent.base_server_version:
                self.check(client, sent.found, version, folder / "compared")
        except MachineError:
            # What was sent may still be at work.
            raise
        except _IN_VAIN as error:
            self._context.log(f"what was interrupted could not be sent again: {error}")
            self.outlast(client, intent)
        else:
            return Aftermath.LANDED, ServerLook(server.project, sent.found)
        finally:
            remove(folder)
        return Aftermath.PARTIAL, look_at_server(client, self._context.spec)

    def outlast(self, client: TableauClient, intent: Intent) -> None:
        """Wait until the job that was sent is over: coming late it would change what is published from now on."""
        if intent.job is None:
            return
        self._context.log("waiting for the change that was sent before")
        try:
            wait_for_job(client, intent.job, what="change of data", timeout=self._context.spec.datasource.job_timeout)
        except (JobFailedError, JobCancelledError, JobVanishedError) as error:
            self._context.log(f"it is over: {error}")
        except RefusedError as error:
            raise UnknownOutcomeError(f"{error} A change that was sent before may still come.") from error

    def _is_of(self, intent: Intent, version: Version) -> bool:
        """Whether the change set is there as it was when the version was made of it; a run may have replaced it."""
        made = next((one for one in self._context.change_sets.pending() if one.id == intent.change_set), None)
        if made is None or made.decision != "incremental":
            return False
        return made.source_version == version.manifest["source_version"]

    def _change_set(self, version: Version) -> ChangeSet:
        return self._context.change_sets.get(version.manifest["change_set"])

    def _folder(self) -> Path:
        """A place for what is sent, empty."""
        folder = self._context.work / "patch"
        remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _same_rows(hyper: Path, version: Version) -> bool:
    shape = shape_of(version)
    return row_digest(hyper, shape) == row_digest(version.extract, shape)


def _changed_later(now: FoundDatasource, ended: datetime | None) -> bool:
    """Whether something may have changed it after our job; who does not know when that ended cannot tell."""
    return ended is None or (now.updated_at is not None and now.updated_at > ended + _LATER)
