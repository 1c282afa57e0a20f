"""The tables that a spec declares, found among a document's logical tables and in the Hyper file, to the letter."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.package.object_model import LogicalTable, ObjectModel, Relationship
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import same_query

# What Tableau adds to the name of a table when it stores it: `ORDERS (PUBLIC.ORDERS)_4F2A…`.
_SUFFIX = re.compile(r"( \([^()]*\))?_[0-9A-Fa-f]{32}$")
Cardinality = Literal["many_to_one", "one_to_many", "one_to_one", "many_to_many"]


@dataclass(frozen=True)
class DeclaredTable:
    """A table of a spec: what it reads, and its columns there.

    `columns` are all that the source has, `needed` must be in the extract, and with `only` no others may be. A query's
    columns are all needed.
    """

    name: str
    columns: tuple[str, ...]
    source: TableName | None = None
    query: str | None = None
    needed: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.source or 'a query'})"


@dataclass(frozen=True)
class DeclaredRelationship:
    """A relationship of a spec: two declared tables, pairs of columns in their sources, and what its author promises.

    The datasource may promise less, which costs Tableau time only. If it promises more, Tableau may count rows twice or
    leave some out, and nobody would know: only what the spec promises is verified. None takes all promises as they are.
    """

    first: str
    second: str
    columns: tuple[tuple[str, str], ...]
    cardinality: Cardinality | None = None
    every_first_row_matches: bool | None = None
    every_second_row_matches: bool | None = None


@dataclass(frozen=True)
class PhysicalTable:
    """A table of the Hyper file with its columns."""

    schema: str
    name: str
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class MatchedTable:
    """A declared table in the datasource; `names` has the Hyper column of each source column."""

    name: str
    logical: LogicalTable
    physical: PhysicalTable
    names: Mapping[str, str]


@dataclass(frozen=True)
class Matches:
    """The tables that were found, by their declared names, and all that speaks against taking the datasource over."""

    tables: dict[str, MatchedTable]
    problems: tuple[str, ...]


def match_tables(
    declared: Sequence[DeclaredTable],
    model: ObjectModel,
    hyper_tables: Sequence[PhysicalTable],
    *,
    relationships: Sequence[DeclaredRelationship] = (),
    datasource: str = "datasource",
    also: Sequence[str] = (),
) -> dict[str, MatchedTable]:
    """Return each declared table's place in the datasource; raise DatasourceError with all differences at once.

    Without declared relationships the datasource's own are kept as people drew them; with some, it has just these. `also`
    are differences that the caller found, such as filters of the extract.
    """
    matches = find_matches(declared, model, hyper_tables, relationships=relationships)
    if problems := [*also, *matches.problems]:
        raise DatasourceError(
            f"The {datasource} does not show what the spec says: {'; '.join(problems)}. Nothing was touched. "
            "Change the spec, or change the datasource in Tableau and publish it again."
        )
    return matches.tables


def find_matches(
    declared: Sequence[DeclaredTable],
    model: ObjectModel,
    hyper_tables: Sequence[PhysicalTable],
    *,
    relationships: Sequence[DeclaredRelationship] = (),
) -> Matches:
    """The same without raising."""
    pairs, problems = _pair(declared, model)
    tables: dict[str, MatchedTable] = {}
    by_place = {(table.schema, table.name): table for table in hyper_tables}
    for table in declared:
        logical = pairs.get(table.name)
        if logical is None:
            continue
        problems += _other_source(table, logical)
        physical = by_place.get(logical.stored) if logical.stored else None
        if physical is None:
            problems.append(_not_stored(logical, hyper_tables))
            continue
        names = _names(logical, physical)
        problems += _columns(table, logical, physical, names)
        tables[table.name] = MatchedTable(table.name, logical, physical, names)
    problems += _unnamed(model, hyper_tables)
    if relationships:
        problems += _relationships(relationships, model, pairs)
    return Matches(tables, tuple(problems))


def _pair(declared: Sequence[DeclaredTable], model: ObjectModel) -> tuple[dict[str, LogicalTable], list[str]]:
    """Each declared table's logical table, by what both read, else by caption or name."""
    candidates = _candidates(declared, model)
    pairs: dict[str, LogicalTable] = {}
    problems: list[str] = []
    for table in declared:
        if len(candidates[table.name]) == 1:
            pairs[table.name] = candidates[table.name][0]
        elif candidates[table.name]:
            listed = " or ".join(logical.caption for logical in candidates[table.name])
            problems.append(
                f"the spec's table {table.shown} may be its logical table {listed}; name it in the spec as one of them"
            )
        else:
            problems.append(f"it has no logical table for the spec's table {table.shown}{_suggestion(table, model)}")
    # What may be one of several is told above; which of them is kept is open.
    open_ids = {logical.id for logicals in candidates.values() for logical in logicals}
    for logical in model.tables:
        takers = [name for name, taken in pairs.items() if taken.id == logical.id]
        if len(takers) > 1:
            problems.append(f"the spec's tables {' and '.join(takers)} are one logical table, {logical.shown}")
        elif logical.id not in open_ids:
            problems.append(f"no table of the spec keeps its logical table {logical.shown}")
    return pairs, problems


