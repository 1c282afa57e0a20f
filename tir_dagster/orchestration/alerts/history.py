"""What the alerts sensor reads from Dagster's history: ended runs, the verification's last checks, the last publish."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from tir_dagster.alerts.events import Problem, Recovered, Report
from tir_dagster.alerts.text import scrub, span
from tir_dagster.errors import EQUALS_SOURCE
from tir_dagster.orchestration.alerts.runs import Declaration, EndedRun, failure, reports_of_run
from tir_dagster.orchestration.checks import SERVER, verification_names
from tir_dagster.orchestration.names import TOLD_BY_COMMAND, extract_keys
from tir_dagster.spec.alerts import Cause, Topic
from tir_dagster.spec.extract import ExtractSpec

# A run may be recorded a little after its end time.
OVERLAP_SECONDS = 300.0
# A run's tags may change after its end; then it is found again, but must not be reported again.
OLDEST_SECONDS = 86_400.0
# Dagster records soon after a failure that it will retry; it records nothing if it will not.
RETRY_NEWS_SECONDS, RETRY_WAIT_SECONDS = 30.0, 900.0
# A command reports its own runs within its `timeout`; a killed command does not.
COMMAND_NEWS_SECONDS = 120.0
# How long reading an unreadable run is retried.
UNREADABLE_SECONDS = 900.0
# After a long outage, the next tick continues.
MOST_RUNS = 100
# For a slow history: Dagster ends a tick after 60 seconds, and the next tick would have to read everything again.
READ_SECONDS = 20.0
_WILL_RETRY, _RETRIED_BY = "dagster/will_retry", "dagster/auto_retry_run_id"


# Ended runs


@dataclass(frozen=True)
class Watermark:
    """The sensor's cursor: the time up to which ended runs were read, the runs seen around it, and runs to read later."""

    # The sensor's first tick: runs that ended before it are not reported.
    start: float
    after: float
    # Run ids with the time at which they were recorded.
    seen: dict[str, float] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    @staticmethod
    def parse(cursor: str | None, now: float) -> Watermark:
        try:
            watermark = Watermark(**json.loads(cursor or ""))
        except (ValueError, TypeError):
            return Watermark(start=now, after=now)
        # A list, as an earlier release kept it.
        seen = watermark.seen if isinstance(watermark.seen, dict) else dict.fromkeys(watermark.seen, watermark.after)
        return replace(watermark, seen=seen)


def finished_run_reports(
    instance: dg.DagsterInstance,
    specs: Sequence[Declaration],
    before: Watermark,
    now: float,
    home: Path,
    *,
    most: int = MOST_RUNS,
    seconds: float = READ_SECONDS,
) -> tuple[list[Report], Watermark]:
    """Return reports of the runs that ended since, oldest first, and the new cursor."""
    records = _ended_since(instance, before, most)
    again = [record for ident in before.waiting if (record := instance.get_run_record_by_id(ident)) is not None]
    oldest = max(before.start, before.after - OLDEST_SECONDS)
    new = [run for record in records if (run := EndedRun(instance, record, home)).ended >= oldest]
    runs = {run.id: run for run in [*new, *(EndedRun(instance, record, home) for record in again)]}
    reports: list[Report] = []
    waiting = []
    deadline, any_read = time.monotonic() + seconds, False
    for run in sorted(runs.values(), key=lambda run: run.ended):
        if _is_left_to_command(run, now) or _may_be_retried(run, now):
            waiting.append(run.id)
        elif _RETRIED_BY in run.run.tags:
            continue
        elif any_read and time.monotonic() >= deadline:
            waiting.append(run.id)
        else:
            any_read = True
            new_reports = _reports_if_readable(run, specs)
            reports += new_reports or []
            if new_reports is None and now - run.ended < UNREADABLE_SECONDS:
                waiting.append(run.id)
    recorded = {record.dagster_run.run_id: record.update_timestamp.timestamp() for record in records}
    after = max([before.after, *recorded.values()])
    seen = {ident: at for ident, at in {**before.seen, **recorded}.items() if at > after - OVERLAP_SECONDS}
    return reports, Watermark(before.start, after, seen, waiting)


def _ended_since(instance: dg.DagsterInstance, before: Watermark, most: int) -> list[dg.RunRecord]:
    """Return unseen ended runs in the order of recording; if there are too many, the next tick continues."""
    since = datetime.fromtimestamp(max(before.start, before.after - OVERLAP_SECONDS), UTC)
    ended = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
    records = instance.get_run_records(
        dg.RunsFilter(statuses=ended, updated_after=since),
        limit=most + len(before.seen),
        order_by="update_timestamp",
        ascending=True,
    )
    return [record for record in records if record.dagster_run.run_id not in before.seen][:most]


def _is_left_to_command(run: EndedRun, now: float) -> bool:
    """Return whether to wait for the command's own report; it has the same id, so it is not sent twice."""
    return run.run.tags.get(TOLD_BY_COMMAND) == run.id and now - run.ended < COMMAND_NEWS_SECONDS


