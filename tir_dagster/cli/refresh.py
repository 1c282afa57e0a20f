"""What `tir plan` and `tir refresh` do: the Dagster jobs in this process, so that every refresh is in the history."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import dagster as dg

from tir_dagster.changes.change_set import ChangeSet, slice_label
from tir_dagster.changes.hints import parse_hints
from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.changes.question import checked_hints
from tir_dagster.changes.relation import relation_of
from tir_dagster.errors import SpecError, TirError
from tir_dagster.orchestration.checks import published_evaluations
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.home import dagster_instance, tir_home
from tir_dagster.orchestration.hosting import Host, hosting
from tir_dagster.orchestration.interrupts import StoppedError, check_signals, stopping
from tir_dagster.orchestration.metadata import late_events
from tir_dagster.orchestration.names import (
    TOLD_BY_COMMAND,
    application_config,
    detect_job_name,
    detection_config,
    extract_keys,
    refresh_job_name,
)
from tir_dagster.orchestration.partitions import change_set_partitions, covering_range, slices_between
from tir_dagster.orchestration.preparing import prepare_detection
from tir_dagster.orchestration.value_slices import add_slices, known_slices, retire_slices
from tir_dagster.refresh.flow import Looked, Refresher
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.steps import remove
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.query import explain
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess

LEASE_WAIT_SECONDS = 600.0
# The console shows our own progress; Dagster's log of the run is in its history.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass
class Outcome:
    """What a command did, as `--json` prints it."""

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
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_spec(specs: Sequence[ExtractSpec], name: str) -> ExtractSpec:
    found = next((spec for spec in specs if spec.name == name), None)
    if found is None:
        known = ", ".join(spec.name for spec in specs)
        hint = f"The spec file declares {known}" if known else "Name a spec file with --specs or TIR_SPECS"
        raise SpecError(f"There is no extract {name!r}. {hint}.")
    return found


class Command:
    """One extract and everything its commands need."""

    def __init__(self, spec: ExtractSpec, instance: dg.DagsterInstance, progress: Callable[[str], None]) -> None:
        self.spec = spec
        self.keys = extract_keys(spec)
        self._instance = instance
        self._progress = progress
        # Looking and planning need no run; the runs that follow use the same refresher.
        self.refresher = Refresher(
            spec,
            snowflake=SnowflakeAccess.from_environment(os.environ),
            tableau=TableauAccess.from_environment(os.environ),
            spark=_no_spark,
            home=tir_home(),
            log=progress,
        )

    def plan(self, mode: Mode, slices: Sequence[str]) -> Plan:
        """What a refresh would do, from tokens and definitions alone: no Spark, nothing touched."""
        # Without the lease: a run at work may be using its own downloads.
        self.refresher.work = self.refresher.folder / "plan"
        try:
            looked = self._look(mend=False)
            return self.refresher.plan(looked, self.refresher.survey(looked), mode, slices)
        finally:
            remove(self.refresher.work)

    def explain(self) -> list[str]:
        """What the extract's query means for a refresh."""
        view = relation_of(self.spec, self.refresher.snowflake).view
        return explain(view) if view else [f"A copy of {self.spec.main_table}: all its changes are refreshed by key."]

    def refresh(self, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()) -> Outcome:
        from tir_dagster.orchestration.command_reports import telling  # noqa: PLC0415 - a plan tells nobody

        started = time.perf_counter()
        outcome = Outcome(self.spec.name, mode)
        self.refresher.begin()
        stop = stopping(self.spec.name, lambda: so_far(self.spec, self._instance, outcome))
        with telling(self.spec, self._instance, outcome, self._progress), stop:
            try:
                with self.refresher.leased("tir refresh", wait_seconds=LEASE_WAIT_SECONDS):
                    self._refresh(outcome, mode, slices, allow_empty=allow_empty, hints=hints)
                # Also where there was nothing to do: what an earlier publish took away may not have come back.
                outcome.warnings += self.refresher.warnings
            except Exception:
                for warning in self.refresher.warnings:
                    self._progress(f"warning: {warning}")
                raise
            finally:
                outcome.stages = dict(self.refresher.stages.seconds)
                outcome.seconds = round(time.perf_counter() - started, 3)
        return outcome

    def _refresh(
        self, outcome: Outcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str]
    ) -> None:
        # Before anything is looked at: a hint that nobody can read.
        given = [hint for text in hints for hint in parse_hints(text, "--hint")]
        looked = self._look()
        if looked.late is not None:
            self._confirm_late(looked.late)
        prepared = prepare_detection(self.refresher, looked, self._instance, self.keys)
        surveyed = prepared.surveyed
        checked_hints(given, surveyed.relation, self.refresher.snowflake)
        hinted = bool(given or prepared.hinted)
        plan = self.refresher.plan(looked, surveyed, mode, slices, hinted=hinted, owed=prepared.owed)
        if plan.decision == "none":
            outcome.source_version = looked.confirmed.source_version if looked.confirmed else None
            outcome.datasource_id = looked.confirmed.datasource_id if looked.confirmed else None
            return
        self._progress(plan.sentence())
        self.refresher.prepared = replace(prepared, looked=replace(looked, late=None))
        change_set = self._detect(outcome, mode, slices, allow_empty=allow_empty, hints=hints)
        if change_set is None:
            self._progress(f"{self.spec.name}: nothing differs from the extract.")
            return
        self._fill(outcome, change_set)
        self._apply(outcome, change_set)

    def _look(self, *, mend: bool = True) -> Looked:
        named = f"datasource {self.spec.datasource.name!r}"
        self._progress(f"looking at {named} and at {self.spec.main_table}")
        looked = self.refresher.look(last_confirmation(self._instance, self.keys.published_datasource), mend=mend)
        if looked.server.found is None:
            # Perhaps a name was misspelt: say it before anything is created.
            self._progress(f"there is no {named} in project {looked.server.project.path!r} yet: a refresh creates it")
        return looked

    def _confirm_late(self, confirmation: Any) -> None:
        self._progress("an earlier publish of ours was not on record: confirmed now")
        for event in late_events(confirmation, self.keys):
            self._instance.report_runless_asset_event(event)
        self.refresher.settle(confirmation)
        for check in published_evaluations(self.refresher, confirmation, self.keys, warn=self._warn):
            self._instance.report_runless_asset_event(check)

    def _warn(self, text: str, *values: object) -> None:
        self._progress(f"warning: {text % values}")

    def _detect(
        self, outcome: Outcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool, hints: Sequence[str] = ()
    ) -> ChangeSet | None:
        ident = new_id()
        partitions = change_set_partitions(self.spec)
        self._instance.add_dynamic_partitions(str(partitions.name), [ident])
        config = detection_config(self.keys, mode=mode, slices=list(slices), allow_empty=allow_empty, hints=list(hints))
        try:
            self._run(outcome, detect_job_name(self.spec), partition_key=ident, config=config)
        finally:
            # Also after a failure: a partition without a change set would be missing for ever.
            made = [one for one in self.refresher.change_sets.pending() if one.id == ident]
            if not made:
                self._instance.delete_dynamic_partition(str(partitions.name), ident)
        return made[0] if made else None

    def _fill(self, outcome: Outcome, change_set: ChangeSet) -> None:
        outcome.decision = change_set.decision
        outcome.reason = change_set.reason
        outcome.slices = [slice_label(name) for name in sorted({**change_set.purged, **change_set.appended})]
        outcome.rows_purged = sum(change_set.purged.values())
        outcome.rows_appended = sum(change_set.appended.values())
        outcome.source_version = change_set.source_version
        outcome.warnings = list(change_set.warnings)

    def _apply(self, outcome: Outcome, change_set: ChangeSet) -> None:
        known = add_slices(self._instance, self.spec, change_set.touched)
        tags = covering_range(self.spec, change_set.touched, known)
        config = application_config(self.keys, change_set.id)
        self._run(outcome, refresh_job_name(self.spec), tags=tags, config=config)
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        if confirmed is None or confirmed.source_version < change_set.source_version:
            raise TirError(f"{self.spec.name}: the refresh ended without a confirmation. Run it again.")
        outcome.published = True
        version = self.refresher.known_version(confirmed.version)
        if version is not None and version.manifest["change_set"] == change_set.id:
            # Counted in the extract itself: of a query that aggregates, a group that HAVING hides has no row there.
            outcome.rows_purged = version.manifest["rows_purged"]
            outcome.rows_appended = version.manifest["rows_appended"]
        retire_slices(self._instance, self.spec, self.keys.published_datasource)
        if self.refresher.full_reason is not None:
            outcome.decision, outcome.reason = "full", self.refresher.full_reason
        outcome.datasource_id = confirmed.datasource_id

    def _run(
        self,
        outcome: Outcome,
        job: str,
        *,
        config: dict[str, Any],
        partition_key: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        run_here(
            outcome,
            self.spec,
            job,
            host=Host(self.refresher, self._progress),
            instance=self._instance,
            config=config,
            partition_key=partition_key,
            tags=tags,
        )


def run_here(
    outcome: Outcome,
    spec: ExtractSpec,
    job: str,
    *,
    host: Host,
    instance: dg.DagsterInstance,
    config: dict[str, Any],
    partition_key: str | None = None,
    tags: dict[str, str] | None = None,
) -> None:
    """Run the extract's job in this process, with the command's own refresher; its error is the run's."""
    # Here and not above: a plan needs no job.
    from tir_dagster.definitions import build_defs  # noqa: PLC0415

    check_signals()
    definition = build_defs(specs=(spec,)).resolve_job_def(job)
    run_id = str(uuid.uuid4())
    outcome.run_ids.append(run_id)
    with hosting(host):
        definition.execute_in_process(
            run_config={**config, **_QUIET},
            instance=instance,
            partition_key=partition_key,
            tags={**(tags or {}), TOLD_BY_COMMAND: run_id},
            run_id=run_id,
            raise_on_error=True,
        )


def so_far(spec: ExtractSpec, instance: dg.DagsterInstance, outcome: Outcome) -> str:
    """What the datasource shows when a command is stopped."""
    from tir_dagster.orchestration.run_reports import unaffected  # noqa: PLC0415 - a plan tells nobody

    # Without a run, nothing was asked of the server yet.
    names = () if outcome.run_ids else (StoppedError.__name__,)
    said = unaffected(instance, spec, tir_home(), names, outcome.run_ids[-1] if outcome.run_ids else "")
    return f"{said[0].upper()}{said[1:]}."


@contextmanager
def command(spec: ExtractSpec, progress: Callable[[str], None]) -> Iterator[Command]:
    with dagster_instance() as instance:
        if spec.delivery == "trigger":
            from tir_dagster.cli.trigger import TriggerCommand  # noqa: PLC0415 - it needs this module

            # It plans and refreshes alike; only its refresher is another one.
            yield cast("Command", TriggerCommand(spec, instance, progress))
        else:
            yield Command(spec, instance, progress)


def _no_spark() -> Any:
    raise AssertionError("Spark starts inside a run, never for a plan")


def chosen_slices(spec: ExtractSpec, text: str | None) -> list[str]:
    """The slices that a command names; those by value are the ones that Dagster knows."""
    if not text:
        return []
    if spec.slices.by != "value":
        return slices_between(spec, text)
    with dagster_instance() as instance:
        return slices_between(spec, text, known_slices(instance, spec))