def _candidates(declared: Sequence[DeclaredTable], model: ObjectModel) -> dict[str, list[LogicalTable]]:
    """By declared name, the logical tables that it may be: those that read the same, else those that are called like it."""
    by_source = {table.name: _narrowed(table, _reading_the_same(table, model)) for table in declared}
    taken = {logical.id for logicals in by_source.values() for logical in logicals}
    left = [logical for logical in model.tables if logical.id not in taken]
    return {
        table.name: by_source[table.name]
        or [logical for logical in left if _plain(table.name) in _names_of(logical)]
        or [logical for logical in left if table.source and _plain(table.source.name) in _names_of(logical)]
        for table in declared
    }


def _reading_the_same(table: DeclaredTable, model: ObjectModel) -> list[LogicalTable]:
    return [logical for logical in model.tables if _reads_the_same(table, logical)]


def _narrowed(table: DeclaredTable, logicals: list[LogicalTable]) -> list[LogicalTable]:
    """Of several boxes over the same table, such as dates of orders and of shipments, those that are called like it."""
    called = [logical for logical in logicals if _plain(table.name) in _names_of(logical)]
    return called or logicals


def _reads_the_same(table: DeclaredTable, logical: LogicalTable) -> bool:
    if table.query is not None:
        relation = logical.relation
        return relation is not None and relation.kind == "text" and same_query(relation.sql or "", table.query)
    return table.source is not None and bool(logical.source) and _same_source(table.source, logical.source)


def _same_source(source: TableName, parts: Sequence[str]) -> bool:
    """Whether the parts that the document knows are those of the table."""
    known = (source.database, source.schema, source.name)[-len(parts) :]
    return all(not part or part.upper() == name.upper() for part, name in zip(parts, known, strict=True))


def _names_of(logical: LogicalTable) -> dict[str, str]:
    """All that a logical table is called, by its letters and digits only."""
    relation = logical.relation
    names = [logical.caption, relation.name if relation else "", *logical.source[-1:]]
    if relation is None and logical.stored:
        # Without a live side the name in the Hyper file is all there is.
        names += [logical.stored[1], _SUFFIX.sub("", logical.stored[1])]
    return {_plain(name): name for name in names if _plain(name)}


def _plain(name: str) -> str:
    """`Order Date` and `order_date` alike: names in a spec have no spaces."""
    return re.sub(r"[\W_]+", "", name).casefold()


def _suggestion(table: DeclaredTable, model: ObjectModel) -> str:
    known = {name: logical for logical in model.tables for name in _names_of(logical)}
    for name in (table.name, table.source.name if table.source else ""):
        if matches := difflib.get_close_matches(_plain(name), known, n=1):
            return f" (did you mean {known[matches[0]].shown}?)"
    listed = ", ".join(logical.caption for logical in model.tables) or "none"
    return f"; it has {listed}"


def _other_source(table: DeclaredTable, logical: LogicalTable) -> Iterator[str]:
    """Yield what a table reads that was found by its caption only."""
    relation = logical.relation
    if relation is None or _reads_the_same(table, logical):
        return
    subject = f"its logical table {logical.caption}"
    if relation.kind == "other":
        yield f"{subject} joins several tables; make the join a query of the spec, and custom SQL in Tableau"
    elif table.query is not None:
        if relation.kind == "text":
            yield f"the custom SQL of {subject} is not the query in the spec"
        else:
            yield f"{subject} reads {'.'.join(logical.source)}, and the spec's table {table.name} a query"
    elif relation.kind == "text":
        yield f"{subject} reads custom SQL, and the spec's table {table.name} the table {table.source}"
    else:
        yield f"{subject} reads {'.'.join(logical.source)}, and the spec's table {table.name} {table.source}"


def _not_stored(logical: LogicalTable, hyper_tables: Sequence[PhysicalTable]) -> str:
    listed = ", ".join(str(table) for table in hyper_tables) or "no table"
    place = f"its table {'.'.join(logical.stored)} is not" if logical.stored else "it has no table"
    return f"the logical table {logical.caption} cannot be kept: {place} in the Hyper file, which has {listed}"


def _unnamed(model: ObjectModel, hyper_tables: Sequence[PhysicalTable]) -> Iterator[str]:
    named = {table.stored for table in model.tables}
    for table in hyper_tables:
        if (table.schema, table.name) not in named:
            yield f"its Hyper file has the table {table}, which none of its logical tables names"


def _names(logical: LogicalTable, physical: PhysicalTable) -> dict[str, str]:
    """The Hyper column of each source column; where the document describes none, both have the same names."""
    names = {column.source: column.stored for column in logical.columns if column.source and column.stored}
    if names or logical.relation is not None:
        return names
    return {name: name for name in physical.columns}


