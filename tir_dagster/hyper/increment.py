"""The increment of an extract that Tableau refreshes itself: reads its key and last value, purges from a value on, sets the value.

Tableau reads what is greater than the last refresh event's value, and nothing else; or, since keys need not be unique (2024.1),
from that value on, in place of the rows that have it. So whoever purges from a value on sets the greatest value that
remains, which is right in both cases. A server that would read the rows of that value once more, beside those that are
there, must not find them there: then they are purged, too. Rows whose key is NULL are never read again, whatever is
set: a change that has NULL there, before or after, needs a full refresh on the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from tir_dagster.errors import ExtractError
from tir_dagster.files import VirtualFile, copy_file, need_space, replaced_file
from tir_dagster.hyper.casts import FileColumn
from tir_dagster.hyper.engine import connect, literal, quoted, unbroken
from tir_dagster.hyper.hyperfile import ExtractTable, check_count, describe, look_at
from tir_dagster.hyper.package.package import NO_VALUE, Package, RefreshChange, packed

IncrementValue = date | datetime | int
_INTEGER = re.compile(r"-?\d+")
_MOMENT = re.compile(r"#(\d{4}-\d{2}-\d{2})(?: (\d{2}:\d{2}:\d{2}(?:\.\d+)?))?#")
_OTHER = "tir other"
_CHOOSE = (
    "Choose another column for incremental refreshes in Tableau and publish again, or use the delivery `republish`."
)


class IncrementKind(Enum):
    """What an increment key may be."""

    DATE = "date"
    DATETIME = "datetime"
    INTEGER = "integer"


_KINDS = {
    "DATE": IncrementKind.DATE,
    "TIMESTAMP": IncrementKind.DATETIME,
    "TIMESTAMPTZ": IncrementKind.DATETIME,
    "BIGINT": IncrementKind.INTEGER,
    "INTEGER": IncrementKind.INTEGER,
    "SMALLINT": IncrementKind.INTEGER,
}


@dataclass(frozen=True)
class Increment:
    """How the extract grows: the key by its local name, in the Hyper file and in the source, and the last value read."""

    key: str
    column: str
    source: str | None
    kind: IncrementKind
    value: IncrementValue


class Missing(Enum):
    """Why the extract has no increment to continue from."""

    NOT_INCREMENTAL = "it is not set up for incremental refreshes"
    NEVER_EXTRACTED = "it has not been extracted yet"
    NO_VALUE = "its last refresh saw no value of the increment key"


@dataclass(frozen=True)
class NoIncrement:
    """The extract is valid, but the server cannot continue it: it needs a full refresh or a set-up first."""

    why: Missing
    sentence: str


def find_increment(package: Package, hyper: Path) -> Increment | NoIncrement:
    """The package's increment, confirmed in its Hyper file; a key that Tableau cannot compare is refused."""
    table = describe(hyper)
    if (table.schema, table.name) != package.table:
        raise ExtractError(
            f"The datasource {package.name} says that its table is {'.'.join(package.table)}, but its extract holds "
            f"{table.schema}.{table.name}. Refresh it fully on the server, then run again."
        )
    if not package.incremental or package.increment_key is None:
        return _none(package, Missing.NOT_INCREMENTAL, "Enable incremental refresh in Tableau and publish it again.")
    column = _key_column(package, table)
    last = package.last_increment
    if not package.events:
        return _none(package, Missing.NEVER_EXTRACTED, "Run a full refresh on the server first.")
    if last in (None, "", NO_VALUE):
        return _none(package, Missing.NO_VALUE, "Run a full refresh on the server first.")
    kind = _KINDS[column.type]
    return Increment(
        package.increment_key, column.name, package.increment_source, kind, parse_value(str(last), kind, package.name)
    )


def _none(package: Package, why: Missing, hint: str) -> NoIncrement:
    return NoIncrement(why, f"The datasource {package.name} cannot be continued: {why.value}. {hint}")


