"""One publish from the first look to the last: check, send, and send again if it did not land."""

from __future__ import annotations

from collections.abc import Callable

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundDatasource,
    FoundProject,
    ServerVersion,
    look_for_datasource,
    reread,
    server_version,
)
from tir_dagster.tableau.failures import RefusedError, UnknownOutcomeError, UnreadableAnswerError
from tir_dagster.tableau.jobs import JobVanishedError, wait_for_job
from tir_dagster.tableau.outcome import ForeignPublishError, PublishOutcome, PublishUnknownError, outcome_by_revisions
from tir_dagster.tableau.settings import Seen, check_credentials, nothing
from tir_dagster.tableau.upload import UPLOAD_GONE, Parcel, Progress, send

# Called right before a request that publishes: if it raises, nothing is sent.
Check = Callable[[], None]


def always() -> None:
    """Allow every publish."""


class _ChangedError(Exception):
    """The datasource changed between the first look and a request of ours."""

    def __init__(self, now: FoundDatasource | None) -> None:
        super().__init__()
        self.now = now


class Publishing:
    """One publish; it knows what was there before, and how many of its requests may have landed."""

    def __init__(
        self,
        client: TableauClient,
        parcel: Parcel,
        project: FoundProject,
        *,
        job_timeout: float,
        progress: Progress | None,
        check: Check = always,
        seen: Seen = nothing,
        inferred: Check = always,
    ) -> None:
        self._client = client
        self._parcel = parcel
        self._project = project
        self._job_timeout = job_timeout
        self._progress = progress
        self._check = check
        self._seen = seen
        self._inferred = inferred
        self._doing = f"publish {parcel.package.name} as datasource {parcel.name!r} in project {project.path!r}"
        self._before: FoundDatasource | None = None
        self._sends = 0
        # Whether a publishing request may have been sent.
        self._asked = False

    def run(self, expected: ServerVersion | None) -> FoundDatasource:
        """Publish; return the datasource afterwards."""
        self._before = self._look()
        self._check_start(expected)
        retry = self._client.retry
        if (now := retry.until(self._attempt, lambda now: now is not None)) is not None:
            return now
        raise DatasourceError(
            f"Could not {self._doing}: the connection to {self._client.where} broke {retry.tries} times, and the"
            " server still holds what it held before. Look at the server's status and run again."
        )

    def _check_start(self, expected: ServerVersion | None) -> None:
        before = self._before
        if before is not None and not self._parcel.overwrite:
            raise DatasourceError(
                f"Could not {self._doing}: a datasource of that name exists already on {self._client.where}."
                " Nothing was overwritten. Run again to start from what is there, or choose another name."
            )
        if expected is not None and (before is None or server_version(before) != expected):
            raise self._foreign(before, was=str(expected))
        if before is not None:
            check_credentials(before, self._parcel.connections)

    def _look(self) -> FoundDatasource | None:
        if self._before is not None:
            return reread(self._client, self._before)
        return look_for_datasource(self._client, project=self._project, name=self._parcel.name)

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
        self._asked = True

    def _attempt(self) -> FoundDatasource | None:
        """Publish once; return None if it certainly did not happen and may be tried again."""
        self._asked = False
        try:
            job_id = send(
                self._client, self._parcel, doing=self._doing, check=self._check_unchanged, progress=self._progress
            )
            self._sends += 1
            if job_id is not None:
                wait_for_job(self._client, job_id, what=self._doing, timeout=self._job_timeout)
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
        except JobVanishedError:
            return self._watch()
        except RefusedError as error:
            if error.code == UPLOAD_GONE:
                return None
            raise RefusedError(f"{error}{self._nothing}", code=error.code) from error
        now = self._look_until_it_shows(self._client.retry.tries)
        # Without revisions, a change in the same second as the one before does not show.
        if self._landing(now) is PublishOutcome.NOT_LANDED and (now is None or now.revision is not None):
            raise PublishUnknownError(
                f"Could not {self._doing} for certain: {self._client.where} accepted it and still shows the old content."
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

    def _watch(self) -> FoundDatasource | None:
        """Return our publish if the server finished it after its connection broke; None if it certainly did not."""
        now = self._look_until_it_shows(self._client.retry.tries + 1)
        return None if self._landing(now) is PublishOutcome.NOT_LANDED else self._judge(now)

    def _judge(self, now: FoundDatasource | None) -> FoundDatasource:
        """Return the datasource if only our publish changed it; raise otherwise."""
        verdict = self._landing(now)
        if verdict is PublishOutcome.LANDED and now is not None:
            # Published by our user, perhaps in another process that signs in as the same user.
            self._inferred()
            return now
        if verdict is PublishOutcome.UNKNOWN and self._sends:
            raise PublishUnknownError(
                f"Could not {self._doing} for certain: the connection to {self._client.where} broke, the datasource"
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
            f"Could not {self._doing} undisturbed: somebody else changed it on {self._client.where}"
            f" (expected {was}, {state}). {end}"
        )
