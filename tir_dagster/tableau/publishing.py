"""Publish a package: check, send, send again if it did not land; never over what somebody else published meanwhile."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.config import BYTES_PER_MB, config
from urllib3.fields import RequestField
from urllib3.filepost import encode_multipart_formdata

from tir_dagster.errors import DatasourceError
from tir_dagster.files import VirtualFile
from tir_dagster.tableau.client import TableauClient, patience
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    FoundProject,
    ServerVersion,
    look_for_datasource,
    reread,
    server_version,
)
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError, UnreadableAnswerError, reading
from tir_dagster.tableau.jobs import (
    JobCancelledError,
    JobFailedError,
    JobVanishedError,
    outlast_publishes,
    shows_jobs,
    wait_for_job,
)
from tir_dagster.tableau.outcome import ForeignPublishError, PublishOutcome, PublishUnknownError, outcome_by_revisions
from tir_dagster.tableau.settings import (
    ConnectionCredential,
    Seen,
    check_credentials,
    check_settable,
    credential_to_publish,
    nothing,
)
from tir_dagster.tableau.transfer import UPLOAD_GONE, Progress, upload

_KINDS = (".tdsx", ".hyper")
# For one request the client holds the whole file in memory several times.
_MOST_AT_ONCE_MB = 8
# The first REST version that publishes by a job.
_JOBS_SINCE = (3, 0)
# Called right before a request that publishes: if it raises, nothing is sent.
Check = Callable[[], None]


def always() -> None:
    """Allow every publish."""


@dataclass(frozen=True)
class ByJob:
    """Publish packages of this size and more by a job of the server, and wait for it.

    `asked` is called right before the request, because its answer may be lost, and `taken` with the job's id.
    """

    from_bytes: int
    timeout: float
    taken: Callable[[str], None]
    asked: Check = always


def publish(
    client: TableauClient,
    package: Path | VirtualFile,
    *,
    project: FoundProject,
    name: str,
    overwrite: bool = False,
    expected: ServerVersion | None = None,
    connections: Sequence[ConnectionCredential] = (),
    servers: Collection[str] = (),
    progress: Progress | None = None,
    check: Check = always,
    seen: Seen = nothing,
    inferred: Check = always,
    by_job: ByJob | None = None,
) -> FoundDatasource:
    """Publish a .tdsx or .hyper file, which need not be on the disk; return the datasource afterwards.

    With `expected`, raise ForeignPublishError if the datasource is no longer that version. Without it, `overwrite`
    replaces whatever is there at the start. If the answer of a publish is lost, look for it on the server and send it
    again only if it is not there and no job can still bring it; `inferred` is called if it is there, so that its rows can be compared. `check` may
    raise right before every publishing request; `seen` receives the datasource that is about to be overwritten.

    `connections` are the credentials that the datasource gets, and `servers` the addresses that the package reads from:
    by them it is decided whether the publish itself carries credentials. The caller sets the others afterwards.
    """
    file = VirtualFile.of(package) if isinstance(package, Path) and package.is_file() else package
    if isinstance(file, Path) or file.kind not in _KINDS:
        raise DatasourceError(
            f"Could not publish {file if isinstance(file, Path) else file.name} as datasource {name!r}: it must be a {' or '.join(_KINDS)} file that exists."
        )
    can_wait = client.rest_version >= _JOBS_SINCE and shows_jobs(client)
    if by_job is not None and (file.size < by_job.from_bytes or not can_wait):
        by_job = None
    credential = credential_to_publish(connections, servers)
    parcel = Parcel(file, project, name, overwrite, tuple(connections), credential, as_job=by_job is not None)
    return _Publishing(client, parcel, progress, check, seen, inferred, by_job).run(expected)


class _ChangedError(Exception):
    """The datasource changed between the first look and a request of ours."""

    def __init__(self, now: FoundDatasource | None) -> None:
        super().__init__()
        self.now = now


@dataclass
class _Publishing:
    """One publish; it knows what was there before, and how many of its requests may have landed."""

    _client: TableauClient
    _parcel: Parcel
    _progress: Progress | None
    _check: Check
    _seen: Seen
    _inferred: Check
    _by_job: ByJob | None
    _before: FoundDatasource | None = None
    _sends: int = 0
    # Whether a publishing request may have been sent.
    _asked: bool = False

    def run(self, expected: ServerVersion | None) -> FoundDatasource:
        """Publish; return the datasource afterwards."""
        self._before = self._look()
        self._check_start(expected)
        retry = self._client.retry
        if (now := retry.until(self._attempt, lambda now: now is not None)) is not None:
            return now
        raise DatasourceError(
            f"Could not {self._parcel.doing}: the connection to {self._client.where} broke {retry.tries} times, and the"
            " server still holds what it held before. Look at the server's status and run again."
        )

    def _check_start(self, expected: ServerVersion | None) -> None:
        before = self._before
        if before is not None and not self._parcel.overwrite:
            raise DatasourceError(
                f"Could not {self._parcel.doing}: a datasource of that name exists already on {self._client.where}."
                " Nothing was overwritten. Run again to start from what is there, or choose another name."
            )
        if expected is not None and (before is None or server_version(before) != expected):
            raise self._foreign(before, was=str(expected))
        if before is not None:
            check_credentials(before, self._parcel.connections)
            check_settable(before, self._parcel.later, self._client.rest_version)

    def _look(self) -> FoundDatasource | None:
        if self._before is not None:
            return reread(self._client, self._before)
        return look_for_datasource(self._client, project=self._parcel.project, name=self._parcel.name)

    def _landing(self, now: FoundDatasource | None) -> PublishOutcome:
        return outcome_by_revisions(self._before, now, user_id=self._client.user_id, sends=self._sends)

    def _check_unchanged(self) -> None:
        """Raise if the datasource changed since the start: people may have edited it during a long upload."""
        if self._landing(now := self._look()) is not PublishOutcome.NOT_LANDED:
            raise _ChangedError(now)
        if now is not None:
            check_credentials(now, self._parcel.connections)
            self._seen(now)
        # Last: looking takes several calls, each of which a machine may sleep through.
        self._check()
        if self._by_job is not None:
            self._by_job.asked()
        self._asked = True

    def _attempt(self) -> FoundDatasource | None:
        """Publish once; return None if it certainly did not happen and may be tried again."""
        self._asked = False
        try:
            job_id = send(self._client, self._parcel, check=self._check_unchanged, progress=self._progress)
            self._sends += 1
        except _ChangedError as changed:
            # An earlier try of ours may have landed late.
            return self._judge(changed.now)
        except UnknownOutcomeError as error:
            if not self._asked:
                # The upload itself failed in every try.
                raise DatasourceError(f"{error}{self._nothing}") from error
            self._sends += 1
            now = self._watch()
            if now is None and isinstance(error, UnreadableAnswerError):
                # Whatever answers in Tableau's place would answer the same again.
                raise
            return now
        except RefusedError as error:
            if error.code == UPLOAD_GONE:
                return None
            raise RefusedError(f"{error}{self._nothing}", code=error.code) from error
        if self._by_job is not None and job_id is not None and (now := self._outlast(self._by_job, job_id)) is not None:
            return now
        now = self._look_until_it_shows(self._client.retry.tries)
        # Without revisions, a change in the same second as the one before does not show.
        if self._landing(now) is PublishOutcome.NOT_LANDED and (now is None or now.revision is not None):
            raise PublishUnknownError(
                f"Could not {self._parcel.doing} for certain: {self._client.where} accepted it and still shows the old content."
                " Nothing is confirmed. Run again: the next refresh compares what is there."
            )
        if now is None or self._landing(now) is PublishOutcome.FOREIGN:
            raise self._foreign(now, was=self._was, landed=True)
        return now

    @property
    def _nothing(self) -> str:
        """A sentence that nothing was published, if that is certain."""
        return "" if self._sends else " Nothing was published."

    def _look_until_it_shows(self, looks: int) -> FoundDatasource | None:
        """Look several times: the server's lists may show a publish a moment later."""
        policy = self._client.retry.with_tries(looks)
        return policy.until(self._look, lambda now: self._landing(now) is not PublishOutcome.NOT_LANDED)

    def _outlast(self, by_job: ByJob, job_id: str) -> FoundDatasource | None:
        """Wait for our job; return the datasource only if the job did not tell that it succeeded, and it did."""
        by_job.taken(job_id)
        try:
            wait_for_job(self._client, job_id, what=self._parcel.doing, timeout=by_job.timeout)
        except (JobFailedError, JobCancelledError) as error:
            now = self._look_until_it_shows(self._client.retry.tries)
            if self._landing(now) is not PublishOutcome.NOT_LANDED:
                return self._judge(now)
            error.args = (f"{error} Nothing was published.",)
            raise
        except JobVanishedError as error:
            now = self._look_until_it_shows(self._client.retry.tries + 1)
            if self._landing(now) is PublishOutcome.NOT_LANDED:
                raise self._may_follow(str(error)) from error
            return self._judge(now)
        except RefusedError as error:
            raise self._may_follow(str(error)) from error
        return None

    def _may_follow(self, why: str) -> PublishUnknownError:
        return PublishUnknownError(
            f"Could not {self._parcel.doing} for certain: {why} {self._client.where} still shows the old content and may"
            " yet publish the new one. Nothing is confirmed. Run again later: the next refresh compares what is there."
        )

    def _watch(self) -> FoundDatasource | None:
        """Return our publish if the server finished it after its connection broke; None if it certainly did not."""
        # Before the look: a job that is not in the list has ended by then.
        # Without a record of it: of the jobs in the list nobody knows which is ours.
        by_job, name = self._by_job, self._parcel.name
        hidden = by_job is not None and not outlast_publishes(
            self._client, name, what=self._parcel.doing, timeout=by_job.timeout
        )
        now = self._look_until_it_shows(self._client.retry.tries + 1)
        if self._landing(now) is not PublishOutcome.NOT_LANDED:
            return self._judge(now)
        if hidden:
            raise self._may_follow("the answer that names its job was lost, and this user may not see the jobs.")
        return None

    def _judge(self, now: FoundDatasource | None) -> FoundDatasource:
        """Return the datasource if only our publish changed it; raise otherwise."""
        verdict = self._landing(now)
        if verdict is PublishOutcome.LANDED and now is not None:
            # Published by our user, perhaps in another process that signs in as the same user.
            self._inferred()
            return now
        if verdict is PublishOutcome.UNKNOWN and self._sends:
            raise PublishUnknownError(
                f"Could not {self._parcel.doing} for certain: the connection to {self._client.where} broke, the datasource"
                " has changed since, and the server does not say by whom. Compare its content before publishing again."
            )
        raise self._foreign(now, was=self._was, landed=bool(self._sends) and self._has_ours(now))

    def _has_ours(self, now: FoundDatasource | None) -> bool:
        after = (self._before.revision if self._before is not None else None) or 0
        history = (now.history if now is not None else None) or ()
        return any(item.number > after and item.publisher_id == self._client.user_id for item in history)

    @property
    def _was(self) -> str:
        return "no such datasource" if self._before is None else str(server_version(self._before))

    def _foreign(self, now: FoundDatasource | None, *, was: str, landed: bool = False) -> ForeignPublishError:
        state = f"it is now {server_version(now)}" if now is not None else "it is gone"
        end = (
            "Ours was published too; both are in the revision history. Compare the content before the next refresh."
            if landed
            else "Nothing was overwritten. Run again: the next refresh starts from what is there."
        )
        return ForeignPublishError(
            f"Could not {self._parcel.doing} undisturbed: somebody else changed it on {self._client.where}"
            f" (expected {was}, {state}). {end}"
        )


