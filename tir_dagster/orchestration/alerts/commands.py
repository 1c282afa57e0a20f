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
from typing import Any

import dagster as dg

from tir_dagster.alerts.events import Failure, Recovered, Report, Success
from tir_dagster.alerts.sending import AlertSender, Note
from tir_dagster.alerts.storage import AlertStorage, KilledCommand
from tir_dagster.alerts.text import one_line, scrub, shortened
from tir_dagster.errors import HintError, SpecError
from tir_dagster.orchestration.alerts.resources import channels_of_environment
from tir_dagster.orchestration.alerts.runs import (
    Declaration,
    EndedRun,
    error_names,
    failure,
    failure_by_errors,
    failure_of_run,
    in_words,
    is_held,
    job_names,
    place_of,
    reached_servers,
    sentence_of,
    success_of_run,
)
from tir_dagster.orchestration.checks import known_drift
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.interrupts import StoppedError
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import TOLD_BY_COMMAND, extract_keys
from tir_dagster.orchestration.partitions import UNFINISHED
from tir_dagster.spec.alerts import Cause
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

_KILLED = "The command ended without a result: its process was killed, or its machine stopped."


def alert_storage() -> AlertStorage:
    """Return the alerts' files in TIR_HOME; commands, sensors and a project's own reports share them."""
    return AlertStorage(tir_home() / "alerts")


@contextmanager
def alerting(
    spec: Declaration, instance: dg.DagsterInstance, outcome: Any, progress: Callable[[str], None]
) -> Iterator[None]:
    """Send an alert about the end of the block, within the spec's timeout; a failed alert never changes the result."""
    if spec.alerts is None:
        yield
        return
    started = time.time()
    with alert_storage().command_running(spec.name, started):
        try:
            yield
        except Exception as error:
            if not _concerns_only_user(spec, instance, error):
                _send(spec, instance, outcome, progress, partial(_failure, spec, instance, outcome, error, started))
            raise
        _send(spec, instance, outcome, progress, partial(_success, spec, instance, outcome))


def _concerns_only_user(spec: Declaration, instance: dg.DagsterInstance, error: Exception) -> bool:
    """Return whether only the user of the command needs to know: a wrong option, Ctrl-C, a hold, a spec that never worked.

    A spec that worked before is different: the source may have lost a column, and nobody watches a nightly command.
    """
    if isinstance(error, HintError) or (isinstance(error, StoppedError) and error.number is signal.SIGINT):
        return True
    if is_held(error_names(error)):
        return True
    if not isinstance(error, SpecError) or isinstance(spec, LoadSpec):
        return False
    return last_confirmation(instance, extract_keys(spec).published_datasource) is None


def _send(
    spec: Declaration,
    instance: dg.DagsterInstance,
    outcome: Any,
    progress: Callable[[str], None],
    make_report: Callable[[], Report | None],
) -> None:
    assert spec.alerts is not None, "called only for specs with alerts"
    try:
        settings, seconds = {spec.name: spec.alerts}, spec.alerts.timeout
        sender = AlertSender(alert_storage(), settings, channels_of_environment(), seconds=seconds, env=os.environ)
        report = make_report()
        notes = sender.send([report] if report else [])
        show_notes(instance, notes, progress)
        outcome.warnings += [note.text for note in notes]
    except Exception as error:
        # A failed alert must not make a finished refresh fail.
        message = shortened(one_line(scrub(str(error), os.environ)), 300)
        progress(f"the alert could not be sent: {type(error).__name__}: {message}")


def show_notes(instance: dg.DagsterInstance, notes: Sequence[Note], warn: Callable[[str], Any]) -> None:
    """Show alerts that could not be sent: in the log, and on the run that they are about."""
    for note in notes:
        warn(note.text)
        run = instance.get_run_by_id(note.run_id) if note.run_id else None
        if run is not None:
            instance.report_engine_event(note.text, run)


def _last_run(instance: dg.DagsterInstance, outcome: Any) -> EndedRun | None:
    record = instance.get_run_record_by_id(outcome.run_ids[-1]) if outcome.run_ids else None
    return EndedRun(instance, record, tir_home()) if record else None


