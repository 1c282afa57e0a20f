"""Classification of failed calls to Tableau: whether the server acted, whether to try again, what a person should check."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from xml.etree.ElementTree import ParseError

import requests
import urllib3
from tableauserverclient.server.endpoint.exceptions import (
    NonXMLResponseError,
    NotSignedInError,
    RedirectError,
    ServerResponseError,
    XMLError,
)
from tableauserverclient.server.exceptions import EndpointUnavailableError

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.access import MORE_SCOPES, ConnectedApp, TableauAccess, TableauToken
from tir_dagster.tableau.calls import RestCall, find_call

# The server's REST version does not know the call. The client says so before it asks, a server by this code.
TOO_OLD = "404950"
# The name, token or secret is not, or no longer, one that the server knows.
NO_ENTRY = "401001"


# A longer pause that the server asks for is told to people.
_SHORT_SECONDS = 60.0
_NAMESPACE = {"t": "http://tableau.com/api"}
# A secure connection that is cut later raises one of these; every other SSL error belongs to its handshake.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
# What OpenSSL writes around its sentence: [ssl: wrong_version_number] wrong version number (_ssl.c:1006)
_SSL_PLACE = re.compile(r"^\[ssl: \w+\] | \(_ssl\.c:\d+\)$")
_CERTIFICATE = re.compile(r"certificate|hostname", re.IGNORECASE)
# The error code differs between servers; the words are always there.
_NO_ROOM = re.compile(r"\b(quota|storage limit|disk space|too large)\b", re.IGNORECASE)


class BadAnswerError(Exception):
    """429 or 5xx. Raised here because the client drops the Retry-After header and keeps whole pages of HTML."""

    def __init__(self, status: int, detail: str, retry_after: float | None) -> None:
        super().__init__(f"{status} {detail}".strip())
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


class DeniedError(ServerResponseError):
    """401 or 403, with the call: the client's own error does not know the method."""

    call: RestCall | None = None

    @classmethod
    def of(cls, response: requests.Response) -> DeniedError:
        """Read the answer; ParseError or NonXMLResponseError if it is not Tableau's."""
        error: DeniedError = cls.from_response(response.content, _NAMESPACE, response.url)
        error.call = find_call(response.request.method or "", response.url)
        return error


class UnknownOutcomeError(DatasourceError):
    """A call broke off and the server may have acted on it: look before sending it again."""


class UnreadableAnswerError(UnknownOutcomeError):
    """The answer is not Tableau's: it is unknown whether the server acted."""


class ServerDownError(DatasourceError):
    """The server as a whole cannot be reached, or only a proxy in front of it answers."""


class RefusedError(DatasourceError):
    """The server understood and said no; `code` is Tableau's, such as 403007."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class MissingScopeError(RefusedError):
    """The token of a connected app may not make this call: it lacks the call's scope, or the server grants none for it."""


class SignInError(RefusedError):
    """The server refuses these credentials: no extract can be refreshed until they are corrected."""


class Fate(Enum):
    """What became of a call that failed."""

    NOT_DONE = "the server did not act on it"
    UNKNOWN = "the server may have acted on it"
    SESSION_GONE = "the session is over"
    REFUSED = "the server said no"


@dataclass(frozen=True)
class CallFailure:
    """One failed call, classified: what became of it, and why."""

    fate: Fate
    reason: str
    code: str = ""
    asked_seconds: float | None = None
    unreachable: bool = False
    # Which call was denied, by 401 or 403.
    call: RestCall | None = None

    @property
    def may_pass(self) -> bool:
        return self.fate in (Fate.NOT_DONE, Fate.UNKNOWN)


