"""Query results as Snowflake hands them out: Arrow, the first rows inline and the rest in chunks to download."""

from __future__ import annotations

import shutil
import threading
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from fakesnow.arrow import to_sf_schema
from fakesnow.rowtype import describe_as_rowtype

from tir_dagster.sandbox.warehouse.errors import SnowflakeError
from tir_dagster.sandbox.warehouse.names import quote

# Rows are read in small steps and put together to chunks, so that wide rows do not add up to gigabytes.
ROWS_PER_READ = 2048
ROWS_PER_CHUNK = 65_536
BYTES_PER_CHUNK = 16 << 20
BYTES_INLINE = 1 << 20
# A larger first part waits on disk like the others: many answers are kept, for clients that ask again.
BYTES_IN_MEMORY = 16 << 10
KEEP_SECONDS = 3600
# Beyond this, the oldest results make room: a client that has not fetched them by then asks again.
KEEP_BYTES = 8 << 30
RECENT_RESULTS = 1000


@dataclass(frozen=True)
class Chunk:
    """A part of a result that waits on disk."""

    rows: int
    size: int


@dataclass(frozen=True)
class Result:
    """One statement's answer: its columns, and either Arrow (a query) or a few JSON rows (anything else)."""

    query_id: str
    rowtype: list[Any]
    total: int = 0
    first: bytes | Path = b""
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[list[str | None]] | None = None
    # The columns of a query with their types in DuckDB.
    columns: Sequence[tuple[str, str]] = ()

    def as_json(self, base_url: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"rowtype": self.rowtype, "total": self.total, "returned": self.total}
        if self.rows is not None:
            return {**answer, "queryResultFormat": "json", "rowset": self.rows}
        answer |= {"queryResultFormat": "arrow", "rowsetBase64": b64encode(self.inline()).decode()}
        if self.chunks:
            answer["chunks"] = [
                {
                    "url": f"{base_url}/results/{self.query_id}/{number}",
                    "rowCount": chunk.rows,
                    "uncompressedSize": chunk.size,
                    "compressedSize": chunk.size,
                }
                for number, chunk in enumerate(self.chunks)
            ]
        return answer

    def inline(self) -> bytes:
        if isinstance(self.first, bytes):
            return self.first
        try:
            return self.first.read_bytes()
        except OSError as error:
            raise SnowflakeError(
                709, "02000", f"The result of statement {self.query_id} is no longer kept: run it again."
            ) from error


