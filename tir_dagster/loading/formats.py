"""Readers of CSV, JSON lines and Parquet: pieces of a few thousand rows, each row with its line, good or bad."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tir_dagster.errors import LoadError
from tir_dagster.loading.values import Digits, LoadColumn, UnfitValueError, is_storable, json_text, parsed_json
from tir_dagster.snowflake.columns import Kind

ROWS = 20_000
_PARQUET_ROWS = 100_000
_SHOWN_ROW = 1_000
_LONGEST_FIELD = 16 << 20
# By the ending of a file's name.
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "gz": lambda raw: gzip.GzipFile(fileobj=raw),
    "bz2": bz2.BZ2File,
    **dict.fromkeys(("xz", "lzma"), lzma.LZMAFile),
    **dict.fromkeys(("zst", "zstd"), lambda raw: pa.CompressedInputStream(raw, "zstd")),
}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Bad:
    """A row that cannot be loaded: its line, the reason, and its text."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class Piece:
    """Rows as the file has them: an array for each column, their lines, and the bad rows."""

    columns: list[pa.Array]
    lines: list[int] | range
    bad: list[Bad] = field(default_factory=list)

    def shown(self, at: int) -> str:
        """Return the row as text for people."""
        return json.dumps([array[at].as_py() for array in self.columns], default=str, ensure_ascii=False)[:_SHOWN_ROW]


@dataclass
class Shape:
    """How a file differs from what was expected: columns that are missing, extra, or of another type."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        sentences = [f"column {shown_name(name)} is missing" for name in self.missing]
        sentences += [f"column {shown_name(name)} is not expected" for name in self.extra]
        return sentences + self.other


def shown_name(name: str) -> str:
    """Return the name for a message; as Python's `repr` if it has invisible characters."""
    return name if name.isprintable() and name == name.strip() and name else repr(name)


def matched(names: Sequence[str], columns: Sequence[LoadColumn], shape: Shape) -> list[int | None]:
    """Return the place of each column in the file; note missing and extra columns in the shape.

    A column is found by its exact name, or else by its name without regard to case and surrounding blanks.
    """
    exact = {name: at for at, name in enumerate(names)}
    folded: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        folded.setdefault(_folded(name), []).append(at)
    places: list[int | None] = []
    for column in columns:
        alike = folded.get(_folded(column.name), [])
        place = exact.get(column.name, alike[0] if len(alike) == 1 else None)
        places.append(place)
        if place is None:
            shape.missing.append(column.name)
    shape.extra += [name for at, name in enumerate(names) if at not in places]
    return places


def _folded(name: str) -> str:
    return name.strip().casefold()


def _check_once(names: Sequence[str], path: str, where: str) -> None:
    if twice := sorted({shown_name(name) for name in names if names.count(name) > 1}):
        raise LoadError(f"{path}: column {', '.join(twice)} is twice in the {where}. Nothing was loaded; fix the file.")


def csv_pieces(raw: Any, path: str, columns: Sequence[LoadColumn], shape: Shape, *, delimiter: str) -> Iterator[Piece]:
    """Read rows by the header's names; an empty field is NULL, a row of another length is bad."""
    csv.field_size_limit(_LONGEST_FIELD)
    with _text(raw, path) as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
        except csv.Error as error:
            raise LoadError(f"{path}: the header is not CSV: {error}. Nothing was loaded; fix the file.") from error
        if header is None:
            return
        if not is_storable("".join(header)):
            raise _not_utf8(path, "the header is")
        _check_once(header, path, "header")
        places = matched(header, columns, shape)
        for lines, rows, bad in _batches(_csv_rows(reader, len(header), path)):
            yield Piece([_column(rows, at) for at in places], lines, bad)


def _batches(rows: Iterable[tuple[int, Row] | Bad]) -> Iterator[tuple[list[int], list[Row], list[Bad]]]:
    """Collect rows with their lines, and bad rows, until they are enough for a piece."""
    rows = iter(rows)
    while batch := list(islice(rows, ROWS)):
        good = [row for row in batch if not isinstance(row, Bad)]
        yield [line for line, _ in good], [row for _, row in good], [row for row in batch if isinstance(row, Bad)]


def _csv_rows(reader: Any, width: int, path: str) -> Iterator[tuple[int, list[str]] | Bad]:
    while True:
        begun = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if reader.line_num > begun or "unexpected end of data" in str(error):
                # An unclosed quote swallows all following lines: that is more than one bad row.
                raise LoadError(
                    f"{path}: line {begun}: a quote opens there and does not close as it should ({error}), up to line"
                    f" {reader.line_num}. Nothing was loaded; fix the file."
                ) from error
            yield Bad(begun, f"not CSV: {error}", "")
            continue
        if row and not is_storable("".join(row)):
            yield Bad(begun, "not text in UTF-8", repr(row)[:_SHOWN_ROW])
        elif row and len(row) != width:
            yield Bad(begun, f"{len(row)} fields, the header has {width}", ",".join(row)[:_SHOWN_ROW])
        elif row:
            yield begun, row


def _column(rows: Sequence[Sequence[str]], at: int | None) -> pa.Array:
    if at is None:
        return pa.nulls(len(rows), pa.string())
    return pa.array([row[at] or None for row in rows], pa.string())


def json_pieces(raw: Any, path: str, columns: Sequence[LoadColumn], shape: Shape) -> Iterator[Piece]:
    """Read one object per line; an absent field is NULL, a field that no row has is missing."""
    fields = _Fields(columns)
    with _text(raw, path) as text:
        for lines, rows, bad in _batches(_json_rows(text)):
            yield Piece(fields.columns(rows), lines, bad)
    fields.report(shape)


