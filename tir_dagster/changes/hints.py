"""Hints, pure: what somebody outside says has changed, as a value, as JSON, as Snowflake SQL and as a test of one row.

Conditions know only true and false: a NULL is not equal to a value, in a list without NULL, or between two bounds, and
therefore it is what `not` of these describes. SQL's third answer would lose such rows, and keys that are missed are the
one dangerous mistake of a refresh; for the same reason whatever is doubtful in a hint is refused.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from heapq import nsmallest
from typing import Any, NoReturn

from tir_dagster.errors import SourceError, SpecError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.names import TableName, quote
from tir_dagster.source.pinned import sql_literal

MAX_DEPTH = 32
MAX_CONDITIONS = 1_000
MAX_VALUES = 100_000
# Snowflake refused longer lists until 2024; several lists joined by OR always pass.
_LONGEST_LIST = 16_384
_SHOWN_KEYS = 5
_SHOWN_LETTERS = 60
_LONGEST_NAME = 255
_DIGITS = 400
_SNOWFLAKE_DIGITS = 38

Key = tuple[Any, ...]


class HintError(SpecError):
    """A hint that cannot be understood or does not fit its table; says where, what is wrong and what is supported."""


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


# Reading JSON


def parse_hint(value: Mapping[str, Any] | str, where: str) -> Hint:
    """The hint in a mapping or a JSON text. `where` says in errors where it comes from."""
    reader = _Reader(where)
    return reader.hint(reader.loaded(value), "")


def parse_hints(value: Mapping[str, Any] | Sequence[Any] | str, where: str) -> tuple[Hint, ...]:
    """The hints in one hint or a list of them, each as a mapping or a JSON text; their values are counted together."""
    reader = _Reader(where)
    given = reader.loaded(value)
    if not isinstance(given, (list, tuple)):
        return (reader.hint(given, ""),)
    if len(given) > MAX_CONDITIONS:
        reader.refuse("", f"{len(given):,} hints, supported are {MAX_CONDITIONS:,}; describe more rows in each")
    return tuple(reader.hint(reader.loaded(item), f"[{at}]") for at, item in enumerate(given))


_FIELDS = ("table", "type", "scope")
_OPERATORS = ("equal", "in", "between", "and", "or", "not")
_SCOPES = (
    '"all", "unknown", {"keys": [{"COLUMN": value}]}, or a condition: {"equal": {"COLUMN": value}}, '
    '{"in": {"COLUMN": [value, value]}}, {"between": {"COLUMN": [low, high]}}, {"and": […]}, {"or": […]}, {"not": …}'
)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


class _Unfit(ValueError):  # noqa: N818 - never leaves this module
    """Why a value cannot be used, without its place."""


class _Reader:
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
        except _Unfit as error:
            self.refuse("", str(error))
        except RecursionError:
            self.refuse("", f"nested too deeply; conditions go {MAX_DEPTH} deep")
        except (ValueError, ArithmeticError) as error:
            self.refuse("", f"not JSON: {' '.join(str(error).split())}")

    def hint(self, value: Any, path: str) -> Hint:
        if not isinstance(value, Mapping):
            self.refuse(path, f'{_shown(value)} is not a hint; write {{"table": …, "type": …, "scope": …}}')
        for unknown in [name for name in value if name not in _FIELDS]:
            self.refuse(
                path, f"unknown field {_shown(unknown)}{_close(unknown, _FIELDS)}; known are {', '.join(_FIELDS)}"
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
            self.refuse(path, f"{_shown(text)} is not a full table name; write it as DATABASE.SCHEMA.TABLE")

    def type(self, value: Any, path: str) -> ChangeType:
        names = [change.name for change in ChangeType]
        if isinstance(value, str) and value.upper() in names:
            return ChangeType[value.upper()]
        given = "missing" if value is None else f"{_shown(value)} is unknown{_close(value, names)}"
        return self.refuse(path, f"{given}; supported are {', '.join(names)}")

    def scope(self, value: Any, path: str) -> Scope:
        if value is None:
            return Unknown()
        if isinstance(value, str):
            words: dict[str, Scope] = {"all": All(), "unknown": Unknown()}
            if value.lower() not in words:
                self.refuse(path, f"{_shown(value)} is not a scope{_close(value, words)}; supported are {_SCOPES}")
            return words[value.lower()]
        if isinstance(value, Mapping) and set(value) == {"keys"}:
            return self.keys(value["keys"], f"{path}.keys")
        return self.condition(value, path, 1)

    def condition(self, value: Any, path: str, depth: int) -> Condition:
        """`depth` counts the and, or and not around it; every way down passes one of them."""
        if not isinstance(value, Mapping) or len(value) != 1:
            several = isinstance(value, Mapping) and len(value) > 1
            asked = "several conditions side by side; put them into a list under `and`" if several else _shown(value)
            self.refuse(path, f"{asked}; supported are {_SCOPES}")
        operator, given = next(iter(value.items()))
        inner = f"{path}.{operator}"
        if operator in ("equal", "in", "between"):
            return self.leaves(operator, given, inner, depth)
        if operator not in ("and", "or", "not"):
            alone = "; a list of keys stands alone, use `in` inside a condition" if operator == "keys" else ""
            self.refuse(
                path,
                f"unknown condition {_shown(operator)}{_close(operator, _OPERATORS)}{alone}; supported are {_SCOPES}",
            )
        self.go_down(inner, depth)
        if operator == "not":
            return Not(self.condition(given, inner, depth + 1))
        items = enumerate(self.listed(given, inner, "conditions"))
        read = tuple(self.condition(item, f"{inner}[{at}]", depth + 1) for at, item in items)
        return And(read) if operator == "and" else Or(read)

    def go_down(self, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.refuse(path, f"nested more than {MAX_DEPTH} deep; flatten it, or use `in` or keys")

    def leaves(self, operator: str, given: Any, path: str, depth: int) -> Condition:
        """One condition per column; several columns must all be met."""
        if not isinstance(given, Mapping) or not given:
            self.refuse(path, f'name the column: {{"{operator}": {{"COLUMN": …}}}}')
        self.conditions += len(given)
        if self.conditions > MAX_CONDITIONS:
            self.refuse(path, f"more than {MAX_CONDITIONS:,} conditions; use `in`, `between` or keys")
        read = {"equal": self.equal, "in": self.among, "between": self.between}[operator]
        leaves = tuple(read(self.column(name, path), value, f"{path}.{name}") for name, value in given.items())
        if len(leaves) == 1:
            return leaves[0]
        self.go_down(path, depth)
        return And(leaves)

    def column(self, name: Any, path: str) -> str:
        try:
            if isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME:
                return _text(name)
        except _Unfit:
            pass
        return self.refuse(path, f"{_shown(name)} is not a column's name")

    def equal(self, column: str, given: Any, path: str) -> Condition:
        if isinstance(given, (list, tuple)):
            self.refuse(path, "equal takes one value; use `in` for a list")
        self.count(1, path)
        return Equal(column, self.value(given, path))

    def among(self, column: str, given: Any, path: str) -> Condition:
        values = self.listed(given, path, "values")
        self.count(len(values), path)
        return In(column, tuple(self.value(value, f"{path}[{at}]") for at, value in enumerate(values)))

    def between(self, column: str, given: Any, path: str) -> Condition:
        if not isinstance(given, (list, tuple)) or len(given) != 2:
            self.refuse(path, "between takes a list of two bounds, [low, high], both included")
        self.count(2, path)
        low, high = (self.value(value, f"{path}[{at}]") for at, value in enumerate(given))
        if low is None or high is None:
            self.refuse(path, "a bound cannot be null; for an open end give a value that no row exceeds")
        if _is_number(low) and _is_number(high) and low > high:
            self.refuse(path, f"the bounds are reversed; write [{_shown(high)}, {_shown(low)}]")
        return Between(column, low, high)

    def keys(self, given: Any, path: str) -> KeyList:
        entries = self.listed(given, path, "keys")
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

    def listed(self, given: Any, path: str, what: str) -> Sequence[Any]:
        if not isinstance(given, (list, tuple)):
            self.refuse(path, f"{_shown(given)} is not a list of {what}")
        if not given:
            # Such a hint describes no row at all, which is more likely a job's mistake than meant.
            self.refuse(path, f'the list of {what} is empty; leave the hint out if nothing changed, or write "unknown"')
        return given

    def count(self, values: int, path: str) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            self.refuse(path, f'more than {MAX_VALUES:,} values; describe the rows by a condition, or write "all"')

    def value(self, given: Any, path: str) -> Any:
        try:
            return _scalar(given)
        except _Unfit as error:
            self.refuse(path, str(error))


def _no_constant(name: str) -> NoReturn:
    raise _Unfit(f"{name} is not supported as a value, nor is it JSON; leave such rows to MIXED_CHANGES")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Python would keep the last of two equal names, and the hint would say less than was written."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Unfit(f"{_shown(name)} is given twice in one object; keep one, or use `in` or `or`")
        found[name] = value
    return found


def _scalar(value: Any) -> Any:
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
            return _text(value)
        # Digits that JSON libraries would round.
        case {"number": str(text), **others} if not others and _NUMBER.fullmatch(text):
            return _number(Decimal(text))
    raise _Unfit(f"{_shown(value)} is not a value; supported are texts, numbers, true, false and null")


def _number(value: float | Decimal) -> int | Decimal:
    if isinstance(value, int):
        if abs(value) >= 10**_DIGITS:
            raise _Unfit(f"{_shown(value)} is out of range")
        return int(value)
    # The digits that somebody wrote, not the binary fraction nearest to them.
    exact = value if isinstance(value, Decimal) else Decimal(float.__repr__(value))
    if not exact.is_finite():
        raise _Unfit(f"{_shown(exact)} is not supported; numbers are finite")
    if abs(exact.adjusted()) >= _DIGITS or len(exact.as_tuple().digits) > _DIGITS:
        raise _Unfit(f"{_shown(exact)} is out of range: numbers have at most {_DIGITS} digits")
    return exact


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unfit(f"{_shown(value)} holds half a character (a lone surrogate), which no table can") from None
    if "\0" in value:
        raise _Unfit(f"{_shown(value)} holds a NUL character; describe such rows by other columns")
    return value


def _shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_LETTERS else f"{value[:_SHOWN_LETTERS]!r}…"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**_DIGITS:
        return f"a number of more than {_DIGITS} digits"
    if isinstance(value, (int, float, Decimal)):
        text = str(value)
        return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
    return value.isoformat() if isinstance(value, (date, time)) else f"a {type(value).__name__}"


def _close(wanted: Any, known: Iterable[str]) -> str:
    """What was probably meant. Only the beginning is compared: the search is slow for long texts."""
    word = str(wanted)[:_SHOWN_LETTERS] if isinstance(wanted, str) else ""
    by_case = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return f" (did you mean {by_case[close[0]]}?)" if close else ""


# Writing JSON


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


# Fitting a hint to its table


def check_hint(hint: Hint, columns: Mapping[str, Column]) -> Hint:
    """The hint with the columns' stored names and values of the columns' Python types; what does not fit is an error."""
    return replace(hint, scope=_Fitter(f"A hint for {hint.table}", columns).scope(hint.scope))


class _Fitter:
    """Fits scopes to the columns of a table."""

    def __init__(self, about: str, columns: Mapping[str, Column]) -> None:
        self.about = about
        self.columns = {column.name: column for column in columns.values()}

    def refuse(self, message: str) -> NoReturn:
        raise HintError(f"{self.about}: {message}.")

    def scope(self, scope: Scope) -> Scope:
        match scope:
            case All() | Unknown():
                return scope
            case KeyList():
                return self.key_list(scope)
        return self.condition(scope, 1)

    def condition(self, condition: Condition, depth: int) -> Condition:
        if depth > MAX_DEPTH + 1:
            self.refuse(f"conditions are nested more than {MAX_DEPTH} deep; flatten them")
        match condition:
            case Equal(name, value):
                column = self.column(name)
                return Equal(column.name, self.value(column, value))
            case In(name, values):
                column = self.column(name)
                return In(column.name, tuple(self.value(column, value) for value in values))
            case Between(name, low, high):
                return self.between(self.column(name), low, high)
            case Not(inner):
                return Not(self.condition(inner, depth + 1))
            case And(conditions):
                return And(self.consistent(tuple(self.condition(each, depth + 1) for each in conditions)))
            case Or(conditions):
                return Or(tuple(self.condition(each, depth + 1) for each in conditions))
        return self.refuse(f"{_shown(condition)} is not a condition; supported are {', '.join(_OPERATORS)}")

    def key_list(self, listed: KeyList) -> KeyList:
        columns = tuple(self.column(name) for name in listed.columns)
        names = tuple(column.name for column in columns)
        if len(set(names)) < len(names):
            self.refuse(f"its keys name a column twice: {', '.join(listed.columns)}. Name each once")
        if not all(len(key) == len(columns) for key in listed.keys):
            self.refuse(f"every key needs {len(columns)} values, for {', '.join(names)}")
        typed = (
            tuple(self.value(column, value) for column, value in zip(columns, key, strict=True)) for key in listed.keys
        )
        return KeyList(names, tuple(typed))

    def between(self, column: Column, low: Any, high: Any) -> Between:
        if column.kind is Kind.BOOLEAN:
            self.refuse(f"column {column.name} is a boolean, which `between` cannot order. Use `equal` or `in`")
        if low is None or high is None:
            self.refuse(f"a bound for column {column.name} is null. Give both; for an open end one that no row exceeds")
        least, most = self.value(column, low), self.value(column, high)
        if least > most:
            self.refuse(f"the bounds for column {column.name} are reversed. Write [{_shown(high)}, {_shown(low)}]")
        return Between(column.name, least, most)

    def consistent(self, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
        """Two values for one column, such as {"product": "P1", "PRODUCT": "P2"}, would describe no row at all."""
        seen: dict[str, Any] = {}
        for each in conditions:
            if isinstance(each, Equal) and seen.setdefault(each.column, each.value) != each.value:
                both = f"{_shown(seen[each.column])} and {_shown(each.value)}"
                self.refuse(f"column {each.column} cannot be {both} at once. Use `in` or `or`")
        return conditions

    def column(self, name: str) -> Column:
        found = self.columns.get(name) or self.columns.get(name.upper())
        return found or self.refuse(
            f"there is no column {_shown(name)}{_close(name, self.columns)}. The table has {', '.join(self.columns)}"
        )

    def value(self, column: Column, value: Any) -> Any:
        if column.kind is Kind.JSON:
            self.refuse(f"column {column.name} holds JSON, which has no order or equality here. Use another column")
        if value is None:
            return None
        try:
            return _typed(column, _scalar(value))
        except _Unfit as error:
            self.refuse(f"column {column.name} ({column.kind.value}) cannot be {_shown(value)}: {error}")


def _typed(column: Column, value: Any) -> Any:
    match column.kind:
        case Kind.INTEGER:
            return int(_decimal(value, 0, "give a whole number, without quotes"))
        case Kind.DECIMAL:
            return _decimal(value, column.scale, f"give a number with at most {column.scale} decimals, without quotes")
        case Kind.FLOAT:
            return _float(value)
        case Kind.BOOLEAN if isinstance(value, bool):
            return value
        case Kind.BOOLEAN:
            raise _Unfit("give true or false, without quotes")
        case Kind.DATE:
            return _date(value)
        case Kind.TIME:
            return _time(value)
        case Kind.TIMESTAMP:
            return _timestamp(value)
        case Kind.INSTANT:
            return _instant(value)
    if not isinstance(value, str):
        raise _Unfit("give a text, in quotes")
    return value


def _decimal(value: Any, scale: int, expected: str) -> Decimal:
    """The number without an exponent, which Snowflake would read as a float. One that no row can hold is refused."""
    if not _is_number(value):
        raise _Unfit(expected)
    plain = format(Decimal(value), "f")
    whole, _, fraction = plain.lstrip("-").partition(".")
    if len(fraction.rstrip("0")) > scale:
        raise _Unfit(expected)
    if len(whole.lstrip("0")) > _SNOWFLAKE_DIGITS - scale:
        raise _Unfit(f"the column holds at most {_SNOWFLAKE_DIGITS - scale} digits before the point")
    return Decimal(plain)


def _float(value: Any) -> float:
    expected = "give a number that a double holds, without quotes"
    try:
        if _is_number(value) and abs(number := float(value)) != float("inf"):
            return number
    except OverflowError:
        pass
    raise _Unfit(expected)


_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_CLOCK = r"[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
_TIME = re.compile(_CLOCK)
_WALL = re.compile(rf"{_DATE.pattern}[T ]{_CLOCK}")
_ZONED = re.compile(rf"{_WALL.pattern}(Z|[+-][0-9]{{2}}(:?[0-9]{{2}})?)")
# A date alone would mean its first moment, and a range up to it would miss the day.
_NO_BARE_DATE = "a date alone is not enough"


def _date(value: Any) -> date:
    expected = "give a date as YYYY-MM-DD"
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        raise _Unfit(expected)
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise _Unfit(expected) from None


def _time(value: Any) -> time:
    expected = "give a time of day as HH:MM:SS"
    if isinstance(value, time) and value.tzinfo is None:
        return value
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise _Unfit(expected)
    try:
        return time.fromisoformat(value)
    except ValueError:
        raise _Unfit(expected) from None


def _timestamp(value: Any) -> datetime:
    expected = f"give a time without a zone as YYYY-MM-DDTHH:MM:SS; {_NO_BARE_DATE}"
    moment = _moment(value, _WALL, expected)
    if moment.tzinfo is not None:
        raise _Unfit(expected)
    return moment


def _instant(value: Any) -> datetime:
    expected = f"give a moment with its zone as YYYY-MM-DDTHH:MM:SSZ, or +01:00 for Z; {_NO_BARE_DATE}"
    moment = _moment(value, _ZONED, expected)
    if moment.tzinfo is None:
        raise _Unfit(expected)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise _Unfit(expected) from None


def _moment(value: Any, form: re.Pattern[str], expected: str) -> datetime:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not form.fullmatch(value):
        raise _Unfit(expected)
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise _Unfit(expected) from None


# What a scope means


def condition_sql(scope: Scope, columns: Mapping[str, Column], *, alias: str | None = None) -> str:
    """The scope as a Snowflake condition that is TRUE or FALSE, never NULL; `alias` as the statement writes it.

    The scope is checked here again: values become SQL text, so none gets in that is not of its column's type.
    """
    fitter = _Fitter("A hint", columns)
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
            return f"({' AND '.join(_sql(each, columns, prefix) for each in conditions) or 'TRUE'})"
        case Or(conditions):
            return f"({' OR '.join(_sql(each, columns, prefix) for each in conditions) or 'FALSE'})"


def _among_sql(column: Column, values: Iterable[Any], prefix: str) -> str:
    name = f"{prefix}{quote(column.name)}"
    wanted = list(dict.fromkeys(values))
    literals = [_literal(column, value) for value in wanted if value is not None]
    if None in wanted:
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
    nulls = [f"{name} IS {'NOT ' if there else ''}NULL" for name, there in zip(names, present, strict=True)]
    held = [at for at, there in enumerate(present) if there]
    if not held:
        return f"({' AND '.join(nulls)})"
    rows = [_row_sql([_literal(fields[at], key[at]) for at in held]) for key in keys]
    return f"({' AND '.join(nulls)} AND {_listed_sql(_row_sql([names[at] for at in held]), rows)})"


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
            held = _comparable(row[column], low)
            return held is not None and bool(low <= held <= high)
        case Not(condition):
            return not meets(condition, row)
        case And(conditions):
            return all(meets(condition, row) for condition in conditions)
        case Or(conditions):
            return any(meets(condition, row) for condition in conditions)


def _same(held: Any, value: Any) -> bool:
    """Null-safe."""
    return held is value is None or (held is not None and value is not None and _comparable(held, value) == value)


def _comparable(held: Any, value: Any) -> Any:
    """A row's value in the form of a hint's: Spark gives times of day as texts, and moments in local time, no zone."""
    if isinstance(value, time) and isinstance(held, str):
        return time.fromisoformat(held)
    if isinstance(value, datetime) and isinstance(held, datetime) and value.tzinfo and held.tzinfo is None:
        return held.astimezone(UTC)
    return held


def columns_of(scope: Scope) -> tuple[str, ...]:
    """The columns that the scope asks for, each once."""
    match scope:
        case All() | Unknown():
            return ()
        case KeyList(columns, _):
            return columns
        case Equal(column) | In(column) | Between(column):
            return (column,)
        case Not(condition):
            return columns_of(condition)
        case And(conditions) | Or(conditions):
            return tuple(dict.fromkeys(name for each in conditions for name in columns_of(each)))


def split_scope(scope: Scope, at_most: int) -> tuple[Scope, ...]:
    """Scopes that make up this one together; a long list falls into parts, so that each fits into one statement."""
    match scope:
        case KeyList(columns, keys) if len(keys) > at_most:
            return tuple(KeyList(columns, keys[at : at + at_most]) for at in range(0, len(keys), at_most))
        case In(column, values) if len(values) > at_most:
            return tuple(In(column, values[at : at + at_most]) for at in range(0, len(values), at_most))
    return (scope,)


# What the keys say about the hint


@dataclass(frozen=True)
class Resolution:
    """The keys that a hint's scope hits: before the change (in the ledger) and after it (in the source)."""

    hint: Hint
    old_keys: frozenset[Key]
    new_keys: frozenset[Key]

    @property
    def keys(self) -> frozenset[Key]:
        """What to look at again: both sides, whatever the type claims."""
        return self.old_keys | self.new_keys

    @property
    def warnings(self) -> tuple[str, ...]:
        return type_warnings(self.hint, old_keys=self.old_keys, new_keys=self.new_keys)


