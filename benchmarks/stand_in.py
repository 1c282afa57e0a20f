"""What the stand-ins of one refresh had to do: the Tableau one's own work in seconds, and calls."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import requests

from tir_dagster.sandbox.home import SandboxHome

_PATIENCE = 30
# What the server does with a package, or a change, that has arrived; pieces of an upload are the network's.
_WORK = re.compile(r"(POST .*/datasources|PATCH .*/datasources/[^/]+/data)$")


@dataclass(frozen=True)
class StandIns:
    """The servers of this run."""

    addresses: Mapping[str, str]

    @staticmethod
    def at(env: Mapping[str, str]) -> StandIns:
        warehouse = f"{env['SNOWFLAKE_PROTOCOL']}://{env['SNOWFLAKE_HOST']}:{env['SNOWFLAKE_PORT']}"
        return StandIns({"warehouse": warehouse, "Tableau": env["TABLEAU_SERVER_URL"]})

    def forget(self) -> float:
        """Begin anew; return when the last job was created, for `work`."""
        for address in self.addresses.values():
            requests.delete(f"{address}/sandbox/calls", timeout=_PATIENCE).raise_for_status()
        return max(self._jobs("SELECT created FROM jobs"), default=0.0)

    def work(self, since: float) -> tuple[float, dict[str, int]]:
        """Return the seconds that Tableau's stand-in worked on what it was sent, and how many calls each server got."""
        calls_by_server = {
            name: requests.get(f"{address}/sandbox/calls", timeout=_PATIENCE).json()["calls"]
            for name, address in self.addresses.items()
        }
        seconds = sum(
            call["seconds"]
            for call in calls_by_server["Tableau"]
            if _WORK.fullmatch(f"{call['method']} {call['path']}")
        )
        jobs = self._jobs("SELECT completed - created FROM jobs WHERE completed IS NOT NULL AND created > ?", since)
        return seconds + sum(jobs), {name: len(calls) for name, calls in calls_by_server.items()}

    def _jobs(self, statement: str, *values: float) -> list[float]:
        # Answers over REST tell whole seconds only.
        file = SandboxHome.from_environment().data("tableau") / "server.sqlite"
        with closing(sqlite3.connect(file, isolation_level=None, timeout=_PATIENCE)) as store:
            return [float(row[0]) for row in store.execute(statement, values)]
