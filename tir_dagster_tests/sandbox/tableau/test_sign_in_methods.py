"""How a connection signs in: a password is embedded, a key pair and an OAuth token are saved by a user, and a publish resets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.sandbox.tableau.helpers import (
    OVERWRITE,
    Admin,
    Publisher,
    Source,
    forget_credentials,
    new_key,
    private_pem,
    rewritten,
    save_credential,
    save_key_pair,
)

ID = Column("ID", "NUMBER(38,0)")


@pytest.fixture(autouse=True)
def nothing_saved(sandbox: Sandbox) -> Iterator[None]:
    forget_credentials(sandbox.tableau_url)
    yield
    forget_credentials(sandbox.tableau_url)


@pytest.fixture
def package(source: Source) -> Path:
    source.sql("CREATE TABLE {t} (ID NUMBER(38,0))")
    source.sql("INSERT INTO {t} VALUES (1)")
    return source.package(ID)


@pytest.fixture
def by_oauth(package: Path, tmp_path: Path) -> Path:
    """The package, made in Desktop with an OAuth connection."""

    def edit(document: str) -> str:
        return document.replace('authentication="Username Password"', 'authentication="oauth"')

    return rewritten(package, tmp_path / "oauth.tdsx", edit=edit)


def save(publisher: Publisher, source: Source, method: str, secret: str, **more: str) -> None:
    identity = publisher.sandbox.identity
    asked = {"user": identity.tableau_user, "server": source.connection.server, "username": identity.snowflake_user}
    save_credential(publisher.sandbox.tableau_url, method=method, secret=secret, **{**asked, **more})


def sign_in_by(publisher: Publisher, datasource: Any, authentication: str, **more: Any) -> Any:
    """Set how the datasource's one connection signs in; the connection as it is afterwards."""
    publisher.server.datasources.populate_connections(datasource)
    (connection,) = datasource.connections
    options = {"username": publisher.sandbox.identity.snowflake_user, "embed_password": True, **more}
    (changed,) = publisher.server.datasources.update_connections(datasource, [connection.id], authentication, **options)
    return changed


@pytest.fixture
def new_server(admin: Admin, publisher: Publisher) -> None:
    admin.set(rest_version="3.27")
    publisher.server.version = "3.27"


@pytest.mark.usefixtures("new_server")
def test_a_saved_key_pair_signs_in_and_a_publish_resets_it(publisher: Publisher, package: Path) -> None:
    save_key_pair(publisher.sandbox)
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    changed = sign_in_by(publisher, datasource, "auth-keypair")
    assert (changed.auth_type, changed.embed_password) == ("auth-keypair", True)
    assert publisher.refresh(datasource).finish_code == 0

    publisher.publish(package, mode=OVERWRITE)

    publisher.server.datasources.populate_connections(datasource)
    (connection,) = datasource.connections
    assert (connection.auth_type, connection.embed_password) == ("Username Password", False)
    assert "username and password are required" in publisher.refresh(datasource).notes[0]


@pytest.mark.usefixtures("new_server")
def test_a_key_pair_that_nobody_saved_is_accepted_and_no_refresh_succeeds(
    publisher: Publisher, source: Source, package: Path
) -> None:
    pem = private_pem(new_key())
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    for elsewhere in ({"server": "elsewhere"}, {"username": "tir"}, {"user": publisher.sandbox.identity.reader_user}):
        save(publisher, source, "key_pair", pem, **elsewhere)
    changed = sign_in_by(publisher, datasource, "auth-keypair", password="not a key")
    assert (changed.auth_type, changed.embed_password) == ("auth-keypair", True)
    assert "a saved key pair is required" in publisher.refresh(datasource).notes[0]
    save(publisher, source, "key_pair", "no key")
    sign_in_by(publisher, datasource, "auth-keypair")
    assert "private key cannot be read" in publisher.refresh(datasource).notes[0]
    save(publisher, source, "key_pair", pem)
    sign_in_by(publisher, datasource, "auth-keypair")
    assert "Incorrect username or password" in publisher.refresh(datasource).notes[0]


def test_an_older_server_does_not_change_how_a_connection_signs_in(publisher: Publisher, package: Path) -> None:
    datasource = publisher.publish(package, connection_credentials=publisher.credentials)
    with pytest.raises(ServerResponseError, match="400000") as refused:
        sign_in_by(publisher, datasource, "auth-keypair")
    assert "from REST 3.27 on" in refused.value.detail
    assert sign_in_by(publisher, datasource, "Username Password").embed_password, "what clients read they send back"


@pytest.mark.usefixtures("new_server")
def test_an_unknown_way_of_signing_in_is_refused(publisher: Publisher, package: Path) -> None:
    with pytest.raises(ServerResponseError, match="Unknown authenticationType 'by magic'"):
        sign_in_by(publisher, publisher.publish(package), "by magic")


def test_oauth_needs_a_credential_that_the_publisher_saved(
    publisher: Publisher, source: Source, by_oauth: Path
) -> None:
    identity = publisher.sandbox.identity
    saved = TSC.ConnectionCredentials(identity.snowflake_user, "", embed=True, oauth=True)
    with pytest.raises(ServerResponseError, match="has no saved OAuth credential"):
        publisher.publish(by_oauth, connection_credentials=saved)
    save(publisher, source, "oauth", identity.snowflake_password)
    datasource = publisher.publish(by_oauth, connection_credentials=saved)
    assert publisher.refresh(datasource).finish_code == 0


def test_a_password_is_not_embedded_where_the_document_says_oauth(publisher: Publisher, by_oauth: Path) -> None:
    datasource = publisher.publish(by_oauth, connection_credentials=publisher.credentials)
    publisher.server.datasources.populate_connections(datasource)
    (connection,) = datasource.connections
    assert (connection.auth_type, connection.embed_password) == ("oauth", False)
    changed = sign_in_by(publisher, datasource, "oauth", username="NOBODY", password="secret")
    assert changed.embed_password
    assert "a saved OAuth credential is required" in publisher.refresh(datasource).notes[0]


@pytest.mark.parametrize("wrong", [{"user": "nobody"}, {"method": "password"}])
def test_what_cannot_be_saved_is_refused(publisher: Publisher, wrong: dict[str, str]) -> None:
    asked = {"user": publisher.sandbox.identity.tableau_user, "method": "oauth", "server": "s", "username": "u"}
    url = f"{publisher.sandbox.tableau_url}/sandbox/saved-credentials"
    answer = requests.post(url, json={**asked, "secret": "x", **wrong}, timeout=30)
    assert answer.status_code == 400
