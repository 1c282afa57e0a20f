"""A batch of changes to a live-to-Hyper datasource as a client words it: its actions and their conditions, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ACTIONS = ("insert", "update", "upsert", "delete", "replace")
# What public samples show, and no more: a test for NULL is not among them.
COMPARISONS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
CONNECTIVES = ("and", "or")
_CONDITIONAL = ("update", "upsert", "delete")
_KNOWN = {"action", "target-table", "target-schema", "source-table", "source-schema", "condition"}
_SIDES = ("target-col", "source-col", "const")
_DEEPEST = 50


class BatchError(Exception):
    """The batch cannot be carried out; the message becomes a note of the job."""


@dataclass(frozen=True)
class Column:
    """A column of the target or of the payload."""

    side: str
    name: str


@dataclass(frozen=True)
class Constant:
    """A constant of a condition, ready for SQL."""

    sql: str


@dataclass(frozen=True)
class Comparison:
    """`left op right`; as in SQL it is never true when one of them is NULL."""

    op: str
    left: Column | Constant
    right: Column | Constant

    def columns(self) -> Iterator[Column]:
        yield from (side for side in (self.left, self.right) if isinstance(side, Column))


@dataclass(frozen=True)
class Junction:
    """Conditions joined by `and` or `or`."""

    op: str
    parts: tuple[Condition, ...]

    def columns(self) -> Iterator[Column]:
        for part in self.parts:
            yield from part.columns()


Condition = Comparison | Junction


@dataclass(frozen=True)
class Action:
    """One step of a batch. A table is (schema, name); the schema is None where the client left it out."""

    kind: str
    target: tuple[str | None, str]
    source: tuple[str | None, str] | None
    condition: Condition | None


def read_actions(value: Any) -> list[Action]:
    """The actions of a request's body, which is checked to be a list of objects already."""
    return [_in_place(number, _action, entry) for number, entry in enumerate(value, 1)]


def _in_place(number: int, read: Callable[[dict[str, Any]], Action], entry: dict[str, Any]) -> Action:
    try:
        return read(entry)
    except BatchError as error:
        raise BatchError(f"Action {number} is malformed: {error}") from error


def _action(entry: dict[str, Any]) -> Action:
    kind = entry.get("action")
    if kind not in ACTIONS:
        raise BatchError(f"unknown action {kind!r}; known are {list(ACTIONS)}.")
    if unknown := sorted(set(entry) - _KNOWN):
        raise BatchError(f"unknown properties {unknown}.")
    target, source = _table(entry, "target"), _table(entry, "source")
    if target is None:
        raise BatchError("it has no target-table.")
    if source is None and kind != "delete":
        raise BatchError(f"{kind} needs a source-table.")
    if (kind in _CONDITIONAL) != ("condition" in entry):
        raise BatchError(f"{kind} {'needs a' if kind in _CONDITIONAL else 'takes no'} condition.")
    condition = _condition(entry["condition"], 1) if "condition" in entry else None
    if source is None and condition is not None and any(column.side == "source" for column in condition.columns()):
        raise BatchError("its condition names a source-col, but the action has no source-table.")
    return Action(str(kind), target, source, condition)


def _table(entry: dict[str, Any], side: str) -> tuple[str | None, str] | None:
    schema, name = entry.get(f"{side}-schema"), entry.get(f"{side}-table")
    if schema is not None and not isinstance(schema, str):
        raise BatchError(f"{side}-schema is not a string.")
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise BatchError(f"{side}-table is not a name.")
    return schema, name


def _condition(value: Any, depth: int) -> Condition:
    if not isinstance(value, dict):
        raise BatchError("a condition is an object.")
    if depth > _DEEPEST:
        raise BatchError(f"a condition may be nested {_DEEPEST} times.")
    op = value.get("op") if isinstance(value.get("op"), str) else repr(value.get("op"))
    if op in CONNECTIVES:
        args = value.get("args")
        if set(value) != {"op", "args"} or not isinstance(args, list) or not args:
            raise BatchError(f"{op!r} takes a list of conditions as args.")
        return Junction(str(op), tuple(_condition(part, depth + 1) for part in args))
    if op not in COMPARISONS:
        raise BatchError(f"unknown op {op!r}; known are {[*COMPARISONS, *CONNECTIVES]}.")
    sides = [side for side in _SIDES if side in value]
    if len(sides) != 2 or set(value) != {"op", *sides}:
        raise BatchError(f"{op!r} compares two of {list(_SIDES)}.")
    return Comparison(str(op), _side(sides[0], value[sides[0]]), _side(sides[1], value[sides[1]]))


def _side(kind: str, value: Any) -> Column | Constant:
    if kind == "const":
        return Constant(_constant(value))
    if not isinstance(value, str) or not value:
        raise BatchError(f"{kind} is not the name of a column.")
    return Column(kind.removesuffix("-col"), value)


def _constant(value: Any) -> str:
    if not isinstance(value, dict) or set(value) != {"type", "v"}:
        raise BatchError("a const has a type and a value, v.")
    kind, given = value["type"], value["v"]
    if not isinstance(kind, str) or kind not in _CONSTANTS:
        raise BatchError(f"unknown type of const {kind!r}; known are {sorted(_CONSTANTS)}.")
    # Some clients send numbers and truth values as text.
    text = ("true" if given else "false") if isinstance(given, bool) else str(given)
    sql = _CONSTANTS[kind](text) if isinstance(given, (str, bool, int, float)) else None
    if sql is None:
        raise BatchError(f"{given!r} is no const of type {kind}.")
    return sql


def _matching(pattern: str, kind: str) -> Callable[[str], str | None]:
    return lambda text: f"CAST('{text}' AS {kind})" if re.fullmatch(pattern, text) else None


def _string(text: str) -> str | None:
    quoted = text.replace("'", "''")
    return None if "\0" in text else f"CAST('{quoted}' AS TEXT)"


def _moment(text: str) -> str | None:
    """ISO 8601; a time with a zone counts in UTC, because extracts know no zones."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    naive = moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo is not None else moment
    return f"CAST('{naive.isoformat(sep=' ')}' AS TIMESTAMP)"


def _day(text: str) -> str | None:
    try:
        return f"CAST('{datetime.strptime(text, '%Y-%m-%d').replace(tzinfo=UTC).date()}' AS DATE)"
    except ValueError:
        return None


_CONSTANTS: dict[str, Callable[[str], str | None]] = {
    "string": _string,
    "boolean": _matching("true|false", "BOOL"),
    "integer": _matching(r"-?[0-9]{1,18}", "BIGINT"),
    "double": _matching(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", "DOUBLE PRECISION"),
    "date": _day,
    "datetime": _moment,
}
