"""The work of one task: read its part of a file, check every row, put good and bad rows as Parquet into the load's folder.

Plain functions: `by_spark` runs them as Spark's tasks, `right_here` in this process.
"""

from __future__ import annotations

import io
import pickle
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tir_dagster.errors import LoadError, SourceError
from tir_dagster.loading.formats import Bad, Piece, Shape, csv_pieces, json_pieces, parquet_groups, parquet_pieces
from tir_dagster.loading.landing import Hashed, LandingPlace
from tir_dagster.loading.tables import Target
from tir_dagster.loading.values import converted
from tir_dagster.retries import NO_PAUSE, RetryPolicy
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import literal
from tir_dagster.spark.remote import is_elsewhere, remote_of
from tir_dagster.spec.load import LoadSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A Parquet file of more rows is shared by several tasks.
ROWS_PER_UNIT = 500_000
_PUT_ATTEMPTS = RetryPolicy(tries=3, backoff=NO_PAUSE)
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
    spec: LoadSpec
    target: Target
    # The stage's folder of this load, as PUT and COPY name it; empty if nothing is staged.
    folder: str = ""
    # Whether the tasks run on other machines.
    elsewhere: bool = False

    @property
    def schema(self) -> pa.Schema:
        """The schema of good rows in staged files: plain names, whatever the table's columns are called."""
        fields = [("FILE_NO", pa.int64()), ("LINE_NO", pa.int64()), ("IS_DELETED", pa.bool_())]
        return pa.schema([*fields, *((f"C{at}", column.arrow) for at, column in enumerate(self.target.columns))])


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
    # Whether the file has a column of an unfit type, or none of the expected columns: no load tolerates that.
    unfit: bool = False
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
    """Return a stager that runs units as Spark's tasks; each opens its own connection and returns its result.

    With `through: spark`, Spark reads the files with the cluster's own file clients; a task holds each of them in memory.
    """

    def stage(plan: StagePlan, units: Sequence[Unit]) -> list[Staged]:
        from tir_dagster.spark.failures import spark_failures

        session = spark()
        if is_elsewhere(session):
            plan = replace(plan, place=plan.place.elsewhere(), elsewhere=True)
        with spark_failures("staging files", remote_of(session)):
            if plan.spec.files.through == "spark":
                paths = [_GLOB.sub(r"\\\1", unit.path.replace("s3://", "s3a://", 1)) for unit in units]
                frame = session.read.format("binaryFile").load(paths).select("path", "content")
                task = _task(plan, {_bare(unit.path): unit for unit in units})
            else:
                rows = [(pickle.dumps(unit),) for unit in units]
                frame = session.createDataFrame(rows, "unit binary").repartition(min(len(units), _TASKS))
                task = _task(plan)
            results = frame.mapInArrow(task, "result binary").collect()
        return [pickle.loads(row["result"]) for row in results]  # noqa: S301 - written by the tasks of this load

    return stage


def _bare(path: str) -> str:
    """Return the path without its scheme, because Hadoop writes file:/a for file:///a, and s3a for s3."""
    return path.partition(":")[2].lstrip("/")


def _task(
    plan: StagePlan, by_path: Mapping[str, Unit] | None = None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the work of a Spark task on rows with a unit each, or with the path and the content of a unit's file."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with _putting(plan) as put:
            for row in (row for batch in batches for row in batch.to_pylist()):
                unit = by_path[_bare(row["path"])] if by_path else pickle.loads(row["unit"])  # noqa: S301 - the driver's own
                staged = stage_unit(plan, unit, put, row.get("content"))
                yield pa.RecordBatch.from_pydict({"result": [pickle.dumps(staged)]})

    return run


Put = Callable[[Path, str], None]


@contextmanager
def _putting(plan: StagePlan) -> Iterator[Put]:
    """Give a function that puts files into the load's folder; it replaces files, so a second try is harmless."""
    with plan.access.connect() as connection:

        def put(file: Path, folder: str) -> None:
            target = f"{plan.folder}/{folder}/"
            statement = f"PUT {literal(f'file://{file}')} {literal(target)} AUTO_COMPRESS=FALSE OVERWRITE=TRUE"

            def arrives() -> bool:
                report = connection.cursor().execute(statement).fetchall()
                return bool(report) and str(report[0][6]).upper() in ("UPLOADED", "SKIPPED")

            if not _PUT_ATTEMPTS.until(arrives, bool):
                raise SourceError(f"{file.name} did not arrive in {plan.folder}. Check the stage, then run again.")

        yield put


def stage_unit(plan: StagePlan, unit: Unit, put: Put, content: bytes | None = None) -> Staged:
    """Read, check and stage one unit. A problem of the file is returned, not raised: the driver reports all files."""
    shape, tally = Shape(), _Tally()
    with tempfile.TemporaryDirectory(prefix="tir-stage-") as scratch:
        name = f"{unit.number:06d}-{unit.part:04d}.parquet"
        rows, bad = Path(scratch) / name, Path(scratch) / f"bad-{name}"
        try:
            with pq.ParquetWriter(rows, plan.schema) as good, pq.ParquetWriter(bad, _SCHEMA_BAD) as rejected:
                for piece in _pieces(plan, unit, shape, content, tally):
                    _write(plan, unit, piece, good, rejected, tally)
        except LoadError as error:
            return Staged(unit.number, 0, 0, unit.part, problem=f"{error}{_reach(plan)}")
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, pa.ArrowException) as error:
            # An unexpected error still belongs to this file: Spark would only report that a Python worker failed.
            message = " ".join(repr(error).encode("utf-8", "backslashreplace").decode().split())[:300]
            problem = f"{unit.path}: the file cannot be read: {message}. Nothing was loaded; fix or remove the file, then run again."
            return Staged(unit.number, 0, 0, unit.part, problem=problem)
        if tally.rows:
            put(rows, ROWS)
        if tally.rejected:
            put(bad, REJECTED)
    nothing_found = len(shape.missing) == len(plan.target.columns)
    drift = shape.sentences()
    if nothing_found:
        hint = f" (is {plan.spec.files.delimiter!r} its delimiter?)" if plan.spec.files.format == "csv" else ""
        drift.append(f"none of the expected columns was found{hint}")
    return Staged(
        unit.number,
        tally.rows,
        tally.rejected,
        unit.part,
        tally.digest,
        drift=tuple(drift),
        missing=tuple(shape.missing),
        unfit=nothing_found or bool(shape.other),
        samples=tuple(f"{unit.path}:{row.line}: {row.reason}" for row in tally.samples),
    )


