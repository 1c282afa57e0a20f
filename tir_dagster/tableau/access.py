"""How to sign in to Tableau: where the server is, and one of a token, a user's password or a connected app."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import jwt
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import DatasourceError
from tir_dagster.tableau.calls import Budget, Use, scopes_of

_TOKEN = ("TABLEAU_TOKEN_NAME", "TABLEAU_TOKEN_SECRET")
_PASSWORD = ("TABLEAU_USERNAME", "TABLEAU_PASSWORD")
_APP = (
    "TABLEAU_CONNECTED_APP_CLIENT_ID",
    "TABLEAU_CONNECTED_APP_SECRET_ID",
    "TABLEAU_CONNECTED_APP_SECRET_VALUE",
    "TABLEAU_USERNAME",
)
# Scopes to ask for beside our own, for a server whose scopes are not those of Tableau's documentation.
MORE_SCOPES = "TABLEAU_CONNECTED_APP_SCOPES"
# What Tableau Cloud allows in an hour and on one site, by third parties that quote its documentation.
CLOUD_LIMITS = {Budget.REFRESHES: 60, Budget.PUBLISHES: 600}
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
    """A connected app (direct trust) that speaks for one user.

    It may do what its token asks for, and nothing that `scopes` does not name.
    """

    client_id: str
    secret_id: str
    secret_value: str = field(repr=False)
    username: str
    scopes: tuple[str, ...] = scopes_of(Use)
    more_scopes: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return f"connected app {self.client_id!r} for user {self.username!r}"

    def has_scope(self, scope: str) -> bool:
        """Whether the token asks for the scope, by its name or with a wildcard."""
        asked = (*self.scopes, *self.more_scopes)
        return any(scope == name or (name.endswith(":*") and scope.startswith(name[:-1])) for name in asked)

    def credentials(self, site: str) -> Any:
        """Return a token for one sign-in: the server refuses a token id that it has seen before."""
        claims = {
            "iss": self.client_id,
            "sub": self.username,
            "aud": "tableau",
            "exp": int(time.time()) + _JWT_SECONDS,
            "jti": str(uuid.uuid4()),
            "scp": [*self.scopes, *self.more_scopes],
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
    # Calls that the site allows in an hour; 0: any number, None: what Tableau Cloud allows, and any number on a server.
    refreshes_per_hour: int | None = None
    publishes_per_hour: int | None = None

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
        """Whether it is Tableau Cloud: its pods have addresses like 10ax.online.tableau.com."""
        return (urlsplit(self.server_url).hostname or "").endswith(".tableau.com")

    @property
    def limits(self) -> dict[Budget, int]:
        """How many calls of a kind the site allows in an hour, where it limits them."""
        limits = CLOUD_LIMITS if self.is_cloud else {}
        given = {Budget.REFRESHES: self.refreshes_per_hour, Budget.PUBLISHES: self.publishes_per_hour}
        limits = {**limits, **{kind: number for kind, number in given.items() if number is not None}}
        return {kind: number for kind, number in limits.items() if number}

    def limited_to(self, uses: Iterable[Use]) -> TableauAccess:
        """Return the access for these uses: a connected app's token asks for their scopes only."""
        if not isinstance(self.identity, ConnectedApp):
            return self
        return replace(self, identity=replace(self.identity, scopes=scopes_of(uses)))

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
        return TableauAccess(
            variables["TABLEAU_SERVER_URL"],
            variables.get("TABLEAU_SITE", ""),
            _identity(variables),
            refreshes_per_hour=_limit(variables, Budget.REFRESHES),
            publishes_per_hour=_limit(variables, Budget.PUBLISHES),
        )


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
        more = tuple(re.findall(r"[^\s,]+", variables.get(MORE_SCOPES, "")))
        client_id, secret_id, secret_value, username = _all_of(_APP, variables, "a connected app")
        return ConnectedApp(client_id, secret_id, secret_value, username, more_scopes=more)
    if any(name in variables for name in _PASSWORD):
        return TableauPassword(*_all_of(_PASSWORD, variables, "a user's password"))
    raise DatasourceError(
        f"There are no credentials to sign in to {variables['TABLEAU_SERVER_URL']}. Set {_TOKEN[0]} and {_TOKEN[1]};"
        f" or {_PASSWORD[0]} and {_PASSWORD[1]}; or {', '.join(_APP[:3])} and {_APP[3]}."
    )


def _limit(variables: Mapping[str, str], kind: Budget) -> int | None:
    text = variables.get(kind.variable)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise DatasourceError(
            f"{kind.variable} is {text!r}: write how many {kind.shown} the site allows in an hour, or 0 for any number."
        )
    return int(text)


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
