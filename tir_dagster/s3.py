"""How every room reaches S3: endpoint, keys, certificates and proxy by the environment, clients, and what errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import ParseResult, urlparse

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import TirError
from tir_dagster.trust import S3_CA_VARIABLES, ca_file, proxy_for

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# pyarrow's names of the access keys, and the environment's; roles and profiles are found by AWS's own means.
_ACCESS = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}
Settings = tuple[tuple[str, str], ...]


def s3_endpoint(env: Mapping[str, str], error: type[TirError] = TirError) -> ParseResult | None:
    """Return the parts of the endpoint that the environment names, None for AWS's own; raise without showing credentials in it."""
    variable = next((name for name in _ENDPOINTS if env.get(name)), None)
    if variable is None:
        return None
    try:
        parts = urlparse(env[variable])
    except ValueError:
        parts = urlparse("")
    if has_credentials(env[variable]) or parts.scheme not in ("http", "https") or not parts.hostname:
        raise error(
            f"{variable} is no address of S3, or carries a user or a password. Set it to something like "
            "https://s3.example.com, and the credentials to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return parts


def s3_region(env: Mapping[str, str]) -> str | None:
    return env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")


def s3_options(env: Mapping[str, str], error: type[TirError] = TirError) -> dict[str, str]:
    """Return the endpoint, unless it is AWS's own, and the region, as pyarrow takes them. Nothing of it is secret."""
    options: dict[str, str] = {}
    if endpoint := s3_endpoint(env, error):
        options = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
    if region := s3_region(env):
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
    """Return S3 as pyarrow opens it."""
    from pyarrow import fs

    # A small file is one request then. Without a region pyarrow would ask the real AWS for it, even with another endpoint.
    place = {"region": "us-east-1", **options} if options else {}
    return fs.S3FileSystem(
        connect_timeout=10, request_timeout=60, allow_delayed_open=True, **place, **dict(keys), **dict(network)
    )


def s3_client(*, region: str | None, authorities: str | None, **config: Any) -> Any:
    """Return boto3's client, which finds endpoint, credentials and proxy by AWS's own means."""
    import boto3
    from botocore.config import Config

    settings = Config(**{"connect_timeout": 10, "read_timeout": 60, **config})
    return boto3.Session().client("s3", region_name=region, config=settings, verify=authorities)


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


def s3_problem(error: Exception, *, bucket_named_in: str) -> str | None:
    """Return what is wrong and what to do if the error is about access, the bucket or certificates; None for others."""
    sentences = {
        "denied": "access is denied. Check the AWS credentials and the bucket's policy, or the folder's rights.",
        "no bucket": f"the bucket does not exist. Correct {bucket_named_in}.",
        "untrusted": "the certificate of S3 is not trusted, so nothing was sent. If your own authority signs it, set REQUESTS_CA_BUNDLE "
        "or AWS_CA_BUNDLE to the file of that authority; else check the endpoint.",
    }
    return sentences.get(trouble_of(error))
