"""Connected apps: the scopes that a token asks for, and calls that the server refuses because one is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tir_dagster.refresh.context import USES_BY_DELIVERY
from tir_dagster.retries import Backoff, RetryPolicy
from tir_dagster.sandbox.tableau.scopes import SCOPES
from tir_dagster.tableau.access import ConnectedApp, TableauAccess, TableauToken
from tir_dagster.tableau.calls import CALLS, Use, find_call, scopes_of
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import list_projects
from tir_dagster.tableau.failures import MissingScopeError
from tir_dagster.tableau.jobs import changes_since, check_jobs_are_shown, unfinished_publishes, wait_for_job
from tir_dagster.tableau.refreshes import start_refresh
from tir_dagster.tableau.tasks import find_schedule, scheduled_refreshes
from tir_dagster.tableau.webhooks import our_webhooks, register_webhooks, remove_webhooks
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.rest_calls import PLAYED, address, served
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Orders
from tir_dagster_tests.tableau.helpers import put_on_schedule

Opened = Callable[..., TableauClient]
NAMES = {address(operation): name for name, operation in served().items()}


@pytest.fixture
def app(sandbox: Sandbox) -> ConnectedApp:
    identity = sandbox.identity
    return ConnectedApp(
        identity.connected_app_client_id,
        identity.connected_app_secret_id,
        identity.connected_app_secret_value,
        identity.tableau_user,
    )


@pytest.fixture
def opened(access: TableauAccess, app: ConnectedApp, quick: RetryPolicy, admin: Admin) -> Iterator[Opened]:
    """Opens clients of the connected app with these scopes."""
    admin.forget_calls()
    with ExitStack() as stack:

        def open_client(scopes: tuple[str, ...], more: tuple[str, ...] = ()) -> TableauClient:
            identity = replace(app, scopes=scopes, more_scopes=more)
            client = TableauClient(replace(access, identity=identity), retry=quick, poll=Backoff(0.02, 0.05))
            return stack.enter_context(client)

        yield open_client


def sign_ins(admin: Admin) -> int:
    """How often a connected app of ours signed in since its client was opened."""
    ours = [call for call in admin.calls() if call["agent"].startswith("tir_dagster/")]
    return sum(call["route"] == "sign_in" for call in ours)


# Which scopes


def test_the_stand_in_asks_for_the_scopes_that_the_product_knows() -> None:
    assert {call.shown: call.scope for call in CALLS} == {call.shown: SCOPES[NAMES[call.shown]] for call in CALLS}


@pytest.mark.parametrize("delivery", PLAYED)
def test_a_delivery_asks_for_the_scope_of_every_call_that_it_makes(delivery: str) -> None:
    needed = {SCOPES[name] for name in PLAYED[delivery]} - {""}
    assert needed <= set(scopes_of(USES_BY_DELIVERY[delivery]))


def test_a_delivery_asks_for_nothing_that_it_does_not_do() -> None:
    triggered = scopes_of(USES_BY_DELIVERY["trigger"])
    assert not [scope for scope in triggered if scope.startswith(("tableau:datasources", "tableau:webhooks"))]
    assert "tableau:hyper_data:update" in scopes_of(USES_BY_DELIVERY["patch"])
    assert "tableau:hyper_data:update" not in scopes_of(USES_BY_DELIVERY["republish"])


def test_only_a_connected_app_is_limited(access: TableauAccess, app: ConnectedApp) -> None:
    assert access.limited_to({Use.LOOK}) is access
    limited = replace(access, identity=app).limited_to({Use.LOOK}).identity
    assert isinstance(limited, ConnectedApp)
    assert limited.scopes == ("tableau:content:read",)


def test_further_scopes_come_from_the_environment(sandbox: Sandbox) -> None:
    env = {
        "TABLEAU_SERVER_URL": sandbox.tableau_url,
        "TABLEAU_CONNECTED_APP_CLIENT_ID": "client",
        "TABLEAU_CONNECTED_APP_SECRET_ID": "id",
        "TABLEAU_CONNECTED_APP_SECRET_VALUE": "secret",
        "TABLEAU_USERNAME": "ada",
        "TABLEAU_CONNECTED_APP_SCOPES": "tableau:a:read, tableau:b:* tableau:c:run",
    }
    identity = TableauAccess.from_environment(env).limited_to({Use.LOOK}).identity
    assert isinstance(identity, ConnectedApp)
    assert identity.more_scopes == ("tableau:a:read", "tableau:b:*", "tableau:c:run")
    assert identity.has_scope("tableau:content:read")
    assert identity.has_scope("tableau:b:update")
    assert not identity.has_scope("tableau:a:update")


@pytest.mark.parametrize(
    ("method", "path", "shown"),
    [
        ("GET", "/api/3.26/sites/s-1", "GET /sites/{site}"),
        ("get", "/api/3.26/sites/s-1/datasources?pageSize=1000", "GET S/datasources"),
        ("PUT", "/api/3.26/sites/s-1/fileUploads/7720:17-1:0", "PUT S/fileUploads/{upload}"),
        ("PUT", "/api/2.8/schedules/x", "PUT /schedules/{schedule}"),
        ("POST", "/api/3.26/sites/s-1/workbooks", None),
    ],
)
def test_a_request_is_recognised(method: str, path: str, shown: str | None) -> None:
    call = find_call(method, f"https://tableau.example.com{path}")
    assert (call.shown if call else None) == shown


# What a missing one looks like


def test_a_missing_scope_is_named_and_is_no_lost_session(opened: Opened, orders: Orders, admin: Admin) -> None:
    found = orders.create()
    admin.forget_calls()
    with pytest.raises(MissingScopeError) as caught:
        start_refresh(opened(("tableau:content:read",)), found, incremental=False)
    told = str(caught.value)
    assert "refused POST S/datasources/{datasource}/refresh (401002)" in told
    assert "does not ask for the scope tableau:tasks:run. Add it to TABLEAU_CONNECTED_APP_SCOPES" in told
    assert sign_ins(admin) == 1, "a second sign-in would not bring the scope"


def test_a_scope_that_the_environment_adds_is_enough(opened: Opened, orders: Orders) -> None:
    client = opened(("tableau:content:read",), more=("tableau:tasks:run", "tableau:jobs:*"))
    job = start_refresh(client, orders.create(connections=[orders.credential]), incremental=False).job_id
    assert wait_for_job(client, job, what="a refresh").id == job


def test_waiting_for_a_job_ends_at_once_without_the_scope(opened: Opened, orders: Orders, admin: Admin) -> None:
    client = opened(scopes_of({Use.LOOK, Use.REFRESH}))
    job = start_refresh(client, orders.create(), incremental=False).job_id
    admin.forget_calls()
    with pytest.raises(MissingScopeError, match="the scope tableau:jobs:read"):
        wait_for_job(client, job, what="a refresh")
    assert [call["route"] for call in admin.calls()] == ["get_job"]


def test_a_lost_session_of_a_connected_app_is_renewed(opened: Opened, admin: Admin) -> None:
    client = opened(scopes_of({Use.LOOK}))
    list_projects(client)
    admin.fault("expire_session", path="/projects$")
    assert list_projects(client)
    assert sign_ins(admin) == 2


def test_a_server_that_refuses_what_was_asked_for_is_not_asked_for_ever(opened: Opened, admin: Admin) -> None:
    admin.set(rest_version="3.24")
    client = opened(scopes_of({Use.JOBS}))
    with pytest.raises(MissingScopeError) as caught:
        wait_for_job(client, "1", what="a refresh")
    told = str(caught.value)
    assert "refused GET S/jobs/{job} (401002) right after connected app" in told
    assert "although its token asks for tableau:jobs:read. The server must speak REST 3.25." in told
    assert sign_ins(admin) == 2


def test_a_server_that_shows_no_jobs_to_connected_apps_is_refused_beforehand(
    opened: Opened, client: TableauClient, admin: Admin
) -> None:
    check_jobs_are_shown(opened(scopes_of(Use)))
    admin.set(rest_version="3.24")
    check_jobs_are_shown(client)
    with pytest.raises(Exception, match=r"speaks REST 3\.24.*only from REST 3\.25.* Nothing was touched"):
        check_jobs_are_shown(opened(scopes_of(Use), more=("another:session:read",)))


def test_a_server_that_shows_no_jobs_to_connected_apps_is_not_asked_for_their_list(
    opened: Opened, orders: Orders, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    found = orders.create()
    admin.set(rest_version="3.24")
    client = opened(scopes_of(Use), more=("a:third:session",))
    assert changes_since(client, found, datetime(2025, 1, 1, tzinfo=UTC)) is None
    assert unfinished_publishes(client, "Orders") is None
    admin.set(rest_version="3.26")
    asked = [call["route"] for call in admin.calls() if call["path"].startswith("/api/3.24/")]
    assert (asked, caplog.text) == (["sign_in"], "")


def test_no_scope_lets_a_connected_app_move_a_schedule(opened: Opened, orders: Orders) -> None:
    found = orders.create()
    put_on_schedule(orders, found, f"increments of {orders.project.name}")
    with pytest.raises(MissingScopeError, match=r"Tableau has no scope for this call.* Sign in with a personal access"):
        find_schedule(opened(scopes_of(USES_BY_DELIVERY["server"])), found)


def test_what_goes_on_without_a_scope_says_so_in_the_log(
    opened: Opened, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    found = orders.create()
    with caplog.at_level(logging.WARNING):
        assert scheduled_refreshes(opened(("tableau:content:read",)), found) == ()
    assert "does not ask for the scope tableau:tasks:read" in caplog.text


def test_a_user_without_the_permission_is_told_so_whatever_the_scopes(
    opened: Opened, app: ConnectedApp, access: TableauAccess, sandbox: Sandbox, quick: RetryPolicy
) -> None:
    reader = replace(access, identity=replace(app, username=sandbox.identity.reader_user))
    with TableauClient(reader, retry=quick) as client, pytest.raises(Exception, match="the permission") as caught:
        register_webhooks(client, "label", "https://hooks.example.com/secret")
    assert not isinstance(caught.value, MissingScopeError)


def test_webhooks_need_their_own_scopes_only(opened: Opened, orders: Orders) -> None:
    client, label = opened(scopes_of({Use.WEBHOOKS})), orders.project.id[:8]
    made = register_webhooks(client, label, "https://hooks.example.com/secret")
    assert remove_webhooks(client, label) == made
    assert our_webhooks(client, label) == []


def test_a_token_has_no_scopes(access: TableauAccess) -> None:
    assert isinstance(access.identity, TableauToken)
    assert access.limited_to(()) == access
