"""The delivery `patch`: only the change travels, and the server replaces its keys in the published Hyper file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, reread, server_version
from tir_dagster.tableau.failures import Fate, RefusedError, reading, understand
from tir_dagster.tableau.jobs import FinishedJob, JobFailedError, wait_for_job
from tir_dagster.tableau.publishing import ForeignPublishError, check_undisturbed
from tir_dagster.tableau.upload import UPLOAD_GONE, Progress, upload
from tir_dagster.virtual_file import VirtualFile

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
        " The next refresh mends it: run it soon."
    )


def check_unpublished(client: TableauClient, before: FoundDatasource, now: FoundDatasource) -> None:
    """Changed data adds no revision, so a new one is somebody else's publish in between."""
    check_undisturbed(before, now, where=client.where, meanwhile="its data was changed")
