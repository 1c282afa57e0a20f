"""Workbooks: published, listed with their views, described by the metadata API; and projects that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import GraphQLError, ServerResponseError

from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import OVERWRITE, Publisher, Source
from tir_dagster_tests.sandbox.tableau.workbook import write_workbook

HIDDEN = "Details"
SHOWN = ["By month", "Own tables", "Overview"]


def test_a_workbook_is_published_found_and_shown_with_its_views(publisher: Publisher, workbook: Any) -> None:
    server = publisher.server
    wanted = TSC.RequestOptions()
    wanted.filter.add(TSC.Filter("name", "eq", "Sales book"))
    wanted.filter.add(TSC.Filter("projectName", "eq", publisher.project.name))
    listed, _ = server.workbooks.get(wanted)
    assert [(item.id, item.content_url, item.project_id) for item in listed] == [
        (workbook.id, workbook.content_url, publisher.project.id)
    ]
    single = server.workbooks.get_by_id(workbook.id)
    assert [view.name for view in single.views] == SHOWN
    server.workbooks.populate_views(single)
    assert [view.id for view in single.views] == [view.id for view in server.workbooks.get_by_id(workbook.id).views]
    view = server.views.get_by_id(single.views[0].id)
    assert (view.workbook_id, view.owner_id, view.project_id) == (
        workbook.id,
        server.user_id,
        publisher.project.id,
    )
    assert view.content_url == f"{workbook.content_url}/sheets/Bymonth"
    assert view.id in {item.id for item in TSC.Pager(server.views)}


def test_overwriting_a_workbook_keeps_its_id_and_those_of_its_views(
    publisher: Publisher, orders: Any, workbook: Any, tmp_path: Path
) -> None:
    before = {view.name: view.id for view in publisher.server.workbooks.get_by_id(workbook.id).views}
    package = write_workbook(tmp_path / "book.twbx", orders.content_url)
    with pytest.raises(ServerResponseError, match="403007"):
        publisher.publish_workbook(package)
    again = publisher.publish_workbook(package, mode=OVERWRITE)
    assert again.id == workbook.id
    assert {view.name: view.id for view in publisher.server.workbooks.get_by_id(workbook.id).views} == before


def test_a_publish_may_hide_more_views(publisher: Publisher, tmp_path: Path) -> None:
    item = TSC.WorkbookItem(publisher.project.id, "Hiding")
    item.hidden_views = ["By month"]
    book = publisher.server.workbooks.publish(item, str(write_workbook(tmp_path / "book.twb", "x")), OVERWRITE)
    assert [view.name for view in publisher.server.workbooks.get_by_id(book.id).views] == SHOWN[1:]


def test_what_is_no_workbook_to_keep_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    with_extract = write_workbook(tmp_path / "extract.twbx", "x", packed={"Data/Extracts/x.hyper": b""})
    no_workbook = tmp_path / "datasource.twb"
    no_workbook.write_text("<datasource/>", encoding="utf-8")
    for file in (with_extract, no_workbook):
        with pytest.raises(ServerResponseError, match="400011"):
            publisher.publish_workbook(file)
    assert not [item for item in TSC.Pager(publisher.server.workbooks) if item.project_id == publisher.project.id]


def test_a_deleted_workbook_is_gone_with_its_views(publisher: Publisher, workbook: Any) -> None:
    server = publisher.server
    view = server.workbooks.get_by_id(workbook.id).views[0]
    server.workbooks.delete(workbook.id)
    with pytest.raises(ServerResponseError, match="404006"):
        server.workbooks.get_by_id(workbook.id)
    with pytest.raises(ServerResponseError, match="404011"):
        server.views.get_by_id(view.id)


def test_a_deleted_project_takes_along_what_is_in_it(sandbox: Sandbox, publisher: Publisher, workbook: Any) -> None:
    server = publisher.server
    child = server.projects.create(TSC.ProjectItem(name="below", parent_id=publisher.project.id))
    server.projects.delete(publisher.project.id)
    assert not {publisher.project.id, child.id} & {item.id for item in TSC.Pager(server.projects)}
    left = [*TSC.Pager(server.datasources), *TSC.Pager(server.workbooks)]
    assert not [item for item in left if item.project_id == publisher.project.id]
    default = next(item for item in TSC.Pager(server.projects) if item.name == "default")
    with pytest.raises(ServerResponseError, match="403004"):
        server.projects.delete(default.id)
    with (
        sandbox.tableau(user=sandbox.identity.reader_user) as reader,
        pytest.raises(ServerResponseError, match="403004"),
    ):
        reader.projects.delete(default.id)


def test_the_default_project_is_found_in_any_case(publisher: Publisher) -> None:
    # tabcmd publishes to "Default" where no project is named.
    wanted = TSC.RequestOptions()
    wanted.filter.add(TSC.Filter("name", "eq", "Default"))
    assert [item.name for item in publisher.server.projects.get(wanted)[0]] == ["default"]


def test_the_metadata_api_tells_the_lineage_of_a_workbook(
    publisher: Publisher, source: Source, orders: Any, workbook: Any
) -> None:
    answer = publisher.server.metadata.query(
        """query book($luid: String!) { workbooks(filter: {luid: $luid}) {
            name projectName
            sheets { name luid path parentEmbeddedDatasources {
                name upstreamTables { fullName connectionType database { name } } parentPublishedDatasources { luid }
            } }
            dashboards { name sheets { name } }
        } }""",
        variables={"luid": workbook.id},
        abort_on_error=True,
    )
    (book,) = answer["data"]["workbooks"]
    assert (book["name"], book["projectName"]) == ("Sales book", publisher.project.name)
    sheets = {sheet["name"]: sheet for sheet in book["sheets"]}
    # A hidden sheet has no view, and so no LUID and no path.
    assert {name for name, sheet in sheets.items() if sheet["luid"] == sheet["path"] == ""} == {HIDDEN}
    assert sheets["By month"]["parentEmbeddedDatasources"] == [
        {
            "name": "Orders",
            "upstreamTables": [
                {
                    "fullName": f"[{source.schema}].[T]",
                    "connectionType": "snowflake",
                    "database": {"name": source.database},
                }
            ],
            "parentPublishedDatasources": [{"luid": orders.id}],
        }
    ]
    (own,) = sheets["Own tables"]["parentEmbeddedDatasources"]
    assert [table["fullName"] for table in own["upstreamTables"]] == ["[S].[T]"]
    assert own["parentPublishedDatasources"] == []
    assert book["dashboards"] == [{"name": "Overview", "sheets": [{"name": "By month"}, {"name": HIDDEN}]}]


def test_a_wrong_metadata_query_is_answered_with_errors_and_a_wrong_request_is_refused(publisher: Publisher) -> None:
    server = publisher.server
    answer = server.metadata.query("{ workbooks { nonsense } }")
    assert answer["data"] is None
    assert "nonsense" in answer["errors"][0]["message"]
    with pytest.raises(GraphQLError):
        server.metadata.query("{ workbooks { nonsense } }", abort_on_error=True)
    for body, status, token in (
        ({"query": 1}, 400, server.auth_token),
        ([], 400, server.auth_token),
        ({"query": "{ workbooks { name } }"}, 401, ""),
    ):
        refused = requests.post(server.metadata.baseurl, json=body, headers={"x-tableau-auth": token}, timeout=30)
        assert refused.status_code == status
