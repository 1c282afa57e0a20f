"""Refresh one datasource for real: read its source, write its extract, and note down in the document what was done."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tableauhyperapi import HyperException

from tir_dagster.sandbox.tableau import extracts
from tir_dagster.sandbox.tableau.archive import BadPackageError, Package
from tir_dagster.sandbox.tableau.content import open_current
from tir_dagster.sandbox.tableau.document import NO_VALUE, Document, ExtractColumn, LiveConnection, LogicalTable
from tir_dagster.sandbox.tableau.sign_in_methods import method_of
from tir_dagster.sandbox.tableau.source import (
    SourceColumn,
    SourceError,
    SourceLogin,
    fetch,
    increment_condition,
    open_source,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tir_dagster.sandbox.tableau.server import Server


class RefreshFailedError(Exception):
    """The job fails with this note."""


@dataclass(frozen=True)
class Refreshed:
    """A finished package in a scratch folder, and the generation of the datasource it was made from."""

    path: Path
    generation: int
    note: str


@dataclass(frozen=True)
class _Work:
    server: Server
    document: Document
    package: Package
    folder: Path
    name: str
    started: datetime
    check: Callable[[], None]


def _moment(server: Server) -> datetime:
    return datetime.fromtimestamp(server.now(), UTC)


@contextlib.contextmanager
def refreshed_package(
    server: Server, datasource_id: str, *, incremental: bool, check: Callable[[], None]
) -> Iterator[Refreshed]:
    """The refreshed package; its scratch files are gone afterwards. `check` may raise to stop the work."""
    try:
        with (
            tempfile.TemporaryDirectory(dir=server.scratch, prefix="refresh.") as folder,
            open_current(server, datasource_id) as (revision, file),
        ):
            if not revision["file"].endswith(".tdsx"):
                raise RefreshFailedError(f"The data source {revision['name']!r} has no extract to refresh.")
            package = Package(file, max_bytes=server.max_bytes)
            document = Document(package.document())
            work = _Work(server, document, package, Path(folder), revision["name"], _moment(server), check)
            note = _refresh(work, datasource_id, incremental=incremental)
            member = package.member_at(document.extract_member)
            target = Path(folder) / "refreshed.tdsx"
            package.rewrite(
                target, {package.document_name(): document.text(), member or "": Path(folder) / "extract.hyper"}
            )
            yield Refreshed(target, revision["generation"], note)
    except (SourceError, BadPackageError) as error:
        raise RefreshFailedError(str(error)) from error
    except HyperException as error:
        raise RefreshFailedError(f"The extract could not be written: {error.main_message}") from error


def _refresh(work: _Work, datasource_id: str, *, incremental: bool) -> str:
    document = work.document
    tables = document.logical_tables()
    if document.has_extract and document.joins_stored_tables:
        raise RefreshFailedError(
            f"The extract of {work.name!r} keeps a logical table as several physical tables, which are not refreshed here."
        )
    if document.is_bare_extract or not document.has_extract or not tables:
        raise RefreshFailedError(
            f"The data source {work.name!r} has no connection its extract could be refreshed from."
        )
    increment, growing = document.increment, document.increment_table()
    possible = increment.enabled and growing is not None
    # Without an earlier event, or with one that saw no rows, there is nothing to go on from.
    begun = increment.last_value not in (None, "", NO_VALUE)
    with open_source(_login(work, datasource_id, tables)) as connection:
        if incremental and increment.enabled and growing is not None and begun:
            others = [table for table in tables if table != growing]
            rows = _append(work, connection, growing, others)
            return f"Appended {rows} rows to the extract of Data Source {work.name!r}."
        rows = _recreate(work, connection, tables)
    # Not configured for increments: a full refresh, as far as anybody remembers of older servers (unverified).
    hint = " The extract is not configured for incremental refresh." if incremental and not possible else ""
    return f"Finished refresh of extracts for Data Source {work.name!r}: {rows} rows.{hint}"


def _login(work: _Work, datasource_id: str, tables: Sequence[LogicalTable]) -> SourceLogin:
    """Where to read from: the document's connection with the credentials stored on the server."""
    names = {table.connection for table in tables}
    live = [entry for entry in work.document.connections() if entry.name in names or names == {""}]
    if len(live) != 1:
        raise RefreshFailedError(f"The extract of {work.name!r} is fed by {len(live)} connections; one is supported.")
    stored = work.server.store.row(
        "SELECT * FROM connections WHERE datasource_id = ? AND name = ?", datasource_id, live[0].name
    )
    if stored is None or not stored["embed"] or not stored["password"]:
        method = method_of(stored["authentication"] if stored is not None else None)
        needed = {"key_pair": "a saved key pair is", "oauth": "a saved OAuth credential is"}
        raise RefreshFailedError(
            f"The data source {work.name!r} has no embedded credentials for {live[0].server!r}: "
            f"{needed.get(method, 'a valid username and password are')} required."
        )
    return _resolve(work.server, live[0], stored)


