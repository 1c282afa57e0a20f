"""The sample datasource on the Tableau stand-in, published and refreshed by the real client."""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import TableauError

from tir_dagster.sandbox.home import SandboxError
from tir_dagster.sandbox.sample.rows import COLUMNS
from tir_dagster.sandbox.sample.table import DATABASE, SCHEMA_NAME, TABLE_NAME
from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection, build_tdsx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DATASOURCE = "mydatasource"
PROJECT = "myproject"
WAREHOUSE = "MYWH"
ROLE = "SYSADMIN"
INCREMENT_KEY = "ORDER_DATE"


@dataclass(frozen=True)
class SeededDatasource:
    """What `seed_datasource` published."""

    id: str
    name: str
    project: str
    seconds: float


def seed_datasource(
    environment: Mapping[str, str],
    *,
    timeout: float,
    name: str = DATASOURCE,
    progress: Callable[[str], object] = lambda _: None,
) -> SeededDatasource:
    """Publish the datasource as Tableau Desktop would, with its credentials, and fill it by one full refresh."""
    begun = time.monotonic()
    with signed_in(environment) as server, tempfile.TemporaryDirectory(prefix="tir-sample-") as folder:
        package = _package(Path(folder) / f"{DATASOURCE}.tdsx", environment)
        published = server.datasources.publish(
            TSC.DatasourceItem(_project_id(server), name=name),
            str(package),
            mode=TSC.Server.PublishMode.Overwrite,
            connection_credentials=TSC.ConnectionCredentials(
                environment["SNOWFLAKE_USER"], environment["SNOWFLAKE_PASSWORD"], embed=True
            ),
        )
        progress(f'"{name}": published, now its full refresh')
        _refresh(server, published, timeout)
    return SeededDatasource(published.id, name, PROJECT, time.monotonic() - begun)


@contextmanager
def signed_in(environment: Mapping[str, str]) -> Iterator[Any]:
    """A signed-in client; what the server refuses becomes a SandboxError."""
    token = TSC.PersonalAccessTokenAuth(
        environment["TABLEAU_TOKEN_NAME"], environment["TABLEAU_TOKEN_SECRET"], site_id=environment["TABLEAU_SITE"]
    )
    try:
        server = TSC.Server(environment["TABLEAU_SERVER_URL"], use_server_version=True)
        with server.auth.sign_in(token):
            yield server
    except (TableauError, requests.RequestException) as error:
        raise SandboxError(
            f'The Tableau stand-in failed while making "{DATASOURCE}": {error}.'
            " tir sandbox status shows whether it runs, and its log."
        ) from error


def _package(path: Path, environment: Mapping[str, str]) -> Path:
    connection = SnowflakeConnection(
        server=f"{environment['SNOWFLAKE_ACCOUNT']}.snowflakecomputing.com",
        dbname=DATABASE,
        schema=SCHEMA_NAME,
        warehouse=WAREHOUSE,
        role=ROLE,
        username=environment["SNOWFLAKE_USER"],
    )
    columns = [Column(name, declared.removesuffix(" NOT NULL")) for name, declared, _ in COLUMNS]
    return build_tdsx(
        path,
        caption=DATASOURCE,
        columns=columns,
        snowflake=connection,
        table=TABLE_NAME,
        increment_key=INCREMENT_KEY,
    )


def _project_id(server: Any) -> str:
    """The top-level project's id; the project is made when missing."""
    found = [item for item in server.projects.filter(name=PROJECT) if not item.parent_id]
    project = found[0] if found else server.projects.create(TSC.ProjectItem(name=PROJECT))
    return str(project.id)


def _refresh(server: Any, datasource: Any, timeout: float) -> None:
    job = server.datasources.refresh(datasource)
    if job is None:
        raise SandboxError(f'A refresh of "{DATASOURCE}" is already queued. Wait for it, then: tir sandbox seed')
    try:
        server.jobs.wait_for_job(job, timeout=timeout)
    except TSC.JobFailedException as error:  # also raised for a cancelled job
        raise SandboxError(f'The full refresh of "{DATASOURCE}" failed: {"; ".join(error.notes)}') from error
    except TimeoutError as error:
        raise SandboxError(
            f'The full refresh of "{DATASOURCE}" did not end within {timeout:.0f} s. Give it longer with --job-seconds.'
        ) from error
