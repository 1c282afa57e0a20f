"""What Tableau shows of a datasource that is to become, or could become, an extract of ours. Only reads."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tir_dagster.errors import DatasourceError, ExtractError
from tir_dagster.hyper.package.package import Package, read_package
from tir_dagster.refresh.deliveries.agreement import row_limits
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import ViewError, tables_of
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import Connection, FoundDatasource, find_project, look_for_datasource
from tir_dagster.tableau.jobs import shows_jobs
from tir_dagster.tableau.tasks import RefreshTask, scheduled_refreshes
from tir_dagster.tableau.transfer import download


@dataclass(frozen=True)
class DatasourceLook:
    """A place for an extract on a server; `datasource` is None where there is none yet, `package` where it has no extract."""

    project: str
    name: str
    rest_version: tuple[int, int]
    shows_jobs: bool = True
    datasource: FoundDatasource | None = None
    package: Package | None = None
    # Why the package cannot be used, as a sentence.
    problem: str = ""
    tasks: tuple[RefreshTask, ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether it is a published Hyper file, without a document that people made."""
        return self.package is not None and self.package.is_bare

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The source's columns that people chose in Tableau; None if they may still be chosen."""
        if self.package is None or self.package.is_bare:
            return None
        return tuple(self.package.hyper_names) or tuple(record.remote_name for record in self.package.columns)


def look_at_datasource(client: TableauClient, project_path: str, name: str) -> DatasourceLook:
    """Look at the datasource of that name, its document included; its rows are not downloaded."""
    project = find_project(client, project_path)
    datasource = look_for_datasource(client, project=project, name=name)
    look = DatasourceLook(project.path, name, client.rest_version, shows_jobs(client))
    if datasource is None:
        return look
    package, problem = look_inside(client, datasource)
    tasks = scheduled_refreshes(client, datasource)
    return replace(look, datasource=datasource, package=package, problem=problem, tasks=tasks)


def look_inside(client: TableauClient, datasource: FoundDatasource) -> tuple[Package | None, str]:
    """Download the document without the extract; return it, or a sentence that says why it cannot be used."""
    with tempfile.TemporaryDirectory(prefix="tir-look-") as folder:
        file = Path(folder) / "look"
        try:
            download(client, datasource, file, with_extract=False)
            if not zipfile.is_zipfile(file):
                # Servers may send the bare document of a package that had nothing else in it.
                with zipfile.ZipFile(Path(folder) / "look.tdsx", "w") as packed:
                    packed.write(file, "look.tds")
                file = Path(folder) / "look.tdsx"
            return read_package(file), ""
        except (ExtractError, DatasourceError) as error:
            # The path of a file that is gone tells nobody anything.
            return None, str(error).replace(f" in {file}", "")


@dataclass(frozen=True)
class DatasourceSource:
    """What a datasource reads from Snowflake: one table or one query."""

    table: TableName | None = None
    query: str | None = None

    @property
    def shown(self) -> str:
        return str(self.table) if self.table is not None else "a query"


def source_of(package: Package) -> DatasourceSource | None:
    """Return the one table or query that the datasource reads; None for anything else."""
    relation = package.relation
    if relation is None:
        return None
    if relation.kind == "text":
        return DatasourceSource(query=relation.sql or "")
    connection = package.connections[0] if package.connections else None
    defaults = (connection.dbname, connection.schema) if connection else (None, None)
    parts = [*defaults[: 3 - len(relation.table)], *relation.table][-3:]
    if relation.kind != "table" or len(parts) != 3 or not all(parts):
        return None
    return DatasourceSource(TableName(*(part or "" for part in parts)))


def obstacles(package: Package, connections: tuple[Connection, ...]) -> Iterator[str]:
    """Yield why an existing datasource cannot be kept by key; nothing if it can."""
    source = source_of(package)
    kinds = sorted({connection.kind for connection in package.connections} - {"snowflake"})
    if package.is_bare:
        yield "it is a published Hyper file, which does not say where its rows come from: name the table with tir init"
        return
    if kinds:
        yield f"it reads {', '.join(kind or 'an unknown source' for kind in kinds)}, not Snowflake alone"
    elif source is None:
        yield "it reads several tables that are joined in Tableau: write the join as one query"
    elif source.query is not None:
        try:
            tables_of(source.query)
        except ViewError as error:
            yield f"its query cannot be followed: {str(error).removeprefix('`query`').lstrip(',: ').rstrip('.')}"
    if len(package.tables) != 1:
        yield f"its extract stores {len(package.tables)} tables, and one can be kept by key"
    yield from row_limits(package)
    embedded = {connection.server_address.casefold() for connection in connections if connection.embed_password}
    if len(embedded) > 1:
        yield f"credentials are embedded for {len(embedded)} servers, and a publish can put back one"
