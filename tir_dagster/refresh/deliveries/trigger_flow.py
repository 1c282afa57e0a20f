"""A refresh by the server, step by step: watch the tables, decide, let Tableau refresh, confirm. No Dagster in here.

What is confirmed was read before the refresh started: a change during it is seen next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.changes.plan import Mode, Plan, Reason
from tir_dagster.refresh.deliveries.trigger import TriggeredRefresh, refresh_by_server, schedule_warnings
from tir_dagster.refresh.flow import Stages, for_datasource, for_extract
from tir_dagster.refresh.state.lease import lease
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.watched import Watched, watch_tables
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import FoundDatasource, find_datasource, find_project, server_version

Log = Callable[[str], None]


@dataclass(frozen=True)
class TriggerPlan(Plan):
    """A plan whose refresh is the server's own."""

    def sentence(self) -> str:
        if self.decision == "none":
            return super().sentence()
        why = self.reason.value if self.reason else "the source changed"
        return f"{self.extract}: {self.decision} refresh by Tableau itself, because {why}."


def plan_trigger(spec: ExtractSpec, watched: Watched, confirmed: Confirmation | None, mode: Mode) -> TriggerPlan:
    """Nothing if all tables are as confirmed; else the server's refresh that the spec names, or the one asked for."""
    requested = mode == "full" or spec.policy == "full"
    if mode != "full" and confirmed is not None and confirmed.known == watched.known:
        return TriggerPlan(spec.name, mode, "none")
    decision = "full" if requested else spec.datasource.refresh
    return TriggerPlan(spec.name, mode, decision, Reason.REQUESTED if requested else None)


@dataclass(frozen=True)
class Done:
    """What the server did, and the confirmation of it."""

    triggered: TriggeredRefresh
    confirmation: Confirmation
    row_count: int | None
    warnings: tuple[str, ...]


class TriggerRefresher:
    """One extract's refresh by the server, with everything it talks to passed in."""

    def __init__(
        self, spec: ExtractSpec, *, snowflake: SnowflakeAccess, tableau: TableauAccess, home: Path, log: Log
    ) -> None:
        self.spec = spec
        self.folder = home / "extracts" / spec.name
        self.stages = Stages()
        self.done: Done | None = None
        # What whoever planned under the same lease already knows.
        self.prepared: Watched | None = None
        self._snowflake = for_extract(snowflake, spec)
        self._tableau = for_datasource(tableau, spec)
        self._log = log

    def begin(self) -> None:
        """A new refresh by the same refresher."""
        self.stages, self.done, self.prepared = Stages(), None, None

    def lend(self, log: Log) -> None:
        """From here on, tell this log."""
        self._log = log

    @contextmanager
    def leased(self, purpose: str, *, wait_seconds: float) -> Iterator[None]:
        with lease(self.folder / "lease.json", purpose=purpose, wait_seconds=wait_seconds, on_wait=self._log):
            yield

    def watch(self) -> Watched:
        """The tables as they are now, quiet; or as they were when the plan was made."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            return prepared
        with self.stages.timed("survey"), self._snowflake.kept_open():
            return watch_tables(self.spec, self._snowflake, log=self._log)

    def warnings(self) -> tuple[str, ...]:
        """What people should know before the refresh; a datasource that is not there is an error already here."""
        with self.stages.timed("look"), TableauClient(self._tableau) as client:
            return schedule_warnings(client, self._find(client))

    def refresh(self, plan: Plan, watched: Watched) -> Done:
        """Let the server refresh the datasource, and wait for it."""
        with TableauClient(self._tableau) as client:
            with self.stages.timed("look"):
                found = self._find(client)
                warnings = schedule_warnings(client, found)
            incremental = plan.decision == "incremental"
            with self.stages.timed("refresh"):
                triggered = refresh_by_server(
                    client,
                    found,
                    incremental=incremental,
                    log=self._log,
                    timeout=self.spec.datasource.job_timeout,
                )
        # After an increment the server tells what it appended, not how many rows there are.
        row_count = None if incremental else triggered.rows
        self.done = Done(triggered, self._confirmation(watched, triggered.found, row_count), row_count, warnings)
        return self.done

    def _find(self, client: TableauClient) -> FoundDatasource:
        project = find_project(client, self.spec.datasource.project)
        return find_datasource(client, project=project, name=self.spec.datasource.name)

    def _confirmation(self, watched: Watched, found: FoundDatasource, row_count: int | None) -> Confirmation:
        return Confirmation(
            extract=self.spec.name,
            version="",
            source_version=str(watched.version),
            known=watched.known,
            watermark=None,
            datasource_id=found.id,
            server_version=str(server_version(found)),
            fingerprint="",
            rows=row_count or 0,
            change_sets=(),
        )
