"""Packages of several logical tables: published, overwritten, refreshed in full and by increments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Looker, Publisher, Source
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
