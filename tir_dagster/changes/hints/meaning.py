"""Applies a scope: as a condition in Snowflake's SQL, and as a test of one row.

Conditions know only true and false: a NULL is not equal to a value, in a list without NULL, or between two bounds, and
therefore it is what `not` of these describes. SQL's third answer would lose such rows, and keys that are missed are the
one dangerous mistake of a refresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any

from tir_dagster.changes.hints.fitting import Fitter
from tir_dagster.changes.hints.model import (
    All,
    And,
    Between,
    Equal,
    In,
    Key,
    KeyList,
    Not,
    Or,
    Scope,
    Unknown,
)
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import sql_literal

# Snowflake refused longer lists until 2024; several lists joined by OR always pass.
_LONGEST_LIST = 16_384


def condition_sql(scope: Scope, columns: Mapping[str, Column], *, alias: str | None = None) -> str:
    """The scope as a Snowflake condition that is TRUE or FALSE, never NULL; `alias` as the statement writes it.

    The scope is checked here again: values become SQL text, so none gets in that is not of its column's type.
    """
    fitter = Fitter("A hint", columns)
    return _sql(fitter.scope(scope), fitter.columns, f"{alias}." if alias else "")


def _sql(scope: Scope, columns: Mapping[str, Column], prefix: str) -> str:
    match scope:
        case All() | Unknown():
            return "TRUE"
        case KeyList():
            return _keys_sql(scope, columns, prefix)
        case Equal(name, value):
            return _among_sql(columns[name], [value], prefix)
        case In(name, values):
            return _among_sql(columns[name], values, prefix)
        case Between(name, low, high):
            column = f"{prefix}{quote(name)}"
            bounds = f"{_literal(columns[name], low)} AND {_literal(columns[name], high)}"
            return f"({column} IS NOT NULL AND {column} BETWEEN {bounds})"
        case Not(condition):
            return f"(NOT {_sql(condition, columns, prefix)})"
        case And(conditions):
            return f"({' AND '.join(_sql(part, columns, prefix) for part in conditions) or 'TRUE'})"
        case Or(conditions):
            return f"({' OR '.join(_sql(part, columns, prefix) for part in conditions) or 'FALSE'})"


def _among_sql(column: Column, values: Iterable[Any], prefix: str) -> str:
    name = f"{prefix}{quote(column.name)}"
    distinct = list(dict.fromkeys(values))
    literals = [_literal(column, value) for value in distinct if value is not None]
    if None in distinct:
        return f"({name} IS NULL OR {_listed_sql(name, literals)})" if literals else f"({name} IS NULL)"
    return f"({name} IS NOT NULL AND {_listed_sql(name, literals)})"


def _keys_sql(listed: KeyList, columns: Mapping[str, Column], prefix: str) -> str:
    """Keys with NULLs in the same places together: each such group is one list of rows without NULLs."""
    fields = [columns[name] for name in listed.columns]
    if len(fields) == 1:
        return _among_sql(fields[0], [key[0] for key in listed.keys], prefix)
    groups: dict[tuple[bool, ...], list[Key]] = {}
    for key in dict.fromkeys(listed.keys):
        groups.setdefault(tuple(value is not None for value in key), []).append(key)
    tests = [_group_sql(fields, present, keys, prefix) for present, keys in groups.items()]
    return f"({' OR '.join(tests) or 'FALSE'})"


def _group_sql(fields: Sequence[Column], present: tuple[bool, ...], keys: Iterable[Key], prefix: str) -> str:
    names = [f"{prefix}{quote(column.name)}" for column in fields]
    nulls = [f"{name} IS {'NOT ' if is_set else ''}NULL" for name, is_set in zip(names, present, strict=True)]
    places = [at for at, is_set in enumerate(present) if is_set]
    if not places:
        return f"({' AND '.join(nulls)})"
    rows = [_row_sql([_literal(fields[at], key[at]) for at in places]) for key in keys]
    return f"({' AND '.join(nulls)} AND {_listed_sql(_row_sql([names[at] for at in places]), rows)})"


def _row_sql(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"({', '.join(values)})"


def _listed_sql(name: str, literals: Sequence[str]) -> str:
    parts = [literals[at : at + _LONGEST_LIST] for at in range(0, len(literals), _LONGEST_LIST)]
    tests = [f"{name} IN ({', '.join(part)})" for part in parts]
    return tests[0] if len(tests) == 1 else f"({' OR '.join(tests) or 'FALSE'})"


def _literal(column: Column, value: Any) -> str:
    # str() of a small Decimal has an exponent: 1E-7.
    return sql_literal(column, format(value, "f") if isinstance(value, Decimal) else value)


def meets(scope: Scope, row: Mapping[str, Any]) -> bool:
    """Whether the row is in a scope that `check_hint` gave, by the same logic as `condition_sql`."""
    match scope:
        case All() | Unknown():
            return True
        case KeyList(columns, keys):
            return any(all(_same(row[name], value) for name, value in zip(columns, key, strict=True)) for key in keys)
        case Equal(column, value):
            return _same(row[column], value)
        case In(column, values):
            return any(_same(row[column], value) for value in values)
        case Between(column, low, high):
            row_value = _comparable(row[column], low)
            return row_value is not None and bool(low <= row_value <= high)
        case Not(condition):
            return not meets(condition, row)
        case And(conditions):
            return all(meets(condition, row) for condition in conditions)
        case Or(conditions):
            return any(meets(condition, row) for condition in conditions)


def _same(row_value: Any, value: Any) -> bool:
    """Whether the values are equal; NULL equals NULL."""
    return row_value is value is None or (
        row_value is not None and value is not None and _comparable(row_value, value) == value
    )


def _comparable(row_value: Any, value: Any) -> Any:
    """A row's value in the form of a hint's: Spark gives times of day as texts, and moments in local time, no zone."""
    if isinstance(value, time) and isinstance(row_value, str):
        return time.fromisoformat(row_value)
    if isinstance(value, datetime) and isinstance(row_value, datetime) and value.tzinfo and row_value.tzinfo is None:
        return row_value.astimezone(UTC)
    return row_value
