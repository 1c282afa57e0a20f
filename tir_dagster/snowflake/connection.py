"""Access to Snowflake (account, credentials, context), connections, queries and their errors."""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import snowflake.connector
from cryptography.hazmat.primitives import serialization
from snowflake.connector import errors as connector_errors

from tir_dagster.addresses import hide_credentials
from tir_dagster.errors import SourceError
from tir_dagster.measuring import waiting_for
from tir_dagster.snowflake.names import check_mere_name, whole_number
from tir_dagster.snowflake.settings import OPTIONAL, own_choices, session_parameters

# Without limits the connector repeats a request for ever when the server is gone.
NETWORK_TIMEOUT = 120
LOGIN_TIMEOUT = 60

# Settings of a connection that we decide ourselves: they would change what values look like or when they are seen.
_LOG = logging.getLogger(__name__)
# By account, for the life of this process: a login with them would fail each time.
_refused_settings: dict[str, frozenset[str]] = {}
_OURS = frozenset({"autocommit", "paramstyle", "timezone", "numpy", "connector", "application", "session_parameters"})
_PRIVATE_KEYS = (
    "private_key",
    "private_key_path",
    "private_key_password",
    "private_key_file",
    "private_key_file_pwd",
)

# Connections that this thread keeps open for a while, each with the access it was made from.
_open_connections: ContextVar[tuple[tuple[SnowflakeAccess, snowflake.connector.SnowflakeConnection], ...]] = ContextVar(
    "open_connections", default=()
)


