"""Object stores as pyarrow opens them: S3 with the endpoint, certificates and proxy of the environment, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import ParseResult, urlparse

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import LoadError
from tir_dagster.trust import S3_CA_VARIABLES, ca_file, proxy_for

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# pyarrow's names of the access keys, and the environment's; roles and profiles are found by AWS's own means.
_ACCESS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}
Settings = tuple[tuple[str, str], ...]


def s3_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the endpoint, unless it is AWS's own, and the region. Nothing of it is secret."""
    options: dict[str, str] = {}
    if variable := next((name for name in _ENDPOINTS if env.get(name)), None):
        endpoint = _endpoint(variable, env[variable])
        options = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
    if region := env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    return options


def s3_keys(env: Mapping[str, str]) -> Settings:
    """Return the access keys of the environment; empty where AWS's own means find a role or a profile."""
    keys = {name: env[variable] for name, variable in _ACCESS.items() if env.get(variable)}
    return tuple(keys.items()) if {"access_key", "secret_key"} <= keys.keys() else ()


def s3_network(options: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    """Return the proxy, whose address may hold a password, and the file of certificate authorities: pyarrow reads neither from the environment."""
    host = options.get("endpoint_override") or f"s3.{options.get('region', 'us-east-1')}.amazonaws.com"
    settings = {
        "proxy_options": proxy_for(options.get("scheme", "https"), host),
        "tls_ca_file_path": ca_file(env, S3_CA_VARIABLES),
    }
    return tuple((name, value) for name, value in settings.items() if value)


def s3_filesystem(options: Mapping[str, str], network: Settings, keys: Settings = ()) -> Any:
    from pyarrow import fs

    # A small file is one request then. Without a region pyarrow would ask the real AWS for it, even with another endpoint.
    place = {"region": "us-east-1", **options} if options else {}
    return fs.S3FileSystem(
        connect_timeout=10, request_timeout=60, allow_delayed_open=True, **place, **dict(keys), **dict(network)
    )


def _endpoint(variable: str, address: str) -> ParseResult:
    """Return the parts of the S3 endpoint; raise without showing an address that contains credentials."""
    try:
        parts = urlparse(address)
    except ValueError:
        parts = urlparse("")
    if has_credentials(address) or parts.scheme not in ("http", "https") or not parts.hostname:
        raise LoadError(
            f"{variable} is no address of S3, or carries a user or a password. Set it to something like "
            "https://s3.example.com, and the credentials to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return parts


_FORBIDDEN = re.compile(
    r"ACCESS_?DENIED|ACCESS DENIED|FORBIDDEN|INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT|CREDENTIALS|HTTP STATUS 403"
)
Trouble = Literal["denied", "no bucket", "untrusted", "missing", "other"]


def trouble_of(error: Exception) -> Trouble:
    """Return what an error of a filesystem or of an object store means."""
    message = str(error).upper()
    if _FORBIDDEN.search(message) or isinstance(error, PermissionError):
        return "denied"
    if "NOSUCHBUCKET" in message or "NO_SUCH_BUCKET" in message or "BUCKET DOES NOT EXIST" in message:
        return "no bucket"
    if "CERTIFICATE" in message:
        return "untrusted"
    return "missing" if isinstance(error, FileNotFoundError) else "other"
