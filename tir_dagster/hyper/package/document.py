"""A datasource's .tds: its live side, its extract, the columns of both, and how the extract is refreshed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tir_dagster.hyper.package.xmltext import XmlText, attribute, bare, child, children, descendants, text_of

_BRACKETED = re.compile(r"\[((?:[^\]]|\]\])*)\]")
_AGGREGATED = ("aggregat", "rollup", "roll-up")
_ASKS_WHO = re.compile(
    r"\b(USERNAME|FULLNAME|USERDOMAIN|ISUSERNAME|ISFULLNAME|ISMEMBEROF|USERATTRIBUTE|USERATTRIBUTEINCLUDES)\s*\(",
    re.IGNORECASE,
)
# Texts, names of fields and comments of a formula.
_UNREAD = re.compile(r"\"[^\"]*\"|'[^']*'|\[[^\]]*\]|//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class MetadataRecord:
    """A column as one side of the document describes it; the local name, in brackets, is what both sides share."""

    remote_name: str
    local_name: str
    parent: str
    local_type: str
    # The logical table that it belongs to; older documents do not say.
    object_id: str = ""


@dataclass(frozen=True)
class RefreshEvent:
    """One refresh that filled the extract."""

    kind: str
    increment_value: str | None
    rows_inserted: str | None
    started: str | None


@dataclass(frozen=True)
class LiveConnection:
    """One connection of the live side; a package never holds its password."""

    kind: str
    server: str | None
    dbname: str | None
    schema: str | None
    username: str | None


@dataclass(frozen=True)
class LiveRelation:
    """What the live side reads: a table by its parts, a query's text, or something else, such as a join."""

    kind: Literal["table", "text", "other"]
    name: str
    table: tuple[str, ...] = ()
    sql: str | None = None


class Document:
    """A parsed .tds. It keeps every node and attribute it does not know."""

    def __init__(self, text: bytes) -> None:
        self.xml = XmlText(text)
        self.root = self.xml.root
        self.extract = child(self.root, "extract")

    @property
    def is_datasource(self) -> bool:
        return bare(self.root.tag) == "datasource"

    @property
    def data(self) -> Any:
        """The connection element of the extract's file, of a published .hyper file its only connection; else None."""
        if self.extract is not None and (attribute(self.extract, "enabled") or "true").lower() == "true":
            return child(self.extract, "connection")
        kinds = [connection.kind for connection in self.connections()]
        if kinds != ["hyper"]:
            return None
        return next(
            element for element in descendants(self.root, "connection") if attribute(element, "class") == "hyper"
        )

    @property
    def caption(self) -> str:
        """What people call it; a document of its own often has none, and its file's name serves."""
        return str(self._opened().caption or "")

    def connections(self) -> tuple[LiveConnection, ...]:
        return tuple(
            LiveConnection(
                connection.dbclass or "", connection.server, connection.dbname, connection.schema, connection.username
            )
            for connection in self._opened().connections
        )

    def _opened(self) -> Any:
        from tableaudocumentapi import Datasource

        return Datasource(self.root)

    def extract_tables(self) -> tuple[tuple[str, str], ...]:
        """(schema, table) of every table that the extract's relations name."""
        relations = [relation for relation in descendants(self.data, "relation") if attribute(relation, "table")]
        for part in descendants(self.root, "properties"):
            if attribute(part, "context") == "extract":
                relations += [relation for relation in descendants(part, "relation") if attribute(relation, "table")]
        if not relations:
            live = descendants(child(self.root, "connection"), "relation")
            relations = [relation for relation in live if attribute(relation, "table")]
        return tuple(dict.fromkeys(schema_and_table(attribute(relation, "table")) for relation in relations))

    def relation(self) -> LiveRelation | None:
        """The relation of the live side; in newer documents it stands in the object graph."""
        if self.extract is None:
            return None
        relations = [
            relation
            for part in descendants(self.root, "properties")
            if attribute(part, "context") == ""
            for relation in children(part, "relation")
        ] or children(child(self.root, "connection"), "relation")[:1]
        if len(relations) != 1:
            return (
                LiveRelation("other", ", ".join(attribute(element, "name") or "?" for element in relations))
                if relations
                else None
            )
        return read_relation(relations[0])

    def records(self, side: Literal["live", "extract"]) -> tuple[MetadataRecord, ...]:
        parent = self.data if side == "extract" else child(self.root, "connection")
        return tuple(
            MetadataRecord(
                remote_name=text_of(record, "remote-name"),
                local_name=text_of(record, "local-name"),
                parent="".join(unbracket(text_of(record, "parent-name"))[:1]),
                local_type=text_of(record, "local-type"),
                object_id="".join(unbracket(text_of(record, "object-id"))[:1]),
            )
            for record in children(child(parent, "metadata-records"), "metadata-record")
            if attribute(record, "class") == "column"
        )

    @property
    def refresh(self) -> Any:
        """The extract's own refresh element: the one with the events."""
        return None if self.extract is None else child(self.data, "refresh")

    def event_elements(self) -> list[Any]:
        return children(self.refresh, "refresh-event")

    def events(self) -> tuple[RefreshEvent, ...]:
        return tuple(
            RefreshEvent(
                kind=attribute(event, "refresh-type") or "",
                increment_value=attribute(event, "increment-value"),
                rows_inserted=attribute(event, "rows-inserted"),
                started=attribute(event, "timestamp-start"),
            )
            for event in self.event_elements()
        )

    def filters(self) -> tuple[str, ...]:
        """The columns of filters that decide which rows reach the extract.

        A filter of the data source by who is looking does not: nobody is, while an extract is filled. It is row-level security.
        """
        by_user = self._fields_by_user()
        elements = [
            filtered for filtered in children(self.root, "filter") if attribute(filtered, "column") not in by_user
        ]
        return tuple(
            attribute(element, "column") or "?" for element in (*elements, *descendants(self.extract, "filter"))
        )

    def _fields_by_user(self) -> set[str | None]:
        """The calculated fields whose formula asks who is looking."""
        formulas = {
            attribute(column, "name"): attribute(child(column, "calculation"), "formula") or ""
            for column in children(self.root, "column")
        }
        return {name for name, formula in formulas.items() if name and _ASKS_WHO.search(_UNREAD.sub(" ", formula))}

    def is_aggregated(self) -> bool:
        """Whether any attribute of the extract speaks of aggregation and does not deny it."""
        attributes = {} if self.extract is None else self.extract.attrib
        return any(
            any(word in bare(key) for word in _AGGREGATED) and str(value).lower() not in ("", "false", "none", "no")
            for key, value in attributes.items()
        )

    def row_limit(self) -> str | None:
        """How many rows the extract was limited to when it was made, or None."""
        count = attribute(self.extract, "count") or "-1"
        return None if count == "-1" else f"{count} {attribute(self.extract, 'units') or 'records'}"


