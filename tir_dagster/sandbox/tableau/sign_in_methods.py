"""How connections sign in to their source: by password, or by a key pair or an OAuth token that a user has saved on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from tir_dagster.sandbox.tableau.store import Row, Store

Method = Literal["password", "key_pair", "oauth"]
# The first REST version that changes how a connection signs in.
METHOD_SINCE = (3, 27)
# What a connection's `authenticationType` may be set to; `Username Password` is what Desktop writes for Snowflake.
_AUTHENTICATIONS = {
    "auth-integrated": "password",
    "auth-keypair": "key_pair",
    "auth-none": "password",
    "auth-oauth-service-account": "oauth",
    "auth-pass": "password",
    "auth-user": "password",
    "auth-user-pass": "password",
    "oauth": "oauth",
    "username password": "password",
    "username-password": "password",
}


def method_of(authentication: str | None) -> Method:
    """The way that an `authenticationType`, or a document's `authentication`, stands for."""
    return cast("Method", _AUTHENTICATIONS.get((authentication or "").casefold(), "password"))


def check_authentication(row: Row, wanted: str, version: tuple[int, int]) -> None:
    """Refuse an unknown `authenticationType`, and another way of signing in where the REST version has none."""
    if wanted != row["authentication"] and wanted.casefold() not in _AUTHENTICATIONS:
        raise ApiError(400000, f"Unknown authenticationType {wanted!r}; known are {sorted(_AUTHENTICATIONS)}.")
    if method_of(wanted) != method_of(row["authentication"]) and version < METHOD_SINCE:
        raise ApiError(400000, "The way in which a connection signs in can be changed from REST 3.27 on.")


def save_credential(store: Store, asked: dict[str, Any]) -> None:
    """Save a key pair (its private key in PEM) or an OAuth token for a user, as the account settings do."""
    user = store.row("SELECT id FROM users WHERE name = ?", str(asked["user"]))
    if user is None:
        raise LookupError(f"no user {asked['user']!r}")
    if asked["method"] not in ("key_pair", "oauth"):
        raise ValueError(f"a saved credential is a key_pair or an oauth token, not {asked['method']!r}")
    values = [str(asked[name]) for name in ("method", "server", "username", "secret")]
    store.run("INSERT OR REPLACE INTO saved_credentials VALUES (?, ?, ?, ?, ?)", user["id"], *values)


def forget_credentials(store: Store) -> None:
    """Forget what all users have saved; connections that use it already keep it."""
    store.run("DELETE FROM saved_credentials")


def saved_secret(db: Any, user_id: str, method: Method, server: str | None, username: str | None) -> str | None:
    """What the user has saved for this server; user names are compared with their case, as on a real server."""
    row = db.execute(
        "SELECT secret FROM saved_credentials WHERE user_id = ? AND method = ? AND username = ?"
        " AND server = ? COLLATE NOCASE",
        (user_id, method, username or "", server or ""),
    ).fetchone()
    return None if row is None else str(row["secret"])
