"""Hints: table, type of change, scope; reading them from JSON or mappings, where what is not clear is refused, and writing them.

A hint is a claim to check, never an instruction. Pydantic does not read hints: almost every refusal has a sentence of its own, and
the limits count over all hints and conditions, so its models would only come on top of this reader.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any, NoReturn

from tir_dagster.errors import HintError, SourceError
from tir_dagster.snowflake.names import TableName

# Conditions in each other.
MAX_DEPTH = 32
MAX_CONDITIONS = 1_000
MAX_VALUES = 100_000
OPERATORS = ("equal", "in", "between", "and", "or", "not")
_LONGEST_NAME = 255

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


class UnusableValue(ValueError):  # noqa: N818 - never leaves this package
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


def parse_hint(value: Mapping[str, Any] | str, where: str) -> Hint:
    """The hint in a mapping or a JSON text. `where` says in errors where it comes from."""
    reader = _HintReader(where)
    return reader.hint(reader.loaded(value), "")


def parse_hints(value: Mapping[str, Any] | Sequence[Any] | str, where: str) -> tuple[Hint, ...]:
    """The hints in one hint or a list of them, each as a mapping or a JSON text; their values are counted together."""
    reader = _HintReader(where)
    document = reader.loaded(value)
    if not isinstance(document, (list, tuple)):
        return (reader.hint(document, ""),)
    if len(document) > MAX_CONDITIONS:
        reader.refuse("", f"{len(document):,} hints, supported are {MAX_CONDITIONS:,}; describe more rows in each")
    return tuple(reader.hint(reader.loaded(item), f"[{at}]") for at, item in enumerate(document))


_FIELDS = ("table", "type", "scope")
_SCOPES = (
    '"all", "unknown", {"keys": [{"COLUMN": value}]}, or a condition: {"equal": {"COLUMN": value}}, '
    '{"in": {"COLUMN": [value, value]}}, {"between": {"COLUMN": [low, high]}}, {"and": […]}, {"or": […]}, {"not": …}'
)


class _HintReader:
    """Turns plain values into hints, counts what it reads, and knows the place of what it refuses."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.values = 0
        self.conditions = 0

    def refuse(self, path: str, message: str) -> NoReturn:
        place = path.lstrip(".")
        raise HintError(f"{self.where}: {f'{place}: ' if place else ''}{message}.")

    def loaded(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_each_once)
        except UnusableValue as error:
            self.refuse("", str(error))
        except RecursionError:
            self.refuse("", f"nested too deeply; conditions go {MAX_DEPTH} deep")
        except (ValueError, ArithmeticError) as error:
            self.refuse("", f"not JSON: {' '.join(str(error).split())}")

    def hint(self, value: Any, path: str) -> Hint:
        if not isinstance(value, Mapping):
            self.refuse(path, f'{value_text(value)} is not a hint; write {{"table": …, "type": …, "scope": …}}')
        for unknown in [name for name in value if name not in _FIELDS]:
            self.refuse(
                path,
                f"unknown field {value_text(unknown)}{suggestion(unknown, _FIELDS)}; known are {', '.join(_FIELDS)}",
            )
        return Hint(
            self.table(value.get("table"), f"{path}.table"),
            self.type(value.get("type"), f"{path}.type"),
            self.scope(value.get("scope"), f"{path}.scope"),
        )

    def table(self, value: Any, path: str) -> TableName:
        text = self.value(value, path)
        if not isinstance(text, str):
            self.refuse(path, "give the table as DATABASE.SCHEMA.TABLE")
        try:
            return TableName.parse(text)
        except SourceError:
            self.refuse(path, f"{value_text(text)} is not a full table name; write it as DATABASE.SCHEMA.TABLE")

    def type(self, value: Any, path: str) -> ChangeType:
        names = [change.name for change in ChangeType]
        if isinstance(value, str) and value.upper() in names:
            return ChangeType[value.upper()]
        problem = "missing" if value is None else f"{value_text(value)} is unknown{suggestion(value, names)}"
        return self.refuse(path, f"{problem}; supported are {', '.join(names)}")

    def scope(self, value: Any, path: str) -> Scope:
        if value is None:
            return Unknown()
        if isinstance(value, str):
            words: dict[str, Scope] = {"all": All(), "unknown": Unknown()}
            if value.lower() not in words:
                self.refuse(
                    path, f"{value_text(value)} is not a scope{suggestion(value, words)}; supported are {_SCOPES}"
                )
            return words[value.lower()]
        if isinstance(value, Mapping) and set(value) == {"keys"}:
            return self.keys(value["keys"], f"{path}.keys")
        return self.condition(value, path, 1)

    def condition(self, value: Any, path: str, depth: int) -> Condition:
        """`depth` counts the and, or and not around it; every way down passes one of them."""
        if not isinstance(value, Mapping) or len(value) != 1:
            several = isinstance(value, Mapping) and len(value) > 1
            problem = (
                "several conditions side by side; put them into a list under `and`" if several else value_text(value)
            )
            self.refuse(path, f"{problem}; supported are {_SCOPES}")
        operator, operand = next(iter(value.items()))
        inner = f"{path}.{operator}"
        if operator in ("equal", "in", "between"):
            return self.leaves(operator, operand, inner, depth)
        if operator not in ("and", "or", "not"):
            alone = "; a list of keys stands alone, use `in` inside a condition" if operator == "keys" else ""
            self.refuse(
                path,
                f"unknown condition {value_text(operator)}{suggestion(operator, OPERATORS)}{alone}; supported are {_SCOPES}",
            )
        self.go_down(inner, depth)
        if operator == "not":
            return Not(self.condition(operand, inner, depth + 1))
        items = enumerate(self.listed(operand, inner, "conditions"))
        conditions = tuple(self.condition(item, f"{inner}[{at}]", depth + 1) for at, item in items)
        return And(conditions) if operator == "and" else Or(conditions)

    def go_down(self, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.refuse(path, f"nested more than {MAX_DEPTH} deep; flatten it, or use `in` or keys")

    def leaves(self, operator: str, operand: Any, path: str, depth: int) -> Condition:
        """One condition per column; several columns must all be met."""
        if not isinstance(operand, Mapping) or not operand:
            self.refuse(path, f'name the column: {{"{operator}": {{"COLUMN": …}}}}')
        self.conditions += len(operand)
        if self.conditions > MAX_CONDITIONS:
            self.refuse(path, f"more than {MAX_CONDITIONS:,} conditions; use `in`, `between` or keys")
        read_leaf = {"equal": self.equal, "in": self.among, "between": self.between}[operator]
        leaves = tuple(read_leaf(self.column(name, path), value, f"{path}.{name}") for name, value in operand.items())
        if len(leaves) == 1:
            return leaves[0]
        self.go_down(path, depth)
        return And(leaves)

    def column(self, name: Any, path: str) -> str:
        try:
            if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME:
                return checked_text(name)
        except UnusableValue:
            pass
        return self.refuse(path, f"{value_text(name)} is not a column's name")

    def equal(self, column: str, operand: Any, path: str) -> Condition:
        if isinstance(operand, (list, tuple)):
            self.refuse(path, "equal takes one value; use `in` for a list")
        self.count(1, path)
        return Equal(column, self.value(operand, path))

    def among(self, column: str, operand: Any, path: str) -> Condition:
        values = self.listed(operand, path, "values")
        self.count(len(values), path)
        return In(column, tuple(self.value(value, f"{path}[{at}]") for at, value in enumerate(values)))

    def between(self, column: str, operand: Any, path: str) -> Condition:
        if not isinstance(operand, (list, tuple)) or len(operand) != 2:
            self.refuse(path, "between takes a list of two bounds, [low, high], both included")
        self.count(2, path)
        low, high = (self.value(value, f"{path}[{at}]") for at, value in enumerate(operand))
        if low is None or high is None:
            self.refuse(path, "a bound cannot be null; for an open end give a value that no row exceeds")
        if is_number(low) and is_number(high) and low > high:
            self.refuse(path, f"the bounds are reversed; write [{value_text(high)}, {value_text(low)}]")
        return Between(column, low, high)

    def keys(self, operand: Any, path: str) -> KeyList:
        entries = self.listed(operand, path, "keys")
        first = entries[0]
        if not isinstance(first, Mapping) or not first:
            self.refuse(path, 'write every key as {"COLUMN": value}')
        self.count(len(entries) * len(first), path)
        columns = tuple(self.column(name, path) for name in first)
        return KeyList(columns, tuple(self.key(entry, columns, f"{path}[{at}]") for at, entry in enumerate(entries)))

    def key(self, entry: Any, columns: tuple[str, ...], path: str) -> Key:
        if not isinstance(entry, Mapping) or set(entry) != set(columns):
            self.refuse(path, f"every key has the columns of the first one: {', '.join(columns)}")
        return tuple(self.value(entry[name], f"{path}.{name}") for name in columns)

    def listed(self, operand: Any, path: str, noun: str) -> Sequence[Any]:
        if not isinstance(operand, (list, tuple)):
            self.refuse(path, f"{value_text(operand)} is not a list of {noun}")
        if not operand:
            # Such a hint describes no row at all, which is more likely a job's mistake than meant.
            self.refuse(path, f'the list of {noun} is empty; leave the hint out if nothing changed, or write "unknown"')
        return operand

    def count(self, values: int, path: str) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            self.refuse(path, f'more than {MAX_VALUES:,} values; describe the rows by a condition, or write "all"')

    def value(self, operand: Any, path: str) -> Any:
        try:
            return scalar(operand)
        except UnusableValue as error:
            self.refuse(path, str(error))


def _no_constant(name: str) -> NoReturn:
    raise UnusableValue(f"{name} is not supported as a value, nor is it JSON; leave such rows to MIXED_CHANGES")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python would keep the last of two equal names, and the hint would say less than was written."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise UnusableValue(f"{value_text(name)} is given twice in one object; keep one, or use `in` or `or`")
        members[name] = value
    return members


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
