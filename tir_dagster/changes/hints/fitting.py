"""Fits a hint to its table (column names as stored, values in the columns' types), and writes its scope as SQL, for Snowflake or for an extract.

Conditions know only true and false: a NULL is not equal to a value, in a list without NULL, or between two bounds, and
therefore it is what `not` of these describes. SQL's third answer would lose such rows, and keys that are missed are the
one dangerous mistake of a refresh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    Key,
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
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import sql_literal

_SNOWFLAKE_DIGITS = 38
# Snowflake refused longer lists until 2024; several lists joined by OR always pass.
_LONGEST_LIST = 16_384


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
            return _moment(value, date, _DATE, "give a date as YYYY-MM-DD")
        case Kind.TIME:
            return _moment(value, time, _TIME, "give a time of day as HH:MM:SS")
        case Kind.TIMESTAMP:
            expected = f"give a time without a zone as YYYY-MM-DDTHH:MM:SS; {_NO_BARE_DATE}"
            return _moment(value, datetime, _TIMESTAMP, expected)
        case Kind.INSTANT:
            expected = f"give a moment with its zone as YYYY-MM-DDTHH:MM:SSZ, or +01:00 for Z; {_NO_BARE_DATE}"
            return _moment(value, datetime, _INSTANT, expected, zoned=True)
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
    with suppress(OverflowError):
        if is_number(value) and abs(number := float(value)) != float("inf"):
            return number
    raise UnusableValue("give a number that a double holds, without quotes")


_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
_TIMESTAMP = rf"{_DATE}[T ]{_TIME}"
_INSTANT = rf"{_TIMESTAMP}(Z|[+-][0-9]{{2}}(:?[0-9]{{2}})?)"
# A date alone would mean its first moment, and a range up to it would miss the day.
_NO_BARE_DATE = "a date alone is not enough"


def _moment(value: Any, kind: type[date | time], form: str, expected: str, *, zoned: bool = False) -> Any:
    """A date, a time of day or both, in UTC if it has a zone; a text must have this form, which is narrower than ISO 8601."""
    with suppress(ValueError, OverflowError):
        moment: Any = kind.fromisoformat(value) if isinstance(value, str) and re.fullmatch(form, value) else value
        # In Python a datetime is a date, too.
        is_kind = isinstance(moment, kind) and isinstance(moment, datetime) == (kind is datetime)
        if is_kind and (getattr(moment, "tzinfo", None) is not None) == zoned:
            return moment.astimezone(UTC) if zoned else moment
    raise UnusableValue(expected)


@dataclass(frozen=True)
class ConditionWriter:
    """How a system writes the columns and values of conditions."""

    name: Callable[[str], str]
    literal: Callable[[Column, Any], str]


def condition_sql(scope: Scope, columns: Mapping[str, Column], *, alias: str | None = None) -> str:
    """The scope as a Snowflake condition that is TRUE or FALSE, never NULL; `alias` as the statement writes it."""
    prefix = f"{alias}." if alias else ""
    return written_condition(scope, columns, ConditionWriter(lambda name: f"{prefix}{quote(name)}", _literal))


def written_condition(scope: Scope, columns: Mapping[str, Column], writer: ConditionWriter) -> str:
    """The same as this writer writes it.

    The scope is checked here again: values become SQL text, so none gets in that is not of its column's type.
    """
    fitter = Fitter("A hint", columns)
    return _sql(fitter.scope(scope), fitter.columns, writer)


# Kinds whose values an extract holds and compares exactly as the table does; a text may have a collation in the table.
_HELD_EXACTLY = (Kind.INTEGER, Kind.BOOLEAN, Kind.DATE)


def is_held_exactly(scope: Scope, columns: Mapping[str, Column]) -> bool:
    """Whether an extract with these columns tells which of its rows the scope describes."""
    match scope:
        case All() | Unknown():
            return True
        case KeyList():
            names: tuple[str, ...] = scope.columns
            # Hyper has no lists of rows.
            return len(names) == 1 and all(_is_exact(columns, name) for name in names)
        case Equal() | In() | Between():
            return _is_exact(columns, scope.column)
        case Not(condition):
            return is_held_exactly(condition, columns)
        case And(conditions) | Or(conditions):
            return all(is_held_exactly(part, columns) for part in conditions)


def _is_exact(columns: Mapping[str, Column], name: str) -> bool:
    return name in columns and columns[name].kind in _HELD_EXACTLY


def _sql(scope: Scope, columns: Mapping[str, Column], writer: ConditionWriter) -> str:
    match scope:
        case All() | Unknown():
            return "TRUE"
        case KeyList():
            return _keys_sql(scope, columns, writer)
        case Equal(name, value):
            return _among_sql(columns[name], [value], writer)
        case In(name, values):
            return _among_sql(columns[name], values, writer)
        case Between(name, low, high):
            column = writer.name(name)
            bounds = f"{writer.literal(columns[name], low)} AND {writer.literal(columns[name], high)}"
            return f"({column} IS NOT NULL AND {column} BETWEEN {bounds})"
        case Not(condition):
            return f"(NOT {_sql(condition, columns, writer)})"
        case And(conditions):
            return f"({' AND '.join(_sql(part, columns, writer) for part in conditions) or 'TRUE'})"
        case Or(conditions):
            return f"({' OR '.join(_sql(part, columns, writer) for part in conditions) or 'FALSE'})"


def _among_sql(column: Column, values: Iterable[Any], writer: ConditionWriter) -> str:
    name = writer.name(column.name)
    distinct = list(dict.fromkeys(values))
    literals = [writer.literal(column, value) for value in distinct if value is not None]
    if None in distinct:
        return f"({name} IS NULL OR {_listed_sql(name, literals)})" if literals else f"({name} IS NULL)"
    return f"({name} IS NOT NULL AND {_listed_sql(name, literals)})"


def _keys_sql(listed: KeyList, columns: Mapping[str, Column], writer: ConditionWriter) -> str:
    """Keys with NULLs in the same places together: each such group is one list of rows without NULLs."""
    fields = [columns[name] for name in listed.columns]
    if len(fields) == 1:
        return _among_sql(fields[0], [key[0] for key in listed.keys], writer)
    groups: dict[tuple[bool, ...], list[Key]] = {}
    for key in dict.fromkeys(listed.keys):
        groups.setdefault(tuple(value is not None for value in key), []).append(key)
    tests = [_group_sql(fields, present, keys, writer) for present, keys in groups.items()]
    return f"({' OR '.join(tests) or 'FALSE'})"


def _group_sql(
    fields: Sequence[Column], present: tuple[bool, ...], keys: Iterable[Key], writer: ConditionWriter
) -> str:
    names = [writer.name(column.name) for column in fields]
    nulls = [f"{name} IS {'NOT ' if is_set else ''}NULL" for name, is_set in zip(names, present, strict=True)]
    places = [at for at, is_set in enumerate(present) if is_set]
    if not places:
        return f"({' AND '.join(nulls)})"
    rows = [_row_sql([writer.literal(fields[at], key[at]) for at in places]) for key in keys]
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
