"""CSV, JSON lines and Parquet as pieces of a few thousand rows, each row with its line, good or bad."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tir_dagster.errors import LoadError
from tir_dagster.loading.values import Wanted

ROWS = 20_000
_PARQUET_ROWS = 100_000
_SHOWN_ROW = 1_000
_LONGEST_FIELD = 16 << 20


@dataclass(frozen=True)
class Bad:
    """A row that no table takes: where it stands, why, and what it says."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class Piece:
    """Rows as the file has them: an array for each wanted column, their lines, and rows that are none."""

    columns: list[pa.Array]
    lines: list[int] | range
    bad: list[Bad] = field(default_factory=list)

    def shown(self, at: int) -> str:
        """The row as people read it."""
        return json.dumps([array[at].as_py() for array in self.columns], default=str, ensure_ascii=False)[:_SHOWN_ROW]


@dataclass
class Shape:
    """What a file turned out to have that was not expected: columns missing, further, or of another type."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        said = [f"column {name} is missing" for name in self.missing]
        said += [f"column {name} is not expected" for name in self.extra]
        return said + self.other


def matched(names: Sequence[str], wanted: Sequence[Wanted], shape: Shape) -> list[int | None]:
    """Where in the file each wanted column is, by its exact name or else whatever the case; the rest goes into the shape."""
    exact = {name: at for at, name in enumerate(names)}
    folded: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        folded.setdefault(name.casefold(), []).append(at)
    found: list[int | None] = []
    for column in wanted:
        alike = folded.get(column.name.casefold(), [])
        place = exact.get(column.name, alike[0] if len(alike) == 1 else None)
        found.append(place)
        if place is None:
            shape.missing.append(column.name)
    shape.extra += [name for at, name in enumerate(names) if at not in found]
    return found


def csv_pieces(raw: Any, path: str, wanted: Sequence[Wanted], shape: Shape, *, delimiter: str) -> Iterator[Piece]:
    """Rows by the header's names; an empty field is NULL. A row of another length is bad."""
    csv.field_size_limit(_LONGEST_FIELD)
    with _text(raw, path) as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(reader, None)
        if header is None:
            return
        header[0] = header[0].removeprefix("\ufeff")
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise LoadError(
                f"{path}: column {', '.join(twice)} is twice in the header. Nothing was loaded; mend the file."
            )
        places = matched(header, wanted, shape)
        yield from _csv_rows(reader, len(header), places, path)


def _csv_rows(reader: Any, width: int, places: Sequence[int | None], path: str) -> Iterator[Piece]:
    rows: list[list[str]] = []
    lines: list[int] = []
    bad: list[Bad] = []
    ended = False
    while not ended:
        begun = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            ended = True
        except csv.Error as error:
            if reader.line_num > begun or "unexpected end of data" in str(error):
                # A quote that is never closed takes all that follows with it: those are not one bad row.
                raise LoadError(
                    f"{path}: line {begun}: a quote opens there and does not close as it should ({error}), up to line"
                    f" {reader.line_num}. Nothing was loaded; mend the file."
                ) from error
            bad.append(Bad(begun, f"not CSV: {error}", ""))
        else:
            if not row:
                continue
            if len(row) != width:
                bad.append(Bad(begun, f"{len(row)} fields, the header has {width}", ",".join(row)[:_SHOWN_ROW]))
            elif _broken(row):
                bad.append(Bad(begun, "not text in UTF-8", repr(row)[:_SHOWN_ROW]))
            else:
                rows.append(row)
                lines.append(begun)
        if len(rows) + len(bad) >= ROWS or (ended and (rows or bad)):
            yield Piece([_column(rows, at) for at in places], lines, bad)
            rows, lines, bad = [], [], []


def _column(rows: Sequence[Sequence[str]], at: int | None) -> pa.Array:
    if at is None:
        return pa.nulls(len(rows), pa.string())
    return pa.array([row[at] or None for row in rows], pa.string())


def _broken(row: Sequence[str]) -> bool:
    """Bytes that are no UTF-8 were read as lone surrogates; no table stores them, nor a NUL."""
    text = "".join(row)
    return "\0" in text or (not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text))


