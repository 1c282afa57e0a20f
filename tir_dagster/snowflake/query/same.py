"""Whether two texts are one query: blanks, comments and the case of unquoted names do not count."""

from __future__ import annotations

from sqlglot.errors import SqlglotError
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers

from tir_dagster.snowflake.query.text import ViewError, parse_query, written


def same_query(one: str, other: str) -> bool:
    """Only what surely means the same is the same: other orders of columns or conditions are not looked into."""
    try:
        first, second = (
            written(normalize_identifiers(parse_query(sql).tree, dialect="snowflake")) for sql in (one, other)
        )
    except (ViewError, SqlglotError):
        return one.split() == other.split()
    return first == second
