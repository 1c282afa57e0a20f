"""People are told of what Dagster ran: a sensor over finished runs, the end of a command, and reports of others.

No postponed annotations here: Dagster reads the resources' types.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType

from tir_dagster.alerts.book import Book
from tir_dagster.alerts.events import Cause, Failure, Recovered, Report, Success, Topic
from tir_dagster.alerts.telling import Note, Teller
from tir_dagster.alerts.text import scrub
from tir_dagster.errors import SpecError, TirError
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.names import TOLD_BY_COMMAND
from tir_dagster.orchestration.people import (
    ServiceNowResource,
    SlackAppResource,
    connect_by,
    people_of_environment,
)
from tir_dagster.orchestration.resources import StateFolder
from tir_dagster.orchestration.run_reports import (
    cause_of,
    error_names,
    failure,
    failures_of_run,
    in_words,
    scope_of,
    sentence_of,
    success_of_run,
)
from tir_dagster.spec import ExtractSpec

INTERVAL_SECONDS = 30
# Dagster ends a tick after 60 seconds.
TICK_SECONDS = 45.0
# A run may be on record a little later than its end says.
OVERLAP_SECONDS = 300.0
# Whether Dagster retries a failed run is on record right after its failure.
RETRY_NEWS_SECONDS = 30.0
_WILL_RETRY, _RETRIED_BY = "dagster/will_retry", "dagster/auto_retry_run_id"


def book_of(home: Path) -> Book:
    return Book(home / "alerts")


# What others report: checks, sensors, a project's own code


def report(spec: ExtractSpec, cause: Cause, sentence: str, *, ident: str, topic: Topic | None = None) -> None:
    """Leave a failure for the alerts sensor: drift found, freshness missed, a sensor that cannot read.

    `ident` is the same when the same thing is reported twice, and another one for a new occurrence.
    """
    if spec.alerts is None:
        return
    made = Failure(
        id=ident,
        extract=spec.name,
        cause=cause,
        sentence=scrub(sentence, os.environ, show_values=spec.alerts.show_values),
        at=time.time(),
        scope=scope_of(cause, spec, os.environ),
        datasource=f"{spec.datasource.project}/{spec.datasource.name}",
        topic=topic,
    )
    # A sensor reports at every tick: the newest says it all.
    book_of(tir_home()).put(made, slot=f"{spec.name}/sensor" if made.ends_with == "sensor" else "")


def report_recovery(spec: ExtractSpec, topic: Topic) -> None:
    """Leave word that something other than a refresh works again; free of cost where nothing was wrong."""
    if spec.alerts is None:
        return
    book = book_of(tir_home())
    slot = f"{spec.name}/{topic}"
    if any(one.affected.get(spec.name) == topic for one in book.troubles()) or book.has_report(slot):
        book.put(Recovered(f"{slot}/{time.time():.3f}", spec.name, topic, time.time()), slot=slot)


def report_blind(spec: ExtractSpec, error: TirError) -> None:
    """The source sensor could not read: told after some patience, because one missed tick is nothing."""
    cause = cause_of(error_names(error))
    cause = cause if cause is Cause.WAREHOUSE_DOWN else Cause.SENSOR_BLIND
    _guarded(lambda: report(spec, cause, str(error), ident=f"{spec.name}/blind/{time.time():.3f}", topic="sensor"))


def report_reading(spec: ExtractSpec) -> None:
    _guarded(lambda: report_recovery(spec, "sensor"))


def _guarded(action: Callable[[], None]) -> None:
    """A disk that is full must not stop a sensor that can still read."""
    try:
        action()
    except OSError as error:
        dg.get_dagster_logger().warning("people could not be told: %s", error)


# The sensor


@dataclass(frozen=True)
class Watermark:
    """Up to where finished runs were looked at, which ones around there, and which wait for Dagster's retry."""

    # When the sensor first looked: what ended before people asked to be told is history.
    start: float
    after: float
    seen: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    @staticmethod
    def parse(cursor: str | None, now: float) -> "Watermark":
        try:
            return Watermark(**json.loads(cursor or ""))
        except (ValueError, TypeError):
            return Watermark(start=now, after=now)


def build_alert_sensor(specs: Sequence[ExtractSpec], name: str = "alerts") -> dg.SensorDefinition:
    """One sensor for all these extracts, so that a server that is down is one message and not one per extract."""
    told = [spec for spec in specs if spec.alerts is not None]

    @dg.sensor(
        name=name,
        minimum_interval_seconds=INTERVAL_SECONDS,
        # Whoever declares alerts wants to hear of failures, not to look for a switch first.
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells people of failed and recovered refreshes and of successes, as the extracts' `alerts` say.",
    )
    def alerts(
        context: dg.SensorEvaluationContext,
        slack: SlackAppResource,
        servicenow: ServiceNowResource,
        state: StateFolder,
    ) -> dg.SensorResult:
        before = Watermark.parse(context.cursor, time.time())
        reports, after = finished(context.instance, told, before, time.time(), state.folder)
        teller = Teller(
            book_of(state.folder),
            {spec.name: spec.alerts for spec in told if spec.alerts is not None},
            connect_by(slack, servicenow),
            seconds=TICK_SECONDS,
            env=os.environ,
        )
        notes = teller.tell(reports)
        leave_notes(context.instance, notes, context.log.warning)
        said = "; ".join(note.text for note in notes) or f"{len(reports)} finished runs looked at"
        return dg.SensorResult(skip_reason=said, cursor=json.dumps(asdict(after)))

    return alerts


