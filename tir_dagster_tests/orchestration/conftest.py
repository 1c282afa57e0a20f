"""A sandbox with the sample, an extract declared on it, and commands that refresh it, all in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.datasource.access import TableauAccess
from tir_dagster.datasource.client import TableauClient
from tir_dagster.datasource.republish import fetch_shell, look_at_server
from tir_dagster.orchestration.commands import Command, Outcome
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.sandbox import sample
from tir_dagster.spec import ExtractSpec, parse_specs
from tir_dagster_tests.conftest import Sandbox, running_sandbox

SPEC = """\
extracts:
  - name: orders
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {column: ORDER_DATE, by: month, start: START}
    changes: {watermark: UPDATED_AT, look_back: 1 second}
    datasource:
      project: myproject
      name: mydatasource
      credentials: {username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}
    thresholds: {quiet_period: 1 second}
"""


@dataclass(frozen=True)
class Place:
    """One extract on its own sandbox, with its own history."""

    sandbox: Sandbox
    spec: ExtractSpec
    spec_text: str
    folder: Path

    def refresh(self, mode: Any = "changes", slices: tuple[str, ...] = (), **options: Any) -> Outcome:
        return self.run(lambda command: command.refresh(mode, slices, allow_empty=options.get("allow_empty", False)))

    def run(self, action: Callable[[Command], Any]) -> Any:
        with dagster_instance() as instance:
            return action(Command(self.spec, instance, lambda _: None))

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            return connection.cursor().execute(statement).fetchall()

    def source_rows(self) -> Counter:
        columns = "ORDER_ID, ORDER_DATE::VARCHAR, CUSTOMER, QUANTITY, UNIT_PRICE::VARCHAR, RUSH, NOTE"
        return Counter(tuple(row) for row in self.sql(f"SELECT {columns} FROM MYTABLE"))

    def published_rows(self) -> Counter:
        """The rows of the datasource as anybody would download them."""
        columns = (
            '"ORDER_ID", CAST("ORDER_DATE" AS TEXT), "CUSTOMER", "QUANTITY", CAST("UNIT_PRICE" AS TEXT), "RUSH", "NOTE"'
        )
        name, secret = self.sandbox.new_token()
        env = {**self.sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}
        with TableauClient(TableauAccess.from_environment(env)) as client:
            found = look_at_server(client, self.spec).found
            assert found is not None, "nothing is published"
            _, hyper = fetch_shell(client, found, self.folder / "seen")
        with (
            HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
            Connection(process.endpoint, str(hyper)) as connection,
        ):
            rows = connection.execute_list_query(f'SELECT {columns} FROM "Extract"."Extract"')
        return Counter(tuple(row) for row in rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The sample of 3,000 orders, and the extract declared on its datasource."""
    folder = tmp_path_factory.mktemp("place")
    with running_sandbox(folder / "home") as sandbox, pytest.MonkeyPatch.context() as patch:
        until = sample.parse_month(None)
        sample.seed_table(sandbox.env, rows=3_000, seed=1, until=until)
        sample.seed_datasource(sandbox.env, timeout=120)
        for name, value in sandbox.env.items():
            patch.setenv(name, value)
        patch.setenv("TIR_HOME", str(folder / "state"))
        patch.setenv("DAGSTER_HOME", str(folder / "dagster"))
        patch.delenv("TIR_SPECS", raising=False)
        first = min(row[0] for row in _months(sandbox))
        text = SPEC.replace("START", first)
        (spec,) = parse_specs(text, "test.yaml")
        yield Place(sandbox, spec, text, folder)


def _months(sandbox: Sandbox) -> list[tuple[Any, ...]]:
    with sandbox.snowflake() as connection:
        query = "SELECT DISTINCT TO_CHAR(ORDER_DATE::DATE, 'YYYY-MM') FROM MYDB.MYSCHEMA.MYTABLE WHERE ORDER_DATE IS NOT NULL"
        return connection.cursor().execute(query).fetchall()
