"""Other ways to bring an extract up to date, each as its users would write it, in a process of its own.

None of them uses code of ours. What each imports is loaded before its time begins, as everything of ours is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pantab  # type: ignore[import-untyped]
import pyarrow.parquet as pq
from tableauhyperapi import CreateMode, Inserter, Name, SqlType, TableDefinition, TableName

from benchmarks import script_2021
from benchmarks.memory import peak_memory
from tir_dagster.errors import TirError
from tir_dagster.sandbox import sample
from tir_dagster.sandbox.sample.rows import SCHEMA

DATE = "ORDER_DATE"
EXTRACT = TableName("Extract", "Extract")
_HYPER_TYPES = {
    "int64": SqlType.big_int(),
    "int32": SqlType.int(),
    "string": SqlType.text(),
    "date32[day]": SqlType.date(),
    "timestamp[us]": SqlType.timestamp(),
    "timestamp[us, tz=UTC]": SqlType.timestamp_tz(),
    "decimal128(12, 2)": SqlType.numeric(12, 2),
    "double": SqlType.double(),
    "bool": SqlType.bool(),
    "time64[us]": SqlType.time(),
}


@dataclass(frozen=True)
class Task:
    """What a way is asked for: to show the table in this datasource as it is now.

    `since` is the highest watermark that it has seen, `day` the first of the days that the script of 2021 loads again, and
    `local` the Hyper file that a script has kept.
    """

    datasource: str
    project_id: str
    table: str
    since: str
    day: str
    folder: str
    local: str


@dataclass
class Done:
    """Seconds by step, the bytes that were published, and the most memory that the process held."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_published: int = 0
    peak: int | None = None

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[step] = round(time.perf_counter() - begun, 3)

    def publish(self, task: Task, file: Path) -> None:
        with self.timed("publish"), script_2021.signed_in(os.environ) as server:
            script_2021.publish(server, task.project_id, task.datasource, file)
        self.bytes_published = file.stat().st_size


def run_rival(name: str, task: Task, *, limit: float) -> Done:
    """Run one way in a process of its own; TirError says how it failed, or that it took longer than the limit."""
    command = [sys.executable, "-m", __name__, name, json.dumps(asdict(task))]
    # A session of its own: what the way has started, Hyper or a JVM, ends with it.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            told, complaint = process.communicate(timeout=limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TirError(f"stopped after {limit:,.0f} s, the limit that --limit sets") from None
            raise
    if process.returncode != 0:
        raise TirError((complaint.strip().splitlines() or [f"ended with code {process.returncode}"])[-1])
    return Done(**json.loads(told.splitlines()[-1]))


def script_of_2021(task: Task, done: Done) -> None:
    folder = Path(task.folder)
    target = folder / "package.tdsx"
    with script_2021.signed_in(os.environ) as server:
        datasource = script_2021.named(server, task.datasource)
        with done.timed("download, unzip all"):
            unzipped = script_2021.download_and_unzip(server, datasource, folder)
        with done.timed("DELETE by range"):
            (file,) = unzipped.rglob("*.hyper")
            with script_2021.hyper(file) as connection:
                _, largest = script_2021.delete_from(connection, DATE, task.day)
            script_2021.set_increment_value(unzipped, largest)
        with done.timed("deflate all"):
            script_2021.deflate_all(unzipped, target)
        with done.timed("publish"):
            script_2021.publish(server, task.project_id, task.datasource, target, os.environ)
        done.bytes_published = target.stat().st_size
        with done.timed("Tableau's refresh"):
            script_2021.refresh(server, datasource, incremental=True)


def _refreshed_by_tableau(*, incremental: bool) -> Callable[[Task, Done], None]:
    def refresh(task: Task, done: Done) -> None:
        with script_2021.signed_in(os.environ) as server:
            datasource = script_2021.named(server, task.datasource)
            with done.timed("Tableau's refresh"):
                script_2021.refresh(server, datasource, incremental=incremental)

    return refresh


def pandas_all(task: Task, done: Done) -> None:
    """SELECT everything, one frame at a time; every row through the Inserter into a new file; publish."""
    file = Path(task.folder) / "all.hyper"
    with (
        done.timed("SELECT, Inserter"),
        _query(f"SELECT * FROM {task.table}") as cursor,
        script_2021.hyper(file, create_mode=CreateMode.CREATE_AND_REPLACE) as connection,
    ):
        connection.catalog.create_schema("Extract")
        connection.catalog.create_table(_definition())
        with Inserter(connection, _definition()) as inserter:
            for frame in cursor.fetch_pandas_batches():
                inserter.add_rows(rows_of(frame))
            inserter.execute()
    done.publish(task, file)


def pandas_changed(task: Task, done: Done) -> None:
    """SELECT what has a later watermark; DELETE those keys from the file that was kept; insert the rows; publish."""
    file = Path(task.local)
    with done.timed("SELECT"), _query(_changed(task)) as cursor:
        frame = cursor.fetch_pandas_all()
    with done.timed("DELETE, Inserter"), script_2021.hyper(file) as connection:
        connection.execute_command("CREATE TEMPORARY TABLE keys (k BIGINT)")
        with Inserter(
            connection, TableDefinition("keys", [TableDefinition.Column(Name("k"), SqlType.big_int())])
        ) as keys:
            keys.add_rows([[int(key)] for key in frame["ORDER_ID"]])
            keys.execute()
        connection.execute_command('DELETE FROM "Extract"."Extract" WHERE "ORDER_ID" IN (SELECT k FROM keys)')
        with Inserter(connection, _definition()) as inserter:
            inserter.add_rows(rows_of(frame))
            inserter.execute()
    done.publish(task, file)