def _columns(
    table: DeclaredTable, logical: LogicalTable, physical: PhysicalTable, names: Mapping[str, str]
) -> Iterator[str]:
    subject = f"its logical table {logical.caption}"
    known, here = set(table.columns), set(names)
    if unknown := sorted(here - known):
        yield f"{subject} has the columns {', '.join(unknown)}, which {table.source or 'the query'} does not have"
    needed = table.needed if table.query is None else table.columns
    if missing := sorted(set(needed) - here):
        yield f"{subject} lacks the columns {', '.join(missing)}, which the spec needs"
    if table.only and (more := sorted((here & known) - set(table.only))):
        yield f"{subject} also has the columns {', '.join(more)}, which the spec's table {table.name} leaves out"
    filled = set(names.values())
    stored = [column.stored for column in logical.columns if column.stored]
    if calculated := [name for name in stored if name not in filled]:
        yield f"{subject} stores calculated fields ({', '.join(calculated)})"
    if twice := [name for name, number in Counter(stored).items() if number > 1]:
        yield f"{subject} describes the columns {', '.join(twice)} of its Hyper file more than once"
    if absent := sorted(filled - set(physical.columns)):
        yield f"the table {physical} of its Hyper file lacks the columns {', '.join(absent)}, which its document describes"
    if bare := [name for name in physical.columns if name not in filled and name not in stored]:
        yield f"the table {physical} of its Hyper file has the columns {', '.join(bare)}, which its document does not describe"


def _relationships(
    declared: Sequence[DeclaredRelationship], model: ObjectModel, pairs: Mapping[str, LogicalTable]
) -> Iterator[str]:
    """Yield the relationships that only one side has, and those that differ."""
    lines: dict[frozenset[str], list[Relationship]] = {}
    for line in model.relationships:
        lines.setdefault(frozenset((line.first.table, line.second.table)), []).append(line)
    for relationship in declared:
        first, second = pairs.get(relationship.first), pairs.get(relationship.second)
        if first is None or second is None:
            # What has no logical table is told already.
            continue
        between = lines.get(frozenset((first.id, second.id)), [])
        if not between:
            yield f"it does not relate {first.caption} and {second.caption}, as the spec does"
            continue
        line = between.pop(0)
        yield from _differences(relationship, line if line.first.table == first.id else line.turned(), first, second)
    captions = {logical.id: logical.caption for logical in pairs.values()}
    for line in [line for between in lines.values() for line in between]:
        if line.first.table in captions and line.second.table in captions:
            names = _source_names(model.tables)
            yield (
                f"it relates {captions[line.first.table]} and {captions[line.second.table]} by {_condition(line, names)}, "
                "and the spec does not"
            )


def _source_names(tables: Sequence[LogicalTable]) -> dict[str, str]:
    """The column in the source of each local name; without a live side the stored one is called the same."""
    return {
        column.local_name: column.source or column.stored or column.local_name
        for table in tables
        for column in table.columns
    }


def _differences(
    relationship: DeclaredRelationship, line: Relationship, first: LogicalTable, second: LogicalTable
) -> Iterator[str]:
    between = f"{first.caption} and {second.caption}"
    names = _source_names((first, second))
    declared = Counter(("=", left, right) for left, right in relationship.columns)
    if line.other or Counter(_compared(line, names)) != declared:
        columns = " and ".join(f"{left} = {right}" for left, right in relationship.columns)
        yield f"it relates {between} by {_condition(line, names)}, and the spec by {columns}"
    if not _promised(relationship.cardinality, line):
        yield (
            f"the cardinality of {between} is {line.cardinality} there, which promises more than {relationship.cardinality} in the spec"
        )
    for promise, end, table in (
        (relationship.every_first_row_matches, line.first, first),
        (relationship.every_second_row_matches, line.second, second),
    ):
        if end.every_row_matches and promise is False:
            yield (
                f"the referential integrity of {between} says that all records of {table.caption} match, and the spec does not"
            )


def _promised(declared: Cardinality | None, line: Relationship) -> bool:
    """Whether the spec promises all that the datasource's cardinality does."""
    if declared is None:
        return True
    first, second = declared.split("_to_")
    return not (line.first.unique and first == "many") and not (line.second.unique and second == "many")


def _compared(line: Relationship, names: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Operators and columns by their names in the sources; a calculation as it is written."""
    return [
        (
            comparison.operator,
            names.get(comparison.first, comparison.first),
            names.get(comparison.second, comparison.second),
        )
        for comparison in line.comparisons
    ]


def _condition(line: Relationship, names: Mapping[str, str]) -> str:
    comparisons = [f"{left} {operator} {right}" for operator, left, right in _compared(line, names)]
    return " and ".join([*comparisons, *([line.other] if line.other else [])]) or "no columns"
