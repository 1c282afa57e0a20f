"""The work of `tir plan` and `tir refresh` for an extract that Tableau refreshes itself (delivery `trigger`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.cli.refresh import Command, RefreshOutcome, event_metadata
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import refresh_job_name
from tir_dagster.refresh.deliveries.trigger import plan_trigger, trigger_warnings, watch


class TriggerCommand(Command):
    """`tir plan` and `tir refresh` for an extract that the server refreshes, in one run."""

    def plan(self, mode: Mode, slices: Sequence[str]) -> Plan:
        """Return what a refresh would do, from tokens and definitions alone, without changes."""
        self._refuse(mode, slices)
        self._say_where()
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        planned = plan_trigger(self.spec, watch(self.context), confirmed, mode)
        if planned.decision == "none":
            return planned
        return replace(planned, warnings=trigger_warnings(self.context))

    def explain(self) -> list[str]:
        """Say which tables start a refresh when they change."""
        return [f"Refreshed by Tableau itself when one of these changed: {self._tables()}."]

    def refresh(
        self, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()
    ) -> RefreshOutcome:
        """Start the server's own refresh if the source changed, and wait for it."""
        self._refuse(mode, slices)
        if hints:
            raise SpecError(
                f"{self.spec.name} is refreshed by Tableau itself (delivery `trigger`), which takes no hints. Leave --hint out."
            )
        return super().refresh(mode, slices, allow_empty=allow_empty)

    def _refresh(
        self, outcome: RefreshOutcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str]
    ) -> None:
        del slices, allow_empty, hints  # the server decides what it loads
        op = self.keys.published_datasource.to_python_identifier()
        result = self._run(outcome, refresh_job_name(self.spec), config={"ops": {op: {"config": {"mode": mode}}}})
        event = event_metadata(result, self.keys.published_datasource)
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        outcome.source_version = confirmed.source_version if confirmed else None
        outcome.datasource_id = confirmed.datasource_id if confirmed else None
        if "tir/decision" in event:
            outcome.published = True
            outcome.decision, outcome.reason = event["tir/decision"], event["tir/reason"] or None
            outcome.rows_appended = event.get("tir/rows_appended") or 0

    def _say_where(self) -> None:
        self._progress(f"looking at {self._tables()}")

    def _tables(self) -> str:
        return ", ".join([self.spec.main_table, *self.spec.watch])

    def _refuse(self, mode: Mode, slices: Sequence[str]) -> None:
        if mode == "slices" or slices:
            raise SpecError(
                f"{self.spec.name} is refreshed by Tableau itself (delivery `trigger`), which knows no slices. "
                "Leave --slices out; --full refreshes everything."
            )
