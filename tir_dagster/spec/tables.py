"""What rows an extract shows: one table or query, or several tables with the relationships between them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator

from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.declaration import Declaration, Duration, Texts

KEY_NEEDED = "give a row key, or slices: without both, nothing smaller than the extract can be replaced"

_STARTS = {"month": r"\d{4}-\d{2}(-01)?", "week": r"\d{4}-\d{2}-\d{2}", "day": r"\d{4}-\d{2}-\d{2}"}
_PART = r'\s*(?:"(?:[^"]|"")+"|[A-Za-z_][A-Za-z0-9_$]*)\s*'
TABLE_FORM = re.compile(rf"{_PART}\.{_PART}\.{_PART}")
# The name of a table in an extract of several: of its table in the Hyper file, and of folders.
_TABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_ -]{0,99}(?<! )")


@dataclass(frozen=True)
class Slices(Declaration):
    """Coarse parts of the extract by a date or timestamp column, or by the values of another: the unit of backfill and verification."""

    by: Literal["month", "week", "day", "value", "none"] = "none"
    """What a slice is: a month, week or day of a column, or each of its values."""
    column: str | None = None
    """The column whose month, week, day or value a row belongs to."""
    start: str | None = None
    """The first month (YYYY-MM), week or day (YYYY-MM-DD); older rows still belong to the extract."""
    zone: str = "UTC"
    """The time zone of the slices, such as Europe/Berlin."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.by == "none":
            if self.column:
                yield "by", "say how to slice: month, week, day or value"
            return
        if not self.column:
            kind = "column" if self.by == "value" else "date or timestamp column"
            yield "column", f"name the {kind} whose {self.by} a row belongs to"
        if self.by == "value":
            if self.start:
                yield "start", "slices by value have no first one; leave it out"
        else:
            yield from self._start_problems()
        try:
            ZoneInfo(self.zone)
        except (OSError, ValueError, KeyError):
            yield "zone", f"{self.zone!r} is no time zone; use a name such as UTC or Europe/Berlin"

    def _start_problems(self) -> Iterator[tuple[str, str]]:
        first = self._first_day()
        if first is None:
            form = "YYYY-MM" if self.by == "month" else "YYYY-MM-DD"
            yield "start", f"give the first {self.by} as {form}; older rows still belong to the extract"
        elif first > (datetime.now(UTC) + timedelta(days=1)).date():
            # One day of tolerance: in some time zone tomorrow has begun.
            yield "start", f"{self.start} lies in the future; give the first {self.by} that has rows"

    def _first_day(self) -> date | None:
        """The start as a date; None for anything that is not one."""
        if not self.start or not re.fullmatch(_STARTS[self.by], self.start):
            return None
        try:
            return date.fromisoformat(f"{self.start}-01"[:10])
        except ValueError:
            return None


Detector = Literal["diff", "watermark", "feed", "snapshot", "hint"]


@dataclass(frozen=True)
class TableChanges(Declaration):
    """How changed rows of one table are found."""

    detector: Detector | None = None
    """Left out: by the watermark if there is one, else every row is compared. `snapshot` is the old name of `diff`."""
    watermark: str | None = None
    """The column that every change raises."""
    look_back: Duration = 600.0
    """How long before the last watermark to look again, for late commits."""
    deletes: bool = True
    """Find keys that left the source."""

    @property
    def by(self) -> Detector:
        # `snapshot` is the old name of `diff`.
        detector: Detector | None = "diff" if self.detector == "snapshot" else self.detector
        return detector or ("watermark" if self.watermark else "diff")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.by == "watermark" and not self.watermark:
            yield (
                "watermark",
                "name the column that every change raises, or choose another detector: feed, snapshot or hint",
            )
        if self.by != "watermark" and self.watermark:
            yield "detector", f"{self.by} uses no watermark; leave one of the two out"


@dataclass(frozen=True)
class JoinedChanges(TableChanges):
    """How changed rows of a joined table are found, and what a key means that it has more than once."""

    duplicates: Literal["warn", "fail"] = "warn"
    """Rows that refer to such a key are multiplied: warn of it, or fail."""