def type_warnings(hint: Hint, *, old_keys: Collection[Key], new_keys: Collection[Key]) -> tuple[str, ...]:
    """What the keys in the scope, in the ledger and in the source, say against the declared type."""
    if isinstance(hint.scope, Unknown):
        # Every key is in this scope, so the keys say nothing about it.
        return ()
    old, new = set(old_keys), set(new_keys)
    says = f"{hint.table}: a hint says {hint.type.name}, but"
    match hint.type:
        case ChangeType.ADD_ROWS if old:
            what = f"its scope hits {_counted(old)} that the extract has already"
            return (f"{says} {what}. They are replaced, not added twice; if rows changed too, say MIXED_CHANGES.",)
        case ChangeType.REMOVE_ROWS if new:
            what = f"the source still has {_counted(new)} in its scope"
            return (f"{says} {what}. They stay in the extract; if not all go, narrow the scope or say MIXED_CHANGES.",)
        case ChangeType.UPDATE_ROWS if old != new:
            sides = [(new - old, "source", "extract"), (old - new, "extract", "source")]
            hits = [f"{_counted(keys)} in the {one} but not in the {other}" for keys, one, other in sides if keys]
            what = f"its scope hits {' and '.join(hits)}"
            return (
                f"{says} {what}. They are replaced like all others; if rows came, went or moved, say MIXED_CHANGES.",
            )
    return ()


