"""The ledger's files: Parquet, a folder per slice, written and read alike by Spark and in the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.source.arrow import arrow_type
from tir_dagster.source.columns import Column, Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION = "p"
# The folder of rows that are in no slice.
NO_SLICE = "(none)"
LEDGER_FILES = f"{PARTITION}=*/part-*.parquet"
_ROWS_PER_GROUP = 100_000


@dataclass(frozen=True)
class Ledger:
    """The ledger under a folder: k0, k1, … (without a row key the slice), slice, hash."""

    folder: Path
    key: tuple[Column, ...]

    @cached_property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self.folder.glob(LEDGER_FILES)))

    @cached_property
    def rows(self) -> int:
        return sum(pq.read_metadata(file).num_rows for file in self.files)

    @property
    def _keys(self) -> tuple[Column, ...]:
        return self.key or (Column("slice", Kind.TEXT),)

    @property
    def _schema(self) -> pa.Schema:
        keys = [(f"k{at}", arrow_type(column)) for at, column in enumerate(self._keys)]
        return pa.schema([*keys, ("slice", pa.string()), ("hash", pa.int64())])

    def frame(self, spark: SparkSession) -> DataFrame:
        keys = [f"k{at} {column.spark}" for at, column in enumerate(self._keys)]
        schema = ", ".join([*keys, "slice string", "hash bigint"])
        # Without the folder's name, which Spark adds as a column.
        return spark.read.schema(schema).parquet(self.folder.absolute().as_uri()).drop(PARTITION)

    def read(self) -> Iterator[tuple[Any, ...]]:
        for file in self.files:
            # By its own: as a data set, the folder's name would become a column.
            yield from arrow_rows(pq.ParquetFile(file).read(columns=self._schema.names))

    def write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        by_slice: dict[str | None, list[tuple[Any, ...]]] = defaultdict(list)
        for row in rows:
            by_slice[row[-2]].append(row)
        for name, kept in by_slice.items():
            target = self.folder / slice_folder(name)
            target.mkdir(parents=True, exist_ok=True)
            _write(target / "part-00000.parquet", self._schema, kept)

    def write_frame(self, frame: DataFrame) -> None:
        (
            frame.selectExpr("*", f"COALESCE(slice, '{NO_SLICE}') AS {PARTITION}")
            .repartition(PARTITION)
            .write.mode("overwrite")
            .partitionBy(PARTITION)
            .parquet(self.folder.absolute().as_uri())
        )


def slice_folder(name: str | None) -> str:
    return f"{PARTITION}={NO_SLICE if name is None else name}"


def write_keys(folder: Path, key: Sequence[Column], keys: Sequence[tuple[Any, ...]]) -> None:
    """Keys under their own names, as Spark would write them."""
    named = [(column.name, arrow_type(column)) for column in key] or [("k0", pa.string())]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "part-00000.parquet", pa.schema(named), keys)


def arrow_rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=_ROWS_PER_GROUP):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _write(file: Path, schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> None:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.table(arrays, schema=schema), file, compression="zstd", row_group_size=_ROWS_PER_GROUP)
