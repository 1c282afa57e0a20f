"""The .tds of a datasource over Snowflake in the shape Tableau Desktop gives it: its logical tables, with both sides of their columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tir_dagster.sandbox.tableau.columns import ExtractType, SnowflakeType, extract_type
from tir_dagster.sandbox.tableau.xmltree import child, new_tree

if TYPE_CHECKING:
    from collections.abc import Callable

ENCAPSULATE = "_.fcp.ObjectModelEncapsulateLegacy"
EXTRACT_SCHEMA = "Extract"
# The extract's one table; several are called like their objects.
EXTRACT_TABLE = "Extract"


@dataclass(frozen=True)
class SnowflakeConnection:
    """Where the live side of a datasource points to; the password is never part of a package."""

    server: str
    dbname: str
    schema: str
    warehouse: str
    role: str
    username: str


@dataclass(frozen=True)
class Column:
    """One column: its name in Snowflake, in Tableau's formulas, in the extract's Hyper table, and for people."""

    remote_name: str
    snowflake_type: str
    local_name: str = ""
    extract_name: str = ""
    caption: str = ""

    @property
    def extract(self) -> str:
        return self.extract_name or self.remote_name

    @property
    def type(self) -> ExtractType:
        found = extract_type(SnowflakeType.parse(self.snowflake_type))
        if found is None:
            raise ValueError(f"column {self.remote_name}: an extract cannot hold {self.snowflake_type}")
        return found


@dataclass(frozen=True)
class DesktopTable:
    """One logical table: its name in Snowflake and for people, its columns, and the query it is when not a table."""

    name: str
    columns: tuple[Column, ...]
    custom_sql: str = ""


@dataclass(frozen=True)
class RelatedTable:
    """One side of a relationship: the table, its columns, and what its author promises of them."""

    table: str
    columns: tuple[str, ...]
    # No two rows have the same values: the "one" of many-to-one.
    unique: bool = False
    # Every row has a partner: referential integrity "all records match".
    all_match: bool = False


@dataclass(frozen=True)
class DesktopRelationship:
    """Two logical tables whose columns are equal, pair by pair."""

    first: RelatedTable
    second: RelatedTable


def object_id(caption: str, table: DesktopTable) -> str:
    """The table's name with 32 hexadecimal digits, as Tableau gives it, but the same for the same document."""
    digest = hashlib.md5(f"{caption}/{table.name}/{table.custom_sql}".encode()).hexdigest()
    return f"{table.name}_{digest.upper()}"