def _json_rows(text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]] | Bad]:
    for line, content in enumerate(text, 1):
        if content.strip():
            row = _object(content)
            if isinstance(row, dict):
                yield line, row
            else:
                yield Bad(line, row, content.encode("utf-8", "replace").decode().rstrip("\r\n")[:_SHOWN_ROW])


def _object(content: str) -> dict[str, Any] | str:
    """Return the line's object, or the reason why it is none."""
    if not is_storable(content):
        return "not text in UTF-8"
    try:
        value = parsed_json(content)
    except UnfitValueError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else "not a JSON object"


class _Fields:
    """The columns in objects, each of which has its own fields; it remembers which were ever found."""

    def __init__(self, columns: Sequence[LoadColumn]) -> None:
        self._columns = columns
        # For each list of field names: the name of each column in it.
        self._known: dict[tuple[str, ...], list[str | None]] = {}

    def columns(self, rows: Sequence[dict[str, Any]]) -> list[pa.Array]:
        names = [self._names(tuple(row)) for row in rows]
        return [
            pa.array(
                [
                    None if (name := present[at]) is None else _as_csv_text(row[name], column)
                    for row, present in zip(rows, names, strict=True)
                ],
                pa.string(),
            )
            for at, column in enumerate(self._columns)
        ]

    def _names(self, names: tuple[str, ...]) -> list[str | None]:
        if names not in self._known:
            places = matched(names, self._columns, Shape())
            self._known[names] = [None if at is None else names[at] for at in places]
        return self._known[names]

    def report(self, shape: Shape) -> None:
        """Note in the shape which columns no object has, and which fields are extra; nothing if there was no object."""
        if not self._known:
            return
        used = {name for present in self._known.values() for name in present}
        for at, column in enumerate(self._columns):
            if all(present[at] is None for present in self._known.values()):
                shape.missing.append(column.name)
        shape.extra += dict.fromkeys(name for names in self._known for name in names if name not in used)


def _as_csv_text(value: Any, column: LoadColumn) -> str | None:
    """Return a JSON value as the text that a CSV file would have."""
    if value is None:
        return None
    if isinstance(value, str) and (isinstance(value, Digits) or column.column.kind is not Kind.JSON):
        return str(value)
    return json_text(value)


def parquet_groups(raw: Any, path: str) -> list[int]:
    """Return the number of rows of each row group, so that several tasks can share a file."""
    with _of_parquet(path):
        metadata = pq.ParquetFile(raw).metadata
        return [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]


def parquet_pieces(
    raw: Any, path: str, columns: Sequence[LoadColumn], shape: Shape, *, groups: Sequence[int] | None, first: int = 1
) -> Iterator[Piece]:
    """Read the rows of these row groups; `first` is the number of their first row in the file."""
    with _of_parquet(path):
        file = pq.ParquetFile(raw)
        names = file.schema_arrow.names
        _check_once(names, path, "file")
        places = matched(names, columns, shape)
        for column, at in zip(columns, places, strict=True):
            kind = None if at is None else file.schema_arrow.types[at]
            if kind is not None and not column.fits(kind):
                shape.other.append(f"column {column.name} is {kind}, expected is {column.column.kind.value}")
        if shape.other:
            return
        listed = sorted({names[at] for at in places if at is not None})
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=listed):
            arrays = [
                pa.nulls(batch.num_rows, pa.string()) if at is None else _plain(batch.column(names[at]), column)
                for column, at in zip(columns, places, strict=True)
            ]
            yield Piece(arrays, range(first, first + batch.num_rows))
            first += batch.num_rows


def _plain(values: pa.Array, column: LoadColumn) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        # No reader checks that a file's texts are valid UTF-8.
        return _texts(pc.cast(values, pa.large_binary() if pa.types.is_large_string(values.type) else pa.binary()))
    kind = values.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return _texts(values)
    if column.takes_any_text:
        return pa.array([_as_text_value(value) for value in values.to_pylist()], pa.string())
    return values


def _texts(values: pa.Array) -> pa.Array:
    """Return bytes as texts, as some writers mean them; unchanged if some are not, so that each such row is rejected."""
    try:
        return pc.cast(values, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return values


def _as_json_value(value: Any) -> Any:
    """Return a Parquet value as a JSON value: numbers exactly, moments and other values as texts."""
    if isinstance(value, dict):
        return {str(name): _as_json_value(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json_value(part) for part in value]
    if isinstance(value, Decimal):
        return Digits(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _as_text_value(value: Any) -> str | None:
    """Return any value as text: lists and structures as JSON."""
    if value is None:
        return None
    return json_text(_as_json_value(value)) if isinstance(value, (dict, list, bool)) else str(value)


@contextmanager
def _of_parquet(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # Of the disk or the store; Arrow's own, about the content, have no number.
            raise
        message = " ".join(str(error).split())[:200].rstrip(".")
        raise LoadError(
            f"{path}: not a whole Parquet file: {message}. Nothing was loaded; send the file again."
        ) from None


@contextmanager
def _text(raw: Any, path: str) -> Iterator[Any]:
    """Open the file as text, unpacked by the ending of its name; raise if it cannot be unpacked."""
    unpacked = _UNPACKERS.get(path.rpartition(".")[2], lambda packed: packed)(raw)
    try:
        buffered = io.BufferedReader(unpacked)
        begin = buffered.peek(4)[:4]
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in begin:
            raise _not_utf8(path, "it is")
        # The byte order mark is not part of the first column. Bytes that are no UTF-8 make only their own row bad.
        yield io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise LoadError(
            f"{path}: the file ends too early or is damaged ({error}). Nothing was loaded; send the file again."
        ) from None


def _not_utf8(path: str, what: str) -> LoadError:
    return LoadError(f"{path}: {what} not text in UTF-8. Nothing was loaded; write it in UTF-8 and send it again.")
