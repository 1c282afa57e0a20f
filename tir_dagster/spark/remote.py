"""Addresses of Spark Connect servers, and this process's sessions on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REMOTE_VARIABLE = "SPARK_REMOTE"


@dataclass(frozen=True)
class Remote:
    """Where a Spark Connect server listens; `log` is the log of this machine's own one."""

    # Without repr: its parameters may hold a token.
    address: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    # The session to share; else one of this process.
    session: str | None = None
    log: Path | None = None

    @property
    def name(self) -> str:
        """Host and port alone, for people."""
        return self.address.removeprefix("sc://").partition("/")[0].rpartition("@")[2]

    @property
    def advice(self) -> str:
        """What to do when the server cannot be reached."""
        if self.log:
            return f"Its log is {self.log}. Start it again with `tir spark up`; without it, runs start a Spark of their own"
        return f"Check the server and {REMOTE_VARIABLE}; without that variable, runs start a Spark of their own"


# The sessions that this process has, by their servers.
sessions: dict[Remote, SparkSession] = {}


def remote_of(session: SparkSession) -> Remote | None:
    """The server of a session that was made here; None for a Spark in this process."""
    return next((remote for remote, open_session in sessions.items() if open_session is session), None)
