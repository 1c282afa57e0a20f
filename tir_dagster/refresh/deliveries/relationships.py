"""The relationships between several tables of an extract: what Tableau can read, what the rows must keep, how they are declared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds

from tir_dagster.changes.change_set import ROWS, parts_of
from tir_dagster.errors import GuardError, SpecError
from tir_dagster.files import copy_file, need_space
from tir_dagster.hyper.hyperfile import ExtractTable, TableId
from tir_dagster.hyper.package.matching import (
    DeclaredRelationship,
    DeclaredTable,
    PhysicalTable,
    match_tables,
)
from tir_dagster.hyper.package.object_model import read_object_model
from tir_dagster.hyper.package.package import document_of, read_package
from tir_dagster.hyper.relations import Reference, count_repeated, count_without_partner, declare_keys
from tir_dagster.hyper.replace import ExtractShape, StagedChange
from tir_dagster.refresh.context import RefreshContext, remove, shapes_of
from tir_dagster.refresh.deliveries.agreement import row_limits
from tir_dagster.refresh.state.versions import Version
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.tables import Relationship


def referred_columns(spec: ExtractSpec) -> dict[str, tuple[str, ...]]:
    """Return the columns of each table that rows of others refer to, as the spec writes them."""
    return {one.refers_to: tuple(one.columns.values()) for one in spec.relationships}


def check_declarable(spec: ExtractSpec) -> None:
    """Raise unless Tableau finds the relationships in a Hyper file without a document around it.

    It reads them from primary and foreign keys: one table of facts, from which all others are reached, each by a key of its own.
    """
    problems = [
        f"{one.label} is many_to_many, and the keys of a Hyper file relate many rows to one"
        for one in spec.relationships
        if one.cardinality == "many_to_many"
    ]
    facts = [name for name in spec.parts if all(one.refers_to != name for one in spec.relationships)]
    if len(facts) != 1:
        problems.append(
            f"{' and '.join(facts) or 'no table'} would be tables of facts, which no other refers to; Tableau takes one"
        )
    referred: dict[str, frozenset[str]] = {}
    for one in spec.relationships:
        columns = frozenset(one.columns.values())
        if referred.setdefault(one.refers_to, columns) != columns:
            problems.append(f"{one.refers_to} is referred to by different columns, and a table has one primary key")
    if problems:
        raise SpecError(
            f"{spec.name}: relationships: {'; '.join(problems)}. Nothing was touched. Build the datasource in Tableau and publish it, "
            "then its own relationships are kept; or change the relationships in the spec."
        )


def check_related_columns(spec: ExtractSpec, columns: Mapping[str, Sequence[Column]], *, declared: bool = True) -> None:
    """Raise if a relationship names a column that its table does not show, or relates columns of different types.

    Types count where keys are `declared` in the file; in a datasource that people built, Tableau has taken them.
    """
    problems = []
    for at, one in enumerate(spec.relationships):
        for here, there in one.columns.items():
            left, right = _column(columns[one.table], here), _column(columns[one.refers_to], there)
            for table, name, column in ((one.table, here, left), (one.refers_to, there, right)):
                if column is None:
                    names = ", ".join(shown.name for shown in columns[table])
                    problems.append(
                        f"relationships[{at}].columns names {name}, which {table} does not have. It has {names}"
                    )
            if declared and left is not None and right is not None and left.hyper != right.hyper:
                problems.append(
                    f"relationships[{at}].columns relates {one.table}.{left.name} ({left.hyper}) to {one.refers_to}.{right.name} "
                    f"({right.hyper}): Tableau relates columns of one type. Cast one of them in a `query`"
                )
    if problems:
        raise SpecError(f"{spec.name}: {'. '.join(problems)}. Nothing was touched.")


def _column(columns: Sequence[Column], name: str) -> Column | None:
    by_name = {column.name: column for column in columns}
    return by_name.get(name) or by_name.get(name.upper())


@dataclass(frozen=True)
class TablePlace:
    """Where the datasource keeps a table: in the Hyper file, with the Hyper column of each source column."""

    id: TableId
    names: Mapping[str, str]


def match_document(
    spec: ExtractSpec,
    shell: Path,
    known: Mapping[str, Sequence[str]],
    *,
    datasource: str,
    tables: Sequence[ExtractTable],
) -> dict[str, TablePlace]:
    """Find the spec's tables in a datasource that people built; raise with all differences at once."""
    declared = [
        DeclaredTable(
            name,
            tuple(known[name]),
            TableName.parse(part.source) if part.query is None else None,
            part.query,
            needed=tuple(_written(needed, known[name]) for needed in _needed(spec, part)),
            only=tuple(_written(column, known[name]) for column in part.columns),
        )
        for name, part in spec.parts.items()
    ]
    lines = [
        DeclaredRelationship(
            one.table,
            one.refers_to,
            tuple(
                (_written(here, known[one.table]), _written(there, known[one.refers_to]))
                for here, there in one.columns.items()
            ),
            one.cardinality,
            every_first_row_matches=one.integrity == "all",
        )
        for one in spec.relationships
    ]
    matched = match_tables(
        declared,
        read_object_model(document_of(shell), name=datasource),
        [PhysicalTable(table.schema, table.name, tuple(column.name for column in table.columns)) for table in tables],
        relationships=lines,
        datasource=datasource,
        also=list(row_limits(read_package(shell))),
    )
    return {name: TablePlace((one.physical.schema, one.physical.name), one.names) for name, one in matched.items()}


