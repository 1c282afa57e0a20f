"""A datasource's .tds: its connections, its tables on both sides, its increments; edits touch only the extract's own nodes."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.archive import BadPackageError
from tir_dagster.sandbox.tableau.object_graph import ObjectGraph, read_object_graph
from tir_dagster.sandbox.tableau.xmltree import (
    UnsafeXmlError,
    attribute,
    bare,
    child,
    children,
    descendants,
    first,
    parse,
    serialise,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tir_dagster.sandbox.tableau.columns import ExtractType

NO_VALUE = "%null%"
_BRACKETED = re.compile(r"\[((?:[^\]]|\]\])*)\]")


@dataclass(frozen=True)
class LiveConnection:
    """One named connection of the live side."""

    name: str
    kind: str
    server: str | None
    port: str | None
    dbname: str | None
    schema: str | None
    warehouse: str | None
    role: str | None
    username: str | None
    authentication: str | None


@dataclass(frozen=True)
class LogicalTable:
    """One logical table: the relation it is read from and the table of the extract that holds it."""

    source_name: str
    connection: str
    source_table: tuple[str, ...]
    custom_sql: str | None
    extract_schema: str
    extract_table: str
    extract_name: str
    # Empty where a document has no object graph.
    object_id: str = ""


@dataclass(frozen=True)
class Increment:
    """How the extract grows: the key's local name ('' for none) and the last event's literal (None without events)."""

    key: str
    enabled: bool
    last_value: str | None


@dataclass(frozen=True)
class RecordedColumn:
    """A column as the document describes it in the Hyper file: its name there, its local name in brackets, and whose it is."""

    name: str
    local_name: str
    parent: str
    object_id: str


@dataclass(frozen=True)
class ExtractColumn:
    """One column of an extract table: its name in Hyper, its local name in brackets, its type."""

    name: str
    local_name: str
    type: ExtractType


def unbracket(text: str | None) -> tuple[str, ...]:
    """`[SCHEMA].[TABLE]` as its parts."""
    return tuple(part.replace("]]", "]") for part in _BRACKETED.findall(text or ""))


class Document:
    """A parsed .tds."""

    def __init__(self, text: bytes) -> None:
        try:
            self._root = parse(text)
        except UnsafeXmlError as error:
            raise BadPackageError(f"The .tds file was refused: {error}.") from error
        if bare(self._root.tag) != "datasource":
            raise BadPackageError(f"The .tds file describes a {bare(self._root.tag)}, not a datasource.")

    def text(self) -> bytes:
        return serialise(self._root)

    def connections(self) -> list[LiveConnection]:
        """The live side's connections; of a datasource that is nothing but an extract, that extract."""
        connection = first(self._root, "connection")
        if connection is None:
            return []
        named = [
            (attribute(entry, "name") or "", inner)
            for entry in descendants(connection, "named-connection")
            if (inner := first(entry, "connection")) is not None
        ]
        return [_live_connection(name, element) for name, element in named or [("", connection)]]

    def source_tables(self) -> list[tuple[LiveConnection, tuple[str, ...]]]:
        """The tables that the live side names, each with its connection; what custom SQL reads is not among them."""
        named = {connection.name: connection for connection in self.connections()}
        found: dict[tuple[str, tuple[str, ...]], LiveConnection] = {}
        for relation in descendants(first(self._root, "connection"), "relation") if named else ():
            name, parts = attribute(relation, "connection") or "", unbracket(attribute(relation, "table"))
            connection = named.get(name) or (next(iter(named.values())) if len(named) == 1 else None)
            if attribute(relation, "type") == "table" and parts and connection is not None:
                found[name, parts] = connection
        return [(connection, parts) for (_, parts), connection in found.items()]

    @property
    def _extract(self) -> Any:
        extract = first(self._root, "extract")
        enabled = extract is not None and (attribute(extract, "enabled") or "true").lower() == "true"
        return first(extract, "connection") if enabled else None

    @property
    def has_extract(self) -> bool:
        return self._extract is not None or self.is_bare_extract

    @property
    def is_bare_extract(self) -> bool:
        """A published .hyper file: the data is there, but there is nothing to read it from again."""
        return [connection.kind for connection in self.connections()] == ["hyper"]

    @property
    def is_live_to_hyper(self) -> bool:
        """The Hyper file is the source itself, and not an extract of anything, not even of another Hyper file."""
        return self.is_bare_extract and first(self._root, "extract") is None

    @property
    def _data(self) -> Any:
        """The connection element that describes the Hyper file."""
        if self._extract is not None or not self.is_bare_extract:
            return self._extract
        return next(
            (element for element in descendants(self._root, "connection") if attribute(element, "class") == "hyper"),
            None,
        )

    @property
    def extract_member(self) -> str:
        """The path of the Hyper file in the package."""
        return attribute(self._data, "dbname") or ""

    def logical_tables(self) -> list[LogicalTable]:
        """Both sides of every logical table, from the object graph or, in older documents, from the plain pair."""
        tables = []
        for entry in descendants(self._root, "object"):
            sides = {
                attribute(part, "context") or "": first(part, "relation") for part in children(entry, "properties")
            }
            if sides.get("") is not None and _is_table(sides.get("extract")):
                tables.append(_logical_table(sides[""], sides["extract"], attribute(entry, "id") or ""))
        if tables:
            return tables
        live = first(first(self._root, "connection"), "relation")
        stored = first(self._extract, "relation") if self._extract is not None else None
        return [] if live is None or not _is_table(stored) else [_logical_table(live, stored)]

    @property
    def joins_stored_tables(self) -> bool:
        """Whether a logical table is kept as several physical ones, which are joined by those who read them."""
        relations = [entry.relations.get("extract") for entry in self.object_graph.objects] or [
            first(self._extract, "relation") if self._extract is not None else None
        ]
        return any(relation is not None and not _is_table(relation) for relation in relations)

    def extract_tables(self) -> list[tuple[str, str, str]]:
        """(schema, table, relation name) of every table the extract's relations name."""
        found: dict[tuple[str, str], str] = {
            (table.extract_schema, table.extract_table): table.extract_name for table in self.logical_tables()
        }
        if not found or self.joins_stored_tables:
            for relation in self._relations_of_data():
                schema, table = _two_parts(attribute(relation, "table"))
                found[schema, table] = attribute(relation, "name") or table
        return [(schema, table, name) for (schema, table), name in found.items()]

    def _relations_of_data(self) -> list[Any]:
        parents = (self._data, first(self._root, "connection"))
        for parent in parents:
            found = [element for element in (parent if parent is not None else ()) if bare(element.tag) == "relation"]
            tables = [leaf for element in found for leaf in element.iter() if attribute(leaf, "table")]
            if tables:
                return tables
        return []

    @property
    def object_graph(self) -> ObjectGraph:
        return read_object_graph(self._root)

    def recorded_columns(self) -> list[RecordedColumn]:
        """All columns of the Hyper file."""
        holder = self._extract if self._extract is not None else first(self._root, "connection")
        return [
            RecordedColumn(
                name=text_of(record, "remote-name") or "",
                local_name=text_of(record, "local-name") or "",
                parent=_parent(record),
                object_id="".join(unbracket(text_of(record, "object-id"))[:1]),
            )
            for record in self._records(holder)
        ]

    def collected_tables(self) -> list[tuple[str, str]]:
        """(schema, table) of what the collection of the Hyper file's connection names, in its order."""
        holder = self._extract if self._extract is not None else first(self._root, "connection")
        return [
            place
            for collection in (children(holder, "relation") if holder is not None else ())
            if attribute(collection, "type") == "collection"
            for place in stored_tables_of(collection)
        ]

    def mapped_columns(self) -> dict[str, tuple[str, ...]] | None:
        """Table and column of each local name, from the list beside the records of the Hyper file; None without one."""
        holder = self._extract if self._extract is not None else first(self._root, "connection")
        columns = first(holder, "cols") if holder is not None else None
        if columns is None:
            return None
        return {
            attribute(entry, "key") or "": unbracket(attribute(entry, "value")) for entry in children(columns, "map")
        }

    @property
    def increment(self) -> Increment:
        refresh = first(self._extract, "refresh") if self._extract is not None else None
        if refresh is None:
            return Increment("", enabled=False, last_value=None)
        events = list(children(refresh, "refresh-event"))
        return Increment(
            attribute(refresh, "increment-key") or "",
            enabled=(attribute(refresh, "incremental-updates") or "").lower() == "true",
            last_value=attribute(events[-1], "increment-value") if events else None,
        )

    @property
    def increment_object(self) -> str:
        """The id of the logical table that increments add rows to, as the extract names it; '' where it names none."""
        extract = first(self._root, "extract")
        return (attribute(extract, "object-id") or "") if extract is not None else ""

    def increment_table(self) -> LogicalTable | None:
        """The logical table that grows; None without an increment key, or where no table has it."""
        tables, key = self.logical_tables(), self.increment.key
        if not key or len(tables) < 2:
            return tables[0] if key and tables else None
        having = [
            table
            for table in tables
            if key in (local_name for _, local_name in self.extract_records(table.extract_table, table.extract_name))
        ]
        return next((table for table in having if self.increment_object in ("", table.object_id)), None)

    def _records(self, parent: Any) -> list[Any]:
        holder = first(parent, "metadata-records") if parent is not None else None
        records = children(holder, "metadata-record") if holder is not None else ()
        return [record for record in records if attribute(record, "class") == "column"]

    def extract_records(self, *table_names: str) -> list[tuple[str, str]]:
        """(Hyper column, local name) of the records whose parent is one of these names."""
        return [
            (text_of(record, "remote-name") or "", text_of(record, "local-name") or "")
            for record in self._records(self._extract)
            if _parent(record) in table_names
        ]

    @property
    def record_parents(self) -> set[str]:
        return {_parent(record) for record in self._records(self._extract)}

    def extract_column(self, table: LogicalTable, source_column: str) -> tuple[str, str]:
        """(Hyper column, local name) for a column of the source: through its local name, which both sides share."""
        local_names = [
            text_of(record, "local-name") or ""
            for record in self._records(first(self._root, "connection"))
            if text_of(record, "remote-name") == source_column and _parent(record) in ("", table.source_name)
        ]
        known = self.extract_records(table.extract_table, table.extract_name)
        for column, local_name in known:
            if local_name in local_names or (not local_names and column == source_column):
                return column, local_name
        return source_column, local_names[0] if local_names else self._free_local_name(table, source_column)

    def _free_local_name(self, table: LogicalTable, source_column: str) -> str:
        """A name for a column that the document does not know yet."""
        records = [*self._records(first(self._root, "connection")), *self._records(self._extract)]
        taken = {text_of(record, "local-name") for record in records}
        name = f"[{source_column}]"
        return f"[{source_column} ({table.source_name})]" if name in taken else name

    def source_column(self, table: LogicalTable, local_name: str) -> str | None:
        """The source's column behind a local name."""
        for record in self._records(first(self._root, "connection")):
            if text_of(record, "local-name") == local_name and _parent(record) in ("", table.source_name):
                return text_of(record, "remote-name")
        extracted = {local: column for column, local in self.extract_records(table.extract_table, table.extract_name)}
        return extracted.get(local_name)

    def rewrite_records(self, table: LogicalTable, columns: Sequence[ExtractColumn]) -> None:
        """Make the extract's records of this table say exactly these columns, in this order."""
        names = (table.extract_table, table.extract_name)
        records = [record for record in self._records(self._extract) if _parent(record) in names]
        holder = first(self._extract, "metadata-records")
        if holder is None:
            holder = child(self._extract, "metadata-records")
        place = holder.index(records[0]) if records else len(holder)
        by_name = {text_of(record, "remote-name"): record for record in records}
        template = records[0] if records else None
        for record in records:
            holder.remove(record)
        for ordinal, column in enumerate(columns):
            record = by_name.get(column.name)
            if record is None:
                record = _new_record(template, table, column)
            _set_text(record, "ordinal", str(ordinal))
            if text_of(record, "remote-type") != str(column.type.remote_type):
                _set_text(record, "remote-type", str(column.type.remote_type))
                _set_text(record, "local-type", column.type.local_type)
                _set_text(record, "aggregation", column.type.aggregation)
            holder.insert(place + ordinal, record)
        self._rewrite_map(names, {column.local_name: f"[{names[1]}].[{column.name}]" for column in columns})

    def _rewrite_map(self, table_names: tuple[str, str], places: dict[str, str]) -> None:
        """Make the list of the extract's columns, where there is one, say these of this table."""
        holder = first(self._extract, "cols")
        if holder is None:
            return
        for entry in list(children(holder, "map")):
            key, value = attribute(entry, "key") or "", attribute(entry, "value") or ""
            if "".join(unbracket(value)[:1]) in table_names and places.pop(key, None) != value:
                holder.remove(entry)
        for key, value in places.items():
            child(holder, "map", key=key, value=value)
        if places:
            holder[:] = sorted(holder, key=lambda entry: attribute(entry, "key") or "")

    def add_event(self, *, kind: str, value: str, rows: int, started: datetime, origin: str) -> None:
        """Write down what a refresh did; a `create` event replaces all earlier ones."""
        refresh = first(self._extract, "refresh")
        if refresh is None:
            refresh = child(self._extract, "refresh")
        events = list(children(refresh, "refresh-event"))
        if events:
            origin = attribute(events[-1], "add-from-file-path") or origin
        for event in events if kind == "create" else ():
            refresh.remove(event)
        child(
            refresh,
            "refresh-event",
            {
                "add-from-file-path": origin,
                "increment-value": value,
                "refresh-type": kind,
                "rows-inserted": str(rows),
                "timestamp-start": started.strftime("%Y-%m-%d %H:%M:%S.") + f"{started.microsecond // 1000:03d}",
            },
        )
        self._extract.set("update-time", datetime.now(UTC).strftime("%m/%d/%Y %I:%M:%S %p"))


