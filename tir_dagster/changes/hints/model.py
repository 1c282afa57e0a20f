"""What somebody outside says has changed: the values. Claims to check, never instructions."""

from __future__ import annotations

from dataclasses import dataclass
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
