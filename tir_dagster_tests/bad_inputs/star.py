"""Several tables in one extract: what is declared, what their sources hold, and what the datasource shows."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.changes.change_set import ROWS
from tir_dagster.hyper.hyperfile import ExtractTable, describe_all
from tir_dagster.hyper.package.package import read_package
from tir_dagster.hyper.replace import ExtractShape, StagedChange
from tir_dagster.refresh.deliveries.relationships import (
    check_declarable,
    check_references,
    check_related_columns,
    check_staged_nulls,
    match_document,
)
from tir_dagster.sandbox.tableau.packages import SnowflakeConnection, build_tdsx
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.slices import SliceBy
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.bad_inputs.case import Case, Edits, Scene
from tir_dagster_tests.hyper.helpers import run
from tir_dagster_tests.star_package import TABLES, star_package

AREA = "Several tables"
FILE = ("the file",)
SALES = "      - {name: SALES, main: true, source: MYDB.MYSCHEMA.SALES, row_key: SALE_ID}\n"
PRODUCTS = "      - {name: PRODUCTS, source: MYDB.MYSCHEMA.PRODUCTS, row_key: PRODUCT}\n"
STORES = "      - {name: STORES, source: MYDB.MYSCHEMA.STORES, row_key: STORE}\n"
TO_PRODUCTS = "      - {table: SALES, refers_to: PRODUCTS, columns: PRODUCT}\n"
TO_STORES = "      - {table: SALES, refers_to: STORES, columns: STORE}\n"
GOOD = f"""\
extracts:
  - name: star
    tables:
{SALES}{PRODUCTS}{STORES}    relationships:
{TO_PRODUCTS}{TO_STORES}    datasource: {{project: myproject, name: star}}
    thresholds: {{quiet_period: 0 seconds}}
"""
RELATIONSHIPS = f"    relationships:\n{TO_PRODUCTS}{TO_STORES}"
ENTITLEMENTS = "      - {name: ENTITLEMENTS, source: MYDB.MYSCHEMA.ENTITLEMENTS, row_key: [USERNAME, REGION]}\n"

# What is written, instead of what.
DECLARED: list[tuple[str, Edits]] = [
    ("two main tables", ((PRODUCTS, PRODUCTS.replace("name: PRODUCTS,", "name: PRODUCTS, main: true,")),)),
    ("a table without a row key and slices", ((", row_key: PRODUCT}", "}"),)),
    ("two tables of one name", ((PRODUCTS, PRODUCTS.replace("name: PRODUCTS", "name: Sales")),)),
    ("a table without a name", ((PRODUCTS, PRODUCTS.replace("name: PRODUCTS, ", "")),)),
    ("`name: 2025 PRODUCTS` of a table", (("name: PRODUCTS", "name: 2025 PRODUCTS"),)),
    ("`source: PRODUCTS` of a table", (("MYDB.MYSCHEMA.PRODUCTS", "PRODUCTS"),)),
    ("`key: PRODUCT` of a table", (("row_key: PRODUCT", "key: PRODUCT"),)),
    ("one table in `tables`", ((PRODUCTS + STORES + RELATIONSHIPS, ""),)),
    ("`source` beside `tables`", (("    tables:\n", "    source: MYDB.MYSCHEMA.SALES\n    tables:\n"),)),
    ("`row_key` and `slices` beside `tables`", (("    tables:\n", "    row_key: SALE_ID\n    slices: {column: DAY, by: month, start: 2025-01}\n    tables:\n"),)),
    ("`relationships` without `tables`", ((f"    tables:\n{SALES}{PRODUCTS}{STORES}", "    source: MYDB.MYSCHEMA.SALES\n    row_key: SALE_ID\n"),)),
    ("`refers_to: PRODUCT`, which no table is called", (("refers_to: PRODUCTS", "refers_to: PRODUCT"),)),
    ("a table that is related to itself", (("refers_to: PRODUCTS", "refers_to: SALES"),)),
    ("a table that is related to nothing", ((TO_STORES, ""),)),
    ("two tables that are related twice", ((TO_STORES, f"{TO_STORES}{TO_PRODUCTS.replace('columns: PRODUCT', 'columns: STORE')}"),)),
    ("two ways between two tables", ((TO_STORES, f"{TO_STORES}      - {{table: STORES, refers_to: PRODUCTS, columns: PRODUCT}}\n"),)),
    ("a relationship without columns", (("refers_to: PRODUCTS, columns: PRODUCT", "refers_to: PRODUCTS, columns: {}"),)),
    ("`cardinality: many` of a relationship", (("columns: PRODUCT}", "columns: PRODUCT, cardinality: many}"),)),
    ("`delivery: server` with several tables", (("    datasource:", "    delivery: server\n    datasource:"),)),
]  # fmt: skip


def edited(edits: Edits) -> str:
    text = GOOD
    for old, new in edits:
        assert old in text, f"nothing to change: {old}"
        text = text.replace(old, new)
    return text


def declared(done: str, edits: Edits) -> Case:
    return Case(AREA, done, lambda _: parse_specs(edited(edits), "tir.yaml"))


# What the sources hold

COLUMNS: Mapping[str, Sequence[Column]] = {
    table.name: [Column.from_snowflake(column.remote_name, column.snowflake_type) for column in table.columns]
    for table in TABLES
}


def spec_of(*edits: tuple[str, str]) -> ExtractSpec:
    (spec,) = parse_specs(edited(edits), "tir.yaml")
    return spec


def shape_of(table: str) -> ExtractShape:
    """A table as a Hyper file without a document has it; rows of others refer to the first column."""
    columns = tuple(COLUMNS[table])
    return ExtractShape(
        columns, (columns[0].name,), SliceBy(), table=("Extract", table), not_null=frozenset({columns[0].name})
    )


def stage_null(scene: Scene) -> None:
    target = scene.folder / ROWS / "part-0.parquet"
    target.parent.mkdir()
    pq.write_table(pa.table({"PRODUCT": [1, None]}), target)


def refuse_null(scene: Scene) -> None:
    staged = StagedChange(cast("Any", None), scene.folder, shape_of("PRODUCTS"))
    check_staged_nulls(spec_of(), {"PRODUCTS": staged})


def fill_twice(scene: Scene) -> None:
    statements = (
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."SALES" AS (SELECT 1 AS "SALE_ID", 10 AS "PRODUCT", 100 AS "STORE")',
        'CREATE TABLE "Extract"."PRODUCTS" AS (SELECT 10 AS "PRODUCT" UNION ALL SELECT 10 AS "PRODUCT")',
    )
    run(scene.folder / "extract.hyper", *statements, create=True)


def refuse_twice(scene: Scene) -> None:
    shapes = {name: shape_of(name) for name in ("SALES", "PRODUCTS", "STORES")}
    check_references(spec_of(), scene.folder / "extract.hyper", shapes, ["PRODUCTS"], declared=True)


# What the datasource shows

THERE = SnowflakeConnection("acme.snowflakecomputing.com", "MYDB", "MYSCHEMA", "MYWH", "SYSADMIN", "ADA")


def build_several(scene: Scene) -> None:
    """A datasource of four logical tables, as people build it in Tableau Desktop."""
    star_package(scene.folder / "built.tdsx", THERE, hyper=None)


def build_one(scene: Scene) -> None:
    build_tdsx(
        scene.folder / "built.tdsx", caption="x", columns=list(TABLES[0].columns), snowflake=THERE, table="SALES"
    )


def hyper_tables(package: Path) -> tuple[ExtractTable, ...]:
    """The tables of the package's Hyper file, from a copy: Hyper writes to a file that it opens."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(package) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".hyper"))
        return describe_all(Path(archive.extract(member, folder)))


