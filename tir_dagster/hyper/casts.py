"""Casts from staged columns to columns of the extract, for every pair of types, and the pairs that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.engine import quoted
from tir_dagster.snowflake.columns import Column, Kind

# A double holds every whole number of this many digits.
DOUBLE_DIGITS = 15
# 'HH:MM:SS.ffffff': Hyper rounds what comes after; timestamps are cut, so times are cut as well.
_TIME_LETTERS = 15
# A column that only the published file has, where the server needs one to find rows by: each row's purge key as text.
PURGE_KEY = "tir_purge_key"
_NUMERIC = re.compile(r"NUMERIC\((\d+),(\d+)\)")


@dataclass(frozen=True)
class FileColumn:
    """A column as the Hyper file has it; `type` is SQL text such as NUMERIC(12,2)."""

    name: str
    type: str
    nullable: bool = True
    collation: str | None = None

    @property
    def numeric(self) -> tuple[int, int] | None:
        """Precision and scale of a NUMERIC."""
        match = _NUMERIC.fullmatch(self.type)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def comparable(self) -> str:
        """The column for equality: an extract's collation may call 'a' and 'A' equal, keys never are."""
        return f'{quoted(self.name)} COLLATE "binary"' if self.type == "TEXT" else quoted(self.name)


@dataclass(frozen=True)
class Loaded:
    """One column on both sides: staged under the source's name, stored under the extract's."""

    source: Column
    stored: FileColumn

    @property
    def value(self) -> str:
        """The staged value in the type that the file has."""
        return _RULES[self.source.kind](self.source, self.stored) or _refuse(self.source, self.stored)

    @property
    def key(self) -> str:
        """The staged value of a key column; refused where two keys could become one in the file."""
        check_key(self.source, self.stored)
        return f'{self.value} COLLATE "binary"' if self.stored.type == "TEXT" else self.value


def check_key(source: Column, stored: FileColumn) -> None:
    """Raise ExtractError where two keys could become one in the file."""
    digits = source.precision if source.kind in (Kind.INTEGER, Kind.DECIMAL) else 0
    if stored.type == "DOUBLE PRECISION" and digits > DOUBLE_DIGITS:
        raise ExtractError(
            f"Key column {source.name} has {digits} digits, but the extract stores it as a floating-point "
            "number, in which different keys can look the same. Choose another row_key, or another datasource.name: "
            "a new datasource holds up to 18 digits exactly."
        )


def _refuse(source: Column, stored: FileColumn) -> str:
    raise ExtractError(
        f"Column {source.name} is {source.kind.value} ({source.spark}) in the source, and the extract stores it as "
        f"{stored.type}, which cannot hold it as it is. Run a full refresh into a new extract, or cast it in the source."
    )


def _same(*types: str) -> Callable[[Column, FileColumn], str | None]:
    return lambda source, stored: quoted(source.name) if stored.type in types else None


def _cast(source: Column, stored: FileColumn) -> str:
    return f"CAST({quoted(source.name)} AS {stored.type})"


def _integer(source: Column, stored: FileColumn) -> str | None:
    # A cast to BIGINT does nothing to what we staged; with it, the column of too large a value can be named.
    fits = stored.type in ("BIGINT", "INTEGER", "SMALLINT", "DOUBLE PRECISION") or stored.numeric
    return _cast(source, stored) if fits else None


def _decimal(source: Column, stored: FileColumn) -> str | None:
    fits = stored.numeric is not None and stored.numeric[1] >= source.scale
    return _cast(source, stored) if fits or stored.type == "DOUBLE PRECISION" else None


def _date(source: Column, stored: FileColumn) -> str | None:
    return _cast(source, stored) if stored.type in ("DATE", "TIMESTAMP") else None


def _time(source: Column, stored: FileColumn) -> str | None:
    if stored.type == "TIME":
        return f"CAST(SUBSTR({quoted(source.name)}, 1, {_TIME_LETTERS}) AS TIME)"
    return quoted(source.name) if stored.type == "TEXT" else None


def _instant(source: Column, stored: FileColumn) -> str | None:
    if stored.type == "TIMESTAMP":
        # A plain cast would convert by the session's zone.
        return f"({quoted(source.name)} AT TIME ZONE 'UTC')"
    return quoted(source.name) if stored.type == "TIMESTAMPTZ" else None


_RULES: dict[Kind, Callable[[Column, FileColumn], str | None]] = {
    Kind.INTEGER: _integer,
    Kind.DECIMAL: _decimal,
    Kind.FLOAT: _same("DOUBLE PRECISION"),
    Kind.BOOLEAN: _same("BOOLEAN"),
    Kind.TEXT: _same("TEXT"),
    Kind.JSON: _same("TEXT"),
    Kind.DATE: _date,
    Kind.TIME: _time,
    Kind.TIMESTAMP: _same("TIMESTAMP"),
    Kind.INSTANT: _instant,
}


def pair_columns(
    columns: Sequence[Column], stored: Sequence[FileColumn], *, path: Path, names: Mapping[str, str] | None = None
) -> tuple[Loaded, ...]:
    """Pair each staged column with the extract's; `names` gives the extract's name where it differs from the source's."""
    renamed = names or {}
    by_name = {column.name: column for column in stored}
    by_stored_name = {renamed.get(column.name, column.name): column for column in columns}
    _refuse_missing(f"The extract {path}", [name for name in by_stored_name if name not in by_name], "the source")
    _refuse_missing(
        "The source", [name for name in by_name if name not in {*by_stored_name, PURGE_KEY}], f"the extract {path}"
    )
    return tuple(Loaded(column, by_name[name]) for name, column in by_stored_name.items())


def _refuse_missing(where: str, names: Sequence[str], other_side: str) -> None:
    if names:
        raise ExtractError(
            f"{where} has no column {', '.join(names)}, which {other_side} has. "
            "Run a full refresh into a new extract, or name the columns you want under `columns:` in the extract's spec."
        )


def check_staged(files: Sequence[Path], needed: Sequence[str]) -> None:
    """Raise ExtractError if a staged file lacks one of these columns; other columns are ignored."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        try:
            present = set(pq.read_schema(file).names)
        except (OSError, pa.ArrowInvalid) as error:
            raise ExtractError(
                f"The staged file {file} cannot be read ({error}). Detect the changes again, then refresh."
            ) from error
        missing = [name for name in needed if name not in present]
        if missing:
            raise ExtractError(
                f"The staged file {file} has no column {', '.join(missing)}. Detect the changes again, then refresh."
            )
