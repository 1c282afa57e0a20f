"""The object graph of a .tds: its logical tables, and the relationships that must hold them together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.xmltree import attribute, children, descendants, first

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Documents of 2024.2 and later may relate one table to several fact tables, and say so by this name.
_SHARED_DIMENSIONS = "ObjectModelSharedDimensions"


@dataclass(frozen=True)
class GraphObject:
    """One logical table: its id and its relation by context, '' for the live side and 'extract' for the extract."""

    id: str
    caption: str
    relations: Mapping[str, Any]


@dataclass(frozen=True)
class GraphLine:
    """A relationship: the ids at its ends, and the two operands of each of its comparisons."""

    ends: tuple[str, str]
    comparisons: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ObjectGraph:
    """All of a document's logical tables and relationships."""

    objects: tuple[GraphObject, ...]
    lines: tuple[GraphLine, ...]
    shares_dimensions: bool

    def check_ids(self) -> None:
        for object_id, number in Counter(entry.id for entry in self.objects).items():
            if number > 1 or not object_id:
                raise BadPackageError(f"{number} logical tables of the .tds have the id {object_id!r}.")

    def check_relationships(self, owners: Mapping[str, str]) -> None:
        """Refuse a graph that is not one piece, or relates what is not there; `owners` has each column's object by local name."""
        captions = {entry.id: entry.caption for entry in self.objects}
        joined = {object_id: object_id for object_id in captions}
        for line in self.lines:
            title = _check_line(line, captions, owners)
            one, other = (_piece(joined, end) for end in line.ends)
            if one == other and not self.shares_dimensions:
                raise BadPackageError(f"The relationship between {title} closes a circle.")
            joined[one] = other
        pieces = {_piece(joined, object_id) for object_id in captions}
        if len(pieces) > 1:
            apart = sorted(captions[object_id] for object_id in pieces)
            raise BadPackageError(f"The logical tables of the .tds are not all related: no way leads between {apart}.")


def read_object_graph(root: Any) -> ObjectGraph:
    graphs = list(children(root, "object-graph"))
    entries = [entry for graph in graphs for entry in descendants(graph, "object")]
    lines = [line for graph in graphs for line in descendants(graph, "relationship")]
    shared = any(_SHARED_DIMENSIONS in str(element.tag) for element in root.iter())
    return ObjectGraph(tuple(map(_object, entries)), tuple(map(_line, lines)), shared)


def _object(entry: Any) -> GraphObject:
    relations = {
        attribute(part, "context") or "": relation
        for part in children(entry, "properties")
        if (relation := first(part, "relation")) is not None
    }
    object_id = attribute(entry, "id") or ""
    return GraphObject(object_id, attribute(entry, "caption") or object_id, relations)


def _line(element: Any) -> GraphLine:
    ends = [first(element, f"{place}-end-point") for place in ("first", "second")]
    one, other = (attribute(end, "object-id") or "" if end is not None else "" for end in ends)
    comparisons = [
        tuple(attribute(operand, "op") or "" for operand in children(comparison, "expression"))
        for expression in children(element, "expression")
        for comparison in _comparisons(expression)
    ]
    return GraphLine((one, other), tuple(comparisons))


def _comparisons(expression: Any) -> Iterator[Any]:
    """The comparisons that AND joins."""
    if (attribute(expression, "op") or "").upper() != "AND":
        yield expression
        return
    for part in children(expression, "expression"):
        yield from _comparisons(part)


def _check_line(line: GraphLine, captions: Mapping[str, str], owners: Mapping[str, str]) -> str:
    """How messages name the line."""
    if strangers := [end for end in line.ends if end not in captions]:
        raise BadPackageError(f"A relationship of the .tds leads to {strangers[0]!r}, which is no logical table of it.")
    title = " and ".join(captions[end] for end in line.ends)
    if not line.comparisons or any(len(operands) != 2 for operands in line.comparisons):
        raise BadPackageError(f"The relationship between {title} compares no two columns.")
    for operands in line.comparisons:
        # A calculation is not looked into.
        plain = [operand for operand in operands if _is_column(operand)]
        if missing := [operand for operand in plain if operand not in owners]:
            raise BadPackageError(
                f"The relationship between {title} names the column {missing[0]}, which is not there."
            )
        sides = {owners[operand] for operand in plain}
        if not sides <= set(line.ends) or len(sides) < len(plain):
            raise BadPackageError(f"The relationship between {title} does not compare a column of each: {operands}.")
    return title


def _is_column(operand: str) -> bool:
    return operand.startswith("[") and operand.find("]") == len(operand) - 1


def _piece(joined: dict[str, str], object_id: str) -> str:
    """The object that stands for all that are related to this one so far."""
    while joined[object_id] != object_id:
        object_id = joined[object_id]
    return object_id


def owners_of(columns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Each local name's object; an error for a name that two columns have."""
    for local_name, number in Counter(local_name for local_name, _ in columns).items():
        if number > 1:
            raise BadPackageError(f"{number} columns of the .tds have the name {local_name}.")
    return dict(columns)
