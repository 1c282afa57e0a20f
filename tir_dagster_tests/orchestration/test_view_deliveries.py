"""A datasource that people built on custom SQL, kept equal to the same query in the spec: by `republish` and by `server`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.changes.plan import Reason
from tir_dagster.errors import DatasourceError
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster_tests.orchestration.shop import DETAIL, TABLES, sell, stock
from tir_dagster_tests.orchestration.shown import DATABASE, PROJECT, Shown, prepare

COLUMNS = {
    "ID": "NUMBER(38,0)",
    "DAY": "DATE",
    "PRODUCT": "VARCHAR",
    "QUANTITY": "NUMBER(38,0)",
    "COLOR": "VARCHAR",
}
_numbers = itertools.count(1)
CREDENTIALS = {"username_env": "SNOWFLAKE_USER", "password_env": "SNOWFLAKE_PASSWORD"}


def built_by_people(shop: Shown, query: str, folder: Path) -> None:
    """Published from Tableau Desktop on custom SQL, with incremental refresh by DAY, and loaded once."""
    connection = SnowflakeConnection(
        server=f"{shop.env['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com",
        dbname=DATABASE,
        schema=shop.name.upper(),
        warehouse="WH",
        role="SYSADMIN",
        username=shop.env["SNOWFLAKE_USER"],
    )
    package = build_tdsx(
        folder / f"{shop.name}.tdsx",
        caption=shop.name,
        columns=[Column(*column) for column in COLUMNS.items()],
        snowflake=connection,
        custom_sql=shop.in_schema(query),
        increment_key="DAY",
    )
    with shop.sandbox.tableau() as server:
        (project,) = server.projects.filter(name=PROJECT)
        datasource = server.datasources.publish(
            TSC.DatasourceItem(project.id, name=shop.name),
            str(package),
            mode=TSC.Server.PublishMode.CreateNew,
            connection_credentials=TSC.ConnectionCredentials(
                shop.env["SNOWFLAKE_USER"], shop.env["SNOWFLAKE_PASSWORD"], embed=True
            ),
        )
        server.jobs.wait_for_job(server.datasources.refresh(datasource), timeout=60)


@pytest.fixture(params=["republish", pytest.param("server", marks=pytest.mark.long)])
def shop(request, sandbox, spark, tmp_path) -> Iterator[Shown]:
    name = f"built{next(_numbers)}"
    settings = {
        "row_key": "ID",
        "delivery": request.param,
        "datasource": {"project": PROJECT, "name": name, "credentials": CREDENTIALS},
    }
    extract = Shown(prepare(sandbox), spark, tmp_path, TABLES, DETAIL, settings, name=name)
    for number in range(1, 9):
        sell(extract, number, f"P{number % 3}", number, day=f"2024-01-{number:02}")
    for number in range(2):
        stock(extract, f"P{number}", "blue", 1.0)
    yield extract
    extract.close()


def test_it_stays_equal_to_its_query(shop, tmp_path):
    # Written another way: blanks, comments and the case of unquoted names do not count.
    built_by_people(shop, "/* as in the spec */" + DETAIL.replace("SELECT", "select").replace("\n", "  "), tmp_path)
    assert shop.refresh().reason is Reason.FIRST_LOAD
    assert shop.published() == shop.expected()
    shop.sql("UPDATE {s}.SALES SET QUANTITY = 99 WHERE ID = 7")
    shop.sql("DELETE FROM {s}.SALES WHERE ID = 8")
    sell(shop, 10, "P2", 1, day="2024-01-10")
    stock(shop, "P2", "green", 2.0)
    assert shop.refresh().decision == "incremental"
    assert shop.published() == shop.expected()
    assert shop.refresh().decision == "none"


def test_another_query_is_refused_and_nothing_is_touched(shop, tmp_path):
    built_by_people(shop, DETAIL.replace("LEFT JOIN", "JOIN"), tmp_path)
    before = shop.published()
    with pytest.raises(DatasourceError, match="its custom SQL is not the query in the spec"):
        shop.refresh()
    assert shop.published() == before
