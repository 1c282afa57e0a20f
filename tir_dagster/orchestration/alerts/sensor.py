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

from tir_dagster.alerts.events import Recovered
from tir_dagster.alerts.sending import AlertSender
from tir_dagster.alerts.text import scrub
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.commands import alert_storage, killed_reports, show_notes
from tir_dagster.orchestration.alerts.history import Watermark, condition_reports, finished_run_reports
from tir_dagster.orchestration.alerts.resources import ServiceNowResource, SlackAppResource, connect_by
from tir_dagster.orchestration.alerts.runs import Declaration, cause_of, error_names, failure, snowflake_server
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
    clean = scrub(sentence, os.environ, show_values=spec.alerts.show_values)
    failed = failure(spec, cause, clean, ident=ident, at=time.time(), topic=topic)
    # A sensor reports at every tick: keep only the newest report.
    alert_storage().leave(failed, slot=f"{spec.name}/sensor" if failed.ends_with == "sensor" else "")


def report_recovery(spec: Declaration, topic: Topic) -> None:
    """Leave a recovery for the alerts sensor, of something other than a refresh; does nothing if nothing was wrong."""
    if spec.alerts is None:
        return
    storage = alert_storage()
    slot = f"{spec.name}/{topic}"
    # A sensor that reads the source also shows that Snowflake answers.
    scopes = (snowflake_server(),) if topic == "sensor" else ()
    recovery = Recovered(f"{slot}/{time.time():.3f}", spec.name, topic, time.time(), scopes)
    # Also if a report still waits: it would become a problem without an end.
    if storage.left_reports([spec.name]) or any(
        problem.affected_after(recovery) != problem.affected for problem in storage.problems()
    ):
        storage.leave(recovery, slot=slot)


def unless_blind(spec: Declaration, otherwise: str, look: Callable[[], Seen]) -> Seen | dg.SkipReason:
    """Return the result of `look`; on an error, report a blind sensor and return a skip reason. Report recovery, too."""
    try:
        seen = look()
    except TirError as error:
        unread = error
        _guarded(lambda: _report_blind(spec, unread))
        return dg.SkipReason(f"{otherwise}: {error}")
    _guarded(lambda: report_recovery(spec, "sensor"))
    return seen


def _report_blind(spec: Declaration, error: TirError) -> None:
    down = cause_of(error_names(error)) is Cause.WAREHOUSE_DOWN
    cause = Cause.WAREHOUSE_DOWN if down else Cause.SENSOR_BLIND
    report(spec, cause, str(error), ident=f"{spec.name}/blind/{time.time():.3f}", topic="sensor")


def _guarded(action: Callable[[], None]) -> None:
    """Run the action; a full disk must not stop a sensor that can still read."""
    try:
        action()
    except (OSError, TirError) as error:
        dg.get_dagster_logger().warning("the alert could not be stored: %s", error)


# The sensor


def build_alert_sensor(
    specs: Sequence[ExtractSpec], name: str = "alerts", *, loads: Sequence[LoadSpec] = ()
) -> dg.SensorDefinition:
    """Build one sensor for all these extracts and loads, so that a server that is down gives one message."""
    declared: list[Declaration] = [*specs, *loads]
    settings = {spec.name: spec.alerts for spec in declared if spec.alerts is not None}
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
        storage, now = alert_storage(), time.time()
        before = Watermark.parse(context.cursor, now)
        reports, after = finished_run_reports(context.instance, alerting, before, now, state.folder)
        # Reports of killed commands are stored before the commands are forgotten: an interrupted tick loses none.
        for command, failed in killed_reports(context.instance, alerting):
            if failed is not None:
                storage.leave(failed)
            command.forget()
        seconds = max(LEAST_SECONDS, now + TICK_SECONDS - time.time())
        sender = AlertSender(storage, settings, connect_by(slack, servicenow), seconds=seconds, env=os.environ)
        conditions = condition_reports(
            context.instance, alerting, storage.problems(), since=before.start, now=time.time()
        )
        notes = sender.send([*reports, *conditions])
        show_notes(context.instance, notes, context.log.warning)
        summary = "; ".join(note.text for note in notes) or f"{len(reports)} finished runs read"
        return dg.SensorResult(skip_reason=summary, cursor=json.dumps(asdict(after)))

    return alerts
