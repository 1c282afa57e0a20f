"""Fingerprints per slice: the same numbers from an extract in Hyper and from its source in Snowflake, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tir_dagster.errors import SourceError
from tir_dagster.hyper.casts import FileColumn, Loaded, pair_columns
from tir_dagster.hyper.engine import connect, literal, quoted
from tir_dagster.hyper.features import HYPER, ROW_DIGEST, SNOWFLAKE, Dialect, digested, features
from tir_dagster.hyper.hyperfile import TableId, look_at
from tir_dagster.hyper.slices import slice_bounds_hyper, slice_sql_hyper
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.names import literal as snowflake_literal
from tir_dagster.snowflake.slices import SliceBy, slice_filter_snowflake, slice_sql_snowflake

# What changes by plain arithmetic when rows are replaced.
SUMS = ("rows", ROW_DIGEST)


@dataclass(frozen=True, eq=False)
class Fingerprint(Mapping[str, int]):
    """Names such as `rows`, `AMOUNT nonnull`, `AMOUNT sum` and their whole numbers, for one slice."""

    values_by_name: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def __hash__(self) -> int:
        return hash(frozenset(self.values_by_name.items()))

    def differences(
        self,
        other: Mapping[str, int],
        *,
        label: str = "extract",
        other_label: str = "source",
        places: Mapping[str, int] = MappingProxyType({}),
    ) -> list[str]:
        """One line for each number that differs: `AMOUNT sum: extract 12.50, source 13.00 (-0.50)`.

        `places` says by name how many decimal places a whole number stands for.
        """
        lines = []
        # The digest says that something differs, the others what: people read them first.
        for name in sorted(dict.fromkeys((*self, *other)), key=lambda name: name == ROW_DIGEST):
            mine, others, scale = self.get(name), other.get(name), places.get(name, 0)
            if mine != others:
                line = f"{name}: {label} {_number_text(mine, scale)}, {other_label} {_number_text(others, scale)}"
                if mine is not None and others is not None:
                    line += f" ({'+' if mine > others else ''}{_number_text(mine - others, scale)})"
                lines.append(line)
        return lines


def _number_text(value: int | None, places: int) -> str:
    if value is None:
        return "nothing"
    whole, rest = divmod(abs(value), 10**places)
    return ("-" if value < 0 else "") + f"{whole:,}" + (f".{rest:0{places}d}" if places else "")


def different_slices(
    extract: Mapping[str | None, Fingerprint],
    source: Mapping[str | None, Fingerprint],
    columns: Sequence[Column] = (),
) -> dict[str | None, list[str]]:
    """The slices whose fingerprints differ, and how; a slice that only one side has differs in everything.

    Of columns that are given, decimals are shown with their point.
    """
    empty = Fingerprint({})
    places = {
        f"{column.name} {feature}": column.scale
        for column in columns
        if column.kind is Kind.DECIMAL
        for feature in ("sum", "min", "max")
    }
    differences = {
        name: extract.get(name, empty).differences(source.get(name, empty), places=places)
        for name in dict.fromkeys((*extract, *source))
    }
    return {name: lines for name, lines in differences.items() if lines}


def extract_fingerprints(
    path: Path,
    columns: Sequence[Column],
    slices: SliceBy | None = None,
    *,
    only: Collection[str | None] | None = None,
    names: Mapping[str, str] | None = None,
    loose: Collection[str] = (),
    condition: Callable[[Sequence[Loaded]], str | None] | None = None,
    sums_only: bool = False,
    table_id: TableId | None = None,
) -> dict[str | None, Fingerprint]:
    """The extract's fingerprints by slice; `only` restricts them to some slices, None being the rows without one.

    `condition` restricts the rows, called t; `sums_only` asks for the number of rows and the sum of their digests only, which
    follow every replacement of rows by plain arithmetic and take half the time; of loose columns also for the values' number.

    `loose` columns may differ in the last digit each time the source is asked: their values are counted only.
    """
    with connect(path) as connection:
        table = look_at(connection, path, table_id)
        pairs = pair_columns(columns, table.columns, path=path, names=names)
        rows_sql = table.sql
        if condition is not None:
            rows_sql = f"(SELECT * FROM {table.sql} AS t WHERE {condition(pairs) or 'FALSE'}) AS t"
        return row_fingerprints(
            connection, rows_sql, pairs, columns, slices, only=only, loose=loose, sums_only=sums_only
        )


def row_fingerprints(
    connection: Any,
    rows_sql: str,
    pairs: Sequence[Loaded],
    columns: Sequence[Column],
    slices: SliceBy | None = None,
    *,
    only: Collection[str | None] | None = None,
    loose: Collection[str] = (),
    sums_only: bool = False,
) -> dict[str | None, Fingerprint]:
    """The same of rows in an open Hyper file: `rows_sql` is what follows FROM."""
    sql = _grouped(
        columns,
        HYPER,
        rows_sql,
        slices,
        only,
        stored={pair.source.name: pair.stored for pair in pairs},
        loose=loose,
        sums_only=sums_only,
    )
    return read_fingerprints(connection.execute_list_query(sql), columns, loose=loose, sums_only=sums_only)


def snowflake_sql(
    columns: Sequence[Column],
    table_sql: str,
    slices: SliceBy | None = None,
    *,
    only: Collection[str | None] | None = None,
    loose: Collection[str] = (),
    sums_only: bool = False,
) -> str:
    """One SELECT for Snowflake whose rows `read_fingerprints` reads.

    `table_sql` is what follows FROM: a quoted table, with its `AT(TIMESTAMP => …)`, or a query in parentheses.
    """
    stored = {column.name: FileColumn(column.name, column.hyper) for column in columns}
    return _grouped(columns, SNOWFLAKE, table_sql, slices, only, stored=stored, loose=loose, sums_only=sums_only)


def _grouped(
    columns: Sequence[Column],
    dialect: Dialect,
    table_sql: str,
    slices: SliceBy | None,
    only: Collection[str | None] | None,
    *,
    stored: Mapping[str, FileColumn],
    loose: Collection[str],
    sums_only: bool = False,
) -> str:
    """A SELECT of the features by slice, as text: a driver that reads wide sums as floats would lose their last digits."""
    selected = _selected(features(columns, dialect, stored=stored, loose=loose), loose, sums_only=sums_only)
    numbers = ", ".join(
        f"CAST({expression} AS VARCHAR) AS f{place}" for place, expression in enumerate(selected.values())
    )
    rows = digested_rows(columns, dialect, table_sql, slices or SliceBy(), only, stored=stored, loose=loose)
    return f"SELECT tir_slice, {numbers} FROM ({rows}) AS digested GROUP BY tir_slice ORDER BY tir_slice"


def digested_rows(
    columns: Sequence[Column],
    dialect: Dialect,
    table_sql: str,
    slices: SliceBy,
    only: Collection[str | None] | None,
    *,
    stored: Mapping[str, FileColumn],
    loose: Collection[str],
) -> str:
    """A SELECT of the rows of some slices, with their slice as tir_slice and their digests."""
    if dialect is HYPER:
        slice_sql, text = slice_sql_hyper(slices, columns, stored), literal
        if only is not None:
            table_sql = f"{table_sql} WHERE {slice_bounds_hyper(slices, columns, stored, only)}"
    else:
        slice_sql, text = slice_sql_snowflake(slices, columns), snowflake_literal
        if only is not None:
            with suppress(SourceError):  # a slice of a year that Python does not have
                table_sql = f"{table_sql} WHERE {slice_filter_snowflake(slices, columns, list(only))}"
    names = ", ".join(quoted(stored[column.name].name) for column in columns)
    source = f"(SELECT {slice_sql} AS tir_slice, {names} FROM {table_sql}) AS sliced"
    where = _where(only, text)
    return digested(columns, dialect, stored=stored, source=source, slice_name="tir_slice", where=where, loose=loose)


def _selected(all_features: Mapping[str, str], loose: Collection[str], *, sums_only: bool) -> dict[str, str]:
    # The digest of a row leaves loose columns out.
    needed = {*SUMS, *(f"{name} nonnull" for name in loose)}
    return {name: sql for name, sql in all_features.items() if not sums_only or name in needed}


def _where(only: Collection[str | None] | None, text: Callable[[str], str]) -> str:
    if only is None:
        return ""
    literals = ", ".join(text(name) for name in sorted(name for name in only if name is not None))
    parts = [f"tir_slice IN ({literals})"] if literals else []
    if None in only:
        parts.append("tir_slice IS NULL")
    return f" WHERE {' OR '.join(parts) or '1 = 0'}"


def read_fingerprints(
    rows: Sequence[Sequence[Any]], columns: Sequence[Column], *, loose: Collection[str] = (), sums_only: bool = False
) -> dict[str | None, Fingerprint]:
    """The fingerprints in the rows that `snowflake_sql` gave; a sum over nothing is left out on both sides."""
    stored = {column.name: FileColumn(column.name, column.hyper) for column in columns}
    names = list(_selected(features(columns, SNOWFLAKE, stored=stored, loose=loose), loose, sums_only=sums_only))
    return {
        row[0]: Fingerprint(
            {name: _whole(value) for name, value in zip(names, row[1:], strict=True) if value is not None}
        )
        for row in rows
    }


def _whole(value: Any) -> int:
    number = Decimal(str(value))
    assert number == int(number), f"a fingerprint is a whole number, not {value}"
    return int(number)