def understand(error: Exception) -> CallFailure | None:
    """Classify the error of a call; None if it comes neither from the server nor from the network."""
    if isinstance(error, BadAnswerError):
        fate = Fate.NOT_DONE if error.status == 429 else Fate.UNKNOWN
        return CallFailure(fate, _of_answer(error), str(error.status), error.retry_after)
    if isinstance(error, XMLError):
        # NO_ENTRY answers a sign-in; every other 401 means that the session has ended.
        gone = error.code.startswith("401") and error.code != NO_ENTRY
        words = _one_line(error.detail or error.summary or "no reason given")
        call = error.call if isinstance(error, DeniedError) else None
        return CallFailure(Fate.SESSION_GONE if gone else Fate.REFUSED, words, error.code, call=call)
    if isinstance(error, EndpointUnavailableError):
        return CallFailure(Fate.REFUSED, "its REST version does not know this call", TOO_OLD)
    if isinstance(error, NotSignedInError):
        return CallFailure(Fate.SESSION_GONE, "the session is over", "401002")
    if isinstance(error, (NonXMLResponseError, ParseError, RedirectError)):
        return CallFailure(Fate.REFUSED, "its answer is not Tableau's")
    if isinstance(error, requests.RequestException):
        return _of_connection(error)
    return None


def _of_answer(error: BadAnswerError) -> str:
    words = "it asks for fewer calls" if error.status == 429 else "it failed"
    return f"{words} ({error.status}{': ' if error.detail else ''}{_one_line(error.detail)})"


