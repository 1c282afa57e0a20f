"""What others wrote: types and values, packages and extracts, files to load."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.hyper.hyperfile import create_extract, describe
from tir_dagster.hyper.package.package import read_package
from tir_dagster.loading.load import Loader
from tir_dagster.loading.staging import right_here
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spark.arrow import convert
from tir_dagster.spec.reading import parse_declared
from tir_dagster_tests.bad_inputs.case import Case, Scene
from tir_dagster_tests.hyper.helpers import run

FILE = ("the file",)


def parquet(**columns: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


# Types and values


def type_cases() -> list[Case]:
    area = "Types and values"
    types = ("BINARY", "GEOGRAPHY", "VECTOR(FLOAT, 3)", "DECFLOAT", "SOMETHING_NEW")

    def extract_of(declared: str, value: Any) -> Callable[[Scene], Any]:
        def provoke(scene: Scene) -> None:
            rows = scene.folder / "rows.parquet"
            create_extract(scene.folder / "new.hyper", [Column.from_snowflake("AT", declared)], [rows])

        del value
        return provoke

    return [
        *(
            Case(area, f"a column of type `{name}`", lambda _, name=name: Column.from_snowflake("PLACE", name))
            for name in types
        ),
        Case(
            area,
            "a column that arrives with another type than Snowflake declared",
            lambda _: convert(pa.table({"N": ["one"]}), [Column.from_snowflake("N", "NUMBER(9,0)")]),
        ),
        Case(
            area,
            "a text in a staged column of times",
            extract_of("TIME", "later"),
            FILE,
            prepare=lambda scene: scene.file("rows.parquet", parquet(AT=["later"])),
        ),
        Case(
            area,
            "staged rows without a column of the extract",
            extract_of("TIME", None),
            FILE,
            prepare=lambda scene: scene.file("rows.parquet", parquet(OTHER=["x"])),
        ),
        Case(
            area,
            "a damaged file of staged rows",
            extract_of("TIME", None),
            FILE,
            prepare=lambda scene: scene.file("rows.parquet", b"PAR1 and no more"),
        ),
    ]


# Packages and extracts

LIVE = b"<datasource version='18.1'><connection class='federated'/></datasource>"
OLD_ENGINE = (
    b"<datasource version='10.1'><connection class='federated'/><extract enabled='true'>"
    b"<connection class='dataengine' dbname='x.tde'/></extract></datasource>"
)
BOMB = b"""<?xml version='1.0'?><!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]><datasource version='18.1'>&b;</datasource>"""
PACKAGES: list[tuple[str, list[tuple[str, bytes]]]] = [
    ("a package without a document", []),
    ("a package with two documents", [("a.tds", LIVE), ("b.tds", LIVE)]),
    ("a package of a live datasource", [("a.tds", LIVE)]),
    ("a package of the engine before Hyper", [("a.tds", OLD_ENGINE)]),
    ("a document with a bomb of entities", [("a.tds", BOMB)]),
    ("a document that is cut", [("a.tds", b"<datasource")]),
    ("a workbook instead of a datasource", [("a.tds", b"<workbook version='18.1'/>")]),
    ("a document without a version", [("a.tds", b"<datasource/>")]),
    ("a member that leads out of the package", [("a.tds", LIVE), ("../evil", b"")]),
    ("a member with an absolute path", [("a.tds", LIVE), ("/etc/passwd", b"")]),
    ("a member with a path of Windows", [("a.tds", LIVE), ("C:\\x", b"")]),
    ("a document of 65 MB of nothing", [("a.tds", b" " * (65 << 20))]),
]


def zipped(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def package_cases() -> list[Case]:
    area = "Packages and extracts"

    def two_tables(scene: Scene) -> None:
        statements = (
            'CREATE SCHEMA "Extract"',
            'CREATE TABLE "Extract"."A" (X INT)',
            'CREATE TABLE "Extract"."B" (X INT)',
        )
        run(scene.folder / "two.hyper", *statements, create=True)

    return [
        *(
            Case(
                area,
                done,
                lambda scene: read_package(scene.folder / "orders.tdsx"),
                FILE,
                prepare=lambda scene, members=members: zipped(scene.folder / "orders.tdsx", members),
            )
            for done, members in PACKAGES
        ),
        Case(
            area,
            "a page of HTML instead of a package",
            lambda scene: read_package(scene.folder / "orders.tdsx"),
            FILE,
            prepare=lambda scene: scene.file("orders.tdsx", "<html>Please sign in</html>"),
        ),
        Case(area, "a package that is not there", lambda scene: read_package(scene.folder / "orders.tdsx"), FILE),
        Case(area, "an extract that is not there", lambda scene: describe(scene.folder / "extract.hyper"), FILE),
        Case(
            area,
            "a file that is no Hyper file",
            lambda scene: describe(scene.folder / "extract.hyper"),
            FILE,
            prepare=lambda scene: scene.file("extract.hyper", "not hyper " * 100),
        ),
        Case(area, "an extract of two tables", lambda scene: describe(scene.folder / "two.hyper"), prepare=two_tables),
    ]


# Loads

HEADER = "ID,NAME,DAY,PRICE\n"
TABLE = ("the table",)
FILES: list[tuple[str, str, str | bytes, str]] = [
    ("a CSV file without a column of the table", "a.csv", "ID,NAME,DAY\n1,a,2025-01-01\n", "csv"),
    ("a CSV file with a column that the table does not have", "a.csv", "ID,NAME,DAY,PRICE,MORE\n1,a,,,x\n", "csv"),
    ("a CSV file with one column twice", "a.csv", "ID,ID,DAY,PRICE\n1,2,,\n", "csv"),
    ("a CSV file with semicolons", "a.csv", "ID;NAME\n1;a\n", "csv"),
    ("a date that is none", "a.csv", HEADER + "1,a,2025-13-01,2\n", "csv"),
    ("a number that is none", "a.csv", HEADER + "x,a,,\n", "csv"),
    ("a text that is too long", "a.csv", HEADER + "1,toolong,,\n", "csv"),
    ("a row with too few fields", "a.csv", HEADER + "1,a\n", "csv"),
    ("a quote that is never closed", "a.csv", HEADER + "1,a,,\n" * 50 + '9,"never ends\n' + "2,a,,\n" * 50, "csv"),
    ("a file in Latin-1", "a.csv", HEADER.encode() + b"8,\xff,,\n", "csv"),
    ("a JSON file with another field", "a.json", '{"ID": 1, "NAME": "a", "DAY": null, "COST": 1}\n', "json"),
    ("a line that is no JSON", "a.json", "{\n", "json"),
    ("an empty Parquet file", "a.parquet", b"", "parquet"),
    ("a Parquet file with another type", "a.parquet", parquet(ID=[1], NAME=["a"], DAY=[5], PRICE=[1.5]), "parquet"),
    ("a .gz file that is cut", "a.csv.gz", gzip.compress((HEADER + "1,a,,\n" * 9000).encode(), mtime=0)[:-20], "csv"),
    ("a .gz file that is none", "a.csv.gz", b"not gzip at all", "csv"),
]  # fmt: skip


def load(
    scene: Scene, form: str = "csv", *, mode: str = "mode: append", table: str = "MYDB.MYSCHEMA.REFUSED", path: str = ""
) -> None:
    text = (
        f"loads:\n  - {{name: files, table: {table}, {mode}, reject_share: 0, "
        f"files: {{path: '{path or f'file://{scene.folder}'}', format: {form}, settle: 0 seconds}}}}\n"
    )
    access = SnowflakeAccess.from_environment(scene.place.sandbox.env)
    Loader(parse_declared(text, "tir.yaml").loads[0], access=access, stager=right_here, log=lambda _: None).run()


def load_cases() -> list[Case]:
    area = "Loads of files"
    one_row = HEADER + "1,a,,\n"

    def with_file(done: str, name: str, content: str | bytes, provoke: Callable[[Scene], Any]) -> Case:
        return Case(area, done, provoke, TABLE, prepare=lambda scene: scene.file(name, content))

    return [
        *(
            with_file(done, name, content, lambda scene, form=form: load(scene, form))
            for done, name, content, form in FILES
        ),
        with_file(
            *("a key twice in one file", "a.csv", HEADER + "7,a,,\n7,b,,\n"),
            lambda scene: load(scene, mode="mode: merge, key: ID, duplicates: reject"),
        ),
        with_file(
            *("a table that is not there", "a.csv", one_row),
            lambda scene: load(scene, table="MYDB.MYSCHEMA.NOWHERE"),
        ),
        Case(area, "a folder that is not there", lambda scene: load(scene, path="file:///nowhere/at/all"), TABLE),
        Case(
            area,
            "an empty file for a table that is replaced as a whole",
            lambda scene: load(scene, mode="mode: truncate"),
            TABLE,
            prepare=lambda scene: scene.file("a.csv", HEADER),
        ),
    ]


CASES = [*type_cases(), *package_cases(), *load_cases()]
