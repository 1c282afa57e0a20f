"""Fits a hint to its table: column names as stored, values in the columns' types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any, NoReturn

from tir_dagster.changes.hints.model import (
    MAX_DEPTH,
    OPERATORS,
    All,
    And,
    Between,
    Condition,
    Equal,
    Hint,
    In,
    KeyList,
    Not,
    Or,
    Scope,
    Unknown,
    UnusableValue,
    is_number,
    scalar,
    suggestion,
    value_text,
)
from tir_dagster.errors import HintError
from tir_dagster.snowflake.columns import Column, Kind

_SNOWFLAKE_DIGITS = 38


def check_hint(hint: Hint, columns: Mapping[str, Column]) -> Hint:
    """Return the hint with stored column names and values of the columns' Python types; raise HintError if they do not fit."""
    return replace(hint, scope=Fitter(f"A hint for {hint.table}", columns).scope(hint.scope))


class Fitter:
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
                return And(self.consistent(tuple(self.condition(part, depth + 1) for part in conditions)))
            case Or(conditions):
                return Or(tuple(self.condition(part, depth + 1) for part in conditions))
        return self.refuse(f"{value_text(condition)} is not a condition; supported are {', '.join(OPERATORS)}")

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
            self.refuse(
                f"the bounds for column {column.name} are reversed. Write [{value_text(high)}, {value_text(low)}]"
            )
        return Between(column.name, least, most)

    def consistent(self, conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
        """Refuse two values for one column, such as {"product": "P1", "PRODUCT": "P2"}, which would describe no row."""
        values: dict[str, Any] = {}
        for condition in conditions:
            if isinstance(condition, Equal) and values.setdefault(condition.column, condition.value) != condition.value:
                values_text = f"{value_text(values[condition.column])} and {value_text(condition.value)}"
                self.refuse(f"column {condition.column} cannot be {values_text} at once. Use `in` or `or`")
        return conditions

    def column(self, name: str) -> Column:
        column = self.columns.get(name) or self.columns.get(name.upper())
        return column or self.refuse(
            f"there is no column {value_text(name)}{suggestion(name, self.columns)}. The table has {', '.join(self.columns)}"
        )

    def value(self, column: Column, value: Any) -> Any:
        if column.kind is Kind.JSON:
            self.refuse(f"column {column.name} holds JSON, which has no order or equality here. Use another column")
        if value is None:
            return None
        try:
            return _typed(column, scalar(value))
        except UnusableValue as error:
            self.refuse(f"column {column.name} ({column.kind.value}) cannot be {value_text(value)}: {error}")


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
            raise UnusableValue("give true or false, without quotes")
        case Kind.DATE:
            return _date(value)
        case Kind.TIME:
            return _time(value)
        case Kind.TIMESTAMP:
            return _timestamp(value)
        case Kind.INSTANT:
            return _instant(value)
    if not isinstance(value, str):
        raise UnusableValue("give a text, in quotes")
    return value


def _decimal(value: Any, scale: int, expected: str) -> Decimal:
    """The number without an exponent, which Snowflake would read as a float. One that no row can hold is refused."""
    if not is_number(value):
        raise UnusableValue(expected)
    plain = format(Decimal(value), "f")
    whole, _, fraction = plain.lstrip("-").partition(".")
    if len(fraction.rstrip("0")) > scale:
        raise UnusableValue(expected)
    if len(whole.lstrip("0")) > _SNOWFLAKE_DIGITS - scale:
        raise UnusableValue(f"the column holds at most {_SNOWFLAKE_DIGITS - scale} digits before the point")
    return Decimal(plain)


def _float(value: Any) -> float:
    expected = "give a number that a double holds, without quotes"
    try:
        if is_number(value) and abs(number := float(value)) != float("inf"):
            return number
    except OverflowError:
        pass
    raise UnusableValue(expected)


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
        raise UnusableValue(expected)
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise UnusableValue(expected) from None


def _time(value: Any) -> time:
    expected = "give a time of day as HH:MM:SS"
    if isinstance(value, time) and value.tzinfo is None:
        return value
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise UnusableValue(expected)
    try:
        return time.fromisoformat(value)
    except ValueError:
        raise UnusableValue(expected) from None


def _timestamp(value: Any) -> datetime:
    expected = f"give a time without a zone as YYYY-MM-DDTHH:MM:SS; {_NO_BARE_DATE}"
    moment = _moment(value, _WALL, expected)
    if moment.tzinfo is not None:
        raise UnusableValue(expected)
    return moment


def _instant(value: Any) -> datetime:
    expected = f"give a moment with its zone as YYYY-MM-DDTHH:MM:SSZ, or +01:00 for Z; {_NO_BARE_DATE}"
    moment = _moment(value, _ZONED, expected)
    if moment.tzinfo is None:
        raise UnusableValue(expected)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise UnusableValue(expected) from None


def _moment(value: Any, form: re.Pattern[str], expected: str) -> datetime:
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not form.fullmatch(value):
        raise UnusableValue(expected)
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise UnusableValue(expected) from None
