"""The sample table in the warehouse: made and loaded by PUT and COPY INTO, as real loads are."""

from __future__ import annotations

import secrets
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import snowflake.connector

from tir_dagster.sandbox.home import SandboxError
from tir_dagster.sandbox.sample.rows import COLUMNS, MONTHS, Month, order_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

DATABASE = "MYDB"
SCHEMA_NAME = "MYSCHEMA"
TABLE_NAME = "MYTABLE"
TABLE = f"{DATABASE}.{SCHEMA_NAME}.{TABLE_NAME}"
STAGE = f"{DATABASE}.{SCHEMA_NAME}.TIR_SAMPLE_STAGE"


@dataclass(frozen=True)
class SeededTable:
    """What `seed_table` made."""

    rows: int
    months: str
    seconds: float


def seed_table(
    environment: Mapping[str, str],
    *,
    rows: int,
    seed: int,
    until: Month,
    progress: Callable[[str], object] = lambda _: None,
) -> SeededTable:
    """Make the table anew; the same rows for the same `rows`, `seed` and `until`."""
    begun = time.monotonic()
    body = ", ".join(f"{name} {declared}" for name, declared, _ in COLUMNS)
    with warehouse(environment, "making the sample table") as run:
        run(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
        run(f"CREATE SCHEMA IF NOT EXISTS {DATABASE}.{SCHEMA_NAME}")
        run(f"USE SCHEMA {DATABASE}.{SCHEMA_NAME}")
        run(f"CREATE OR REPLACE TABLE {TABLE} ({body})")
        run(f"ALTER TABLE {TABLE} SET CHANGE_TRACKING = TRUE")
        loaded = load(run, TABLE, _reporting(order_chunks(rows=rows, seed=seed, until=until), rows, progress))
    if loaded != rows:
        raise SandboxError(f"{TABLE}: {loaded:,} of {rows:,} rows arrived. Run tir sandbox seed again.")
    return SeededTable(rows, f"{until.plus(1 - MONTHS)} to {until}", time.monotonic() - begun)


def load(run: Callable[[str], list[tuple[Any, ...]]], table: str, chunks: Iterable[pa.Table]) -> int:
    """Put the chunks on a stage, one file at a time, and copy them all by one statement; returns the rows loaded."""
    # Fresh names: a file that was loaded once into a table of this name is skipped the next time.
    name = secrets.token_hex(4)
    run(f"CREATE OR REPLACE TEMPORARY STAGE {STAGE}")
    with tempfile.TemporaryDirectory(prefix="tir-sample-") as folder:
        for number, chunk in enumerate(chunks):
            file = Path(folder) / f"{name}-{number:04d}.parquet"
            pq.write_table(chunk, file)
            run(f"PUT 'file://{file}' @{STAGE} AUTO_COMPRESS=FALSE")
            file.unlink()
    report = run(
        f"COPY INTO {table} FROM @{STAGE} FILE_FORMAT=(TYPE=PARQUET USE_LOGICAL_TYPE=TRUE)"
        " MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE PURGE=TRUE"
    )
    rows_loaded = 3  # the column of COPY's answer: file, status, rows_parsed, rows_loaded, …
    return sum(int(line[rows_loaded]) for line in report if len(line) > rows_loaded)


def connect(environment: Mapping[str, str], **overrides: Any) -> Any:
    """A connection by the real connector, with the variables any client would use."""
    options = {
        "account": environment["SNOWFLAKE_ACCOUNT"],
        "user": environment["SNOWFLAKE_USER"],
        "password": environment["SNOWFLAKE_PASSWORD"],
        "host": environment["SNOWFLAKE_HOST"],
        "port": int(environment["SNOWFLAKE_PORT"]),
        "protocol": environment["SNOWFLAKE_PROTOCOL"],
        # Without limits the connector repeats a request for ever when the server is gone.
        "network_timeout": 60,
        "login_timeout": 30,
        # The connector would otherwise ask the clouds where it runs, which takes longer than to connect here.
        "platform_detection_timeout_seconds": 0.0,
    }
    return snowflake.connector.connect(**{**options, **overrides})


@contextmanager
def warehouse(environment: Mapping[str, str], action: str) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """A function that runs one statement and returns its rows; what the warehouse refuses becomes a SandboxError."""
    try:
        with connect(environment) as connection, connection.cursor() as cursor:

            def run(statement: str) -> list[tuple[Any, ...]]:
                cursor.execute(statement)
                rows: list[tuple[Any, ...]] = cursor.fetchall()
                return rows

            yield run
    except snowflake.connector.errors.Error as error:
        what = " ".join(str(error.msg or error).split()).rstrip(".")
        raise SandboxError(
            f"The warehouse failed while {action}: {what}. tir sandbox status shows whether it runs, and its log."
        ) from error


def _reporting(chunks: Iterator[pa.Table], rows: int, progress: Callable[[str], object]) -> Iterator[pa.Table]:
    done = 0
    for chunk in chunks:
        yield chunk
        done += chunk.num_rows
        progress(f"{TABLE}: {done:,} of {rows:,} rows staged")
