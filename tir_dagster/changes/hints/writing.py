"""A hint as JSON, as people write it."""

from __future__ import annotations

from datetime import date, time
from decimal import Decimal
from typing import Any

from tir_dagster.changes.hints.model import (
    All,
    And,
    Between,
    Equal,
    Hint,
    In,
    KeyList,
    Not,
    Or,
    Scope,
    Unknown,
)


def hint_to_json(hint: Hint) -> dict[str, Any]:
    """The hint in the form that `parse_hint` reads, of nothing but what JSON knows."""
    return {"table": str(hint.table), "type": hint.type.name, "scope": _scope_json(hint.scope)}


def _scope_json(scope: Scope) -> Any:
    match scope:
        case All():
            return "all"
        case Unknown():
            return "unknown"
        case KeyList(columns, keys):
            return {"keys": [dict(zip(columns, map(_json, key), strict=True)) for key in keys]}
        case Equal(column, value):
            return {"equal": {column: _json(value)}}
        case In(column, values):
            return {"in": {column: [_json(value) for value in values]}}
        case Between(column, low, high):
            return {"between": {column: [_json(low), _json(high)]}}
        case Not(condition):
            return {"not": _scope_json(condition)}
        case And(conditions) | Or(conditions):
            word = "and" if isinstance(scope, And) else "or"
            return {word: [_scope_json(condition) for condition in conditions]}


def _json(value: Any) -> Any:
    if isinstance(value, (date, time)):
        return value.isoformat()
    if not isinstance(value, Decimal):
        return value
    if value == value.to_integral_value():
        return int(value)
    rounded = float(value)
    return rounded if Decimal(repr(rounded)) == value else {"number": format(value, "f")}
