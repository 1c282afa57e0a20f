"""Fixtures of the datasource room's tests: the real client, on the sandbox's Tableau Server, with its faults."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster.tableau.access import TableauAccess, TableauToken
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, FoundProject, find_datasource
from tir_dagster.tableau.publishing import publish
from tir_dagster.tableau.settings import ConnectionCredential
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin, rewritten

OTHERS_PACKAGE = "others.tdsx"


@dataclass
class Naps:
    """A sleep that notes what was asked for and takes almost none of it."""

    asked: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        time.sleep(min(seconds, 0.02))


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def quick(naps: Naps) -> RetryPolicy:
    """The retry policy with hardly a pause."""
    return RetryPolicy(tries=3, backoff=Backoff(first_seconds=0.01, most_seconds=0.02), sleep=naps)


@pytest.fixture
def admin(sandbox: Sandbox) -> Iterator[Admin]:
    """The server's admin calls; faults and settings are back to normal after the test."""
    admin = Admin(sandbox.tableau_url)
    yield admin
    admin.clear_faults()
    admin.set(**asdict(Settings()))


@pytest.fixture
def access(sandbox: Sandbox) -> TableauAccess:
    return TableauAccess(sandbox.tableau_url, sandbox.identity.site, TableauToken(*sandbox.new_token()))


@pytest.fixture
def client(access: TableauAccess, quick: RetryPolicy) -> Iterator[TableauClient]:
    with TableauClient(access, retry=quick, poll=Backoff(0.02, 0.05)) as client:
        yield client


@pytest.fixture(scope="session")
def hyper() -> Iterator[Any]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


@pytest.fixture(scope="session")
def source_table(sandbox: Sandbox) -> SnowflakeConnection:
    """A table T with two rows, and how a package connects to it."""
    schema = f"S{uuid.uuid4().hex[:12].upper()}"
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS DATASOURCE_TESTS")
        cursor.execute(f"CREATE SCHEMA DATASOURCE_TESTS.{schema}")
        cursor.execute(f"CREATE TABLE DATASOURCE_TESTS.{schema}.T (ID NUMBER(38,0))")
        cursor.execute(f"INSERT INTO DATASOURCE_TESTS.{schema}.T VALUES (1), (2)")
    return SnowflakeConnection(
        server=f"{sandbox.identity.account}.snowflakecomputing.com",
        dbname="DATASOURCE_TESTS",
        schema=schema,
        warehouse="WH",
        role="SYSADMIN",
        username=sandbox.identity.snowflake_user,
    )


@pytest.fixture(scope="session")
def packages(source_table: SnowflakeConnection, hyper: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our package and somebody else's."""
    folder = tmp_path_factory.mktemp("packages")
    columns = [Column("ID", "NUMBER(38,0)")]
    common: dict[str, Any] = {"columns": columns, "snowflake": source_table, "table": "T", "hyper": hyper}
    build_tdsx(folder / "ours.tdsx", caption="Orders", increment_key="ID", **common)
    build_tdsx(folder / OTHERS_PACKAGE, caption="Orders of others", **common)
    return folder


@pytest.fixture
def package(packages: Path) -> Path:
    return packages / "ours.tdsx"


@pytest.fixture
def credential(sandbox: Sandbox, source_table: SnowflakeConnection) -> ConnectionCredential:
    identity = sandbox.identity
    return ConnectionCredential(source_table.server, identity.snowflake_user, identity.snowflake_password)


@pytest.fixture
def others(sandbox: Sandbox) -> Iterator[TSC.Server]:
    """Somebody else's client."""
    with sandbox.tableau() as server:
        yield server


@pytest.fixture
def project(others: TSC.Server) -> FoundProject:
    created = others.projects.create(TSC.ProjectItem(name=f"project-{uuid.uuid4().hex}"))
    return FoundProject(created.id or "", created.name, created.name)


@dataclass(frozen=True)
class Orders:
    """The datasource most tests work on, and the ways in which others touch it."""

    client: TableauClient
    project: FoundProject
    packages: Path
    others: TSC.Server
    credential: ConnectionCredential

    def create(self, **more: Any) -> FoundDatasource:
        options = {"project": self.project, "name": "Orders", "servers": [self.credential.server_address], **more}
        return publish(self.client, self.packages / "ours.tdsx", **options)

    def overwrite(self, **more: Any) -> FoundDatasource:
        return self.create(overwrite=True, **more)

    def now(self) -> FoundDatasource:
        return find_datasource(self.client, project=self.project, name="Orders")

    def publish_by_others(self) -> None:
        item = TSC.DatasourceItem(self.project.id, "Orders")
        self.others.datasources.publish(item, str(self.packages / OTHERS_PACKAGE), "Overwrite")

    def content(self) -> bytes:
        """The package on the server, byte for byte."""
        answer = self.others.datasources.get_request(f"{self.others.datasources.baseurl}/{self.now().id}/content")
        return bytes(answer.content)

    def holds_ours(self) -> bool:
        return self.content() == (self.packages / "ours.tdsx").read_bytes()


@pytest.fixture
def orders(
    client: TableauClient,
    project: FoundProject,
    packages: Path,
    others: TSC.Server,
    credential: ConnectionCredential,
) -> Orders:
    return Orders(client, project, packages, others, credential)


@pytest.fixture
def large(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a little more than three pieces of 1 MB."""
    monkeypatch.setenv("TSC_FILESIZE_LIMIT_MB", "0")
    monkeypatch.setenv("TSC_CHUNK_SIZE_MB", "1")
    image = random.Random(1).randbytes(3 * 2**20)
    return rewritten(packages / "ours.tdsx", tmp_path / "large.tdsx", add=[("Image/logo.png", image)])
