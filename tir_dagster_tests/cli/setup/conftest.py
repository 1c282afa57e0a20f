"""What the tests of `tir init`, `tir adopt` and `tir doctor` share: a project and a schema of their own, and the commands."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from click.testing import CliRunner, Result
from tableauhyperapi import Connection, CreateMode, HyperProcess, Telemetry

from tir_dagster.cli.main import tir
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import LIVE_ONLY, Admin

ORDERS = (Column("ID", "NUMBER(38,0)"), Column("DAY", "DATE"), Column("AMOUNT", "NUMBER(12,2)"))


@dataclass(frozen=True)
class Site:
    """A project and a schema, a folder to write to, and the environment of a new user."""

    sandbox: Sandbox
    admin: Admin
    server: TSC.Server
    project: TSC.ProjectItem
    schema: str
    folder: Path
    hyper: Any
    cursor: Any

    def run(self, *arguments: str) -> Result:
        # A command with --specs sets the variable, for this process alone.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIR_SPECS", os.environ.get("TIR_SPECS", ""))
            result = CliRunner().invoke(tir, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        return result

    def sql(self, statement: str) -> None:
        self.cursor.execute(statement.replace("{s}", f"SETUPS.{self.schema}"))

    def table(self, name: str, columns: str, select: str = "") -> str:
        self.sql(f"CREATE TABLE {{s}}.{name} ({columns})")
        if select:
            self.sql(f"INSERT INTO {{s}}.{name} {select}")
        return f"SETUPS.{self.schema}.{name}"

    def orders(self, name: str = "ORDERS") -> str:
        """A table of 400 orders of four months, with its declared key and change tracking."""
        table = self.table(
            name,
            "ID NUMBER(38,0) NOT NULL PRIMARY KEY, DAY DATE, AMOUNT NUMBER(12,2)",
            "SELECT SEQ4(), DATEADD('day', MOD(SEQ4(), 120), '2026-01-01'::DATE), 1 FROM TABLE(GENERATOR(ROWCOUNT => 400))",
        )
        self.sql(f"ALTER TABLE {table} SET CHANGE_TRACKING = TRUE")
        return table

    @property
    def source(self) -> SnowflakeConnection:
        return SnowflakeConnection(
            server=f"{self.sandbox.identity.account}.snowflakecomputing.com",
            dbname="SETUPS",
            schema=self.schema,
            warehouse="WH",
            role="SYSADMIN",
            username=self.sandbox.identity.snowflake_user,
        )

    def publish(self, file: Path, name: str) -> Any:
        identity = self.sandbox.identity
        credentials = TSC.ConnectionCredentials(identity.snowflake_user, identity.snowflake_password, embed=True)
        item = TSC.DatasourceItem(self.project.id, name)
        return self.server.datasources.publish(item, str(file), "CreateNew", connection_credentials=credentials)

    def publish_extract(self, name: str, **more: Any) -> Any:
        """Publish an extract as Tableau Desktop would, of a table or of custom SQL."""
        file = self.folder / "packages" / f"{name}.tdsx"
        build_tdsx(file, columns=ORDERS, snowflake=self.source, hyper=self.hyper, caption=name, **more)
        return self.publish(file, name)

    def publish_hyper(self, name: str) -> Any:
        file = self.folder / "packages" / f"{name}.hyper"
        file.parent.mkdir(exist_ok=True)
        with Connection(self.hyper, file, CreateMode.CREATE) as connection:
            connection.execute_command('CREATE TABLE "public"."t" AS (SELECT 1 AS "n")')
        return self.publish(file, name)

    def publish_live(self, name: str) -> Any:
        file = self.folder / "packages" / f"{name}.tds"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(LIVE_ONLY)
        return self.publish(file, name)

    def refresh(self, datasource: Any) -> None:
        self.server.jobs.wait_for_job(self.server.datasources.refresh(datasource), timeout=60)


@pytest.fixture(scope="package")
def hyper() -> Iterator[Any]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


@pytest.fixture
def site(sandbox: Sandbox, hyper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    admin, schema = Admin(sandbox.tableau_url), f"S{uuid.uuid4().hex[:12].upper()}"
    admin.set(job_seconds=0.01)
    name, secret = sandbox.new_token()
    for variable, value in {**sandbox.env, "TABLEAU_TOKEN_NAME": name, "TABLEAU_TOKEN_SECRET": secret}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    monkeypatch.delenv("TIR_SPECS", raising=False)
    monkeypatch.chdir(tmp_path)
    with sandbox.snowflake() as connection, connection.cursor() as cursor, sandbox.tableau() as server:
        cursor.execute("CREATE DATABASE IF NOT EXISTS SETUPS")
        cursor.execute(f"CREATE SCHEMA SETUPS.{schema}")
        project = server.projects.create(TSC.ProjectItem(name=f"setup-{uuid.uuid4().hex}"))
        yield Site(sandbox, admin, server, project, schema, tmp_path, hyper, cursor)
    admin.clear_faults()
    admin.set(**asdict(Settings()))
