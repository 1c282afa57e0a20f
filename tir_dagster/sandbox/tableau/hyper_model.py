"""The document that the server writes for a plain .hyper file; its relationships are the file's declared foreign keys.

Tableau reads them since 2021.4 (REST 3.14), and only where they make a star: one table refers to others, and is itself
referred to by none. Keys in Hyper are assumed, never checked.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.xmltree import child, new_tree, serialise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tir_dagster.sandbox.tableau.extracts import ForeignKey, StoredTable

EXTRACT_MEMBER = "Data/Extracts/datasource.hyper"
_CONNECTION = "hyper.0"


class NoStarError(BadPackageError):
    """The tables of the file are not related as a star, in Tableau's words."""

    def __init__(self) -> None:
        words = "Could not make a data source from the given Hyper file: it must contain exactly one fact table."
        super().__init__(f"{words} (0x5CE10192: {words})")


def star(tables: Sequence[StoredTable], keys: Sequence[ForeignKey]) -> list[StoredTable]:
    """The tables, the one that refers to others first; an error where the keys do not make one star of them.

    Tableau's own rule is known by its message only. Here a table may refer to one that refers to a third, but every
    table other than the first is referred to by exactly one, once: data models of that version have no other shape.
    """
    if len(tables) == 1:
        return list(tables)
    if len({table.schema for table in tables}) > 1:
        raise BadPackageError(f"The extract has tables in several schemas: {sorted(table.title for table in tables)}.")
    referred = {key.other.place for key in keys}
    facts = [table for table in tables if table.place not in referred]
    if len(facts) != 1:
        raise NoStarError
    ordered = [facts[0]]
    for table in ordered:
        for key in keys:
            if key.table.place == table.place:
                if any(key.other.place == known.place for known in ordered):
                    raise BadPackageError(f"The extract's foreign keys lead to {key.other.title} in more than one way.")
                ordered.append(key.other)
    if len(ordered) < len(tables):
        apart = sorted({table.title for table in tables} - {table.title for table in ordered})
        raise BadPackageError(f"The extract's foreign keys do not relate {facts[0].title} to {apart}.")
    return ordered


@dataclass(frozen=True)
class _Logical:
    """A table of the data model: its place in the file, its id, and its columns' names in formulas, in brackets."""

    stored: StoredTable
    object_id: str
    local_names: dict[str, str]

    def relation(self, parent: Any) -> None:
        place = f"[{self.stored.schema}].[{self.stored.name}]"
        child(parent, "relation", connection=_CONNECTION, name=self.stored.name, table=place, type="table")


def document_of_hyper_file(name: str, tables: Sequence[StoredTable], keys: Sequence[ForeignKey]) -> bytes:
    """A connection to the file and nothing to refresh it from; of several tables also their relationships."""
    logical = list(_logical(star(tables, keys)))
    root = new_tree("datasource")
    for key, value in (("formatted-name", name), ("inline", "true"), ("version", "18.1")):
        root.set(key, value)
    federated = child(root, "connection", {"class": "federated"})
    named = child(child(federated, "named-connections"), "named-connection", caption=name, name=_CONNECTION)
    child(
        named,
        "connection",
        {
            "authentication": "auth-none",
            "class": "hyper",
            "dbname": EXTRACT_MEMBER,
            "default-settings": "yes",
            "server": "",
            "username": "tableau_internal_user",
        },
    )
    if len(logical) == 1:
        logical[0].relation(federated)
    else:
        _collection(federated, logical)
    records = child(federated, "metadata-records")
    for table in logical:
        for column, local_name in table.local_names.items():
            record = child(records, "metadata-record", {"class": "column"})
            for tag, value in (
                ("remote-name", column),
                ("local-name", local_name),
                ("parent-name", f"[{table.stored.name}]"),
                ("remote-alias", column),
                *((("object-id", f"[{table.object_id}]"),) if len(logical) > 1 else ()),
            ):
                child(record, tag).text = value
    if len(logical) > 1:
        _object_graph(root, logical, keys)
    return serialise(root, pretty=True)


def _logical(tables: Iterable[StoredTable]) -> Iterator[_Logical]:
    """The first table that has a column's name keeps it; in the others it is `NAME (TABLE)`."""
    taken: set[str] = set()
    for table in tables:
        names = {column: f"[{column} ({table.name})]" if column in taken else f"[{column}]" for column in table.columns}
        taken |= set(table.columns)
        yield _Logical(table, f"{table.name}_{uuid.uuid4().hex.upper()}", names)


def _collection(federated: Any, tables: Sequence[_Logical]) -> None:
    collection = child(federated, "relation", type="collection")
    for table in tables:
        table.relation(collection)
    places = {
        local_name: f"[{table.stored.name}].[{column}]"
        for table in tables
        for column, local_name in table.local_names.items()
    }
    columns = child(federated, "cols")
    for local_name, place in sorted(places.items()):
        child(columns, "map", key=local_name, value=place)


def _object_graph(root: Any, tables: Sequence[_Logical], keys: Sequence[ForeignKey]) -> None:
    for table in tables:
        child(
            root,
            "column",
            caption=table.stored.name,
            datatype="table",
            name=f"[__tableau_internal_object_id__].[{table.object_id}]",
            role="measure",
            type="quantitative",
        )
    graph = child(root, "object-graph")
    objects = child(graph, "objects")
    for table in tables:
        entry = child(objects, "object", caption=table.stored.name, id=table.object_id)
        table.relation(child(entry, "properties", context=""))
    relationships = child(graph, "relationships")
    by_place = {table.stored.place: table for table in tables}
    for key in keys:
        entry = child(relationships, "relationship")
        sides = (by_place[key.table.place], by_place[key.other.place])
        conditions = child(entry, "expression", op="AND") if len(key.columns) > 1 else entry
        for pair in zip(key.columns, key.other_columns, strict=True):
            condition = child(conditions, "expression", op="=")
            for side, column in zip(sides, pair, strict=True):
                child(condition, "expression", op=side.local_names[column])
        child(entry, "first-end-point", {"object-id": sides[0].object_id})
        child(entry, "second-end-point", {"object-id": sides[1].object_id})
