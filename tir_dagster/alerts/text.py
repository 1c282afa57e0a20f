"""Preparation of text for people: without secrets and hidden values, escaped for Slack, short enough."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from tir_dagster.addresses import hide_credentials

# Names, ids and addresses of secrets are none themselves.
_SECRET_NAME = re.compile(r"(?:PASSWORD|SECRET|TOKEN|PRIVATE_KEY|PASSPHRASE|API_KEY)(?!.*_(?:NAME|ID|URL|PATH|FILE)$)")
_QUERY_OF_ADDRESS = re.compile(r"(https?://[^\s?'\"<>|]+)\?[^\s'\"<>|]+")
_NAMED_SECRET = re.compile(
    r"(?i)([\w-]*(?:password|passwd|pwd|secret|token|authorization|api_?key)[\"']?\s*[=:]\s*)"
    r"(?:(?:basic|bearer)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;&}]+)"
)
_LITERAL = r"(?:'(?:[^']|'')*'|-?\d[\w.:-]*)"
# Only after what compares or lists in SQL: names in quotes elsewhere are what a reader needs.
_COMPARED = re.compile(rf"(?i)((?:=|<>|!=|<=|>=|<|>|\blike|\bbetween)\s*)({_LITERAL})")
_BETWEEN = re.compile(rf"(?i)(\bbetween\s+\S+\s+and\s+)({_LITERAL})")
# Whatever a list holds, tuples and casts too, also where the text was cut before its end.
_LISTED = re.compile(
    rf"(?i)(\b(?:in|values)\s*)\((?=[\s(]*(?:{_LITERAL}|null\b|\$\$))(?:[^()']|'(?:[^']|'')*'?|\([^()]*\)?)*(\)|$)"
)
_MORE_TUPLES = re.compile(r"(?i)(\bvalues\s*\(\?\))(?:\s*,\s*\([^()]*\))+")
# What Snowflake quotes when it cannot read a value.
_NOT_READ = re.compile(r"(?i)(\b(?:value|string|date|time|timestamp|parse)\s+)(?:'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")
# What a MERGE says that finds one row twice: the row.
_ROW = re.compile(r"(?i)(\brow values:\s*)\[.*(?:\]|$)", re.DOTALL)
# What our own errors quote: a value of a file that does not fit its column, keys that are there more than once.
_UNFIT = re.compile(
    r"(: )(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")( (?:is no|is neither|has more than|is longer than)\b)"
)
_REPEATED = re.compile(r"(\bmore than once: ).+?(?= and more\.|\. Rows that\b|$)", re.DOTALL)


def scrub(text: str, env: Mapping[str, str], *, show_values: bool = False) -> str:
    """Return the text without the environment's secrets and, unless `show_values` is set, without values in SQL."""
    secrets = {value for name, value in env.items() if len(value) > 3 and _SECRET_NAME.search(name)}
    # The longest first: otherwise the end of a secret that begins like a shorter one would stay.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "…")
    text = hide_credentials(text, env)
    text = _QUERY_OF_ADDRESS.sub(r"\1?…", text)
    text = _NAMED_SECRET.sub(r"\1…", text)
    return text if show_values else hide_values(text)


def hide_values(text: str) -> str:
    """Replace values in SQL and in errors by `?`: they may be customers' keys."""
    text = _ROW.sub(r"\1?", text)
    text = _MORE_TUPLES.sub(r"\1", _LISTED.sub(r"\1(?)", text))
    text = _REPEATED.sub(r"\1?", _UNFIT.sub(r"\1?\2", _NOT_READ.sub(r"\1?", text)))
    text = _BETWEEN.sub(r"\1?", text)
    return _COMPARED.sub(r"\1?", text)


def mrkdwn(text: str) -> str:
    """Escape the text for Slack, so that a table's name or an error mentions nobody and links nothing."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: str) -> str:
    return " ".join(text.split())


def moment(value: str) -> str:
    """Return a source version as a readable time."""
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return value
    return f"{parsed.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def joined(names: tuple[str, ...]) -> str:
    """Return a few names in full, or the first of many."""
    if len(names) <= 5:
        return ", ".join(names)
    return f"{', '.join(names[:4])} and {len(names) - 4} more"
