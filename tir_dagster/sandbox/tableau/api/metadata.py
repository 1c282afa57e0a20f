"""The metadata API: a part of Tableau's GraphQL schema, enough for the lineage of workbooks.

A query that asks for anything else is refused by GraphQL's own rules: the answer has `errors` and no data.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from graphql import build_schema, graphql_sync

from tir_dagster.sandbox.tableau import content
from tir_dagster.sandbox.tableau.api.call import Call, Operation, operation
from tir_dagster.sandbox.tableau.api.workbooks import VIEWS, WORKBOOKS
from tir_dagster.sandbox.tableau.archive import Package
from tir_dagster.sandbox.tableau.document import Document, LiveConnection
from tir_dagster.sandbox.tableau.store import Row
from tir_dagster.sandbox.tableau.wire import ApiError, JsonAnswer, moment
from tir_dagster.sandbox.tableau.workbooks import DASHBOARD, WORKSHEET, EmbeddedDatasource, Sheet, WorkbookDocument

OPERATIONS: list[Operation] = []

# Names, types and what may be null are those of Tableau's reference of the metadata API.
SCHEMA = build_schema("""
scalar DateTime

enum TableType { DATABASETABLE DATAMODEL DATALAKE CALCULATEDINSIGHT }

input Workbook_Filter {
  id: ID
  idWithin: [ID]
  luid: String
  luidWithin: [String]
  name: String
  nameWithin: [String]
  projectName: String
  projectNameWithin: [String]
}

type Query {
  workbooks(filter: Workbook_Filter): [Workbook!]!
}

type Workbook {
  id: ID!
  luid: String!
  name: String
  description: String
  createdAt: DateTime!
  updatedAt: DateTime!
  uri: String
  projectName: String
  projectLuid: String
  sheets: [Sheet!]!
  dashboards: [Dashboard!]!
  embeddedDatasources: [EmbeddedDatasource!]!
}

type Sheet {
  id: ID!
  luid: String!
  name: String
  path: String
  createdAt: DateTime!
  updatedAt: DateTime!
  parentEmbeddedDatasources: [EmbeddedDatasource!]!
}

type Dashboard {
  id: ID!
  luid: String!
  name: String
  path: String
  createdAt: DateTime!
  updatedAt: DateTime!
  sheets: [Sheet!]!
}

type EmbeddedDatasource {
  id: ID!
  name: String
  hasExtracts: Boolean
  upstreamTables: [DatabaseTable!]!
  parentPublishedDatasources: [PublishedDatasource!]!
}

type PublishedDatasource {
  id: ID!
  luid: String!
  name: String
  hasExtracts: Boolean
  projectName: String
  upstreamTables: [DatabaseTable!]!
}

type DatabaseTable {
  id: ID!
  name: String
  connectionType: String
  schema: String
  isEmbedded: Boolean
  tableType: TableType!
  fullName: String
  projectName: String
  database: Database
}

