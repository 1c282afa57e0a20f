"""Reading Snowflake into Spark, without jars: the driver queries once, tasks download the parts of the result.

The statement runs here, before the DataFrame exists, so that Spark, which may plan a scan more than once, never scans
the source twice. Tasks get result batches: the first rows and signed addresses of the others. No credential leaves the
driver.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from snowflake.connector.result_batch import ArrowResultBatch

from tir_dagster.errors import SourceError
from tir_dagster.source.arrow import fetch
from tir_dagster.source.columns import Column
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.datasource import NAME, Plan, SnowflakeSource
from tir_dagster.source.names import quote, spark_quote
from tir_dagster.source.session import configure

# Tasks of about this many rows: large enough to pay for a task, small enough for a worker's memory.
ROWS_PER_TASK = 250_000
_CONNECTIONS = 4


def register(spark: SparkSession) -> None:
    """Make the data source known to a session, and give the session the settings it relies on."""
    configure(spark).dataSource.register(SnowflakeSource)


def read(
    spark: SparkSession,
    access: SnowflakeAccess,
    query: str,
    columns: Sequence[Column],
    *,
    tasks: int | None = None,
    split_by: Sequence[str] = (),
) -> DataFrame:
    """The query's rows as they are now: the query runs here, its parts are fetched when Spark needs them.

    Signed addresses live for some hours: stage or cache what is used later. `tasks` is the number of tasks wished for; a
    result cannot have more of them than parts. Where a large result comes in too few parts, it is read again in hash
    buckets of the columns in `split_by`: by several queries at different moments, so pin what they read to one version.
    """
    schema = spark_schema(columns)
    plan = plan_read(access, query, columns, tasks=tasks, split_by=split_by)
    register(spark)
    return spark.read.format(NAME).schema(schema).option("plan", plan.to_text()).load()


def plan_read(
    access: SnowflakeAccess,
    query: str,
    columns: Sequence[Column],
    *,
    tasks: int | None = None,
    split_by: Sequence[str] = (),
) -> Plan:
    """Run the query, and group the parts of its result into tasks; see `read`."""
    batches = _run(access, query)
    wanted = tasks or -(-sum(batch.rowcount for batch in batches) // ROWS_PER_TASK)
    if split_by and 2 * len(batches) <= wanted:
        queries = _buckets(query, split_by, wanted)
        with ThreadPoolExecutor(min(len(queries), _CONNECTIONS)) as pool:
            batches = [batch for part in pool.map(lambda text: _run(access, text), queries) for batch in part]
    return Plan(tuple(columns), tuple(pickle.dumps(group) for group in _grouped(batches, wanted)))


def _buckets(query: str, by: Sequence[str], parts: int) -> list[str]:
    """The query in parts, by a hash of some columns: each row in exactly one."""
    hashed = f"HASH({', '.join(quote(name) for name in by)})"
    return [f"SELECT * FROM ({query}) WHERE COALESCE(MOD(ABS({hashed}), {parts}), 0) = {part}" for part in range(parts)]


def read_here(access: SnowflakeAccess, query: str, columns: Sequence[Column]) -> pa.Table:
    """A result of few columns in the driver, without Spark."""
    parts = [fetch(batch, columns) for batch in _run(access, query)]
    return pa.concat_tables(parts)


def spark_schema(columns: Sequence[Column]) -> str:
    """The schema of what is read, as DDL; names that Spark cannot tell apart are an error."""
    names = [column.name.upper() for column in columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SourceError(
            f"Column {', '.join(twice)} is there more than once, or in two spellings that Spark does not tell apart. "
            "Choose one under `columns:` in the extract's spec."
        )
    return ", ".join(f"{spark_quote(column.name)} {column.spark}" for column in columns)


def _run(access: SnowflakeAccess, query: str) -> list[ArrowResultBatch]:
    with access.connect() as connection, connection.cursor() as cursor:
        cursor.execute(query)
        batches = cursor.get_result_batches() or []
    arrow = [batch for batch in batches if isinstance(batch, ArrowResultBatch)]
    if not batches or len(arrow) != len(batches):
        raise SourceError(
            f"Snowflake account {access.account} did not answer in Arrow. Read with a SELECT, and unset "
            "PYTHON_CONNECTOR_QUERY_RESULT_FORMAT for the user."
        )
    return arrow


def _grouped(batches: Sequence[ArrowResultBatch], wanted: int) -> list[list[ArrowResultBatch]]:
    """Tasks of about equal rows; one task for a small result."""
    groups: list[list[ArrowResultBatch]] = [[] for _ in range(max(1, min(wanted, len(batches))))]
    sizes = [0] * len(groups)
    for batch in sorted(batches, key=lambda batch: -batch.rowcount):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(batch)
        sizes[smallest] += batch.rowcount
    return groups


_TOLD = re.compile(r"tir_dagster\.\S*(?:SourceError|SnowflakeError): (.+?)(?:\n|$)")


@contextmanager
def spark_failures(action: str) -> Iterator[None]:
    """What a task said in its SourceError is raised here; any other failure of Spark names the action."""
    try:
        yield
    except SourceError:
        raise
    # A task's failure comes as Py4J's error, as Spark's or as Connect's; each carries the traceback as text.
    except Exception as error:
        if told := _TOLD.search(str(error)):
            raise SourceError(told[1]) from None
        if isinstance(error, Py4JNetworkError | ConnectionError):
            raise SourceError(
                f"Spark's Java process ended while {action}, most likely for want of memory. Give it more, by the variable"
                " SPARK_DRIVER_MEMORY=4g or the setting spark.driver.memory, and run again. Nothing was published."
            ) from error
        if not isinstance(error, PySparkException):
            raise
        first = str(error).strip().split("\n", 1)[0][:300]
        raise SourceError(f"Spark failed while {action}: {first}. The log of the run has the details.") from error
