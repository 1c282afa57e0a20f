"""Signed-in sessions, shared by everyone in this process who signs in with the same credentials."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.retry import Repeat, RetryPolicy
from tir_dagster.tableau.transport import TimedSession, Timeouts, patience
from tir_dagster.tableau.trouble import as_error, understand

log = logging.getLogger(__name__)
_SIGN_OUT_SECONDS = 5.0


class SharedSession:
    """One session on the server. A token's second sign-in would end its first, so nobody else here signs in."""

    def __init__(self, access: TableauAccess, timeouts: Timeouts) -> None:
        self.access = access
        # Asked to find the version itself, the client falls back to 2.4 without a word when that one call fails.
        self.server: Any = TSC.Server(
            access.server_url, use_server_version=False, session_factory=lambda: TimedSession(timeouts)
        )
        self.users = 0
        self._lock = threading.Lock()
        self._sign_ins = 0

    def signed_in(self, retry: RetryPolicy) -> int:
        """Sign in unless somebody has; the number of this sign-in."""
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
            if (trouble := understand(error)) is None:
                raise
            # The cause is left out: a sign-in's own error must not carry the request into a log.
            doing = f"sign in with {self.access.identity.shown}"
            raise as_error(trouble, access=self.access, doing=doing) from None
        self._sign_ins += 1

    def _try_to_sign_in(self) -> None:
        info = self.server.server_info.get()
        version = info.rest_api_version if info is not None else ""
        if not re.fullmatch(r"\d+\.\d+", version or ""):
            raise DatasourceError(
                f"{self.access.server_url} answers, but not as a Tableau Server does."
                " Check that TABLEAU_SERVER_URL is the address of Tableau Server itself, without a path."
            )
        self.server.version = version
        self.server.auth.sign_in(self.access.credentials())

    def close(self) -> None:
        """Sign out; a server that does not answer forgets the session in time by itself."""
        with self._lock, contextlib.suppress(Exception), patience(_SIGN_OUT_SECONDS):
            self.server.auth.sign_out()
        self.server.close()


def _may_repeat(error: Exception) -> Repeat | None:
    trouble = understand(error)
    # A sign-in can always be repeated: it replaces what a lost answer may have opened.
    return Repeat(trouble.reason, trouble.asked_seconds) if trouble is not None and trouble.may_pass else None


_sessions: dict[TableauAccess, SharedSession] = {}
_sessions_lock = threading.Lock()


def join_session(access: TableauAccess, timeouts: Timeouts) -> SharedSession:
    """The session of these credentials, with one user more; it signs in when it is first needed."""
    with _sessions_lock:
        _refuse_two_sites(access)
        session = _sessions.get(access) or _sessions.setdefault(access, SharedSession(access, timeouts))
        session.users += 1
        return session


def _refuse_two_sites(access: TableauAccess) -> None:
    """One token on two sites at once would end its own sessions for ever."""
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
    """One user less; the last one signs out."""
    with _sessions_lock:
        session.users -= 1
        if session.users:
            return
        del _sessions[session.access]
        # Inside the lock: a newcomer who signs in with this token must not be signed out by those who left.
        session.close()
