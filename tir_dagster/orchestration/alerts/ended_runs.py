"""Ended runs for the alerts sensor: find those that ended since its last tick, and turn them into reports."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import dagster as dg
from dagster import DagsterEventType

from tir_dagster.alerts.events import Failure, Recovered, Report, Success
from tir_dagster.alerts.text import scrub
from tir_dagster.orchestration.alerts.load_reports import load_failure_of_run, load_success_of_run
from tir_dagster.orchestration.alerts.run_reports import failure, failures_of_run, not_verified, success_of_run
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import (
    TOLD_BY_COMMAND,
    detect_job_name,
    extract_keys,
    load_job_name,
    load_keys,
    refresh_job_name,
    verify_job_name,
)
from tir_dagster.spec.alerts import Cause
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

Declaration: TypeAlias = ExtractSpec | LoadSpec

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
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


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
    oldest = max(before.start, before.after - OLDEST_SECONDS)
    fresh = {record.dagster_run.run_id: record for record in records if _end(record) >= oldest} | {
        ident: record for ident in before.waiting if (record := instance.get_run_record_by_id(ident)) is not None
    }
    waiting = [ident for ident, record in fresh.items() if _is_early(instance, record, now)]
    reports: list[Report] = []
    deadline, any_read = time.monotonic() + seconds, False
    for ident, record in sorted(fresh.items(), key=lambda item: _end(item[1])):
        if ident in waiting or _RETRIED_BY in record.dagster_run.tags:
            continue
        if any_read and time.monotonic() >= deadline:
            waiting.append(ident)
            continue
        any_read = True
        new_reports = _reports_if_readable(instance, specs, record, home)
        reports += new_reports or []
        if new_reports is None and now - _end(record) < UNREADABLE_SECONDS:
            waiting.append(ident)
    after = max([before.after, *map(_updated, records)])
    seen = {**before.seen, **{record.dagster_run.run_id: _updated(record) for record in records}}
    seen = {ident: at for ident, at in seen.items() if at > after - OVERLAP_SECONDS}
    return reports, Watermark(before.start, after, seen, waiting)


def _ended_since(instance: dg.DagsterInstance, before: Watermark, most: int) -> list[dg.RunRecord]:
    """Return unseen ended runs in the order of recording; if there are too many, the next tick continues."""
    since = max(before.start, before.after - OVERLAP_SECONDS)
    runs_filter = dg.RunsFilter(statuses=_ENDED, updated_after=datetime.fromtimestamp(since, UTC))
    records = instance.get_run_records(
        runs_filter, limit=most + len(before.seen), order_by="update_timestamp", ascending=True
    )
    return [record for record in records if record.dagster_run.run_id not in before.seen][:most]


def _updated(record: dg.RunRecord) -> float:
    return record.update_timestamp.timestamp()


def _end(record: dg.RunRecord) -> float:
    return record.end_time or _updated(record)


def _is_early(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    return _is_left_to_command(record, now) or _may_be_retried(instance, record, now)


def _is_left_to_command(record: dg.RunRecord, now: float) -> bool:
    """Return whether to wait for the command's own report; it has the same id, so it is not sent twice."""
    run = record.dagster_run
    return run.tags.get(TOLD_BY_COMMAND) == run.run_id and now - _end(record) < COMMAND_NEWS_SECONDS


