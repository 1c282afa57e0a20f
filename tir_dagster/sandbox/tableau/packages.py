"""Write a .tdsx the way Tableau Desktop shapes one: Snowflake tables or queries, and an extract that is still empty."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tableauhyperapi import Connection, CreateMode, HyperProcess, Telemetry

from tir_dagster.sandbox.tableau.desktop import (
    EXTRACT_SCHEMA,
    Column,
    DesktopDocument,
    DesktopRelationship,
    DesktopTable,
    RelatedTable,
    SnowflakeConnection,
    object_id,
)
from tir_dagster.sandbox.tableau.extracts import quoted
from tir_dagster.sandbox.tableau.xmltree import serialise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Column",
    "DesktopRelationship",
    "DesktopTable",
    "RelatedTable",
    "SnowflakeConnection",
    "build_related_tdsx",
    "build_tdsx",
    "object_id",
]


def build_tdsx(
    path: Path,
    *,
    caption: str,
    columns: Sequence[Column],
    snowflake: SnowflakeConnection,
    table: str = "",
    custom_sql: str = "",
    increment_key: str | None = None,
    hyper: Any = None,
) -> Path:
    """Write a package of one logical table and return its path.

    `table` names a table of the connection's schema; `custom_sql` is read instead when given. `increment_key` is the
    remote name of the column that incremental refreshes compare; None leaves the datasource on full refreshes.
    `hyper` is the endpoint of a running Hyper process; without one a process is started for the moment.
    """
    logical = DesktopTable(table or "Custom SQL Query", tuple(columns), custom_sql)
    increment = None if increment_key is None else (logical.name, increment_key)
    return _write(path, DesktopDocument(caption, (logical,), snowflake, increment), hyper)


def build_related_tdsx(
    path: Path,
    *,
    caption: str,
    tables: Sequence[DesktopTable],
    relationships: Sequence[DesktopRelationship],
    snowflake: SnowflakeConnection,
    increment: tuple[str, str] | None = None,
    hyper: Any = None,
) -> Path:
    """Write a package of several logical tables and their relationships, and return its path.

    `increment` is the table, and its column, that incremental refreshes add rows to; None leaves all tables on full
    refreshes. `hyper` is as above.
    """
    document = DesktopDocument(caption, tuple(tables), snowflake, increment, tuple(relationships))
    return _write(path, document, hyper)


def _write(path: Path, document: DesktopDocument, hyper: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build.") as folder:
        extract = Path(folder) / "extract.hyper"
        with _endpoint(hyper) as endpoint:
            _write_empty_extract(extract, document, endpoint)
        beside = Path(folder) / "package.tdsx"
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as package:
            package.writestr(f"{document.file_name}.tds", serialise(document.tree(), pretty=True))
            package.write(extract, document.extract_member)
        beside.replace(path)
    return path


@contextlib.contextmanager
def _endpoint(running: Any) -> Iterator[Any]:
    if running is not None:
        yield running
        return
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process:
        yield process.endpoint


def _write_empty_extract(path: Path, document: DesktopDocument, endpoint: Any) -> None:
    with Connection(endpoint, path, CreateMode.CREATE_AND_REPLACE) as connection:
        connection.catalog.create_schema(EXTRACT_SCHEMA)
        for table in document.tables:
            body = ", ".join(f"{quoted(column.extract)} {column.type.hyper}" for column in table.columns)
            name = quoted(EXTRACT_SCHEMA, document.extract_table(table))
            connection.execute_command(f"CREATE TABLE {name} ({body})")
