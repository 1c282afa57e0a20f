"""The work of one task: read its part of a file, check every row, put good and bad rows as Parquet into the load's folder.

Plain functions: `by_spark` runs them as Spark's tasks, `right_here` in this process.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.errors import LoadError, SourceError
from tir_dagster.loading.formats import (
    Bad,
    Piece,
    Shape,
    csv_pieces,
    json_pieces,
    parquet_groups,
    parquet_pieces,
)
from tir_dagster.loading.landing import Hashed, LandingPlace
from tir_dagster.loading.values import LoadColumn, converted
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import literal
from tir_dagster.spark.remote import remote_of
from tir_dagster.spec.load import Files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A Parquet file of more rows is shared by several tasks.
ROWS_PER_UNIT = 500_000
_PUT_ATTEMPTS = 3
# The most tasks at once: each opens its own connection.
_TASKS = 64
# Spark reads these in a path as a pattern.
_GLOB = re.compile(r"([\\{}\[\]*?])")
_SCHEMA_BAD = pa.schema(
    [("FILE_NO", pa.int64()), ("LINE_NO", pa.int64()), ("REASON", pa.string()), ("ROW_TEXT", pa.string())]
)
ROWS, REJECTED = "rows", "rejected"


@dataclass(frozen=True)
class Unit:
    """What a task reads: a file, or some row groups of one; `number` is the file's place in the load."""

    number: int
    path: str
    part: int = 0
    groups: tuple[int, ...] | None = None
    first: int = 1


@dataclass(frozen=True)
class StagePlan:
    """What all tasks of a load know; it can be pickled."""

    access: SnowflakeAccess
    place: LandingPlace
    files: Files
    columns: tuple[LoadColumn, ...]
    # The stage's folder of this load, as PUT and COPY name it.
    folder: str
    # Places in `columns` that must not be NULL, each with the reason for rejecting the row.
    needed: tuple[tuple[int, str], ...] = ()
    flag: int | None = None
    flag_values: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The schema of good rows in staged files: plain names, whatever the table's columns are called."""
        fields = [("FILE_NO", pa.int64()), ("LINE_NO", pa.int64()), ("IS_DELETED", pa.bool_())]
        return pa.schema([*fields, *((f"C{at}", column.arrow) for at, column in enumerate(self.columns))])


@dataclass(frozen=True)
class Staged:
    """The result of a unit; the one of the first part has the digest of the whole file."""

    number: int
    rows: int
    rejected: int
    part: int = 0
    digest: str = ""
    drift: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    # The first bad rows, for a message.
    samples: tuple[str, ...] = ()
    problem: str = ""


Stager = Callable[[StagePlan, Sequence[Unit]], list[Staged]]


def units_of(place: LandingPlace, number: int, path: str, *, is_parquet: bool) -> list[Unit]:
    """Return a file as one unit, a large Parquet file as several."""
    if not is_parquet:
        return [Unit(number, path)]
    with place.opened(path) as raw:
        counts = parquet_groups(raw, path)
    units: list[Unit] = []
    groups: list[int] = []
    first = done = 1
    for at, rows in enumerate(counts):
        groups.append(at)
        done += rows
        if done - first >= ROWS_PER_UNIT:
            units.append(Unit(number, path, len(units), tuple(groups), first))
            groups, first = [], done
    if groups or not units:
        units.append(Unit(number, path, len(units), tuple(groups), first))
    return units


def right_here(plan: StagePlan, units: Sequence[Unit]) -> list[Staged]:
    """Stage all units one after the other in this process."""
    with _putting(plan) as put:
        return [stage_unit(plan, unit, put) for unit in units]


def by_spark(spark: Callable[[], SparkSession]) -> Stager:
    """Return a stager that runs units as Spark's tasks; each opens its own connection and returns its result."""

    def stage(plan: StagePlan, units: Sequence[Unit]) -> list[Staged]:
        from tir_dagster.spark.failures import spark_failures

        session = spark()
        if plan.files.through == "spark":
            return _through_spark(session, plan, units)
        with spark_failures("staging files", remote_of(session)):
            frame = session.createDataFrame([(pickle.dumps(unit),) for unit in units], "unit binary")
            rows = frame.repartition(min(len(units), _TASKS)).mapInArrow(_task(plan), "result string").collect()
        return [_back(row["result"]) for row in rows]

    return stage


