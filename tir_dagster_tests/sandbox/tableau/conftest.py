"""Fixtures of the Tableau stand-in's tests: everyone works in a project, a schema and with a token of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauhyperapi import HyperProcess, Telemetry

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.sandbox.tableau.settings import Settings
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import QUICK, Admin, Looker, Publisher, Source
from tir_dagster_tests.sandbox.tableau.workbook import write_workbook


@pytest.fixture(scope="session", autouse=True)
def quick_jobs(sandbox: Sandbox) -> Iterator[None]:
    """Jobs that take no longer than their work; a test of waiting jobs asks for slower ones."""
    Admin(sandbox.tableau_url).set(job_seconds=QUICK)
    yield
    Admin(sandbox.tableau_url).set(job_seconds=Settings().job_seconds)


@pytest.fixture
def admin(sandbox: Sandbox) -> Iterator[Admin]:
    """The admin calls; settings and faults are back to normal after the test."""
    admin = Admin(sandbox.tableau_url)
    yield admin
    admin.clear_faults()
    admin.set(**{**asdict(Settings()), "job_seconds": QUICK})


@pytest.fixture
def publisher(sandbox: Sandbox, tmp_path: Path) -> Iterator[Publisher]:
    with sandbox.tableau() as server:
        project = server.projects.create(TSC.ProjectItem(name=f"project-{uuid.uuid4().hex}"))
        yield Publisher(sandbox, server, project, tmp_path)


@pytest.fixture(scope="session")
def hyper() -> Iterator[Any]:
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


@pytest.fixture
def look(hyper: Any, tmp_path: Path) -> Looker:
    return Looker(hyper, tmp_path)


@pytest.fixture(scope="session")
def warehouse_cursor(sandbox: Sandbox) -> Iterator[Any]:
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS TABLEAU_TESTS")
        yield cursor


@pytest.fixture
def source(sandbox: Sandbox, warehouse_cursor: Any, hyper: Any, tmp_path: Path) -> Source:
    schema = f"S{uuid.uuid4().hex[:12].upper()}"
    warehouse_cursor.execute(f"CREATE SCHEMA TABLEAU_TESTS.{schema}")
    return Source(sandbox, warehouse_cursor, "TABLEAU_TESTS", schema, tmp_path, hyper)


@pytest.fixture
def orders(publisher: Publisher, source: Source) -> Any:
    """A published datasource with an extract of one column."""
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    source.sql("INSERT INTO {t} VALUES (1)")
    return publisher.publish(source.package(Column("ID", "NUMBER(38,0)")), connection_credentials=publisher.credentials)


@pytest.fixture
def workbook(publisher: Publisher, orders: Any, tmp_path: Path) -> Any:
    """A workbook that uses that datasource."""
    return publisher.publish_workbook(write_workbook(tmp_path / "book.twb", orders.content_url))