@dataclass(frozen=True)
class Changes(TableChanges):
    """How changes are found: in the source, or in a query's first table; and in a query's further ones."""

    tables: Mapping[str, JoinedChanges] = field(default_factory=dict)
    """The same for the joined tables of a query, by DATABASE.SCHEMA.TABLE."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        first_names: dict[TableName, str] = {}
        for name in self.tables:
            if not TABLE_FORM.fullmatch(name):
                yield f"tables.{name}", "give the table as DATABASE.SCHEMA.TABLE"
            elif (first_name := first_names.setdefault(TableName.parse(name), name)) != name:
                yield f"tables.{name}", f"the same table as {first_name}; keep one of the two"


class RowSource:
    """What an extract of one table and each table of an extract of several have in common: where rows come from, and their keys."""

    source: str
    query: str | None
    row_key: tuple[str, ...]
    columns: tuple[str, ...]
    slices: Slices
    changes: Changes

    @property
    def main_table(self) -> str:
        """The table that rows come from: the source, or the first table of the query; empty if the query cannot be read."""
        if self.query is None or self.source:
            return self.source
        # Here and not above: SQL is parsed by a library that a plain table does not need.
        from tir_dagster.snowflake.query import ViewError, tables_of

        with suppress(ViewError):
            return str(next(iter(tables_of(self.query)), ""))
        return ""

    def _query_problems(self) -> Iterator[tuple[str, str]]:
        from tir_dagster.snowflake.query import ViewError, tables_of

        assert self.query is not None
        try:
            tables = {str(table) for table in tables_of(self.query)}
        except ViewError as error:
            yield "query", str(error).removeprefix("`query`").lstrip(",: ").rstrip(".")
            return
        if not tables:
            yield "query", "it reads no table; select from one that an extract can follow"
        elif self.source and self.source not in tables:
            yield "source", "give a table as `source`, or a SELECT as `query`, not both"
        if self.columns:
            yield "columns", "a query names its columns itself"
        for name in self.changes.tables:
            if str(TableName.parse(name)) not in tables:
                yield f"changes.tables.{name}", f"the query does not read it; it reads {', '.join(sorted(tables))}"

    def source_problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the source and its settings."""
        if self.query is not None:
            yield from self._query_problems()
        elif self.changes.tables:
            yield "changes.tables", "only a `query` reads further tables"
        elif not TABLE_FORM.fullmatch(self.source):
            example = 'a part with small letters, spaces or points in double quotes: DATABASE.SCHEMA."My Table"'
            yield "source", f"give the table as DATABASE.SCHEMA.TABLE, {example}"

    @property
    def lacks_key(self) -> bool:
        """Whether nothing smaller than all rows can be replaced. A query that aggregates needs no row key: its groups are the keys."""
        return not self.row_key and self.slices.by == "none" and self.query is None


@dataclass(frozen=True)
class ExtractTable(RowSource, Declaration):
    """One of several tables of an extract: its source, its keys and slices, and how its changes are found."""

    replaceable = (("source", "query"),)

    name: str
    """Names the table in the Hyper file; in a datasource that people built, the logical table that is kept."""
    source: str
    """One table as it is, DATABASE.SCHEMA.TABLE; or give a `query`."""
    query: str | None = None
    """A SELECT, instead of `source`."""
    row_key: Texts = ()
    """The columns that identify a row; without them whole slices are replaced."""
    columns: Texts = ()
    """The columns of the table; left out, the datasource's own, or all."""
    slices: Slices = Slices()
    changes: Changes = Changes()
    main: bool = False
    """The table whose slices are the partitions of the assets; left out, the first one."""
    delete_share: float | None = None
    """Stop if more than this share of the table's rows would be removed; left out, `thresholds.delete_share`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if not _TABLE_NAME.fullmatch(self.name):
            yield "name", "begin with a letter, then letters, digits, underscores, hyphens or spaces, at most 100"
        if self.delete_share is not None and not 0 <= self.delete_share <= 1:
            yield "delete_share", "give a share between 0 and 1"
        yield from self.source_problems()


def _column_pairs(value: object) -> object:
    """Columns of the same names may be a list."""
    if isinstance(value, str):
        return {value: value}
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return {name: name for name in value}
    return value


ColumnPairs = Annotated[
    Mapping[str, str], BeforeValidator(_column_pairs, json_schema_input_type=dict[str, str] | list[str] | str)
]
Cardinality = Literal["many_to_one", "one_to_one", "many_to_many"]


@dataclass(frozen=True)
class Relationship(Declaration):
    """How rows of one table refer to rows of another one, as Tableau relates logical tables."""

    table: str
    """The table whose rows refer to the other one, such as the facts."""
    refers_to: str
    """The table that they refer to, such as a dimension."""
    columns: ColumnPairs
    """The columns of `table`, each with the column of `refers_to` that has the same values; a list where the names are the same."""
    cardinality: Cardinality = "many_to_one"
    """How many rows of each table may have the same values: `one` promises that they are unique there."""
    integrity: Literal["some", "all"] = "some"
    """Whether all rows of `table` have a partner, which Tableau calls referential integrity, or some."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.columns:
            yield "columns", "name the columns that have the same values in both tables"

    @property
    def label(self) -> str:
        return f"{self.table} → {self.refers_to}"


