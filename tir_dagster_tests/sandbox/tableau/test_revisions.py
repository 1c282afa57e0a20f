"""Revisions: what each publish leaves behind, for how long, and how it is taken away."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.models.target import Target
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster_tests.sandbox.tableau.helpers import Admin, Looker, Publisher
from tir_dagster_tests.sandbox.tableau.live import LiveData, action

ALL = {"op": "gte", "target-col": "K", "const": {"type": "integer", "v": 0}}


@pytest.fixture
def live(publisher: Publisher, look: Looker) -> LiveData:
    return LiveData.publish(publisher, look, [(1, "a")])


def again(live: LiveData, *values: str) -> None:
    for value in values:
        LiveData.publish(live.publisher, live.look, [(1, value)])


def listed(live: LiveData) -> list[tuple[str, bool, bool]]:
    live.endpoint.populate_revisions(live.datasource)
    return [(entry.revision_number, entry.current, entry.deleted) for entry in live.datasource.revisions]


def content(live: LiveData, revision: str) -> list[Any]:
    return live.look.rows(live.publisher.download(live.datasource, revision), 'SELECT "V" FROM "Extract"."Extract"')


def files(live: LiveData) -> set[Path]:
    return set((live.publisher.sandbox.home.data("tableau") / "packages").iterdir())


def test_a_revision_is_what_was_published_and_not_what_became_of_it(live: LiveData) -> None:
    before = files(live)
    live.change(action("delete", ALL, source=False))
    live.change(action("insert"), payload=live.payload([(2, "changed")]))
    assert (content(live, "1"), live.rows()) == ([["a"]], [[2, "changed"]])
    assert len(files(live) - before) == 1
    again(live, "b")
    assert (content(live, "1"), content(live, "2")) == ([["a"]], [["b"]])
    # What the changes had made of the first revision is gone.
    assert len(files(live) - before) == 1


def test_a_removed_revision_is_listed_but_cannot_be_downloaded(live: LiveData) -> None:
    again(live, "b")
    before = files(live)
    live.endpoint.delete_revision(live.datasource.id, "1")
    assert listed(live) == [("1", False, True), ("2", True, False)]
    assert len(before - files(live)) == 1
    for call in (live.publisher.download, lambda source, number: live.endpoint.delete_revision(source.id, number)):
        with pytest.raises(ServerResponseError, match="404004"):
            call(live.datasource, "1")
    with pytest.raises(ServerResponseError, match="400000"):
        live.endpoint.delete_revision(live.datasource.id, "2")
    assert live.rows() == [[1, "b"]]


def test_only_so_many_revisions_are_kept(live: LiveData, admin: Admin) -> None:
    again(live, "b")
    admin.set(revisions_kept=2)
    again(live, "c")
    assert [number for number, _, _ in listed(live)] == ["2", "3"]
    with pytest.raises(ServerResponseError, match="404004"):
        live.publisher.download(live.datasource, "1")


def test_revisions_come_in_pages(live: LiveData) -> None:
    again(live, "b", "c")
    url = f"{live.endpoint.baseurl}/{live.datasource.id}/revisions?pageSize=2&pageNumber=2"
    text = requests.get(url, headers={"x-tableau-auth": live.publisher.server.auth_token}, timeout=30).text
    assert 'totalAvailable="3"' in text
    assert 'revisionNumber="3"' in text
    assert text.count("<revision ") == 1


def test_the_files_of_a_deleted_datasource_are_gone(live: LiveData) -> None:
    again(live, "b")
    live.change(action("delete", ALL, source=False))
    kept = files(live)
    live.endpoint.delete(live.datasource.id)
    assert len(kept - files(live)) == 3


@pytest.mark.parametrize("loses", [False, True], ids=["keeps", "loses"])
def test_overwriting_keeps_the_refresh_tasks_unless_the_server_is_told_to_lose_them(
    live: LiveData, admin: Admin, *, loses: bool
) -> None:
    server = live.publisher.server
    daily = TSC.ScheduleItem(None, None, None, None, TSC.DailyInterval(start_time=dt.time(3)))
    task = TSC.TaskItem(None, "FullRefresh", None, None, daily, target=Target(live.datasource.id, "datasource"))
    server.tasks.create(task)
    admin.set(overwrite_loses_tasks=loses)
    again(live, "b")
    kept = [item for item in TSC.Pager(server.tasks) if item.target.id == live.datasource.id]
    assert len(kept) == (0 if loses else 1)
