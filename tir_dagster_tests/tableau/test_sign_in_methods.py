"""A datasource signs in after a publish as it did before: by password, key pair or saved OAuth credential, or nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import DatasourceError
from tir_dagster.files import VirtualFile
from tir_dagster.refresh.context import ServerLook
from tir_dagster.refresh.datasource import credentials_for, fetch_shell
from tir_dagster.refresh.deliveries import whole
from tir_dagster.refresh.deliveries.settings import is_remembered
from tir_dagster.refresh.deliveries.whole import Delivered, deliver, finish_delivery
from tir_dagster.spec.extract import Credentials, ExtractSpec
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.datasources import Connection, FoundDatasource, SignInMethod
from tir_dagster.tableau.failures import RefusedError
from tir_dagster.tableau.publishing import Parcel, publish
from tir_dagster.tableau.settings import (
    ConnectionCredential,
    check_credentials,
    check_settable,
    credential_to_publish,
    lost_connections,
)
from tir_dagster_tests.sandbox.tableau.helpers import Admin, forget_credentials, rewritten, save_credential
from tir_dagster_tests.tableau.conftest import Orders

KEY_PAIR = Credentials(method="key_pair", username="TIR")
OAUTH = Credentials(method="oauth", username="TIR")
ENV = {"THE_PASSWORD": "secret"}


def spec(orders: Orders, credentials: Credentials | None) -> ExtractSpec:
    datasource = {"name": "Orders", "project": orders.project.path}
    value = {"name": "orders", "source": "A.B.C", "row_key": "ID", "datasource": datasource}
    read = spec_from_mapping(value, "a test")
    return replace(read, datasource=replace(read.datasource, credentials=credentials))


@pytest.fixture
def new_server(admin: Admin) -> None:
    """A server that knows key pairs; before anybody signs in."""
    admin.set(rest_version="3.27")


@pytest.fixture
def saved(orders: Orders) -> Iterator[None]:
    """A key pair and an OAuth token in the account settings of the user who publishes."""
    url = orders.others.server_address
    user = orders.others.users.get_by_id(orders.client.user_id).name
    server = orders.credential.server_address
    for method in ("key_pair", "oauth"):
        save_credential(url, user=user, method=method, server=server, username="TIR", secret="a secret")
    yield
    forget_credentials(url)


def signing_in_by(orders: Orders, authentication: str) -> FoundDatasource:
    """The datasource with a connection that somebody has set so."""
    made = orders.create()
    item = TSC.ConnectionItem()
    item._id, item.username, item.embed_password = made.connections[0].id, "TIR", True
    item.auth_type = authentication
    if authentication == "Username Password":
        item.password = "secret"
    orders.others.datasources.update_connection(made, item)
    return orders.now()


def by_oauth(orders: Orders, folder: Path) -> FoundDatasource:
    """The datasource from a package that was made with an OAuth connection, with the publisher's saved credential."""
    file = rewritten(
        orders.packages / "ours.tdsx",
        folder / "oauth.tdsx",
        edit=lambda text: text.replace('authentication="Username Password"', 'authentication="oauth"'),
    )
    credential = replace(orders.credential, username="TIR", password="", method="oauth")
    options: dict[str, Any] = {"connections": [credential], "servers": [credential.server_address]}
    return publish(orders.client, file, project=orders.project, name="Orders", **options)


def redeliver(orders: Orders, told: ExtractSpec, folder: Path, **more: Any) -> Delivered:
    look = ServerLook(orders.project, orders.now())
    credentials = credentials_for(told, look.datasource, ENV, rest_version=orders.client.rest_version)
    assert look.datasource is not None
    shell, hyper = fetch_shell(orders.client, look.datasource, folder / "download")
    options: dict[str, Any] = {"hyper": hyper, "shell": shell, "rows": 0, "home": folder, "log": lambda _: None}
    return deliver(orders.client, told, look, credentials=credentials, **options, **more)


def state(found: FoundDatasource) -> tuple[str, str, bool]:
    (connection,) = found.connections
    return connection.authentication, connection.username, connection.embed_password


@pytest.mark.usefixtures("new_server", "saved")
@pytest.mark.parametrize("before", ["auth-keypair", "Username Password"])
def test_a_key_pair_is_set_again_after_the_publish(orders: Orders, admin: Admin, tmp_path: Path, before: str) -> None:
    signing_in_by(orders, before)
    admin.forget_calls()
    assert redeliver(orders, spec(orders, KEY_PAIR), tmp_path).warnings == ()
    assert state(orders.now()) == ("auth-keypair", "TIR", True)
    changes = [call["route"] for call in admin.calls() if call["method"] in ("POST", "PUT")]
    assert changes == ["publish", "update_connection"]


