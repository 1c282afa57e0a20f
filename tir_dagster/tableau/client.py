"""The client of Tableau Server: sign-in, shared sessions, timeouts, retries, and errors that people understand."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from xml.etree.ElementTree import ParseError

import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring
from tableauserverclient.server.endpoint.exceptions import NonXMLResponseError

from tir_dagster.errors import DatasourceError
from tir_dagster.measuring import waiting_for
from tir_dagster.retries import Backoff, Repeat, RetryPolicy, looks
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.calls import Budget, find_call
from tir_dagster.tableau.failures import (
    BadAnswerError,
    DeniedError,
    Fate,
    MissingScopeError,
    as_error,
    lacks_scope,
    understand,
)
from tir_dagster.trust import authorities

T = TypeVar("T")
log = logging.getLogger(__name__)
# Tableau Cloud asks for at least this much between two looks at a job.
_CLOUD_POLL_SECONDS = 5.0
# A short job is noticed at once; a long one costs few looks, and is noticed a fortieth of its time late on average.
_POLL_SECONDS = 0.1
_POLL_GROWTH = 1.05
# So that a server's log shows who called: many tools use the client's own name.
USER_AGENT = f"tir_dagster/{version('tir_dagster')} tableauserverclient/{version('tableauserverclient')}"
_SIGN_OUT_SECONDS = 5.0
# "Too many requests for 'api.rest.refresh_extracts'. Please retry after 29 minutes."
_RETRY_WORDS = re.compile(r"\bretry after (\d{1,5}) (second|minute|hour)s?\b", re.IGNORECASE)
_UNITS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_read_seconds: ContextVar[float | None] = ContextVar("read_seconds", default=None)
_counter: ContextVar[CallCounter | None] = ContextVar("counter", default=None)
_pace: ContextVar[RetryPolicy | None] = ContextVar("pace", default=None)


class CallCounter(Protocol):
    """Counts calls that the site limits by the hour."""

    def count(self, kind: Budget) -> None:
        """Count a call that is about to be sent."""

    def refused(self, kind: Budget, seconds: float) -> None:
        """Note that the server asks to wait before the next call of this kind."""


def _pause(seconds: float) -> None:
    with waiting_for("Tableau"):
        time.sleep(seconds)


@contextmanager
def paced(retry: RetryPolicy) -> Iterator[None]:
    """Make this the default retry policy of the clients created in the block."""
    token = _pace.set(retry)
    try:
        yield
    finally:
        _pace.reset(token)


@dataclass(frozen=True)
class Timeouts:
    """How long a call may take: to connect, between two bytes of an answer, and for the bytes that are sent."""

    connect_seconds: float = 10.0
    read_seconds: float = 60.0
    # A server answers a publish only when it has unpacked and checked the whole file.
    bytes_per_second: float = 1_000_000.0

    def for_bytes(self, size: int) -> float:
        """Return how many seconds to wait for the answer to a request of this many bytes."""
        return self.read_seconds + size / self.bytes_per_second


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Make calls in the block wait this long for an answer."""
    token = _read_seconds.set(seconds)
    try:
        yield
    finally:
        _read_seconds.reset(token)


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
        counter: CallCounter | None = None,
    ) -> None:
        self.access = access
        self.counter = counter
        self.retry = retry or _pace.get() or RetryPolicy(sleep=_pause)
        # On Cloud without jitter, which would shorten the pause.
        cloud = Backoff(first_seconds=_CLOUD_POLL_SECONDS, factor=_POLL_GROWTH, jitter=0.0)
        self.poll = poll or (cloud if access.is_cloud else Backoff(first_seconds=_POLL_SECONDS, factor=_POLL_GROWTH))
        self.timeouts = timeouts or Timeouts()
        # How long this client has waited for the server: for its answers and its jobs.
        self.waited_seconds = 0.0
        self._waiting = False
        self._session: SharedSession | None = None

    def __enter__(self) -> Self:
        if self._session is not None:
            raise RuntimeError("this client is in use already; create another one")
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
            failure = understand(error)
            if failure is None or not (failure.fate is Fate.NOT_DONE or (repeat and failure.may_pass)):
                return None
            return Repeat(f"Tableau: could not {doing}, {failure.reason}", failure.asked_seconds)

        try:
            with self.waiting():
                return self.retry.run(lambda: self._once(action), may_repeat=may_repeat)
        except DatasourceError:
            raise
        except Exception as error:
            if (failure := understand(error)) is None:
                raise
            told = as_error(failure, access=self.access, doing=doing, repeated=repeat)
            if isinstance(told, MissingScopeError):
                # Callers go on without what a user may not see; a scope is never missed in silence.
                log.warning("Tableau: %s", told)
            # Without its cause: the libraries' errors hold requests, and those hold credentials.
            raise told from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of this block as waiting for the server; a nested block counts once."""
        if self._waiting:
            yield
            return
        started, self._waiting = time.perf_counter(), True
        try:
            yield
        finally:
            self._waiting = False
            self.waited_seconds += time.perf_counter() - started

    def looks(self, seconds: float) -> Iterator[None]:
        """Yield whenever it is time to look at something that the server does, the last time when `seconds` are over."""

        def pause(number: int) -> float:
            return self.poll.seconds(number, chance=self.retry.chance())

        def sleep(seconds: float) -> None:
            with self.waiting():
                self.retry.sleep(seconds)

        return looks(seconds, pause=pause, sleep=sleep, clock=self.retry.clock)

    def _signed_in(self) -> SharedSession:
        if self._session is None:
            raise RuntimeError("a TableauClient works inside its `with` block")
        self._session.signed_in(self.retry)
        return self._session

    def _once(self, action: Callable[[Any], T]) -> T:
        """Run the action; if the session has ended, sign in and run it once more."""
        session = self._signed_in()
        seen = session.signed_in(self.retry)
        counting = _counter.set(self.counter)
        try:
            return self._renewed(action, session, seen)
        finally:
            _counter.reset(counting)

    def _renewed(self, action: Callable[[Any], T], session: SharedSession, seen: int) -> T:
        try:
            return action(session.server)
        except Exception as error:
            failure = understand(error)
            if failure is None or failure.fate is not Fate.SESSION_GONE or lacks_scope(failure, self.access):
                raise
        session.renew(seen, self.retry)
        return action(session.server)


class SharedSession:
    """One session on the server. A token's second sign-in would end its first, so nobody else here signs in."""

    def __init__(self, access: TableauAccess, timeouts: Timeouts) -> None:
        self.access = access
        verify = authorities()
        # Asked to find the version itself, the client falls back to 2.4 without a word when that one call fails.
        self.server: Any = TSC.Server(
            access.server_url, use_server_version=False, session_factory=lambda: TimedSession(timeouts, verify)
        )
        self.users = 0
        self._lock = threading.Lock()
        self._sign_ins = 0

    def signed_in(self, retry: RetryPolicy) -> int:
        """Sign in unless that is done; return the number of the sign-in."""
        with self._lock:
            if not self._sign_ins:
                self._sign_in(retry)
            return self._sign_ins

    def renew(self, seen: int, retry: RetryPolicy) -> None:
        """Sign in again, unless another thread has done so since sign-in number `seen`."""
        with self._lock:
            if self._sign_ins == seen:
                self._sign_in(retry)

    def _sign_in(self, retry: RetryPolicy) -> None:
        try:
            retry.run(self._try_to_sign_in, may_repeat=_may_repeat)
        except DatasourceError:
            raise
        except Exception as error:
            if (failure := understand(error)) is None:
                raise
            # The cause is left out: a sign-in's own error must not carry the request into a log.
            doing = f"sign in with {self.access.identity.shown}"
            raise as_error(failure, access=self.access, doing=doing) from None
        self._sign_ins += 1

    def _try_to_sign_in(self) -> None:
        info = self.server.server_info.get()
        rest_version = info.rest_api_version if info is not None else ""
        if not re.fullmatch(r"\d+\.\d+", rest_version or ""):
            raise DatasourceError(
                f"{self.access.server_url} answers, but not as a Tableau Server does."
                " Check that TABLEAU_SERVER_URL is the address of Tableau Server itself, without a path."
            )
        self.server.version = rest_version
        self.server.auth.sign_in(self.access.credentials())

    def close(self) -> None:
        """Sign out; if the server does not answer, the session expires on the server."""
        with self._lock, contextlib.suppress(Exception), patience(_SIGN_OUT_SECONDS):
            self.server.auth.sign_out()
        self.server.close()


