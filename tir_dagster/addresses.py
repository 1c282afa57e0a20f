"""Credentials inside addresses: find them in environment variables and hide them in every text that people read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

HIDDEN = "…"
# Names of variables that hold an address, or into which people put an address by mistake.
_ADDRESS_NAME = re.compile(r"URL|URI|HOST|PORT|PROXY|ENDPOINT|SERVER|ACCOUNT|REMOTE|DSN|CONN", re.IGNORECASE)
# To the last @ of a word: a password may hold one itself, or a slash, which should have been escaped.
_CREDENTIALS = re.compile(r"(\w+://)(?:[^\s/:@'\"<>|]+:[^\s'\"<>|]*|[^\s/@'\"<>|]+)@")
# A library that cannot parse an address quotes pieces of an unescaped password as host or path.
_DELIMITERS = re.compile(r"[/#?@:\\]")
_SHORTEST = 4


def has_credentials(address: str) -> bool:
    """Return whether an address, with or without its scheme, contains a user or a password."""
    return "@" in address


def hide_credentials(text: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the text without credentials of any address in it, also where it quotes only a part of them."""
    for secret in sorted(_secrets(env), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)


def staging_problem(address: str) -> str | None:
    """Return what is wrong with the address of a staging place, without quoting it; None if it can be tried."""
    scheme, separator, place = address.partition("://")
    if has_credentials(place):
        return "carries a user or a password; credentials come from the environment, a profile or a role"
    if "?" in place or "#" in place:
        return "carries parameters, which may hold a secret; settings come from the environment"
    if separator and scheme not in ("http", "https") and place.strip("/"):
        return None
    if not separator and address.startswith("/"):
        return None
    return "is no staging place; write an absolute folder, or an object store such as s3://bucket/prefix"


def without_credentials(address: str) -> str:
    """Return the address without user and password."""
    return _CREDENTIALS.sub(r"\1", address)


def host_of(address: str) -> str:
    """Return host and port of an address, even of a malformed one."""
    return address.rpartition("@")[2].rpartition("://")[2].partition("/")[0]


def _secrets(env: Mapping[str, str]) -> set[str]:
    addresses = (value for name, value in env.items() if _ADDRESS_NAME.search(name) and has_credentials(value))
    return {secret for address in addresses for secret in _credentials(address) if len(secret) >= _SHORTEST}


def _credentials(address: str) -> Iterator[str]:
    """Yield the text before the last @, the password in it, and the pieces of that password; as written and unescaped."""
    whole = address.partition("://")[2] or address
    credentials = whole.rpartition("@")[0]
    user, colon, password = credentials.partition(":")
    for secret in {credentials, password if colon else user}:
        for text in {secret, unquote(secret)}:
            yield text
            yield from _DELIMITERS.split(text.partition(":")[2] if secret == credentials and colon else text)
