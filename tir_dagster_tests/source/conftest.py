"""What the tests of the source share: one Spark session, one access, tables of their own, faults on demand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import requests
from pyspark.sql import SparkSession

from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.spark.session import spark_session
from tir_dagster_tests.conftest import Sandbox

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = spark_session("tir tests", home=tmp_path_factory.mktemp("spark-home"), conf={"spark.master": "local[2]"})
    yield session
    session.stop()


@pytest.fixture(scope="session")
def access(sandbox: Sandbox) -> SnowflakeAccess:
    return SnowflakeAccess.from_environment(sandbox.env)


@pytest.fixture(scope="session")
def run(sandbox: Sandbox) -> Iterator[Callable[[str], list[tuple]]]:
    """Runs one statement in the database the tests of the source share."""
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS SRC")
        cursor.execute("USE SCHEMA SRC.PUBLIC")
        yield lambda sql: cursor.execute(sql).fetchall()


@pytest.fixture
def make_table(run) -> Callable[[str], TableName]:
    """Makes a table with these columns, under a name of its own."""

    def make(columns: str, *inserts: str) -> TableName:
        table = TableName("SRC", "PUBLIC", f"T{next(_numbers)}")
        run(f"CREATE TABLE {table.sql} ({columns})")
        for rows in inserts:
            run(f"INSERT INTO {table.sql} {rows}")
        return table

    return make


@dataclass(frozen=True)
class Warehouse:
    """The warehouse's own view of what it was asked, and its faults."""

    url: str

    def break_next(self, **fault) -> None:
        assert requests.post(f"{self.url}/sandbox/faults", json=fault, timeout=30).ok

    def pending_faults(self) -> list[dict]:
        return requests.get(f"{self.url}/sandbox/faults", timeout=30).json()["faults"]

    def queries(self) -> list[dict]:
        return requests.get(f"{self.url}/sandbox/queries", timeout=30).json()["queries"]


@pytest.fixture
def warehouse(sandbox: Sandbox) -> Iterator[Warehouse]:
    address = Warehouse(f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}")
    yield address
    requests.delete(f"{address.url}/sandbox/faults", timeout=30)
