"""Staging: Spark's tasks download the parts of a Snowflake result and write them as Parquet; no row enters the JVM.

The statement runs in the driver, so Spark, which may run a task twice, never reads the source twice. A task gets its result
batches, that is signed addresses and the first rows: no credential leaves the driver. A small result is written by the driver
itself, and Spark is not even started for it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tir_dagster.errors import SourceError
from tir_dagster.measuring import moved, waiting_for
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.snowflake.slices import SliceBy, slice_column, slice_of
from tir_dagster.spark.arrow import arrow_schema, fetch
from tir_dagster.spark.places import LIFETIME, STAGING, STAGING_VARIABLE, StagedPart, StagingPlace, staging_place
from tir_dagster.spark.remote import is_elsewhere, remote_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tir_dagster.snowflake.connection import SnowflakeAccess

# Large enough to pay for a task, small enough that two cores share a million rows. Each task writes one file: how many there
# are makes no difference to Hyper, which loaded 2,000,000 rows from 1, 8, 40 or 200 files in .75 to .81 s.
ROWS_PER_TASK = 250_000
# Hyper reads a file of large row groups fastest; a group is held in a worker's memory.
_ROWS_PER_GROUP = 250_000
_ADDRESS = re.compile(r"https?://\S+")
# Results of at most so many rows are written without Spark: it would take longer to start a task than to write them.
SMALL_VARIABLE = "TIR_SPARK_ROWS"
_SMALL_ROWS = 10_000
# The most bytes still to be downloaded for such a result: they fit into the memory of any machine.
_SMALL_BYTES = 32 << 20


@dataclass(frozen=True)
class StagedRows:
    """Parquet files with the rows of one query, how many there are, in all and by slice, and how many tasks wrote them."""

    files: tuple[Path, ...] = ()
    rows: int = 0
    slices: Mapping[str | None, int] = field(default_factory=dict)
    bytes: int = 0
    # 0: the driver wrote them itself.
    tasks: int = 0

    def __add__(self, other: StagedRows) -> StagedRows:
        slices = Counter(self.slices)
        slices.update(other.slices)
        return StagedRows(
            (*self.files, *other.files),
            self.rows + other.rows,
            dict(slices),
            self.bytes + other.bytes,
            self.tasks + other.tasks,
        )

    @property
    def summary(self) -> str:
        """One line for the log of a run."""
        by = "" if self.tasks else ", so few that they were staged without Spark"
        return f"read {self.rows:,} rows{by}"


@dataclass(frozen=True)
class StagingTask:
    """What every task must know: the columns' types, how rows fall into slices, and the folder to write into.

    The folder is one of this machine, or one in a place that executors elsewhere reach.
    """

    columns: tuple[Column, ...]
    slices: SliceBy
    folder: str
    place: StagingPlace | None = None


def stage(
    start_spark: Callable[[], SparkSession],
    access: SnowflakeAccess,
    query: str,
    columns: Sequence[Column],
    folder: Path,
    *,
    slices: SliceBy | None = None,
    small_rows: int | None = None,
) -> StagedRows:
    """Run the query once and write its rows to new files in the folder, by as many tasks as its size pays for.

    A result of at most `small_rows` rows (by default those of TIR_SPARK_ROWS) is written right here, without Spark.
    """
    limit = rows_without_spark(os.environ) if small_rows is None else small_rows
    batches = result_batches(access, query)
    folder.mkdir(parents=True, exist_ok=True)
    task = StagingTask(tuple(columns), slices or SliceBy(), str(folder.absolute()))
    promised = sum(batch.rowcount for batch in batches)
    if is_small(batches, limit):
        staged = _checked([write_part(task, batches)], promised, folder)
    else:
        groups, spark = _grouped(batches), start_spark()
        place = place_of(spark)
        reports = _fetched(spark, place, task, groups, promised) if place else _by_tasks(spark, task, groups)
        staged = replace(_checked(reports, promised, folder), tasks=len(groups))
    moved(rows=staged.rows, bytes=staged.bytes)
    return staged


def place_of(spark: SparkSession) -> StagingPlace | None:
    """Return where executors of this session stage rows; None if they share this machine's disk."""
    if not is_elsewhere(spark):
        return None
    settings = {name: value for name in (STAGING, LIFETIME) if (value := spark.conf.get(name, None)) is not None}
    return staging_place(settings, os.environ)