@dataclass(frozen=True)
class DesktopDocument:
    """Logical tables, live and extracted; the extract has no events yet, so that its first refresh is full.

    The first table that has a column's name keeps it; in the others it is `NAME (TABLE)`.
    """

    caption: str
    tables: tuple[DesktopTable, ...]
    snowflake: SnowflakeConnection
    # Table and column that an incremental refresh goes on from.
    increment: tuple[str, str] | None = None
    relationships: tuple[DesktopRelationship, ...] = ()

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() or letter in " ._-()" else "_" for letter in self.caption)

    @property
    def extract_member(self) -> str:
        return f"Data/Extracts/{self.file_name}.hyper"

    def object_id(self, table: DesktopTable) -> str:
        return object_id(self.caption, table)

    def extract_table(self, table: DesktopTable) -> str:
        """The table's name in the Hyper file."""
        return self.object_id(table) if len(self.tables) > 1 else EXTRACT_TABLE

    def local_name(self, table: DesktopTable, column: Column) -> str:
        """The column's name in formulas, in brackets, which no other column of the datasource has."""
        if column.local_name:
            return f"[{column.local_name}]"
        before = self.tables[: self.tables.index(table)]
        taken = any(other.remote_name == column.remote_name for earlier in before for other in earlier.columns)
        return f"[{column.remote_name} ({table.name})]" if taken else f"[{column.remote_name}]"

    def label(self, prefix: str) -> str:
        """Names as Tableau makes them up, but the same for the same document."""
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"
        seed = f"{prefix}/{self.caption}/{self.tables[0].name}"
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest(), "big")
        return f"{prefix}." + "".join(digits[number // 36**place % 36] for place in range(28))

    def _table(self, name: str) -> DesktopTable:
        return next(table for table in self.tables if table.name == name)

    def _local_name_of(self, table_name: str, column_name: str) -> str:
        table = self._table(table_name)
        return self.local_name(table, next(column for column in table.columns if column.remote_name == column_name))

    def tree(self) -> Any:
        root = new_tree("datasource", {"user": "http://www.tableausoftware.com/xml/user"})
        attributes = {
            "formatted-name": self.label("federated"),
            "inline": "true",
            "source-platform": "win",
            "version": "18.1",
        }
        for name, value in attributes.items():
            root.set(name, value)
        manifest = child(root, "document-format-change-manifest")
        for feature in (
            "ObjectModelEncapsulateLegacy",
            "ObjectModelExtractV2",
            "ObjectModelTableType",
            "SchemaViewerObjectModel",
        ):
            child(manifest, f"_.fcp.{feature}.true...{feature}")
        self._live_connection(root)
        child(root, "aliases", enabled="yes")
        self._columns(root)
        self._extract(root)
        child(
            root,
            "layout",
            {
                "_.fcp.SchemaViewerObjectModel.false...dim-percentage": "0.5",
                "_.fcp.SchemaViewerObjectModel.false...measure-percentage": "0.4",
                "dim-ordering": "alphabetic",
                "measure-ordering": "alphabetic",
                "show-structure": "true",
            },
        )
        values = child(root, "semantic-values")
        child(values, "semantic-value", key="[Country].[Name]", value='"United States"')
        child(root, "date-options", {"start-of-week": "monday"})
        self._object_graph(root)
        return root

    def _live_connection(self, root: Any) -> None:
        federated = child(root, "connection", {"class": "federated"})
        named = child(
            child(federated, "named-connections"),
            "named-connection",
            caption=self.snowflake.server,
            name=self.label("snowflake"),
        )
        child(
            named,
            "connection",
            {
                "authentication": "Username Password",
                "class": "snowflake",
                "dbname": self.snowflake.dbname,
                "odbc-connect-string-extras": "",
                "one-time-sql": "",
                "schema": self.snowflake.schema,
                "server": self.snowflake.server,
                "service": self.snowflake.role,
                "username": self.snowflake.username,
                "warehouse": self.snowflake.warehouse,
            },
        )
        self._relations(federated, self._live_relation)
        self._column_map(
            federated,
            {
                self.local_name(table, column): f"[{table.name}].[{column.remote_name}]"
                for table in self.tables
                for column in table.columns
            },
        )
        self._refresh(federated)
        records = child(federated, "metadata-records")
        for table in self.tables:
            for ordinal, column in enumerate(table.columns, start=1):
                self._live_record(records, table, column, ordinal)

    def _relations(self, connection: Any, write: Callable[[Any, str, DesktopTable], None]) -> None:
        """The tables twice: for readers that know logical tables, and for those that know a single one."""
        write(connection, f"{ENCAPSULATE}.false...relation", self.tables[0])
        if len(self.tables) == 1:
            write(connection, f"{ENCAPSULATE}.true...relation", self.tables[0])
            return
        collection = child(connection, f"{ENCAPSULATE}.true...relation", type="collection")
        for table in self.tables:
            write(collection, "relation", table)

    def _column_map(self, connection: Any, places: dict[str, str]) -> None:
        """Which column of which table each local name is; a single table needs no such list."""
        if len(self.tables) > 1:
            columns = child(connection, "cols")
            for local_name, place in sorted(places.items()):
                child(columns, "map", key=local_name, value=place)

    def _live_relation(self, parent: Any, tag: str, table: DesktopTable) -> None:
        relation = child(parent, tag, connection=self.label("snowflake"), name=table.name)
        if table.custom_sql:
            relation.set("type", "text")
            # Tableau doubles angle brackets, because single ones enclose its parameters.
            relation.text = table.custom_sql.replace("<", "<<").replace(">", ">>")
        else:
            relation.set("table", f"[{self.snowflake.schema}].[{table.name}]")
            relation.set("type", "table")

    def _refresh(self, parent: Any) -> None:
        refresh = child(parent, "refresh")
        if self.increment is not None:
            refresh.set("increment-key", self._local_name_of(*self.increment))
            refresh.set("incremental-updates", "true")

    def _live_record(self, records: Any, table: DesktopTable, column: Column, ordinal: int) -> None:
        record = child(records, "metadata-record", {"class": "column"})
        source = SnowflakeType.parse(column.snowflake_type)
        for tag, value in (
            ("remote-name", column.remote_name),
            ("remote-type", str(column.type.live_remote_type)),
            ("local-name", self.local_name(table, column)),
            ("parent-name", f"[{table.name}]"),
            ("remote-alias", column.remote_name),
            ("ordinal", str(ordinal)),
            ("local-type", column.type.local_type),
            ("aggregation", column.type.aggregation),
        ):
            child(record, tag).text = value
        if source.family == "FIXED":
            child(record, "precision").text = str(source.precision)
            child(record, "scale").text = str(source.scale)
        child(record, "contains-null").text = "true"
        attributes = child(record, "attributes")
        for name, value in (("DebugRemoteType", column.type.sql_type), ("DebugWireType", "SQL_C_DEFAULT")):
            child(attributes, "attribute", datatype="string", name=name).text = f'"{value}"'
        child(record, f"{ENCAPSULATE}.true...object-id").text = f"[{self.object_id(table)}]"

    def _columns(self, root: Any) -> None:
        for table in self.tables:
            child(
                root,
                "_.fcp.ObjectModelTableType.true...column",
                caption=table.name,
                datatype="table",
                name=f"[__tableau_internal_object_id__].[{self.object_id(table)}]",
                role="measure",
                type="quantitative",
            )
        for table in self.tables:
            for column in table.columns:
                name = self.local_name(table, column)
                words = name.strip("[]") if column.local_name == "" else column.remote_name
                child(
                    root,
                    "column",
                    caption=column.caption or words.replace("_", " ").title(),
                    datatype=column.type.local_type,
                    name=name,
                    role=column.type.role,
                    type=column.type.measure_type,
                )

    def _extract(self, root: Any) -> None:
        extract = child(
            root,
            "extract",
            {
                "_.fcp.ObjectModelExtractV2.true...object-id": self._extract_object_id,
                "count": "-1",
                "enabled": "true",
                "units": "records",
            },
        )
        connection = child(
            extract,
            "connection",
            {
                "access_mode": "readonly",
                "authentication": "auth-none",
                "author-locale": "en_US",
                "class": "hyper",
                "dbname": self.extract_member,
                "default-settings": "yes",
                "schema": EXTRACT_SCHEMA,
                "sslmode": "",
                "tablename": EXTRACT_TABLE,
                "update-time": datetime.now(UTC).strftime("%m/%d/%Y %I:%M:%S %p"),
                "username": "tableau_internal_user",
            },
        )
        self._relations(connection, self._extract_relation)
        self._column_map(
            connection,
            {
                self.local_name(table, column): f"[{self.extract_table(table)}].[{column.extract}]"
                for table in self.tables
                for column in table.columns
            },
        )
        self._refresh(connection)
        records = child(connection, "metadata-records")
        for table in self.tables:
            for ordinal, column in enumerate(table.columns):
                self._extract_record(records, table, column, ordinal)

    @property
    def _extract_object_id(self) -> str:
        """The table that grows by increments; of several, none where all are refreshed in full."""
        if self.increment is not None:
            return self.object_id(self._table(self.increment[0]))
        return self.object_id(self.tables[0]) if len(self.tables) == 1 else ""

    def _extract_record(self, records: Any, table: DesktopTable, column: Column, ordinal: int) -> None:
        record = child(records, "metadata-record", {"class": "column"})
        for tag, value in (
            ("remote-name", column.extract),
            ("remote-type", str(column.type.remote_type)),
            ("local-name", self.local_name(table, column)),
            ("parent-name", f"[{self.extract_table(table)}]"),
            ("remote-alias", column.extract),
            ("ordinal", str(ordinal)),
            ("family", table.name),
            ("local-type", column.type.local_type),
            ("aggregation", column.type.aggregation),
            ("approx-count", "0"),
            ("contains-null", "true"),
            (f"{ENCAPSULATE}.true...object-id", f"[{self.object_id(table)}]"),
        ):
            child(record, tag).text = value

    def _extract_relation(self, parent: Any, tag: str, table: DesktopTable) -> None:
        name = self.extract_table(table)
        child(parent, tag, name=name, table=f"[{EXTRACT_SCHEMA}].[{name}]", type="table")

    def _object_graph(self, root: Any) -> None:
        graph = child(root, f"{ENCAPSULATE}.true...object-graph")
        objects = child(graph, "objects")
        for table in self.tables:
            entry = child(objects, "object", caption=table.name, id=self.object_id(table))
            self._live_relation(child(entry, "properties", context=""), "relation", table)
            self._extract_relation(child(entry, "properties", context="extract"), "relation", table)
        if self.relationships:
            relationships = child(graph, "relationships")
            for relationship in self.relationships:
                self._relationship(child(relationships, "relationship"), relationship)

    def _relationship(self, entry: Any, relationship: DesktopRelationship) -> None:
        sides = (relationship.first, relationship.second)
        pairs = list(zip(*(side.columns for side in sides), strict=True))
        conditions = child(entry, "expression", op="AND") if len(pairs) > 1 else entry
        for pair in pairs:
            condition = child(conditions, "expression", op="=")
            for side, column in zip(sides, pair, strict=True):
                child(condition, "expression", op=self._local_name_of(side.table, column))
        for tag, side in zip(("first-end-point", "second-end-point"), sides, strict=True):
            promises = {"guaranteed-value": side.all_match, "unique-key": side.unique}
            attributes = {name: "true" for name, holds in promises.items() if holds}
            child(entry, tag, {"object-id": self.object_id(self._table(side.table)), **attributes})
