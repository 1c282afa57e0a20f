"""Names and literals in SQL, Snowflake's and Spark's: the one place that quotes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tir_dagster.errors import SourceError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_PART = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([A-Za-z_][A-Za-z0-9_$]*))\s*')


def quote(name: str) -> str:
    """Quote an identifier, so that its case and special characters are kept."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Write a text as an SQL string; backslashes are doubled, because Snowflake reads them as escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


@dataclass(frozen=True, order=True)
class TableName:
    """A table's full name, each part as Snowflake stores it: ORDERS for orders, but orders for "orders"."""

    database: str
    schema: str
    name: str

    @staticmethod
    def parse(text: str, *, database: str | None = None, schema: str | None = None) -> TableName:
        """Read DB.SCHEMA.TABLE; parts in double quotes keep their case. Missing parts come from the defaults."""
        parts = _parts(text)
        defaults = [database, schema][: 3 - len(parts)] if len(parts) <= 3 else [None]
        if not all(defaults):
            raise SourceError(
                f"{text!r} is not a full table name. Write it as DATABASE.SCHEMA.TABLE; a part with small letters, "
                'spaces or points goes into double quotes: DATABASE.SCHEMA."My Table".'
            )
        return TableName(*(_stored(default) for default in defaults if default), *parts)

    @property
    def sql(self) -> str:
        return ".".join(quote(part) for part in (self.database, self.schema, self.name))

    def __str__(self) -> str:
        return ".".join(_part_text(part) for part in (self.database, self.schema, self.name))


def _parts(text: str) -> list[str]:
    """Split a name at its points; text that is no name gives four parts, more than a name can have."""
    parts, at = [], 0
    while part := _PART.match(text, at):
        parts.append(part[1].replace('""', '"') if part[1] else part[2].upper())
        at = part.end()
        if at == len(text):
            return parts
        if text[at] != ".":
            break
        at += 1
    return [text] * 4


def _stored(part: str) -> str:
    """A default as it stands in a connection: upper case unless it is quoted."""
    return _parts(part)[0]


def _part_text(part: str) -> str:
    return part if _PLAIN.fullmatch(part) and part == part.upper() else quote(part)


_ADDRESS = re.compile(r"[@/\\\s]")


_EXAMPLES = {"account": "myorg-myaccount", "host": "myorg-myaccount.snowflakecomputing.com"}


def check_mere_name(name: str, value: str) -> None:
    """Raise if an account or host is a whole address: messages show it, and an address may hold a password."""
    if _ADDRESS.search(value):
        raise SourceError(
            f"SNOWFLAKE_{name.upper()} is a whole address, or carries a user or a password. Set it to the mere name, such as "
            f"{_EXAMPLES[name]}, and the credentials to SNOWFLAKE_USER and SNOWFLAKE_PASSWORD."
        )


def whole_number(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise SourceError(f"SNOWFLAKE_{name.upper()} is no whole number. Set it to one, or unset it.") from None
