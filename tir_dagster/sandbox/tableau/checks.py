"""What a file must fulfil to be published: a readable document whose extract is there and tells the truth about itself."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tableauhyperapi import HyperException

from tir_dagster.sandbox.tableau.archive import MAX_DOCUMENT_BYTES, BadPackageError, Package
from tir_dagster.sandbox.tableau.document import NO_VALUE, Document
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
        if not document.is_bare_extract and sorted(described) != sorted(columns):
            odd = sorted(set(described) ^ set(columns))
            raise BadPackageError(f"The columns of [{schema}].[{table}] are not those the .tds describes: {odd}.")
    known = {name for _, table, relation in tables for name in (table, relation)}
    if strangers := sorted(document.record_parents - known):
        raise BadPackageError(f"The .tds describes columns of extract tables it does not name: {strangers}.")


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
