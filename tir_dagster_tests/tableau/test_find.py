"""Projects by path, datasources by project and name, and what is read about them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import (
    FoundProject,
    find_datasource,
    find_project,
    look_for_datasource,
    reread,
    server_version,
    settled,
)
from tir_dagster.tableau.publishing import publish
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Naps, Orders
from tir_dagster_tests.tableau.helpers import PASSING


@pytest.fixture
def tree(others: TSC.Server) -> dict[str, str]:
    """`top`, `top/sales`, `other` and `other/sales`, with names of their own; the ids by path."""
    mark = uuid.uuid4().hex[:8]
    ids: dict[str, str] = {}
    for path in (f"top-{mark}", f"top-{mark}/sales-{mark}", f"other-{mark}", f"other-{mark}/sales-{mark}"):
        parent, _, name = path.rpartition("/")
        ids[path] = others.projects.create(TSC.ProjectItem(name, parent_id=ids.get(parent))).id or ""
    return ids


def test_a_project_is_found_by_its_path(client: TableauClient, tree: dict[str, str]) -> None:
    found = {path: find_project(client, path) for path in tree}
    assert {path: project.id for path, project in found.items()} == tree
    assert all(project.path == path for path, project in found.items())


def test_a_bare_name_that_two_projects_have_is_refused_with_their_paths(
    client: TableauClient, tree: dict[str, str]
) -> None:
    nested = sorted(path for path in tree if "/" in path)
    with pytest.raises(DatasourceError) as error:
        find_project(client, nested[0].rpartition("/")[2])
    assert all(repr(path) in str(error.value) for path in nested)
    assert "Write the full path of the project" in str(error.value)


def test_a_bare_name_that_one_project_has_is_enough(client: TableauClient, others: TSC.Server) -> None:
    mark = uuid.uuid4().hex
    top = others.projects.create(TSC.ProjectItem(f"top-{mark}"))
    others.projects.create(TSC.ProjectItem(f"child-{mark}", parent_id=top.id))
    assert find_project(client, f"child-{mark}").path == f"top-{mark}/child-{mark}"


def test_a_slash_in_front_means_the_project_at_the_top(client: TableauClient, others: TSC.Server) -> None:
    name = f"twice-{uuid.uuid4().hex}"
    top = others.projects.create(TSC.ProjectItem(name))
    others.projects.create(TSC.ProjectItem(name, parent_id=top.id))
    assert find_project(client, f"/{name}").id == top.id
    with pytest.raises(DatasourceError, match=f"'/{name}', '{name}/{name}'"):
        find_project(client, name)


def test_an_unknown_project_is_told_with_close_names(client: TableauClient, project: FoundProject) -> None:
    with pytest.raises(DatasourceError) as error:
        find_project(client, project.path.replace("project", "Projekt"))
    assert f"Similar names: '{project.path}'" in str(error.value)
    assert client.where in str(error.value)


def test_everything_about_a_datasource_is_read(orders: Orders) -> None:
    created = orders.create(connections=[orders.credential])
    orders.others.datasources.add_tags(created.id, ["nightly"])
    item = orders.others.datasources.get_by_id(created.id)
    item.description, item.certified, item.certification_note = "All orders", True, "checked"
    orders.others.datasources.update(item)
    found = orders.now()
    assert (found.name, found.project, found.owner_id) == ("Orders", orders.project, orders.client.user_id)
    assert (found.tags, found.description) == ({"nightly"}, "All orders")
    assert (found.certified, found.certification_note, found.has_extracts) == (True, "checked", True)
    (connection,) = found.connections
    assert (connection.type, connection.server_address) == ("snowflake", orders.credential.server_address)
    assert (connection.username, connection.embed_password) == (orders.credential.username, True)
    assert (found.revision, found.size_mb) == (1, 1)
    assert found.webpage_url.endswith("/#/datasources/" + (item.content_url or ""))


def test_projects_of_one_name_have_datasources_of_one_name(
    client: TableauClient, tree: dict[str, str], orders: Orders
) -> None:
    ids = set()
    for path in tree:
        project = find_project(client, path)
        publish(client, orders.packages / "ours.tdsx", project=project, name="Orders")
        found = find_datasource(client, project=project, name="Orders")
        assert found.project.path == path
        ids.add(found.id)
    assert len(ids) == len(tree)


@pytest.mark.parametrize("name", ["Orders, all", "a:b", "[x]", "50 % & more", "st*r", "Ümläut + plus", "it's"])
def test_names_that_a_filter_cannot_say_are_found(orders: Orders, name: str) -> None:
    published = publish(orders.client, orders.packages / "ours.tdsx", project=orders.project, name=name)
    assert find_datasource(orders.client, project=orders.project, name=name).id == published.id


def test_an_unknown_datasource_is_told_with_close_names(orders: Orders) -> None:
    orders.create()
    with pytest.raises(DatasourceError) as error:
        find_datasource(orders.client, project=orders.project, name="orders")
    told = str(error.value)
    assert f"no datasource 'orders' in project '{orders.project.path}'" in told
    assert "Similar names: 'Orders'" in told


def test_a_datasource_in_another_project_is_hinted_at(orders: Orders, client: TableauClient) -> None:
    orders.create()
    with pytest.raises(DatasourceError, match=r"one of that name in .*project-"):
        find_datasource(client, project=find_project(client, "/default"), name="Orders")


@pytest.mark.parametrize("fault", PASSING[::2] + PASSING[-1:])
@pytest.mark.parametrize("path", ["/projects$", "/datasources$", "/connections$", "/revisions$"])
def test_finding_survives_what_passes(
    orders: Orders, client: TableauClient, admin: Admin, path: str, fault: dict[str, Any]
) -> None:
    created = orders.create()
    admin.fault(path=path, **fault)
    project = find_project(client, orders.project.path)
    assert find_datasource(client, project=project, name="Orders") == created
    assert admin.faults() == []


def test_the_version_changes_with_a_publish_by_anybody(orders: Orders) -> None:
    before = server_version(orders.create())
    assert server_version(orders.now()) == before
    orders.publish_by_others()
    assert server_version(orders.now()) != before


def test_after_settling_a_further_change_shows_in_the_time_alone(orders: Orders, naps: Naps) -> None:
    found = orders.create()
    assert server_version(settled(orders.client, found)) == server_version(found)
    assert naps.asked[-1] > 1


def test_a_deleted_datasource_is_none_or_an_error(orders: Orders) -> None:
    found = orders.create()
    orders.others.datasources.delete(found.id)
    assert reread(orders.client, found) is None
    assert look_for_datasource(orders.client, project=orders.project, name="Orders") is None
    with pytest.raises(DatasourceError, match="was deleted"):
        settled(orders.client, found)


def test_a_site_that_shows_no_history_is_read_without(orders: Orders, admin: Admin) -> None:
    created = orders.create()
    admin.fault("status", path="/revisions$", status=403, code="403004")
    found = orders.now()
    assert (found.history, found.revision) == (None, None)
    assert server_version(found) != server_version(created)


def test_a_refused_call_is_told_with_its_code(orders: Orders, admin: Admin) -> None:
    orders.create()
    admin.fault("status", path="/connections$", status=403, code="403004", message="No way.")
    with pytest.raises(DatasourceError) as error:
        orders.now()
    told = str(error.value)
    assert "refused (403004), No way. Give the user behind token" in told