def document_differences(before: Document, after: Document) -> tuple[str, ...]:
    """Return what differs besides what a refresh writes: the extract's update time, and its last event's value and rows."""
    old_nodes, new_nodes = list(_nodes(before)), list(_nodes(after))
    if len(old_nodes) != len(new_nodes):
        return (f"{len(new_nodes)} nodes instead of {len(old_nodes)}",)
    return tuple(
        f"the {name} in line {line}"
        for (name, line, old), (_, _, new) in zip(old_nodes, new_nodes, strict=True)
        if old != new
    )


def _nodes(document: Document) -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """Each element and comment: what messages call it, its line, and its content without what a refresh writes."""
    events, data = document.event_elements(), document.data
    for node in document.root.iter():
        written: tuple[str, ...] = ("update-time",) if node is data else ()
        if events and node is events[-1]:
            written = ("increment-value", "rows-inserted")
        attributes = [(key, value) for key, value in node.attrib.items() if bare(key) not in written]
        yield bare(node.tag) or "comment", node.sourceline or 0, (node.tag, node.text, node.tail, attributes)


def read_relation(element: Any) -> LiveRelation:
    """What one relation element reads; a join or union of tables is `other`."""
    name = attribute(element, "name") or ""
    match attribute(element, "type"):
        case "table":
            return LiveRelation("table", name, table=unbracket(attribute(element, "table")))
        case "text":
            # Tableau doubles angle brackets in custom SQL, because single ones enclose its parameters.
            return LiveRelation("text", name, sql=(element.text or "").replace("<<", "<").replace(">>", ">"))
        case _:
            return LiveRelation("other", name)


def unbracket(text: str | None) -> tuple[str, ...]:
    """`[SCHEMA].[TABLE]` as its parts."""
    return tuple(part.replace("]]", "]") for part in _BRACKETED.findall(text or ""))


def schema_and_table(text: str | None) -> tuple[str, str]:
    """`[Extract].[ORDERS_1A2B]` as its two parts."""
    parts = unbracket(text)
    return (parts[-2], parts[-1]) if len(parts) > 1 else ("Extract", parts[0] if parts else "")
