"""A star as people build it in Tableau Desktop: sales, products, stores, and who may see which region.

Four logical tables in one extract. Three relationships: many sales of one product, many sales in one store, and, for row-level
security, regions of stores to the people who may see them, which neither side has only once.
"""

from __future__ import annotations

import datetime as dt
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from tableauhyperapi import Connection, Inserter, TableName

from tir_dagster.sandbox.tableau.packages import (
    Column,
    DesktopRelationship,
    DesktopTable,
    RelatedTable,
    SnowflakeConnection,
    build_related_tdsx,
    object_id,
)

CAPTION = "Sales star"
Rows = Mapping[str, Sequence[Sequence[Any]]]

SALES = DesktopTable(
    "SALES",
    (
        Column("SALE_ID", "NUMBER(38,0)"),
        Column("DAY", "DATE"),
        Column("PRODUCT", "NUMBER(38,0)"),
        Column("STORE", "NUMBER(38,0)"),
        Column("QUANTITY", "NUMBER(38,0)"),
        Column("AMOUNT", "NUMBER(12,2)"),
        Column("UPDATED_AT", "TIMESTAMP_NTZ"),
    ),
)
PRODUCTS = DesktopTable(
    "PRODUCTS",
    (
        # Tableau may store a column under another name where one table before has its name.
        Column("PRODUCT", "NUMBER(38,0)", extract_name="PRODUCT (PRODUCTS)"),
        Column("NAME", "VARCHAR"),
        Column("COLOR", "VARCHAR"),
        Column("UPDATED_AT", "TIMESTAMP_NTZ"),
    ),
)
STORES = DesktopTable(
    "STORES",
    (Column("STORE", "NUMBER(38,0)"), Column("CITY", "VARCHAR"), Column("REGION", "VARCHAR")),
)
ENTITLEMENTS = DesktopTable("ENTITLEMENTS", (Column("USERNAME", "VARCHAR"), Column("REGION", "VARCHAR")))
TABLES = (SALES, PRODUCTS, STORES, ENTITLEMENTS)
RELATIONSHIPS = (
    DesktopRelationship(
        RelatedTable("SALES", ("PRODUCT",), all_match=True), RelatedTable("PRODUCTS", ("PRODUCT",), unique=True)
    ),
    DesktopRelationship(RelatedTable("SALES", ("STORE",)), RelatedTable("STORES", ("STORE",), unique=True)),
    DesktopRelationship(RelatedTable("STORES", ("REGION",)), RelatedTable("ENTITLEMENTS", ("REGION",))),
)
# The tables of the Hyper file.
EXTRACT_NAMES = {table.name: object_id(CAPTION, table) for table in TABLES}

_NOON = dt.datetime.fromisoformat("2026-05-01 12:00")
ROWS: Rows = {
    "SALES": (
        (1, dt.date(2026, 4, 1), 10, 100, 2, Decimal("20.00"), _NOON),
        (2, dt.date(2026, 4, 2), 11, 100, 1, Decimal("7.50"), _NOON),
        (3, dt.date(2026, 5, 1), 10, 101, 5, Decimal("50.00"), _NOON),
        (4, None, 11, 101, None, None, _NOON),
    ),
    "PRODUCTS": ((10, "Desk", "red", _NOON), (11, "Chaise longue", None, _NOON)),
    "STORES": ((100, "Zürich", "north"), (101, "Genève", "south")),
    "ENTITLEMENTS": (("ann", "north"), ("ann", "south"), ("bob", "south")),
}


def create_star(sql: Callable[[str], Any], schema: str, rows: Rows = ROWS) -> None:
    """Make the four tables in this schema of the warehouse (`DATABASE.SCHEMA`), and load them."""
    for table in TABLES:
        body = ", ".join(f"{column.remote_name} {column.snowflake_type}" for column in table.columns)
        sql(f"CREATE OR REPLACE TABLE {schema}.{table.name} ({body})")
        if rows.get(table.name):
            values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows[table.name])
            sql(f"INSERT INTO {schema}.{table.name} VALUES {values}")


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, (int, Decimal)) else "'" + str(value).replace("'", "''") + "'"


def star_package(
    path: Path,
    snowflake: SnowflakeConnection,
    *,
    rows: Rows | None = None,
    increment: tuple[str, str] | None = None,
    hyper: Any,
) -> Path:
    """Write the package; with `rows` it looks as after a full refresh, without as before the first one.

    `increment` is the table and column that incremental refreshes add rows to; `hyper` the endpoint of a Hyper process.
    """
    build_related_tdsx(
        path,
        caption=CAPTION,
        tables=TABLES,
        relationships=RELATIONSHIPS,
        snowflake=snowflake,
        increment=increment,
        hyper=hyper,
    )
    return path if rows is None else _filled(path, rows, increment, hyper)


def _filled(path: Path, rows: Rows, increment: tuple[str, str] | None, hyper: Any) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        extract, empty = Path(folder) / "extract.hyper", path.rename(Path(folder) / "empty.tdsx")
        with zipfile.ZipFile(empty) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            document, member = old.namelist()
            extract.write_bytes(old.read(member))
            value = _fill(extract, rows, increment, hyper)
            new.writestr(document, _with_event(old.read(document).decode(), value, sum(map(len, rows.values()))))
            new.write(extract, member)
    return path


def _fill(extract: Path, rows: Rows, increment: tuple[str, str] | None, hyper: Any) -> str:
    """Insert the rows; the greatest value of the increment column as a document writes it."""
    with Connection(hyper, extract) as connection:
        for table, values in rows.items():
            with Inserter(connection, TableName("Extract", EXTRACT_NAMES[table])) as inserter:
                inserter.add_rows(values)
                inserter.execute()
        if increment is None:
            return "%null%"
        table, column = increment
        place = TableName("Extract", EXTRACT_NAMES[table])
        columns = next(logical.columns for logical in TABLES if logical.name == table)
        stored = next(candidate.extract for candidate in columns if candidate.remote_name == column)
        greatest = connection.execute_scalar_query(f'SELECT MAX("{stored}") FROM {place}')
    return str(greatest) if isinstance(greatest, int) else f"#{greatest}#"


def _with_event(document: str, value: str, rows: int) -> str:
    """The document whose extract was created with so many rows."""
    event = (
        f'<refresh-event add-from-file-path="{CAPTION}" increment-value="{value}" refresh-type="create"'
        f' rows-inserted="{rows}" timestamp-start="2026-05-01 12:00:00.000"/>'
    )
    live, extract = document.split("<extract ", 1)
    head, tail = extract.split("<refresh", 1)
    attributes, rest = tail.split("/>", 1)
    return f"{live}<extract {head}<refresh{attributes}>{event}</refresh>{rest}"