type Database {
  id: ID!
  name: String
  connectionType: String
  projectName: String
}
""")
# Ids of the metadata API are not those of the REST API, and stay the same.
_IDS = uuid.UUID("5f1d3f0c-6f0b-4d6a-9a5c-2f4a6d1c7b3e")

# What GraphQL reads fields from; a value that can be called is read only where it is asked for.
Fields = dict[str, Any]


@operation(OPERATIONS, "POST", "/api/metadata/graphql", json=True, since=(3, 5))
def query_metadata(call: Call) -> JsonAnswer:
    asked = call.request
    query, variables = (asked.get("query"), asked.get("variables")) if isinstance(asked, dict) else (None, None)
    if not isinstance(query, str) or not isinstance(variables, dict | None):
        raise ApiError(400000, "The request is not a GraphQL query with its variables.")
    answer = graphql_sync(SCHEMA, query, {"workbooks": _Lineage(call).workbooks}, variable_values=variables)
    return JsonAnswer(
        {"data": answer.data, **({"errors": [e.formatted for e in answer.errors]} if answer.errors else {})}
    )


def _id(*names: str | None) -> str:
    return str(uuid.uuid5(_IDS, "/".join(name or "" for name in names)))


class _Lineage:
    """What the metadata API shows of the caller's site."""

    def __init__(self, call: Call) -> None:
        self._server = call.server
        self._site = call.session.site_id

    def workbooks(self, _: Any, filter: dict[str, Any] | None = None) -> list[Fields]:  # noqa: A002 - GraphQL's name
        rows = self._server.store.rows(f"{WORKBOOKS} ORDER BY w.created, w.id", self._site)
        shown = [self._workbook(row) for row in rows]
        return [fields for fields in shown if all(_fits(fields, *item) for item in (filter or {}).items())]

    def _workbook(self, row: Row) -> Fields:
        document = WorkbookDocument(row["document"])
        sources = {source.name: self._embedded(row["id"], source) for source in document.datasources()}
        views = {
            view["name"]: view
            for view in self._server.store.rows(f"{VIEWS} AND v.workbook_id = ?", self._site, row["id"])
        }
        sheets = {
            sheet.name: {
                **_view(row, sheet, views.get(sheet.name)),
                "parentEmbeddedDatasources": [sources[name] for name in sheet.uses if name in sources],
            }
            for sheet in document.sheets()
            if sheet.kind == WORKSHEET
        }
        dashboards = [
            {**_view(row, sheet, views.get(sheet.name)), "sheets": [sheets[name] for name in sheet.uses]}
            for sheet in document.sheets()
            if sheet.kind == DASHBOARD
        ]
        return {
            "id": _id("workbook", row["id"]),
            "luid": row["id"],
            "name": row["name"],
            "description": row["description"] or "",
            "createdAt": moment(row["created"]),
            "updatedAt": moment(row["updated"]),
            "uri": f"sites/{self._site}/workbooks/{row['number']}",
            "projectName": row["project_name"],
            "projectLuid": row["project_id"],
            "sheets": list(sheets.values()),
            "dashboards": dashboards,
            "embeddedDatasources": list(sources.values()),
        }

    def _embedded(self, workbook_id: str, source: EmbeddedDatasource) -> Fields:
        published = self._published(source.published) if source.published else []
        own = Document(source.document) if source.published is None else None
        return {
            "id": _id("embedded", workbook_id, source.name),
            "name": source.caption,
            "hasExtracts": own is not None and own.has_extract,
            "upstreamTables": (lambda _: _tables(own)) if own is not None else self._tables_of(published),
            "parentPublishedDatasources": published,
        }

    def _published(self, content_url: str) -> list[Fields]:
        """The published datasource that a workbook refers to; none if it is gone."""
        rows = self._server.store.rows(
            "SELECT d.*, p.name AS project_name FROM datasources d JOIN projects p ON p.id = d.project_id"
            " WHERE d.site_id = ? AND d.content_url = ?",
            self._site,
            content_url,
        )
        return [
            {
                "id": _id("datasource", row["id"]),
                "luid": row["id"],
                "name": row["name"],
                "hasExtracts": bool(row["has_extracts"]),
                "projectName": row["project_name"],
                "upstreamTables": self._upstream(row["id"]),
            }
            for row in rows
        ]

    def _upstream(self, datasource_id: str) -> Callable[[Any], list[Fields]]:
        def read(_: Any) -> list[Fields]:
            with content.open_current(self._server, datasource_id) as (row, stream):
                if not row["file"].endswith(".tdsx"):
                    return _tables(Document(stream.read()))
                with Package(stream, max_bytes=self._server.max_bytes) as package:
                    return _tables(Document(package.document()))

        return read

    def _tables_of(self, published: list[Fields]) -> Callable[[Any], list[Fields]]:
        return lambda info: [table for source in published for table in source["upstreamTables"](info)]


def _fits(fields: Fields, name: str, wanted: Any) -> bool:
    """One condition of a filter; one that is null does not count."""
    if wanted is None:
        return True
    value = fields[name.removesuffix("Within")]
    return value in wanted if name.endswith("Within") else value == wanted


def _view(workbook: Row, sheet: Sheet, view: Row | None) -> Fields:
    """What sheets and dashboards share; a hidden one has no view, so that its LUID and path are empty."""
    times = view if view is not None else workbook
    return {
        "id": _id(sheet.kind, workbook["id"], sheet.name),
        "luid": view["id"] if view is not None else "",
        "name": sheet.name,
        "path": f"{workbook['content_url']}/{view['content_url']}" if view is not None else "",
        "createdAt": moment(times["created"]),
        "updatedAt": moment(times["updated"]),
    }


def _tables(document: Document) -> list[Fields]:
    return [_table(connection, parts) for connection, parts in document.source_tables()]


def _table(connection: LiveConnection, parts: tuple[str, ...]) -> Fields:
    place = (connection.kind, connection.server, connection.dbname)
    schema = parts[-2] if len(parts) > 1 else connection.schema
    return {
        "id": _id("table", *place, schema, parts[-1]),
        "name": parts[-1],
        "connectionType": connection.kind,
        "schema": schema or "",
        "isEmbedded": connection.kind == "hyper",
        "tableType": "DATABASETABLE",
        "fullName": ".".join(f"[{part}]" for part in parts),
        "projectName": "",
        "database": {
            "id": _id("database", *place),
            "name": connection.dbname or "",
            "connectionType": connection.kind,
            "projectName": "",
        },
    }