def _key_column(package: Package, table: ExtractTable) -> FileColumn:
    subject = f"The increment key {package.increment_key} of {package.name}"
    stored = next((column for column in table.columns if column.name == package.increment_column), None)
    if stored is None:
        raise ExtractError(f"{subject} is not a column of its extract. {_CHOOSE}")
    if stored.type not in _KINDS:
        raise ExtractError(f"{subject} is {stored.type}; it has to be an integer, a date or a datetime. {_CHOOSE}")
    return stored


def parse_value(text: str, kind: IncrementKind, name: str) -> IncrementValue:
    """The value of a literal such as `#2001-01-01#`, `#2023-01-03 00:00:00.5#` or `17`."""
    try:
        if kind is IncrementKind.INTEGER:
            if _INTEGER.fullmatch(text):
                return int(text)
        elif match := _MOMENT.fullmatch(text):
            moment = datetime.fromisoformat(f"{match[1]} {match[2] or '00:00:00'}")
            return moment if kind is IncrementKind.DATETIME else moment.date()
    except ValueError:
        pass
    raise ExtractError(
        f"The datasource {name} says that its last refresh ended at {text}, which is no valid {kind.value}. "
        "Run a full refresh on the server, which writes a new value."
    )


def format_value(value: IncrementValue) -> str:
    """The literal of a value; a datetime shows its fraction only where there is one."""
    if isinstance(value, datetime):
        text = _in_utc(value).isoformat(sep=" ")
        return f"#{text.rstrip('0') if '.' in text else text}#"
    return f"#{value.isoformat()}#" if isinstance(value, date) else str(value)


def _in_utc(value: datetime) -> datetime:
    """Extracts show moments by the wall clock of UTC; a value without a zone is one already."""
    return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value


@dataclass(frozen=True)
class Purged:
    """What a purge did: before - purged = after, as read back from the closed file.

    `largest` is the value to set, None when no row with a value remains: then only a full refresh on the server can
    continue. `nulls` counts the rows without a value, which stay.
    """

    before: int
    purged: int
    after: int
    largest: IncrementValue | None
    nulls: int


def purge_from(base: Path, target: Path, *, column: str, smallest: IncrementValue) -> Purged:
    """Write `target`: base without the rows whose `column` is `smallest` or greater. Base is not touched."""
    if not base.is_file():
        raise ExtractError(f"There is no extract at {base}. Download the datasource again.")
    need_space(target.parent, base.stat().st_size)
    with replaced_file(target) as beside:
        copy_file(base, beside)
        with unbroken(target):
            before, purged = _purge(beside, base, column, smallest)
            result = _read_back(beside, base, column, before=before, purged=purged)
        check_count(target, result.after, before - purged)
    return result


def rows_at(extract: Path, *, column: str, value: IncrementValue) -> int:
    """How many rows have this increment value."""
    with connect(extract) as connection:
        table, stored = _opened(connection, extract, extract, column)
        where = f"{_comparable(stored)} = {_sql(stored, value, extract)}"
        return int(connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table.sql} WHERE {where}"))


def _purge(beside: Path, base: Path, column: str, smallest: IncrementValue) -> tuple[int, int]:
    with connect(beside) as connection:
        table, stored = _opened(connection, beside, base, column)
        connection.execute_command("BEGIN TRANSACTION")
        purged = connection.execute_command(
            f"DELETE FROM {table.sql} WHERE {_comparable(stored)} >= {_sql(stored, smallest, base)}"
        )
        connection.execute_command("COMMIT")
    return table.rows, int(purged or 0)


def _read_back(beside: Path, base: Path, column: str, *, before: int, purged: int) -> Purged:
    with connect(beside) as connection:
        table, stored = _opened(connection, beside, base, column)
        greatest = f"CAST(MAX({_comparable(stored)}) AS TEXT)"
        row = connection.execute_list_query(f"SELECT {greatest}, COUNT({quoted(column)}) FROM {table.sql}")[0]
    kind = _KINDS[stored.type]
    largest = None if row[0] is None else _of_text(row[0], kind, base)
    return Purged(before, purged, table.rows, largest, table.rows - int(row[1]))


def _of_text(text: str, kind: IncrementKind, base: Path) -> IncrementValue:
    return parse_value(text if kind is IncrementKind.INTEGER else f"#{text}#", kind, str(base))


