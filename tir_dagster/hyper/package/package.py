"""The .tdsx package: reads its description of the extract and its Hyper file, packs another Hyper file into it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from tir_dagster.errors import ExtractError
from tir_dagster.files import VirtualFile
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.hyperfile import look_at
from tir_dagster.hyper.package.archive import Archive, bad_package, open_archive
from tir_dagster.hyper.package.document import (
    Document,
    LiveConnection,
    LiveRelation,
    MetadataRecord,
    RefreshEvent,
    document_differences,
)
from tir_dagster.hyper.package.xmltext import UnreadableXmlError, attribute

# How a document writes "no value".
NO_VALUE = "%null%"
_INTEGERS = ("BIGINT", "INTEGER", "SMALLINT")
_MOMENTS = ("DATE", "TIMESTAMP", "TIMESTAMPTZ")


@dataclass(frozen=True)
class Package:
    """The description in a package; `hyper_member` is None when it was downloaded without its extract."""

    path: Path
    document: str
    name: str
    hyper_member: str | None
    tables: tuple[tuple[str, str], ...]
    columns: tuple[MetadataRecord, ...]
    source_columns: tuple[MetadataRecord, ...]
    incremental: bool
    increment_key: str | None
    events: tuple[RefreshEvent, ...]
    relation: LiveRelation | None
    connections: tuple[LiveConnection, ...]
    filters: tuple[str, ...]
    aggregated: bool
    row_limit: str | None

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses that the live side reads from."""
        return tuple(dict.fromkeys(connection.server or "" for connection in self.connections))

    @property
    def table(self) -> tuple[str, str]:
        """Schema and name of the extract's one table; several are refused."""
        if len(self.tables) != 1:
            listed = ", ".join(".".join(table) for table in self.tables) or "none"
            raise ExtractError(
                f"The datasource {self.name} stores {len(self.tables)} tables ({listed}); the spec declares one. "
                "Declare each of them under `tables` in the spec, or use the delivery `trigger`."
            )
        return self.tables[0]

    @property
    def is_bare(self) -> bool:
        """Whether the server made the document for a plain Hyper file, so that there is nothing in it to keep."""
        return self.relation is None and not self.columns

    @property
    def increment_column(self) -> str | None:
        """The increment key's column in the Hyper file."""
        return _remote(self.columns, self.increment_key)

    @property
    def increment_table(self) -> tuple[str, str]:
        """Schema and name of the table in the Hyper file that has the increment key."""
        parents = {record.parent for record in self.columns if record.local_name == self.increment_key}
        return next((table for table in self.tables if table[1] in parents), None) or self.table

    @property
    def increment_source(self) -> str | None:
        """The increment key's column in the source."""
        return _remote(self.source_columns, self.increment_key)

    @property
    def last_increment(self) -> str | None:
        """The increment value of the last refresh, as the document writes it; None when nothing was extracted yet."""
        return self.events[-1].increment_value if self.events else None

    @property
    def hyper_names(self) -> dict[str, str]:
        """The Hyper column of each source column, through the local name that both sides share."""
        stored = {record.local_name: record.remote_name for record in self.columns}
        return {
            record.remote_name: stored[record.local_name]
            for record in self.source_columns
            if record.local_name in stored
        }

    @property
    def calculated_columns(self) -> tuple[str, ...]:
        """Columns of the Hyper file that no source column fills: calculations that the extract stores."""
        filled = {record.local_name for record in self.source_columns}
        stored = [record.remote_name for record in self.columns if record.local_name not in filled]
        return tuple(stored) if self.source_columns else ()


def _remote(records: tuple[MetadataRecord, ...], local_name: str | None) -> str | None:
    return next((record.remote_name for record in records if record.local_name == local_name), None)


@dataclass(frozen=True)
class RefreshChange:
    """What the document says after a republish: the last event's increment value and row count; None leaves as is."""

    increment_value: str | None = None
    rows: int | None = None
    updated: datetime | None = None


def read_package(path: Path) -> Package:
    """Read the package; refuse a hostile or damaged one, one without an extract, or one of the old engine."""
    with open_archive(path) as archive:
        document = _document(archive)
        name = document.caption or PurePosixPath(archive.document_name()).stem
        data = _hyper_connection(document, path, name)
        refresh = document.refresh
        return Package(
            path=path,
            document=archive.document_name(),
            name=name,
            hyper_member=archive.member_at(attribute(data, "dbname") or ""),
            tables=document.extract_tables(),
            columns=document.records("extract"),
            source_columns=document.records("live") if document.extract is not None else (),
            incremental=(attribute(refresh, "incremental-updates") or "").lower() == "true",
            increment_key=attribute(refresh, "increment-key") or None,
            events=document.events(),
            relation=document.relation(),
            connections=document.connections(),
            filters=document.filters(),
            aggregated=document.is_aggregated(),
            row_limit=document.row_limit(),
        )


