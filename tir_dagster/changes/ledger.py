"""The ledger's files: Parquet, a folder per slice, written and read alike by Spark and in the driver."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from tir_dagster.changes.sets import row_columns
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.slices import ALL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION = "p"
# The folder of rows that are in no slice; slices are dates, `all`, or values, whose text may be no name for a folder.
NO_SLICE = "none"
_PLAIN = "0123456789-"
LEDGER_FILE = "part-{i}"
LEDGER_FILES = f"{PARTITION}=*/part-*.parquet"


@dataclass(frozen=True)
class Ledger:
    """The ledger under a folder: k0, k1, … (without a row key the slice), slice, hash, and g0, g1, … for groups."""

    folder: Path
    key: tuple[Column, ...]
    group: tuple[Column, ...] = ()

    @cached_property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self.folder.glob(LEDGER_FILES)))

    @cached_property
    def rows(self) -> int:
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    @property
    def columns(self) -> str:
        return row_columns(len(self._keys), len(self.group))

    @property
    def _keys(self) -> tuple[Column, ...]:
        return self.key or (Column("slice", Kind.TEXT),)

    def frame(self, spark: SparkSession) -> DataFrame:
        keys = [f"k{at} {column.spark}" for at, column in enumerate(self._keys)]
        groups = [f"g{at} {column.spark}" for at, column in enumerate(self.group)]
        schema = ", ".join([*keys, "slice string", "hash bigint", *groups])
        # Without the folder's name, which Spark adds as a column.
        return spark.read.schema(schema).parquet(self.folder.absolute().as_uri()).drop(PARTITION)


def write_frame(frame: DataFrame, folder: Path) -> None:
    """A ledger that Spark computed, a folder for each slice."""
    (
        frame.selectExpr("*", f"{partition_sql('slice')} AS {PARTITION}")
        .repartition(PARTITION)
        .write.mode("overwrite")
        .partitionBy(PARTITION)
        .parquet(folder.absolute().as_uri())
    )


def partition_sql(column: str) -> str:
    """The folder's name as SQL of DuckDB and of Spark."""
    plain = f"{column} = '{ALL}' OR translate({column}, '{_PLAIN}', '') = ''"
    return (
        f"CASE WHEN {column} IS NULL THEN '{NO_SLICE}' WHEN {plain} THEN {column} ELSE concat('v', md5({column})) END"
    )


def slice_folder(name: str | None) -> str:
    if name is None:
        return f"{PARTITION}={NO_SLICE}"
    plain = name == ALL or not name.strip(_PLAIN)
    return f"{PARTITION}={name if plain else f'v{hashlib.md5(name.encode()).hexdigest()}'}"
