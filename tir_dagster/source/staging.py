"""Staging: a DataFrame written once to Parquet that Hyper reads, each row with its slice and its hash."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.names import spark_quote
from tir_dagster.source.reader import spark_failures
from tir_dagster.source.session import configure
from tir_dagster.source.slices import SliceBy, slice_spark

SLICE = "__tir_slice"
HASH = "__tir_hash"


@dataclass(frozen=True)
class Staged:
    """What lies in a folder: Parquet files with the data columns, `__tir_slice` and `__tir_hash`."""

    folder: Path
    files: tuple[Path, ...]
    rows: int
    slices: dict[str | None, int]


def stage(df: DataFrame, folder: Path, *, key: Sequence[str], slices: SliceBy, columns: Sequence[Column]) -> Staged:
    """Write the rows to the folder, evaluating the DataFrame once. An earlier staging there is replaced."""
    _check(df, key, columns)
    _clear(folder)
    configure(df.sparkSession)
    rows = df.select(
        *(F.col(spark_quote(column.name)) for column in columns),
        slice_spark(slices, columns).alias(SLICE),
        row_hash(columns).alias(HASH),
    )
    with spark_failures(f"staging {folder.name}"):
        rows.write.mode("append").parquet(folder.absolute().as_uri())
    return staged(folder)


def staged(folder: Path) -> Staged:
    """What an earlier `stage` left in the folder; an unfinished one is an error."""
    if not (folder / "_SUCCESS").is_file():
        raise SourceError(f"{folder} holds no finished staging. Read the source again.")
    files = tuple(sorted(folder.glob("part-*.parquet")))
    counts: Counter[str | None] = Counter()
    for file in files:
        table = pq.read_table(file, columns=[SLICE], read_dictionary=[SLICE])
        for entry in table.column(SLICE).value_counts():
            counts[entry["values"].as_py()] += entry["counts"].as_py()
    return Staged(folder, files, sum(counts.values()), dict(counts))


def row_hash(columns: Sequence[Column]) -> SparkColumn:
    """A 64-bit hash of all columns in this order; equal rows have equal hashes in every run."""
    parts: list[SparkColumn] = []
    for column in columns:
        value = F.col(spark_quote(column.name))
        # xxhash64 skips NULLs: without the marks, (NULL, 'a') and ('a', NULL) would be the same.
        parts += [value.isNull(), _one_form(value) if column.kind is Kind.FLOAT else value]
    return F.xxhash64(*parts)


def _one_form(value: SparkColumn) -> SparkColumn:
    """One bit pattern for equal floats: 0.0 for -0.0, one NaN for all."""
    return F.when(F.isnan(value), F.lit(float("nan"))).otherwise(value + F.lit(0.0))


def _check(df: DataFrame, key: Sequence[str], columns: Sequence[Column]) -> None:
    names = [column.name for column in columns]
    missing = [name for name in names if name not in df.columns]
    if missing:
        raise SourceError(f"Columns {', '.join(missing)} are not among those read: {', '.join(df.columns)}.")
    if unknown := [name for name in key if name not in names]:
        raise SourceError(
            f"The key column {', '.join(unknown)} is not a column of the extract. "
            "Name it under `columns:` in the extract's spec, or choose another key."
        )


def _clear(folder: Path) -> None:
    """Make room for a staging, but only where nothing but an earlier one was."""
    if not folder.exists():
        return
    strangers = [
        path.name
        for path in folder.iterdir()
        if not path.name.lstrip(".").startswith(("part-", "_SUCCESS", "_temporary"))
    ]
    if strangers:
        raise SourceError(f"{folder} holds other files ({', '.join(strangers[:3])}). Stage into a folder of its own.")
    shutil.rmtree(folder)