def _needed(spec: ExtractSpec, part: ExtractSpec) -> Iterator[str]:
    """Yield the columns that a refresh of the table works with; a query names its own."""
    if part.query is not None:
        return
    yield from part.row_key
    if part.slices.column:
        yield part.slices.column
    yield from part.columns
    for one in spec.relationships:
        yield from one.columns.keys() if one.table == part.table else ()
        yield from one.columns.values() if one.refers_to == part.table else ()


def _written(name: str, known: Sequence[str]) -> str:
    return name if name in known else name.upper()


# What the rows must keep


def _references(spec: ExtractSpec, shapes: Mapping[str, ExtractShape]) -> Iterator[tuple[Relationship, Reference]]:
    """Yield each relationship with its columns in the Hyper file."""
    for one in spec.relationships:
        table, referred = shapes[one.table], shapes[one.refers_to]
        assert table.table is not None, "one of several"
        assert referred.table is not None, "one of several"
        here = tuple(_stored(table, name) for name in one.columns)
        there = tuple(_stored(referred, name) for name in one.columns.values())
        yield one, Reference(table.table, here, referred.table, there)


def _stored(shape: ExtractShape, name: str) -> str:
    column = _column(shape.columns, name)
    assert column is not None, "checked in the survey"
    return shape.names.get(column.name, column.name)


def check_staged_nulls(spec: ExtractSpec, changes: Mapping[str, StagedChange]) -> None:
    """Raise if fresh rows have a NULL where rows of other tables refer to them: a key of a Hyper file holds none."""
    for table, change in changes.items():
        files = parts_of(change.folder / ROWS)
        for name in sorted(change.shape.not_null) if files else ():
            nulls = ds.dataset([str(file) for file in files]).count_rows(filter=pc.field(name).is_null())
            if nulls:
                raise GuardError(
                    f"{spec.name}: {nulls:,} rows of {table} have no {name}, by which other tables refer to it, and Tableau's keys hold "
                    f"no NULL. Nothing was published. Give them a value in the source, or leave them out in a `query`."
                )


def check_references(
    spec: ExtractSpec, extract: Path, shapes: Mapping[str, ExtractShape], changed: Collection[str], *, declared: bool
) -> tuple[str, ...]:
    """Compare the rows with what the relationships promise, where tables changed; return warnings.

    Raise if keys are `declared` in the file and not unique: Tableau would believe them, and show wrong numbers. In a document
    that people built, their settings count.
    """
    warnings = []
    for one, reference in _references(spec, shapes):
        if one.refers_to in changed and one.cardinality != "many_to_many":
            repeated = count_repeated(extract, reference)
            names = ", ".join(reference.referred)
            if repeated and declared:
                raise GuardError(
                    f"{spec.name}: {repeated:,} values of {names} are in several rows of {one.refers_to}, and {one.table} refers to it by "
                    f"them as {one.cardinality}: Tableau would count rows twice. Nothing was published. Repair the source, or make the rows "
                    "unique in a `query`."
                )
            if repeated:
                warnings.append(
                    f"{repeated:,} values of {names} are in several rows of {one.refers_to}, which {one.table} refers to: where the "
                    "datasource says that they are unique, Tableau shows wrong numbers."
                )
        if one.integrity == "all" and {one.table, one.refers_to} & set(changed):
            lonely = count_without_partner(extract, reference)
            if lonely:
                warnings.append(
                    f"{lonely:,} rows of {one.table} refer to rows that {one.refers_to} does not have, though {one.label} says "
                    "`integrity: all`: Tableau may leave them out."
                )
    return tuple(warnings)


def check_restored(
    spec: ExtractSpec, extract: Path, shapes: Mapping[str, ExtractShape], *, declared: bool
) -> tuple[str, ...]:
    """The same for an older version, which may have been made for other relationships than those of now; return warnings."""
    check_related_columns(spec, {table: shape.columns for table, shape in shapes.items()})
    for one in spec.relationships if declared else ():
        shape = shapes[one.refers_to]
        referred = {column.name for name in one.columns.values() if (column := _column(shape.columns, name))}
        if not referred <= shape.not_null:
            raise GuardError(
                f"{spec.name}: the version was made when no rows referred to {', '.join(sorted(referred))} of {one.refers_to}, so its file"
                f" cannot declare {one.label}. Nothing was published. Go back to the relationships of then and run a full refresh."
            )
    return check_references(spec, extract, shapes, list(shapes), declared=declared)


@contextmanager
def related_file(context: RefreshContext, version: Version, file: AbstractContextManager[Path]) -> Iterator[Path]:
    """Give the file to publish: for several tables without a document around them, a copy that declares their keys."""
    with file as hyper:
        if not context.spec.tables or version.shell.is_file():
            yield hyper
            return
        folder = context.work / "related"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "related.hyper"
        try:
            need_space(folder, hyper.stat().st_size)
            copy_file(hyper, target)
            declare_keys(target, [reference for _, reference in _references(context.spec, shapes_of(version))])
            yield target
        finally:
            remove(folder)