def _may_repeat(error: Exception) -> Repeat | None:
    failure = understand(error)
    # A sign-in can always be repeated: it replaces what a lost answer may have opened.
    return (
        Repeat(f"Tableau: {failure.reason}", failure.asked_seconds)
        if failure is not None and failure.may_pass
        else None
    )


_sessions: dict[TableauAccess, SharedSession] = {}
_sessions_lock = threading.Lock()


def join_session(access: TableauAccess, timeouts: Timeouts) -> SharedSession:
    """Return the session of these credentials and count one more user; it signs in at its first call."""
    with _sessions_lock:
        _refuse_two_sites(access)
        session = _sessions.get(access) or _sessions.setdefault(access, SharedSession(access, timeouts))
        session.users += 1
        return session


def _refuse_two_sites(access: TableauAccess) -> None:
    """Raise if the token is in use on another site: each sign-in would end the session on the other site."""
    if not isinstance(access.identity, TableauToken):
        return
    for other in _sessions:
        same = (other.server_url, other.identity) == (access.server_url, access.identity)
        if same and other.site != access.site:
            raise DatasourceError(
                f"{access.identity.shown} is signed in to {other.where} in this process and cannot be used for"
                f" {access.where} meanwhile: a token carries one session. Use one token per site."
            )


def leave_session(session: SharedSession) -> None:
    """Count one user less; sign out after the last one."""
    with _sessions_lock:
        session.users -= 1
        if session.users:
            return
        del _sessions[session.access]
        # Inside the lock: a new client with this token must not be signed out by this one.
        session.close()


