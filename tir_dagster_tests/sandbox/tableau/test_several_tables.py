"""Packages of several logical tables: what is published and refused, full refreshes, increments."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import Connection
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Admin, Looker, Publisher, Source, rewritten
from tir_dagster_tests.star_package import EXTRACT_NAMES, ROWS, TABLES, create_star, star_package

SUCCESS, FAILED = TSC.JobItem.FinishCode.Success, TSC.JobItem.FinishCode.Failed


@pytest.fixture
def schema(source: Source) -> str:
    """The schema of the warehouse that has the star's tables."""
    schema = f"{source.database}.{source.schema}"
    create_star(source.sql, schema)
    return schema


def package(source: Source, **more: Any) -> Path:
    return star_package(source.folder / "star.tdsx", source.connection, hyper=source.hyper, **more)


def published(publisher: Publisher, file: Path, mode: str = OVERWRITE) -> Any:
    return publisher.publish(file, "Star", mode, connection_credentials=publisher.credentials)


def refreshed(publisher: Publisher, datasource: Any, *, incremental: bool = False) -> Path:
    """The package after a refresh that succeeded."""
    job = publisher.refresh(datasource, incremental=incremental)
    assert job.finish_code == SUCCESS, job.notes
    return publisher.download(datasource)


def keys(look: Looker, package: Path) -> dict[str, list[Any]]:
    """The first column of every table."""
    return {table.name: [row[0] for row in contents(look, package, table.name)] for table in TABLES}


def contents(look: Looker, package: Path, table: str) -> list[list[Any]]:
    return look.rows(package, f'SELECT * FROM "Extract"."{EXTRACT_NAMES[table]}" ORDER BY 1, 2')


FIRST_COLUMNS = {table: [row[0] for row in rows] for table, rows in ROWS.items()}


def test_a_package_of_several_tables_comes_back_as_it_was_sent(
    publisher: Publisher, source: Source, look: Looker
) -> None:
    for rows in (ROWS, {**ROWS, "PRODUCTS": ()}):
        sent = package(source, rows=rows)
        downloaded = publisher.download(published(publisher, sent))
        assert downloaded.read_bytes() == sent.read_bytes()
        assert keys(look, downloaded) == {name: [row[0] for row in rows[name]] for name in ROWS}


def test_a_full_refresh_reads_every_table_by_its_own_query(
    publisher: Publisher, source: Source, look: Looker, schema: str
) -> None:
    datasource = published(publisher, package(source))
    after = refreshed(publisher, datasource)
    assert keys(look, after) == FIRST_COLUMNS
    assert contents(look, after, "PRODUCTS")[0][:3] == [10, "Desk", "red"]
    assert look.events(after) == [("create", "%null%", "11")]
    source.sql(f"DELETE FROM {schema}.PRODUCTS WHERE PRODUCT = 11")
    source.sql(f"INSERT INTO {schema}.ENTITLEMENTS VALUES ('cid', 'north')")
    # Sales of a product that is gone stay: tables are not joined.
    assert keys(look, refreshed(publisher, datasource)) == {
        **FIRST_COLUMNS,
        "PRODUCTS": [10],
        "ENTITLEMENTS": ["ann", "ann", "bob", "cid"],
    }


def test_a_full_refresh_changes_the_extract_and_nothing_else(
    publisher: Publisher, source: Source, look: Looker, schema: str
) -> None:
    before = package(source, increment=("SALES", "DAY"))
    after = refreshed(publisher, published(publisher, before))
    old, new = look.document(before), look.document(after)
    assert look.events(after) == [("create", "#2026-05-01#", "11")]
    for document in (old, new):
        connection = document.find("extract/connection")
        connection.attrib.pop("update-time")
        refresh = connection.find("refresh")
        refresh.clear()
    assert ET.tostring(new, encoding="unicode") == ET.tostring(old, encoding="unicode")


