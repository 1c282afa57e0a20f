"""What the environment must say to sign in, and what it never gives away."""

from __future__ import annotations

from typing import Any

import pytest

from tir_dagster.tableau.access import ConnectedApp, TableauAccess, TableauPassword, TableauToken

# As long as real ones are, or signing complains.
SECRET = "s3cret-s3cret-s3cret-s3cret-s3cret"
SERVER = {"TABLEAU_SERVER_URL": "https://tableau.example.com/", "TABLEAU_SITE": "sales"}
TOKEN = {"TABLEAU_TOKEN_NAME": "nightly", "TABLEAU_TOKEN_SECRET": SECRET}
PASSWORD = {"TABLEAU_USERNAME": "ada", "TABLEAU_PASSWORD": SECRET}
APP = {
    "TABLEAU_CONNECTED_APP_CLIENT_ID": "client",
    "TABLEAU_CONNECTED_APP_SECRET_ID": "id",
    "TABLEAU_CONNECTED_APP_SECRET_VALUE": SECRET,
    "TABLEAU_USERNAME": "ada",
}


@pytest.mark.parametrize(
    ("env", "identity"),
    [
        (TOKEN, TableauToken("nightly", SECRET)),
        (PASSWORD, TableauPassword("ada", SECRET)),
        (APP, ConnectedApp("client", "id", SECRET, "ada")),
        ({**TOKEN, **PASSWORD}, TableauToken("nightly", SECRET)),
    ],
)
def test_each_way_to_sign_in_is_read_from_the_environment(env: dict[str, str], identity: Any) -> None:
    access = TableauAccess.from_environment({**SERVER, **env})
    assert access == TableauAccess("https://tableau.example.com", "sales", identity)
    assert SECRET not in repr(access)
    assert SECRET not in f"{access.where} {access.identity.shown}"


def test_a_connected_apps_token_is_good_for_one_sign_in_and_says_nothing_in_text() -> None:
    access = TableauAccess.from_environment({**SERVER, **APP})
    first, second = access.credentials(), access.credentials()
    assert first.jwt != second.jwt
    assert SECRET not in repr(first)


@pytest.mark.parametrize(
    ("url", "cloud"),
    [
        ("https://10ax.online.tableau.com", True),
        ("https://tableau.example.com", False),
        ("https://online.nottableau.com", False),
    ],
)
def test_tableau_cloud_is_known_by_its_address(url: str, *, cloud: bool) -> None:
    assert TableauAccess(url, "sales", TableauToken("t", "s")).is_cloud is cloud