def tables_problems(
    tables: Sequence[ExtractTable], relationships: Sequence[Relationship], *, needs_keys: bool
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong between the tables of an extract; a delivery that copies nothing needs no keys and relationships."""
    if len(tables) == 1:
        yield "tables", "one table needs no `tables`: give its `source` or `query`, and its keys, in the extract itself"
    names: dict[str, ExtractTable] = {}
    for at, table in enumerate(tables):
        if (first := names.setdefault(table.name.casefold(), table)) is not table:
            yield f"tables[{at}].name", f"a second table is named {first.name}; names are unique, whatever their case"
        if needs_keys and table.lacks_key:
            yield f"tables[{at}].row_key", f"{table.name}: {KEY_NEEDED.replace('the extract', 'the table')}"
    mains = [(at, table) for at, table in enumerate(tables) if table.main]
    for at, table in mains[1:]:
        yield (
            f"tables[{at}].main",
            f"{mains[0][1].name} is the main table already, and there is only one; take it from {table.name}",
        )
    known = [table.name for table in tables]
    wrong = list(_relationship_problems(known, relationships))
    yield from wrong
    if needs_keys and not wrong:
        yield from _unrelated(known, relationships)


def _relationship_problems(known: Sequence[str], relationships: Sequence[Relationship]) -> Iterator[tuple[str, str]]:
    pairs: dict[frozenset[str], int] = {}
    for at, relationship in enumerate(relationships):
        for name, value in (("table", relationship.table), ("refers_to", relationship.refers_to)):
            if value not in known:
                yield f"relationships[{at}].{name}", f"no table is named {value!r}{_suggested(value, known)}"
        both = frozenset((relationship.table, relationship.refers_to))
        if len(both) == 1:
            yield f"relationships[{at}].refers_to", "a table is not related to itself"
        elif pairs.setdefault(both, at) != at:
            yield (
                f"relationships[{at}]",
                f"{relationship.label}: the two tables are related already; list all columns there",
            )


def _suggested(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name.casefold(), [other.casefold() for other in known], n=1)
    near = next((other for other in known if matches and other.casefold() == matches[0]), None)
    return f"; did you mean {near}?" if near else f"; known are {', '.join(known)}"


def _unrelated(known: Sequence[str], relationships: Sequence[Relationship]) -> Iterator[tuple[str, str]]:
    """Tableau relates all tables of a datasource, and there is one way from each to each."""
    group = {name: name for name in known}
    for at, relationship in enumerate(relationships):
        one, other = group[relationship.table], group[relationship.refers_to]
        if one == other:
            yield (
                f"relationships[{at}]",
                f"{relationship.label}: other relationships connect them already, and Tableau takes one way only; leave one out",
            )
        group = {name: one if root == other else root for name, root in group.items()}
    apart = [name for name in known if known and group[name] != group[known[0]]]
    if apart:
        yield (
            "relationships",
            f"{', '.join(apart)}: related to no table that {known[0]} is related to; add how they refer to each other",
        )


def order_of_reference(names: Collection[str], relationships: Sequence[Relationship]) -> tuple[str, ...]:
    """Return the tables so that each comes after those that it refers to: then nothing refers to what is not there yet."""
    ordered: list[str] = []
    left = list(names)
    while left:
        free = [
            name
            for name in left
            if not any(relationship.table == name and relationship.refers_to in left for relationship in relationships)
        ] or [left[0]]
        ordered += free
        left = [name for name in left if name not in free]
    return tuple(ordered)