def _may_be_retried(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Return whether Dagster may still retry the run: only the last attempt is reported."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.FAILURE or _RETRIED_BY in run.tags or not instance.run_retries_enabled:
        return False
    will_retry, since = run.tags.get(_WILL_RETRY), now - _end(record)
    if will_retry is None:
        return since < RETRY_NEWS_SECONDS
    # The daemon that retries may be down, or the run's code may be gone.
    return will_retry.lower() == "true" and since < RETRY_WAIT_SECONDS


def _reports_if_readable(
    instance: dg.DagsterInstance, specs: Sequence[Declaration], record: dg.RunRecord, home: Path
) -> list[Report] | None:
    """Return the run's reports; None if it cannot be read, so that all others are still reported."""
    try:
        return reports_of(instance, specs, record, home)
    except Exception as error:
        message = scrub(f"{type(error).__name__}: {error}", os.environ)
        dg.get_dagster_logger().warning("run %s cannot be read for alerts: %s", record.dagster_run.run_id, message)
        return None


def reports_of(
    instance: dg.DagsterInstance, specs: Sequence[Declaration], record: dg.RunRecord, home: Path
) -> list[Report]:
    run = record.dagster_run
    keys = _asset_keys(instance, run)
    own = [spec for spec in specs if _concerns(spec, run, keys)]
    loads = [spec for spec in own if isinstance(spec, LoadSpec)]
    extracts = [spec for spec in own if isinstance(spec, ExtractSpec)]
    if _only_verifies(run, keys, extracts):
        return _verified(instance, extracts, record, home)
    if run.status is dg.DagsterRunStatus.FAILURE:
        failed = [load_failure_of_run(instance, load, record) for load in loads]
        failures = [*failures_of_run(instance, extracts, record, home), *filter(None, failed)]
        failed_names = {report.extract for report in failures}
        others = [spec for spec in own if spec.name not in failed_names]
        # Extracts and loads that succeeded although another step of the run failed.
        successes = _successes(instance, others, record, keys, home)
        return [*failures, *(report for report in successes if report.published)]
    return [*_successes(instance, own, record, keys, home)]


def _successes(
    instance: dg.DagsterInstance, own: Sequence[Declaration], record: dg.RunRecord, keys: set[dg.AssetKey], home: Path
) -> Iterator[Success]:
    """Yield the successes of the run; other assets in the run do not count as a refresh of the extract."""
    for spec in own:
        if isinstance(spec, LoadSpec):
            yield load_success_of_run(instance, spec, record)
        elif _refreshes(spec, record.dagster_run, keys):
            success = success_of_run(instance, spec, record, home)
            yield from [success] if success else []


def _only_verifies(run: dg.DagsterRun, keys: set[dg.AssetKey], specs: Sequence[ExtractSpec]) -> bool:
    by_job = any(run.job_name == verify_job_name(spec) for spec in specs)
    return not keys and (by_job or bool(run.asset_check_selection))


def _verified(
    instance: dg.DagsterInstance, specs: Sequence[ExtractSpec], record: dg.RunRecord, home: Path
) -> list[Report]:
    """Return reports of a verification run: whether its checks could compare. Drift is reported by `conditions`."""
    ident, ended = record.dagster_run.run_id, _end(record)
    if record.dagster_run.status is dg.DagsterRunStatus.FAILURE:
        return [_unverified(failed) for failed in failures_of_run(instance, specs, record, home)]
    return [
        _not_verified(instance, spec, record, reason, home)
        if (reason := not_verified(instance, spec, ident))
        else Recovered(f"{ident}/{spec.name}/verified", spec.name, "verification", ended)
        for spec in specs
        # Nothing published yet, so nothing to verify.
        if last_confirmation(instance, extract_keys(spec).published_datasource) is not None
    ]


def _not_verified(
    instance: dg.DagsterInstance, spec: ExtractSpec, record: dg.RunRecord, reason: str, home: Path
) -> Failure:
    """Return the failure of a run that succeeded although its checks could not read Snowflake or Tableau."""
    run_id = record.dagster_run.run_id
    ident, at = f"{run_id}/{spec.name}", _end(record)
    return _unverified(failure(instance, spec, home, ident=ident, names=[], sentence=reason, at=at, run_id=run_id))


def _unverified(failed: Failure) -> Failure:
    """Turn the failure into one of the verification, which changes nothing: `unaffected` stays empty."""
    cause = failed.cause if failed.cause.is_whole_server else Cause.UNVERIFIED
    return replace(failed, topic="verification", cause=cause, unaffected="")


def _asset_keys(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    """Return the assets of a run: of an extract's job, of selected assets, or of a user's job."""
    if run.asset_selection:
        return set(run.asset_selection)
    planned = instance.get_records_for_run(run.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return {record.asset_key for record in planned.records if record.asset_key is not None}


def _concerns(spec: Declaration, run: dg.DagsterRun, keys: set[dg.AssetKey]) -> bool:
    """Return whether the run belongs to the spec, by its job or its assets."""
    if isinstance(spec, LoadSpec):
        return run.job_name == load_job_name(spec) or load_keys(spec).source_table in keys
    return (
        _refreshes(spec, run, keys)
        or run.job_name == verify_job_name(spec)
        or any(key.path[0] == spec.name and len(key.path) == 2 for key in keys)
        or any(key.asset_key == extract_keys(spec).published_datasource for key in run.asset_check_selection or ())
    )


def _refreshes(spec: ExtractSpec, run: dg.DagsterRun, keys: set[dg.AssetKey]) -> bool:
    extract = extract_keys(spec)
    own = {extract.changed_keys, extract.purged_extract, extract.published_datasource}
    return run.job_name in (detect_job_name(spec), refresh_job_name(spec)) or bool(keys & own)
