"""What `tir plan` and `tir refresh` do for an extract that Tableau refreshes itself (delivery `trigger`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import dagster as dg

from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.cli.refresh import LEASE_WAIT_SECONDS, Outcome, run_here, so_far
from tir_dagster.errors import SpecError, TirError
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.hosting import Host
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.orchestration.names import extract_keys, refresh_job_name
from tir_dagster.refresh.deliveries.trigger_flow import Done, TriggerRefresher, plan_trigger
from tir_dagster.refresh.watched import Watched
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess


class TriggerCommand:
    """One extract that the server refreshes, and everything its commands need."""

    def __init__(self, spec: ExtractSpec, instance: dg.DagsterInstance, progress: Callable[[str], None]) -> None:
        self.spec = spec
        self.keys = extract_keys(spec)
        self._instance = instance
        self._progress = progress
        self.refresher = TriggerRefresher(
            spec,
            snowflake=SnowflakeAccess.from_environment(os.environ),
            tableau=TableauAccess.from_environment(os.environ),
            home=tir_home(),
            log=progress,
        )

    def plan(self, mode: Mode, slices: Sequence[str]) -> Plan:
        """What a refresh would do, from tokens and definitions alone; nothing is touched."""
        self._refuse(mode, slices)
        plan, _ = self._plan(mode)
        return plan if plan.decision == "none" else replace(plan, warnings=self.refresher.warnings())

    def explain(self) -> list[str]:
        """Which tables a refresh is started for."""
        return [
            f"Refreshed by Tableau itself when one of these changed: {', '.join([self.spec.main_table, *self.spec.watch])}."
        ]

    def refresh(self, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()) -> Outcome:
        """Let the server refresh the datasource if its source changed; one run in the history."""
        del allow_empty  # what the server loads is its own business
        self._refuse(mode, slices)
        if hints:
            raise SpecError(
                f"{self.spec.name} is refreshed by Tableau itself (delivery `trigger`), which takes no hints. Leave --hint out."
            )
        from tir_dagster.orchestration.command_reports import telling  # noqa: PLC0415 - a plan tells nobody

        started = time.perf_counter()
        outcome = Outcome(self.spec.name, mode)
        self.refresher.begin()
        stop = stopping(self.spec.name, lambda: so_far(self.spec, self._instance, outcome))
        with telling(self.spec, self._instance, outcome, self._progress), stop:
            try:
                with self.refresher.leased("tir refresh", wait_seconds=LEASE_WAIT_SECONDS):
                    self._refresh(outcome, mode)
            finally:
                outcome.stages = dict(self.refresher.stages.seconds)
                outcome.seconds = round(time.perf_counter() - started, 3)
        return outcome

    def _refuse(self, mode: Mode, slices: Sequence[str]) -> None:
        if mode == "slices" or slices:
            raise SpecError(
                f"{self.spec.name} is refreshed by Tableau itself (delivery `trigger`), which knows no slices. "
                "Leave --slices out; --full refreshes everything."
            )

    def _plan(self, mode: Mode) -> tuple[Plan, Watched]:
        self._progress(f"looking at {', '.join([self.spec.main_table, *self.spec.watch])}")
        watched = self.refresher.watch()
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        return plan_trigger(self.spec, watched, confirmed, mode), watched

    def _refresh(self, outcome: Outcome, mode: Mode) -> None:
        plan, watched = self._plan(mode)
        if plan.decision == "none":
            confirmed = last_confirmation(self._instance, self.keys.published_datasource)
            outcome.source_version = confirmed.source_version if confirmed else None
            outcome.datasource_id = confirmed.datasource_id if confirmed else None
            return
        self._progress(plan.sentence())
        self.refresher.prepared = watched
        outcome.decision, outcome.reason = plan.decision, plan.reason.name if plan.reason else None
        run_here(
            outcome,
            self.spec,
            refresh_job_name(self.spec),
            host=Host(cast("Any", self.refresher), self._progress),
            instance=self._instance,
            config={"ops": {self.keys.published_datasource.to_python_identifier(): {"config": {"mode": mode}}}},
        )
        self._fill(outcome, self.refresher.done)

    def _fill(self, outcome: Outcome, done: Done | None) -> None:
        if done is None:
            raise TirError(f"{self.spec.name}: the refresh ended without a confirmation. Run it again.")
        outcome.published = True
        outcome.rows_appended = done.triggered.rows or 0
        outcome.source_version = done.confirmation.source_version
        outcome.datasource_id = done.confirmation.datasource_id
        outcome.warnings = list(done.warnings)
