"""Signing in: shared sessions, sessions that end, servers that cannot be reached."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.retries import RetryPolicy
from tir_dagster.tableau.access import ConnectedApp, TableauAccess, TableauPassword, TableauToken
from tir_dagster.tableau.client import TableauClient, Timeouts
from tir_dagster.tableau.datasources import list_projects
from tir_dagster.tableau.failures import SignInError
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import Admin
from tir_dagster_tests.tableau.conftest import Naps


def sign_ins(admin: Admin) -> int:
    return sum(call["route"] == "sign_in" for call in admin.calls())


@pytest.fixture(autouse=True)
def _empty_call_log(sandbox: Sandbox) -> None:
    """The log is bounded: what is counted in it must begin with the test."""
    requests.delete(f"{sandbox.tableau_url}/sandbox/calls", timeout=30).raise_for_status()


def refusal(client: TableauClient) -> str:
    with pytest.raises(DatasourceError) as error:
        list_projects(client)
    return str(error.value)


def test_nothing_is_sent_before_the_first_call(access: TableauAccess, admin: Admin) -> None:
    with TableauClient(access) as client:
        assert access.identity.name in repr(client)  # type: ignore[union-attr]
    assert admin.calls() == []


def test_two_clients_with_one_token_share_the_session(access: TableauAccess, admin: Admin, quick: RetryPolicy) -> None:
    before = sign_ins(admin)
    with TableauClient(access, retry=quick) as first, TableauClient(access, retry=quick) as second:
        assert list_projects(first) == list_projects(second)
        assert first.user_id == second.user_id
    assert sign_ins(admin) == before + 1


def test_the_last_to_leave_signs_out(access: TableauAccess, admin: Admin, quick: RetryPolicy) -> None:
    with TableauClient(access, retry=quick) as first:
        with TableauClient(access, retry=quick) as second:
            list_projects(second)
        list_projects(first)
        assert admin.calls()[-1]["route"] == "list_projects"
    assert admin.calls()[-1]["route"] == "sign_out"


def test_many_threads_sign_in_once(access: TableauAccess, admin: Admin, quick: RetryPolicy) -> None:
    before, together = sign_ins(admin), threading.Barrier(6)

    def work(_: int) -> int:
        with TableauClient(access, retry=quick) as client:
            together.wait()
            number = len(list_projects(client))
            together.wait()
            return number

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(work, range(6)))) == 1
    assert sign_ins(admin) == before + 1


def test_a_session_that_ended_is_renewed_once_for_all_threads(
    client: TableauClient, admin: Admin, sandbox: Sandbox
) -> None:
    list_projects(client)
    before = sign_ins(admin)
    admin.fault("expire_session", path="/projects$")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: list_projects(client), range(4)))
    # Whoever was already under way with the old session finds that another one renewed it.
    assert sign_ins(admin) == before + 1


def test_a_token_that_is_used_elsewhere_is_told(client: TableauClient, admin: Admin) -> None:
    list_projects(client)
    admin.fault("expire_session", path="/projects$", times=2)
    told = refusal(client)
    assert f"{client.access.identity.shown} again right after a new sign-in" in told
    assert "give each process a token of its own" in told


def test_another_process_with_the_token_costs_one_new_sign_in(
    client: TableauClient, access: TableauAccess, sandbox: Sandbox
) -> None:
    list_projects(client)
    server = TSC.Server(sandbox.tableau_url, use_server_version=True)
    server.auth.sign_in(access.credentials())
    assert list_projects(client)


def test_one_token_is_not_used_for_two_sites_at_once(access: TableauAccess, client: TableauClient) -> None:
    list_projects(client)
    with pytest.raises(DatasourceError, match="Use one token per site"):
        TableauClient(replace(access, site="other")).__enter__()


@pytest.mark.parametrize(
    "identity", [TableauToken("no-such-token", "s3cret:s3cret"), TableauPassword("nobody", "s3cret")]
)
def test_wrong_credentials_are_told_without_the_secret(
    access: TableauAccess, quick: RetryPolicy, naps: Naps, identity: TableauToken | TableauPassword
) -> None:
    with TableauClient(replace(access, identity=identity), retry=quick) as client, pytest.raises(SignInError) as caught:
        list_projects(client)
    told = str(caught.value)
    assert told.startswith(f"Could not sign in with {identity.shown}")
    assert "(401001)" in told
    assert "TABLEAU_SITE" in told
    assert "s3cret" not in told
    assert naps.asked == [], "a wrong token does not become right by trying again"


def test_a_wrong_site_is_told(access: TableauAccess, quick: RetryPolicy) -> None:
    with TableauClient(replace(access, site="no-such-site"), retry=quick) as client:
        assert "site 'no-such-site'" in refusal(client)


def test_users_and_connected_apps_sign_in_too(access: TableauAccess, sandbox: Sandbox, quick: RetryPolicy) -> None:
    identity = sandbox.identity
    app = ConnectedApp(
        identity.connected_app_client_id,
        identity.connected_app_secret_id,
        identity.connected_app_secret_value,
        identity.tableau_user,
    )
    for way in (TableauPassword(identity.tableau_user, identity.tableau_password), app):
        with TableauClient(replace(access, identity=way), retry=quick) as client:
            assert list_projects(client)


def test_a_server_that_is_not_there_is_told(quick: RetryPolicy, naps: Naps) -> None:
    nowhere = TableauAccess("http://127.0.0.1:9", "sales", TableauToken("nightly", "s3cret"))
    with TableauClient(nowhere, retry=quick) as client:
        told = refusal(client)
    assert "http://127.0.0.1:9 (site 'sales') cannot be reached, connection refused" in told
    assert "Check TABLEAU_SERVER_URL" in told
    assert len(naps.asked) == 2


def test_a_name_that_nobody_knows_is_told(quick: RetryPolicy) -> None:
    nowhere = TableauAccess("http://tableau.invalid", "sales", TableauToken("nightly", "s3cret"))
    with TableauClient(nowhere, retry=quick) as client:
        assert "cannot be reached" in refusal(client)


def test_something_that_is_no_tableau_server_is_told(
    access: TableauAccess, sandbox: Sandbox, quick: RetryPolicy
) -> None:
    other = f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}"
    with TableauClient(replace(access, server_url=other), retry=quick) as client:
        assert "Check that TABLEAU_SERVER_URL is the address of Tableau Server itself" in refusal(client)


@pytest.mark.parametrize("path", ["serverInfo$", "signin$"])
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 429, "retry_after": 7},
        {"kind": "status", "status": 503},
        {"kind": "cut", "when": "before"},
        {"kind": "cut", "when": "after"},
        {"kind": "cut", "when": "during"},
    ],
)
def test_signing_in_survives_what_passes(
    client: TableauClient, admin: Admin, naps: Naps, path: str, fault: dict[str, object]
) -> None:
    admin.fault(path=path, **fault)  # type: ignore[arg-type]
    assert list_projects(client)
    assert client.rest_version == (3, 26), "a failed look at the version must not lead back to an old one"
    assert (7 in naps.asked) is ("retry_after" in fault)


def test_a_server_that_stays_in_trouble_is_told(client: TableauClient, admin: Admin) -> None:
    admin.fault("status", path="/projects$", status=503, message="Service Unavailable.", times=9)
    told = refusal(client)
    assert "Could not list the projects" in told
    assert "it failed (503: Resource Not Found: Service Unavailable)" in told


def test_a_server_that_stays_busy_is_told(client: TableauClient, admin: Admin) -> None:
    admin.fault("status", path="/projects$", status=429, times=9)
    assert "Run fewer refreshes at once" in refusal(client)


def test_a_server_that_does_not_answer_is_given_up(access: TableauAccess, admin: Admin, quick: RetryPolicy) -> None:
    admin.fault("delay", path="serverInfo$", seconds=0.6, times=9)
    with TableauClient(access, retry=quick, timeouts=Timeouts(read_seconds=0.1)) as client:
        assert "no answer in time" in refusal(client)


def test_a_client_is_used_inside_its_block(access: TableauAccess) -> None:
    client = TableauClient(access)
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        list_projects(client)
    with client, pytest.raises(RuntimeError, match="in use already"):
        client.__enter__()


def test_leaving_does_not_fail_with_the_server(access: TableauAccess, admin: Admin, quick: RetryPolicy) -> None:
    with TableauClient(access, retry=quick) as client:
        list_projects(client)
        admin.fault("status", path="signout$", status=500)
