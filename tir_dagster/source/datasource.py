"""The Spark data source `tir_snowflake`, as it runs in Spark's workers: hands out and downloads the parts of a result.

Workers import this module each time one starts, so the connector is loaded only where a part is fetched.
"""

from __future__ import annotations

import base64
import pickle
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tir_dagster.errors import SourceError
from tir_dagster.source.arrow import fetch
from tir_dagster.source.columns import Column

NAME = "tir_snowflake"
# Spark copies a record batch into the JVM as a whole.
ROWS_PER_BATCH = 20_000


@dataclass(frozen=True)
class Plan:
    """What the driver hands to Spark: the columns, and for each task its pickled result batches."""

    columns: tuple[Column, ...]
    tasks: tuple[bytes, ...]

    def to_text(self) -> str:
        """As a data source's option, which is a text; Spark shows no options in its plans."""
        return base64.b64encode(zlib.compress(pickle.dumps(self), level=1)).decode()

    @staticmethod
    def from_text(text: str | None) -> Plan:
        if not text:
            raise SourceError(f"The data source {NAME} is read through tir_dagster.source.reader.read, not by itself.")
        plan: Plan = pickle.loads(zlib.decompress(base64.b64decode(text)))  # noqa: S301 - our own driver wrote it
        return plan


class SnowflakeSource(DataSource):
    """Its one option is the plan. The query carried columns and filters: there is nothing left to push down."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def reader(self, schema: StructType) -> DataSourceReader:
        del schema
        # Taken out: Spark sends this object along with every task, and a task needs its own part only.
        return SnowflakeReader(Plan.from_text(self.options.pop("plan", None)))


class SnowflakeReader(DataSourceReader):
    """One partition for each task of the plan."""

    def __init__(self, plan: Plan) -> None:
        self._columns = plan.columns
        self._tasks = plan.tasks

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in self._tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in pickle.loads(partition.value) if partition.value else ():  # noqa: S301 - as above
            yield from _download(batch, self._columns).to_batches(max_chunksize=ROWS_PER_BATCH)

    def __getstate__(self) -> dict[str, Any]:
        # It travels with every task too.
        return {"_columns": self._columns, "_tasks": ()}


def _download(batch: Any, columns: Sequence[Column]) -> pa.Table:
    try:
        return fetch(batch, columns)
    except SourceError:
        raise
    except Exception as error:
        said = re.sub(r"https?://\S+", "…", " ".join(str(error).split()))[:300]
        # Not chained: the original quotes the signed address.
        raise SourceError(
            f"A part of Snowflake's result could not be fetched: {said.rstrip('.')}. "
            "Check network and proxy, then run again."
        ) from None
