"""Everything from a changed value on is purged, and the server loads it again: the parts of that delivery, put together."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.hyper.engine import connect
from tir_dagster.hyper.increment import Increment, find_increment, purge_from, set_increment_value
from tir_dagster.hyper.package.package import extract_hyper, read_package
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, server_version, settled
from tir_dagster.tableau.jobs import wait_for_job
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.refreshes import start_incremental_refresh, start_refresh
from tir_dagster.tableau.settings import ConnectionCredential
from tir_dagster.tableau.transfer import download
from tir_dagster_tests.conftest import Sandbox

KEYS: dict[str, tuple[str, list[Any], Any]] = {
    "date": ("DATE", ["'2024-01-30'", "'2024-01-31'", "'2024-02-01'"], date(2024, 1, 31)),
    "datetime": (
        "TIMESTAMP_NTZ",
        ["'2024-01-31 10:00:00.25'", "'2024-01-31 10:00:00.5'", "'2024-01-31 10:00:01'"],
        datetime.fromisoformat("2024-01-31 10:00:00.500000"),
    ),
    "integer": ("NUMBER(38,0)", [-1, 0, 1], 0),
}


@dataclass(frozen=True)
class Shop:
    """A table and the datasource over it."""

    client: TableauClient
    cursor: Any
    table: str
    folder: Path
    found: FoundDatasource
    project: FoundProject
    credential: ConnectionCredential

    def sql(self, statement: str) -> list[Any]:
        return self.cursor.execute(statement.replace("{t}", self.table)).fetchall()

    def source(self) -> list[Any]:
        return sorted((row for row in self.sql("SELECT ID, AMOUNT FROM {t}")), key=lambda row: row[0])

    def fetched(self) -> tuple[Any, Path]:
        package = read_package(download(self.client, self.found, self.folder / "now.tdsx"))
        return package, extract_hyper(package, self.folder / "now.hyper")

    def shown(self) -> list[Any]:
        with connect(self.fetched()[1]) as connection:
            rows = connection.execute_list_query('SELECT "ID", "AMOUNT" FROM "Extract"."Extract" ORDER BY 1')
        return [tuple(row) for row in rows]

    def run(self, started: Any) -> None:
        wait_for_job(self.client, started.job_id, what="refresh of Shop")

    def deliver(self, smallest: Any) -> Increment:
        package, hyper = self.fetched()
        increment = find_increment(package, hyper)
        assert isinstance(increment, Increment)
        done = purge_from(hyper, self.folder / "purged.hyper", column=increment.column, smallest=smallest)
        assert done.largest is not None
        target = set_increment_value(package, "Shop.tdsx", hyper=self.folder / "purged.hyper", value=done.largest)
        publish(
            self.client,
            target,
            project=self.project,
            name="Shop",
            overwrite=True,
            expected=server_version(self.found),
            connections=[self.credential],
            servers=[self.credential.server_address],
        )
        self.run(start_incremental_refresh(self.client, self.found))
        return increment


@pytest.fixture(params=list(KEYS))
def shop(
    request: pytest.FixtureRequest,
    sandbox: Sandbox,
    client: TableauClient,
    project: FoundProject,
    source_table: SnowflakeConnection,
    credential: ConnectionCredential,
    hyper: Any,
    tmp_path: Path,
) -> Any:
    kind, values, _ = KEYS[request.param]
    name = f"SHOP{uuid.uuid4().hex[:8].upper()}"
    table = f"{source_table.dbname}.{source_table.schema}.{name}"
    columns = [
        Column("ID", "NUMBER(38,0)"),
        Column("AMOUNT", "NUMBER(38,0)"),
        Column("ORDERED", kind, local_name="Ordered at", extract_name="ordered"),
    ]
    package = build_tdsx(
        tmp_path / "Shop.tdsx",
        caption="Shop",
        columns=columns,
        snowflake=source_table,
        table=name,
        increment_key="ORDERED",
        hyper=hyper,
    )
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {table} (ID NUMBER(38,0), AMOUNT NUMBER(38,0), ORDERED {kind})")
        rows = ", ".join(f"({number}, 10, {value})" for number, value in enumerate([*values, "NULL"]))
        cursor.execute(f"INSERT INTO {table} VALUES {rows}")
        options: dict[str, Any] = {"connections": [credential], "servers": [credential.server_address]}
        found = publish(client, package, project=project, name="Shop", **options)
        shop = Shop(client, cursor, table, tmp_path, found, project, credential)
        shop.run(start_refresh(client, found, incremental=False))
        yield replace(shop, found=settled(client, found))


def test_what_was_purged_comes_back_as_the_source_has_it_now(shop: Shop, request: pytest.FixtureRequest) -> None:
    _, values, smallest = KEYS[request.node.callspec.params["shop"]]
    shop.sql("UPDATE {t} SET AMOUNT = 11 WHERE ID = 1")
    shop.sql("DELETE FROM {t} WHERE ID = 2")
    shop.sql(f"INSERT INTO {{t}} VALUES (9, 19, {values[2]})")
    assert shop.shown() == [(0, 10), (1, 10), (2, 10), (3, 10)]
    increment = shop.deliver(smallest)
    assert (increment.column, increment.source) == ("ordered", "ORDERED")
    assert shop.shown() == shop.source() == [(0, 10), (1, 11), (3, 10), (9, 19)]


@pytest.mark.parametrize("shop", ["integer"], indirect=True)
def test_a_change_of_a_row_without_a_value_is_missed_and_needs_a_full_refresh(shop: Shop) -> None:
    shop.sql("UPDATE {t} SET AMOUNT = 11 WHERE ID = 3")
    shop.deliver(0)
    assert shop.shown()[-1] == (3, 10), "the server never reads rows without a value again"