def _through_spark(session: SparkSession, plan: StagePlan, units: Sequence[Unit]) -> list[Staged]:
    """Stage files that Spark itself reads with the cluster's own file clients; each file is held in a task's memory."""
    from tir_dagster.spark.failures import spark_failures

    numbers = {_bare(unit.path): unit for unit in units}
    paths = [_GLOB.sub(r"\\\1", unit.path.replace("s3://", "s3a://", 1)) for unit in units]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _putting(plan) as put:
            for batch in batches:
                for path, content in zip(*(batch.column(at).to_pylist() for at in range(2)), strict=True):
                    staged = stage_unit(plan, numbers[_bare(path)], put, content)
                    yield pa.RecordBatch.from_pydict({"result": [json.dumps(asdict(staged))]})

    with spark_failures("staging files", remote_of(session)):
        read = session.read.format("binaryFile").load(paths).select("path", "content")
        return [_back(row["result"]) for row in read.mapInArrow(run, "result string").collect()]


def _bare(path: str) -> str:
    """Return the path without its scheme, because Hadoop writes file:/a for file:///a, and s3a for s3."""
    return path.partition(":")[2].lstrip("/")


def _task(plan: StagePlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _putting(plan) as put:
            for batch in batches:
                units = [pickle.loads(pickled) for pickled in batch.column("unit").to_pylist()]  # noqa: S301 - the driver's own
                results = [json.dumps(asdict(stage_unit(plan, unit, put))) for unit in units]
                yield pa.RecordBatch.from_pydict({"result": results})

    return run


def _back(result: str) -> Staged:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(result).items()
    }
    return Staged(**values)


Put = Callable[[Path, str], None]


@contextmanager
def _putting(plan: StagePlan) -> Iterator[Put]:
    """Give a function that puts files into the load's folder; it replaces files, so a second try is harmless."""
    with plan.access.connect() as connection:

        def put(file: Path, folder: str) -> None:
            target = f"{plan.folder}/{folder}/"
            statement = f"PUT {literal(f'file://{file}')} {literal(target)} AUTO_COMPRESS=FALSE OVERWRITE=TRUE"
            for attempt in range(_PUT_ATTEMPTS):
                report = connection.cursor().execute(statement).fetchall()
                if report and str(report[0][6]).upper() in ("UPLOADED", "SKIPPED"):
                    return
                if attempt + 1 == _PUT_ATTEMPTS:
                    raise SourceError(f"{file.name} did not arrive in {plan.folder}. Check the stage, then run again.")

        yield put


def stage_unit(plan: StagePlan, unit: Unit, put: Put, content: bytes | None = None) -> Staged:
    """Read, check and stage one unit. A problem of the file is returned, not raised: the driver reports all files."""
    shape, counted, digest = Shape(), _Counted(), _FileDigest()
    with tempfile.TemporaryDirectory(prefix="tir-stage-") as scratch:
        name = f"{unit.number:06d}-{unit.part:04d}.parquet"
        rows, bad = Path(scratch) / name, Path(scratch) / f"bad-{name}"
        try:
            with pq.ParquetWriter(rows, plan.schema) as good, pq.ParquetWriter(bad, _SCHEMA_BAD) as rejected:
                for piece in _pieces(plan, unit, shape, content, digest):
                    _write(plan, unit, piece, good, rejected, counted)
        except LoadError as error:
            return Staged(unit.number, 0, 0, unit.part, problem=str(error))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, pa.ArrowException) as error:
            # An unexpected error still belongs to this file: Spark would only report that a Python worker failed.
            return Staged(unit.number, 0, 0, unit.part, problem=_unforeseen(unit, error))
        if counted.rows:
            put(rows, ROWS)
        if counted.rejected:
            put(bad, REJECTED)
    return Staged(
        unit.number,
        counted.rows,
        counted.rejected,
        unit.part,
        digest.digest,
        _drift(plan, shape),
        tuple(shape.missing),
        tuple(f"{unit.path}:{row.line}: {row.reason}" for row in counted.samples),
    )


def _drift(plan: StagePlan, shape: Shape) -> tuple[str, ...]:
    if len(shape.missing) < len(plan.columns):
        return tuple(shape.sentences())
    look = f" (is {plan.files.delimiter!r} its delimiter?)" if plan.files.format == "csv" else ""
    return (*shape.sentences(), f"none of the expected columns was found{look}")