def _failure(
    spec: Declaration, instance: dg.DagsterInstance, outcome: Any, error: Exception, started: float
) -> Failure:
    run_id, run = outcome.run_ids[-1] if outcome.run_ids else "", _last_run(instance, outcome)
    of_run = failure_of_run(run, spec) if run else None
    # Before the first run, the command reads the server and the source.
    before_runs = "" if isinstance(spec, LoadSpec) else "looking at the datasource and its source"
    fields = {"ident": f"{run_id or started}/{spec.name}", "at": time.time(), "run_id": run_id}
    step = of_run.step if of_run else before_runs
    return failure_by_errors(instance, spec, tir_home(), error_names(error), sentence_of(error), **fields, step=step)


def _success(spec: Declaration, instance: dg.DagsterInstance, outcome: Any) -> Success | None:
    run = _last_run(instance, outcome)
    if run is None:
        # A refresh that found nothing to do; a load always has a run.
        now = time.time()
        as_of, scopes = outcome.source_version or "", reached_servers(spec)
        place, seconds = place_of(spec), outcome.seconds
        return Success(f"{now:.3f}/{spec.name}", spec.name, now, place, seconds=seconds, as_of=as_of, scopes=scopes)
    success = success_of_run(run, spec)
    if success is None:
        return None
    success = replace(success, warnings=tuple(outcome.warnings), seconds=outcome.seconds)
    if isinstance(spec, LoadSpec):
        return success
    reason = outcome.reason or ""
    return replace(success, decision=outcome.decision, reason=reason, why=in_words(reason) or success.why)


def tell_verified(
    spec: ExtractSpec,
    instance: dg.DagsterInstance,
    outcome: Any,
    progress: Callable[[str], None],
    *,
    found: Sequence[str],
) -> None:
    """Send what differs, as sentences of a verification by a command; if nothing is known to differ, end the problem.

    The alerts sensor tells the same of the recorded checks; whoever comes second finds it told.
    """
    if spec.alerts is None:
        return
    keys, now = extract_keys(spec), time.time()
    ident = f"{now:.3f}/{spec.name}"
    if found:
        report: Report = failure(spec, Cause.DRIFT, " ".join(found), ident=f"{ident}/drift", at=now)
    elif known_drift(instance, keys, last_confirmation(instance, keys.published_datasource)) is None:
        report = Recovered(f"{ident}/no-drift", spec.name, "drift", now)
    else:
        return
    _send(spec, instance, outcome, progress, lambda: report)


# Killed commands


def killed_reports(
    instance: dg.DagsterInstance, specs: Sequence[Declaration]
) -> list[tuple[KilledCommand, Failure | None]]:
    """Return killed commands with their failures; None where the report of their last run is enough."""
    by_name = {spec.name: spec for spec in specs}
    commands = alert_storage().killed_commands(by_name)
    return [(command, _killed(instance, by_name[command.extract], command)) for command in commands]


def _killed(instance: dg.DagsterInstance, spec: Declaration, command: KilledCommand) -> Failure | None:
    run = _last_run_of_killed(instance, spec, command)
    if run is not None and _says_it_all(run, spec):
        return None
    at_work = run is not None and run.run.status in UNFINISHED
    fields = {
        # An ended run has its own report with its own id.
        "ident": f"{run.id if run and at_work else command.started}/{spec.name}",
        # Not the current time: a later command may have succeeded meanwhile.
        "at": command.last,
        "run_id": run.id if run else "",
    }
    return failure_by_errors(instance, spec, tir_home(), [], _KILLED, **fields)


def _last_run_of_killed(instance: dg.DagsterInstance, spec: Declaration, command: KilledCommand) -> EndedRun | None:
    """Return the command's last run; runs created after it was last seen alive belong to another command."""
    since, until = (datetime.fromtimestamp(at, UTC) for at in (command.started, command.last))
    records = [
        record
        for job in job_names(spec)
        for record in instance.get_run_records(
            dg.RunsFilter(job_name=job, created_after=since, created_before=until), limit=10
        )
        if TOLD_BY_COMMAND in record.dagster_run.tags
    ]
    last = max(records, key=lambda record: record.create_timestamp, default=None)
    return EndedRun(instance, last, tir_home()) if last else None


def _says_it_all(run: EndedRun, spec: Declaration) -> bool:
    """Return whether the sensor reports the command by its last run: it was killed after that run."""
    if run.run.status is dg.DagsterRunStatus.SUCCESS:
        return success_of_run(run, spec) is not None
    return run.run.status not in UNFINISHED