def finished(
    instance: dg.DagsterInstance, specs: Sequence[ExtractSpec], before: Watermark, now: float, home: Path
) -> tuple[list[Report], Watermark]:
    """Reports of the runs that ended since, and where to go on."""
    since = max(before.start, before.after - OVERLAP_SECONDS)
    statuses = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
    wanted = dg.RunsFilter(statuses=statuses, updated_after=datetime.fromtimestamp(since, UTC))
    records = {one.dagster_run.run_id: one for one in instance.get_run_records(wanted)}
    fresh = {ident: one for ident, one in records.items() if _end(one) >= since and ident not in before.seen}
    for ident in before.waiting:
        if (record := instance.get_run_record_by_id(ident)) is not None:
            fresh[ident] = record
    waiting = [ident for ident, one in fresh.items() if _may_be_retried(instance, one, now)]
    reports = [
        report
        for ident, one in sorted(fresh.items(), key=lambda item: _end(item[1]))
        if ident not in waiting and _RETRIED_BY not in one.dagster_run.tags and not _told_by_command(one)
        for report in reports_of(instance, specs, one, home)
    ]
    looked = [one for one in {**records, **fresh}.values() if one.dagster_run.run_id not in waiting]
    after = max([before.after, *map(_end, looked)])
    seen = [one.dagster_run.run_id for one in looked if _end(one) > after - OVERLAP_SECONDS]
    return reports, Watermark(before.start, after, seen, waiting)


def _end(record: dg.RunRecord) -> float:
    return record.end_time or record.update_timestamp.timestamp()


def _told_by_command(record: dg.RunRecord) -> bool:
    return record.dagster_run.tags.get(TOLD_BY_COMMAND) == record.dagster_run.run_id


def _may_be_retried(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Whether Dagster still means to run it again, or has not yet said if it does: people hear of the last try only."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.FAILURE or _RETRIED_BY in run.tags:
        return False
    said = run.tags.get(_WILL_RETRY)
    if said is None:
        return instance.run_retries_enabled and now - _end(record) < RETRY_NEWS_SECONDS
    return said.lower() == "true"


def reports_of(
    instance: dg.DagsterInstance, specs: Sequence[ExtractSpec], record: dg.RunRecord, home: Path
) -> list[Report]:
    names = _extracts_of(instance, record.dagster_run)
    own = [spec for spec in specs if spec.name in names]
    if record.dagster_run.status is dg.DagsterRunStatus.FAILURE:
        return list(failures_of_run(instance, own, record, home))
    return [one for spec in own if (one := success_of_run(instance, spec, record, home)) is not None]


def _extracts_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """The first part of its assets' keys: in runs of the extracts' jobs, of assets picked by hand, of a user's job."""
    keys = set(run.asset_selection or ())
    if not keys:
        planned = instance.get_records_for_run(run.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
        keys = {record.asset_key for record in planned.records if record.asset_key is not None}
    return {key.path[0] for key in keys if len(key.path) == 2}


def leave_notes(instance: dg.DagsterInstance, notes: Sequence[Note], warn: Callable[[str], Any]) -> None:
    """What could not be told is visible: in the log here, and on the run that it was about."""
    for note in notes:
        warn(note.text)
        run = instance.get_run_by_id(note.run_id) if note.run_id else None
        if run is not None:
            instance.report_engine_event(note.text, run)


# The end of a command


@contextmanager
def telling(
    spec: ExtractSpec, instance: dg.DagsterInstance, outcome: Any, progress: Callable[[str], None]
) -> Iterator[None]:
    """Tell people how the block ended, within the time that the spec allows, whatever becomes of the telling.

    A wrong command is the business of who typed it.
    """
    started = time.time()
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        _tell(spec, instance, outcome, progress, partial(_failed, spec, instance, outcome, error, started))
        raise
    _tell(spec, instance, outcome, progress, partial(_succeeded, spec, instance, outcome))


def _tell(
    spec: ExtractSpec,
    instance: dg.DagsterInstance,
    outcome: Any,
    progress: Callable[[str], None],
    made: Callable[[], Report | None],
) -> None:
    if spec.alerts is None:
        return
    try:
        teller = Teller(
            book_of(tir_home()),
            {spec.name: spec.alerts},
            people_of_environment(),
            seconds=spec.alerts.timeout,
            env=os.environ,
        )
        reports = [one for one in [made()] if one is not None]
        notes = teller.tell(reports)
        leave_notes(instance, notes, progress)
        outcome.warnings += [note.text for note in notes]
    except Exception as error:
        # Nothing about the telling may turn a refresh that is through into one that failed.
        progress(f"people were not told: {type(error).__name__}: {error}")


def _failed(spec: ExtractSpec, instance: dg.DagsterInstance, outcome: Any, error: Exception, started: float) -> Failure:
    run_id = outcome.run_ids[-1] if outcome.run_ids else ""
    record = instance.get_run_record_by_id(run_id) if run_id else None
    found = failures_of_run(instance, [spec], record, tir_home()) if record is not None else []
    return failure(
        instance,
        spec,
        tir_home(),
        ident=f"{run_id or started}/{spec.name}",
        names=error_names(error),
        sentence=sentence_of(error),
        at=time.time(),
        # Before the first run it looks at the server and the source.
        step=found[0].step if found else "looking at the datasource and its source",
        run_id=run_id,
    )


def _succeeded(spec: ExtractSpec, instance: dg.DagsterInstance, outcome: Any) -> Success | None:
    run_id = outcome.run_ids[-1] if outcome.run_ids else ""
    record = instance.get_run_record_by_id(run_id) if run_id else None
    if record is None:
        return Success(
            id=f"{time.time():.3f}/{spec.name}",
            extract=spec.name,
            at=time.time(),
            datasource=f"{spec.datasource.project}/{spec.datasource.name}",
            seconds=outcome.seconds,
            as_of=outcome.source_version or "",
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
