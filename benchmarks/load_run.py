"""The bench of loads: the same Parquet files loaded by the pipeline, and by one process with PUT and COPY."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.place import own_sandbox
from tir_dagster.loading.load import Loader
from tir_dagster.loading.staging import by_spark
from tir_dagster.orchestration.home import tir_home
from tir_dagster.sandbox.sample.rows import COLUMNS, order_chunks, parse_month
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark.session import jvm_output, spark_session
from tir_dagster.spec.reading import parse_declared

Say = Callable[[str], None]
OURS, PLAIN = "MYDB.MYSCHEMA.LOADED", "MYDB.MYSCHEMA.COPIED"
ROWS_PER_FILE = 500_000
_SPEC = """\
loads:
  - name: bench
    table: {table}
    files: {{path: "file://{folder}", format: parquet, settle: 0 seconds}}
    mode: append
"""


@dataclass(frozen=True)
class LoadReport:
    """One run: seconds of both ways, and whether both tables hold the same."""

    rows: int
    files: int
    bytes: int
    cores: int
    load: float
    spark_start: float
    ours: Mapping[str, float]
    plain: Mapping[str, float]
    equal: bool

    def as_dict(self) -> dict[str, Any]:
        speeds = {"ours_rows_per_second": self._speed(self.ours), "plain_rows_per_second": self._speed(self.plain)}
        return {**asdict(self), **speeds}

    def _speed(self, seconds: Mapping[str, float]) -> int:
        return round(self.rows / max(sum(seconds.values()), 0.001))

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.rows:,} rows of Parquet in {self.files} files, {self.bytes / 1e6:,.0f} MB, into the sandbox's warehouse"
        yield f"{self.cores} cores, load {self.load:.1f} before the run; Spark started in {self.spark_start:.1f} s, not counted"
        for name, seconds in (("load by Spark", self.ours), ("PUT and COPY", self.plain)):
            parts = ", ".join(f"{step} {spent:.1f} s" for step, spent in seconds.items())
            yield f"  {name:<16}{sum(seconds.values()):>8.1f} s{self._speed(seconds):>12,} rows/s   {parts}"
        yield f"Both tables: {'equal' if self.equal else 'NOT equal'}. The load also checks every row and keeps its ledger."


def run_load_bench(folder: Path, *, rows: int, progress: Say) -> LoadReport:
    """Measure both ways in a place of its own; the sandbox is stopped at the end."""
    load = os.getloadavg()[0]
    with own_sandbox(progress) as env:
        access = SnowflakeAccess.from_environment(env)
        landing = folder / "landing"
        files = _make_files(landing, rows, progress)
        _make_tables(access)
        with _spark() as (spark, started):
            progress(f"loading {len(files)} files by Spark")
            ours = _load(access, landing, spark, progress)
        progress("the same files by PUT and COPY, in one process")
        plain = _copy(access, files)
        progress("comparing both tables")
        equal = _content(access, OURS) == _content(access, PLAIN)
    size = sum(file.stat().st_size for file in files)
    return LoadReport(rows, len(files), size, os.cpu_count() or 1, round(load, 2), started, ours, plain, equal)


def _make_files(folder: Path, rows: int, progress: Say) -> list[Path]:
    folder.mkdir()
    progress(f"writing {rows:,} orders as Parquet")
    kept: list[pa.Table] = []
    files: list[Path] = []
    for chunk in order_chunks(rows=rows, seed=1, until=parse_month(None)):
        kept.append(chunk)
        if sum(table.num_rows for table in kept) >= ROWS_PER_FILE:
            files.append(_written(folder, kept, len(files)))
            kept = []
    return [*files, _written(folder, kept, len(files))] if kept else files


def _written(folder: Path, chunks: list[pa.Table], number: int) -> Path:
    file = folder / f"orders-{number:04d}.parquet"
    pq.write_table(pa.concat_tables(chunks), file, row_group_size=100_000)
    return file


def _make_tables(access: SnowflakeAccess) -> None:
    body = ", ".join(f"{name} {declared}" for name, declared, _ in COLUMNS)
    access.query("CREATE DATABASE IF NOT EXISTS MYDB")
    access.query("CREATE SCHEMA IF NOT EXISTS MYDB.MYSCHEMA")
    for table in (OURS, PLAIN):
        access.query(f"CREATE OR REPLACE TABLE {table} ({body})")


@contextmanager
def _spark() -> Iterator[tuple[Any, float]]:
    begun = time.perf_counter()
    with jvm_output(tir_home()):
        session = spark_session("tir benchmarks", home=tir_home())
    session.range(1).collect()
    try:
        yield session, round(time.perf_counter() - begun, 2)
    finally:
        session.stop()


def _load(access: SnowflakeAccess, folder: Path, spark: Any, progress: Say) -> dict[str, float]:
    (spec,) = parse_declared(_SPEC.format(table=OURS, folder=folder), "bench.yaml").loads
    loaded = Loader(spec, access=access, stager=by_spark(lambda: spark), log=progress).run()
    return dict(loaded.seconds)


def _copy(access: SnowflakeAccess, files: list[Path]) -> dict[str, float]:
    """What a script would do: every file to a stage, one COPY for all of them."""
    stage = "MYDB.MYSCHEMA.TIR_BENCH"
    with access.kept_open():
        access.query(f"CREATE OR REPLACE STAGE {stage}")
        begun = time.perf_counter()
        for file in files:
            access.query(f"PUT 'file://{file}' @{stage}/all/ AUTO_COMPRESS=FALSE")
        put = time.perf_counter()
        access.query(
            f"COPY INTO {PLAIN} FROM @{stage}/all/ FILE_FORMAT=(TYPE=PARQUET USE_LOGICAL_TYPE=TRUE) "
            "MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE"
        )
        done = time.perf_counter()
    return {"put": round(put - begun, 3), "copy": round(done - put, 3)}


def _content(access: SnowflakeAccess, table: str) -> list[tuple[Any, ...]]:
    return access.query(
        f"SELECT COUNT(*), SUM(ORDER_ID), SUM(QUANTITY), MIN(UPDATED_AT), MAX(UPDATED_AT), COUNT(DISTINCT CUSTOMER) FROM {table}"
    )