def json_pieces(raw: Any, path: str, wanted: Sequence[Wanted], shape: Shape) -> Iterator[Piece]:
    """One object for each line; a field that is not there is NULL, one that is in no row is missing."""
    seen: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    bad: list[Bad] = []
    with _text(raw, path) as text:
        for line, content in enumerate(text, 1):
            if not content.strip():
                continue
            row = _object(content)
            if isinstance(row, str):
                bad.append(Bad(line, row, content.encode("utf-8", "replace").decode().rstrip("\n")[:_SHOWN_ROW]))
            else:
                rows.append(row)
                lines.append(line)
                seen.update(dict.fromkeys(row))
            if len(rows) + len(bad) >= ROWS:
                yield _json_piece(rows, lines, bad, wanted)
                rows, lines, bad = [], [], []
    if rows or bad:
        yield _json_piece(rows, lines, bad, wanted)
    if seen:
        matched(list(seen), wanted, shape)


def _json_piece(rows: list[dict[str, Any]], lines: list[int], bad: list[Bad], wanted: Sequence[Wanted]) -> Piece:
    names = list(dict.fromkeys(name for row in rows for name in row))
    places = matched(names, wanted, Shape())
    columns = [
        pa.nulls(len(rows), pa.string())
        if at is None
        else pa.array([_told(row.get(names[at])) for row in rows], pa.string())
        for at in places
    ]
    return Piece(columns, lines, bad)


def _object(content: str) -> dict[str, Any] | str:
    """The line's object, or why it is none."""
    if _broken([content.rstrip("\n")]):
        return "not text in UTF-8"
    try:
        value = json.loads(content, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else "not a JSON object"


def _told(value: Any) -> str | None:
    """A JSON value as the text that a CSV file would have."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, default=float, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def parquet_groups(raw: Any, path: str) -> list[int]:
    """The rows of each row group, so that several tasks can share a file."""
    with _of_parquet(path):
        found = pq.ParquetFile(raw).metadata
        return [found.row_group(at).num_rows for at in range(found.num_row_groups)]


def parquet_pieces(
    raw: Any, path: str, wanted: Sequence[Wanted], shape: Shape, *, groups: Sequence[int] | None, first: int = 1
) -> Iterator[Piece]:
    """The row groups' rows; `first` is the number of the first one in the file."""
    with _of_parquet(path):
        file = pq.ParquetFile(raw)
        names = file.schema_arrow.names
        places = matched(names, wanted, shape)
        for column, at in zip(wanted, places, strict=True):
            if at is not None and not column.fits(file.schema_arrow.types[at]) and not _as_text(column):
                kind = file.schema_arrow.types[at]
                shape.other.append(f"column {column.name} is {kind}, expected is {column.column.kind.value}")
        if shape.other:
            return
        listed = sorted({names[at] for at in places if at is not None})
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=listed):
            columns = [
                pa.nulls(batch.num_rows, pa.string()) if at is None else _plain(batch.column(names[at]), column)
                for column, at in zip(wanted, places, strict=True)
            ]
            yield Piece(columns, range(first, first + batch.num_rows))
            first += batch.num_rows


def _as_text(column: Wanted) -> bool:
    """Whether any value has a text that the column takes."""
    return column.column.kind.value in ("text", "json")


def _plain(values: pa.Array, column: Wanted) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if _is_binary(values.type):
        return _texts(values)
    if _as_text(column) and not pa.types.is_string(values.type):
        return pa.array([_told(_jsonable(value)) for value in values.to_pylist()], pa.string())
    return values


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _texts(values: pa.Array) -> pa.Array:
    """Bytes as texts, as some writers mean them; as they are if some are not, which is then said row by row."""
    try:
        return pc.cast(values, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return values


def _jsonable(value: Any) -> Any:
    return value if isinstance(value, (dict, list, bool, str, type(None))) else str(value)


@contextmanager
def _of_parquet(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise LoadError(f"{path}: not a whole Parquet file: {said}. Nothing was loaded; send the file again.") from None


@contextmanager
def _text(raw: Any, path: str) -> Iterator[Any]:
    """The file's text, unpacked by the ending of its name; what cannot be unpacked is said."""
    opened: Any = raw
    if path.endswith(".gz"):
        opened = gzip.GzipFile(fileobj=raw)
    elif path.endswith(".bz2"):
        opened = bz2.BZ2File(raw)
    elif path.endswith((".xz", ".lzma")):
        opened = lzma.LZMAFile(raw)  # noqa: SIM115 - whoever opened the file closes it
    elif path.endswith((".zst", ".zstd")):
        opened = pa.CompressedInputStream(raw, "zstd")
    try:
        # Bytes that are no UTF-8 spoil their row, not the file.
        yield io.TextIOWrapper(io.BufferedReader(opened), encoding="utf-8", errors="surrogateescape", newline="")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise LoadError(
            f"{path}: it ends too early or is damaged ({error}). Nothing was loaded; send the file again."
        ) from None