def test_a_new_column_gets_a_name_of_its_own_in_every_table(
    publisher: Publisher, source: Source, look: Looker, schema: str
) -> None:
    for table in ("PRODUCTS", "STORES"):
        source.sql(f"ALTER TABLE {schema}.{table} ADD COLUMN NOTE VARCHAR")
    source.sql(f"ALTER TABLE {schema}.STORES ADD COLUMN DAY DATE")
    source.sql(f"ALTER TABLE {schema}.STORES DROP COLUMN CITY")
    datasource = published(publisher, package(source))
    after = refreshed(publisher, datasource)
    connection = look.document(after).find("extract/connection")
    columns = {entry.get("key"): entry.get("value") for entry in connection.iter("map")}
    assert list(columns) == sorted(columns)
    assert columns["[NOTE]"] == f"[{EXTRACT_NAMES['PRODUCTS']}].[NOTE]"
    assert columns["[NOTE (STORES)]"] == f"[{EXTRACT_NAMES['STORES']}].[NOTE]"
    assert columns["[DAY (STORES)]"] == f"[{EXTRACT_NAMES['STORES']}].[DAY]"
    assert "[CITY]" not in columns
    # The document describes these columns, so that the package can be published again.
    published(publisher, after)
    assert keys(look, refreshed(publisher, datasource)) == FIRST_COLUMNS


@pytest.mark.parametrize(("others", "products"), [("read", [10, 12]), ("keep", [10, 11])])
def test_an_increment_adds_rows_to_one_table_and_others_are_read_anew_or_kept(
    publisher: Publisher, source: Source, look: Looker, schema: str, admin: Admin, others: str, products: list[int]
) -> None:
    admin.set(increment_others=others)
    datasource = published(publisher, package(source, increment=("SALES", "SALE_ID")))
    refreshed(publisher, datasource)
    source.sql(f"DELETE FROM {schema}.SALES WHERE SALE_ID < 3")
    source.sql(f"INSERT INTO {schema}.SALES (SALE_ID, PRODUCT) VALUES (7, 12)")
    source.sql(f"UPDATE {schema}.PRODUCTS SET PRODUCT = 12 WHERE PRODUCT = 11")
    after = refreshed(publisher, datasource, incremental=True)
    assert keys(look, after) == {**FIRST_COLUMNS, "SALES": [1, 2, 3, 4, 7], "PRODUCTS": products}
    assert look.events(after) == [("create", "4", "11"), ("increment", "7", "1")]
    published(publisher, after)


def test_an_increment_goes_on_from_a_package_that_was_refreshed_elsewhere(
    publisher: Publisher, source: Source, look: Looker, schema: str
) -> None:
    """The table that grows is the one that the extract names, although another has a column of that name, too."""
    datasource = published(publisher, package(source, rows=ROWS, increment=("PRODUCTS", "UPDATED_AT")))
    source.sql(f"INSERT INTO {schema}.PRODUCTS VALUES (12, 'Lamp', 'red', '2026-06-01 08:00:00')")
    source.sql(f"INSERT INTO {schema}.PRODUCTS VALUES (13, 'Old lamp', 'red', '2026-04-01 08:00:00')")
    after = refreshed(publisher, datasource, incremental=True)
    assert keys(look, after) == {**FIRST_COLUMNS, "PRODUCTS": [10, 11, 12]}
    assert look.events(after)[1:] == [("increment", "#2026-06-01 08:00:00#", "1")]


def test_an_increment_fails_after_a_change_of_columns_of_the_table_that_grows(
    publisher: Publisher, source: Source, schema: str
) -> None:
    datasource = published(publisher, package(source, rows=ROWS, increment=("SALES", "DAY")))
    source.sql(f"ALTER TABLE {schema}.STORES ADD COLUMN NOTE VARCHAR")
    refreshed(publisher, datasource, incremental=True)
    source.sql(f"ALTER TABLE {schema}.SALES ADD COLUMN NOTE VARCHAR")
    job = publisher.refresh(datasource, incremental=True)
    assert (job.finish_code, "columns of the source have changed" in job.notes[0]) == (FAILED, True)


def test_a_table_that_cannot_be_read_leaves_all_tables_as_they_were(
    publisher: Publisher, source: Source, look: Looker, schema: str
) -> None:
    datasource = published(publisher, package(source, rows=ROWS))
    source.sql(f"DELETE FROM {schema}.SALES")
    source.sql(f"DROP TABLE {schema}.ENTITLEMENTS")
    job = publisher.refresh(datasource)
    assert (job.finish_code, "ENTITLEMENTS" in job.notes[0]) == (FAILED, True)
    assert keys(look, publisher.download(datasource)) == FIRST_COLUMNS


