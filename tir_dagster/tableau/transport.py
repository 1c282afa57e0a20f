"""The HTTP session under tableauserverclient: timeouts, our user agent, and the answers that the client reports badly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any
from xml.etree.ElementTree import ParseError

import requests
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from tir_dagster.measuring import waiting_for

# So that a server's log shows who called: many tools use the client's own name.
USER_AGENT = f"tir_dagster/{version('tir_dagster')} tableauserverclient/{version('tableauserverclient')}"
_read_seconds: ContextVar[float | None] = ContextVar("read_seconds", default=None)


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


class BadAnswerError(Exception):
    """429 or 5xx. Raised here because the client drops the Retry-After header and keeps whole pages of HTML."""

    def __init__(self, status: int, detail: str, retry_after: float | None) -> None:
        super().__init__(f"{status} {detail}".strip())
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


class TimedSession(requests.Session):
    """A session whose calls have a timeout and our user agent."""

    def __init__(self, timeouts: Timeouts) -> None:
        super().__init__()
        self._timeouts = timeouts

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault(
            "timeout", (self._timeouts.connect_seconds, _read_seconds.get() or self._timeouts.read_seconds)
        )
        kwargs["headers"] = {**(kwargs.get("headers") or {}), "User-Agent": USER_AGENT}
        with waiting_for("Tableau"):
            response = super().request(*args, **kwargs)
        if response.status_code == 429 or response.status_code >= 500:
            with response:
                raise BadAnswerError(response.status_code, _detail(response), _retry_after(response))
        if response.status_code == 206:
            # The client takes a part of a file for an error. That it is one still shows in its Content-Range.
            response.status_code = 200
        if kwargs.get("stream"):
            # For its log the client loads every answer with an encoding into memory, even a package of gigabytes
            # whose content type is `application/octet-stream;charset=UTF-8`.
            response.encoding = None
        return response


def _detail(response: requests.Response) -> str:
    """Return the server's description of its failure; empty if the answer is not Tableau's XML."""
    try:
        root = fromstring(response.content)
    except (ParseError, DefusedXmlException, ValueError, requests.RequestException):
        return ""
    texts = [(element.text or "").strip() for element in root.iter() if element.tag.endswith(("summary", "detail"))]
    return ": ".join(text for text in texts if text)


def _retry_after(response: requests.Response) -> float | None:
    """Seconds to wait, from a number or a date; None when the server does not say."""
    text = response.headers.get("Retry-After", "").strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