def _reach(plan: StagePlan) -> str:
    """Return what to add to an error about a file of a folder that executors elsewhere may not have."""
    if not plan.elsewhere or plan.place.is_s3:
        return ""
    host = socket.gethostname()
    return f" It was read by Spark's worker on {host}: all executors must reach {plan.place.address} under this path; else use s3://."


@dataclass
class _Tally:
    """What is known of a unit so far: its counts, its first bad rows, and in the end the digest of its file."""

    rows: int = 0
    rejected: int = 0
    samples: list[Bad] = field(default_factory=list)
    digest: str = ""


def _pieces(plan: StagePlan, unit: Unit, shape: Shape, content: bytes | None, tally: _Tally) -> Iterator[Piece]:
    """Read the unit's rows; note the file's digest at the end."""
    opened = plan.place.opened(unit.path) if content is None else nullcontext(io.BytesIO(content))
    with plan.place.explaining_errors(unit.path), opened as raw:
        if plan.spec.files.format == "parquet":
            # Parquet is not read from beginning to end, so the digest needs its own pass.
            tally.digest = Hashed(raw).digest() if unit.part == 0 else ""
            raw.seek(0)
            yield from parquet_pieces(raw, unit.path, plan.target.columns, shape, groups=unit.groups, first=unit.first)
            return
        hashed = Hashed(raw)
        if plan.spec.files.format == "csv":
            yield from csv_pieces(hashed, unit.path, plan.target.columns, shape, delimiter=plan.spec.files.delimiter)
        else:
            yield from json_pieces(hashed, unit.path, plan.target.columns, shape)
        tally.digest = hashed.digest()


def _write(plan: StagePlan, unit: Unit, piece: Piece, good: Any, rejected: Any, tally: _Tally) -> None:
    columns: list[pa.Array] = []
    reasons: dict[int, str] = {}
    for values, column in zip(piece.columns, plan.target.columns, strict=True):
        converted_values, unfit = converted(values, column)
        columns.append(converted_values)
        reasons = {**unfit, **reasons}
    for place, reason in plan.target.needed():
        for at in pc.indices_nonzero(columns[place].is_null()).to_pylist():
            reasons.setdefault(at, reason)
    unfit_rows = (Bad(piece.lines[at], reason, piece.shown(at)) for at, reason in reasons.items())
    bad = sorted([*piece.bad, *unfit_rows], key=lambda row: row.line)
    numbers = pa.repeat(pa.scalar(unit.number, pa.int64()), len(piece.lines))
    lines = pa.array(piece.lines, pa.int64())
    table = pa.Table.from_arrays([numbers, lines, _deleted(plan, columns, len(lines)), *columns], schema=plan.schema)
    if reasons:
        table = table.filter(pa.array([at not in reasons for at in range(table.num_rows)]))
    if table.num_rows:
        good.write_table(table)
    if bad:
        entries = [(unit.number, row.line, row.reason[:1_000], row.text) for row in bad]
        rejected.write_table(
            pa.Table.from_pylist([dict(zip(_SCHEMA_BAD.names, entry, strict=True)) for entry in entries], _SCHEMA_BAD)
        )
    tally.rows += table.num_rows
    tally.rejected += len(bad)
    tally.samples += bad[: 3 - len(tally.samples)]


def _deleted(plan: StagePlan, columns: list[pa.Array], count: int) -> pa.Array:
    flag = plan.target.flag
    if flag is None:
        return pa.repeat(pa.scalar(value=False, type=pa.bool_()), count)
    known = {value.upper() for value in plan.spec.delete_values}
    return pa.array([str(value).strip().upper() in known for value in columns[flag].to_pylist()], pa.bool_())
