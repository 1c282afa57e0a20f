"""Sites, users and their tokens, and the sessions they open."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jwt

from tir_dagster.sandbox.tableau.store import Store, insert
from tir_dagster.sandbox.tableau.wire import ApiError

if TYPE_CHECKING:
    from tir_dagster.sandbox.home import Identity
    from tir_dagster.sandbox.tableau.server import Server

ADMIN = "SiteAdministratorCreator"
VIEWER = "Viewer"
OTHER_SITE = "other"
_JWT_LIFE_SECONDS = 600
_CLOCK_SKEW_SECONDS = 10


@dataclass(frozen=True)
class Session:
    """Who calls, and on which site."""

    user_id: str
    user_name: str
    site_id: str
    role: str
    # What the token of a connected app asked for; None where somebody else signed in, for whom nothing is limited.
    scopes: frozenset[str] | None = None

    @property
    def is_admin(self) -> bool:
        return self.role == ADMIN

    @property
    def may_write(self) -> bool:
        return self.role != VIEWER

    def must_write(self, what: str) -> None:
        if not self.may_write:
            raise ApiError(403004, f"User {self.user_name!r} is not allowed to {what}.")

    def must_administer(self, what: str) -> None:
        if not self.is_admin:
            raise ApiError(403004, f"Only an administrator can {what}.")


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def seed(store: Store, identity: Identity) -> None:
    """The sites and users of the identity; safe to repeat at every start."""
    now = time.time()
    with store.transaction() as db:
        sites = {}
        for content_url in (identity.site, OTHER_SITE, ""):
            db.execute(
                "INSERT OR IGNORE INTO sites VALUES (?, ?, ?)",
                (str(uuid.uuid4()), content_url or "Default", content_url),
            )
            sites[content_url] = db.execute("SELECT id FROM sites WHERE content_url = ?", (content_url,)).fetchone()[0]
        admin = _seed_user(db, identity.tableau_user, identity.tableau_password)
        reader = _seed_user(db, identity.reader_user, identity.reader_password)
        _seed_token(db, admin, identity.token_name, identity.token_secret)
        _seed_token(db, reader, identity.reader_token_name, identity.reader_token_secret)
        for site in sites.values():
            db.execute("INSERT OR IGNORE INTO site_users VALUES (?, ?, ?)", (site, admin, ADMIN))
            if not db.execute("SELECT 1 FROM projects WHERE site_id = ? AND parent_id IS NULL", (site,)).fetchone():
                insert(
                    db,
                    "projects",
                    id=str(uuid.uuid4()),
                    site_id=site,
                    name="default",
                    description="The default project.",
                    content_permissions="ManagedByOwner",
                    owner_id=admin,
                    created=now,
                    updated=now,
                )
        db.execute("INSERT OR IGNORE INTO site_users VALUES (?, ?, ?)", (sites[identity.site], reader, VIEWER))


def _seed_user(db: Any, name: str, password: str) -> str:
    db.execute(
        "INSERT INTO users VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET password_hash = excluded.password_hash",
        (str(uuid.uuid4()), name, digest(password)),
    )
    user_id: str = db.execute("SELECT id FROM users WHERE name = ?", (name,)).fetchone()[0]
    return user_id


def _seed_token(db: Any, user_id: str, name: str, secret: str) -> None:
    db.execute(
        "INSERT INTO tokens (user_id, name, secret_hash) VALUES (?, ?, ?)"
        " ON CONFLICT (user_id, name) DO UPDATE SET secret_hash = excluded.secret_hash",
        (user_id, name, digest(secret)),
    )


def create_token(store: Store, user: str, name: str) -> str:
    """Another personal access token; its secret is told once."""
    found = store.row("SELECT id FROM users WHERE name = ?", user)
    if found is None:
        raise LookupError(f"no user {user!r}")
    secret = f"{secrets.token_urlsafe(16)}:{secrets.token_urlsafe(24)}"
    with store.transaction() as db:
        _seed_token(db, found["id"], name, secret)
    return secret


def sign_in(server: Server, credentials: dict[str, str], content_url: str) -> tuple[str, Session]:
    """A new session and its token; 401001 whatever was wrong with the credentials, as a server should."""
    token_id: int | None = None
    scopes: frozenset[str] | None = None
    if "personalAccessTokenName" in credentials:
        user_id, token_id = _by_token(server.store, credentials)
    elif "jwt" in credentials:
        user_id, scopes = _by_jwt(server, credentials["jwt"])
    else:
        user_id = _by_password(server.store, credentials)
    site = server.store.row("SELECT id FROM sites WHERE content_url = ?", content_url)
    if site is None:
        raise _refused()
    return open_session(server.store, user_id, site["id"], token_id, scopes)


def _refused() -> ApiError:
    return ApiError(401001, "Error signing in to Tableau Server")


def _by_token(store: Store, credentials: dict[str, str]) -> tuple[str, int]:
    given = digest(credentials.get("personalAccessTokenSecret", ""))
    for row in store.rows("SELECT * FROM tokens WHERE name = ?", credentials["personalAccessTokenName"]):
        if hmac.compare_digest(row["secret_hash"], given):
            return row["user_id"], row["id"]
    raise _refused()


def _by_password(store: Store, credentials: dict[str, str]) -> str:
    row = store.row("SELECT * FROM users WHERE name = ?", credentials.get("name", ""))
    if row is None or not hmac.compare_digest(row["password_hash"], digest(credentials.get("password", ""))):
        raise _refused()
    user_id: str = row["id"]
    return user_id


def _by_jwt(server: Server, text: str) -> tuple[str, frozenset[str]]:
    identity = server.identity
    try:
        if jwt.get_unverified_header(text).get("kid") != identity.connected_app_secret_id:
            raise _refused()
        claims = jwt.decode(
            text,
            identity.connected_app_secret_value,
            algorithms=["HS256"],
            audience="tableau",
            issuer=identity.connected_app_client_id,
            options={"require": ["exp", "iss", "aud", "sub", "jti"]},
        )
    except jwt.PyJWTError as error:
        raise _refused() from error
    expires, now = float(claims["exp"]), time.time()
    user = server.store.row("SELECT id FROM users WHERE name = ?", claims["sub"])
    if user is None or expires > now + _JWT_LIFE_SECONDS + _CLOCK_SKEW_SECONDS:
        raise _refused()
    with server.store.transaction() as db:
        db.execute("DELETE FROM used_jwts WHERE expires < ?", (now - _CLOCK_SKEW_SECONDS,))
        if not db.execute("INSERT OR IGNORE INTO used_jwts VALUES (?, ?)", (claims["jti"], expires)).rowcount:
            raise _refused()
    asked = claims.get("scp")
    return user["id"], frozenset(map(str, asked if isinstance(asked, list) else ()))


def open_session(
    store: Store, user_id: str, site_id: str, token_id: int | None, scopes: frozenset[str] | None
) -> tuple[str, Session]:
    """A session for one site. A personal access token carries one session only: the earlier one ends."""
    token = f"{secrets.token_urlsafe(16)}|{secrets.token_urlsafe(24)}|{site_id}"
    session = _session(store, user_id, site_id, scopes)
    if session is None:
        raise _refused()
    with store.transaction() as db:
        if token_id is not None:
            db.execute("DELETE FROM sessions WHERE token_id = ?", (token_id,))
        insert(
            db,
            "sessions",
            token_hash=digest(token),
            user_id=user_id,
            site_id=site_id,
            token_id=token_id,
            last_used=time.time(),
            scopes=None if scopes is None else " ".join(sorted(scopes)),
        )
    return token, session


def _session(store: Store, user_id: str, site_id: str, scopes: frozenset[str] | None) -> Session | None:
    row = store.row(
        "SELECT name, role FROM users JOIN site_users ON user_id = id WHERE user_id = ? AND site_id = ?",
        user_id,
        site_id,
    )
    return None if row is None else Session(user_id, row["name"], site_id, row["role"], scopes)


def no_session() -> ApiError:
    """The answer to a session that is gone, and to one of a connected app whose scopes do not include the call."""
    return ApiError(401002, "Invalid authentication credentials were provided.")


def find_session(server: Server, token: str | None) -> Session:
    """The session behind the header's token; 401000 without one, 401002 when it is gone or has idled too long."""
    if not token:
        raise ApiError(401000, "Missing authentication token.")
    row = server.store.row("SELECT * FROM sessions WHERE token_hash = ?", digest(token))
    now = time.time()
    idle_seconds = server.settings.current.session_idle_minutes * 60
    if row is not None and now - row["last_used"] > idle_seconds:
        end_session(server.store, token)
        row = None
    session = None
    if row is not None:
        scopes = None if row["scopes"] is None else frozenset(row["scopes"].split())
        session = _session(server.store, row["user_id"], row["site_id"], scopes)
    if row is None or session is None:
        raise no_session()
    # Not at every call: one write per minute is precise enough to measure idleness.
    if now - row["last_used"] > min(60.0, idle_seconds / 10):
        server.store.run("UPDATE sessions SET last_used = ? WHERE token_hash = ?", now, row["token_hash"])
    return session


def end_session(store: Store, token: str) -> None:
    store.run("DELETE FROM sessions WHERE token_hash = ?", digest(token))
