"""The result of the analysis of a query, as plain values: tables, joins, columns, orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tir_dagster.snowflake.names import TableName

Role = Literal["fact", "left", "inner", "read"]
Kind = Literal["copy", "join", "aggregate", "whole", "opaque"]
# A column of a table of the query: the table's alias, and the column's name.
ColumnRead = tuple[str, str]
# The names that the SELECT of rows before aggregation gives to columns of its own begin so.
RESERVED = "__TIR_"


@dataclass(frozen=True)
class JoinKey:
    """One equality of a join: the parent's column refers to the joined table's key."""

    parent: str
    column: str
    key: str


@dataclass(frozen=True)
class ViewTable:
    """A table of the view. The fact comes first; `left` is optional, `inner` mandatory; an opaque view only reads.

    `used` are the columns that can change the view's rows; a change of another column changes nothing.
    """

    alias: str
    table: TableName
    role: Role
    on: tuple[JoinKey, ...]
    used: tuple[str, ...]
    columns: tuple[str, ...] = ()
    condition: str | None = None


@dataclass(frozen=True)
class ViewColumn:
    """An output: its name as stored, its expression over the tables' aliases, and the columns which that reads."""

    name: str
    sql: str
    reads: tuple[ColumnRead, ...]
    aggregate: bool


@dataclass(frozen=True)
class OpenOrder:
    """An order in which rows may tie, so that the query may give other rows each time it is asked.

    `probe` is a SELECT, in pieces between which tables stand, that gives a row if any rows tie; empty if none can be made.
    """

    written: str
    probe: tuple[str | TableName, ...] = ()


@dataclass(frozen=True)
class View:
    """What a query means for a refresh by key.

    A `whole` view gives the same rows for the same tables, but cannot be taken apart: it is compared as a whole, and
    `why_whole` says why. An `opaque` one may give others each time: it is loaded in full, and `why_full` says why. Of both,
    `text` is the query's own text, in pieces between which its tables stand. A view is `restless` if its rows can differ
    though no table changed: by the clock, by chance, by who asks.
    """

    kind: Kind
    tables: tuple[ViewTable, ...]
    columns: tuple[ViewColumn, ...]
    group: tuple[str, ...] = ()
    why_full: str | None = None
    why_whole: str | None = None
    # Orders in which rows may tie: they matter where the view is compared as a whole.
    orders: tuple[OpenOrder, ...] = ()
    # Of a whole view: whether it adds numbers up, of which floats may differ a little.
    adds_up: bool = False
    where: str | None = None
    having: str | None = None
    having_reads: tuple[ColumnRead, ...] = ()
    text: tuple[str | TableName, ...] = ()
    restless: bool = False

    @property
    def fact(self) -> ViewTable:
        return self.tables[0]
