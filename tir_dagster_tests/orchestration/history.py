"""One random history: a table of few keys that changes, an extract that follows, and crashes in between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from pyspark.sql import SparkSession
from tableauhyperapi import Connection, CreateMode, HyperProcess, Telemetry

from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.refresh.context import Looked
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.versions import Version
from tir_dagster.sandbox.tableau.packages import Column as PackageColumn
from tir_dagster.sandbox.tableau.packages import SnowflakeConnection, build_tdsx
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.pace import quickly
from tir_dagster_tests.packages import plain
from tir_dagster_tests.stages import Refresher

DATABASE, PROJECT = "HISTORIES", "histories"
COLUMNS = "K, L, D, V, W"
COLUMN_TYPES = '"K" BIGINT, "L" TEXT, "D" DATE, "V" TEXT, "W" TIMESTAMP'
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Layout:
    """What kind of extract: the key's types and columns, and how it is sliced."""

    key_type: str = "NUMBER(38,0)"
    date_type: str = "DATE"
    row_key: tuple[str, ...] = ("K",)
    by: str = "month"
    watermark: bool = True
    mark_type: str = "TIMESTAMP_NTZ"
    delivery: str = "republish"
    # Whether the key's columns are declared NOT NULL.
    whole_key: bool = False
    limit_mb: float = 90.0
    value_type: str = "VARCHAR"


