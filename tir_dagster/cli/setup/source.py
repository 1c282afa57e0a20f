"""What the warehouse shows of a table or query that is to become an extract: keys, times, change tracking. Only reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import combinations
from typing import Any

from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.query import View, analyse, tables_of
from tir_dagster.snowflake.versions import (
    column_names,
    describe_held,
    describe_query,
    missing_table,
    rows_by_name,
    shown_objects,
    table_facts,
)

Tell = Callable[[str], None]
# Larger tables are counted only when asked: the statement reads every row of a few columns.
COUNTED_ROWS = 500_000_000
_MOST_COLUMNS = 40
_MOST_KEYS = 3
# The approximate count of different values is off by 1.6 % on average.
_NEARLY = 0.93
_KEY_KINDS = (Kind.INTEGER, Kind.DECIMAL, Kind.TEXT, Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)
TIME_KINDS = (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)
_ID = re.compile(r"(^|_)(ID|KEY|UUID|GUID|NO|NR|NUM|NUMBER|CODE|SK|LINE|SEQ)$", re.IGNORECASE)


@dataclass(frozen=True)
class ColumnFacts:
    """A column, and what counting showed of it; None where nothing was counted."""

    column: Column
    # Rows that have a value, and about how many different ones.
    filled: int | None = None
    distinct: int | None = None
    least: date | None = None
    greatest: date | None = None

    @property
    def name(self) -> str:
        return self.column.name


@dataclass(frozen=True)
class TableState:
    """One table or view that the extract reads."""

    table: TableName
    is_view: bool = False
    rows: int | None = None
    size_bytes: int | None = None
    # Whether the table keeps a feed of its changes.
    tracked: bool = False
    retention_days: int | None = None
    primary_key: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceLook:
    """A table or a query: its tables, the main one first, its columns, and what was counted."""

    tables: tuple[TableState, ...]
    columns: tuple[ColumnFacts, ...]
    query: str | None = None
    view: View | None = None
    # Columns of a type that no extract can hold.
    refused: tuple[str, ...] = ()
    rows: int | None = None
    counted: bool = False
    # Columns that identify a row, found by counting.
    unique: tuple[str, ...] = ()
    # Rows by the first day of their month, for the columns that slices could follow.
    months: tuple[tuple[str, tuple[tuple[date, int], ...]], ...] = ()
    # The warehouse's time, and whether rows were changed since a time shortly before.
    now: datetime | None = None

    @property
    def main(self) -> TableState:
        return self.tables[0]

    @property
    def shown(self) -> str:
        return "the query" if self.query is not None else str(self.main.table)

    def column(self, name: str) -> ColumnFacts | None:
        return next((facts for facts in self.columns if facts.name == name), None)

    def months_of(self, name: str) -> tuple[tuple[date, int], ...]:
        return dict(self.months).get(name, ())


def look_at_source(
    access: SnowflakeAccess,
    *,
    table: TableName | None = None,
    query: str | None = None,
    columns: Collection[str] | None = None,
    count: bool | None = None,
    tell: Tell,
) -> SourceLook:
    """Look at a table or a query; `columns` are those of an existing datasource, if only they count.

    `count` None counts up to COUNTED_ROWS rows. Raise SpecError if a table is missing, with similar names.
    """
    with access.kept_open():
        look = _of_table(access, table) if table is not None else _of_query(access, query or "")
        if columns is not None:
            look = replace(look, columns=tuple(facts for facts in look.columns if facts.name in columns))
        known = max((state.rows or 0 for state in look.tables), default=0)
        if count is False or (count is None and known > COUNTED_ROWS):
            tell(f"{look.shown}: not counted ({known:,} rows); --count counts them in the warehouse")
            return replace(look, rows=look.main.rows if query is None else None)
        size = look.main.size_bytes or 0
        how_large = (
            f"{known:,} rows{f', {size / 1e9:,.1f} GB' if size > 1e8 else ''}" if known else "a view of unknown size"
        )
        tell(f"{look.shown}: counting different values by one statement over {how_large}")
        return _counted(access, look, tell)


def _of_table(access: SnowflakeAccess, table: TableName) -> SourceLook:
    state = table_state(access, table)
    held = describe_held(access, table)
    names = {column.name for column in held}
    refused = tuple(name for name in column_names(access, table) if name not in names)
    return SourceLook((state,), tuple(map(ColumnFacts, held)), refused=refused, rows=state.rows)


def _of_query(access: SnowflakeAccess, query: str) -> SourceLook:
    tables = tables_of(query)
    states = tuple(table_state(access, table) for table in tables)
    view = analyse(query, {table: column_names(access, table) for table in tables})
    main = next((at.table for at in view.tables), tables[0])
    ordered = tuple(sorted(states, key=lambda state: state.table != main))
    return SourceLook(ordered, tuple(map(ColumnFacts, describe_query(access, query))), query=query, view=view)


def table_state(access: SnowflakeAccess, table: TableName) -> TableState:
    """Read what the catalogue says of a table; raise SpecError with similar names if there is none."""
    try:
        facts = table_facts(access, table)
    except SnowflakeError as failure:
        if failure.errno not in MISSING_OBJECT:
            raise
        raise missing_table(access, table, "Correct the name, or grant SELECT on the table.") from None
    shown = shown_objects(access, table, views=facts.is_view)
    row: dict[str, Any] = next((row for row in shown if row["name"] == table.name), {})
    key = [] if facts.is_view else rows_by_name(access, f"SHOW PRIMARY KEYS IN TABLE {table.sql}")
    return TableState(
        table,
        facts.is_view,
        facts.rows,
        row.get("bytes"),
        row.get("change_tracking") == "ON",
        facts.retention_days,
        tuple(str(part["column_name"]) for part in sorted(key, key=lambda part: int(part["key_sequence"]))),
    )


def _from(look: SourceLook) -> str:
    return look.main.table.sql if look.query is None else f"({look.query.rstrip().rstrip(';')})"


def _counted(access: SnowflakeAccess, look: SourceLook, tell: Tell) -> SourceLook:
    keyed = [facts for facts in look.columns if is_key_type(facts.column)][:_MOST_COLUMNS]
    times = [facts for facts in look.columns if facts.column.kind in TIME_KINDS][:_MOST_COLUMNS]
    parts = ["COUNT(*) AS N", "CURRENT_TIMESTAMP()::TIMESTAMP_TZ AS NOW"]
    for at, facts in enumerate(keyed):
        name = quote(facts.name)
        parts += [f"COUNT({name}) AS F{at}", f"APPROX_COUNT_DISTINCT({name}) AS D{at}"]
    for at, facts in enumerate(times):
        name = quote(facts.name)
        parts += [f"MIN({name}) AS L{at}", f"MAX({name}) AS G{at}"]
    rows, now, *values = access.query(f"SELECT {', '.join(parts)} FROM {_from(look)}")[0]
    counts, bounds = values[: 2 * len(keyed)], values[2 * len(keyed) :]
    known = {facts.name: facts for facts in look.columns}
    for facts, filled, distinct in zip(keyed, counts[::2], counts[1::2], strict=True):
        known[facts.name] = replace(known[facts.name], filled=int(filled), distinct=int(distinct))
    for facts, least, greatest in zip(times, bounds[::2], bounds[1::2], strict=True):
        known[facts.name] = replace(known[facts.name], least=least, greatest=greatest)
    look = replace(look, columns=tuple(known.values()), rows=int(rows), counted=True, now=now)
    if not look.rows:
        return look
    look = replace(look, unique=_unique(access, look, tell))
    return replace(look, months=tuple(_months(access, look)))


def is_key_type(column: Column) -> bool:
    """Whether an extract holds the values of the column so that different keys stay different."""
    return column.kind in _KEY_KINDS and column.hyper != "DOUBLE PRECISION"


def key_rank(look: SourceLook, facts: ColumnFacts) -> tuple[Any, ...]:
    """Sort columns by how likely they identify a row: names of keys first, then numbers and texts, then times."""
    table = look.main.table.name.upper().rstrip("S")
    named = _ID.search(facts.name) is not None
    own = facts.name.upper() in ("ID", f"{table}_ID", f"{table}ID", f"{table}_KEY")
    return not own, not named, facts.column.kind in TIME_KINDS, facts.column.nullable, look.columns.index(facts)


def _unique(access: SnowflakeAccess, look: SourceLook, tell: Tell) -> tuple[str, ...]:
    """Return columns whose values never repeat, found by an exact count; the declared primary key is tried first."""
    rows = look.rows or 0
    names = {facts.name for facts in look.columns}
    tried: list[tuple[str, ...]] = [look.main.primary_key] if look.main.primary_key else []
    full = [facts for facts in look.columns if facts.distinct is not None and facts.filled == rows]
    full.sort(key=lambda facts: key_rank(look, facts))
    single = [(facts.name,) for facts in full if (facts.distinct or 0) >= _NEARLY * rows]
    tried += single[:_MOST_KEYS]
    if not single:
        # An order's number and its line, a customer and a day: together nearly as many as rows, each alone not.
        likely = [facts for facts in full if _ID.search(facts.name) or facts.column.kind is Kind.DATE]
        pairs = [
            (left.name, right.name)
            for left, right in combinations(likely, 2)
            if (left.distinct or 0) * (right.distinct or 0) >= _NEARLY * rows
        ]
        tried += pairs[:_MOST_KEYS]
    for key in dict.fromkeys(tried):
        if set(key) <= names:
            tell(f"{look.shown}: is {', '.join(key)} unique?")
            listed = ", ".join(map(quote, key))
            grouped = f"SELECT 1 AS ONE FROM {_from(look)} GROUP BY {listed} HAVING COUNT(*) > 1 LIMIT 1"
            if not access.query(grouped):
                return key
    return ()


def _months(access: SnowflakeAccess, look: SourceLook) -> Iterator[tuple[str, tuple[tuple[date, int], ...]]]:
    """Yield the rows by month for each time that slices could follow, the likeliest first."""
    for name in slice_candidates(look)[:1]:
        month = f"DATE_TRUNC('MONTH', CAST({quote(name)} AS DATE))"
        counted = access.query(f"SELECT {month} AS M, COUNT(*) AS N FROM {_from(look)} GROUP BY 1 ORDER BY 1")
        yield name, tuple((_day(day), int(rows)) for day, rows in counted if day is not None)


def _day(value: date) -> date:
    return value.date() if isinstance(value, datetime) else value


# Times that a change moves: rows would wander from slice to slice.
MOVING = re.compile(
    r"UPDAT|MODIF|CHANG|LOADED|LOAD_|SYNC|INGEST|ETL|DWH|LAST_|REFRESH|EXTRACTED|VALID_TO", re.IGNORECASE
)
_SLICING = (
    re.compile(
        r"^(DATE|DAY)$|(ORDER|SALE|INVOICE|BOOK|POST|EVENT|TRANS|TXN|BUSINESS)\w*(DATE|DAY|_AT|_TS)", re.IGNORECASE
    ),
    re.compile(r"DATE|DAY|CREAT|INSERT", re.IGNORECASE),
)


def slice_candidates(look: SourceLook) -> Sequence[str]:
    """Return the times that slices could follow, the likeliest first: not those that a change moves."""
    rows = look.rows or 0
    times = [facts for facts in look.columns if facts.column.kind in TIME_KINDS and not MOVING.search(facts.name)]
    times = [facts for facts in times if facts.filled is None or facts.filled >= rows / 2]
    group = look.view.group if look.view is not None and look.view.kind == "aggregate" else None
    times = [facts for facts in times if group is None or facts.name in group]

    def rank(facts: ColumnFacts) -> tuple[int, bool, int]:
        named = next((at for at, words in enumerate(_SLICING) if words.search(facts.name)), len(_SLICING))
        return named, facts.column.kind is not Kind.DATE, look.columns.index(facts)

    return [facts.name for facts in sorted(times, key=rank)]
