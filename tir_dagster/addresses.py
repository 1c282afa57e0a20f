"""Credentials inside addresses: found in environment variables, and hidden in every text that people read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

HIDDEN = "…"
# Names of variables that hold an address, or something that an address is put into by mistake.
_ADDRESS_NAME = re.compile(r"URL|URI|HOST|PORT|PROXY|ENDPOINT|SERVER|ACCOUNT|REMOTE|DSN|CONN", re.IGNORECASE)
# To the last @ of a word: a password may hold one itself, or a slash, which should have been escaped.
_CREDENTIALS = re.compile(r"(\w+://)(?:[^\s/:@'\"<>|]+:[^\s'\"<>|]*|[^\s/@'\"<>|]+)@")
# Libraries quote what they take for a host or a path: the pieces of a password that was not escaped.
_DELIMITERS = re.compile(r"[/#?@:\\]")
_SHORTEST = 4


def has_credentials(address: str) -> bool:
    """Whether an address, with or without its scheme, carries a user or a password."""
    return "@" in address


def hide_credentials(text: str, env: Mapping[str, str] = os.environ) -> str:
    """The text without user and password of any address in it, also where it quotes only a part of a variable's."""
    for secret in sorted(_secrets(env), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", text)


def without_credentials(address: str) -> str:
    """An address to follow, without user and password."""
    return _CREDENTIALS.sub(r"\1", address)


def host_of(address: str) -> str:
    """Host and port of any address, be it wrong."""
    return address.rpartition("@")[2].rpartition("://")[2].partition("/")[0]


def _secrets(env: Mapping[str, str]) -> set[str]:
    addresses = (value for name, value in env.items() if _ADDRESS_NAME.search(name) and has_credentials(value))
    return {secret for address in addresses for secret in _credentials(address) if len(secret) >= _SHORTEST}


def _credentials(address: str) -> Iterator[str]:
    """What stands before the last @, its password, and the pieces of that; as written and unescaped."""
    whole = address.partition("://")[2] or address
    credentials = whole.rpartition("@")[0]
    user, colon, password = credentials.partition(":")
    for secret in {credentials, password if colon else user}:
        for text in {secret, unquote(secret)}:
            yield text
            yield from _DELIMITERS.split(text.partition(":")[2] if secret == credentials and colon else text)
