"""What an overwrite loses is asked for before, and put back after."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.refresh.deliveries.settings import is_remembered, put_back_remembered, remember
from tir_dagster.refresh.state.notes import forget_settings
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, server_version
from tir_dagster.tableau.settings import (
    ConnectionCredential,
    KeptSettings,
    check_credentials,
    keep,
    list_attachments,
    restore,
)
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders

TAGS = {"nightly", "a, b", "ümläut/x"}


@pytest.fixture
def loved(orders: Orders, sandbox: Sandbox) -> FoundDatasource:
    """A datasource that people have tagged, described, certified and given to somebody."""
    created = orders.create(connections=[orders.credential])
    endpoint = orders.others.datasources
    endpoint.add_tags(created.id, TAGS)
    item = endpoint.get_by_id(created.id)
    item.description, item.certified, item.certification_note = "All orders", True, "checked"
    item.owner_id = next(user.id for user in orders.others.users.get()[0] if user.name == sandbox.identity.reader_user)
    endpoint.update(item)
    return orders.now()


def test_what_an_overwrite_loses_is_put_back(orders: Orders, loved: FoundDatasource) -> None:
    kept = keep(loved)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    assert published.tags == frozenset(), "the server forgets the tags"
    assert published.owner_id == orders.client.user_id, "and the owner"
    restored = restore(orders.client, published, kept)
    assert restored.warnings == ()
    assert keep(restored.datasource) == keep(orders.now()) == kept
    assert restored.datasource.tags == TAGS
    assert restored.datasource.connections[0].embed_password
    assert server_version(restored.datasource) == server_version(orders.now())


def test_texts_that_were_lost_are_put_back(orders: Orders, loved: FoundDatasource) -> None:
    item = orders.others.datasources.get_by_id(loved.id)
    item.description, item.certified = "", False
    orders.others.datasources.update(item)
    restored = restore(orders.client, orders.now(), keep(loved))
    assert (restored.datasource.description, restored.datasource.certified) == ("All orders", True)
    assert restored.datasource.owner_id == loved.owner_id


def test_nothing_is_sent_when_nothing_was_lost(client: TableauClient, loved: FoundDatasource, admin: Admin) -> None:
    admin.fault("status", method="PUT", status=500, times=9)
    restored = restore(client, loved, keep(loved))
    assert (restored.datasource, restored.warnings) == (loved, ())


def test_an_owner_that_only_an_administrator_may_set_is_warned_about(
    orders: Orders, loved: FoundDatasource, admin: Admin
) -> None:
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", method="PUT", path=r"/datasources/[^/]+$", status=403, code="403004")
    restored = restore(orders.client, published, keep(loved))
    (warning,) = restored.warnings
    assert "Could not put back the owner" in warning
    assert "must be set again by hand" in warning
    assert restored.datasource.tags == TAGS, "the tags are back nevertheless"


def test_what_to_put_back_can_be_written_down(loved: FoundDatasource) -> None:
    kept = keep(loved)
    assert KeptSettings.from_json(json.loads(json.dumps(kept.as_json()))) == kept


def test_what_was_written_down_is_put_back_after_the_publish(
    orders: Orders, loved: FoundDatasource, tmp_path: Path
) -> None:
    folder = tmp_path
    remember(loved, folder)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    # A second publish before anything was put back, as after a crash.
    remember(published, folder)
    assert put_back_remembered(orders.client, published, folder).warnings == ()
    assert keep(orders.now()) == keep(loved)
    assert not is_remembered(folder)


def test_a_publish_that_never_landed_took_nothing(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    remember(loved, tmp_path)
    # A later second, so that the edit moves the version, as a publish would.
    admin.set(clock_offset_seconds=5)
    orders.others.datasources.delete_tags(loved.id, "nightly")
    item = orders.others.datasources.get_by_id(loved.id)
    item.description = "All orders since May"
    orders.others.datasources.update(item)
    edited = orders.now()
    assert put_back_remembered(orders.client, edited, tmp_path).warnings == ()
    assert keep(orders.now()) == keep(edited), "what somebody changed on purpose stays changed"
    remember(edited, tmp_path)
    published = orders.overwrite(expected=server_version(edited), connections=[orders.credential])
    assert put_back_remembered(orders.client, published, tmp_path).warnings == ()
    assert keep(orders.now()) == keep(edited), "and the next publish keeps it so"
    assert not is_remembered(tmp_path)


def test_a_publish_that_lands_when_nobody_expects_it_any_more_loses_nothing(
    orders: Orders, loved: FoundDatasource, tmp_path: Path
) -> None:
    remember(loved, tmp_path)
    assert put_back_remembered(orders.client, loved, tmp_path, landed=False).warnings == ()
    late = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    assert keep(late) != keep(loved)
    # Nothing but the note tells by now that it was ours; the next publish is about to write down what is there.
    assert put_back_remembered(orders.client, late, tmp_path, foreign=True).warnings == ()
    assert keep(orders.now()) == keep(loved)


def test_an_owner_who_comes_back_late_finds_the_texts_as_people_left_them(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    remember(loved, tmp_path)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", method="PUT", path=r"/datasources/[^/]+$", status=500, times=99)
    (warning,) = put_back_remembered(orders.client, published, tmp_path).warnings
    assert "The next refresh puts back the owner" in warning
    admin.clear_faults()
    item = orders.others.datasources.get_by_id(loved.id)
    item.description = "All orders since May"
    orders.others.datasources.update(item)
    assert put_back_remembered(orders.client, orders.now(), tmp_path).warnings == ()
    assert keep(orders.now()) == replace(keep(loved), description="All orders since May")


def test_what_our_publish_took_comes_back_although_tableau_refreshed_the_rows_since(
    orders: Orders, loved: FoundDatasource, tmp_path: Path
) -> None:
    remember(loved, tmp_path)
    orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    # The rows are Tableau's by now, and the last publish is still ours.
    assert put_back_remembered(orders.client, orders.now(), tmp_path, foreign=True).warnings == ()
    assert keep(orders.now()) == keep(loved)


@pytest.mark.parametrize("ours_too", [True, False])
def test_what_somebody_else_published_after_us_is_left_alone_and_what_we_took_is_named(
    orders: Orders, loved: FoundDatasource, tmp_path: Path, ours_too: bool
) -> None:
    remember(loved, tmp_path)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    (first, ours), theirs = published.history or (), "somebody else"
    later = [replace(ours, number=3, publisher_id=theirs)] if ours_too else [replace(ours, publisher_id=theirs)]
    now = replace(published, history=(first, ours, *later) if ours_too else (first, *later), description="")
    restored = put_back_remembered(orders.client, now, tmp_path, [orders.credential])
    told = "; ".join(restored.warnings)
    assert ("The tags (a, b, nightly, ümläut/x) of datasource 'Orders'" in told) == ours_too
    assert ("certification ('All orders', certified with the note 'checked')" in told) == ours_too
    assert orders.now() == published, "nothing was put back"
    assert not is_remembered(tmp_path)


def test_what_the_server_is_only_in_trouble_with_is_put_back_later(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    folder = tmp_path
    remember(loved, folder)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", method="PUT", path="/tags$", status=500, times=3)
    (warning,) = put_back_remembered(orders.client, published, folder).warnings
    assert warning.endswith(f"The next refresh puts back the tags of {loved.shown}.")
    assert put_back_remembered(orders.client, orders.now(), folder).warnings == ()
    assert keep(orders.now()) == keep(loved)


def test_what_was_put_back_is_peoples_own_from_then_on(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    remember(replace(loved, description="Orders of old"), tmp_path)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", method="PUT", path="/tags$", status=500, times=3)
    assert put_back_remembered(orders.client, published, tmp_path).datasource.description == "Orders of old"
    item = orders.others.datasources.get_by_id(loved.id)
    item.description = "All orders since May"
    orders.others.datasources.update(item)
    assert put_back_remembered(orders.client, orders.now(), tmp_path).warnings == ()
    assert (orders.now().tags, orders.now().description) == (TAGS, "All orders since May")
    assert not is_remembered(tmp_path)


def test_what_could_not_be_put_back_comes_back_with_the_rest_after_another_publish(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    remember(loved, tmp_path)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", method="PUT", path="/tags$", status=500, times=3)
    put_back_remembered(orders.client, published, tmp_path)
    orders.others.datasources.add_tags(loved.id, ["urgent"])
    now = orders.now()
    assert (now.tags, now.owner_id) == ({"urgent"}, loved.owner_id)
    remember(now, tmp_path)
    published = orders.overwrite(expected=server_version(now), connections=[orders.credential])
    assert put_back_remembered(orders.client, published, tmp_path).warnings == ()
    assert keep(orders.now()) == replace(keep(loved), tags=frozenset({*TAGS, "urgent"}))


@pytest.mark.parametrize("landed", [True, False])
def test_where_no_revisions_are_shown_the_rows_tell_whether_our_publish_took_anything(
    orders: Orders, loved: FoundDatasource, tmp_path: Path, landed: bool
) -> None:
    remember(replace(loved, history=None), tmp_path)
    orders.others.datasources.delete_tags(loved.id, "nightly")
    now = replace(orders.now(), history=None, size_mb=7)
    put_back_remembered(orders.client, now, tmp_path, landed=landed)
    assert ("nightly" in orders.now().tags) == landed
    assert not is_remembered(tmp_path)


def test_a_user_name_that_people_changed_comes_back(orders: Orders, tmp_path: Path) -> None:
    created = orders.create()
    item = orders.others.datasources.get_by_id(created.id)
    orders.others.datasources.populate_connections(item)
    (connection,) = item.connections
    connection.username = "ANALYST"
    orders.others.datasources.update_connection(item, connection)
    renamed = orders.now()
    remember(renamed, tmp_path)
    published = orders.overwrite(expected=server_version(renamed))
    assert published.connections[0].username != "ANALYST"
    assert put_back_remembered(orders.client, published, tmp_path).warnings == ()
    assert orders.now().connections[0].username == "ANALYST"


class Forgetful(TableauClient):
    """Somebody takes the tags away as soon as they are back."""

    others: Any

    def call(self, action: Any, *, doing: str, repeat: bool = True) -> Any:
        answer = super().call(action, doing=doing, repeat=repeat)
        if doing.startswith("put back the tags"):
            self.others(doing)
        return answer


def test_what_the_server_does_not_show_afterwards_is_named(orders: Orders, loved: FoundDatasource) -> None:
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    with Forgetful(orders.client.access, retry=orders.client.retry) as client:
        client.others = lambda _: orders.others.datasources.delete_tags(loved.id, "nightly")
        restored = restore(client, published, keep(loved))
    (warning,) = restored.warnings
    assert warning.startswith(f"The tags (nightly) of {loved.shown} must be set again by hand")


def test_a_connection_that_people_pointed_elsewhere_comes_back_with_its_password(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    item = orders.others.datasources.get_by_id(loved.id)
    orders.others.datasources.populate_connections(item)
    connection = item.connections[0]
    connection.server_address, connection.username, connection.password = "proxy.example.com", "PROXY_USER", "x"
    connection.embed_password = True
    orders.others.datasources.update_connection(item, connection)
    pointed = orders.now()
    named = ConnectionCredential("proxy.example.com", "PROXY_USER", "y")
    remember(pointed, tmp_path)
    assert "password" not in json.loads((tmp_path / "kept.json").read_text())["kept"]["connections"][0]
    published = orders.overwrite(expected=server_version(pointed), connections=[named])
    assert not published.connections[0].embed_password, "the package names another server, which must not get them"
    admin.forget_calls()
    restored = put_back_remembered(orders.client, published, tmp_path, [named])
    assert restored.warnings == ()
    assert keep(orders.now()) == keep(pointed)
    puts = [call["route"] for call in admin.calls() if call["method"] == "PUT"]
    assert puts == ["add_tags", "update_connection", "update_datasource"], (
        "the owner last, who could still refuse the rest"
    )


def test_a_password_that_nobody_names_any_more_is_warned_about(orders: Orders, loved: FoundDatasource) -> None:
    orders.others.datasources.delete(loved.id)
    restored = restore(orders.client, orders.create(), keep(loved))
    assert restored.again == ()
    (warning,) = [one for one in restored.warnings if "connection" in one]
    assert "no credentials are named for it" in warning
    assert "must be set again by hand" in warning


def test_tasks_and_subscriptions_that_are_gone_after_the_publish_are_named(
    orders: Orders, loved: FoundDatasource, tmp_path: Path
) -> None:
    others, folder = orders.others, tmp_path
    tasks = [schedule_refresh(others, loved, kind) for kind in ("FullRefresh", "IncrementalRefresh")]
    target = TSC.Target(loved.id, "Workbook")
    subscription = others.subscriptions.create(TSC.SubscriptionItem("Daily", str(uuid.uuid4()), others.user_id, target))
    remember(loved, folder, list_attachments(orders.client, loved))
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    others.tasks.delete(tasks[1])
    others.subscriptions.delete(subscription.id)
    task, subscribed = put_back_remembered(orders.client, published, folder).warnings
    assert task.startswith(f"{loved.shown} lost its incremental refresh on a schedule of its own when")
    assert subscribed.startswith(f"The subscription 'Daily' is gone since {loved.shown} was overwritten.")


def schedule_refresh(others: TSC.Server, found: FoundDatasource, kind: str) -> str:
    """The id of a daily refresh with a time of its own."""
    interval = TSC.DailyInterval(dt.time(3, 0))
    schedule = TSC.ScheduleItem(None, None, None, None, interval)  # type: ignore[arg-type]
    item = TSC.TaskItem(None, kind, None, schedule_item=schedule, target=TSC.Target(found.id, "datasource"))  # type: ignore[arg-type]
    answer = others.tasks.create(item)
    return str(ET.fromstring(answer).find(".//{*}extractRefresh").get("id"))  # type: ignore[union-attr]


def test_what_nobody_may_look_at_is_not_said_to_be_gone(
    orders: Orders, loved: FoundDatasource, admin: Admin, tmp_path: Path
) -> None:
    remember(loved, tmp_path, list_attachments(orders.client, loved))
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    admin.fault("status", path="/(subscriptions|tasks/extractRefreshes)$", status=403, code="403004", times=2)
    assert put_back_remembered(orders.client, published, tmp_path).warnings == ()
    assert admin.faults() == []


def test_what_was_written_down_of_another_datasource_is_left_alone(
    orders: Orders, loved: FoundDatasource, tmp_path: Path
) -> None:
    remember(replace(loved, id="another"), tmp_path)
    orders.others.datasources.delete_tags(loved.id, "nightly")
    put_back_remembered(orders.client, orders.now(), tmp_path)
    assert "nightly" not in orders.now().tags


def test_what_is_forgotten_is_not_put_back(orders: Orders, loved: FoundDatasource, tmp_path: Path) -> None:
    remember(loved, tmp_path)
    published = orders.overwrite(expected=server_version(loved), connections=[orders.credential])
    forget_settings(tmp_path)
    assert put_back_remembered(orders.client, published, tmp_path).datasource == published


@pytest.mark.parametrize("changes", [{"server_address": "elsewhere.snowflakecomputing.com"}, {"server_port": "9"}])
def test_credentials_for_something_else_do_not_count(
    loved: FoundDatasource, credential: ConnectionCredential, changes: dict[str, object]
) -> None:
    found = replace(loved, connections=tuple(replace(item, server_port="443") for item in loved.connections))
    check_credentials(found, [credential])
    with pytest.raises(DatasourceError) as error:
        check_credentials(found, [replace(credential, **changes)])  # type: ignore[arg-type]
    assert credential.server_address in str(error.value)
    assert credential.password not in str(error.value)


def test_a_datasource_without_embedded_credentials_needs_none(orders: Orders) -> None:
    check_credentials(orders.create(), [])