def _opened(connection: Any, beside: Path, base: Path, column: str) -> tuple[ExtractTable, FileColumn]:
    table = look_at(connection, beside)
    stored = next((file_column for file_column in table.columns if file_column.name == column), None)
    if stored is None or stored.type not in _KINDS:
        problem = "it has no such column" if stored is None else f"it is {stored.type}"
        raise ExtractError(f"{base} cannot be purged by {column}: {problem}. {_CHOOSE}")
    return table, stored


def _comparable(stored: FileColumn) -> str:
    """The column by the wall clock of UTC, in which values are written."""
    zoned = " AT TIME ZONE 'UTC'" if stored.type == "TIMESTAMPTZ" else ""
    return f"({quoted(stored.name)}{zoned})"


def _sql(stored: FileColumn, value: IncrementValue, base: Path) -> str:
    """The value in the column's type. A moment in a column of dates means its whole day: to purge too much is safe."""
    write = _WRITERS[_KINDS[stored.type]]
    text = None if isinstance(value, bool) else write(value)
    if text is None:
        raise ExtractError(
            f"{base} cannot be purged from {value!r} on: {stored.name} is {stored.type}. Give a value of that type."
        )
    return text


def _integer(value: IncrementValue) -> str | None:
    return str(value) if isinstance(value, int) else None


def _date(value: IncrementValue) -> str | None:
    if isinstance(value, datetime) and value.tzinfo:
        # Which day it is depends on a zone that nobody has named.
        return None
    day = value.date() if isinstance(value, datetime) else value
    return f"DATE {literal(day.isoformat())}" if isinstance(day, date) else None


def _moment(value: IncrementValue) -> str | None:
    if isinstance(value, datetime):
        return f"TIMESTAMP {literal(_in_utc(value).isoformat(sep=' '))}"
    return f"TIMESTAMP {literal(f'{value.isoformat()} 00:00:00')}" if isinstance(value, date) else None


_WRITERS: dict[IncrementKind, Callable[[IncrementValue], str | None]] = {
    IncrementKind.INTEGER: _integer,
    IncrementKind.DATE: _date,
    IncrementKind.DATETIME: _moment,
}


def least_difference(extract: Path, other_extract: Path, *, column: str) -> str | None:
    """The literal of the smallest value of `column` among the rows that only one of two extracts has, as bags.

    None where they hold the same rows, `%null%` where one that differs has no value: no value is small enough then.
    """
    with connect(extract) as connection:
        table, stored = _opened(connection, extract, extract, column)
        connection.catalog.attach_database(str(other_extract), alias=_OTHER)
        schema, name = table.schema, table.name
        # An extract's collation may call 'a' and 'A' equal.
        comparable_columns = ", ".join(
            f"{file_column.comparable} AS {quoted(file_column.name)}" for file_column in table.columns
        )
        names = ", ".join(quoted(file_column.name) for file_column in table.columns)
        sides = [
            f"SELECT {comparable_columns}, {sign} AS tir_side FROM {quoted(database, schema, name)}"
            for database, sign in ((extract.stem, 1), (_OTHER, -1))
        ]
        differing = (
            f"SELECT {names} FROM ({' UNION ALL '.join(sides)}) AS sides GROUP BY {names} HAVING SUM(tir_side) <> 0"
        )
        least = f"CAST(MIN({_comparable(stored)}) AS TEXT)"
        query = f"SELECT {least}, COUNT(*), COUNT({quoted(column)}) FROM ({differing}) AS differing"
        text, rows, valued = connection.execute_list_query(query)[0]
    if not rows:
        return None
    return NO_VALUE if valued < rows else format_value(_of_text(text, _KINDS[stored.type], extract))


def set_increment_value(package: Package, name: str, *, hyper: Path, value: IncrementValue) -> VirtualFile:
    """The same package around this Hyper file, under that name, whose last refresh event says this value; all else stays to the letter."""
    if not package.events or package.last_increment is None:
        raise ExtractError(
            f"The datasource {package.name} in {package.path} has no record of an earlier refresh, so there is no value "
            "to set. Run a full refresh on the server first."
        )
    return packed(package, name, hyper=hyper, refresh=RefreshChange(increment_value=format_value(value)))