def matched(*edits: tuple[str, str]) -> Callable[[Scene], Any]:
    spec, known = spec_of(*edits), {name: [column.name for column in columns] for name, columns in COLUMNS.items()}

    def provoke(scene: Scene) -> None:
        match_document(
            spec,
            scene.folder / "built.tdsx",
            {name: known[name if name in known else "PRODUCTS"] for name in spec.parts},
            datasource="datasource myproject/star",
            tables=hyper_tables(scene.folder / "built.tdsx"),
        )

    return provoke


WITH_ENTITLEMENTS = (STORES, f"{STORES}{ENTITLEMENTS}")
MANY = "      - {table: STORES, refers_to: ENTITLEMENTS, columns: REGION, cardinality: many_to_many}\n"
SECOND_FACTS = "      - {table: ENTITLEMENTS, refers_to: STORES, columns: REGION}\n"
BUILT = (WITH_ENTITLEMENTS, (TO_STORES, f"{TO_STORES}{MANY}"))
# As the datasource promises it.
ALL_MATCH = ("columns: PRODUCT}", "columns: PRODUCT, integrity: all}")


def related(done: str, old: str, new: str) -> Case:
    return Case(AREA, done, lambda _: check_related_columns(spec_of((old, new)), COLUMNS))


def undeclarable(done: str, relationship: str) -> Case:
    return Case(
        AREA, done, lambda _: check_declarable(spec_of(WITH_ENTITLEMENTS, (TO_STORES, f"{TO_STORES}{relationship}")))
    )


def built(done: str, *edits: tuple[str, str]) -> Case:
    return Case(AREA, done, matched(*edits), FILE, prepare=build_several)


CASES = [
    *(declared(done, edits) for done, edits in DECLARED),
    related("a relationship over a column that its table does not have", "PRODUCTS, columns: PRODUCT", "PRODUCTS, columns: PRODUKT"),
    related("a relationship over a column that the other table does not have", "PRODUCTS, columns: PRODUCT", "PRODUCTS, columns: {PRODUCT: ID}"),
    related("a relationship over columns of two types", "PRODUCTS, columns: PRODUCT", "PRODUCTS, columns: {PRODUCT: NAME}"),
    undeclarable("a `many_to_many` relationship, and nobody built a datasource", MANY),
    undeclarable("two tables of facts, and nobody built a datasource", SECOND_FACTS),
    Case(AREA, "a row without the value by which others refer to it", refuse_null, FILE, prepare=stage_null),
    Case(AREA, "two rows with the value by which others refer to them", refuse_twice, FILE, prepare=fill_twice),
    Case(AREA, "a datasource of one table for a spec of several", matched(), FILE, prepare=build_one),
    Case(AREA, "a datasource of several tables for a spec of one", lambda scene: read_package(scene.folder / "built.tdsx").table, FILE, prepare=build_several),
    built("a datasource that people built with one table more", ALL_MATCH),
    built("a datasource that people built, one of whose tables has another source and name", *BUILT, ALL_MATCH, (PRODUCTS, PRODUCTS.replace("PRODUCTS", "GOODS")), ("refers_to: PRODUCTS", "refers_to: GOODS")),
    built("a datasource that people built, which relates tables by other columns", *BUILT, ALL_MATCH, ("refers_to: STORES, columns: STORE", "refers_to: STORES, columns: {STORE: CITY}")),
    built("a datasource that people built, which promises more than the spec", *BUILT),
]  # fmt: skip
