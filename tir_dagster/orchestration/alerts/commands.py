"""Alerts about commands: sent at the end of a command, or by the alerts sensor if the command was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from tir_dagster.alerts.events import Failure, Report, Success
from tir_dagster.alerts.memory import Book
from tir_dagster.alerts.notify import Note, Teller
from tir_dagster.alerts.running_commands import Killed, killed_commands, under_way
from tir_dagster.alerts.text import one_line, scrub, shortened
from tir_dagster.errors import HintError, SpecError
from tir_dagster.orchestration.alerts.ended_runs import Declaration
from tir_dagster.orchestration.alerts.load_reports import load_failure, load_failure_of_run, load_success_of_run
from tir_dagster.orchestration.alerts.resources import people_of_environment
from tir_dagster.orchestration.alerts.run_reports import (
    error_names,
    failure,
    failures_of_run,
    in_words,
    reached_servers,
    sentence_of,
    success_of_run,
)
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.interrupts import StoppedError
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import (
    TOLD_BY_COMMAND,
    detect_job_name,
    extract_keys,
    load_job_name,
    refresh_job_name,
)
from tir_dagster.orchestration.partitions import UNFINISHED
from tir_dagster.spec.load import LoadSpec

_KILLED = "The command ended without a result: its process was killed, or its machine stopped."


def book_of(home: Path) -> Book:
    """Return the alerts' state in TIR_HOME; commands, sensors and a project's own reports share it."""
    return Book(home / "alerts")


def _commands(home: Path) -> Path:
    return home / "alerts" / "commands"


@contextmanager
def alerting(
    spec: Declaration, instance: dg.DagsterInstance, outcome: Any, progress: Callable[[str], None]
) -> Iterator[None]:
    """Send an alert about the end of the block, within the spec's timeout; a failed alert never changes the result."""
    if spec.alerts is None:
        yield
        return
    started = time.time()
    with under_way(_commands(tir_home()), spec.name, started):
        try:
            yield
        except Exception as error:
            if not _concerns_only_user(spec, instance, error):
                _tell(spec, instance, outcome, progress, partial(_failed, spec, instance, outcome, error, started))
            raise
        _tell(spec, instance, outcome, progress, partial(_succeeded, spec, instance, outcome))


def _concerns_only_user(spec: Declaration, instance: dg.DagsterInstance, error: Exception) -> bool:
    """Return whether only the user of the command needs to know: a wrong option, Ctrl-C, a spec that never worked.

    A spec that worked before is different: the source may have lost a column, and nobody watches a nightly command.
    """
    if isinstance(error, HintError) or (isinstance(error, StoppedError) and error.number is signal.SIGINT):
        return True
    if not isinstance(error, SpecError) or isinstance(spec, LoadSpec):
        return False
    return last_confirmation(instance, extract_keys(spec).published_datasource) is None


def _tell(
    spec: Declaration,
    instance: dg.DagsterInstance,
    outcome: Any,
    progress: Callable[[str], None],
    make_report: Callable[[], Report | None],
) -> None:
    assert spec.alerts is not None, "called only for specs with alerts"
    try:
        teller = Teller(
            book_of(tir_home()),
            {spec.name: spec.alerts},
            people_of_environment(),
            seconds=spec.alerts.timeout,
            env=os.environ,
        )
        reports = [report for report in [make_report()] if report is not None]
        notes = teller.tell(reports)
        leave_notes(instance, notes, progress)
        outcome.warnings += [note.text for note in notes]
    except Exception as error:
        # A failed alert must not make a finished refresh fail.
        message = shortened(one_line(scrub(str(error), os.environ)), 300)
        progress(f"the alert could not be sent: {type(error).__name__}: {message}")


def leave_notes(instance: dg.DagsterInstance, notes: Sequence[Note], warn: Callable[[str], Any]) -> None:
    """Show alerts that could not be sent: in the log, and on the run that they are about."""
    for note in notes:
        warn(note.text)
        run = instance.get_run_by_id(note.run_id) if note.run_id else None
        if run is not None:
            instance.report_engine_event(note.text, run)