class ResultStore:
    """Chunks on disk, so that a large result costs one chunk of memory; old ones are dropped."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, int]] = {}
        self._recent: OrderedDict[str, Result] = OrderedDict()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def path(self, query_id: str, number: str) -> Path | None:
        path = self._folder / f"{query_id}-{number}.arrow"
        return path if path.parent == self._folder and path.is_file() else None

    def keep(self, query_id: str, columns: list[tuple[str, str]], batches: Iterator[pa.RecordBatch]) -> Result:
        """Take all rows of a query: the first ones into the answer, the others into files."""
        rowtype = describe_as_rowtype([(name, kind, None, None, None, None) for name, kind in columns])
        self._make_room()
        first: bytes | Path = b""
        total = 0
        chunks: list[Chunk] = []
        sizes = 0
        try:
            for number, group in enumerate(_grouped(batches)):
                data, rows = _to_ipc(group, rowtype), sum(batch.num_rows for batch in group)
                total += rows
                if number == 0 and len(data) <= BYTES_IN_MEMORY:
                    first = data
                    continue
                sizes += len(data)
                path = self._folder / (f"{query_id}-{number - 1}.arrow" if number else f"{query_id}-first.arrow")
                path.write_bytes(data)
                if number == 0:
                    first = path
                else:
                    chunks.append(Chunk(rows, len(data)))
        except BaseException:
            self._remove(query_id)
            raise
        if sizes:
            with self._lock:
                self._kept[query_id] = (time.monotonic(), sizes)
        return Result(query_id, rowtype, total, first, chunks, columns=columns)

    def remember(self, result: Result) -> None:
        """Keep it for RESULT_SCAN, as long as memory stays bounded."""
        with self._lock:
            self._recent[result.query_id] = result
            while len(self._recent) > RECENT_RESULTS:
                self._recent.popitem(last=False)

    def recall(self, query_id: str) -> Result | None:
        with self._lock:
            return self._recent.get(query_id)

    def _make_room(self) -> None:
        with self._lock:
            total = sum(size for _, size in self._kept.values())
            for query_id, (since, size) in list(self._kept.items()):
                if total <= KEEP_BYTES and time.monotonic() - since < KEEP_SECONDS:
                    break
                self._remove(query_id)
                del self._kept[query_id]
                total -= size

    def table(self, query_id: str, duck: duckdb.DuckDBPyConnection) -> pa.Table:
        """The rows of a kept result, in the types that the query gave them."""
        result = self.recall(query_id)
        paths = [self.path(query_id, str(number)) for number in range(len(result.chunks))] if result else []
        if result is None or result.rows is not None or None in paths:
            raise SnowflakeError(709, "02000", f"Statement {query_id} not found")
        if not result.total:
            nothing = ", ".join(f"CAST(NULL AS {kind}) AS {quote(name)}" for name, kind in result.columns)
            return duck.execute(f"SELECT {nothing} LIMIT 0").to_arrow_table()
        parts = [result.inline(), *(path.read_bytes() for path in paths if path)]
        table = pa.concat_tables([pa.ipc.open_stream(part).read_all() for part in parts])
        columns = [
            _from_snowflake(column, kind["type"]) for column, kind in zip(table.columns, result.rowtype, strict=True)
        ]
        return pa.table(columns, names=table.column_names)

    def _remove(self, query_id: str) -> None:
        for path in self._folder.glob(f"{query_id}-*.arrow"):
            path.unlink(missing_ok=True)


def _grouped(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Small batches put together: a first group for the answer itself, then one for each chunk."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    limit = BYTES_INLINE
    for batch in batches:
        for part in _sliced(batch, limit):
            if group and (rows + part.num_rows > ROWS_PER_CHUNK or size + part.nbytes > limit):
                yield group
                group, rows, size, limit = [], 0, 0, BYTES_PER_CHUNK
            group.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
    if group:
        yield group


def _sliced(batch: pa.RecordBatch, limit: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    step = max(1, batch.num_rows * limit // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _to_ipc(batches: list[pa.RecordBatch], rowtype: list[Any]) -> bytes:
    """The rows as an Arrow stream with Snowflake's types: times as integers, timestamps as structs."""
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    schema = to_sf_schema(batch.schema, rowtype)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays([_to_snowflake(column) for column in batch.columns], schema=schema)
        )
    return sink.getvalue().to_pybytes()


def _to_snowflake(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        return _timestamp_struct(column)
    if pa.types.is_time(column.type):
        return pc.multiply(column.cast(pa.int64()), 1000)
    if pa.types.is_uint64(column.type):
        return column.cast(pa.int64())
    return column


def _from_snowflake(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """The column as a query gave it: the inverse of `_to_snowflake`."""
    if pa.types.is_struct(column.type):
        seconds, nanos = pc.struct_field(column, "epoch"), pc.struct_field(column, "fraction")
        micros = pc.add(pc.multiply(seconds, 1_000_000), pc.divide(nanos.cast(pa.int64()), 1000))
        zone = "UTC" if column.type.get_field_index("timezone") >= 0 else None
        return pc.if_else(pc.is_null(column), None, micros).cast(pa.timestamp("us", tz=zone))
    if kind.upper() == "TIME":
        return pc.divide(column, 1000).cast(pa.time64("us"))
    return column


def _timestamp_struct(column: pa.Array) -> pa.Array:
    """Seconds, nanoseconds and, with a zone, its offset in minutes + 1440. A NULL is a NULL of the struct itself."""
    micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    present = pc.fill_null(micros, 0)
    # Arrow divides towards zero; times before 1970 need a second less and a fraction that counts upwards. In integers:
    # a float is off by microseconds after the year 2255.
    towards_zero = pc.divide(present, 1_000_000)
    below = pc.less(pc.subtract(present, pc.multiply(towards_zero, 1_000_000)), 0)
    seconds = pc.subtract(towards_zero, below.cast(pa.int64()))
    fraction = pc.multiply(pc.subtract(present, pc.multiply(seconds, 1_000_000)), 1000).cast(pa.int32())
    fields = [pa.field("epoch", pa.int64(), nullable=False), pa.field("fraction", pa.int32(), nullable=False)]
    arrays = [seconds, fraction]
    if column.type.tz:
        fields.append(pa.field("timezone", pa.int32(), nullable=False))
        arrays.append(pa.array([1440] * len(column), pa.int32()))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=pc.is_null(column))
