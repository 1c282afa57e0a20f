"""The .tds of a datasource over Snowflake in the shape Tableau Desktop gives it, with both sides of its columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tir_dagster.sandbox.tableau.columns import ExtractType, SnowflakeType, extract_type
from tir_dagster.sandbox.tableau.xmltree import child, new_tree

ENCAPSULATE = "_.fcp.ObjectModelEncapsulateLegacy"
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
    def local(self) -> str:
        return f"[{self.local_name or self.remote_name}]"

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
class DesktopDocument:
    """One logical table, live and extracted; the extract has no events yet, so that its first refresh is full."""

    caption: str
    columns: tuple[Column, ...]
    snowflake: SnowflakeConnection
    table: str
    custom_sql: str
    increment_key: str | None

    @property
    def file_name(self) -> str:
        return "".join(letter if letter.isalnum() or letter in " ._-()" else "_" for letter in self.caption)

    @property
    def extract_member(self) -> str:
        return f"Data/Extracts/{self.file_name}.hyper"

    @property
    def object_id(self) -> str:
        digest = hashlib.md5(f"{self.caption}/{self.table}/{self.custom_sql}".encode()).hexdigest()
        return f"{self.table}_{digest.upper()}"

    def label(self, prefix: str) -> str:
        """Names as Tableau makes them up, but the same for the same document."""
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"
        number = int.from_bytes(hashlib.sha256(f"{prefix}/{self.caption}/{self.table}".encode()).digest(), "big")
        return f"{prefix}." + "".join(digits[number // 36**place % 36] for place in range(28))

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
        for side in ("false", "true"):
            self._live_relation(federated, f"{ENCAPSULATE}.{side}...relation")
        self._refresh(federated)
        records = child(federated, "metadata-records")
        for ordinal, column in enumerate(self.columns, start=1):
            self._live_record(records, column, ordinal)

    def _live_relation(self, parent: Any, tag: str) -> None:
        relation = child(parent, tag, connection=self.label("snowflake"), name=self.table)
        if self.custom_sql:
            relation.set("type", "text")
            # Tableau doubles angle brackets, because single ones enclose its parameters.
            relation.text = self.custom_sql.replace("<", "<<").replace(">", ">>")
        else:
            relation.set("table", f"[{self.snowflake.schema}].[{self.table}]")
            relation.set("type", "table")

    def _refresh(self, parent: Any) -> None:
        refresh = child(parent, "refresh")
        if self.increment_key is not None:
            key = next(column for column in self.columns if column.remote_name == self.increment_key)
            refresh.set("increment-key", key.local)
            refresh.set("incremental-updates", "true")

    def _live_record(self, records: Any, column: Column, ordinal: int) -> None:
        record = child(records, "metadata-record", {"class": "column"})
        source = SnowflakeType.parse(column.snowflake_type)
        for tag, value in (
            ("remote-name", column.remote_name),
            ("remote-type", str(column.type.live_remote_type)),
            ("local-name", column.local),
            ("parent-name", f"[{self.table}]"),
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
        child(record, f"{ENCAPSULATE}.true...object-id").text = f"[{self.object_id}]"

    def _columns(self, root: Any) -> None:
        child(
            root,
            "_.fcp.ObjectModelTableType.true...column",
            caption=self.table,
            datatype="table",
            name=f"[__tableau_internal_object_id__].[{self.object_id}]",
            role="measure",
            type="quantitative",
        )
        for column in self.columns:
            child(
                root,
                "column",
                caption=column.caption or column.remote_name.replace("_", " ").title(),
                datatype=column.type.local_type,
                name=column.local,
                role=column.type.role,
                type=column.type.measure_type,
            )

    def _extract(self, root: Any) -> None:
        extract = child(
            root,
            "extract",
            {
                "_.fcp.ObjectModelExtractV2.true...object-id": self.object_id,
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
                "schema": "Extract",
                "sslmode": "",
                "tablename": EXTRACT_TABLE,
                "update-time": datetime.now(UTC).strftime("%m/%d/%Y %I:%M:%S %p"),
                "username": "tableau_internal_user",
            },
        )
        for side in ("false", "true"):
            self._extract_relation(connection, f"{ENCAPSULATE}.{side}...relation")
        self._refresh(connection)
        records = child(connection, "metadata-records")
        for ordinal, column in enumerate(self.columns):
            record = child(records, "metadata-record", {"class": "column"})
            for tag, value in (
                ("remote-name", column.extract),
                ("remote-type", str(column.type.remote_type)),
                ("local-name", column.local),
                ("parent-name", f"[{EXTRACT_TABLE}]"),
                ("remote-alias", column.extract),
                ("ordinal", str(ordinal)),
                ("family", self.table),
                ("local-type", column.type.local_type),
                ("aggregation", column.type.aggregation),
                ("approx-count", "0"),
                ("contains-null", "true"),
                (f"{ENCAPSULATE}.true...object-id", f"[{self.object_id}]"),
            ):
                child(record, tag).text = value

    def _extract_relation(self, parent: Any, tag: str) -> None:
        child(parent, tag, name=EXTRACT_TABLE, table=f"[Extract].[{EXTRACT_TABLE}]", type="table")

    def _object_graph(self, root: Any) -> None:
        graph = child(root, f"{ENCAPSULATE}.true...object-graph")
        entry = child(child(graph, "objects"), "object", caption=self.table, id=self.object_id)
        self._live_relation(child(entry, "properties", context=""), "relation")
        self._extract_relation(child(entry, "properties", context="extract"), "relation")
