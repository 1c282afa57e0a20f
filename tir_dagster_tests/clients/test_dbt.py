"""dbt on the embedded warehouse: seed, view, table, incremental models, snapshots, tests, docs; two versions of its adapter."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from tir_dagster_tests.clients.conftest import client_environment, run_client

pytestmark = pytest.mark.client

PROJECT = Path(__file__).with_name("dbt_project")
# dbt-core 1.12 downloads a parser from elsewhere while it is installed; any dbt-core since 1.8 takes any adapter.
VERSIONS = {
    "1.10": ("dbt-core==1.10.23", "dbt-snowflake==1.10.8"),
    "1.12": ("dbt-core==1.11.16", "dbt-snowflake==1.12.3"),
}
CHANGED_SEED = """order_id,customer,amount,ordered_on,updated_at,paid
1,anna,11.50,2026-01-03,2026-03-01 08:00:00,true
2,ben,20.00,2026-01-04,2026-01-04 09:30:00,false
3,"o'hara",30.25,2026-02-05,2026-02-05 10:00:00,true
5,eve,50.00,2026-03-02,2026-03-02 12:00:00,true
"""
FIRST = [(1, "ANNA", "10.50"), (2, "BEN", "20.00"), (3, "O'HARA", "30.25"), (4, None, "40.00")]
# Order 4 is no longer in the seed; an incremental model does not see that.
CHANGED = [(1, "ANNA", "11.50"), *FIRST[1:], (5, "EVE", "50.00")]


@pytest.mark.parametrize("version", VERSIONS)
def test_dbt_builds_changes_and_tests_a_project(sandbox, tmp_path, version):
    programs = client_environment(f"dbt-{version}", *VERSIONS[version])
    project = shutil.copytree(PROJECT, tmp_path / "project")
    database = f"DBT_{version.replace('.', '_')}"
    env = {**sandbox.env, "DBT_DATABASE": database}

    def dbt(*arguments: str, code: int = 0) -> str:
        told = run_client(programs / "dbt", "--no-use-colors", *arguments, env=env, folder=project, code=code).stdout
        print(f"$ dbt {' '.join(arguments)}\n{told}")
        return told

    with sandbox.snowflake() as connection, connection.cursor() as cursor:

        def rows(query: str) -> list[tuple]:
            return [
                tuple(str(value) if isinstance(value, Decimal) else value for value in row)
                for row in cursor.execute(query).fetchall()
            ]

        cursor.execute(f"CREATE OR REPLACE DATABASE {database}")
        assert "INSERT 4" in dbt("seed")
        assert "PASS=5" in dbt("run")
        assert "PASS=2" in dbt("snapshot")
        assert "PASS=6" in dbt("test")
        for table in ("ORDERS_MERGED", "ORDERS_REPLACED"):
            assert rows(f"SELECT ORDER_ID, CUSTOMER, AMOUNT FROM SHOP.{table} ORDER BY 1") == FIRST, table

        (project / "seeds" / "raw_orders.csv").write_text(CHANGED_SEED, encoding="utf-8")
        dbt("seed")
        told = dbt("run", "--vars", "{wide: true}")
        # Of these, two come with the second run: an order was updated, and one is new.
        assert "SUCCESS 2" in told
        dbt("snapshot")
        for table in ("ORDERS_MERGED", "ORDERS_REPLACED"):
            assert rows(f"SELECT ORDER_ID, CUSTOMER, AMOUNT FROM SHOP.{table} ORDER BY 1") == CHANGED, table
        assert rows("SELECT ORDER_ID FROM SHOP.ORDERS_REPLACED WHERE CHANNEL = 'shop' ORDER BY 1") == [(1,), (5,)]
        assert rows("SELECT ORDER_ID FROM SHOP.ORDERS_APPENDED ORDER BY 1") == [(1,), (1,), (2,), (3,), (4,), (5,)]
        history = "SELECT ORDER_ID, AMOUNT, DBT_VALID_TO IS NULL FROM SHOP.{} ORDER BY 1, DBT_VALID_FROM"
        versions = [(1, "10.50", False), (1, "11.50", True), (2, "20.00", True), (3, "30.25", True)]
        assert rows(history.format("ORDERS_BY_TIME")) == [*versions, (4, "40.00", True), (5, "50.00", True)]
        assert rows(history.format("ORDERS_BY_VALUES")) == [*versions, (4, "40.00", False), (5, "50.00", True)]

        failed = dbt("test", code=1)
        assert "PASS=5" in failed
        assert "Got 1 result, configured to fail if != 0" in failed
        assert "PASS=14" in dbt("build", "--full-refresh")
        assert rows("SELECT ORDER_ID FROM SHOP.ORDERS_MERGED ORDER BY 1") == [(1,), (2,), (3,), (5,)]

    dbt("source", "freshness")
    dbt("docs", "generate")
    catalog = json.loads((project / "target" / "catalog.json").read_text(encoding="utf-8"))
    merged = catalog["nodes"]["model.shop.orders_merged"]
    assert merged["metadata"]["comment"] == "It's one row for each order."
    assert list(merged["columns"]) == ["ORDER_ID", "CUSTOMER", "AMOUNT", "ORDERED_ON", "UPDATED_AT", "STATUS"]