def _failed(spec: Declaration, instance: dg.DagsterInstance, outcome: Any, error: Exception, started: float) -> Failure:
    run_id = outcome.run_ids[-1] if outcome.run_ids else ""
    record = instance.get_run_record_by_id(run_id) if run_id else None
    fields: dict[str, Any] = {
        "ident": f"{run_id or started}/{spec.name}",
        "names": error_names(error),
        "sentence": sentence_of(error),
        "at": time.time(),
        "run_id": run_id,
    }
    if isinstance(spec, LoadSpec):
        step = load_failure_of_run(instance, spec, record) if record is not None else None
        return load_failure(spec, **fields, step=step.step if step else "")
    failures = failures_of_run(instance, [spec], record, tir_home()) if record is not None else []
    # Before the first run, the command reads the server and the source.
    step_name = failures[0].step if failures else "looking at the datasource and its source"
    return failure(instance, spec, tir_home(), **fields, step=step_name)


def _succeeded(spec: Declaration, instance: dg.DagsterInstance, outcome: Any) -> Success | None:
    run_id = outcome.run_ids[-1] if outcome.run_ids else ""
    record = instance.get_run_record_by_id(run_id) if run_id else None
    if isinstance(spec, LoadSpec):
        success = load_success_of_run(instance, spec, record) if record is not None else None
        return replace(success, warnings=tuple(outcome.warnings), seconds=outcome.seconds) if success else None
    if record is None:
        return Success(
            id=f"{time.time():.3f}/{spec.name}",
            extract=spec.name,
            at=time.time(),
            datasource=f"{spec.datasource.project}/{spec.datasource.name}",
            seconds=outcome.seconds,
            as_of=outcome.source_version or "",
            scopes=reached_servers(spec, published=False),
        )
    success = success_of_run(instance, spec, record, tir_home())
    if success is None:
        return None
    reason = outcome.reason or ""
    return replace(
        success,
        decision=outcome.decision,
        reason=reason,
        why=in_words(reason),
        warnings=tuple(outcome.warnings),
        seconds=outcome.seconds,
    )


# Killed commands


def killed_reports(
    instance: dg.DagsterInstance, specs: Sequence[Declaration], home: Path
) -> list[tuple[Killed, Failure | None]]:
    """Return killed commands with their failures; None where the report of their last run is enough."""
    by_name = {spec.name: spec for spec in specs}
    return [
        (command, _killed(instance, by_name[command.extract], command))
        for command in killed_commands(_commands(home), by_name)
    ]


def _killed(instance: dg.DagsterInstance, spec: Declaration, command: Killed) -> Failure | None:
    record = _last_run(instance, spec, command)
    if record is not None and _says_it_all(instance, spec, record):
        return None
    run_id = record.dagster_run.run_id if record else ""
    at_work = record is not None and record.dagster_run.status in UNFINISHED
    fields: dict[str, Any] = {
        # An ended run has its own report with its own id.
        "ident": f"{run_id if at_work else command.started}/{spec.name}",
        "names": [],
        "sentence": _KILLED,
        # Not the current time: a later command may have succeeded meanwhile.
        "at": command.last,
        "run_id": run_id,
    }
    return load_failure(spec, **fields) if isinstance(spec, LoadSpec) else failure(instance, spec, tir_home(), **fields)


def _last_run(instance: dg.DagsterInstance, spec: Declaration, command: Killed) -> dg.RunRecord | None:
    """Return the command's last run; runs created after it was last seen alive belong to another command."""
    jobs = [load_job_name(spec)] if isinstance(spec, LoadSpec) else [detect_job_name(spec), refresh_job_name(spec)]
    since, until = (datetime.fromtimestamp(at, UTC) for at in (command.started, command.last))
    records = [
        record
        for job in jobs
        for record in instance.get_run_records(
            dg.RunsFilter(job_name=job, created_after=since, created_before=until), limit=10
        )
        if TOLD_BY_COMMAND in record.dagster_run.tags
    ]
    return max(records, key=lambda record: record.create_timestamp, default=None)


def _says_it_all(instance: dg.DagsterInstance, spec: Declaration, record: dg.RunRecord) -> bool:
    """Return whether the sensor reports the command by its last run: it was killed after that run."""
    status = record.dagster_run.status
    if status is not dg.DagsterRunStatus.SUCCESS:
        return status not in UNFINISHED
    return isinstance(spec, LoadSpec) or success_of_run(instance, spec, record, tir_home()) is not None