@dataclass(frozen=True)
class Parcel:
    """A publish: the file, where it goes, and with which credentials."""

    package: VirtualFile
    project: FoundProject
    name: str
    overwrite: bool
    # Of all connections, and the one that the publish carries.
    connections: Sequence[ConnectionCredential]
    credential: ConnectionCredential | None
    # The server answers with a job, not with the datasource.
    as_job: bool = False

    @property
    def doing(self) -> str:
        return f"publish {self.package.name} as datasource {self.name!r} in project {self.project.path!r}"

    @property
    def size(self) -> int:
        return self.package.size

    @property
    def in_pieces(self) -> bool:
        return self.size >= min(config.FILESIZE_LIMIT_MB, _MOST_AT_ONCE_MB) * BYTES_PER_MB

    @property
    def mode(self) -> str:
        return str(TSC.Server.PublishMode.Overwrite if self.overwrite else TSC.Server.PublishMode.CreateNew)

    @property
    def later(self) -> list[ConnectionCredential]:
        """The credentials that the publish does not carry."""
        left = list(self.connections)
        if self.credential is not None:
            left.remove(self.credential)
        return left

    @property
    def request(self) -> bytes:
        """The publish in XML, in the order of Tableau's schema, which the client library does not keep.

        A datasource has one `connectionCredentials` there; `connections` have only workbooks, and a server refuses them here.
        """
        root = ET.Element("tsRequest")
        datasource = ET.SubElement(root, "datasource", {"name": self.name})
        if (credential := self.credential) is not None:
            saved = credential.method == "oauth"
            secret = {"oAuth": "true"} if saved else {"password": credential.password}
            attributes = {"name": credential.username, **secret, "embed": "true"}
            ET.SubElement(datasource, "connectionCredentials", attributes)
        ET.SubElement(datasource, "project", {"id": self.project.id})
        return ET.tostring(root, encoding="utf-8")


