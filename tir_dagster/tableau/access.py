"""How to sign in to Tableau: where the server is, and one of a token, a user's password or a connected app."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import jwt
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import DatasourceError

_TOKEN = ("TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET")
_PASSWORD = ("TABLEAU_USERNAME", "TABLEAU_PASSWORD")
_APP = (
    "TABLEAU_CONNECTED_APP_CLIENT_ID",
    "TABLEAU_CONNECTED_APP_SECRET_ID",
    "TABLEAU_CONNECTED_APP_SECRET_VALUE",
    "TABLEAU_USERNAME",
)
# A connected app grants what the token asks for, and nothing that it does not name.
_SCOPES = (
    "tableau:content:read",
    "tableau:users:read",
    "tableau:datasources:*",
    "tableau:file_uploads:*",
    "tableau:hyper_data:update",
    "tableau:jobs:*",
    "tableau:tasks:*",
    "tableau:subscriptions:read",
)
# The server refuses tokens that live for more than ten minutes.
_JWT_SECONDS = 300


@dataclass(frozen=True)
class TableauToken:
    """A personal access token; it carries one session at a time."""

    name: str
    secret: str = field(repr=False)

    @property
    def shown(self) -> str:
        return f"token {self.name!r}"

    def credentials(self, site: str) -> Any:
        return TSC.PersonalAccessTokenAuth(self.name, self.secret, site_id=site)


@dataclass(frozen=True)
class TableauPassword:
    """A user of the server and the password."""

    username: str
    password: str = field(repr=False)

    @property
    def shown(self) -> str:
        return f"user {self.username!r}"

    def credentials(self, site: str) -> Any:
        return TSC.TableauAuth(self.username, self.password, site_id=site)


@dataclass(frozen=True)
class ConnectedApp:
    """A connected app (direct trust) that speaks for one user."""

    client_id: str
    secret_id: str
    secret_value: str = field(repr=False)
    username: str

    @property
    def shown(self) -> str:
        return f"connected app {self.client_id!r} for user {self.username!r}"

    def credentials(self, site: str) -> Any:
        """Return a token for one sign-in: the server refuses a token id that it has seen before."""
        claims = {
            "iss": self.client_id,
            "sub": self.username,
            "aud": "tableau",
            "exp": int(time.time()) + _JWT_SECONDS,
            "jti": str(uuid.uuid4()),
            "scp": list(_SCOPES),
        }
        headers = {"kid": self.secret_id, "iss": self.client_id}
        text = jwt.encode(claims, self.secret_value, algorithm="HS256", headers=headers)
        return TSC.JWTAuth(text, site_id=site)


@dataclass(frozen=True)
class TableauAccess:
    """One site of one server, and the identity that signs in. Its text shows no secret."""

    server_url: str
    site: str
    identity: TableauToken | TableauPassword | ConnectedApp

    def __post_init__(self) -> None:
        """Refuse an address that cannot work, or that would carry a password into messages."""
        _check_address(self.server_url)
        object.__setattr__(self, "server_url", self.server_url.rstrip("/"))

    @property
    def where(self) -> str:
        """The server and site as messages name them."""
        return f"{self.server_url} (site {self.site!r})" if self.site else f"{self.server_url} (default site)"

    @property
    def is_cloud(self) -> bool:
        return (urlsplit(self.server_url).hostname or "").endswith("online.tableau.com")

    def credentials(self) -> Any:
        """Return new credentials for one sign-in."""
        return self.identity.credentials(self.site)

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> TableauAccess:
        """Read the TABLEAU_… variables: a token, or else a connected app, or else a user's password."""
        variables = {
            name: value.strip() for name, value in env.items() if name.startswith("TABLEAU_") and value.strip()
        }
        if "TABLEAU_SERVER_URL" not in variables:
            raise DatasourceError(
                "There is no Tableau Server to sign in to: TABLEAU_SERVER_URL is not set. Set it, with TABLEAU_SITE,"
                ' TABLEAU_TOKEN_NAME and TABLEAU_TOKEN_SECRET; for the sandbox: eval "$(tir sandbox env)".'
            )
        # First: the errors about missing variables show the address.
        _check_address(variables["TABLEAU_SERVER_URL"])
        return TableauAccess(variables["TABLEAU_SERVER_URL"], variables.get("TABLEAU_SITE", ""), _identity(variables))


def _check_address(address: str) -> None:
    if has_credentials(address):
        raise DatasourceError(
            "The address of Tableau Server carries a user or a password. Leave them out of TABLEAU_SERVER_URL and"
            " set TABLEAU_TOKEN_NAME and TABLEAU_TOKEN_SECRET."
        )
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DatasourceError(
            f"{address!r} is not the address of a Tableau Server."
            " Set TABLEAU_SERVER_URL to something like https://tableau.example.com."
        )


def _identity(variables: Mapping[str, str]) -> TableauToken | TableauPassword | ConnectedApp:
    if any(name in variables for name in _TOKEN):
        return TableauToken(*_all_of(_TOKEN, variables, "a personal access token"))
    if any(name in variables for name in _APP[:3]):
        return ConnectedApp(*_all_of(_APP, variables, "a connected app"))
    if any(name in variables for name in _PASSWORD):
        return TableauPassword(*_all_of(_PASSWORD, variables, "a user's password"))
    raise DatasourceError(
        f"There are no credentials to sign in to {variables['TABLEAU_SERVER_URL']}. Set {_TOKEN[0]} and {_TOKEN[1]};"
        f" or {_PASSWORD[0]} and {_PASSWORD[1]}; or {', '.join(_APP[:3])} and {_APP[3]}."
    )


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _all_of(names: tuple[str, ...], variables: Mapping[str, str], what: str) -> list[str]:
    if missing := [name for name in names if name not in variables]:
        raise DatasourceError(
            f"Signing in to {variables['TABLEAU_SERVER_URL']} with {what} also needs {_listed(missing)}."
            " Set the missing variables."
        )
    return [variables[name] for name in names]