def partial_warning(hints: Iterable[Hint], *, detected: int, described: int, missed: Collection[Key]) -> str | None:
    """Says that changes were found which no hint describes, if so: `missed` are the detected keys not described."""
    tables = ", ".join(dict.fromkeys(str(hint.table) for hint in hints))
    keys = set(missed)
    if not keys or not tables:
        return None
    return (
        f"The hints for {tables} were partial: {detected:,} changed keys were found, {described:,} were described, and "
        f"{_counted(keys)} in no hint {_are(keys)} refreshed all the same. Let the job describe all that it changes, or say unknown."
    )


def _are(keys: Collection[Key]) -> str:
    return "is" if len(keys) == 1 else "are"


def _counted(keys: Collection[Key]) -> str:
    """How many, and the first few of them."""
    first = nsmallest(_SHOWN_KEYS, keys, key=_rank)
    more = ", …" if len(keys) > len(first) else ""
    return f"{len(keys):,} {'key' if len(keys) == 1 else 'keys'} ({', '.join(map(_key_text, first))}{more})"


def _rank(key: Key) -> tuple[Any, ...]:
    return tuple(_place(value) for value in key)


def _place(value: Any) -> tuple[int, Any, str]:
    """An order for values of any types: numbers by size, NULLs last."""
    if _is_number(value) and value == value:  # noqa: PLR0124 - NaN has no order
        return (0, value, "")
    return (2 if value is None else 1, 0, f"{type(value).__name__} {value}")


def _key_text(key: Key) -> str:
    texts = ["NULL" if value is None else _shown(value) for value in key]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
