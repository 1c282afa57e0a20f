"""A package of several logical tables that people built: taken over, filled anew, and equal but for what must change."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.package.document import Document, document_differences
from tir_dagster.hyper.package.matching import (
    DeclaredRelationship,
    DeclaredTable,
    MatchedTable,
    PhysicalTable,
    match_tables,
)
from tir_dagster.hyper.package.object_model import read_object_model
from tir_dagster.hyper.package.package import (
    RefreshChange,
    document_of,
    extract_hyper,
    packed,
    read_package,
    refresh_change,
)
from tir_dagster.hyper.package.xmltext import XmlText
from tir_dagster.sandbox.tableau.extracts import ForeignKey, StoredTable
from tir_dagster.sandbox.tableau.hyper_model import document_of_hyper_file
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.hyper.documents import SNOWFLAKE
from tir_dagster_tests.hyper.documents import document_of as text_of
from tir_dagster_tests.hyper.star_document import STAR
from tir_dagster_tests.star_package import EXTRACT_NAMES, ROWS, TABLES, star_package

DECLARED = tuple(
    DeclaredTable(
        table.name.lower(),
        tuple(column.remote_name for column in table.columns),
        TableName("SHOP", "PUBLIC", table.name),
    )
    for table in TABLES
)
RELATED = (
    DeclaredRelationship("sales", "products", (("PRODUCT", "PRODUCT"),), "many_to_one", every_first_row_matches=True),
    DeclaredRelationship("sales", "stores", (("STORE", "STORE"),), "many_to_one", every_first_row_matches=False),
    DeclaredRelationship("entitlements", "stores", (("REGION", "REGION"),), "many_to_many"),
)


@pytest.fixture(scope="module")
def hyper_process() -> Iterator[HyperProcess]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process


@pytest.fixture(scope="module")
def package(hyper_process: HyperProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Desktop publishes it after its first full refresh."""
    folder = tmp_path_factory.mktemp("star")
    return star_package(folder / "star.tdsx", SNOWFLAKE, rows=ROWS, hyper=hyper_process.endpoint)


def tables_of(hyper: Path) -> list[PhysicalTable]:
    with connect(hyper) as connection:
        catalog = connection.catalog
        return [
            PhysicalTable(
                schema.name.unescaped,
                table.name.unescaped,
                tuple(column.name.unescaped for column in catalog.get_table_definition(table).columns),
            )
            for schema in catalog.get_schema_names()
            for table in catalog.get_table_names(schema)
        ]


def matched(package: Path, hyper: Path) -> dict[str, MatchedTable]:
    return match_tables(DECLARED, read_object_model(document_of(package)), tables_of(hyper), relationships=RELATED)


def test_every_table_is_found_under_the_name_that_tableau_gave_it(package: Path, tmp_path: Path):
    hyper = extract_hyper(read_package(package), tmp_path / "star.hyper")
    tables = matched(package, hyper)
    assert {name.upper(): table.physical.name for name, table in tables.items()} == EXTRACT_NAMES
    # A name that two tables have stays as it is in the first one only.
    assert (tables["sales"].names["PRODUCT"], tables["products"].names["PRODUCT"]) == ("PRODUCT", "PRODUCT (PRODUCTS)")


def test_after_other_rows_the_package_is_equal_but_for_the_refresh(package: Path, tmp_path: Path):
    source = read_package(package)
    hyper = extract_hyper(source, tmp_path / "star.hyper")
    products = matched(package, hyper)["products"]
    place = quoted(products.physical.schema, products.physical.name)
    with connect(hyper) as connection:
        names = products.names
        connection.execute_command(
            f"UPDATE {place} SET {quoted(names['COLOR'])} = 'blue' WHERE {quoted(names['PRODUCT'])} = 11"
        )
    written = packed(source, "star.tdsx", hyper=hyper, refresh=refresh_change(source, hyper, rows=12)).write(
        tmp_path / "written.tdsx"
    )
    old, new = text_of(package), text_of(written)
    assert document_differences(Document(old), Document(new)) == ()
    assert old != new
    assert read_package(written).events[-1].rows_inserted == "12"
    with zipfile.ZipFile(package) as before, zipfile.ZipFile(written) as after:
        assert before.namelist() == after.namelist()

    back = extract_hyper(read_package(written), tmp_path / "back.hyper")
    assert tables_of(back) == tables_of(extract_hyper(source, tmp_path / "old.hyper"))
    assert matched(written, back) == matched(package, back)
    with connect(back) as connection:
        listed = ", ".join(quoted(products.names[name]) for name in ("PRODUCT", "COLOR"))
        rows = connection.execute_list_query(f"SELECT {listed} FROM {place} ORDER BY 1")
    assert rows == [[10, "red"], [11, "blue"]]


