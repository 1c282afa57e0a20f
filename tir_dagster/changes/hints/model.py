"""The values of a hint: table, type of change, scope. A hint is a claim to check, never an instruction."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any

from tir_dagster.snowflake.names import TableName

# Conditions in each other.
MAX_DEPTH = 32
OPERATORS = ("equal", "in", "between", "and", "or", "not")

Key = tuple[Any, ...]


class ChangeType(Enum):
    """What happened to the rows in the scope. A claim to check, never an instruction: keys are always replaced."""

    ADD_ROWS = "ADD_ROWS"
    UPDATE_ROWS = "UPDATE_ROWS"
    REMOVE_ROWS = "REMOVE_ROWS"
    MIXED_CHANGES = "MIXED_CHANGES"


@dataclass(frozen=True)
class Equal:
    """The column has this value; None is NULL."""

    column: str
    value: Any


@dataclass(frozen=True)
class In:
    """The column has one of these values; None among them is NULL."""

    column: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Between:
    """The column lies between two bounds, both included."""

    column: str
    low: Any
    high: Any


@dataclass(frozen=True)
class And:
    """Every condition is met."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    """At least one condition is met."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Not:
    """The condition is not met, be it because of a NULL."""

    condition: Condition


@dataclass(frozen=True)
class KeyList:
    """Rows by the values of some columns, usually the row key; None is NULL."""

    columns: tuple[str, ...]
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class All:
    """Every row of the table."""


@dataclass(frozen=True)
class Unknown:
    """Nobody said which rows: any may have changed."""


Condition = Equal | In | Between | And | Or | Not
Scope = Condition | KeyList | All | Unknown


@dataclass(frozen=True)
class Hint:
    """One change description: rows of this table in this scope were added, updated, removed, or all of that."""

    table: TableName
    type: ChangeType
    scope: Scope = Unknown()


_SHOWN_LETTERS = 60
DIGITS = 400
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class UnusableValue(ValueError):  # noqa: N818 - never leaves this module
    """A value that cannot be used; the message says why, not where it stands."""


def scalar(value: Any) -> Any:
    """A value as hints hold it: numbers exact and finite, texts that every system can store."""
    match value:
        case None | bool():
            return value
        # A pandas NaT is a date, too.
        case date() | time() if value == value:  # noqa: PLR0124
            return value
        case int() | float() | Decimal():
            return _number(value)
        case str():
            return checked_text(value)
        # Digits that JSON libraries would round.
        case {"number": str(text), **others} if not others and _NUMBER.fullmatch(text):
            return _number(Decimal(text))
    raise UnusableValue(f"{value_text(value)} is not a value; supported are texts, numbers, true, false and null")


def _number(value: float | Decimal) -> int | Decimal:
    if isinstance(value, int):
        if abs(value) >= 10**DIGITS:
            raise UnusableValue(f"{value_text(value)} is out of range")
        return int(value)
    # The digits that somebody wrote, not the binary fraction nearest to them.
    exact = value if isinstance(value, Decimal) else Decimal(float.__repr__(value))
    if not exact.is_finite():
        raise UnusableValue(f"{value_text(exact)} is not supported; numbers are finite")
    if abs(exact.adjusted()) >= DIGITS or len(exact.as_tuple().digits) > DIGITS:
        raise UnusableValue(f"{value_text(exact)} is out of range: numbers have at most {DIGITS} digits")
    return exact


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def checked_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnusableValue(
            f"{value_text(value)} holds half a character (a lone surrogate), which no table can"
        ) from None
    if "\0" in value:
        raise UnusableValue(f"{value_text(value)} holds a NUL character; describe such rows by other columns")
    return value


def value_text(value: Any) -> str:
    """A short text of the value, for a message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_LETTERS else f"{value[:_SHOWN_LETTERS]!r}…"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**DIGITS:
        return f"a number of more than {DIGITS} digits"
    if isinstance(value, (int, float, Decimal)):
        text = str(value)
        return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
    return value.isoformat() if isinstance(value, (date, time)) else f"a {type(value).__name__}"


def suggestion(value: Any, names: Iterable[str]) -> str:
    """The most similar name as a question to the user. Only the beginning is compared: the search is slow for long texts."""
    word = str(value)[:_SHOWN_LETTERS] if isinstance(value, str) else ""
    by_case = {name.casefold(): name for name in names}
    matches = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return f" (did you mean {by_case[matches[0]]}?)" if matches else ""


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