def _fetched(
    spark: SparkSession, place: StagingPlace, task: StagingTask, groups: Sequence[Sequence[Any]], promised: int
) -> list[dict[str, Any]]:
    """Let executors elsewhere write into the staging place, fetch the parts they report into the task's folder, and empty the place.

    What a task wrote that Spark ran twice is reported by one of its runs only; the rest is removed with the folder.
    """
    with place.folder() as name:
        reports = _by_tasks(spark, replace(task, folder=name, place=place), groups)
        _check_rows(reports, promised)
        parts = [StagedPart(report["file"], report["rows"], report["bytes"]) for report in reports if report["rows"]]
        with waiting_for("Spark"):
            place.fetch(name, parts, Path(task.folder))
    return reports


def _by_tasks(spark: SparkSession, task: StagingTask, groups: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Write each group of result batches by a task of its own: the same on a Spark of this process and on a remote one."""
    from tir_dagster.spark.failures import spark_failures

    with spark_failures(f"staging {Path(task.folder).name}", remote_of(spark)), waiting_for("Spark"):
        numbers = spark.range(0, len(groups), 1, len(groups))
        written = numbers.mapInArrow(_run_task(task, [pickle.dumps(group) for group in groups]), "written string")
        return [json.loads(row["written"]) for row in written.collect()]


def rows_without_spark(env: Mapping[str, str]) -> int:
    """The most rows of a result for which Spark is not used; 0 gives every result to Spark."""
    setting = env.get(SMALL_VARIABLE, "").strip().replace("_", "")
    if setting and not setting.isdecimal():
        raise SourceError(f"{SMALL_VARIABLE} is no whole number. Set it to a number of rows such as {_SMALL_ROWS}.")
    return int(setting) if setting else _SMALL_ROWS


def is_small(batches: Sequence[Any], limit: int) -> bool:
    """Whether the result is so small that the driver writes it itself."""
    # What came with Snowflake's answer has no size; Snowflake keeps that part small.
    size = sum(batch.uncompressed_size or 0 for batch in batches)
    return 0 < limit >= sum(batch.rowcount for batch in batches) and size <= _SMALL_BYTES


def result_batches(access: SnowflakeAccess, query: str) -> list[Any]:
    """Run the query and return the parts of its result, still to be downloaded."""
    from snowflake.connector.result_batch import ArrowResultBatch

    with access.connect() as connection, waiting_for("warehouse"), connection.cursor() as cursor:
        cursor.execute(query)
        batches = cursor.get_result_batches() or []
    arrow = [batch for batch in batches if isinstance(batch, ArrowResultBatch)]
    if not batches or len(arrow) != len(batches):
        raise SourceError(
            f"Snowflake account {access.account} did not answer in Arrow. Read with a SELECT, and unset "
            "PYTHON_CONNECTOR_QUERY_RESULT_FORMAT for the user."
        )
    return arrow


def rehearse(spark: SparkSession) -> None:
    """Run one task that does nothing, so that its workers and classes are loaded."""
    spark.range(0, 1, 1, 1).mapInArrow(_run_task(StagingTask((), SliceBy(), ""), []), "written string").count()


def _grouped(batches: Sequence[Any]) -> list[list[Any]]:
    """Group result batches into tasks of about equal rows: one task for a small result."""
    tasks = -(-sum(batch.rowcount for batch in batches) // ROWS_PER_TASK)
    groups: list[list[Any]] = [[] for _ in range(max(1, min(tasks, len(batches))))]
    sizes = [0] * len(groups)
    for batch in sorted(batches, key=lambda batch: -batch.rowcount):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(batch)
        sizes[smallest] += batch.rowcount
    return groups


def _run_task(
    task: StagingTask, groups: Sequence[bytes]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist() if groups else ():
                report = write_part(task, pickle.loads(groups[number]))  # noqa: S301 - the driver's own
                yield pa.RecordBatch.from_pydict({"written": [json.dumps(report)]})

    return run


def write_part(task: StagingTask, batches: Sequence[Any]) -> dict[str, Any]:
    """Download the batches into one Parquet file; return its name, rows and counts by slice. Runs in Spark's workers."""
    # A name of its own: a task that Spark runs twice must not write into the other one's file.
    name = f"part-{uuid.uuid4().hex}.parquet"
    counts: Counter[str | None] = Counter()
    rows = 0
    # Without dictionaries both sides are faster: measured, a third of the time to write, and as many bytes.
    settings = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "store_decimal_as_integer": True,
    }
    with _new_file(task, name) as file:
        with pq.ParquetWriter(file, arrow_schema(task.columns), **settings) as writer:
            for batch in batches:
                table = _download(batch, task.columns)
                writer.write_table(table, row_group_size=_ROWS_PER_GROUP)
                rows += table.num_rows
                counts.update(slice_counts(task.slices, task.columns, table))
        size = file.tell()
    return {"file": name, "rows": rows, "slices": list(counts.items()), "bytes": size}