def send(client: TableauClient, parcel: Parcel, *, check: Check, progress: Progress | None) -> str | None:
    """Publish; return the id of the job, if it is one. `check` runs right before every publishing request, after a large file was uploaded.

    A request whose answer is lost is not sent again: UnknownOutcomeError.
    """
    doing = parcel.doing
    upload_id = upload(client, parcel.package, doing=doing, progress=progress) if parcel.in_pieces else None

    def post(server: Any) -> str | None:
        check()
        parcel.package.check()
        with patience(client.timeouts.for_bytes(parcel.size)), reading(doing, where=client.where):
            return _post(server, parcel, upload_id)

    job_id = client.call(post, doing=doing, repeat=False)
    if progress is not None:
        progress(parcel.size, parcel.size)
    return job_id


def _post(server: Any, parcel: Parcel, upload_id: str | None) -> str | None:
    """Send the publish request. The client's own `publish` needs a file on disk, and cannot repeat a piece or check first."""
    kind = parcel.package.kind.removeprefix(".")
    url = f"{server.datasources.baseurl}?datasourceType={kind}&{parcel.mode.lower()}=true"
    parts = [_part("request_payload", "", parcel.request, "text/xml")]
    url += "&asJob=true" if parcel.as_job else ""
    if upload_id is None:
        content = b"".join(parcel.package.blocks())
        parts.append(_part("tableau_datasource", parcel.package.name, content, "application/octet-stream"))
    else:
        url += f"&uploadSessionId={upload_id}"
    body, content_type = encode_multipart_formdata(parts)
    answer = server.datasources.post_request(url, body, content_type.replace("form-data", "mixed", 1))
    # An IndexError if it is not Tableau's answer.
    if parcel.as_job:
        return str(TSC.JobItem.from_response(answer.content, server.namespace)[0].id)
    TSC.DatasourceItem.from_response(answer.content, server.namespace)[0]
    return None


def _part(name: str, file_name: str, content: bytes, content_type: str) -> RequestField:
    part = RequestField(name, content, filename=file_name)
    part.make_multipart(content_type=content_type)
    return part
