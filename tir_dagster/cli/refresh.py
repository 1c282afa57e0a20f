"""The work of `tir plan` and `tir refresh`: run the Dagster jobs in this process, so that every refresh is in the history."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import dagster as dg

from tir_dagster.changes.change_set import ChangeSet, slice_label
from tir_dagster.changes.hints import parse_hints
from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.changes.relation import relation_of
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.run_reports import unaffected
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.interrupts import StoppedError, check_signals, stopping
from tir_dagster.orchestration.metadata import PROFILE, last_confirmation
from tir_dagster.orchestration.names import (
    TOLD_BY_COMMAND,
    application_config,
    detect_job_name,
    detection_config,
    extract_keys,
    refresh_job_name,
)
from tir_dagster.orchestration.partitions import add_slices, change_set_partitions, covering_range, retire_slices
from tir_dagster.refresh.context import leased, refresh_context, remove
from tir_dagster.refresh.deliveries.trigger import no_spark
from tir_dagster.refresh.look import look
from tir_dagster.refresh.plan import Request, plan
from tir_dagster.refresh.profile import StageProfile, whole
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.survey import survey
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.query import explain
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess

LEASE_WAIT_SECONDS = 600.0
# The console shows this command's progress instead of Dagster's log, which is in the history.
_CONSOLE = "console"
# For runs that print nothing.
QUIET_RUN = {"loggers": {_CONSOLE: {"config": {"log_level": "CRITICAL"}}}}


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
        self._run_warnings: list[str] = []
        # For plans and the lease; each step of a run creates its own.
        self.context = refresh_context(
            spec,
            snowflake=SnowflakeAccess.from_environment(os.environ),
            tableau=TableauAccess.from_environment(os.environ),
            spark=no_spark,
            home=tir_home(),
            log=progress,
        )

    def plan(self, mode: Mode, slices: Sequence[str]) -> Plan:
        """Return what a refresh would do, from tokens and definitions alone; without Spark or changes."""
        # A folder of its own: the plan takes no lease, and a run may be using the usual folder.
        context = replace(self.context, work=self.context.folder / "plan")
        try:
            self._say_where()
            looked = look(context, last_confirmation(self._instance, self.keys.published_datasource), repair=False)
            return plan(context, looked, survey(context, looked), Request(mode, tuple(slices)))
        finally:
            remove(context.work)

    def explain(self) -> list[str]:
        """Describe what the extract's query means for a refresh, in lines."""
        relation = relation_of(self.spec, self.context.snowflake)
        if relation.view is None:
            return [f"A copy of {self.spec.main_table}: all its changes are refreshed by key."]
        key = [column.name for column in relation.key]
        return explain(relation.view, why_full=relation.why_full, why_whole=relation.whole, key=key)

    def refresh(
        self, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()
    ) -> RefreshOutcome:
        """Start the runs of a refresh in this process, one after the other."""
        from tir_dagster.orchestration.alerts.commands import alerting

        started = time.perf_counter()
        outcome = RefreshOutcome(self.spec.name, mode)
        stop = stopping(self.spec.name, lambda: so_far(self.spec, self._instance, outcome))
        with alerting(self.spec, self._instance, outcome, self._progress), stop:
            try:
                with leased(self.context, "tir refresh", wait_seconds=LEASE_WAIT_SECONDS):
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

    def _refresh(
        self, outcome: RefreshOutcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str]
    ) -> None:
        # First of all, refuse a hint that cannot be read.
        for text in hints:
            parse_hints(text, "--hint")
        change_set = self.detect(outcome, mode, slices, allow_empty=allow_empty, hints=hints)
        if change_set is None:
            confirmed = last_confirmation(self._instance, self.keys.published_datasource)
            outcome.source_version = confirmed.source_version if confirmed else None
            outcome.datasource_id = confirmed.datasource_id if confirmed else None
            return
        self._fill(outcome, change_set)
        self.apply(outcome, change_set)

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

    def _fill(self, outcome: RefreshOutcome, change_set: ChangeSet) -> None:
        outcome.decision = change_set.decision
        outcome.reason = change_set.reason
        outcome.slices = [slice_label(name) for name in sorted({**change_set.purged, **change_set.appended})]
        outcome.rows_purged = sum(change_set.purged.values())
        outcome.rows_appended = sum(change_set.appended.values())
        outcome.source_version = change_set.source_version
        outcome.warn(change_set.warnings)

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
        if reason := event_metadata(result, self.keys.published_datasource).get("tir/reason"):
            # The server had to load everything.
            outcome.decision, outcome.reason = "full", reason
        outcome.datasource_id = confirmed.datasource_id

    @cached_property
    def _definitions(self) -> dg.Definitions:
        """The extract's definitions, built once for both runs."""
        # Imported here: a plan needs no job.
        from tir_dagster.orchestration.build import build_defs

        logger = run_logger(self._progress, self._run_warnings.extend)
        return build_defs(specs=(self.spec,), loggers={_CONSOLE: logger})

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
        try:
            result = self._definitions.resolve_job_def(job).execute_in_process(
                run_config={**config, "loggers": {_CONSOLE: {}}},
                instance=self._instance,
                partition_key=partition_key,
                tags={**(tags or {}), TOLD_BY_COMMAND: run_id},
                run_id=run_id,
                raise_on_error=True,
            )
        finally:
            outcome.warn(self._run_warnings)
            self._run_warnings.clear()
        for asset in (self.keys.source_table, self.keys.purged_extract, self.keys.published_datasource):
            for stage, seconds in event_metadata(result, asset).get("tir/stages", {}).items():
                outcome.stages[stage] = round(outcome.stages.get(stage, 0.0) + seconds, 3)
            outcome.profile += [StageProfile(**stage) for stage in event_metadata(result, asset).get(PROFILE, [])]
        return result


def event_metadata(result: dg.ExecuteInProcessResult, asset: dg.AssetKey) -> dict[str, Any]:
    """Return the metadata of the run's first materialization or observation of the asset."""
    for event in result.all_events:
        data = event.event_specific_data
        asset_event = getattr(data, "materialization", None) or getattr(data, "asset_observation", None)
        if asset_event is not None and asset_event.asset_key == asset:
            return {name: getattr(entry, "value", None) for name, entry in asset_event.metadata.items()}
    return {}


def run_logger(progress: Callable[[str], None], warn: Callable[[Sequence[str]], None]) -> dg.LoggerDefinition:
    """Build a Dagster logger that passes the log lines of a run's steps to a command, each once."""
    lines: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            meta = getattr(record, "dagster_meta", {})
            line = meta.get("orig_message")
            if meta.get("dagster_event") is not None or not line:
                # Dagster's own events are in its history.
                return
            if record.levelno >= logging.WARNING:
                warn([line])
            elif line not in lines:
                lines.add(line)
                progress(line)

    @dg.logger
    def command_logger(_: dg.InitLoggerContext) -> logging.Logger:
        logger = logging.Logger("tir", logging.INFO)  # noqa: LOG001 - one for each run, in nobody else's tree
        logger.addHandler(Handler())
        return logger

    return command_logger


def so_far(spec: ExtractSpec, instance: dg.DagsterInstance, outcome: RefreshOutcome) -> str:
    """Say what the datasource shows when a command is stopped."""
    # Without a run, no request was sent to the server yet.
    names = () if outcome.run_ids else (StoppedError.__name__,)
    sentence = unaffected(instance, spec, tir_home(), names, outcome.run_ids[-1] if outcome.run_ids else "")
    return f"{sentence[0].upper()}{sentence[1:]}."
