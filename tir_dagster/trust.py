"""Whom connections trust and through whom they go: one certificate file and the proxies of the environment, for all clients.

Each library reads other variables: requests and botocore no SSL_CERT_FILE, Slack's client no REQUESTS_CA_BUNDLE, pyarrow neither
these nor proxies. Snowflake's connector takes REQUESTS_CA_BUNDLE and proxies from the environment itself. Certificates are always checked; there is no setting that turns it off.
"""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tir_dagster.errors import TirError

CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
# AWS's own variable comes first for S3.
S3_CA_VARIABLES = ("AWS_CA_BUNDLE", *CA_VARIABLES)


def ca_file(env: Mapping[str, str], variables: tuple[str, ...] = CA_VARIABLES) -> str | None:
    """Return the file with certificate authorities that the environment names; None for the usual ones."""
    name = next((name for name in variables if env.get(name)), None)
    if name is None:
        return None
    if not Path(env[name]).exists():
        raise TirError(
            f"{name} is {env[name]}, and there is no such file. Set it to the file with your certificate authorities (PEM), or unset it."
        )
    return env[name]


def authorities() -> str | bool:
    """Return what a session of requests checks certificates by: its `verify`."""
    return ca_file(os.environ) or True


def ssl_context() -> ssl.SSLContext | None:
    """Return what checks certificates for clients of Python's own; None where the environment names no file."""
    file = ca_file(os.environ)
    if file is None:
        return None
    try:
        is_folder = Path(file).is_dir()
        return ssl.create_default_context(cafile=None if is_folder else file, capath=file if is_folder else None)
    except (ssl.SSLError, OSError):
        raise TirError(
            f"{file} holds no certificates. Set {' or '.join(CA_VARIABLES[::2])} to a file of them in PEM."
        ) from None


def proxy_for(scheme: str, host: str) -> str | None:
    """Return the address of the proxy to a host, by HTTPS_PROXY, HTTP_PROXY and NO_PROXY. It may hold a password: never show it."""
    address = urllib.request.getproxies().get(scheme)
    if not address or urllib.request.proxy_bypass(host):
        return None
    return address if "://" in address else f"http://{address}"
