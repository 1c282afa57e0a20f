"""Addresses of Spark Connect servers, and this process's sessions on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tir_dagster.addresses import HIDDEN
from tir_dagster.errors import SourceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REMOTE_VARIABLE = "SPARK_REMOTE"
# Spark's own name.
TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_SHORTEST_SECRET = 4
_PLACE = re.compile(r"sc://[^/;?#\s]+/?")


@dataclass(frozen=True)
class Remote:
    """Where a Spark Connect server listens; `log` is the log of this machine's own one."""

    # Without repr: its parameters may hold something secret.
    address: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    # The session to share; else one of this process.
    session: str | None = None
    log: Path | None = None
    # What named it.
    chosen_by: str = REMOTE_VARIABLE

    @staticmethod
    def parse(address: str, env: Mapping[str, str], chosen_by: str = REMOTE_VARIABLE) -> Remote:
        """Return the server of an address such as sc://host:443/;token=…;x-header=…; raise SourceError without showing the address.

        The token is taken out: Spark's client quotes its address in errors.
        """
        place, _, parameters = address.strip().partition("/;")
        pairs = [parameter.partition("=") for parameter in parameters.split(";") if parameter]
        if not _PLACE.fullmatch(place) or not all(equals for _, equals, _ in pairs):
            raise SourceError(
                f"{chosen_by} is no address of a Spark Connect server. Set it to something like sc://spark.example.com:15002 or "
                f"sc://spark.example.com:443/;use_ssl=true, the token to {TOKEN_VARIABLE}; or unset it."
            )
        token = next((unquote(value) for name, _, value in pairs if name == "token"), env.get(TOKEN_VARIABLE) or None)
        others = ";".join(f"{name}={value}" for name, _, value in pairs if name != "token")
        return Remote(f"{place.rstrip('/')}/;{others}" if others else place.rstrip("/"), token, chosen_by=chosen_by)

    def scrub(self, text: str) -> str:
        """Return the text without the token and without the values of the address's parameters."""
        values = [parameter.partition("=")[2] for parameter in self.address.partition("/;")[2].split(";")]
        for secret in sorted({self.token or "", *values, *map(unquote, values)}, key=len, reverse=True):
            if len(secret) > _SHORTEST_SECRET:
                text = text.replace(secret, HIDDEN)
        return text

    @property
    def name(self) -> str:
        """Host and port alone, for people."""
        return self.address.removeprefix("sc://").partition("/")[0].rpartition("@")[2]

    @property
    def advice(self) -> str:
        """What to do when the server cannot be reached."""
        if self.log:
            return f"Its log is {self.log}. Start it again with `tir spark up`; without it, runs start a Spark of their own"
        return f"Check the server and {self.chosen_by}; without that, runs start a Spark of their own"


# The sessions that this process has, by their servers.
sessions: dict[Remote, SparkSession] = {}


def remote_of(session: SparkSession) -> Remote | None:
    """The server of a session that was made here; None for a Spark in this process."""
    return next((remote for remote, open_session in sessions.items() if open_session is session), None)


def is_elsewhere(session: SparkSession) -> bool:
    """Return whether executors may be on other machines; not for a Spark of this process, nor for the server of `tir spark up`."""
    context = getattr(session, "_sc", None)
    if context is not None:
        return not context.master.startswith("local")
    remote = remote_of(session)
    return remote is None or remote.log is None