def document_of(path: Path) -> Document:
    """Read the package's document alone, such as for its logical tables."""
    with open_archive(path) as archive:
        return _document(archive)


def _document(archive: Archive) -> Document:
    try:
        document = Document(archive.document())
        if not document.is_datasource:
            raise UnreadableXmlError("it does not describe a datasource")
        # Both read the version, and fail without one.
        document.connections()
    except UnreadableXmlError as error:
        raise bad_package(archive.path, f"holds a document that cannot be used, because {error}") from error
    except (TypeError, ValueError) as error:
        raise bad_package(archive.path, "holds a document that does not say its version") from error
    return document


def _hyper_connection(document: Document, path: Path, name: str) -> Any:
    data = document.data
    if data is None:
        raise ExtractError(
            f"The datasource {name} in {path} has no extract: it reads its source live. "
            "Create and publish an extract with Tableau first, or use the delivery `trigger`."
        )
    kind = attribute(data, "class") or "unknown"
    if kind != "hyper":
        raise ExtractError(
            f"The extract of {name} in {path} is of class {kind}, not hyper. "
            "Open it with Tableau 10.5 or later, which upgrades it, and publish it again."
        )
    return data


def extract_hyper(package: Package, target: Path) -> Path:
    """Write the package's Hyper file to `target`."""
    with open_archive(package.path) as archive:
        archive.copy_out(_member(package), target)
    return target


def _member(package: Package) -> str:
    if package.hyper_member is None:
        raise ExtractError(
            f"The package {package.path} does not hold the extract that its document names. Download it with its extract."
        )
    return package.hyper_member


def packed(source: Package, name: str, *, hyper: Path, refresh: RefreshChange | None = None) -> VirtualFile:
    """The same package around another Hyper file, under that name, to be sent without being written first.

    Every other member keeps its content. The document stays to the letter, except for what `refresh` says of the
    extract's last refresh event; without events there is nothing to bring in line, and a first full refresh will.
    """
    with open_archive(source.path) as archive:
        replacements: dict[str, Path | bytes] = {_member(source): hyper}
        if refresh is not None:
            replacements[source.document] = _in_line(_document(archive), refresh)
        return archive.rewritten(name, replacements)


def _in_line(document: Document, change: RefreshChange) -> bytes:
    events = document.event_elements()
    if events and change.increment_value is not None:
        document.xml.set(events[-1], "increment-value", change.increment_value)
    if events and change.rows is not None:
        document.xml.set(events[-1], "rows-inserted", str(change.rows))
    if change.updated is not None:
        document.xml.set(document.data, "update-time", change.updated.astimezone(UTC).strftime("%m/%d/%Y %I:%M:%S %p"))
    edited = document.xml.edited()
    after = Document(edited)
    if events and change.increment_value not in (None, after.events()[-1].increment_value):
        raise ExtractError(
            f"The increment value {change.increment_value} could not be set: the refresh events of the document are written "
            "in an unknown way. Use the delivery `republish`, and report the document."
        )
    if differences := document_differences(document, after):
        raise ExtractError(
            f"The document could not be brought in line with its extract: besides the refresh, it would change {differences[0]}. "
            "Nothing was published. Report the document, which is written in an unknown way."
        )
    return edited


def refresh_change(package: Package, hyper: Path, *, rows: int | None = None) -> RefreshChange:
    """What the document should say around this Hyper file, so that Tableau's own incremental refresh continues from it."""
    value = greatest_increment(package, hyper) if package.incremental else None
    return RefreshChange(increment_value=value, rows=rows, updated=datetime.now(UTC))


def greatest_increment(package: Package, hyper: Path) -> str | None:
    """The increment column's greatest value in this file as a document writes it; None without an increment key.

    `#2001-01-01#`, `#2023-01-03 00:00:00#` with its fraction where there is one, a bare integer, or `%null%` where
    no row has a value. A key of another type is refused: Tableau does not compare those.
    """
    if package.increment_key is None:
        return None
    column = package.increment_column
    with connect(hyper) as connection:
        table = look_at(connection, hyper, package.increment_table if len(package.tables) > 1 else None)
        stored = next((file_column for file_column in table.columns if file_column.name == column), None)
        if stored is None or stored.type not in (*_INTEGERS, *_MOMENTS):
            problem = "is not in the extract" if stored is None else f"is {stored.type}"
            raise ExtractError(
                f"The increment key {package.increment_key} of {package.name} {problem}; it has to be an integer, a date or a "
                "datetime. Choose another column for incremental refreshes in Tableau and publish again."
            )
        zoned = " AT TIME ZONE 'UTC'" if stored.type == "TIMESTAMPTZ" else ""
        greatest = f"CAST(MAX({quoted(stored.name)}){zoned} AS TEXT)"
        value = connection.execute_scalar_query(f"SELECT {greatest} FROM {table.sql}")
    if value is None:
        return NO_VALUE
    return str(value) if stored.type in _INTEGERS else f"#{value}#"
