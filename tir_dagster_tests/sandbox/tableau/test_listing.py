"""Lists: projects within projects, pages, filters, order."""

from __future__ import annotations

from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster_tests.sandbox.tableau.helpers import Publisher

Field, Operator, Direction = TSC.RequestOptions.Field, TSC.RequestOptions.Operator, TSC.RequestOptions.Direction


def options(*filters: Any, sort: str | None = None, page: int = 1, size: int = 100) -> Any:
    request = TSC.RequestOptions(pagenumber=page, pagesize=size)
    for entry in filters:
        request.filter.add(TSC.Filter(*entry))
    if sort:
        request.sort.add(TSC.Sort(Field.Name, sort))
    return request


def in_project(publisher: Publisher) -> tuple[str, str, str]:
    return (Field.ProjectName, Operator.Equals, publisher.project.name)


def names(publisher: Publisher, *filters: Any, **more: Any) -> list[str]:
    items, _ = publisher.server.datasources.get(options(in_project(publisher), *filters, **more))
    return [item.name for item in items]


@pytest.fixture
def three(publisher: Publisher) -> Publisher:
    for name in ("b", "a", "c"):
        publisher.publish_live(name)
    return publisher


def test_many_datasources_come_in_pages_with_the_right_total(publisher: Publisher) -> None:
    wanted = {f"datasource {number:03}" for number in range(250)}
    for name in sorted(wanted):
        publisher.publish_live(name)
    seen = []
    for page, length in ((1, 60), (2, 60), (3, 60), (4, 60), (5, 10)):
        items, pagination = publisher.server.datasources.get(options(in_project(publisher), page=page, size=60))
        assert (len(items), pagination.page_number, pagination.total_available) == (length, page, 250)
        seen += [item.name for item in items]
    assert sorted(seen) == sorted(wanted)
    everything = publisher.server.datasources.filter(project_name=publisher.project.name)
    assert len(everything) == 250, "more than one page of the usual 100"
    assert {item.name for item in everything} == wanted


def test_a_page_beyond_the_last_is_an_error(three: Publisher) -> None:
    with pytest.raises(ServerResponseError, match="400006"):
        three.server.datasources.get(options(in_project(three), page=2))


def test_a_page_of_more_than_1000_is_an_error(three: Publisher) -> None:
    with pytest.raises(ServerResponseError, match="400007"):
        three.server.datasources.get(options(size=1001))


def test_filters_narrow_the_list_all_together(three: Publisher) -> None:
    assert names(three, (Field.Name, Operator.Equals, "b")) == ["b"]
    assert sorted(names(three, (Field.Name, Operator.In, ["a", "c", "z"]))) == ["a", "c"]
    assert names(three, (Field.Name, Operator.Equals, "z")) == []


def test_the_list_is_sorted_as_asked(three: Publisher) -> None:
    assert names(three, sort=Direction.Asc) == ["a", "b", "c"]
    assert names(three, sort=Direction.Desc) == ["c", "b", "a"]


def test_a_comma_in_a_filter_value_breaks_the_expression(three: Publisher) -> None:
    with pytest.raises(ServerResponseError, match="400000"):
        names(three, (Field.Name, Operator.Equals, "Smith, John"))


def test_an_asterisk_stands_for_what_cannot_be_written(publisher: Publisher) -> None:
    publisher.publish_live("Smith, John")
    assert names(publisher, (Field.Name, Operator.Equals, "Smith* John")) == ["Smith, John"]


def test_nested_projects_may_share_a_name(publisher: Publisher) -> None:
    server = publisher.server
    parents = [server.projects.create(TSC.ProjectItem(name=f"{publisher.project.name}/{side}")) for side in "ab"]
    twins = [server.projects.create(TSC.ProjectItem(name="Sales", parent_id=parent.id)) for parent in parents]
    found = [item for item in server.projects.filter(name="Sales") if item.id in {twin.id for twin in twins}]
    assert {item.parent_id for item in found} == {parent.id for parent in parents}
    with pytest.raises(ServerResponseError, match="409006"):
        server.projects.create(TSC.ProjectItem(name="Sales", parent_id=parents[0].id))


def test_twins_in_projects_of_one_name_are_two_datasources(publisher: Publisher) -> None:
    server = publisher.server
    found = []
    for side in "ab":
        parent = server.projects.create(TSC.ProjectItem(name=f"{publisher.project.name}/{side}"))
        project = server.projects.create(TSC.ProjectItem(name=f"twin of {publisher.project.name}", parent_id=parent.id))
        elsewhere = Publisher(publisher.sandbox, server, project, publisher.folder)
        found.append((elsewhere.publish_live("Orders").id, project.id))
    listed = server.datasources.filter(name="Orders", project_name=f"twin of {publisher.project.name}")
    assert sorted((item.id, item.project_id) for item in listed) == sorted(found)
