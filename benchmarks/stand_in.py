"""What the stand-ins of one refresh had to do: the Tableau one's own work in seconds, and calls."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import requests

from tir_dagster.sandbox.home import SandboxHome

_PATIENCE = 30
# What the server does with a package, or a change, that has arrived; pieces of an upload are the network's.
_WORK = re.compile(r"(POST .*/datasources|PATCH .*/datasources/[^/]+/data)$")
_READ = re.compile(r"/(queries|results)/")
_POLL = re.compile(r"/jobs/[^/]+$")


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
        requests.delete(f"{self.addresses['warehouse']}/sandbox/queries", timeout=_PATIENCE).raise_for_status()
        for address in self.addresses.values():
            requests.delete(f"{address}/sandbox/calls", timeout=_PATIENCE).raise_for_status()
        return max(self._jobs("SELECT created FROM jobs"), default=0.0)

    def work(self, since: float) -> tuple[float, dict[str, int]]:
        """Return the seconds that Tableau's stand-in worked on what it was sent, and how many calls each server got."""
        calls_by_server = {name: self._get(name, "calls") for name in self.addresses}
        seconds = sum(
            call["seconds"]
            for call in calls_by_server["Tableau"]
            if _WORK.fullmatch(f"{call['method']} {call['path']}")
        )
        jobs = self._jobs("SELECT completed - created FROM jobs WHERE completed IS NOT NULL AND created > ?", since)
        return seconds + sum(jobs), {name: len(calls) for name, calls in calls_by_server.items()}

    def meters(self) -> dict[str, int]:
        """Return what was asked of the servers since `forget`: statements, rows and bytes read; calls and bytes sent to Tableau.

        How often a job is asked for its state depends on how busy the machine is, so that is apart.
        """
        log = {name: self._get(name, "calls") for name in self.addresses}
        # Sessions that sign in or renew themselves, and what the connector reports about itself, read nothing.
        reads = [call for call in log["warehouse"] if _READ.match(call["path"])]
        polls = [call for call in log["Tableau"] if call["method"] == "GET" and _POLL.search(call["path"])]
        statements = self._get("warehouse", "queries")
        return {
            "statements": len(statements),
            "rows read": sum(statement.get("rows", 0) for statement in statements),
            "bytes read": sum(call["bytes_out"] for call in reads),
            "REST calls": len(log["Tableau"]) - len(polls),
            "REST bytes sent": sum(call["bytes_in"] for call in log["Tableau"]),
            "REST bytes received": sum(call["bytes_out"] for call in log["Tableau"])
            - sum(p["bytes_out"] for p in polls),
            "job polls": len(polls),
        }

    def _get(self, server: str, what: str) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.addresses[server]}/sandbox/{what}", timeout=_PATIENCE)
        answer.raise_for_status()
        listed: list[dict[str, Any]] = answer.json()[what]
        return listed

    def _jobs(self, statement: str, *values: float) -> list[float]:
        # Answers over REST tell whole seconds only.
        file = SandboxHome.from_environment().data("tableau") / "server.sqlite"
        with closing(sqlite3.connect(file, isolation_level=None, timeout=_PATIENCE)) as store:
            return [float(row[0]) for row in store.execute(statement, values)]
