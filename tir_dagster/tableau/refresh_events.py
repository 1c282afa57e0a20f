"""What a webhook of Tableau brings: the refresh of a datasource that succeeded or failed. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

SUCCEEDED, FAILED = "DatasourceRefreshSucceeded", "DatasourceRefreshFailed"
_LONGEST_NAME = 300


class BadEventError(ValueError):
    """The body is none that Tableau would send."""


@dataclass(frozen=True)
class RefreshEvent:
    """A refresh of one datasource that ended. `at` is the server's time, in UTC."""

    kind: str
    datasource_id: str
    name: str
    at: datetime

    @property
    def succeeded(self) -> bool:
        return self.kind == SUCCEEDED


def read_event(body: bytes) -> RefreshEvent | None:
    """The refresh that the body tells of; None for events of another kind, and for the empty body of a test."""
    value = _object(body)
    if not value:
        return None
    kind = _text(value, "event_type")
    if kind not in (SUCCEEDED, FAILED):
        return None
    name = value.get("resource_name")
    shown = name[:_LONGEST_NAME] if isinstance(name, str) else ""
    return RefreshEvent(kind, _text(value, "resource_luid"), shown, _moment(_text(value, "created_at")))


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadEventError("the body is not JSON") from error
    if not isinstance(value, dict):
        raise BadEventError("the body is not a JSON object")
    return value


def _text(value: dict[str, Any], name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not 0 < len(found) <= _LONGEST_NAME:
        raise BadEventError(f"{name} is not a text of 1 to {_LONGEST_NAME} characters")
    return found


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise BadEventError("created_at is not a time") from error
