"""The delivery `patch`: only the change travels, and the server replaces its keys in the published Hyper file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.files import VirtualFile
from tir_dagster.hyper.payload import (
    KEYS_TABLE,
    PAYLOAD_SCHEMA,
    ROWS_TABLE,
    Payload,
    needs_key_column,
    with_key_column,
    write_payloads,
)
from tir_dagster.hyper.replace import ExtractShape
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
from tir_dagster.refresh.datasource import look_at_server
from tir_dagster.refresh.deliveries import Recovered
from tir_dagster.refresh.deliveries.whole import publish_whole
from tir_dagster.refresh.server_content import NotAsIntendedError, check_content, is_change_of
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import SHELL, Version
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, reread, server_version, settled
from tir_dagster.tableau.failures import Fate, RefusedError, UnknownOutcomeError, reading, understand
from tir_dagster.tableau.jobs import FinishedJob, JobCancelledError, JobFailedError, JobVanishedError, wait_for_job
from tir_dagster.tableau.outcome import ForeignPublishError, PublishOutcome, check_undisturbed
from tir_dagster.tableau.upload import UPLOAD_GONE, Progress, tell_progress, upload

# The first REST version that changes data in place.
PATCH_SINCE = (3, 13)
_HYPER = "hyper"
_TOO_LARGE = "413000"


@dataclass(frozen=True)
class Table:
    """A table of a Hyper file."""

    schema: str
    name: str


@dataclass(frozen=True)
class Batch:
    """One request: the payload's keys leave the table, the payload's rows take their place, in one transaction."""

    payload: Path
    target: Table
    keys: Table
    rows: Table
    key_columns: Sequence[str]
    # What tells this request from every other one; the server runs it once.
    identity: str

    def request_id(self, attempt: int) -> str:
        return "tir-" + hashlib.sha256(f"{self.identity} {attempt}".encode()).hexdigest()[:40]

    def actions(self) -> list[dict[str, Any]]:
        target = {"target-schema": self.target.schema, "target-table": self.target.name}
        return [
            {
                "action": "delete",
                **target,
                "source-schema": self.keys.schema,
                "source-table": self.keys.name,
                "condition": _same(self.key_columns),
            },
            {"action": "insert", **target, "source-schema": self.rows.schema, "source-table": self.rows.name},
        ]


def _same(columns: Sequence[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"op": "eq", "target-col": name, "source-col": name} for name in columns]
    return parts[0] if len(parts) == 1 else {"op": "and", "args": parts}


def check_patchable(client: TableauClient, extract: str, found: FoundDatasource | None) -> None:
    """Refused now rather than after everything was read: an old server, or a datasource that is no Hyper file."""
    if client.rest_version < PATCH_SINCE:
        version = ".".join(map(str, client.rest_version))
        raise DatasourceError(
            f"{extract}: the delivery `patch` changes data in place, which takes REST 3.13 (Tableau Server 2021.3);"
            f" {client.where} speaks {version}. Choose the delivery `republish`."
        )
    live = sorted({one.type for one in found.connections} - {_HYPER}) if found else []
    if found is not None and live:
        raise DatasourceError(
            f"{extract}: {found.shown} on {client.where} is an extract of a {' and a '.join(live)} connection, and the delivery"
            " `patch` works on published Hyper files only. Choose the delivery `republish` or `server` for it, or publish"
            " under another name: then a Hyper file is created."
        )


def send_batch(
    client: TableauClient,
    found: FoundDatasource,
    batch: Batch,
    *,
    attempts: int,
    timeout: float,
    check: Callable[[], None],
    check_again: Callable[[], None],
    lost: Callable[[], None],
    sent: Callable[[str], None],
    progress: Progress | None = None,
) -> FinishedJob:
    """Send one batch and wait for its end.

    A batch replaces keys, so a job that failed may be followed by a second attempt whatever it had done. `check` runs
    right before a request that changes something, `check_again` instead once an earlier one may have done so: what is
    there may be ours by then. `lost` is told of a request that the server may have taken, `sent` of the job of one that it
    has taken.
    """
    what = f"change the data of {found.shown}"
    begun = False

    def ask(request: Callable[[], str]) -> str:
        nonlocal begun
        (check_again if begun else check)()
        try:
            job_id = request()
        except Exception as error:
            trouble = understand(error)
            if trouble is None or trouble.fate is Fate.UNKNOWN:
                begun = True
                lost()
            raise
        begun = True
        return job_id

    for attempt in range(1, attempts + 1):
        job_id = _start(client, found, batch, attempt, what, ask=ask, progress=progress)
        sent(job_id)
        try:
            return wait_for_job(client, job_id, what=what, timeout=timeout)
        except JobFailedError:
            if attempt == attempts:
                raise
    raise AssertionError("there is a first attempt")


def _start(
    client: TableauClient,
    found: FoundDatasource,
    batch: Batch,
    attempt: int,
    what: str,
    *,
    ask: Callable[[Callable[[], str]], str],
    progress: Progress | None,
) -> str:
    """The job's id. Repeated when the answer is lost: the server knows the request again by its id."""

    def patch(server: Any, upload_id: str) -> str:
        endpoint = server.datasources
        answer = endpoint.patch_request(
            f"{endpoint.baseurl}/{found.id}/data?uploadSessionId={upload_id}",
            json.dumps({"actions": batch.actions()}),
            "application/json",
            parameters={"headers": {"requestid": batch.request_id(attempt)}},
        )
        with reading(what, where=client.where):
            return str(TSC.JobItem.from_response(answer.content, server.namespace)[0].id)

    for last in (False, True):
        try:
            upload_id = upload(client, VirtualFile.of(batch.payload), doing=what, progress=progress)
            request = partial(patch, upload_id=upload_id)
            return client.call(lambda server, request=request: ask(partial(request, server)), doing=what)  # type: ignore[misc]
        except RefusedError as error:
            if error.code == _TOO_LARGE:
                more = "Or send smaller pieces: lower `datasource.patch_limit_mb` in the spec."
                raise RefusedError(f"{error} {more}", code=error.code) from error
            if error.code != UPLOAD_GONE or last:
                raise
    raise AssertionError("the second try raises or returns")


