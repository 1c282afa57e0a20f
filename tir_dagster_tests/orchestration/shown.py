"""An extract that shows a query: a few tables, a datasource of ours, and its refresher, driven without Dagster."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.changes.change_set import ChangeSet
from tir_dagster.changes.hints import parse_hints
from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.refresh.datasource import fetch_shell, look_at_server
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.pace import quickly
from tir_dagster_tests.packages import plain
from tir_dagster_tests.stages import Refresher

DATABASE, PROJECT = "SHOWN", "shown"
_numbers = itertools.count(1)


def prepare(sandbox: Sandbox) -> Sandbox:
    """Make the database and the project, once."""
    sandbox.prepare(DATABASE, PROJECT)
    return sandbox


@dataclass
class Shown:
    """Tables in a schema of their own, and an extract of a query over them; `{s}` in SQL stands for the schema."""

    sandbox: Sandbox
    spark: SparkSession
    folder: Path
    tables: Mapping[str, str]
    query: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default_factory=lambda: f"v{next(_numbers)}")
    confirmed: Confirmation | None = None
    change_set: ChangeSet | None = None
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = self.sandbox.snowflake(database=DATABASE)
        self.sql(f"CREATE SCHEMA {DATABASE}.{self.name.upper()}")
        for table, columns in self.tables.items():
            self.sql(f"CREATE TABLE {{s}}.{table} ({columns})")
        name, secret = self.sandbox.new_token()
        self.env = {**self.sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}
        self.refresher = self.new_refresher()

    def new_refresher(self) -> Refresher:
        declared = {
            "name": self.name,
            "query": self.in_schema(self.query),
            "datasource": {"project": PROJECT, "name": self.name},
            "thresholds": {"quiet_period": "0 seconds", "full_share": 1.0, "delete_share": 1.0},
            **self._settings(self.settings),
        }
        # An extract of a table has no query of its own: then the settings say so.
        spec = spec_from_mapping({name: value for name, value in declared.items() if value is not None}, "a test")
        return Refresher(
            spec,
            snowflake=SnowflakeAccess.from_environment(self.env),
            tableau=TableauAccess.from_environment(self.env),
            spark=lambda: self.spark,
            home=self.folder,
            env=self.env,
            log=self.lines.append,
        )

    def close(self) -> None:
        self.connection.close()

    def in_schema(self, text: str) -> str:
        return text.replace("{s}", f"{DATABASE}.{self.name.upper()}")

    def _settings(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.in_schema(name): self._settings(inner) for name, inner in value.items()}
        return self.in_schema(value) if isinstance(value, str) else value

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return self.connection.cursor().execute(self.in_schema(statement)).fetchall()

    def refresh(
        self,
        mode: Mode = "changes",
        *,
        hints: Sequence[Any] = (),
        until: str = "confirmed",
        allow_empty: bool = True,
    ) -> Plan:
        """One refresh, ended after a step as a crash would end it; gives its plan."""
        with quickly(self.sandbox.tableau_url):
            return self._refresh(mode, hints, until, allow_empty=allow_empty)

    def _refresh(self, mode: Mode, hints: Sequence[Any], until: str, *, allow_empty: bool) -> Plan:
        refresher = self.refresher
        self.lines.clear()
        looked = refresher.look(self.confirmed)
        if looked.late is not None:
            self.confirmed = looked.late
            refresher.settle(looked.late)
        surveyed = refresher.survey(looked)
        parsed_hints = parse_hints(self._hints(hints), "a test") if hints else ()
        plan = refresher.plan(looked, surveyed, mode, hints=tuple(parsed_hints))
        if plan.decision == "none":
            return plan
        plan, change_set = refresher.detect(
            looked, surveyed, plan, ident=new_id(), resync=[], allow_empty=allow_empty, hints=tuple(parsed_hints)
        )
        self.change_set = change_set
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

    def _hints(self, hints: Sequence[Any]) -> list[Any]:
        return [{**hint, "table": self.in_schema(hint["table"])} for hint in hints]

    # What people see

    def expected(self) -> Counter:
        """What the query shows now, by the warehouse itself."""
        return Counter(tuple(map(_plain, row)) for row in self.sql(self.query))

    def published(self) -> Counter:
        with TableauClient(TableauAccess.from_environment(self.env)) as client:
            datasource = look_at_server(client, self.refresher.spec).datasource
            assert datasource is not None, "nothing is published"
            _, hyper = fetch_shell(client, datasource, self.folder / "seen")
        names = [row[0] for row in self.connection.cursor().describe(self.in_schema(self.query))]
        listed = ", ".join(f'"{name}"' for name in names)
        with (
            HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
            Connection(process.endpoint, str(hyper)) as connection,
        ):
            rows = connection.execute_list_query(f'SELECT {listed} FROM "Extract"."Extract"')
        return Counter(tuple(map(_plain, row)) for row in rows)


def _plain(value: Any) -> str | None:
    """Sums of long decimals are floats in Hyper: a number is a number here."""
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return f"number {float(value):g}"
    return plain(value)
