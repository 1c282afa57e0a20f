"""How every room reaches S3: its endpoint by the environment, a client with the right authorities, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import ParseResult, urlparse

from tir_dagster.addresses import has_credentials
from tir_dagster.errors import TirError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_FORBIDDEN = re.compile(r"ACCESS_?DENIED|ACCESS DENIED|FORBIDDEN|INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT|CREDENTIALS")


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


def s3_client(*, region: str | None, authorities: str | None, **config: Any) -> Any:
    """Return boto3's client, which finds endpoint, credentials and proxy by AWS's own means."""
    import boto3
    from botocore.config import Config

    settings = Config(**{"connect_timeout": 10, "read_timeout": 60, **config})
    return boto3.Session().client("s3", region_name=region, config=settings, verify=authorities)


def s3_problem(error: Exception, *, bucket_named_in: str) -> str | None:
    """Return what is wrong and what to do if the error is about access, the bucket or certificates; None for others."""
    upper = str(error).upper()
    if _FORBIDDEN.search(upper) or isinstance(error, PermissionError):
        return "access is denied. Check the AWS credentials and the bucket's policy, or the folder's rights."
    if "NOSUCHBUCKET" in upper or "NO_SUCH_BUCKET" in upper or "BUCKET DOES NOT EXIST" in upper:
        return f"the bucket does not exist. Correct {bucket_named_in}."
    if "CERTIFICATE" in upper:
        return (
            "the certificate of S3 is not trusted, so nothing was sent. If your own authority signs it, set REQUESTS_CA_BUNDLE "
            "or AWS_CA_BUNDLE to the file of that authority; else check the endpoint."
        )
    return None
