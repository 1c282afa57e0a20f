"""The delivery `patch`: only the change is sent, and the server replaces its keys in the published Hyper file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import DatasourceError, ExtractError, MachineError
from tir_dagster.files import VirtualFile
from tir_dagster.hyper.payload import (
    PAYLOAD_SCHEMA,
    Payload,
    needs_key_column,
    with_key_column,
    write_payloads,
)
from tir_dagster.hyper.replace import staged_changes
from tir_dagster.measuring import moved
from tir_dagster.refresh.confirm import confirmation_of, intend
from tir_dagster.refresh.context import (
    Looked,
    Published,
    RefreshContext,
    ServerLook,
    publishing,
    remove,
    shapes_of,
)
from tir_dagster.refresh.datasource import look_at_server
from tir_dagster.refresh.deliveries import RecoveredPublish
from tir_dagster.refresh.deliveries.whole import outlast, publish_whole
from tir_dagster.refresh.server_content import NotAsIntendedError, changes_known_until, check_content, is_change_of
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.refresh.state.versions import Version
from tir_dagster.retries import NO_PAUSE, Repeat, RetryPolicy
from tir_dagster.spec.tables import order_of_reference
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, moved_on, reread, server_version
from tir_dagster.tableau.failures import Fate, RefusedError, UnknownOutcomeError, reading, understand
from tir_dagster.tableau.jobs import (
    FinishedJob,
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    changes_since,
    wait_for_job,
)
from tir_dagster.tableau.outcome import ForeignPublishError, PublishOutcome, check_undisturbed
from tir_dagster.tableau.transfer import UPLOAD_GONE, Progress, tell_progress, upload

# The first REST version that changes data in place.
PATCH_SINCE = (3, 13)
_HYPER = "hyper"
_TOO_LARGE = "413000"
# A failed job is sent once more: the batch replaces keys, so it repairs whatever part of it was done.
_ATTEMPTS = RetryPolicy(tries=2, backoff=NO_PAUSE)


@dataclass(frozen=True)
class Batch:
    """One request: the payload's keys leave the tables, the payload's rows take their place, in one transaction."""

    payload: Payload
    # The identity of this request; the server runs it once.
    identity: str

    def request_id(self, attempt: int) -> str:
        return "tir-" + hashlib.sha256(f"{self.identity} {attempt}".encode()).hexdigest()[:40]

    def actions(self) -> list[dict[str, Any]]:
        actions: list[dict[str, Any]] = []
        for part in self.payload.tables:
            schema, name = part.table
            target = {"target-schema": schema, "target-table": name}
            actions += [
                {
                    "action": "delete",
                    **target,
                    "source-schema": PAYLOAD_SCHEMA,
                    "source-table": part.keys,
                    "condition": _same(part.key_columns),
                },
                {"action": "insert", **target, "source-schema": PAYLOAD_SCHEMA, "source-table": part.rows},
            ]
        return actions


def _same(columns: Sequence[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"op": "eq", "target-col": name, "source-col": name} for name in columns]
    return parts[0] if len(parts) == 1 else {"op": "and", "args": parts}


def check_patchable(client: TableauClient, extract: str, datasource: FoundDatasource | None) -> None:
    """Raise if the server is too old or the datasource is no Hyper file, before anything is read."""
    if client.rest_version < PATCH_SINCE:
        version = ".".join(map(str, client.rest_version))
        raise DatasourceError(
            f"{extract}: the delivery `patch` changes data in place, which takes REST 3.13 (Tableau Server 2021.3);"
            f" {client.where} speaks {version}. Choose the delivery `republish`."
        )
    live_kinds = sorted({connection.type for connection in datasource.connections} - {_HYPER}) if datasource else []
    if datasource is not None and live_kinds:
        raise DatasourceError(
            f"{extract}: {datasource.shown} on {client.where} is an extract of a {' and a '.join(live_kinds)} connection, and the delivery"
            " `patch` works on published Hyper files only. Choose the delivery `republish` or `server` for it, or publish"
            " under another name: then a Hyper file is created."
        )


def send_batch(
    client: TableauClient,
    datasource: FoundDatasource,
    batch: Batch,
    *,
    timeout: float,
    check: Callable[[], None],
    check_again: Callable[[], None],
    lost: Callable[[], None],
    sent: Callable[[str], None],
    progress: Progress | None = None,
) -> FinishedJob:
    """Send one batch and wait for its end.

    A batch replaces keys, so a failed job can be repeated whatever it has done. `check` runs right before the first
    request that changes something, `check_again` before later ones, when the change may be there already. `lost` is
    called when the server may have accepted a request without an answer, `sent` with the job of an accepted one.
    """
    what = f"change the data of {datasource.shown}"
    begun = False

    def ask(request: Callable[[], str]) -> str:
        nonlocal begun
        (check_again if begun else check)()
        try:
            job_id = request()
        except Exception as error:
            failure = understand(error)
            if failure is None or failure.fate is Fate.UNKNOWN:
                begun = True
                lost()
            raise
        begun = True
        return job_id

    numbers = count(1)

    def send() -> FinishedJob:
        job_id = _start(client, datasource, batch, next(numbers), what, ask=ask, progress=progress)
        sent(job_id)
        return wait_for_job(client, job_id, what=what, timeout=timeout)

    return _ATTEMPTS.run(send, may_repeat=lambda error: Repeat() if isinstance(error, JobFailedError) else None)


def _start(
    client: TableauClient,
    datasource: FoundDatasource,
    batch: Batch,
    attempt: int,
    what: str,
    *,
    ask: Callable[[Callable[[], str]], str],
    progress: Progress | None,
) -> str:
    """Start the job and return its id. A lost answer is safe: the server recognises a repeated request by its id."""

    def patch(server: Any, upload_id: str) -> str:
        endpoint = server.datasources
        answer = endpoint.patch_request(
            f"{endpoint.baseurl}/{datasource.id}/data?uploadSessionId={upload_id}",
            json.dumps({"actions": batch.actions()}),
            "application/json",
            parameters={"headers": {"requestid": batch.request_id(attempt)}},
        )
        with reading(what, where=client.where):
            return str(TSC.JobItem.from_response(answer.content, server.namespace)[0].id)

    for last in (False, True):
        try:
            upload_id = upload(client, VirtualFile.of(batch.payload.path), doing=what, progress=progress)
            request = partial(patch, upload_id=upload_id)
            return client.call(lambda server, request=request: ask(partial(request, server)), doing=what)  # type: ignore[misc]
        except RefusedError as error:
            if error.code == _TOO_LARGE:
                more = "Or send smaller pieces: lower `datasource.patch_limit_mb` in the spec."
                raise RefusedError(f"{error} {more}", code=error.code) from error
            if error.code != UPLOAD_GONE or last:
                raise
    raise AssertionError("the second try raises or returns")


def check_unchanged(client: TableauClient, datasource: FoundDatasource, *, begun: bool = False) -> None:
    """Raise if the datasource is no longer what was looked at. `begun`: parts of the change are there."""
    now = reread(client, datasource)
    if now is None or server_version(now) != server_version(datasource):
        state = f"it is now {server_version(now)}" if now is not None else "it is gone"
        left = "Parts of the change are there" if begun else "Nothing was changed"
        raise ForeignPublishError(
            f"Could not change the data of {datasource.shown} undisturbed: somebody else changed it on {client.where} (expected"
            f" {server_version(datasource)}, {state}). {left}. Run again: the next refresh starts from what is there."
        )


def check_not_republished(client: TableauClient, datasource: FoundDatasource) -> None:
    """Raise if somebody published meanwhile; changed rows may be ours. Call it before a request is sent again."""
    now = reread(client, datasource)
    # Without revisions nobody can tell whose change it is.
    if now is None or (now.revision is None and server_version(now) != server_version(datasource)):
        state = "changed" if now is not None else "gone"
        raise ForeignPublishError(
            f"Could not change the data of {datasource.shown} on {client.where} again: it is {state}, perhaps by somebody else."
            " Nothing is confirmed. Run again: the next refresh compares what is there."
        )
    check_unpublished(client, datasource, now)


def change_left_behind(client: TableauClient, datasource: FoundDatasource, *, taken: bool) -> str:
    """Return a sentence on what people may see after a change that did not finish; `taken`: the server accepted a part of it."""
    if not taken:
        return "Nothing was changed."
    try:
        now = reread(client, datasource)
    except DatasourceError:
        now = None
    if now is not None and server_version(now) == server_version(datasource):
        # Not every server shows changed data in its version.
        return (
            "The datasource shows no change, but whether a part of the change is there is unknown."
            " The next refresh makes sure: run it soon."
        )
    return (
        "A part of the change may be there: people may see some keys new, others old or missing."
        " The next refresh repairs it: run it soon."
    )


def check_unpublished(client: TableauClient, before: FoundDatasource, now: FoundDatasource) -> None:
    """Raise if there is a new revision: changed data adds none, so somebody else published."""
    check_undisturbed(before, now, where=client.where, meanwhile="its data was changed")


# A datasource that changed this long after the end of our job was changed by somebody else, too.
_LATER = timedelta(seconds=5)
_SECOND = timedelta(seconds=1)


# Why a change cannot be sent again: a whole publish brings it instead.
_IN_VAIN = (JobFailedError, JobCancelledError, JobVanishedError, RefusedError, ExtractError, NotAsIntendedError)


@dataclass(frozen=True)
class SentChange:
    """The datasource after all parts were sent, and whether its rows must be compared to be sure."""

    datasource: FoundDatasource
    doubtful: bool
    # When the last job ended.
    ended_at: datetime | None
    warnings: tuple[str, ...] = ()


@dataclass
class _Asking:
    """Whether one of our requests may still be running unseen."""

    taken: bool = False
    lost: bool = False
    # All jobs that the server accepted; and whether an earlier run may have sent the same change.
    jobs: list[str] = field(default_factory=list)
    again: bool = False

    def begin(self) -> None:
        """Note a new request. If the one before was accepted, its job has ended: otherwise there would be no new one."""
        self.lost, self.taken = self.lost and not self.taken, False

    def lose(self) -> None:
        self.lost = True

    @property
    def open(self) -> bool:
        """Whether a job may be running: of an accepted request, or of one whose answer was lost."""
        return self.taken or self.lost


class Patch:
    """Sends only the change.

    The version is applied and verified locally as for any delivery: the server must reach the same content. Only known
    content is patched: if a change may have arrived in part, the whole version is published instead.
    """

    def __init__(self, context: RefreshContext) -> None:
        self._context = context

    def publish(self, looked: Looked, version: Version) -> Published:
        """Send the change set, or the whole file if the change alone is not enough."""
        if self._fits(looked, version):
            return self._publish_change(looked, version)
        return self.publish_whole(looked, version)

    def publish_whole(self, looked: Looked, version: Version) -> Published:
        """Publish the whole file."""
        # With a key column, if need be, so that later changes can be sent alone.
        keyed = self._needs_key(version)
        file = self._with_keys(version) if keyed else nullcontext(version.extract)
        return publish_whole(self._context, looked, version, file=file, keyed=keyed)

    def _needs_key(self, version: Version) -> bool:
        """Whether the rows of one table need a key column; then all tables have one."""
        parts = self._context.spec.parts
        return any(
            # That a query's column is NOT NULL is only inferred.
            (table in parts and parts[table].query is not None) or needs_key_column(shape)
            for table, shape in shapes_of(version).items()
        )

    @contextmanager
    def _with_keys(self, version: Version) -> Iterator[Path]:
        """Give a Hyper file with a key column, to be published whole."""
        folder = self._folder()
        target = folder / "keyed.hyper"
        try:
            with_key_column(version.extract, target, list(shapes_of(version).values()))
            yield target
        finally:
            remove(folder)

    def _fits(self, looked: Looked, version: Version) -> bool:
        """Whether the change alone can be sent; otherwise the whole file is published once."""
        confirmed, base = looked.confirmed, looked.base
        if looked.server.datasource is None or confirmed is None or base is None:
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
        if not confirmed.keyed and any(self._needs_key(either) for either in (base, version)):
            self._context.log(
                "the published rows have no key that the server can test: publishing all of them, with one"
            )
            return False
        return not version.shell.is_file()

    def _publish_change(self, looked: Looked, version: Version) -> Published:
        """Send the change set over exactly what was looked at."""
        assert looked.server.datasource is not None
        assert looked.confirmed is not None
        keyed, folder = looked.confirmed.keyed, self._folder()
        with publishing(self._context) as client:
            try:
                # Before the intent: what cannot be sent at all leaves nothing behind.
                payloads = self._payloads(version, folder, keyed=keyed)
                intend(self._context, looked, version, patch=True, keyed=keyed)
                crash_after("intended")
                base = str(looked.server.version)
                since = changes_known_until(looked.confirmed)
                sent = self._send(client, looked.server.datasource, version, payloads, base=base, since=since)
                if sent.doubtful:
                    check_content(self._context, client, sent.datasource, version)
            finally:
                remove(folder)
        crash_after("published")
        server = ServerLook(looked.server.project, sent.datasource)
        confirmation = confirmation_of(
            self._context, version, server, before=looked.confirmed, keyed=keyed, jobs_until=sent.ended_at
        )
        sent_bytes = sum(payload.bytes for payload in payloads)
        return Published(confirmation, sent.datasource, sent.warnings, sent_bytes=sent_bytes)

    def _payloads(self, version: Version, folder: Path, *, keyed: bool) -> list[Payload]:
        change_set, spec = self._change_set(version), self._context.spec
        changes = staged_changes(change_set, self._context.change_sets.path(change_set.id), shapes_of(version))
        # What others refer to comes first, where the change is too large for one request: nothing refers to what is not there yet.
        ordered = order_of_reference(list(changes), spec.relationships)
        most_bytes = int(spec.datasource.patch_limit_mb * 1_000_000)
        payloads = write_payloads(
            version.extract, folder, [changes[table] for table in ordered], keyed=keyed, most_bytes=most_bytes
        )
        if len(changes) > 1 and len(payloads) > 1:
            self._context.log(
                f"the change is larger than datasource.patch_limit_mb: sent table by table, {', '.join(ordered)}; between two requests"
                " people may see new rows of one beside old rows of another"
            )
        return payloads

    def _send(
        self,
        client: TableauClient,
        datasource: FoundDatasource,
        version: Version,
        payloads: list[Payload],
        *,
        base: str,
        since: datetime | None = None,
        again: bool = False,
    ) -> SentChange:
        """Send all parts one after the other. `base` is the server's version that they change, a part of their ids.

        With `since`, until when the server's changes are known, its jobs tell whether somebody else changed the data meanwhile.
        """
        moved(rows=sum(payload.rows for payload in payloads), bytes=sum(payload.bytes for payload in payloads))
        manifest = version.manifest
        whole = f"{self._context.spec.name} {version.id} {manifest['change_set']} {manifest['source_version']}"
        now, doubtful, ended_at = datasource, False, None
        asking = _Asking(again=again)
        for number, payload in enumerate(payloads, 1):
            part = f"{number} of {len(payloads)}"
            batch = Batch(payload, identity=f"{whole} {payload.part} {base}")
            self._context.log(
                f"sending {payload.keys:,} keys and {payload.rows:,} rows, {payload.bytes / 1e6:,.1f} MB ({part})"
            )
            ended_at = None
            try:
                ended_at = self._send_one(client, datasource, now, version, batch, asking)
            except JobVanishedError:
                self._context.log("the server forgot the job: its rows are compared at the end")
            now = moved_on(client, now)
            check_unpublished(client, datasource, now)
            doubtful = doubtful or _changed_later(now, ended_at) or now.revision is None
        others = changes_since(client, now, since, own=asking.jobs) if since is not None else ()
        warnings = (
            (_UNNOTICED.format(shown=now.shown, where=client.where),)
            if others is None and _hides(datasource, now, ended_at)
            else ()
        )
        return SentChange(now, doubtful or bool(others), ended_at, warnings)

    def _send_one(
        self,
        client: TableauClient,
        datasource: FoundDatasource,
        now: FoundDatasource,
        version: Version,
        batch: Batch,
        asking: _Asking,
    ) -> datetime | None:
        """Send one part to the datasource of `now`; `datasource` is the one before the first part."""
        asking.taken = asking.lost = False

        def check() -> None:
            check_unchanged(client, now, begun=now is not datasource)
            # Last: looking takes several calls, each of which a machine may sleep through.
            self._context.check_lease()
            asking.begin()

        def check_again() -> None:
            check_not_republished(client, now)
            self._context.check_lease()
            asking.begin()

        def sent(job_id: str) -> None:
            asking.taken = True
            asking.jobs.append(job_id)
            self._context.check_lease()
            self._context.change_sets.note_job(version.id, job_id)
            crash_after("sent")

        try:
            job = send_batch(
                client,
                now,
                batch,
                timeout=self._context.spec.datasource.job_timeout,
                check=check,
                check_again=check_again,
                lost=asking.lose,
                sent=sent,
                progress=tell_progress(self._context.log, "uploading", clock=client.retry.clock),
            )
        except (JobFailedError, JobCancelledError) as error:
            error.args = (f"{error} {change_left_behind(client, datasource, taken=True)}",)
            raise
        except RefusedError as error:
            if asking.open:
                # Without permission to read the job, its result is unknown.
                raise UnknownOutcomeError(
                    f"{error} The server may still apply the change: the next refresh checks that."
                ) from error
            taken = asking.again or bool(asking.jobs)
            error.args = (f"{error} {change_left_behind(client, datasource, taken=taken)}",)
            raise
        self._context.log(" ".join(["done on the server", *job.notes]))
        return job.ended_at

    # After a crash

    def recover(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, confirmed: Confirmation | None
    ) -> RecoveredPublish:
        """Send again what may not have arrived; if somebody else published, wait for our job to end."""
        if last.outcome in (PublishOutcome.NOT_LANDED, PublishOutcome.PARTIAL):
            since = changes_known_until(confirmed) if confirmed is not None else None
            return self._send_again(client, last, intent, since)
        if last.outcome is PublishOutcome.FOREIGN and intent.job is not None:
            outlast(self._context, client, intent)
            return RecoveredPublish(last.outcome, look_at_server(client, self._context.spec))
        if last.outcome is PublishOutcome.LANDED and intent.job is not None:
            # If its end were unknown, our job would count as somebody else's. The rows are right, whoever may look at jobs.
            with suppress(UnknownOutcomeError):
                return replace(last, ended_at=outlast(self._context, client, intent))
        return last

    def _send_again(
        self, client: TableauClient, last: RecoveredPublish, intent: Intent, since: datetime | None
    ) -> RecoveredPublish:
        """Send an interrupted change again under the same request ids, so that a running job is joined.

        Once it has ended it cannot undo what the next refresh brings. Return PARTIAL if nothing more is known.
        """
        server = last.server
        version = self._context.known_version(intent.version)
        if version is None or server.datasource is None or not is_change_of(self._context, intent, version):
            outlast(self._context, client, intent)
            return RecoveredPublish(PublishOutcome.PARTIAL, look_at_server(client, self._context.spec))
        folder = self._folder()
        try:
            payloads = self._payloads(version, folder, keyed=intent.keyed)
            base = intent.base_server_version or ""
            sent = self._send(client, server.datasource, version, payloads, base=base, since=since, again=True)
            # If the server's version changed before, the server may know the request ids from content that is gone.
            if (
                sent.doubtful
                or last.outcome is PublishOutcome.PARTIAL
                or server.version_text != intent.base_server_version
            ):
                check_content(self._context, client, sent.datasource, version)
        except MachineError:
            # The sent job may still be running.
            raise
        except _IN_VAIN as error:
            self._context.log(f"the interrupted change could not be sent again: {error}")
            outlast(self._context, client, intent)
        else:
            now = ServerLook(server.project, sent.datasource)
            return RecoveredPublish(PublishOutcome.LANDED, now, sent.ended_at)
        finally:
            remove(folder)
        return RecoveredPublish(PublishOutcome.PARTIAL, look_at_server(client, self._context.spec))

    def _change_set(self, version: Version) -> ChangeSet:
        return self._context.change_sets.get(version.manifest["change_set"])

    def _folder(self) -> Path:
        """Return an empty folder for the files to send."""
        folder = self._context.work / "patch"
        remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


# What to say where others' changes of data leave no trace.
_UNNOTICED = (
    "{where} does not show in `updatedAt` that the data of {shown} changed, and lists no jobs to this user: refreshes and changes of"
    " data by others are not noticed. Use an administrator's token, or set checks: {{server: true}}, with which a verification compares the rows."
)


def _hides(before: FoundDatasource, now: FoundDatasource, ended: datetime | None) -> bool:
    """Whether the server does not show our own change in its version."""
    if ended is None or before.updated_at is None:
        return False
    return server_version(now) == server_version(before) and ended > before.updated_at + _SECOND


def _changed_later(now: FoundDatasource, ended: datetime | None) -> bool:
    """Whether the datasource may have changed after our job; true if the end of the job is unknown."""
    return ended is None or (now.updated_at is not None and now.updated_at > ended + _LATER)