def still_the_same(client: TableauClient, found: FoundDatasource, *, begun: bool = False) -> None:
    """Right before the request that changes it: it must be what was looked at. `begun`: parts of the change are there."""
    now = reread(client, found)
    if now is None or server_version(now) != server_version(found):
        state = f"it is now {server_version(now)}" if now is not None else "it is gone"
        left = "Parts of the change are there" if begun else "Nothing was changed"
        raise ForeignPublishError(
            f"Could not change the data of {found.shown} undisturbed: somebody else changed it on {client.where} (expected"
            f" {server_version(found)}, {state}). {left}. Run again: the next refresh starts from what is there."
        )


def not_published_since(client: TableauClient, found: FoundDatasource) -> None:
    """Before a request is sent again: its rows may be changed by us, but nobody may have published others."""
    now = reread(client, found)
    # Without revisions nobody can tell whose change it is.
    if now is None or (now.revision is None and server_version(now) != server_version(found)):
        state = "changed" if now is not None else "gone"
        raise ForeignPublishError(
            f"Could not change the data of {found.shown} on {client.where} again: it is {state}, perhaps by somebody else."
            " Nothing is confirmed. Run again: the next refresh compares what is there."
        )
    check_unpublished(client, found, now)


def what_is_left(client: TableauClient, found: FoundDatasource) -> str:
    """After a change that did not come to its end: what people may see, as a sentence."""
    try:
        now = reread(client, found)
    except DatasourceError:
        now = None
    if now is not None and server_version(now) == server_version(found):
        return "Nothing was changed."
    return (
        "A part of the change may be there: people may see some keys new, others old or missing."
        " The next refresh repairs it: run it soon."
    )


def check_unpublished(client: TableauClient, before: FoundDatasource, now: FoundDatasource) -> None:
    """Changed data adds no revision, so a new one is somebody else's publish in between."""
    check_undisturbed(before, now, where=client.where, meanwhile="its data was changed")


# A job that failed is sent once more: the batch replaces keys, so it heals whatever part of it was done.
_ATTEMPTS = 2
# A datasource that changed so much later than our job ended was changed by somebody else, too.
_LATER = timedelta(seconds=5)


# Why a change cannot be sent again: a whole publish brings it instead.
_IN_VAIN = (JobFailedError, JobCancelledError, JobVanishedError, RefusedError, ExtractError, NotAsIntendedError)


@dataclass(frozen=True)
class Sent:
    """What the server says after all parts: the datasource, and whether its rows must be compared to be sure."""

    found: FoundDatasource
    doubtful: bool


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