def _unforeseen(unit: Unit, error: Exception) -> str:
    message = " ".join(repr(error).encode("utf-8", "backslashreplace").decode().split())[:300]
    return (
        f"{unit.path}: the file cannot be read: {message}. Nothing was loaded; fix or remove the file, then run again."
    )


@dataclass
class _Counted:
    rows: int = 0
    rejected: int = 0
    samples: list[Bad] = field(default_factory=list)


@dataclass
class _FileDigest:
    digest: str = ""


def _pieces(plan: StagePlan, unit: Unit, shape: Shape, content: bytes | None, digest: _FileDigest) -> Iterator[Piece]:
    """Read the unit's rows; set the file's digest at the end."""
    opened = plan.place.opened(unit.path) if content is None else nullcontext(io.BytesIO(content))
    with plan.place.explaining_errors(unit.path), opened as raw:
        if plan.files.format == "parquet":
            # Parquet is not read from beginning to end, so the digest needs its own pass.
            digest.digest = Hashed(raw).digest() if unit.part == 0 else ""
            raw.seek(0)
            yield from parquet_pieces(raw, unit.path, plan.columns, shape, groups=unit.groups, first=unit.first)
            return
        hashed = Hashed(raw)
        if plan.files.format == "csv":
            yield from csv_pieces(hashed, unit.path, plan.columns, shape, delimiter=plan.files.delimiter)
        else:
            yield from json_pieces(hashed, unit.path, plan.columns, shape)
        digest.digest = hashed.digest()


def _write(plan: StagePlan, unit: Unit, piece: Piece, good: Any, rejected: Any, counted: _Counted) -> None:
    columns: list[pa.Array] = []
    reasons: dict[int, str] = {}
    for values, column in zip(piece.columns, plan.columns, strict=True):
        converted_values, unfit = converted(values, column)
        columns.append(converted_values)
        for at, reason in unfit.items():
            reasons.setdefault(at, reason)
    for place, reason in plan.needed:
        for at in _null_places(columns[place]):
            reasons.setdefault(at, reason)
    unfit_rows = (Bad(piece.lines[at], reason, piece.shown(at)) for at, reason in reasons.items())
    bad = sorted([*piece.bad, *unfit_rows], key=lambda row: row.line)
    table = _rows(plan, unit, piece, columns)
    if reasons:
        table = table.filter(pa.array([at not in reasons for at in range(table.num_rows)]))
    if table.num_rows:
        good.write_table(table)
    if bad:
        rejected.write_table(_bad_rows(unit, bad))
    counted.rows += table.num_rows
    counted.rejected += len(bad)
    counted.samples += bad[: 3 - len(counted.samples)]


def _null_places(values: pa.Array) -> list[int]:
    return [at for at, is_null in enumerate(values.is_null().to_pylist()) if is_null] if values.null_count else []


def _rows(plan: StagePlan, unit: Unit, piece: Piece, columns: list[pa.Array]) -> pa.Table:
    count = len(piece.lines)
    first = piece.lines[0] if count else 0
    numbers = np.arange(first, first + count) if isinstance(piece.lines, range) else piece.lines
    lines = pa.array(numbers, pa.int64())
    return pa.Table.from_arrays(
        [pa.repeat(pa.scalar(unit.number, pa.int64()), count), lines, _deleted(plan, columns, count), *columns],
        schema=plan.schema,
    )


def _deleted(plan: StagePlan, columns: list[pa.Array], count: int) -> pa.Array:
    if plan.flag is None:
        return pa.repeat(pa.scalar(value=False, type=pa.bool_()), count)
    known = {value.upper() for value in plan.flag_values}
    return pa.array([str(value).strip().upper() in known for value in columns[plan.flag].to_pylist()], pa.bool_())


def _bad_rows(unit: Unit, bad: Sequence[Bad]) -> pa.Table:
    return pa.Table.from_pydict(
        {
            "FILE_NO": [unit.number] * len(bad),
            "LINE_NO": [row.line for row in bad],
            "REASON": [row.reason[:1_000] for row in bad],
            "ROW_TEXT": [row.text for row in bad],
        },
        schema=_SCHEMA_BAD,
    )
