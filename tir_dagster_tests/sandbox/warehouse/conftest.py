"""Sessions on the run's one embedded warehouse, each test in a schema of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

_schemas = itertools.count(1)


class Client:
    """A connection through the real connector, with the few calls that tests make all the time."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __call__(self, sql: str, params: Any = None) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            return cursor.execute(sql, params).fetchall()

    def value(self, sql: str) -> Any:
        return self(sql)[0][0]

    def now(self) -> str:
        """The warehouse's own clock, as the literal that AT and END take."""
        return f"'{self.value('SELECT CURRENT_TIMESTAMP()').isoformat()}'::TIMESTAMP_TZ"


@pytest.fixture(scope="module")
def connect(sandbox) -> Iterator[Callable[..., Client]]:
    """Opens sessions in this module's schema TESTS.M<n>."""
    schema = f"M{next(_schemas)}"
    opened: list[Client] = []

    def open_session(**overrides: Any) -> Client:
        client = Client(sandbox.snowflake(**{"database": "TESTS", "schema": schema, **overrides}))
        opened.append(client)
        return client

    first = Client(sandbox.snowflake())
    first("CREATE DATABASE IF NOT EXISTS TESTS")
    first(f"CREATE SCHEMA IF NOT EXISTS TESTS.{schema}")
    opened.append(first)
    yield open_session
    for client in opened:
        client.connection.close()


@pytest.fixture(scope="module")
def sql(connect) -> Client:
    return connect()


@pytest.fixture(scope="module")
def url(sandbox):
    return f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}"


@pytest.fixture
def soon_idle(url):
    """Transactions that block others are given up after a fifth of a second."""
    settings = f"{url}/sandbox/settings"
    before = requests.get(settings, timeout=20).json()
    requests.put(settings, json={"idle_transaction_seconds": 0.2}, timeout=20).raise_for_status()
    yield
    requests.put(settings, json=before, timeout=20).raise_for_status()
