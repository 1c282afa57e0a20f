"""The logical tables of a .tds and the relationships between them, as Tableau Desktop draws them since 2020.2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.package.document import (
    Document,
    LiveRelation,
    MetadataRecord,
    read_relation,
    schema_and_table,
    unbracket,
)
from tir_dagster.hyper.package.xmltext import (
    UnreadableXmlError,
    attribute,
    child,
    children,
    descendants,
    valid_children,
)

# Comparisons of a relationship, and what each is when its two sides change places.
_MIRRORED = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}


@dataclass(frozen=True)
class LogicalColumn:
    """A column by the local name that formulas use, by its name in the source, and by its name in the Hyper file."""

    local_name: str
    source: str | None
    stored: str | None


@dataclass(frozen=True)
class LogicalTable:
    """One box of Tableau's data model.

    `source` is the table that it reads, by as many of database, schema and name as the document knows; it is empty for
    custom SQL, for a join inside the box, and where the document has no live side. `stored` is schema and name of its
    table in the Hyper file, suffix included; None where it has none.
    """

    id: str
    caption: str
    relation: LiveRelation | None
    source: tuple[str, ...]
    stored: tuple[str, str] | None
    columns: tuple[LogicalColumn, ...]

    @property
    def shown(self) -> str:
        """How messages name it: `Orders, which reads PUBLIC.ORDERS`."""
        if self.source:
            reads = ".".join(filter(None, self.source))
        elif self.relation is not None:
            reads = "custom SQL" if self.relation.kind == "text" else "several tables"
        else:
            return self.caption
        return f"{self.caption}, which reads {reads}"


@dataclass(frozen=True)
class EndPoint:
    """One side of a relationship, with its two performance options.

    `unique` is the cardinality One: no value of its columns comes twice. `every_row_matches` is the referential
    integrity "All Records Match": each of its rows has a row on the other side. Both are off unless people set them.
    """

    table: str
    unique: bool = False
    every_row_matches: bool = False


@dataclass(frozen=True)
class Comparison:
    """A condition of a relationship: local names, or formulas where people related calculations."""

    operator: str
    first: str
    second: str


@dataclass(frozen=True)
class Relationship:
    """A line between two logical tables. `other` is what the condition has besides comparisons joined by AND."""

    first: EndPoint
    second: EndPoint
    comparisons: tuple[Comparison, ...]
    other: str = ""

    @property
    def cardinality(self) -> str:
        return cardinality(self.first.unique, self.second.unique)

    def turned(self) -> Relationship:
        """The same line, from its second table to its first."""
        comparisons = tuple(_turned(comparison) for comparison in self.comparisons)
        return replace(self, first=self.second, second=self.first, comparisons=comparisons)


def cardinality(first_unique: bool, second_unique: bool) -> str:
    """Return `many_to_one` and so on, as a spec writes it."""
    return f"{'one' if first_unique else 'many'}_to_{'one' if second_unique else 'many'}"


@dataclass(frozen=True)
class ObjectModel:
    """All logical tables of a datasource and their relationships."""

    tables: tuple[LogicalTable, ...]
    relationships: tuple[Relationship, ...]


def read_object_model(document: Document | bytes, *, name: str = "datasource") -> ObjectModel:
    """Read the object graph; a document without one has a logical table for each table of its extract.

    Raise ExtractError for text that is no datasource, and for a graph that contradicts itself. `name` is
    what messages call the datasource.
    """
    try:
        document = document if isinstance(document, Document) else Document(document)
        if not document.is_datasource:
            raise UnreadableXmlError("it does not describe a datasource")
    except UnreadableXmlError as error:
        raise _refused(name, [str(error)]) from error
    graph = next(iter(valid_children(document.root, "object-graph")), None)
    objects = [element for parent in valid_children(graph, "objects") for element in valid_children(parent, "object")]
    if graph is None or not objects:
        return ObjectModel(tuple(_tables_of_the_extract(document)), ())
    tables = tuple(_Reader(document).tables(objects))
    lines = [
        element
        for parent in valid_children(graph, "relationships")
        for element in valid_children(parent, "relationship")
    ]
    model = ObjectModel(tables, tuple(_relationship(element) for element in lines))
    if problems := list(_contradictions(model)):
        raise _refused(name, problems)
    owners = {column.local_name: table.id for table in tables for column in table.columns}
    return replace(model, relationships=tuple(_oriented(line, owners) for line in model.relationships))


def _refused(name: str, problems: Sequence[str]) -> ExtractError:
    return ExtractError(
        f"The document of the {name} cannot be used: {'; '.join(problems)}. Nothing was touched. "
        "Download it again, or open it with Tableau Desktop, save it and publish it anew."
    )


def _tables_of_the_extract(document: Document) -> Iterator[LogicalTable]:
    """What a document shows that was made before 2020.2, or by the server for a published Hyper file."""
    if document.data is None:
        return
    live_records, stored_records = _records(document)
    sources = {record.local_name: record.remote_name for record in live_records}
    stored_tables, relation = document.extract_tables(), document.relation()
    if relation is not None and len(stored_tables) > 1:
        # The tables of a join, stored one by one.
        relation = LiveRelation("other", "")
    for schema, table in stored_tables:
        columns = tuple(
            LogicalColumn(record.local_name, sources.get(record.local_name), record.remote_name)
            for record in stored_records
            if record.parent == table
        )
        yield LogicalTable(table, table, relation, relation.table if relation else (), (schema, table), columns)


def _records(document: Document) -> tuple[tuple[MetadataRecord, ...], tuple[MetadataRecord, ...]]:
    """The columns of the live side and of the extract."""
    if _is_only_hyper(document):
        return (), document.records("live")
    return document.records("live"), document.records("extract")


def _is_only_hyper(document: Document) -> bool:
    """Whether this is a published .hyper file, which has no extract beside its live side: it is both."""
    return document.extract is None and document.data is not None


class _Reader:
    """What all objects of a document share: its columns by object, its connections, its extract's relations."""

    def __init__(self, document: Document) -> None:
        live = child(document.root, "connection")
        self.places = {
            attribute(named, "name") or "": _place(child(named, "connection"))
            for named in descendants(live, "named-connection")
        }
        self.only_hyper = _is_only_hyper(document)
        self.live, self.stored = _records(document)
        # By relation, the column of each local name.
        self.mapped: dict[str, dict[str, str]] = {}
        for entry in (entry for columns in children(live, "cols") for entry in children(columns, "map")):
            *relation, column = unbracket(attribute(entry, "value")) or ("",)
            self.mapped.setdefault(".".join(relation), {})[attribute(entry, "key") or ""] = column
        self.extract_relations = {
            attribute(relation, "name") or "": schema_and_table(attribute(relation, "table"))
            for relation in descendants(document.data, "relation")
            if attribute(relation, "table")
        }

    def tables(self, objects: Sequence[Any]) -> Iterator[LogicalTable]:
        live_of, stored_of = (_grouped(records, attrgetter("object_id")) for records in (self.live, self.stored))
        live_in, stored_in = (_grouped(records, attrgetter("parent")) for records in (self.live, self.stored))
        for element in objects:
            object_id = attribute(element, "id") or ""
            live_element = None if self.only_hyper else _relation_in(element, "")
            relation = None if live_element is None else read_relation(live_element)
            extract_element = _relation_in(element, "" if self.only_hyper else "extract")
            stored_here = stored_of.get(object_id, [])
            if extract_element is not None and attribute(extract_element, "table"):
                stored: tuple[str, str] | None = schema_and_table(attribute(extract_element, "table"))
            else:
                stored = self._stored_by(stored_here)
            live_here = live_of.get(object_id) or live_in.get(relation.name if relation else "", [])
            if not stored_here and stored is not None:
                stored_here = stored_in.get(stored[1], [])
            name = attribute(extract_element if self.only_hyper else live_element, "name")
            yield LogicalTable(
                id=object_id,
                caption=attribute(element, "caption") or object_id,
                relation=relation,
                source=self._source(relation, attribute(live_element, "connection") or ""),
                stored=stored,
                columns=tuple(self._columns(live_here, stored_here, name)),
            )

    def _stored_by(self, records: Sequence[MetadataRecord]) -> tuple[str, str] | None:
        """The table that the object's columns name as theirs, where the object names none."""
        parents = {record.parent for record in records}
        return self.extract_relations.get(parents.pop()) if len(parents) == 1 else None

    def _source(self, relation: LiveRelation | None, connection: str) -> tuple[str, ...]:
        if relation is None or relation.kind != "table" or not relation.table:
            return ()
        places = self.places
        place = places.get(connection) or (next(iter(places.values())) if len(places) == 1 else ())
        return (*place[: 3 - len(relation.table)], *relation.table)[-3:]

    def _columns(
        self, live: Sequence[MetadataRecord], stored: Sequence[MetadataRecord], relation_name: str | None
    ) -> Iterator[LogicalColumn]:
        sources = {record.local_name: record.remote_name for record in live}
        names = {record.local_name: record.remote_name for record in stored}
        for local_name, column in self.mapped.get(relation_name or "", {}).items():
            (names if self.only_hyper else sources).setdefault(local_name, column)
        for local_name in dict.fromkeys([*sources, *names]):
            yield LogicalColumn(local_name, sources.get(local_name), names.get(local_name))


