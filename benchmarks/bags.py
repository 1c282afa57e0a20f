"""What is published, compared with the source row by row as bags: nothing of ours decides what is equal."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tir_dagster.hyper.casts import FileColumn
from tir_dagster.hyper.engine import connect, literal, quoted
from tir_dagster.hyper.hyperfile import describe
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.sandbox import sample
from tir_dagster.sandbox.sample.rows import SCHEMA
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_datasource, find_project

_ZONED = "TIMESTAMP_TZ"
_BY_ARROW = {
    "int64": "BIGINT",
    "int32": "INTEGER",
    "decimal128(12, 2)": "NUMERIC(12,2)",
    "double": "DOUBLE PRECISION",
    "bool": "BOOL",
    "string": "TEXT",
    "date32[day]": "DATE",
    "time64[us]": "TIME",
    "timestamp[us]": "TIMESTAMP",
    "timestamp[us, tz=UTC]": _ZONED,
}
_TYPES = {column.name: _BY_ARROW[str(column.type)] for column in SCHEMA}
_KEY = SCHEMA.names[0]


@dataclass(frozen=True)
class Difference:
    """Rows that are shown and should not be, rows that should be shown and are not, and of how many orders they are."""

    rows: int
    wrong: int
    missing: int
    orders: int


def write_source(env: Mapping[str, str], file: Path) -> int:
    """All rows of the sample table as it is now, in a Hyper file; return their number."""
    rows = 0
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="source-") as folder:
        part = Path(folder) / "rows.parquet"
        with sample.connect(env) as connection, connection.cursor() as cursor, pq.ParquetWriter(part, SCHEMA) as writer:
            cursor.execute(f"SELECT * FROM {sample.TABLE}")
            for batch in cursor.fetch_arrow_batches(force_microsecond_precision=True):
                writer.write_table(batch.cast(SCHEMA))
                rows += batch.num_rows
        file.unlink(missing_ok=True)
        with connect(file, create=True) as hyper:
            hyper.execute_command('CREATE SCHEMA "Extract"')
            hyper.execute_command(
                f"""CREATE TABLE "Extract"."Extract" AS (SELECT * FROM external({literal(str(part))}, FORMAT => 'parquet'))"""
            )
    return rows


def compare_published(env: Mapping[str, str], *, project: str, name: str, source: Path) -> Difference:
    """Download what anybody would see now, and compare it with the file of the source."""
    with tempfile.TemporaryDirectory(dir=source.parent, prefix="published-") as folder:
        with TableauClient(TableauAccess.from_environment(env)) as client:
            datasource = find_datasource(client, project=find_project(client, project), name=name)
            _, hyper = fetch_shell(client, datasource, Path(folder))
        return compare(hyper, source)


def compare(extract: Path, source: Path) -> Difference:
    """Count the rows that only one side has, however often each side has them."""
    published = describe(extract)
    stored = {column.name: column for column in published.columns}
    with connect(source) as connection:
        connection.catalog.attach_database(str(extract), alias="published")
        sides = (
            (
                _values({name: FileColumn(name, kind) for name, kind in _TYPES.items()}),
                1,
                quoted(source.stem, "Extract", "Extract"),
            ),
            (_values(stored), -1, quoted("published", published.schema, published.name)),
        )
        rows = " UNION ALL ".join(f"SELECT {values}, {sign} AS side FROM {table}" for values, sign, table in sides)
        names = ", ".join(quoted(name) for name in SCHEMA.names)
        surplus = (
            f"SELECT {quoted(_KEY)} AS k, SUM(side) AS n FROM ({rows}) AS b GROUP BY {names} HAVING SUM(side) <> 0"
        )
        sums = ", ".join(f"COALESCE(SUM(CASE WHEN {sign}n > 0 THEN {sign}n END), 0)" for sign in ("-", ""))
        asked = f"SELECT {sums}, COUNT(DISTINCT k) FROM ({surplus}) AS s"
        wrong, missing, orders = (int(str(value)) for value in connection.execute_list_query(asked)[0])
    return Difference(published.rows, wrong, missing, orders)


def _values(stored: Mapping[str, FileColumn]) -> str:
    """All columns in the types of the source; zoned timestamps as their moments in UTC, which some extracts keep without a zone."""
    listed = []
    for name in SCHEMA.names:
        value, wanted = stored[name].comparable, _TYPES[name]
        if wanted == _ZONED:
            value = f"{value} AT TIME ZONE 'UTC'" if stored[name].type == _ZONED else value
        else:
            value = f"CAST({value} AS {wanted})"
        listed.append(f"{value} AS {quoted(name)}")
    return ", ".join(listed)