@dataclass
class History:
    """The table, its refresher, and the last confirmation; each step is one that a user or a crash could take."""

    sandbox: Sandbox
    spark: SparkSession
    folder: Path
    layout: Layout
    name: str = field(default_factory=lambda: f"h{next(_numbers)}")
    confirmed: Confirmation | None = None
    clock: int = 0

    def __post_init__(self) -> None:
        self.connection = self.sandbox.snowflake(database=DATABASE, schema="PUBLIC")
        kind, never = self.layout, " NOT NULL" if self.layout.whole_key else ""
        self.sql(
            f"CREATE TABLE {self.name} (K {kind.key_type}{never}, L VARCHAR, D {kind.date_type}, V {kind.value_type},"
            f" W {kind.mark_type})"
        )
        name, secret = self.sandbox.new_token()
        self.env = {**self.sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}
        self.refresher = self.new_refresher()

    def close(self) -> None:
        self.connection.close()

    def new_refresher(self) -> Refresher:
        layout = self.layout
        slices: Mapping[str, Any] = {}
        if layout.by != "none":
            slices = {"column": "D", "by": layout.by, "start": "2025-03" if layout.by == "month" else "2025-03-03"}
        spec = spec_from_mapping(
            {
                "name": self.name,
                "source": f"{DATABASE}.PUBLIC.{self.name}",
                **({"row_key": list(layout.row_key)} if layout.row_key else {}),
                **({"slices": slices} if slices else {}),
                "changes": {"watermark": "W", "look_back": "1 second"} if layout.watermark else {},
                "delivery": layout.delivery,
                "datasource": {"project": PROJECT, "name": self.name, "patch_limit_mb": layout.limit_mb},
                "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0},
            },
            "a history",
        )
        return Refresher(
            spec,
            snowflake=SnowflakeAccess.from_environment(self.env),
            tableau=TableauAccess.from_environment(self.env),
            spark=lambda: self.spark,
            home=self.folder,
            env=self.env,
        )

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.connection.cursor().execute(statement).fetchall()

    # What happens to the table

    def act(self, step: Sequence[Any]) -> None:
        """One statement; every stamp is a minute after the one before."""
        self.clock += 1
        stamp = f"DATEADD('minute', {self.clock}, '2025-01-01'::TIMESTAMP_NTZ)"
        stamp = stamp if self.layout.mark_type == "TIMESTAMP_NTZ" else str(self.clock)
        kind, *args = step
        statements = {
            "insert": "INSERT INTO {t} SELECT {0}, {1}, {2}, {3}, {stamp}",
            "insert unstamped": "INSERT INTO {t} SELECT {0}, {1}, {2}, {3}, NULL",
            "update": "UPDATE {t} SET V = {1}, W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "rekey": "UPDATE {t} SET K = {1}, W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "move": "UPDATE {t} SET D = {1}, W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "touch": "UPDATE {t} SET W = {stamp} WHERE K IS NOT DISTINCT FROM {0}",
            "delete": "DELETE FROM {t} WHERE K IS NOT DISTINCT FROM {0}",
            "delete where": "DELETE FROM {t} WHERE V IS NOT DISTINCT FROM {0}",
        }
        if kind == "reload":
            self.sql(f"CREATE OR REPLACE TABLE KEPT_{self.name} AS SELECT * FROM {self.name}")
            self.sql(f"TRUNCATE TABLE {self.name}")
            self.sql(f"INSERT INTO {self.name} SELECT * FROM KEPT_{self.name}")
            return
        self.sql(statements[kind].format(*args, t=self.name, stamp=stamp))

    # What happens to the extract

    def refresh(
        self, mode: Mode = "changes", *, until: str = "confirmed", listen: Callable[[float], None] = lambda _: None
    ) -> Plan:
        """One refresh, ended after a step as a crash would end it; gives its plan. `listen` hears of its sleeps."""
        with quickly(self.sandbox.tableau_url, listen):
            return self._refresh(mode, until)

    def _refresh(self, mode: Mode, until: str) -> Plan:
        refresher = self.refresher
        looked = refresher.look(self.confirmed)
        if looked.late is not None:
            self.confirmed = looked.late
            refresher.settle(looked.late)
        surveyed = refresher.survey(looked)
        plan = refresher.plan(looked, surveyed, mode)
        if plan.decision == "none":
            return plan
        resync = [*self._slices(), None] if mode == "slices" else []
        plan, change_set = refresher.detect(looked, surveyed, plan, ident=new_id(), resync=resync, allow_empty=True)
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

    def ready_to_publish(self) -> tuple[Looked, Version]:
        """A version that is verified and not published yet, and what the server held before."""
        looked = self.refresher.look(self.confirmed)
        surveyed = self.refresher.survey(looked)
        plan = self.refresher.plan(looked, surveyed, "changes")
        _, change_set = self.refresher.detect(looked, surveyed, plan, ident=new_id(), resync=[], allow_empty=False)
        assert change_set is not None
        return looked, self.refresher.apply(looked, change_set)

    def publish_foreign(self, columns: str = COLUMN_TYPES) -> None:
        """Somebody else puts a file of their own in the extract's place."""
        hyper = self.folder / f"{self.name}.hyper"
        with (
            HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
            Connection(process.endpoint, str(hyper), CreateMode.CREATE_AND_REPLACE) as connection,
        ):
            connection.execute_command('CREATE SCHEMA "Extract"')
            connection.execute_command(f'CREATE TABLE "Extract"."Extract" ({columns})')
        self.publish(hyper)

    def publish_database_extract(self, key_type: str = "NUMBER(38,0)") -> None:
        """A datasource as people build it, on the table itself."""
        connection = SnowflakeConnection(
            server=f"{self.env['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com",
            dbname=DATABASE,
            schema="PUBLIC",
            warehouse="WH",
            role="SYSADMIN",
            username=self.env["SNOWFLAKE_USER"],
        )
        columns = [PackageColumn("K", key_type), PackageColumn("V", "VARCHAR")]
        target = self.folder / f"{self.name}.tdsx"
        build_tdsx(target, caption=self.name, columns=columns, snowflake=connection, table=self.name.upper())
        self.publish(target)

    def publish(self, file: Path) -> None:
        """Somebody else publishes that file under the extract's name."""
        with self.sandbox.tableau() as server:
            (project,) = [project_item for project_item in TSC.Pager(server.projects) if project_item.name == PROJECT]
            server.datasources.publish(TSC.DatasourceItem(project.id, name=self.name), str(file), mode="Overwrite")

    def _slices(self) -> list[str]:
        if self.layout.by == "none":
            return ["all"]
        days = ["2025-03-03", "2025-03-31", "2025-04-07", "2025-05-12", "1999-12-27", "9999-12-27"]
        return sorted({day[:7] if self.layout.by == "month" else day for day in days})

    # What people see

    def source_rows(self) -> Counter:
        return Counter(tuple(map(plain, row)) for row in self.sql(f"SELECT {COLUMNS} FROM {self.name}"))

    def published_rows(self) -> Counter:
        listed = ", ".join(f'"{name}"' for name in COLUMNS.split(", "))
        rows = self._published(f'SELECT {listed} FROM "Extract"."Extract"')
        return Counter(tuple(map(plain, row)) for row in rows)

    def published_columns(self) -> list[str]:
        """The names of the published table's columns."""
        return [name for (name,) in self._published("SELECT attname FROM pg_catalog.pg_attribute WHERE attnum > 0")]

    def _published(self, query: str) -> list[Any]:
        with TableauClient(TableauAccess.from_environment(self.env)) as client:
            datasource = look_at_server(client, self.refresher.spec).datasource
            assert datasource is not None, "nothing is published"
            _, hyper = fetch_shell(client, datasource, self.folder / "seen")
        with (
            HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
            Connection(process.endpoint, str(hyper)) as connection,
        ):
            return connection.execute_list_query(query)