def _new_file(task: StagingTask, name: str) -> AbstractContextManager[Any]:
    """Open a part for writing; in a folder of this machine it gets its name when it is whole."""
    return task.place.writing(task.folder, name) if task.place else _local_file(Path(task.folder), name)


@contextmanager
def _local_file(folder: Path, name: str) -> Iterator[Any]:
    beside = folder / f".{name}"
    try:
        file = pa.OSFile(str(beside), "wb")
    except OSError as error:
        raise SourceError(
            f"Spark's worker on {socket.gethostname()} cannot write to {folder}, the folder of the machine that started it: "
            f"{error.strerror or error}. If it is another machine, set {STAGING_VARIABLE}, or `staging` in the block `spark:`, to a place "
            "that both reach, such as s3://bucket/prefix (docs/spark.md). Nothing was published."
        ) from None
    with file:
        yield file
    beside.rename(folder / name)


def slice_counts(slices: SliceBy, columns: Sequence[Column], table: pa.Table) -> Counter[str | None]:
    """Return how many rows of the table fall into each slice; each distinct day or value is looked at once."""
    column = slice_column(slices, columns)
    if column is None:
        return Counter({slice_of(slices, None): table.num_rows})
    values = table.column(column.name)
    if column.kind is Kind.INSTANT:
        values = pc.local_timestamp(values.cast(pa.timestamp("us", tz=slices.zone)))
    if column.kind in (Kind.TIMESTAMP, Kind.INSTANT):
        # A plain cast would round moments before 1970 towards it.
        values = pc.floor_temporal(values, unit="day").cast(pa.date32())
    counts: Counter[str | None] = Counter()
    for entry in values.value_counts():
        counts[_slice_of(slices, entry["values"])] += entry["counts"].as_py()
    return counts


def _slice_of(slices: SliceBy, value: pa.Scalar) -> str | None:
    try:
        return slice_of(slices, value.as_py())
    except (ValueError, OverflowError):
        # In some zone the first and the last moments are on days outside the years 1 to 9999.
        return None


def _download(batch: Any, columns: Sequence[Column]) -> pa.Table:
    try:
        return fetch(batch, columns)
    except SourceError:
        raise
    except Exception as error:
        # Not chained, and without its address, which is signed.
        reason = _ADDRESS.sub("…", " ".join(str(error).split()))[:300]
        raise SourceError(
            f"A part of Snowflake's result could not be fetched: {reason.rstrip('.')}. "
            "Check network and proxy, then run again."
        ) from None


def _checked(reports: Sequence[Mapping[str, Any]], promised: int, folder: Path) -> StagedRows:
    """Return the staged rows; raise if some are missing, or if a task wrote its part on another machine."""
    _check_rows(reports, promised)
    staged = StagedRows()
    for report in reports:
        files = (folder.absolute() / report["file"],) if report["rows"] else ()
        if any(not file.is_file() for file in files):
            raise SourceError(
                f"Spark's tasks wrote rows to {folder} on another machine, not on this one. Set {STAGING_VARIABLE}, or `staging` in the "
                "block `spark:`, to a place that both reach, such as s3://bucket/prefix (docs/spark.md). Nothing was published."
            )
        slices = dict(report["slices"])
        staged += StagedRows(files, report["rows"], slices, report["bytes"])
    return staged


def _check_rows(reports: Sequence[Mapping[str, Any]], promised: int) -> None:
    rows = sum(report["rows"] for report in reports)
    if rows != promised:
        raise SourceError(f"Spark staged {rows:,} rows, but Snowflake announced {promised:,}. Run again.")
