"""The work of `tir report`: what is known of an extract's refreshes, gathered for one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from tir_dagster.cli.overview.page import write_page
from tir_dagster.cli.overview.past import PastRefresh, past_refreshes
from tir_dagster.cli.overview.status import Line, read_extract
from tir_dagster.errors import TirError
from tir_dagster.files import private_folder, replaced_file
from tir_dagster.orchestration.alerts.runs import EndedRun, failure_of_run, job_names
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import report_file
from tir_dagster.orchestration.names import extract_keys, rollback_job_name, verify_job_name
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.spec.extract import ExtractSpec

_INCIDENTS = 20


@dataclass(frozen=True)
class CheckResult:
    """The newest result of one of the datasource's checks."""

    name: str
    passed: bool
    at: float
    text: str


@dataclass(frozen=True)
class Incident:
    """A run that failed, and when a refresh was published after it."""

    at: float
    cause: str
    sentence: str
    ended: float | None = None


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    spec: ExtractSpec
    made_at: datetime
    state: Line
    # The newest first.
    refreshes: Sequence[PastRefresh]
    checks: Sequence[CheckResult]
    slices: int | None
    slices_verified: int | None
    # The newest first.
    incidents: Sequence[Incident] = ()


def write_report(spec: ExtractSpec, instance: dg.DagsterInstance, target: Path | None) -> Path:
    """Write the page and return its path; by default beside the extract's state."""
    report = read_report(spec, instance)
    file = target or report_file(spec)
    if target is None:
        private_folder(file.parent)
    elif not file.parent.is_dir():
        raise TirError(f"{file.parent} is no folder. Make it, or name another file with --to.")
    with replaced_file(file) as beside:
        beside.write_text(write_page(report), encoding="utf-8")
    return file


def read_report(spec: ExtractSpec, instance: dg.DagsterInstance) -> Report:
    """Gather what Dagster's log and the state folder know."""
    refreshes = past_refreshes(spec, instance)
    manifest = next(
        (
            version.manifest
            for version in VersionStore(tir_home() / "extracts" / spec.name / "versions").versions()
            if refreshes and version.id == refreshes[0].version
        ),
        None,
    )
    return Report(
        spec,
        datetime.now(UTC),
        read_extract(spec, instance),
        refreshes,
        _checks(spec, instance),
        len(manifest["slice_rows"]) if manifest else None,
        len(manifest.get("verified", ())) if manifest else None,
        incidents_of(spec, instance, refreshes),
    )


def incidents_of(
    spec: ExtractSpec, instance: dg.DagsterInstance, refreshes: Sequence[PastRefresh]
) -> Sequence[Incident]:
    """Return the newest runs of the extract that failed, the newest first."""
    jobs = {*job_names(spec), verify_job_name(spec), rollback_job_name(spec)}
    failed = [
        EndedRun(instance, record, tir_home())
        for job in jobs
        for record in instance.get_run_records(
            dg.RunsFilter(job_name=job, statuses=[dg.DagsterRunStatus.FAILURE]), limit=_INCIDENTS
        )
    ]
    incidents = []
    for run in sorted(failed, key=lambda one: one.ended, reverse=True)[:_INCIDENTS]:
        if failure := failure_of_run(run, spec):
            ended = min((refresh.at for refresh in refreshes if refresh.at > run.ended), default=None)
            incidents.append(Incident(run.ended, failure.cause.value, failure.sentence, ended))
    return incidents


def _checks(spec: ExtractSpec, instance: dg.DagsterInstance) -> list[CheckResult]:
    published = extract_keys(spec).published_datasource
    names = ("equals_source", "unique_row_key", "mandatory_joins", "server_holds_it")
    keys = [dg.AssetCheckKey(published, name) for name in names]
    results = []
    for key, record in instance.event_log_storage.get_latest_asset_check_execution_by_key(keys).items():
        evaluation = record.evaluation
        if evaluation is not None:
            results.append(
                CheckResult(key.name, evaluation.passed, record.create_timestamp, evaluation.description or "")
            )
    return sorted(results, key=lambda result: names.index(result.name))