class Patch:
    """Sends the change alone.

    The version is applied and verified locally as for any delivery: it is what the server must come to. Only content
    that is known is patched: where a change may have arrived in part, the whole version is published instead.
    """

    def __init__(self, context: RefreshContext) -> None:
        self._context = context

    def publish(self, looked: Looked, version: Version) -> Published:
        """Send the change set, or the whole file where the change alone would not do."""
        if self._fits(looked, version):
            return self._publish_change(looked, version)
        # With a key column, if need be, so that later changes can be sent alone.
        keyed = self._needs_key(shape_of(version))
        file = self._with_keys(version) if keyed else nullcontext(version.extract)
        return publish_whole(self._context, looked, version, file=file, keyed=keyed)

    def _needs_key(self, shape: ExtractShape) -> bool:
        # What a query gives is NOT NULL only as far as somebody's reasoning about it goes.
        return self._context.spec.query is not None or needs_key_column(shape)

    @contextmanager
    def _with_keys(self, version: Version) -> Iterator[Path]:
        """Make the Hyper file to publish whole, with a key column."""
        folder = self._folder()
        target = folder / "keyed.hyper"
        try:
            with_key_column(version.extract, target, shape_of(version))
            yield target
        finally:
            remove(folder)

    def _fits(self, looked: Looked, version: Version) -> bool:
        """Whether the change alone can be sent; otherwise the whole file is, once."""
        confirmed, base = looked.confirmed, looked.base
        if looked.server.found is None or confirmed is None or base is None:
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

    def _publish_change(self, looked: Looked, version: Version) -> Published:
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
                sent = self._send(client, looked.server.found, version, payloads, base=base)
                if sent.doubtful:
                    check_content(self._context, client, sent.found, version)
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
    ) -> Sent:
        """All parts, one after the other. `base` is the server's version that they change: it belongs to their ids."""
        moved(rows=sum(payload.rows for payload in payloads), bytes=sum(payload.bytes for payload in payloads))
        manifest = version.manifest
        whole = f"{self._context.spec.name} {version.id} {manifest['change_set']} {manifest['source_version']}"
        now, doubtful = found, False
        for number, payload in enumerate(payloads, 1):
            part = f"{number} of {len(payloads)}"
            batch = Batch(
                payload=payload.path,
                target=Table(*payload.table),
                keys=Table(PAYLOAD_SCHEMA, KEYS_TABLE),
                rows=Table(PAYLOAD_SCHEMA, ROWS_TABLE),
                key_columns=payload.key_columns,
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

    # After a crash

    def recover(
        self, client: TableauClient, last: Recovered, intent: Intent, confirmed: Confirmation | None
    ) -> Recovered:
        """Send again what may not have arrived; wait for what was sent before somebody else's publish."""
        del confirmed
        if last.outcome in (PublishOutcome.NOT_LANDED, PublishOutcome.PARTIAL):
            return self._send_again(client, last, intent)
        if last.outcome is PublishOutcome.FOREIGN and intent.job is not None:
            self._outlast(client, intent)
            return Recovered(last.outcome, look_at_server(client, self._context.spec))
        return last

    def _send_again(self, client: TableauClient, last: Recovered, intent: Intent) -> Recovered:
        """Send again what a crash interrupted, under the same request ids, so that a job at work is joined.

        Known to be over, it cannot come late and undo what the next refresh brings. PARTIAL where that is all that is
        known.
        """
        server = last.server
        version = self._context.known_version(intent.version)
        if version is None or server.found is None or not is_change_of(self._context, intent, version):
            self._outlast(client, intent)
            return Recovered(PublishOutcome.PARTIAL, look_at_server(client, self._context.spec))
        folder = self._folder()
        try:
            payloads = self._payloads(version, folder, keyed=intent.keyed)
            base = intent.base_server_version or ""
            sent = self._send(client, server.found, version, payloads, base=base)
            # Where the server had moved before, its request ids may be of content that is gone.
            if (
                sent.doubtful
                or last.outcome is PublishOutcome.PARTIAL
                or server.version_text != intent.base_server_version
            ):
                check_content(self._context, client, sent.found, version)
        except MachineError:
            # What was sent may still be at work.
            raise
        except _IN_VAIN as error:
            self._context.log(f"what was interrupted could not be sent again: {error}")
            self._outlast(client, intent)
        else:
            return Recovered(PublishOutcome.LANDED, ServerLook(server.project, sent.found))
        finally:
            remove(folder)
        return Recovered(PublishOutcome.PARTIAL, look_at_server(client, self._context.spec))

    def _outlast(self, client: TableauClient, intent: Intent) -> None:
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

    def _change_set(self, version: Version) -> ChangeSet:
        return self._context.change_sets.get(version.manifest["change_set"])

    def _folder(self) -> Path:
        """A place for what is sent, empty."""
        folder = self._context.work / "patch"
        remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _changed_later(now: FoundDatasource, ended: datetime | None) -> bool:
    """Whether something may have changed it after our job; who does not know when that ended cannot tell."""
    return ended is None or (now.updated_at is not None and now.updated_at > ended + _LATER)