@dataclass(frozen=True)
class SnowflakeAccess:
    """Everything a connection needs. It can be pickled, and neither its repr nor an error shows a secret."""

    account: str
    user: str
    password: str | None = field(default=None, repr=False)
    private_key: bytes | None = field(default=None, repr=False)  # DER, PKCS #8, not encrypted
    oauth_token: str | None = field(default=None, repr=False)
    host: str | None = None
    port: int | None = None
    protocol: str | None = None
    warehouse: str | None = None
    role: str | None = None
    database: str | None = None
    schema: str | None = None
    query_tag: str = "tir_dagster"
    network_timeout: int = NETWORK_TIMEOUT
    login_timeout: int = LOGIN_TIMEOUT
    # Session parameters of the user's choice, beside those that every session of ours has.
    choices: tuple[tuple[str, Any], ...] = ()
    # Whatever else the connector takes (a proxy, another authenticator), as given; it may hold secrets.
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Refuse what would carry a password into messages."""
        check_mere_name("account", self.account)
        check_mere_name("host", self.host or "")

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> SnowflakeAccess:
        """Build the access from SNOWFLAKE_ACCOUNT, _USER and one of _PRIVATE_KEY_PATH, _PRIVATE_KEY, _OAUTH_TOKEN or _PASSWORD; the rest is optional."""
        names = (
            *("account", "user", "password", "oauth_token", "host", "port", "protocol", "warehouse", "role"),
            *("database", "schema", "query_tag", "authenticator"),
            *("private_key", "private_key_path", "private_key_password"),
        )
        settings = {name: env.get(f"SNOWFLAKE_{name.upper()}") for name in names}
        missing = [f"SNOWFLAKE_{name.upper()}" for name in ("account", "user") if not settings[name]]
        if missing:
            raise SourceError(f"Snowflake is not configured: set {' and '.join(missing)} in the environment.")
        return SnowflakeAccess.from_connection_args({name: value for name, value in settings.items() if value})

    @staticmethod
    def from_connection_args(args: Mapping[str, Any]) -> SnowflakeAccess:
        """Build the access from the connector's arguments, or from a SnowflakeResource's configuration with the same names."""
        settings = {name: value for name, value in args.items() if value is not None}
        settings |= settings.pop("additional_snowflake_connection_args", {})
        session = settings.pop("session_parameters", {})
        settings.setdefault("query_tag", session.get("QUERY_TAG", "tir_dagster"))
        settings["choices"] = own_choices(session)
        key = _private_key(settings)
        for name in (*_PRIVATE_KEYS, *_OURS):
            settings.pop(name, None)
        if str(settings.get("authenticator", "")).lower() == "oauth":
            settings["oauth_token"] = settings.pop("token", None) or settings.pop("oauth_token", None)
        if settings.get("oauth_token") or str(settings.get("authenticator", "")).lower() in (
            "snowflake",
            "snowflake_jwt",
        ):
            settings.pop("authenticator", None)
        for name in ("port", "network_timeout", "login_timeout"):
            if name in settings:
                settings[name] = whole_number(name, settings[name])
        fields = {name: settings.pop(name) for name in list(settings) if name in SnowflakeAccess.__dataclass_fields__}
        access = SnowflakeAccess(**{**fields, "private_key": key, "options": tuple(sorted(settings.items()))})
        if not (access.password or key or access.oauth_token or "authenticator" in settings):
            raise SourceError(
                f"Snowflake account {access.account}: no credential. Set a private key, an OAuth token or a password "
                "(SNOWFLAKE_PRIVATE_KEY_PATH or SNOWFLAKE_PRIVATE_KEY, SNOWFLAKE_OAUTH_TOKEN, SNOWFLAKE_PASSWORD)."
            )
        return access

    def connection_args(self) -> dict[str, Any]:
        """What snowflake.connector.connect takes. Holds secrets: pass it on, never print it."""
        names = ("account", "user", "host", "port", "protocol", "warehouse", "role", "database", "schema")
        args = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {
            # The connector would otherwise ask the metadata services of three clouds where it runs, for its telemetry, in
            # every connection: 0.1 s where they refuse, twice that where a firewall swallows the question.
            "platform_detection_timeout_seconds": 0.0,
            **dict(self.options),
            **args,
            **self._credentials(),
            "network_timeout": self.network_timeout,
            "login_timeout": self.login_timeout,
            "application": "tir_dagster",
            # Snowflake sends NUMBER(12,2) as scaled integers; without this the connector makes them floats.
            "arrow_number_to_decimal": True,
            "session_parameters": session_parameters(self.query_tag, self.choices),
        }

    def _credentials(self) -> dict[str, Any]:
        if self.private_key:
            return {"private_key": self.private_key}
        if self.oauth_token:
            return {"authenticator": "oauth", "token": self.oauth_token}
        return {"password": self.password} if self.password else {}

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Share one connection among this thread's queries in the block: opening one takes longer than most queries."""
        if self._shared_connection() is not None:
            yield
            return
        with self.connect() as connection:
            token = _open_connections.set(((self, connection), *_open_connections.get()))
            try:
                yield
            finally:
                _open_connections.reset(token)

    @contextmanager
    def connect(self) -> Iterator[snowflake.connector.SnowflakeConnection]:
        """Open a connection with our session settings; an error of the connector inside the block becomes a SourceError with a hint."""
        if (shared := self._shared_connection()) is not None:
            with self._translated_errors():
                yield shared
            return
        try:
            with waiting_for("warehouse"):
                connection = self._log_in()
        except connector_errors.Error as error:
            self.fail(error)
        try:
            with self._translated_errors():
                yield connection
        finally:
            with waiting_for("warehouse"):
                connection.close()

    def _log_in(self) -> snowflake.connector.SnowflakeConnection:
        """Open the connection; go on without an optional session parameter that the account refuses, and say so once."""
        args = self.connection_args()
        while True:
            refused = _refused_settings.get(self.account, frozenset())
            session = {name: value for name, value in args["session_parameters"].items() if name not in refused}
            try:
                return snowflake.connector.connect(**{**args, "session_parameters": session})
            except connector_errors.DatabaseError as error:
                named = {name for name in OPTIONAL & session.keys() if re.search(rf"\b{re.escape(name)}\b", str(error))}
                if not named:
                    raise
                _refused_settings[self.account] = refused | named
                _LOG.warning(
                    "Snowflake account %s refuses the session parameter %s, so statements use the account's own value. Compare it with"
                    " the table in docs/snowflake.md.",
                    self.account,
                    ", ".join(sorted(named)),
                )

    def _shared_connection(self) -> snowflake.connector.SnowflakeConnection | None:
        return next((connection for access, connection in _open_connections.get() if access == self), None)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except connector_errors.Error as error:
            self.fail(error)

    def query(
        self, sql: str, params: Sequence[Any] | None = None, *, seconds: int | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement and return all its rows; outside of `kept_open`, on a new connection.

        After `seconds` the statement is cancelled (an error of CANCELLED).
        """
        with self.connect() as connection, waiting_for("warehouse"), connection.cursor() as cursor:
            cursor.execute(sql, params, timeout=seconds)
            return [tuple(row) for row in cursor.fetchall()]

    def run(self, sql: str) -> str:
        """Run one statement whose rows stay in Snowflake; return its query id."""
        with self.connect() as connection, waiting_for("warehouse"), connection.cursor() as cursor:
            cursor.execute(sql)
            return str(cursor.sfqid)

    def fail(self, error: connector_errors.Error) -> NoReturn:
        """Raise the SourceError for an error of the connector."""
        where = f"Snowflake account {self.account}" + (f" at {self.host}:{self.port}" if self.host else "")
        message = self.scrub(" ".join(str(error.raw_msg or error.msg or error).split()))
        if "certificate verify failed" in message:
            raise SnowflakeDownError(f"{where}: {_UNTRUSTED}", errno=error.errno) from None
        # The original may quote a signed address or what was sent: it must not travel along as the cause.
        kind = SnowflakeDownError if error.errno in UNREACHABLE else SnowflakeError
        raise kind(f"{where}: {message.rstrip('.')}. {_hint(error)}", errno=error.errno) from None

    def scrub(self, text: str) -> str:
        """The text without any secret of this access, and without the signatures in addresses."""
        text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1?…", hide_credentials(text))
        for secret in (self.password, self.oauth_token, *(value for _, value in self.options)):
            if isinstance(secret, str) and len(secret) > 3:
                text = text.replace(secret, "…")
        return text


class SnowflakeError(SourceError):
    """An error that Snowflake reported, with its error number for callers that handle it."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return _failure, (type(self), str(self), self.errno)


class SnowflakeDownError(SnowflakeError):
    """Snowflake as a whole cannot be reached."""


def _failure(kind: type[SnowflakeError], message: str, errno: int | None) -> SnowflakeError:
    return kind(message, errno=errno)


MISSING_OBJECT = frozenset({2003, 2043})
BEYOND_TIME_TRAVEL = frozenset({707})
UNTRACKED = frozenset({91930})
# Cancelled by somebody; and by the limit that a statement was given.
CANCELLED = frozenset({604, 630})
UNREACHABLE = frozenset({250001, 250003, 251001, 251007, 290404})

_UNTRUSTED = (
    "its certificate is not trusted, so nothing was sent. If your own authority signs it, set REQUESTS_CA_BUNDLE to the "
    "file of that authority (the connector reads no SSL_CERT_FILE); else check the host."
)
_HINTS = {
    **dict.fromkeys(
        UNREACHABLE,
        "Check host, network and proxy, and whether the server is up; then run again.",
    ),
    **dict.fromkeys((390100, 390144, 390303, 390318, 394300), "Check user and credential, and their expiry."),
    390189: "Check that the role exists and is granted to the user.",
    2003: "Check the table's name (database.schema.table) and that the role may read it.",
    2043: "Check the names of database, schema and table, and that the role may use them.",
    904: "A column is missing or renamed: compare the extract's spec with DESCRIBE TABLE.",
    707: "The version is outside Time Travel: raise DATA_RETENTION_TIME_IN_DAYS, or run a full refresh.",
    91930: "Run ALTER TABLE … SET CHANGE_TRACKING = TRUE, or choose another way to detect changes.",
    606: "Name a warehouse that the role may use: set SNOWFLAKE_WAREHOUSE.",
}


def _hint(error: connector_errors.Error) -> str:
    if hint := _HINTS.get(error.errno):
        return hint
    if isinstance(error, (connector_errors.OperationalError, connector_errors.InterfaceError)):
        return "Check network and server; then run again."
    query = f" (query {error.sfqid})" if getattr(error, "sfqid", None) else ""
    return f"Look the statement up in Snowflake's query history{query}."


def _private_key(settings: Mapping[str, Any]) -> bytes | None:
    """Return the private key as DER, from DER bytes, PEM, PEM in base64, or a file of these."""
    raw: Any = settings.get("private_key")
    path = settings.get("private_key_path") or settings.get("private_key_file")
    if raw is None and path is None:
        return None
    secret = settings.get("private_key_password") or settings.get("private_key_file_pwd")
    try:
        data = Path(path).expanduser().read_bytes() if path else raw.encode() if isinstance(raw, str) else bytes(raw)
        password = (secret.encode() if isinstance(secret, str) else secret) or None
        key = _load_key(data, password)
    except OSError as error:
        raise SourceError(
            f"The private key {path} cannot be read: {error.strerror}. Set SNOWFLAKE_PRIVATE_KEY_PATH to its file, or "
            "SNOWFLAKE_PRIVATE_KEY to its content."
        ) from None
    except (ValueError, TypeError):
        where = f"in {path}" if path else "given"
        raise SourceError(
            f"The private key {where} cannot be read. Give PKCS #8 as PEM, or that in base64, and its password "
            "if it is encrypted."
        ) from None
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_key(data: bytes, password: bytes | None) -> Any:
    if b"-----BEGIN" in data:
        return serialization.load_pem_private_key(data, password)
    try:
        return serialization.load_der_private_key(data, password)
    except ValueError:
        try:
            decoded = base64.b64decode(data, validate=False)
        except binascii.Error:
            raise ValueError from None
        load = serialization.load_pem_private_key if b"-----BEGIN" in decoded else serialization.load_der_private_key
        return load(decoded, password)
