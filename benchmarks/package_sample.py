"""The package that both ways begin with: a large extract, made by Hyper itself, published to the stand-in over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.package_ways import KEY
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.hyperfile import EXTRACT_SCHEMA, EXTRACT_TABLE
from tir_dagster.hyper.increment import format_value
from tir_dagster.hyper.package.package import extract_hyper, read_package
from tir_dagster.sandbox.tableau.archive import Package
from tir_dagster.sandbox.tableau.document import Document
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_project
from tir_dagster.tableau.publishing import publish

# Every site has it.
PROJECT = "default"
# Two years of days; the last month of them is purged.
FIRST_DAY, DAYS, PURGED_DAYS = date(2024, 1, 1), 730, 30
SINCE = FIRST_DAY + timedelta(days=DAYS - PURGED_DAYS)
# What Hyper takes for a row of these columns.
BYTES_PER_ROW = 150
_TABLE = quoted(EXTRACT_SCHEMA, EXTRACT_TABLE)
_COLUMNS = (
    Column("ORDER_ID", "NUMBER(38,0)"),
    Column(KEY, "DATE"),
    Column("AMOUNT", "FLOAT"),
    Column("CUSTOMER", "VARCHAR"),
    Column("REFERENCE", "VARCHAR"),
    Column("NOTE", "VARCHAR"),
)


@dataclass(frozen=True)
class Content:
    """What tells one extract from another: how many rows, the sum of their keys, their last day."""

    rows: int
    keys: int
    last: str


@dataclass(frozen=True)
class Sample:
    """A package, and what must remain of its extract."""

    package: Path
    hyper_bytes: int
    rows: int
    remains: Content


def make_sample(folder: Path, rows: int) -> Sample:
    """A package of so many rows whose text hardly compresses, deflated as the stand-in's own refresh leaves it."""
    empty = build_tdsx(
        folder / "empty.tdsx", caption="large", columns=_COLUMNS, snowflake=_NOWHERE, table="ORDERS", increment_key=KEY
    )
    hyper = extract_hyper(read_package(empty), folder / "large.hyper")
    _fill(hyper, rows)
    remains = content_of(hyper, f"{quoted(KEY)} < DATE '{SINCE.isoformat()}'")
    package = _packed(empty, folder / "large.tdsx", hyper, rows)
    size = hyper.stat().st_size
    hyper.unlink()
    return Sample(package, size, rows, remains)


_NOWHERE = SnowflakeConnection("acme.snowflakecomputing.com", "SHOP", "PUBLIC", "WH", "READER", "TABLEAU")


def _fill(hyper: Path, rows: int) -> None:
    """Digests as text: they deflate to little more than half, as real extracts do, and no page repeats another."""
    days = f"DATE '{FIRST_DAY.isoformat()}' + CAST(i * {DAYS} / {rows} AS INTEGER)"
    # A digest is the dear part, and one in another column is too far away for deflate to find it again.
    rows_sql = f"SELECT i, MD5(CAST(i AS TEXT)) AS a, MD5(CAST(-i - 1 AS TEXT)) AS b FROM GENERATE_SERIES(CAST(0 AS BIGINT), {rows - 1}) AS s(i)"
    values = f"i, {days}, SQRT(i), 'customer ' || (i % 5000), a || b, b || a"
    with connect(hyper) as connection:
        connection.execute_command(f"INSERT INTO {_TABLE} SELECT {values} FROM ({rows_sql}) AS made")


def content_of(hyper: Path, where: str = "TRUE") -> Content:
    with connect(hyper) as connection:
        wanted = f'COUNT(*), SUM("ORDER_ID"), CAST(MAX({quoted(KEY)}) AS TEXT)'
        row: list[Any] = connection.execute_list_query(f"SELECT {wanted} FROM {_TABLE} WHERE {where}")[0]
    return Content(int(row[0]), int(row[1]), format_value(date.fromisoformat(row[2])))


def _packed(empty: Path, target: Path, hyper: Path, rows: int) -> Path:
    last = format_value(FIRST_DAY + timedelta(days=DAYS - 1))
    with Package(empty, max_bytes=1 << 40) as package:
        document = Document(package.document())
        document.add_event(kind="create", value=last, rows=rows, started=datetime.now(UTC), origin="large")
        member = package.member_at(document.extract_member)
        assert member is not None, "it was built with its extract"
        package.rewrite(target, {package.document_name(): document.text(), member: hyper})
    return target


def publish_sample(sample: Sample, names: list[str], env: Mapping[str, str]) -> None:
    """The package under each of these names."""
    with TableauClient(TableauAccess.from_environment(env)) as client:
        project = find_project(client, PROJECT)
        for name in names:
            publish(client, sample.package, project=project, name=name)