PRODUCT_LINE = (
    '<expression op="[PRODUCT]"/>\\s*<expression op="[PRODUCT (PRODUCTS)]"/>'.replace("[", r"\[")
    .replace("(", r"\(")
    .replace(")", r"\)")
)
SALES_ID, PRODUCTS_ID = EXTRACT_NAMES["SALES"], EXTRACT_NAMES["PRODUCTS"]
EDITS: dict[str, tuple[str, str, str]] = {
    "no relationship": (
        r"(?s)<relationship>.*?</relationship>",
        "",
        "no way leads between ['ENTITLEMENTS', 'PRODUCTS'",
    ),
    "a circle": (
        r"(?s)(<relationship>.*?</relationship>)(.*)(</relationships>)",
        r"\1\2\1\3",
        "between SALES and PRODUCTS closes a circle",
    ),
    "an end that is no table": (
        rf'first-end-point object-id="{SALES_ID}"',
        'first-end-point object-id="GONE"',
        "leads to 'GONE', which is no logical table",
    ),
    "a column that is not there": (
        PRODUCT_LINE,
        '<expression op="[X]"/><expression op="[PRODUCT]"/>',
        "the column [X]",
    ),
    "columns of one table": (
        PRODUCT_LINE,
        '<expression op="[PRODUCT]"/><expression op="[STORE]"/>',
        "does not compare a column of each",
    ),
    "a column of a third table": (
        PRODUCT_LINE,
        '<expression op="[PRODUCT]"/><expression op="[CITY]"/>',
        "does not compare a column of each",
    ),
    "nothing compared": (PRODUCT_LINE, "", "compares no two columns"),
    "an id twice": (
        rf'caption="PRODUCTS" id="{PRODUCTS_ID}"',
        f'caption="PRODUCTS" id="{SALES_ID}"',
        "2 logical tables of the .tds have the id 'SALES_",
    ),
    "a table that is not extracted": (
        rf'(?s)<properties context="extract">\s*<relation name="{PRODUCTS_ID}".*?</properties>',
        "",
        "columns of extract tables it does not name: ['PRODUCTS_",
    ),
    "no collection": (
        r'(?s)(<extract .*?)<_\.fcp\.[^>]*true\.\.\.relation type="collection">.*?</_[^>]*relation>',
        r"\1",
        "is not that of the logical tables",
    ),
    "a column of another object": (
        rf"(?s)(<extract .*?object-id>)\[{PRODUCTS_ID}\]",
        rf"\1[{SALES_ID}]",
        "do not say that they belong to",
    ),
    "two columns of one name": (
        r"(?s)(<extract .*<local-name>)\[PRODUCT \(PRODUCTS\)\]",
        r"\1[PRODUCT]",
        "2 columns of the .tds have the name [PRODUCT]",
    ),
    "another list of columns": (
        rf'value="\[{PRODUCTS_ID}\]\.\[NAME\]"',
        f'value="[{SALES_ID}].[NAME]"',
        "(cols) beside the extract's columns is not theirs",
    ),
    "a table that does not have the increment key": (
        rf'ExtractV2\.true\.\.\.object-id="{SALES_ID}"',
        f'ExtractV2.true...object-id="{PRODUCTS_ID}"',
        "[DAY] is no column of the logical table",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_document_whose_tables_do_not_hold_together_is_refused(
    publisher: Publisher, source: Source, name: str
) -> None:
    pattern, replacement, why = EDITS[name]
    sent = package(source, increment=("SALES", "DAY"))

    def edit(text: str) -> str:
        edited, number = re.subn(pattern, replacement, text, count=1)
        assert number == 1, "the edit did not take place"
        return edited

    with pytest.raises(ServerResponseError, match="400011") as error:
        published(publisher, rewritten(sent, sent.with_name("edited.tdsx"), edit=edit))
    assert why in error.value.detail


def test_an_extract_holds_no_tables_beside_those_of_the_document(
    publisher: Publisher, source: Source, look: Looker
) -> None:
    sent = package(source)
    extract = sent.with_suffix(".hyper")
    with zipfile.ZipFile(sent) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".hyper"))
        extract.write_bytes(archive.read(member))
    with Connection(look.hyper, extract) as connection:
        connection.execute_command('CREATE TABLE "Extract"."other" (x INT)')
    edited = rewritten(sent, sent.with_name("more.tdsx"), drop=".hyper", add=[(member, extract.read_bytes())])
    with pytest.raises(ServerResponseError, match=r"(?s)400011.*does not name: \['\[Extract\]\.\[other\]'\]"):
        published(publisher, edited)
