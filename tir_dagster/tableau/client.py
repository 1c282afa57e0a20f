"""The client: every call to Tableau goes through `TableauClient.call`, which signs in, repeats and explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.retry import Backoff, Repeat, RetryPolicy
from tir_dagster.tableau.session import SharedSession, join_session, leave_session
from tir_dagster.tableau.transport import Timeouts
from tir_dagster.tableau.trouble import Fate, as_error, understand

T = TypeVar("T")
# Tableau Cloud asks for at least this much between two looks at a job.
_CLOUD_POLL_SECONDS = 5.0
_pace: ContextVar[RetryPolicy | None] = ContextVar("pace", default=None)


@contextmanager
def paced(retry: RetryPolicy) -> Iterator[None]:
    """Clients made inside repeat and wait by this policy, unless they are given one of their own."""
    token = _pace.set(retry)
    try:
        yield
    finally:
        _pace.reset(token)


class TableauClient:
    """One site of one Tableau Server, for a `with` block; nothing is sent before the first call.

    Clients of one process with equal credentials share a session: a second sign-in would end the first.
    """

    def __init__(
        self,
        access: TableauAccess,
        *,
        retry: RetryPolicy | None = None,
        poll: Backoff | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.access = access
        self.retry = retry or _pace.get() or RetryPolicy()
        self.poll = poll or Backoff(first_seconds=_CLOUD_POLL_SECONDS if access.is_cloud else 1.0)
        self.timeouts = timeouts or Timeouts()
        self._session: SharedSession | None = None

    def __enter__(self) -> Self:
        if self._session is not None:
            raise RuntimeError("this client is in use already; make another one")
        self._session = join_session(self.access, self.timeouts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            leave_session(session)

    def __repr__(self) -> str:
        return f"TableauClient({self.access.where}, {self.access.identity.shown})"

    @property
    def where(self) -> str:
        return self.access.where

    @property
    def user_id(self) -> str:
        """The id of the user who is signed in."""
        return str(self._signed_in().server.user_id)

    @property
    def rest_version(self) -> tuple[int, int]:
        """The REST version that the server speaks, such as (3, 26)."""
        major, minor = self._signed_in().server.version.split(".")
        return int(major), int(minor)

    def call(self, action: Callable[[Any], T], *, doing: str, repeat: bool = True) -> T:
        """Run one action on the signed-in `tableauserverclient.Server`.

        `doing` completes "Could not …" in errors. With `repeat` false, an action on which the server may have acted
        is not sent again but raises UnknownOutcomeError; what it did not act on is sent again in any case.
        """

        def may_repeat(error: Exception) -> Repeat | None:
            trouble = understand(error)
            if trouble is None or not (trouble.fate is Fate.NOT_DONE or (repeat and trouble.may_pass)):
                return None
            return Repeat(f"could not {doing}, {trouble.reason}", trouble.asked_seconds)

        try:
            return self.retry.run(lambda: self._once(action), may_repeat=may_repeat)
        except DatasourceError:
            raise
        except Exception as error:
            if (trouble := understand(error)) is None:
                raise
            # Without its cause: the libraries' errors hold requests, and those hold credentials.
            raise as_error(trouble, access=self.access, doing=doing, repeated=repeat) from None

    def _signed_in(self) -> SharedSession:
        if self._session is None:
            raise RuntimeError("a TableauClient works inside its `with` block")
        self._session.signed_in(self.retry)
        return self._session

    def _once(self, action: Callable[[Any], T]) -> T:
        """Run the action, and once more after a new sign-in when the session turns out to be over."""
        session = self._signed_in()
        seen = session.signed_in(self.retry)
        try:
            return action(session.server)
        except Exception as error:
            trouble = understand(error)
            if trouble is None or trouble.fate is not Fate.SESSION_GONE:
                raise
        session.renew(seen, self.retry)
        return action(session.server)
