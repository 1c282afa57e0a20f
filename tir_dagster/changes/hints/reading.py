"""Reads hints from JSON or mappings, and refuses what is not clear."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from tir_dagster.changes.hints.model import (
    MAX_DEPTH,
    OPERATORS,
    All,
    And,
    Between,
    ChangeType,
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
    checked_text,
    is_number,
    scalar,
    suggestion,
    value_text,
)
from tir_dagster.errors import HintError, SourceError
from tir_dagster.snowflake.names import TableName

MAX_CONDITIONS = 1_000
MAX_VALUES = 100_000
_LONGEST_NAME = 255


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