def _place(connection: Any) -> tuple[str, ...]:
    """Database and schema that a connection reads from unless a relation says otherwise."""
    return (attribute(connection, "dbname") or "", attribute(connection, "schema") or "")


def _grouped(
    records: Sequence[MetadataRecord], key: Callable[[MetadataRecord], str]
) -> dict[str, list[MetadataRecord]]:
    groups: dict[str, list[MetadataRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _relation_in(element: Any, context: str) -> Any:
    """The object's relation on the live side (context '') or in the extract."""
    for properties in valid_children(element, "properties"):
        if (attribute(properties, "context") or "") == context:
            return next(iter(valid_children(properties, "relation")), None)
    return None


def _relationship(element: Any) -> Relationship:
    ends = [
        _end_point(next(iter(valid_children(element, f"{place}-end-point")), None)) for place in ("first", "second")
    ]
    comparisons: list[Comparison] = []
    others: list[str] = []
    for expression in valid_children(element, "expression"):
        _collect(expression, comparisons, others)
    return Relationship(ends[0], ends[1], tuple(comparisons), " AND ".join(others))


def _end_point(element: Any) -> EndPoint:
    return EndPoint(
        table=attribute(element, "object-id") or "",
        unique=_option(element, "unique-key"),
        every_row_matches=_option(element, "guaranteed-value"),
    )


def _option(element: Any, name: str) -> bool:
    """A performance option: what people chose, else what Tableau read from the database's constraints."""
    value = attribute(element, name) or attribute(element, f"is-db-set-{name}") or ""
    return value.lower() == "true"


def _collect(expression: Any, comparisons: list[Comparison], others: list[str]) -> None:
    operator, parts = attribute(expression, "op") or "", children(expression, "expression")
    if operator.upper() == "AND":
        for part in parts:
            _collect(part, comparisons, others)
    elif operator in _MIRRORED and len(parts) == 2:
        comparisons.append(Comparison(operator, _written(parts[0]), _written(parts[1])))
    else:
        others.append(_written(expression))


def _written(expression: Any) -> str:
    operator, parts = attribute(expression, "op") or "", children(expression, "expression")
    return f"{operator}({', '.join(_written(part) for part in parts)})" if parts else operator


def _turned(comparison: Comparison) -> Comparison:
    return Comparison(_MIRRORED[comparison.operator], comparison.second, comparison.first)


def _oriented(line: Relationship, owners: Mapping[str, str]) -> Relationship:
    """Each comparison with the first table's column first, whichever way it was written; `owners` says whose a column is."""
    comparisons = tuple(
        _turned(comparison)
        if owners.get(comparison.first) == line.second.table or owners.get(comparison.second) == line.first.table
        else comparison
        for comparison in line.comparisons
    )
    return replace(line, comparisons=comparisons)


def _contradictions(model: ObjectModel) -> Iterator[str]:
    ids = Counter(table.id for table in model.tables)
    for object_id, number in ids.items():
        if not object_id:
            yield "one of its logical tables has no id"
        elif number > 1:
            yield f"{number} of its logical tables have the id {object_id}"
    places = Counter(table.stored for table in model.tables if table.stored is not None)
    for place, number in places.items():
        if number > 1:
            yield f"{number} of its logical tables say that they are stored in {'.'.join(place)}"
    for line in model.relationships:
        for end in (line.first, line.second):
            if end.table not in ids:
                yield f"a relationship leads to the logical table {end.table or 'without an id'}, which it does not have"
        if line.first.table == line.second.table:
            yield f"a relationship leads from the logical table {line.first.table} to itself"