def _may_be_retried(run: EndedRun, now: float) -> bool:
    """Return whether Dagster may still retry the run: only the last attempt is reported."""
    failed, tags = run.run.status is dg.DagsterRunStatus.FAILURE, run.run.tags
    if not failed or _RETRIED_BY in tags or not run.instance.run_retries_enabled:
        return False
    if _WILL_RETRY not in tags:
        return now - run.ended < RETRY_NEWS_SECONDS
    # The daemon that retries may be down, or the run's code may be gone.
    return tags[_WILL_RETRY].lower() == "true" and now - run.ended < RETRY_WAIT_SECONDS


def _reports_if_readable(run: EndedRun, specs: Sequence[Declaration]) -> list[Report] | None:
    """Return the run's reports; None if it cannot be read, so that all others are still reported."""
    try:
        return reports_of_run(run, specs)
    except Exception as error:
        message = scrub(f"{type(error).__name__}: {error}", os.environ)
        dg.get_dagster_logger().warning("run %s cannot be read for alerts: %s", run.id, message)
        return None


# Current conditions: drift and stale datasources


def condition_reports(
    instance: dg.DagsterInstance,
    specs: Sequence[Declaration],
    problems: Sequence[Problem],
    *,
    since: float,
    now: float,
) -> list[Report]:
    """Return reports of drift that checks found since then, and of extracts that are staler than `freshness` allows."""
    return [
        report
        for spec in specs
        if isinstance(spec, ExtractSpec)
        for report in (*_drift(instance, spec, problems, since), *_freshness(instance, spec, problems, now))
    ]


def _open(spec: ExtractSpec, topic: Topic, problems: Sequence[Problem]) -> Problem | None:
    return next((problem for problem in problems if problem.affected.get(spec.name) == topic), None)


def _drift(
    instance: dg.DagsterInstance, spec: ExtractSpec, problems: Sequence[Problem], since: float
) -> Iterator[Report]:
    """Yield one report about all last checks; a check that could not compare is ignored."""
    # A check that the spec no longer has never runs again: ignore its last result.
    names = {EQUALS_SOURCE, SERVER} & set(verification_names(spec))
    results = [result for name in sorted(names) if (result := _last_result(instance, spec, name)) is not None]
    failed = [result for result in results if not result.passed]
    newest = max(failed or results, key=lambda result: result.at, default=None)
    problem = _open(spec, "drift", problems)
    if newest is None or newest.at <= (problem.latest if problem else since):
        return
    if failed:
        sentence, ident = " ".join(result.sentence for result in failed), f"{newest.run_id}/{spec.name}/drift"
        yield failure(spec, Cause.DRIFT, sentence, ident=ident, at=newest.at, run_id=newest.run_id)
    elif problem:
        yield Recovered(f"{newest.run_id}/{spec.name}/no-drift", spec.name, "drift", newest.at)


@dataclass(frozen=True)
class _CheckResult:
    """A check's last result."""

    run_id: str
    at: float
    passed: bool
    sentence: str


def _last_result(instance: dg.DagsterInstance, spec: ExtractSpec, name: str) -> _CheckResult | None:
    key = dg.AssetCheckKey(extract_keys(spec).published_datasource, name)
    record = instance.get_latest_asset_check_evaluation_record(key)
    evaluation = record.evaluation if record is not None and record.event is not None else None
    if record is None or record.event is None or not isinstance(evaluation, dg.AssetCheckEvaluation):
        return None
    if not evaluation.passed and evaluation.severity is not dg.AssetCheckSeverity.ERROR:
        # A check that failed as a warning could not compare: it shows neither drift nor its end.
        return None
    sentence = evaluation.description or f"the check {evaluation.check_name} failed"
    return _CheckResult(record.run_id, record.event.timestamp, evaluation.passed, sentence)


def _freshness(
    instance: dg.DagsterInstance, spec: ExtractSpec, problems: Sequence[Problem], now: float
) -> Iterator[Report]:
    """Apply the rule of the asset's freshness policy, also where Dagster's daemon does not evaluate it."""
    if spec.freshness is None:
        return
    last = instance.get_latest_materialization_event(extract_keys(spec).published_datasource)
    if last is None:
        return
    published, problem = last.timestamp, _open(spec, "freshness", problems)
    if now - published <= spec.freshness:
        if problem is not None and published > problem.latest:
            yield Recovered(f"{spec.name}/fresh/{published:.3f}", spec.name, "freshness", published)
    elif problem is None:
        # Reported once, until something is published.
        moment = f"{datetime.fromtimestamp(published, UTC):%Y-%m-%d %H:%M} UTC"
        sentence = f"Nothing was published since {moment}; `freshness` allows {span(spec.freshness)}."
        yield failure(spec, Cause.STALE, sentence, ident=f"{spec.name}/stale/{published:.3f}", at=now)