def _live_connection(name: str, element: Any) -> LiveConnection:
    def value(key: str) -> str | None:
        return attribute(element, key)

    return LiveConnection(
        name=name,
        kind=value("class") or "",
        server=value("server"),
        port=value("port"),
        dbname=value("dbname"),
        schema=value("schema"),
        warehouse=value("warehouse"),
        role=value("service"),
        username=value("username"),
        authentication=value("authentication"),
    )


def _two_parts(text: str | None) -> tuple[str, str]:
    parts = unbracket(text)
    return (parts[-2], parts[-1]) if len(parts) > 1 else ("Extract", parts[0] if parts else "")


def stored_tables_of(relation: Any) -> dict[tuple[str, str], str]:
    """The relation's names of the tables of the extract that it reads, by schema and table: several where it joins them."""
    return {
        _two_parts(attribute(leaf, "table")): attribute(leaf, "name") or ""
        for leaf in descendants(relation, "relation")
        if _is_table(leaf)
    }


def _is_table(relation: Any) -> bool:
    return relation is not None and attribute(relation, "table") is not None


def _logical_table(live: Any, stored: Any, object_id: str = "") -> LogicalTable:
    schema, table = _two_parts(attribute(stored, "table"))
    custom = attribute(live, "type") == "text"
    return LogicalTable(
        source_name=attribute(live, "name") or "",
        connection=attribute(live, "connection") or "",
        source_table=() if custom else unbracket(attribute(live, "table")),
        # Tableau doubles angle brackets in custom SQL, because single ones enclose its parameters.
        custom_sql=(live.text or "").replace("<<", "<").replace(">>", ">") if custom else None,
        extract_schema=schema,
        extract_table=table,
        extract_name=attribute(stored, "name") or table,
        object_id=object_id,
    )


def _parent(record: Any) -> str:
    return "".join(unbracket(text_of(record, "parent-name"))[:1])


def _set_text(record: Any, tag: str, value: str) -> None:
    element = first(record, tag)
    if element is None:
        element = child(record, tag)
    element.text = value


def _new_record(template: Any, table: LogicalTable, column: ExtractColumn) -> Any:
    """A record in the shape of its neighbours, so that object ids and families are right."""
    if template is not None:
        record = copy.deepcopy(template)
        # Forces the type's own words to be written.
        _set_text(record, "remote-type", "")
    else:
        record = parse(b"<metadata-record class='column'/>")
    _set_text(record, "remote-name", column.name)
    _set_text(record, "local-name", column.local_name)
    _set_text(record, "parent-name", f"[{table.extract_name}]")
    _set_text(record, "remote-alias", column.name)
    return record
