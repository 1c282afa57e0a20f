"""What `tir plan` and `tir refresh` do: the Dagster jobs in this process, so that every refresh is in the history."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from tir_dagster.changes.changesets import new_id
from tir_dagster.changes.plan import Mode, Plan
from tir_dagster.changes.state import ChangeSet, slice_label
from tir_dagster.datasource.access import TableauAccess
from tir_dagster.definitions import build_defs
from tir_dagster.errors import SpecError, TirError
from tir_dagster.orchestration import assets
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.extracts import detect_job_name, refresh_job_name
from tir_dagster.orchestration.flow import Refresher
from tir_dagster.orchestration.partitions import change_set_partitions, covering_range, slices_between
from tir_dagster.orchestration.resources import tir_home
from tir_dagster.orchestration.sensors import application_config
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.spec import ExtractSpec

LEASE_WAIT_SECONDS = 600.0
_DAGSTER_YAML = """\
# Written by tir_dagster; change it as you like.
telemetry:
  enabled: false
nux:
  enabled: false
"""
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
        known = ", ".join(spec.name for spec in specs) or "none: name a spec file with --specs or TIR_SPECS"
        raise SpecError(f"There is no extract {name!r}. Declared are {known}.")
    return found


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """The instance that the command line, the UI and the daemon share: DAGSTER_HOME, by default below TIR_HOME."""
    home = Path(os.environ.setdefault("DAGSTER_HOME", str(tir_home() / "dagster")))
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").write_text(_DAGSTER_YAML, encoding="utf-8")
    with dg.DagsterInstance.get() as instance:
        yield instance


class Command:
    """One extract and everything its commands need."""

    def __init__(self, spec: ExtractSpec, instance: dg.DagsterInstance, progress: Callable[[str], None]) -> None:
        self.spec = spec
        self.keys = assets.extract_keys(spec)
        self._instance = instance
        self._progress = progress
        # Looking and planning need no run; they use what the resources would be made from.
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
        looked = self.refresher.look(last_confirmation(self._instance, self.keys.published_datasource))
        return self.refresher.plan(looked, self.refresher.survey(looked), mode, slices)

    def refresh(self, mode: Mode, slices: Sequence[str], *, allow_empty: bool) -> Outcome:
        started = time.perf_counter()
        outcome = Outcome(self.spec.name, mode)
        try:
            with self.refresher.leased("tir refresh", wait_seconds=LEASE_WAIT_SECONDS):
                self._refresh(outcome, mode, slices, allow_empty=allow_empty)
        finally:
            outcome.seconds = round(time.perf_counter() - started, 3)
        return outcome

    def _refresh(self, outcome: Outcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool) -> None:
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        looked = self.refresher.look(confirmed)
        if looked.late is not None:
            self._confirm_late(looked.late)
        plan = self.refresher.plan(looked, self.refresher.survey(looked), mode, slices)
        outcome.stages.update(self.refresher.stages.seconds)
        if plan.decision == "none":
            outcome.source_version = looked.confirmed.source_version if looked.confirmed else None
            outcome.datasource_id = looked.confirmed.datasource_id if looked.confirmed else None
            return
        self._progress(plan.sentence())
        change_set = self._detect(outcome, mode, slices, allow_empty=allow_empty)
        if change_set is None:
            self._progress(f"{self.spec.name}: nothing differs from the extract.")
            return
        self._fill(outcome, change_set)
        self._apply(outcome, change_set)

    def _confirm_late(self, confirmation: Any) -> None:
        self._progress("an earlier publish had landed before its run ended: confirmed now")
        for event in assets.late_events(confirmation, self.keys):
            self._instance.report_runless_asset_event(event)
        self.refresher.settle(confirmation)

    def _detect(self, outcome: Outcome, mode: Mode, slices: Sequence[str], *, allow_empty: bool) -> ChangeSet | None:
        ident = new_id()
        partitions = change_set_partitions(self.spec)
        self._instance.add_dynamic_partitions(str(partitions.name), [ident])
        config = {"mode": mode, "slices": list(slices), "allow_empty": allow_empty}
        op = self.keys.changed_keys.to_python_identifier()
        self._run(outcome, detect_job_name(self.spec), partition_key=ident, config={"ops": {op: {"config": config}}})
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
        tags = covering_range(self.spec, change_set.touched)
        config = application_config(self.keys, change_set.id)
        self._run(outcome, refresh_job_name(self.spec), tags=tags, config=config)
        confirmed = last_confirmation(self._instance, self.keys.published_datasource)
        if confirmed is None or change_set.id not in confirmed.change_sets:
            raise TirError(f"{self.spec.name}: the refresh ended without a confirmation. Run it again.")
        outcome.published = True
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
        definition = build_defs(specs=(self.spec,)).resolve_job_def(job)
        with assets.progress_to(self._progress, outcome.stages):
            result = definition.execute_in_process(
                run_config={**config, **_QUIET},
                instance=self._instance,
                partition_key=partition_key,
                tags=tags or {},
                raise_on_error=True,
            )
        outcome.run_ids.append(result.run_id)


@contextmanager
def command(spec: ExtractSpec, progress: Callable[[str], None]) -> Iterator[Command]:
    with dagster_instance() as instance:
        yield Command(spec, instance, progress)


def _no_spark() -> Any:
    raise AssertionError("Spark starts inside a run, never for a plan")


def chosen_slices(spec: ExtractSpec, text: str | None) -> list[str]:
    return slices_between(spec, text) if text else []
