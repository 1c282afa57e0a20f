"""Comparison of a published datasource with its source: download the extract and compare each slice with the table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.fingerprints import different_slices, extract_fingerprints, read_fingerprints, snowflake_sql
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.snowflake.versions import describe
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient


@dataclass(frozen=True)
class SliceComparison:
    """Number of slices on both sides, number of slices that differ, and rows of the extract."""

    slices: int
    different: int
    rows: int

    @property
    def equal(self) -> bool:
        return self.different == 0


def snowflake_of(spec: ExtractSpec, env: Mapping[str, str]) -> SnowflakeAccess:
    """Return access to Snowflake with the database and schema of the extract's source."""
    table = TableName.parse(spec.source)
    return replace(SnowflakeAccess.from_environment(env), database=quote(table.database), schema=quote(table.schema))


@contextmanager
def published_extract(spec: ExtractSpec, env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the Hyper file of the datasource as published now; it is deleted after the block."""
    with tempfile.TemporaryDirectory(prefix="tir-compare-") as folder:
        with TableauClient(TableauAccess.from_environment(env)) as client:
            datasource = look_at_server(client, spec).datasource
            if datasource is None:
                raise DatasourceError(f"There is no datasource {spec.datasource.name!r} to compare. Refresh it first.")
            _, hyper = fetch_shell(client, datasource, Path(folder), several=bool(spec.tables))
        yield hyper


def compare_slices(hyper: Path, spec: ExtractSpec, env: Mapping[str, str]) -> SliceComparison:
    """Compare the file's fingerprints with those that Snowflake computes for the table."""
    access, table = snowflake_of(spec, env), TableName.parse(spec.source)
    columns = describe(access, table)
    slicing = SliceBy(spec.slices.column, spec.slices.by, spec.slices.zone)
    extract_slices = extract_fingerprints(hyper, columns, slicing)
    source_slices = read_fingerprints(access.query(snowflake_sql(columns, table.sql, slicing)), columns)
    rows = sum(fingerprint["rows"] for fingerprint in extract_slices.values())
    return SliceComparison(
        len({**extract_slices, **source_slices}), len(different_slices(extract_slices, source_slices)), rows
    )