def _resolve(server: Server, live: LiveConnection, stored: Any) -> SourceLogin:
    account = server.identity.account
    # The one name this sandbox's "DNS" knows; any other is a host that cannot be reached.
    if live.kind != "snowflake" or (stored["server"] or "").casefold() != f"{account}.snowflakecomputing.com":
        raise SourceError(f"Unable to connect to the {live.kind} server {stored['server']!r}: unknown host.")
    return SourceLogin(
        account=account,
        port=server.warehouse_port,
        user=stored["username"] or live.username or "",
        method=method_of(stored["authentication"]),
        secret=stored["password"],
        database=live.dbname,
        schema=live.schema,
        warehouse=live.warehouse,
        role=live.role,
    )


def _columns(work: _Work, table: LogicalTable, source: Sequence[SourceColumn]) -> list[ExtractColumn]:
    return [ExtractColumn(*work.document.extract_column(table, column.name), column.type) for column in source]


def _recreate(work: _Work, connection: Any, tables: Sequence[LogicalTable]) -> int:
    """A full refresh: a new file with whatever columns the source has now, one table after the other."""
    total = 0
    increment, growing = work.document.increment, work.document.increment_table()
    value = NO_VALUE
    with work.server.hyper.open(work.folder / "extract.hyper", create=True) as extract:
        for table in tables:
            columns, rows = _fill(work, connection, extract, table)
            total += rows
            key = next((column.name for column in columns if column.local_name == increment.key), None)
            if increment.enabled and key is not None and table == growing:
                value = extracts.greatest(extract, table.extract_schema, table.extract_table, key)
    work.document.add_event(kind="create", value=value, rows=total, started=work.started, origin=work.name)
    return total


def _fill(work: _Work, connection: Any, extract: Any, table: LogicalTable) -> tuple[list[ExtractColumn], int]:
    """Read a table by its own query into a new table of the extract; its columns and how many rows it has."""
    parquet = work.folder / "table.parquet"
    columns, rows = _fetch(work, connection, table, parquet)
    place = (table.extract_schema, table.extract_table)
    extracts.create_table(extract, *place, columns)
    extracts.append_parquet(extract, *place, columns, parquet)
    parquet.unlink()
    work.document.rewrite_records(table, columns)
    return columns, rows


def _append(work: _Work, connection: Any, table: LogicalTable, others: Sequence[LogicalTable]) -> int:
    """An incremental refresh: source rows after the last event's value, or from it on, added to the table that grows.

    What a real server does with the other logical tables is not documented: they are read anew, or kept, by a setting.
    """
    increment = work.document.increment
    last = increment.last_value or ""
    source_key = work.document.source_column(table, increment.key)
    if source_key is None or extracts.sql_literal(last) is None:
        raise RefreshFailedError(f"The increment key {increment.key} with the value {last!r} cannot be followed.")
    reads = work.server.settings.current.increment_reads
    where = increment_condition(connection, table, source_key, last, inclusive=reads != "after")
    parquet, path = work.folder / "increment.parquet", work.folder / "extract.hyper"
    columns, rows = _fetch(work, connection, table, parquet, where)
    member = work.package.member_at(work.document.extract_member)
    work.package.extract_to(member or "", path)
    place = (table.extract_schema, table.extract_table)
    with work.server.hyper.open(path) as extract:
        present = extracts.columns_of(extract, *place)
        if present is None or set(present) != {column.name for column in columns}:
            raise RefreshFailedError("The columns of the source have changed: a full refresh is needed.")
        key = next(column.name for column in columns if column.local_name == increment.key)
        if reads == "from":
            extracts.delete_at(extract, *place, key, last)
        if rows:
            extracts.append_parquet(extract, *place, columns, parquet)
            last = extracts.greatest(extract, *place, key)
        for other in others if work.server.settings.current.increment_others == "read" else ():
            extracts.drop_table(extract, other.extract_schema, other.extract_table)
            _fill(work, connection, extract, other)
    work.document.add_event(kind="increment", value=last, rows=rows, started=work.started, origin=work.name)
    return rows


def _fetch(
    work: _Work, connection: Any, table: LogicalTable, target: Path, where: str | None = None
) -> tuple[list[ExtractColumn], int]:
    columns, rows = fetch(
        connection,
        table,
        target,
        where=where,
        rename=lambda name: work.document.extract_column(table, name)[0],
        check=work.check,
    )
    return _columns(work, table, columns), rows