def _of_connection(error: requests.RequestException) -> CallFailure:
    reason = _reason(error)
    if isinstance(error, requests.exceptions.SSLError) and not any(_find(error, kind) for kind in _CUT):
        return CallFailure(Fate.REFUSED, f"no secure connection: {reason}", unreachable=True)
    if isinstance(error, requests.ConnectTimeout) or _find(error, urllib3.exceptions.NewConnectionError):
        return CallFailure(Fate.NOT_DONE, reason, unreachable=True)
    if isinstance(error, requests.ReadTimeout):
        return CallFailure(Fate.UNKNOWN, "no answer in time")
    broken = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
    if isinstance(error, (*broken, requests.exceptions.ContentDecodingError)):
        return CallFailure(Fate.UNKNOWN, f"the connection broke ({reason})")
    return CallFailure(Fate.REFUSED, reason)


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes; requests and urllib3 keep them in three different places."""
    chain, waiting = [], [error]
    while waiting:
        current = waiting.pop(0)
        if current in chain:
            continue
        chain.append(current)
        nested = (current.__cause__, current.__context__, getattr(current, "reason", None), *current.args)
        waiting.extend(item for item in nested if isinstance(item, BaseException))
    return chain


def _find(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    return next((item for item in _chain(error) if isinstance(item, kind)), None)


def _reason(error: BaseException) -> str:
    """Return the operating system's message if there is one: the libraries' own texts are unreadable."""
    if _find(error, urllib3.exceptions.NameResolutionError):
        return "its name is not known"
    if isinstance(error, requests.ConnectTimeout):
        return "no connection in time"
    words = [item.strerror for item in _chain(error) if isinstance(item, OSError) and isinstance(item.strerror, str)]
    return _SSL_PLACE.sub("", _one_line(words[-1]).lower()) if words else "cut"


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


@contextmanager
def reading(answer_to: str, *, where: str) -> Iterator[None]:
    """Raise UnreadableAnswerError if the block cannot read the answer to a request that changes something."""
    try:
        yield
    except (ParseError, IndexError):
        # Without its cause: it holds the answer.
        raise UnreadableAnswerError(
            f"Could not {answer_to} for certain: {where} received it, but the answer is not Tableau's. Check that no proxy"
            " answers in its place, and run again: the next refresh compares what is there."
        ) from None


def lacks_scope(failure: CallFailure, access: TableauAccess) -> bool:
    """Whether the call was denied because the token of a connected app did not ask for its scope.

    The server answers as if the session had ended (401002): only the scopes that were asked for tell the two apart.
    """
    call, app = failure.call, access.identity
    if call is None or call.scope == "" or not isinstance(app, ConnectedApp):
        return False
    return call.scope is None or not app.has_scope(call.scope)


def as_error(failure: CallFailure, *, access: TableauAccess, doing: str, repeated: bool = True) -> DatasourceError:
    """Return the error that people read: what happened, where, and what to do. `doing` completes "Could not …".

    A call that was not `repeated`, because the server may have acted on it, becomes an UnknownOutcomeError.
    """
    at = f"Tableau Server {access.where}"
    if failure.unreachable:
        if _CERTIFICATE.search(failure.reason):
            return ServerDownError(
                f"Could not {doing}: {at} cannot be reached, {failure.reason}. Nothing was sent. If your own authority signs its"
                " certificate, set REQUESTS_CA_BUNDLE to the file of that authority; else check TABLEAU_SERVER_URL."
            )
        return ServerDownError(
            f"Could not {doing}: {at} cannot be reached, {failure.reason}."
            " Check TABLEAU_SERVER_URL, that the server runs, and that this machine may connect to it."
        )
    scope_missing = lacks_scope(failure, access)
    if scope_missing or (failure.fate is Fate.SESSION_GONE and isinstance(access.identity, ConnectedApp)):
        return MissingScopeError(
            f"Could not {doing}: {at} refused {failure.call.shown if failure.call else 'the call'} ({failure.code})"
            f"{_scope_sentence(failure.call, access, missing=scope_missing)}",
            code=failure.code,
        )
    if failure.fate is Fate.SESSION_GONE:
        return DatasourceError(f"Could not {doing}: {_session_sentence(access)}")
    if failure.code == "429":
        wait = failure.asked_seconds or 0.0
        if wait > _SHORT_SECONDS:
            return DatasourceError(
                f"Could not {doing}: {at} took no more calls of this kind, {failure.reason}. Run again in {_duration(wait)}, and"
                " refresh less often."
            )
        return DatasourceError(
            f"Could not {doing}: {at} still asks for fewer calls. Run fewer refreshes at once, or run again later."
        )
    if failure.fate is Fate.UNKNOWN:
        down = failure.code in ("502", "503", "504")
        kind = UnknownOutcomeError if not repeated else ServerDownError if down else DatasourceError
        return kind(
            f"Could not {doing}: {at} is in trouble, {failure.reason}. Look at the server's status and run again."
        )
    refusal = SignInError if failure.code == NO_ENTRY else RefusedError
    return refusal(
        f"Could not {doing}: {at} refused{f' ({failure.code})' if failure.code else ''}, {failure.reason}."
        f" {_hint(failure.code, failure.reason, access)}",
        code=failure.code,
    )


def _scope_sentence(call: RestCall | None, access: TableauAccess, *, missing: bool) -> str:
    app = access.identity.shown
    if call is not None and missing:
        if call.scope is None:
            return (
                f", because Tableau has no scope for this call: {app} cannot make it. Sign in with a personal access token or"
                " a user's password."
            )
        return f", because the token of {app} does not ask for the scope {call.scope}. Add it to {MORE_SCOPES} and run again."
    scope = f" although its token asks for {call.scope}" if call is not None and call.scope else ""
    since = call.apps_since if call is not None else None
    version = f" The server must speak REST {since[0]}.{since[1]}." if since is not None else ""
    return (
        f" right after {app} had signed in,{scope}.{version} Check on the server that the connected app is enabled and that"
        f" its access level includes the project; if this server calls the scope otherwise, add it to {MORE_SCOPES}; or"
        " sign in with a personal access token."
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _session_sentence(access: TableauAccess) -> str:
    at = f"{access.where} ended the session of {access.identity.shown} again right after a new sign-in."
    if isinstance(access.identity, TableauToken):
        return (
            f"{at} A token carries one session, so another process uses the same one: give each process a token of"
            " its own in TABLEAU_TOKEN_NAME and TABLEAU_TOKEN_SECRET."
        )
    return f"{at} Check that the user is active and may use the REST API, and run again."


def _hint(code: str, reason: str, access: TableauAccess) -> str:
    if code.startswith("413") or _NO_ROOM.search(reason):
        return "Make room on the site, or ask its administrator for more."
    if code == NO_ENTRY:
        return (
            f"Check that {access.identity.shown} exists, has not expired and belongs to a user of the site,"
            " that its secret is right, and that TABLEAU_SITE is the site's name in its address."
        )
    if code == "403007":
        return "Somebody else has just created it. Run again to start from what is there, or choose another name."
    if code.startswith("403"):
        return f"Give the user behind {access.identity.shown} the permission, or use another one."
    if code == TOO_OLD:
        return "It takes a newer Tableau Server: upgrade it, or choose a delivery that it can serve."
    if code.startswith("404"):
        return "Check that it still exists and that the user may see it."
    if not code:
        return "Check that TABLEAU_SERVER_URL is the address of Tableau Server itself, without a path."
    return "Fix the reported problem and run again."
