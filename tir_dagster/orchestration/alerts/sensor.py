"""The alerts sensor over Dagster's history, and reports that checks, sensors and own code leave for it.

No postponed annotations here: Dagster reads the resources' types.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import dagster as dg

from tir_dagster.alerts.events import Failure, Recovered, Report
from tir_dagster.alerts.memory import Book
from tir_dagster.alerts.notify import Teller
from tir_dagster.alerts.text import scrub
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.commands import book_of, killed_reports, leave_notes
from tir_dagster.orchestration.alerts.conditions import condition_reports
from tir_dagster.orchestration.alerts.ended_runs import Declaration, Watermark, finished_run_reports
from tir_dagster.orchestration.alerts.resources import ServiceNowResource, SlackAppResource, connect_by
from tir_dagster.orchestration.alerts.run_reports import cause_of, error_names, scope_of, snowflake_scope
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.spec.alerts import Cause, Topic
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

Seen = TypeVar("Seen")
INTERVAL_SECONDS = 30
# Dagster ends a tick after 60 seconds; reading and sending share this time.
TICK_SECONDS, LEAST_SECONDS = 45.0, 10.0


# Reports of checks, sensors and a project's own code


def report(spec: Declaration, cause: Cause, sentence: str, *, ident: str, topic: Topic | None = None) -> None:
    """Leave a failure for the alerts sensor, such as the result of your own check.

    Use the same `ident` for the same occurrence, and another one for a new occurrence.
    """
    if spec.alerts is None:
        return
    failure = Failure(
        id=ident,
        extract=spec.name,
        cause=cause,
        sentence=scrub(sentence, os.environ, show_values=spec.alerts.show_values),
        at=time.time(),
        scope=_scope(cause, spec),
        datasource=_place(spec),
        topic=topic,
    )
    # A sensor reports at every tick: keep only the newest report.
    book_of(tir_home()).put(failure, slot=f"{spec.name}/sensor" if failure.ends_with == "sensor" else "")


def _scope(cause: Cause, spec: Declaration) -> str:
    if isinstance(spec, ExtractSpec):
        return scope_of(cause, spec, os.environ)
    return snowflake_scope(os.environ) if cause is Cause.WAREHOUSE_DOWN else ""


def _place(spec: Declaration) -> str:
    return spec.table if isinstance(spec, LoadSpec) else f"{spec.datasource.project}/{spec.datasource.name}"


def report_recovery(spec: Declaration, topic: Topic) -> None:
    """Leave a recovery for the alerts sensor, of something other than a refresh; does nothing if nothing was wrong."""
    if spec.alerts is None:
        return
    book = book_of(tir_home())
    slot = f"{spec.name}/{topic}"
    # A sensor that reads the source also shows that Snowflake answers.
    scopes = (snowflake_scope(os.environ),) if topic == "sensor" else ()
    recovery = Recovered(f"{slot}/{time.time():.3f}", spec.name, topic, time.time(), scopes)
    # Also if a report still waits: it would become a trouble without an end.
    if book.reports([spec.name]) or any(trouble.left_by(recovery) != trouble.affected for trouble in book.troubles()):
        book.put(recovery, slot=slot)


def unless_blind(spec: Declaration, otherwise: str, look: Callable[[], Seen]) -> Seen | dg.SkipReason:
    """Return the result of `look`; on an error, report a blind sensor and return a skip reason. Report recovery, too."""
    try:
        seen = look()
    except TirError as error:
        trouble = error
        _guarded(lambda: _report_blind(spec, trouble))
        return dg.SkipReason(f"{otherwise}: {error}")
    _guarded(lambda: report_recovery(spec, "sensor"))
    return seen


def _report_blind(spec: Declaration, error: TirError) -> None:
    cause = cause_of(error_names(error))
    cause = cause if cause is Cause.WAREHOUSE_DOWN else Cause.SENSOR_BLIND
    report(spec, cause, str(error), ident=f"{spec.name}/blind/{time.time():.3f}", topic="sensor")


def _guarded(action: Callable[[], None]) -> None:
    """Run the action; a full disk must not stop a sensor that can still read."""
    try:
        action()
    except OSError as error:
        dg.get_dagster_logger().warning("the alert could not be stored: %s", error)


# The sensor


def build_alert_sensor(
    specs: Sequence[ExtractSpec], name: str = "alerts", *, loads: Sequence[LoadSpec] = ()
) -> dg.SensorDefinition:
    """Build one sensor for all these extracts and loads, so that a server that is down gives one message."""
    declared: list[Declaration] = [*specs, *loads]
    alerting = [spec for spec in declared if spec.alerts is not None]

    @dg.sensor(
        name=name,
        minimum_interval_seconds=INTERVAL_SECONDS,
        # On by default: people who declare alerts expect to get them.
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sends messages about failed, recovered and successful refreshes and loads, as `alerts` in the spec defines.",
    )
    def alerts(
        context: dg.SensorEvaluationContext,
        slack: SlackAppResource,
        servicenow: ServiceNowResource,
        state: StateFolder,
    ) -> dg.SensorResult:
        book, now = book_of(tir_home()), time.time()
        before = Watermark.parse(context.cursor, now)
        reports, after = finished_run_reports(context.instance, alerting, before, now, state.folder)
        _take_killed(context.instance, alerting, book)
        teller = Teller(
            book,
            {spec.name: spec.alerts for spec in alerting if spec.alerts is not None},
            connect_by(slack, servicenow),
            seconds=max(LEAST_SECONDS, now + TICK_SECONDS - time.time()),
            env=os.environ,
        )
        notes = teller.tell([*reports, *_standing(context.instance, alerting, book, before.start)])
        leave_notes(context.instance, notes, context.log.warning)
        summary = "; ".join(note.text for note in notes) or f"{len(reports)} finished runs read"
        return dg.SensorResult(skip_reason=summary, cursor=json.dumps(asdict(after)))

    return alerts


def _take_killed(instance: dg.DagsterInstance, specs: Sequence[Declaration], book: Book) -> None:
    """Store reports of killed commands before forgetting the commands: an interrupted tick loses none."""
    for command, failure in killed_reports(instance, specs, tir_home()):
        if failure is not None:
            book.put(failure)
        command.forget()


def _standing(instance: dg.DagsterInstance, specs: Sequence[Declaration], book: Book, since: float) -> list[Report]:
    extracts = [spec for spec in specs if isinstance(spec, ExtractSpec)]
    return condition_reports(instance, extracts, book.troubles(), since=since, now=time.time())
