"""A star: sales, the customers and the entitlements that they refer to, and an extract of the three that follows them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.pace import quickly
from tir_dagster_tests.packages import plain
from tir_dagster_tests.stages import Refresher

DATABASE, PROJECT = "STARS", "stars"
TABLES: Mapping[str, tuple[str, ...]] = {
    "SALES": ("K", "CUSTOMER", "REGION", "D", "V"),
    "CUSTOMERS": ("ID", "NAME"),
    "ENTITLEMENTS": ("REGION", "USERS"),
}
_numbers = itertools.count(1)


@dataclass
class Star:
    """Three tables, their refresher, and the last confirmation; each step is one that a user or a crash could take."""

    sandbox: Sandbox
    spark: SparkSession
    folder: Path
    delivery: str = "republish"
    # Of SALES; None compares every row.
    watermark: bool = True
    key: tuple[str, ...] = ("K",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    schema: str = field(default_factory=lambda: f"S{next(_numbers)}")
    confirmed: Confirmation | None = None
    clock: int = 0

    def __post_init__(self) -> None:
        self.connection = self.sandbox.snowflake(database=DATABASE, schema="PUBLIC")
        self.sql(f"CREATE SCHEMA {self.schema}")
        self.sql(f"USE SCHEMA {self.schema}")
        self.sql(
            "CREATE TABLE SALES (K NUMBER(38,0), CUSTOMER NUMBER(38,0), REGION VARCHAR, D DATE, V VARCHAR, W TIMESTAMP_NTZ)"
        )
        self.sql("CREATE TABLE CUSTOMERS (ID NUMBER(38,0), NAME VARCHAR)")
        self.sql("CREATE TABLE ENTITLEMENTS (REGION VARCHAR, USERS VARCHAR)")
        name, secret = self.sandbox.new_token()
        self.env = {**self.sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}
        self.refresher = self.new_refresher()

    def close(self) -> None:
        self.connection.close()

    @property
    def name(self) -> str:
        return f"star_{self.schema.lower()}"

    def mapping(self) -> dict[str, Any]:
        place = f"{DATABASE}.{self.schema}"
        changes = {"watermark": "W", "look_back": "1 second"} if self.watermark else {}
        slices = {"by": "month", "column": "D", "start": "2025-03"}
        return {
            "name": self.name,
            "datasource": {"project": PROJECT, "name": self.name},
            "delivery": self.delivery,
            "tables": [
                {
                    "name": "CUSTOMERS",
                    "source": f"{place}.CUSTOMERS",
                    "row_key": "ID",
                },
                {
                    "name": "SALES",
                    "main": True,
                    "query": f"SELECT K, CUSTOMER, REGION, D, V FROM {place}.SALES",
                    "row_key": list(self.key),
                    "slices": slices,
                    "changes": changes,
                },
                {"name": "ENTITLEMENTS", "source": f"{place}.ENTITLEMENTS", "row_key": "REGION"},
            ],
            "relationships": [
                {"table": "SALES", "refers_to": "CUSTOMERS", "columns": {"CUSTOMER": "ID"}},
                {"table": "SALES", "refers_to": "ENTITLEMENTS", "columns": ["REGION"]},
            ],
            "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0},
            **self.settings,
        }

    @property
    def spec(self) -> ExtractSpec:
        return spec_from_mapping(self.mapping(), "a star")

    def new_refresher(self) -> Refresher:
        return Refresher(
            self.spec,
            snowflake=SnowflakeAccess.from_environment(self.env),
            tableau=TableauAccess.from_environment(self.env),
            spark=lambda: self.spark,
            home=self.folder,
            env=self.env,
        )

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.connection.cursor().execute(statement).fetchall()

    # What happens to the tables

    def act(self, step: Sequence[Any]) -> None:
        """One statement; every stamp is a minute after the one before."""
        self.clock += 1
        stamp = f"DATEADD('minute', {self.clock}, '2025-01-01'::TIMESTAMP_NTZ)"
        kind, *args = step
        statements = {
            "sell": "INSERT INTO SALES SELECT {0}, {1}, {2}, {3}, {4}, {stamp}",
            "sale": "UPDATE SALES SET V = {1}, W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "move": "UPDATE SALES SET D = {1}, CUSTOMER = {2}, W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "cancel": "DELETE FROM SALES WHERE K IS NOT DISTINCT FROM {0}",
            "customer": (
                "MERGE INTO CUSTOMERS c USING (SELECT {0} AS ID, {1} AS NAME) n ON c.ID = n.ID"
                " WHEN MATCHED THEN UPDATE SET NAME = n.NAME WHEN NOT MATCHED THEN INSERT (ID, NAME) VALUES (n.ID, n.NAME)"
            ),
            "forget": "DELETE FROM CUSTOMERS WHERE ID = {0}",
            "entitle": (
                "MERGE INTO ENTITLEMENTS e USING (SELECT {0} AS REGION, {1} AS USERS) n ON e.REGION = n.REGION"
                " WHEN MATCHED THEN UPDATE SET USERS = n.USERS"
                " WHEN NOT MATCHED THEN INSERT (REGION, USERS) VALUES (n.REGION, n.USERS)"
            ),
            "revoke": "DELETE FROM ENTITLEMENTS WHERE REGION = {0}",
        }
        self.sql(statements[kind].format(*args, stamp=stamp))

    # What happens to the extract

    def refresh(self, mode: Mode = "changes", *, until: str = "confirmed", **asked: Any) -> Plan:
        """One refresh, ended after a step as a crash would end it; gives its plan."""
        with quickly(self.sandbox.tableau_url, lambda _: None):
            return self._refresh(mode, until, **asked)

    def _refresh(self, mode: Mode, until: str, **asked: Any) -> Plan:
        refresher = self.refresher
        looked = refresher.look(self.confirmed)
        if looked.late is not None:
            self.confirmed = looked.late
            refresher.settle(looked.late)
        surveyed = refresher.survey(looked)
        plan = refresher.plan(looked, surveyed, mode, **asked)
        if plan.decision == "none":
            return plan
        allowed = {"allow_empty": True, **asked}
        plan, change_set = refresher.detect(looked, surveyed, plan, ident=new_id(), **allowed)
        if change_set is None or until == "staged":
            return plan
        version = refresher.apply(looked, change_set)
        if until == "verified":
            return plan
        confirmation = refresher.publish(looked, version).confirmation
        if until == "published":
            return plan
        self.confirmed = confirmation
        refresher.settle(confirmation)
        return plan

    @property
    def version(self) -> Version:
        """The version that is published."""
        assert self.confirmed is not None, "nothing is published"
        version: Version = self.refresher.versions.get(self.confirmed.version)
        return version

    # What people see

    def source_rows(self) -> dict[str, Counter[tuple[Any, ...]]]:
        return {
            table: Counter(tuple(map(plain, row)) for row in self.sql(f"SELECT {', '.join(columns)} FROM {table}"))
            for table, columns in TABLES.items()
        }

    def published_rows(self, schema: str = "Extract") -> dict[str, Counter[tuple[Any, ...]]]:
        queries = {
            table: f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(schema)}.{_quoted(table)}"
            for table, columns in TABLES.items()
        }
        return {
            table: Counter(tuple(map(plain, row)) for row in rows) for table, rows in self.published(queries).items()
        }

    def published(self, queries: Mapping[str, str]) -> dict[str, list[Any]]:
        """Return the rows of queries on the Hyper file that anybody would download."""
        with TableauClient(TableauAccess.from_environment(self.env)) as client:
            datasource = look_at_server(client, self.refresher.spec).datasource
            assert datasource is not None, "nothing is published"
            _, hyper = fetch_shell(client, datasource, self.folder / "seen", several=True)
        with (
            HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
            Connection(process.endpoint, str(hyper)) as connection,
        ):
            return {name: connection.execute_list_query(query) for name, query in queries.items()}


def _quoted(name: str) -> str:
    return f'"{name}"'