def pantab_all(task: Task, done: Done) -> None:
    """SELECT everything as one Arrow table, which pantab takes faster than a frame of pandas; write a new file; publish."""
    file = Path(task.folder) / "all.hyper"
    with done.timed("SELECT"), _query(f"SELECT * FROM {task.table}") as cursor:
        rows = cursor.fetch_arrow_all().cast(SCHEMA)
    with done.timed("frame_to_hyper"):
        pantab.frame_to_hyper(rows, file, table=("Extract", "Extract"))
    done.publish(task, file)


def pantab_append(task: Task, done: Done) -> None:
    """SELECT what has a later watermark and append it to the file that was kept: pantab has no way to remove rows."""
    with done.timed("SELECT"), _query(_changed(task)) as cursor:
        rows = cursor.fetch_arrow_all().cast(SCHEMA)
    with done.timed("frame_to_hyper, append"):
        pantab.frame_to_hyper(rows, Path(task.local), table=("Extract", "Extract"), table_mode="a")
    done.publish(task, Path(task.local))


def hyperleaup_all(task: Task, done: Done) -> None:
    """What hyperleaup 0.1.2 does of a DataFrame: one Parquet file by `coalesce(1)`, a table of its types, COPY, publish.

    Its own wheel needs a package of Databricks that it does not declare, so its steps are written here, with the settings that keep
    most: NULLs stay NULL, and timestamps are written so that Hyper reads them. It has no type for a time of day: that is text here.
    """
    from pyspark.sql import SparkSession

    folder = Path(task.folder)
    # What its users have before their time begins.
    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .config("spark.sql.parquet.inferTimestampNTZ.enabled", "false")
        .getOrCreate()
    )
    spark.range(1).collect()
    names = ", ".join(f"{name}::VARCHAR AS {name}" if name == "SHIP_TIME" else name for name in SCHEMA.names)
    with done.timed("SELECT into Spark"), _query(f"SELECT {names} FROM {task.table}") as cursor:
        (folder / "rows").mkdir()
        for number, batch in enumerate(cursor.fetch_arrow_batches()):
            pq.write_table(
                batch,
                folder / "rows" / f"{number:05d}.parquet",
                coerce_timestamps="us",
                allow_truncated_timestamps=True,
            )
        frame = spark.read.parquet(str(folder / "rows"))
    with done.timed("DataFrame to Parquet"):
        frame.coalesce(1).write.mode("overwrite").parquet(str(folder / "one"))
        (part,) = (folder / "one").glob("*.parquet")
    file = folder / "all.hyper"
    with done.timed("COPY"), script_2021.hyper(file, create_mode=CreateMode.CREATE_AND_REPLACE) as connection:
        connection.catalog.create_schema("Extract")
        connection.catalog.create_table(TableDefinition(EXTRACT, [_spark_column(column) for column in frame.schema]))
        connection.execute_command(f"""COPY "Extract"."Extract" FROM '{part}' WITH (FORMAT PARQUET)""")
    done.publish(task, file)
    spark.stop()


def _spark_column(column: Any) -> Any:
    from pyspark.sql import types

    kinds: dict[Any, SqlType] = {
        types.ByteType: SqlType.small_int(),
        types.ShortType: SqlType.small_int(),
        types.IntegerType: SqlType.int(),
        types.LongType: SqlType.big_int(),
        types.DoubleType: SqlType.double(),
        types.BooleanType: SqlType.bool(),
        types.DateType: SqlType.date(),
        types.TimestampType: SqlType.timestamp_tz(),
        types.StringType: SqlType.text(),
    }
    kind = column.dataType
    if isinstance(kind, types.DecimalType):
        sql = SqlType.numeric(min(kind.precision, 18), kind.scale)
    else:
        sql = kinds[type(kind)]
    return TableDefinition.Column(Name(column.name), sql)


def _definition() -> Any:
    columns = [TableDefinition.Column(Name(column.name), _HYPER_TYPES[str(column.type)]) for column in SCHEMA]
    return TableDefinition(EXTRACT, columns)


def rows_of(frame: pd.DataFrame) -> Iterator[list[Any]]:
    """Rows as the Inserter takes them: None for whatever pandas has for a missing value."""
    # A number that may be missing is a float in pandas.
    frame = frame.assign(QUANTITY=frame["QUANTITY"].astype("Int64"))
    whole = frame.astype(object).where(frame.notna(), None)
    return (list(row) for row in whole.itertuples(index=False, name=None))


def _changed(task: Task) -> str:
    return f"SELECT * FROM {task.table} WHERE UPDATED_AT > '{task.since}'::TIMESTAMP_NTZ"


@contextmanager
def _query(sql: str) -> Iterator[Any]:
    with sample.connect(os.environ) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        yield cursor


RIVALS: Mapping[str, Callable[[Task, Done], None]] = {
    "tableau_full": _refreshed_by_tableau(incremental=False),
    "tableau_incremental": _refreshed_by_tableau(incremental=True),
    "script_2021": script_of_2021,
    "pandas_all": pandas_all,
    "pandas_changed": pandas_changed,
    "pantab_all": pantab_all,
    "pantab_append": pantab_append,
    "hyperleaup_all": hyperleaup_all,
}


if __name__ == "__main__":
    way, asked = sys.argv[1:]
    account = Done()
    RIVALS[way](Task(**json.loads(asked)), account)
    account.peak = peak_memory(os.getpid())
    print(json.dumps(asdict(account)))