@pytest.mark.parametrize(
    ("increment", "value"),
    [(("SALES", "SALE_ID"), "2"), (("SALES", "DAY"), "#2026-04-02#"), (("PRODUCTS", "PRODUCT"), "10")],
)
def test_the_increment_value_is_that_of_the_table_that_has_the_key(
    hyper_process: HyperProcess, tmp_path: Path, increment: tuple[str, str], value: str
):
    source = read_package(
        star_package(tmp_path / "star.tdsx", SNOWFLAKE, rows=ROWS, increment=increment, hyper=hyper_process.endpoint)
    )
    assert source.increment_table == ("Extract", EXTRACT_NAMES[increment[0]])
    hyper = extract_hyper(source, tmp_path / "star.hyper")
    for table, most in (("SALES", "SALE_ID"), ("PRODUCTS", "PRODUCT (PRODUCTS)")):
        with connect(hyper) as connection:
            place = quoted("Extract", EXTRACT_NAMES[table])
            connection.execute_command(f"DELETE FROM {place} WHERE {quoted(most)} IN (3, 4, 11)")
    written = packed(source, "star.tdsx", hyper=hyper, refresh=refresh_change(source, hyper)).write(tmp_path / "w.tdsx")
    assert read_package(written).last_increment == value


@pytest.mark.parametrize(
    ("old", "new", "differences"),
    [
        ('update-time="', 'update-time="x', ()),
        ('rows-inserted="', 'rows-inserted="9', ()),
        ('tablename="Extract"', 'tablename="Other"', ("the connection in line",)),
        ("<remote-alias>CITY</remote-alias>", "<remote-alias>TOWN</remote-alias>", ("the remote-alias in line",) * 2),
        ('unique-key="true"', 'unique-key="false"', ("the second-end-point in line",) * 2),
        ("<date-options", "<more/><date-options", ("nodes instead of",)),
    ],
)
def test_everything_else_that_changes_in_a_document_is_noticed(
    package: Path, old: str, new: str, differences: Sequence[str]
):
    text = text_of(package).decode()
    assert old in text
    result = document_differences(Document(text.encode()), Document(text.replace(old, new).encode()))
    assert len(result) == len(differences)
    assert all(part in difference for part, difference in zip(differences, result, strict=True))


@pytest.mark.parametrize(
    ("old", "new", "differences"),
    [
        ("increment-value='#2025-01-01#'", "increment-value='#2025-01-02#'", 0),
        ("increment-value='#2024-01-01#'", "increment-value='#2024-01-02#'", 1),
        ("rows-inserted='7'", "rows-inserted='8'", 1),
        ("update-time='yesterday'", "update-time='today'", 1),
    ],
)
def test_only_the_last_event_and_only_the_extract_may_change(old: str, new: str, differences: int):
    earlier = "<refresh-event increment-value='#2024-01-01#' rows-inserted='7' />"
    text = STAR.replace("<refresh-event", f"{earlier}<refresh-event", 1)
    text = text.replace("<connection class='snowflake'", "<connection class='snowflake' update-time='yesterday'")
    assert old in text
    changed = text.replace(old, new)
    assert len(document_differences(Document(text.encode()), Document(changed.encode()))) == differences


def test_a_document_that_would_change_elsewhere_is_not_published(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = read_package(package)
    hyper = extract_hyper(source, tmp_path / "star.hyper")
    edited = XmlText.edited
    # As if an attribute had been found in the wrong place of the text.
    monkeypatch.setattr(XmlText, "edited", lambda xml: edited(xml).replace(b'inline="true"', b'inline="1"'))
    with pytest.raises(ExtractError, match=r"besides the refresh, it would change the datasource in line \d+"):
        packed(source, "star.tdsx", hyper=hyper, refresh=RefreshChange(rows=1))


def test_a_published_hyper_file_is_found_through_the_document_that_the_server_makes():
    stored = {
        table.name: StoredTable("Extract", table.name, tuple(column.remote_name for column in table.columns))
        for table in TABLES[:3]
    }
    keys = [
        ForeignKey(stored["SALES"], (column,), stored[name], (column,))
        for name, column in (("PRODUCTS", "PRODUCT"), ("STORES", "STORE"))
    ]
    model = read_object_model(document_of_hyper_file("star", list(stored.values()), keys))
    hyper_tables = [PhysicalTable("Extract", name, table.columns) for name, table in stored.items()]
    related = [replace(line, cardinality=None, every_first_row_matches=None) for line in RELATED[:2]]
    tables = match_tables(DECLARED[:3], model, hyper_tables, relationships=related)
    assert {name: table.physical for name, table in tables.items()} == {
        table.name.lower(): table for table in hyper_tables
    }
    assert tables["stores"].names == {"STORE": "STORE", "CITY": "CITY", "REGION": "REGION"}
