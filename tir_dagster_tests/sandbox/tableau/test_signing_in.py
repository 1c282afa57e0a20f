"""Who gets in, for how long, and where to."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import jwt
import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from dagster_tableau.resources import TableauServerClient
from tableauserverclient.server.endpoint.exceptions import FailedSignInError, ServerResponseError

from tir_dagster.sandbox.tableau.app import OPERATIONS
from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster.sandbox.tableau.scopes import SCOPES
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin, Publisher, Source


def client(sandbox: Sandbox) -> TSC.Server:
    return TSC.Server(sandbox.tableau_url, use_server_version=True)


def token_auth(sandbox: Sandbox, user: str | None = None, site: str | None = None) -> Any:
    name, secret = sandbox.new_token(user)
    return TSC.PersonalAccessTokenAuth(name, secret, site_id=sandbox.identity.site if site is None else site)


def jwt_auth(sandbox: Sandbox, *, secret: str | None = None, headers: Any = None, **claims: Any) -> Any:
    identity = sandbox.identity
    now = dt.datetime.now(dt.UTC)
    content = {
        "iss": identity.connected_app_client_id,
        "exp": now + dt.timedelta(minutes=5),
        "jti": str(uuid.uuid4()),
        "aud": "tableau",
        "sub": identity.tableau_user,
        "scp": ["tableau:content:read"],
        **claims,
    }
    text = jwt.encode(
        content,
        secret or identity.connected_app_secret_value,
        algorithm="HS256",
        headers=headers or {"kid": identity.connected_app_secret_id, "iss": identity.connected_app_client_id},
    )
    return TSC.JWTAuth(text, site_id=identity.site)


def test_the_client_learns_the_rest_version_from_the_server(sandbox: Sandbox) -> None:
    server = client(sandbox)
    info = server.server_info.get()
    assert (info.rest_api_version, info.product_version) == ("3.26", "2025.3.0")


def test_the_server_info_answers_in_lower_case_too(sandbox: Sandbox) -> None:
    answers = [
        requests.get(f"{sandbox.tableau_url}/api/2.4/{name}", timeout=30) for name in ("serverinfo", "serverInfo")
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].text == answers[1].text


def test_a_token_a_password_and_a_signed_jwt_open_a_session(sandbox: Sandbox) -> None:
    identity = sandbox.identity
    password = TSC.TableauAuth(identity.tableau_user, identity.tableau_password, site_id=identity.site)
    for auth in (token_auth(sandbox), password, jwt_auth(sandbox, scp=["tableau:users:read"])):
        server = client(sandbox)
        with server.auth.sign_in(auth):
            assert server.users.get_by_id(server.user_id).name == identity.tableau_user
            assert server.site_url == identity.site


@pytest.mark.parametrize("scopes", [["tableau:datasources:create"], ["content:read"], [], None])
def test_a_session_of_a_connected_app_without_the_scope_of_a_call_looks_like_one_that_ended(
    sandbox: Sandbox, scopes: list[str] | None
) -> None:
    server = client(sandbox)
    with server.auth.sign_in(jwt_auth(sandbox, scp=scopes)), pytest.raises(FailedSignInError, match="401002"):
        server.projects.get()


@pytest.mark.parametrize("scopes", [["tableau:jobs:read"], ["tableau:jobs:*"], ["tableau:*"]])
def test_a_scope_is_granted_by_its_name_or_a_wildcard(sandbox: Sandbox, scopes: list[str]) -> None:
    server = client(sandbox)
    with server.auth.sign_in(jwt_auth(sandbox, scp=scopes)):
        server.jobs.get()
        # Tableau 2025.1 was the first to show jobs to connected apps.
        server.version = "3.24"
        with pytest.raises(FailedSignInError, match="401002"):
            server.jobs.get()


def test_no_scope_lets_a_connected_app_list_the_work_of_a_schedule(sandbox: Sandbox) -> None:
    server = client(sandbox)
    with server.auth.sign_in(jwt_auth(sandbox, scp=["tableau:*"])), pytest.raises(FailedSignInError, match="401002"):
        server.schedules.get_extract_refresh_tasks("any")


def test_the_scope_of_every_call_is_known() -> None:
    assert {entry.name for entry in OPERATIONS} == SCOPES.keys()


def test_a_second_sign_in_with_one_token_ends_the_first_session(sandbox: Sandbox) -> None:
    auth = token_auth(sandbox)
    first, second = client(sandbox), client(sandbox)
    first.auth.sign_in(auth)
    second.auth.sign_in(auth)
    with pytest.raises(FailedSignInError, match="401002"):
        first.datasources.get()
    second.datasources.get()


def test_password_sessions_live_side_by_side(sandbox: Sandbox) -> None:
    identity = sandbox.identity
    first, second = client(sandbox), client(sandbox)
    for server in (first, second):
        server.auth.sign_in(TSC.TableauAuth(identity.tableau_user, identity.tableau_password, identity.site))
    first.datasources.get()
    second.datasources.get()


@pytest.mark.parametrize(
    "auth",
    [
        TSC.PersonalAccessTokenAuth("tir-token", "wrong"),
        TSC.PersonalAccessTokenAuth("nobody's", "wrong"),
        TSC.TableauAuth("tir", "wrong"),
        TSC.TableauAuth("nobody", ""),
        TSC.JWTAuth("not.a.jwt"),
    ],
    ids=["secret", "token name", "password", "user", "jwt"],
)
def test_wrong_credentials_are_refused_without_saying_what_was_wrong(sandbox: Sandbox, auth: Any) -> None:
    with pytest.raises(FailedSignInError, match="401001"):
        client(sandbox).auth.sign_in(auth)


def test_a_jwt_opens_a_session_once_only(sandbox: Sandbox) -> None:
    auth = jwt_auth(sandbox)
    client(sandbox).auth.sign_in(auth)
    with pytest.raises(FailedSignInError, match="401001"):
        client(sandbox).auth.sign_in(auth)


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp": dt.datetime(2020, 1, 1, tzinfo=dt.UTC)},
        {"exp": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)},
        {"iss": "somebody else"},
        {"aud": "something else"},
        {"sub": "nobody"},
        {"jti": None},
        {"secret": "x" * 32},
        {"headers": {"kid": "unknown"}},
    ],
    ids=["expired", "too long", "issuer", "audience", "user", "no id", "secret", "key"],
)
def test_a_jwt_with_one_thing_wrong_is_refused(sandbox: Sandbox, wrong: dict[str, Any]) -> None:
    with pytest.raises(FailedSignInError, match="401001"):
        client(sandbox).auth.sign_in(jwt_auth(sandbox, **wrong))


def test_signing_out_ends_the_session(sandbox: Sandbox) -> None:
    server = client(sandbox)
    server.auth.sign_in(token_auth(sandbox))
    token, url = server.auth_token, server.datasources.baseurl
    server.auth.sign_out()
    answer = requests.get(url, headers={"x-tableau-auth": token}, timeout=30)
    assert answer.status_code == 401
    assert 'code="401002"' in answer.text


def test_a_session_ends_when_it_idles_too_long(sandbox: Sandbox, admin: Admin) -> None:
    server = client(sandbox)
    server.auth.sign_in(token_auth(sandbox))
    admin.set(session_idle_minutes=0)
    with pytest.raises(FailedSignInError, match="401002"):
        server.datasources.get()
    admin.set(session_idle_minutes=240)
    with pytest.raises(FailedSignInError, match="401002"):
        server.datasources.get()


def test_a_call_without_a_token_is_refused(sandbox: Sandbox, publisher: Publisher) -> None:
    answer = requests.get(publisher.server.datasources.baseurl, timeout=30)
    assert answer.status_code == 401
    assert 'code="401000"' in answer.text


def test_sites_know_nothing_of_each_other(sandbox: Sandbox, publisher: Publisher) -> None:
    datasource = publisher.publish_live("Here")
    with sandbox.tableau(site="other") as elsewhere:
        assert elsewhere.site_id != publisher.server.site_id
        assert publisher.project.name not in {project.name for project in elsewhere.projects.all()}
        with pytest.raises(ServerResponseError, match="404004"):
            elsewhere.datasources.get_by_id(datasource.id)
        # A session cannot reach over to another site by its address.
        url = publisher.server.datasources.baseurl
        answer = requests.get(url, headers={"x-tableau-auth": elsewhere.auth_token}, timeout=30)
        assert answer.status_code == 403


def test_the_default_site_has_the_empty_name(sandbox: Sandbox) -> None:
    server = client(sandbox)
    with server.auth.sign_in(token_auth(sandbox, site="")):
        assert server.site_url == ""
        assert [project.name for project in server.projects.all()][:1] == ["default"]


def test_an_administrator_sees_the_sites_and_moves_between_them(sandbox: Sandbox) -> None:
    server = client(sandbox)
    server.auth.sign_in(token_auth(sandbox))
    sites, _ = server.sites.get()
    assert {site.content_url for site in sites} >= {"", "other", sandbox.identity.site}
    assert server.sites.get_by_id(server.site_id).content_url == sandbox.identity.site
    before = server.auth_token
    server.auth.switch_site(next(site for site in sites if site.content_url == "other"))
    assert server.sites.get_by_id(server.site_id).content_url == "other"
    # The session moved: the old token is spent.
    server._set_auth(server.site_id, server.user_id, before)
    with pytest.raises(FailedSignInError, match="401002"):
        server.projects.get()


def test_a_user_of_one_site_cannot_sign_in_to_another(sandbox: Sandbox) -> None:
    with pytest.raises(FailedSignInError, match="401001"):
        client(sandbox).auth.sign_in(token_auth(sandbox, sandbox.identity.reader_user, site="other"))


def test_a_reader_reads_but_changes_nothing(sandbox: Sandbox, publisher: Publisher) -> None:
    datasource = publisher.publish_live("Read only")
    with sandbox.tableau(user=sandbox.identity.reader_user) as reader:
        assert reader.datasources.get_by_id(datasource.id).name == "Read only"
        item = TSC.DatasourceItem(publisher.project.id, "Mine")
        for attempt in (
            lambda: reader.datasources.publish(item, str(publisher.folder / "live.tds"), "CreateNew"),
            lambda: reader.datasources.refresh(datasource),
            lambda: reader.datasources.delete(datasource.id),
            lambda: reader.datasources.add_tags(datasource, "x"),
            lambda: reader.projects.create(TSC.ProjectItem(name="Mine")),
            reader.schedules.get,
        ):
            with pytest.raises(ServerResponseError, match="403004"):
                attempt()


def test_dagster_tableau_signs_in_refreshes_and_polls(sandbox: Sandbox, publisher: Publisher, source: Source) -> None:
    class LocalClient(TableauServerClient):
        """The client makes https addresses only."""

        @property
        def base_url(self) -> str:
            return f"http://{self.server_name}"

    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    datasource = publisher.publish(
        source.package(Column("ID", "NUMBER(38,0)")), connection_credentials=publisher.credentials
    )
    identity = sandbox.identity
    dagster_client = LocalClient(
        connected_app_client_id=identity.connected_app_client_id,
        connected_app_secret_id=identity.connected_app_secret_id,
        connected_app_secret_value=identity.connected_app_secret_value,
        username=identity.tableau_user,
        site_name=identity.site,
        server_name=sandbox.tableau_url.removeprefix("http://"),
    )
    with dagster_client.sign_in():
        assert datasource.id in {item.id for item in dagster_client.get_data_sources()}
        assert dagster_client.refresh_and_poll_data_source(datasource.id, poll_interval=0.1) == datasource.id


def test_the_call_log_names_every_call(sandbox: Sandbox, admin: Admin) -> None:
    requests.delete(f"{sandbox.tableau_url}/sandbox/calls", timeout=30)
    server = client(sandbox)
    with server.auth.sign_in(token_auth(sandbox)):
        server.projects.get()
    last = wait_for(lambda: admin.calls()[-1:], "the calls to be logged")[0]
    assert (last["method"], last["route"], last["status"]) == ("POST", "sign_out", 204)
    assert {"sign_in", "list_projects"} <= {call["route"] for call in admin.calls()}


# What Tableau Cloud allows in an hour


def test_calls_beyond_what_a_site_allows_in_an_hour_are_refused_in_the_words_of_tableau_cloud(
    publisher: Publisher, admin: Admin
) -> None:
    admin.set(publishes_per_hour=2)
    publisher.publish_live("first")
    publisher.publish_live("second")
    with pytest.raises(ServerResponseError, match=r"429000: Too Many Requests.*\s.*Please retry after 60 minutes"):
        publisher.publish_live("third")
    admin.set(clock_offset_seconds=3601)
    publisher.publish_live("third")