@pytest.mark.usefixtures("new_server", "saved")
def test_a_key_pair_that_a_crash_left_out_is_set_by_the_next_run(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CrashError(Exception): ...

    def crash(step: str) -> None:
        if step == "landed":
            raise CrashError

    told = spec(orders, KEY_PAIR)
    signing_in_by(orders, "auth-keypair")
    monkeypatch.setattr(whole, "crash_after", crash)
    with pytest.raises(CrashError):
        redeliver(orders, told, tmp_path)
    monkeypatch.undo()
    assert state(orders.now()) == ("Username Password", "TIR", False)
    note = json.loads((tmp_path / "kept.json").read_text())
    assert note["kept"]["connections"][0]["authentication"] == "auth-keypair"
    look = ServerLook(orders.project, orders.now())
    _, warnings = finish_delivery(orders.client, told, look, home=tmp_path, env=ENV, foreign=False, landed=True)
    assert warnings == ()
    assert state(orders.now()) == ("auth-keypair", "TIR", True)
    assert not is_remembered(tmp_path)


@pytest.mark.usefixtures("saved")
def test_a_server_that_cannot_set_a_key_pair_again_is_not_published_to(orders: Orders, tmp_path: Path) -> None:
    signing_in_by(orders, "Username Password")
    with pytest.raises(DatasourceError, match=r"key pair can be set again from REST 3\.27 on: the server speaks 3\.26"):
        redeliver(orders, spec(orders, KEY_PAIR), tmp_path)
    # Not even by a caller who did not ask before.
    named = replace(orders.credential, username="TIR", password="", method="key_pair")
    with pytest.raises(DatasourceError, match="Nothing was touched"):
        orders.overwrite(connections=[named])
    assert orders.now().revision == 1


def test_a_saved_oauth_credential_comes_with_the_publish(
    orders: Orders, saved: None, admin: Admin, tmp_path: Path
) -> None:
    by_oauth(orders, tmp_path)
    admin.forget_calls()
    assert redeliver(orders, spec(orders, OAUTH), tmp_path).warnings == ()
    assert state(orders.now()) == ("oauth", "TIR", True)
    assert [call["route"] for call in admin.calls() if call["method"] in ("POST", "PUT")] == ["publish"]


def test_an_oauth_credential_that_is_gone_stops_the_publish(orders: Orders, saved: None, tmp_path: Path) -> None:
    by_oauth(orders, tmp_path)
    forget_credentials(orders.others.server_address)
    with pytest.raises(RefusedError, match=r"no saved OAuth credential for 'TIR'.* Nothing was published"):
        redeliver(orders, spec(orders, OAUTH), tmp_path)
    assert state(orders.now()) == ("oauth", "TIR", True)


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (None, "would lose the OAuth token embedded"),
        (Credentials(username="TIR", password_env="THE_PASSWORD"), "signs in by OAuth token, .* names a password"),
        (KEY_PAIR, "signs in by OAuth token, .* names a key pair"),
    ],
)
def test_the_token_of_a_person_is_not_overwritten(
    orders: Orders, saved: None, tmp_path: Path, named: Credentials | None, problem: str
) -> None:
    by_oauth(orders, tmp_path)
    with pytest.raises(DatasourceError, match=problem) as refused:
        redeliver(orders, spec(orders, named), tmp_path)
    assert "belongs to a person" in str(refused.value)
    assert "method: key_pair" in str(refused.value)
    assert orders.now().revision == 1


# What is decided without a server

CONNECTION = Connection("1", "snowflake", "a.b.c", "443", "TIR", embed_password=True)


def named_by(method: SignInMethod, address: str = "a.b.c") -> ConnectionCredential:
    return ConnectionCredential(address, "TIR", "secret" if method == "password" else "", method=method)


@pytest.mark.parametrize(
    ("authentication", "fitting"),
    [
        ("Username Password", {"password", "key_pair"}),
        ("auth-user-pass", {"password", "key_pair"}),
        ("auth-keypair", {"key_pair"}),
        ("oauth", {"oauth"}),
        ("auth-oauth-service-account", {"oauth"}),
        # The server does not show it: the spec is believed.
        ("", {"password", "key_pair", "oauth"}),
    ],
)
def test_only_a_password_may_become_something_else(orders: Orders, authentication: str, fitting: set[str]) -> None:
    connection = replace(CONNECTION, authentication=authentication)
    found = replace(orders.create(), connections=(connection,))
    for method in ("password", "key_pair", "oauth"):
        if method in fitting:
            check_credentials(found, [named_by(method)])
        else:
            with pytest.raises(DatasourceError, match="Nothing was touched"):
                check_credentials(found, [named_by(method)])


@pytest.mark.parametrize(
    ("shown", "lost"),
    [
        ({"authentication": "auth-keypair"}, False),
        ({"authentication": "auth-keypair", "username": ""}, False),
        ({"authentication": "auth-keypair", "username": "SOMEBODY"}, True),
        ({"authentication": "auth-keypair", "embed_password": False}, True),
        ({"authentication": "Username Password"}, True),
        ({"authentication": ""}, True),
    ],
)
def test_what_the_server_shows_afterwards_is_compared_with_the_spec(shown: dict[str, Any], lost: bool) -> None:
    before = replace(CONNECTION, authentication="Username Password")
    now = replace(CONNECTION, **shown)
    assert bool(list(lost_connections([now], [before], [named_by("key_pair")]))) is lost


def test_a_publish_carries_a_password_or_an_oauth_credential_but_no_key_pair(orders: Orders, package: Path) -> None:
    password, oauth, key_pair = (named_by(method) for method in ("password", "oauth", "key_pair"))
    assert credential_to_publish([password], ["A.B.C"]) is password
    assert credential_to_publish([oauth, oauth], ["a.b.c"]) is oauth
    assert credential_to_publish([key_pair], ["a.b.c"]) is None
    assert credential_to_publish([password], ["a.b.c", "elsewhere"]) is None
    assert credential_to_publish([password], []) is None
    parcel = Parcel(VirtualFile.of(package), orders.project, "Orders", True, (oauth, oauth), oauth)
    assert b'<connectionCredentials name="TIR" oAuth="true" embed="true" />' in parcel.request
    assert parcel.later == [oauth]


def test_further_oauth_connections_need_a_server_that_can_set_them(orders: Orders) -> None:
    found = orders.create()
    check_settable(found, [named_by("password")], (3, 26))
    check_settable(found, [named_by("oauth")], (3, 27))
    with pytest.raises(DatasourceError, match=r"OAuth token can be set again from REST 3\.27 on"):
        check_settable(found, [named_by("oauth")], (3, 26))