class TimedSession(requests.Session):
    """A session whose calls have a timeout and our user agent, and which checks certificates."""

    def __init__(self, timeouts: Timeouts, verify: str | bool) -> None:
        super().__init__()
        self.verify = verify
        self._timeouts = timeouts

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault(
            "timeout", (self._timeouts.connect_seconds, _read_seconds.get() or self._timeouts.read_seconds)
        )
        kwargs["headers"] = {**(kwargs.get("headers") or {}), "User-Agent": USER_AGENT}
        limited = _limited_call(*args[:2], **{name: kwargs[name] for name in ("method", "url") if name in kwargs})
        if limited is not None:
            limited.counter.count(limited.kind)
        with waiting_for("Tableau"):
            response = super().request(*args, **kwargs)
        if response.status_code == 429 or response.status_code >= 500:
            with response:
                detail = _detail(response)
                asked = _retry_after(response, detail)
            if limited is not None and response.status_code == 429 and asked is not None:
                limited.counter.refused(limited.kind, asked)
            raise BadAnswerError(response.status_code, detail, asked)
        if response.status_code in (401, 403):
            with contextlib.suppress(ParseError, DefusedXmlException, NonXMLResponseError, ValueError):
                raise DeniedError.of(response)
        if response.status_code == 206:
            # The client takes a part of a file for an error. That it is one still shows in its Content-Range.
            response.status_code = 200
        if kwargs.get("stream"):
            # For its log the client loads every answer with an encoding into memory, even a package of gigabytes
            # whose content type is `application/octet-stream;charset=UTF-8`.
            response.encoding = None
        return response


@dataclass(frozen=True)
class _LimitedCall:
    """A request that counts for a budget, and who counts it."""

    counter: CallCounter
    kind: Budget


def _limited_call(method: str, url: str) -> _LimitedCall | None:
    counter = _counter.get()
    call = find_call(method, url) if counter is not None else None
    return None if counter is None or call is None or call.budget is None else _LimitedCall(counter, call.budget)


def _detail(response: requests.Response) -> str:
    """Return the server's description of its failure; empty if the answer is not Tableau's XML."""
    try:
        root = fromstring(response.content)
    except (ParseError, DefusedXmlException, ValueError, requests.RequestException):
        return ""
    texts = [(element.text or "").strip() for element in root.iter() if element.tag.endswith(("summary", "detail"))]
    return ": ".join(text for text in texts if text)


def _retry_after(response: requests.Response, detail: str) -> float | None:
    """Seconds to wait, from a number or a date, or from Tableau Cloud's words; None when the server does not say."""
    text = response.headers.get("Retry-After", "").strip()
    if not text:
        words = _RETRY_WORDS.search(detail) if response.status_code == 429 else None
        return float(words[1]) * _UNITS[words[2].casefold()] if words else None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
