"""What a file must fulfil to be published: a readable document whose extract is there and tells the truth about itself."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tableauhyperapi import HyperException

from tir_dagster.sandbox.tableau.archive import MAX_DOCUMENT_BYTES, BadPackageError, Package
from tir_dagster.sandbox.tableau.document import NO_VALUE, Document, stored_tables_of
from tir_dagster.sandbox.tableau.extracts import (
    ForeignKey,
    Hyper,
    StoredTable,
    columns_of,
    foreign_keys,
    reaches,
    sql_literal,
    stored_tables,
)
from tir_dagster.sandbox.tableau.object_graph import owners_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Checker:
    """Checks files before they are stored; `scratch` is a folder for the moment."""

    hyper: Hyper
    scratch: Path
    max_bytes: int
    increment_beyond_data: bool = False

    def package(self, path: Path) -> Document:
        """The document of a .tdsx; BadPackageError says what is wrong with it."""
        with Package(path, max_bytes=self.max_bytes) as package:
            document = Document(package.document())
            if document.has_extract:
                self._extract(package, document)
        return document

    def plain_document(self, path: Path) -> Document:
        """A .tds on its own: it cannot bring an extract along."""
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise BadPackageError("The .tds file is too large.")
        document = Document(path.read_bytes())
        if document.has_extract:
            raise BadPackageError("The .tds file has an extract, but the extract's file was not published with it.")
        return document

    def hyper_file(self, path: Path) -> tuple[list[StoredTable], list[ForeignKey]]:
        """Everything in a bare extract file, and how its tables say that they refer to each other."""
        try:
            with self.hyper.open(path) as connection:
                tables = stored_tables(connection)
                keys = foreign_keys(connection, tables)
        except HyperException as error:
            raise BadPackageError("The extract is not a readable Hyper file.") from error
        if not tables:
            raise BadPackageError("The extract holds no table.")
        return tables, keys

    def _extract(self, package: Package, document: Document) -> None:
        member = package.member_at(document.extract_member)
        if member is None:
            raise BadPackageError(f"The extract {document.extract_member!r} named by the .tds is not in the package.")
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="check.") as folder:
            copy = Path(folder) / "extract.hyper"
            package.extract_to(member, copy)
            try:
                with self.hyper.open(copy) as connection:
                    _check_tables(connection, document)
                    _check_object_graph(connection, document)
                    _check_increment(connection, document, beyond_data=self.increment_beyond_data)
            except HyperException as error:
                raise BadPackageError(f"The extract {member!r} is not a readable Hyper file.") from error


def _check_tables(connection: Any, document: Document) -> None:
    tables = document.extract_tables()
    if not tables:
        raise BadPackageError("The .tds has an extract but names no table in it.")
    for schema, table, name in tables:
        columns = columns_of(connection, schema, table)
        if columns is None:
            raise BadPackageError(f"The extract has no table [{schema}].[{table}], which the .tds names.")
        described = [column for column, _ in document.extract_records(table, name)]
        if not document.is_bare_extract:
            _check_columns(StoredTable(schema, table, tuple(columns)), described)
    known = {name for _, table, relation in tables for name in (table, relation)}
    if strangers := sorted(document.record_parents - known):
        raise BadPackageError(f"The .tds describes columns of extract tables it does not name: {strangers}.")


def _check_columns(table: StoredTable, described: Sequence[str]) -> None:
    if sorted(described) != sorted(table.columns):
        odd = sorted(set(described) ^ set(table.columns))
        raise BadPackageError(f"The columns of {table.title} are not those the .tds describes: {odd}.")


def _check_object_graph(connection: Any, document: Document) -> None:
    """Several logical tables: each has its own table and columns in the Hyper file, and relationships hold them together."""
    graph = document.object_graph
    if len(graph.objects) < 2:
        return
    graph.check_ids()
    context = "" if document.is_live_to_hyper else "extract"
    if without := [entry.caption for entry in graph.objects if context not in entry.relations]:
        raise BadPackageError(f"Logical tables of the .tds are not in its extract: {without}.")
    relations = {entry.id: entry.relations[context] for entry in graph.objects}
    _check_stored_objects(connection, document, relations)
    columns = document.recorded_columns()
    graph.check_relationships(owners_of([(column.local_name, column.object_id) for column in columns]))
    if document.increment.key and document.increment_table() is None:
        raise BadPackageError(
            f"The increment key {document.increment.key} is no column of the logical table {document.increment_object!r}."
        )
    mapped = document.mapped_columns()
    if mapped is not None and mapped != {column.local_name: (column.parent, column.name) for column in columns}:
        raise BadPackageError("The list of columns (cols) beside the extract's columns is not theirs.")


def _check_stored_objects(connection: Any, document: Document, relations: Mapping[str, Any]) -> None:
    """`relations` has each object's relation in the Hyper file by the object's id."""
    names = {object_id: stored_tables_of(relation) for object_id, relation in relations.items()}
    places = sorted(place for tables in names.values() for place in tables)
    if places != sorted(document.collected_tables()):
        raise BadPackageError(
            "The collection of tables beside the extract's columns is not that of the logical tables."
        )
    stored = {table.place: table for table in stored_tables(connection)}
    if strangers := sorted(stored[place].title for place in set(stored) - set(places)):
        raise BadPackageError(f"The extract has tables that the .tds does not name: {strangers}.")
    for object_id, tables in names.items():
        for place, name in tables.items():
            own = [column for column in document.recorded_columns() if column.parent in (place[1], name)]
            if any(column.object_id != object_id for column in own):
                raise BadPackageError(f"Columns of {stored[place].title} do not say that they belong to {object_id}.")
            _check_columns(stored[place], [column.name for column in own])


def _check_increment(connection: Any, document: Document, *, beyond_data: bool) -> None:
    """A last increment value beyond the data would make every later increment skip rows in silence."""
    increment = document.increment
    if not increment.key or increment.last_value in (None, NO_VALUE):
        return
    literal = sql_literal(increment.last_value or "")
    if literal is None:
        raise BadPackageError(
            f"The increment value {increment.last_value!r} is neither a date, a datetime nor an integer."
        )
    for schema, table, name in document.extract_tables():
        columns = {local: column for column, local in document.extract_records(table, name)}
        if increment.key in columns:
            try:
                reached = reaches(connection, schema, table, columns[increment.key], literal)
            except HyperException as error:
                raise BadPackageError(
                    f"The increment value {increment.last_value} does not fit {increment.key}."
                ) from error
            if not reached and not beyond_data:
                raise BadPackageError(
                    f"The increment value {increment.last_value} is beyond the data of {increment.key}."
                )
            return
    raise BadPackageError(f"The increment key {increment.key} is not a column of the extract.")
