"""The work of `tir plan` and `tir refresh`: run the Dagster jobs in this process, so that every refresh is in the history."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import dagster as dg

from tir_dagster.changes.change_set import ChangeSet, place_label
from tir_dagster.changes.hints import parse_hints
from tir_dagster.changes.plan import Mode
from tir_dagster.changes.relation import relation_of
from tir_dagster.cli.jobs import JobRunner, command_tags, first_event
from tir_dagster.cli.output import expect
from tir_dagster.cli.overview.past import estimate, past_refreshes
from tir_dagster.cli.overview.planning import Outlook
from tir_dagster.errors import SpecError, TirError
from tir_dagster.orchestration.alerts.runs import unaffected
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.interrupts import StoppedError, check_signals, stopping
from tir_dagster.orchestration.metadata import PROFILE, last_confirmation
from tir_dagster.orchestration.names import (
    application_config,
    detect_job_name,
    detection_config,
    extract_keys,
    refresh_job_name,
)
from tir_dagster.orchestration.partitions import (
    add_slices,
    change_set_partitions,
    covering_range,
    known_slices,
    retire_slices,
    slices_between,
)
from tir_dagster.orchestration.requests import DetectionConfig, build_request, read_news
from tir_dagster.refresh.context import leased, refresh_context, remove
from tir_dagster.refresh.deliveries.trigger import no_spark, plan_trigger, trigger_warnings, watch
from tir_dagster.refresh.look import look
from tir_dagster.refresh.plan import plan
from tir_dagster.refresh.preview import Preview, preview
from tir_dagster.refresh.profile import StageProfile, whole
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.survey import survey
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.query import explain
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient

LEASE_WAIT_SECONDS = 600.0


@dataclass
class RefreshOutcome:
    """The result of a refresh, as `--json` prints it."""

    extract: str
    mode: Mode
    decision: str = "none"
    reason: str | None = None
    slices: list[str] = field(default_factory=list)
    rows_purged: int = 0
    rows_appended: int = 0
    published: bool = False
    source_version: str | None = None
    datasource_id: str | None = None
    run_ids: list[str] = field(default_factory=list)
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    profile: list[StageProfile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "profile": [stage.as_dict() for stage in self.profile]}

    def warn(self, warnings: Sequence[str]) -> None:
        """Add warnings, each sentence once."""
        self.warnings += [warning for warning in dict.fromkeys(warnings) if warning not in self.warnings]


class Command:
    """`tir plan` and `tir refresh` for one extract."""

    def __init__(self, spec: ExtractSpec, instance: dg.DagsterInstance, progress: Callable[[str], None]) -> None:
        self.spec = spec
        self.keys = extract_keys(spec)
        self._instance = instance
        self._progress = progress
        self._jobs = JobRunner(instance, progress, extracts=(spec,))
        # For plans and the lease; each step of a run creates its own.
        self.context = refresh_context(
            spec,
            snowflake=SnowflakeAccess.from_environment(os.environ),
            tableau=TableauAccess.from_environment(os.environ),
            spark=no_spark,
            home=tir_home(),
            log=progress,
        )

    def outlook(self, mode: Mode, slices: Sequence[str], *, explain: bool = False) -> Outlook:
        """Return what a refresh would do and move, counted in the warehouse; without Spark, lease or changes."""
        preview = self._preview(mode, slices)
        plan = preview.plan
        rows = None if plan.decision == "none" else sum(preview.appended.values())
        past = past_refreshes(self.spec, self._instance) if plan.decision != "none" else []
        explained = tuple(self.explain()) if explain else ()
        newest = past[0] if past else None
        return Outlook(self.spec, plan, preview, estimate(past, plan.decision, rows), explained, newest)

    def _preview(self, mode: Mode, slices: Sequence[str]) -> Preview:
        # A folder of its own: the plan takes no lease, and a run may be using the usual folder.
        context = replace(self.context, work=self.context.folder / "plan")
        try:
            self._say_where()
            looked = look(context, last_confirmation(self._instance, self.keys.published_datasource), repair=False)
            news = read_news(self._instance, context, looked.confirmed)
            surveyed = survey(context, looked)
            warnings: list[str] = []
            config = DetectionConfig(mode=mode, slices=list(slices))
            request = build_request(
                self._instance, context, looked, surveyed, self.keys, config, news, warn=warnings.append
            )
            planned = plan(context, looked, surveyed, request)
            if planned.decision != "none":
                self._progress("counting in the warehouse what would move")
            planned = replace(planned, warnings=(*planned.warnings, *warnings))
            return preview(context, looked, surveyed, planned, request)
        finally:
            remove(context.work)

    def explain(self) -> list[str]:
        """Describe what the extract's query means for a refresh, in lines."""
        lines = []
        for table, part in self.spec.parts.items():
            lines += [f"{table}:"] if table else []
            relation = relation_of(part, self.context.snowflake)
            if relation.view is None:
                lines.append(f"A copy of {part.main_table}: all its changes are refreshed by key.")
                continue
            key = [column.name for column in relation.key]
            lines += explain(relation.view, why_full=relation.why_full, why_whole=relation.whole, key=key)
        return lines

    def refresh(
        self, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()
    ) -> RefreshOutcome:
        """Start the runs of a refresh in this process, one after the other."""
        from tir_dagster.orchestration.alerts.commands import alerting

        started = time.perf_counter()
        outcome = RefreshOutcome(self.spec.name, mode)
        stop = stopping(self.spec.name, lambda: so_far(self.spec, self._instance, outcome))
        self._expect(mode)
        with alerting(self.spec, self._instance, outcome, self._progress), stop:
            try:
                # One sign-in for all steps: clients of one process share the session while any of them is open.
                session = TableauClient(self.context.tableau)
                with leased(self.context, "tir refresh", wait_seconds=LEASE_WAIT_SECONDS), session:
                    self._say_where()
                    self._refresh(outcome, mode, slices, allow_empty=allow_empty, hints=hints)
            except Exception:
                for warning in outcome.warnings:
                    self._progress(f"warning: {warning}")
                raise
            finally:
                outcome.seconds = round(time.perf_counter() - started, 3)
                outcome.profile = whole([*self.context.stages.profile.ended, *outcome.profile], outcome.seconds)
        return outcome

    def _expect(self, mode: Mode) -> None:
        """Show how long the last refreshes of this kind took."""
        past = past_refreshes(self.spec, self._instance, limit=10)
        if usual := estimate(past, "full" if mode == "full" or not past else "incremental", None):
            expect(usual.seconds)

    def _refresh(
        self, outcome: RefreshOutcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str]
    ) -> None:
        # First of all, refuse a hint that cannot be read.
        for text in hints:
            parse_hints(text, "--hint")
        change_set = self.detect(outcome, mode, slices, allow_empty=allow_empty, hints=hints)
        if change_set is None:
            self._fill_confirmed(outcome)
            return
        outcome.decision = change_set.decision
        outcome.reason = change_set.reason
        outcome.slices = [
            place_label(table, name) for table in change_set.tables for name in change_set.of(table).touched
        ]
        outcome.rows_purged, outcome.rows_appended = change_set.moved
        outcome.source_version = change_set.source_version
        outcome.warn(change_set.warnings)
        self.apply(outcome, change_set)

    def _fill_confirmed(self, outcome: RefreshOutcome) -> None:
        """Note what the datasource shows by its last confirmation."""
        if confirmed := last_confirmation(self._instance, self.keys.published_datasource):
            outcome.source_version, outcome.datasource_id = confirmed.source_version, confirmed.datasource_id

    def _say_where(self) -> None:
        self._progress(f"looking at datasource {self.spec.datasource.name!r} and at {self.spec.main_table}")

    def detect(
        self,
        outcome: RefreshOutcome,
        mode: Mode,
        slices: Sequence[str],
        *,
        allow_empty: bool,
        hints: Sequence[str] = (),
    ) -> ChangeSet | None:
        """Run a detection; return its change set if anything differs."""
        ident = new_id()
        partitions = change_set_partitions(self.spec)
        self._instance.add_dynamic_partitions(str(partitions.name), [ident])
        config = detection_config(self.keys, mode=mode, slices=list(slices), allow_empty=allow_empty, hints=list(hints))
        try:
            self._run(outcome, detect_job_name(self.spec), partition_key=ident, config=config)
        finally:
            # Also after a failure: Dagster would show a partition without a change set as missing forever.
            staged = [change_set for change_set in self.context.change_sets.pending() if change_set.id == ident]
            if not staged:
                self._instance.delete_dynamic_partition(str(partitions.name), ident)
        return staged[0] if staged else None

    def apply(self, outcome: RefreshOutcome, change_set: ChangeSet) -> None:
        """Run the job that applies and publishes a change set."""
        known = add_slices(self._instance, self.spec, change_set.touched)
        tags = covering_range(self.spec, change_set.touched, known)
        config = application_config(self.keys, change_set.id)
        result = self._run(outcome, refresh_job_name(self.spec), tags=tags, config=config)
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        if confirmed is None or confirmed.source_version < change_set.source_version:
            raise TirError(f"{self.spec.name}: the refresh ended without a confirmation. Run it again.")
        outcome.published = True
        version = self.context.known_version(confirmed.version)
        if version is not None and version.manifest["change_set"] == change_set.id:
            # Counts of the extract itself: in an aggregate, a group that HAVING hides has no row there.
            outcome.rows_purged = version.manifest["rows_purged"]
            outcome.rows_appended = version.manifest["rows_appended"]
        retire_slices(self._instance, self.spec, self.keys.published_datasource)
        if reason := first_event(result, self.keys.published_datasource).get("tir/reason"):
            # The server had to load everything.
            outcome.decision, outcome.reason = "full", reason
        outcome.datasource_id = confirmed.datasource_id

    def run_job(self, job: str, **options: Any) -> dg.ExecuteInProcessResult:
        """Run one of the extract's jobs in this process."""
        return self._jobs.run(job, **options)

    def take_warnings(self) -> list[str]:
        """Return the warnings of the runs since the last call."""
        return self._jobs.take_warnings()

    def _run(
        self,
        outcome: RefreshOutcome,
        job: str,
        *,
        config: dict[str, Any],
        partition_key: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """Run the extract's job in this process; raise its error, and show its log as this command's progress."""
        check_signals()
        run_id = str(uuid.uuid4())
        outcome.run_ids.append(run_id)
        tags = {**(tags or {}), **command_tags(run_id)}
        try:
            result = self._jobs.run(job, config=config, partition_key=partition_key, tags=tags, run_id=run_id)
        finally:
            outcome.warn(self._jobs.take_warnings())
        for asset in (self.keys.source_table, self.keys.purged_extract, self.keys.published_datasource):
            event = first_event(result, asset)
            for stage, seconds in event.get("tir/stages", {}).items():
                outcome.stages[stage] = round(outcome.stages.get(stage, 0.0) + seconds, 3)
            outcome.profile += [StageProfile(**stage) for stage in event.get(PROFILE, [])]
        return result


def so_far(spec: ExtractSpec, instance: dg.DagsterInstance, outcome: RefreshOutcome) -> str:
    """Say what the datasource shows when a command is stopped."""
    # Without a run, no request was sent to the server yet.
    names = () if outcome.run_ids else (StoppedError.__name__,)
    sentence = unaffected(instance, spec, tir_home(), names, outcome.run_ids[-1] if outcome.run_ids else "")
    return f"{sentence[0].upper()}{sentence[1:]}."


class TriggerCommand(Command):
    """`tir plan` and `tir refresh` for an extract that the server refreshes, in one run."""

    def _preview(self, mode: Mode, slices: Sequence[str]) -> Preview:
        """Return what a refresh would do, from tokens and definitions alone, without changes."""
        self._refuse(mode, slices)
        self._say_where()
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        planned = plan_trigger(self.spec, watch(self.context), confirmed, mode)
        if planned.decision == "none":
            return Preview(planned)
        return Preview(replace(planned, warnings=trigger_warnings(self.context)))

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
        self._fill_confirmed(outcome)
        event = first_event(result, self.keys.published_datasource)
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


@contextmanager
def command(spec: ExtractSpec, progress: Callable[[str], None]) -> Iterator[Command]:
    """Yield the command for the extract's delivery, on the environment's Dagster history."""
    with dagster_instance() as instance:
        yield (TriggerCommand if spec.delivery == "trigger" else Command)(spec, instance, progress)


def chosen_slices(spec: ExtractSpec, text: str | None) -> list[str]:
    """Return the slices that `--slices` names; for slices by value, Dagster's partitions are the known ones."""
    if not text:
        return []
    if spec.main.slices.by != "value":
        return slices_between(spec, text)
    with dagster_instance() as instance:
        return slices_between(spec, text, known_slices(instance, spec))
