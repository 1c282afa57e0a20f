"""The reader of the source for a detection: Snowflake runs a statement, and Spark stages its rows as Parquet unless they are few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes.detectors import staged_columns
from tir_dagster.changes.relation import Relation
from tir_dagster.hyper.fingerprints import Fingerprint, read_fingerprints, snowflake_sql
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import with_cut_keys
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spark.staging import StagedRows, stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class SourceReader:
    """The source at one pinned version; rows are staged below a folder."""

    start_spark: Callable[[], SparkSession]
    access: SnowflakeAccess
    relation: Relation
    version: SourceVersion
    folder: Path
    log: Callable[[str], None]

    def stage(self, statement: str, *, hinted: bool = False) -> tuple[Path, ...]:
        """Run the statement and stage its rows; return the files."""
        staged = stage(
            self.start_spark,
            self.access,
            statement,
            staged_columns(self.relation, hinted=hinted),
            self.folder / "candidates",
        )
        self.log(staged.summary)
        return staged.files

    def read_all(self, folder: Path) -> StagedRows:
        """Stage all rows that people see."""
        rows = with_cut_keys(self.relation.from_clause(self.version), self.relation.key)
        listed = ", ".join(quote(column.name) for column in self.relation.columns)
        query = f"SELECT {listed} FROM {rows} AS r"
        staged = stage(self.start_spark, self.access, query, self.relation.columns, folder, slices=self.relation.slices)
        self.log(staged.summary)
        return staged

    def slice_digests(self) -> Mapping[str | None, Fingerprint]:
        """Return, by slice, how many rows there are and a digest of their keys."""
        relation = self.relation
        names = {
            *(column.name for column in relation.key),
            *([relation.slices.column] if relation.slices.column else []),
        }
        columns = [column for column in relation.columns if column.name in names]
        rows: Any = self.access.query(snowflake_sql(columns, relation.from_clause(self.version), relation.slices))
        return read_fingerprints(rows, columns)
