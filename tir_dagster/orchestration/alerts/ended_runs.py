"""Dagster's history as the alerts sensor reads it: which runs ended since its last tick, and what they mean for people."""

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

# A run may be on record a little later than its end says.
OVERLAP_SECONDS = 300.0
# A run's tags may change after its end: it comes up again, and who has heard of it need not hear it again.
OLDEST_SECONDS = 86_400.0
# Whether Dagster retries a failed run is on record right after its failure; that nobody does, is not.
RETRY_NEWS_SECONDS, RETRY_WAIT_SECONDS = 30.0, 900.0
# A command tells people of its own runs within its `timeout`; one that was killed does not.
COMMAND_NEWS_SECONDS = 120.0
# How long a run that cannot be read is tried again.
UNREADABLE_SECONDS = 900.0
# After a long outage the next tick goes on.
MOST_RUNS = 100
# And where the history answers slowly: Dagster ends a tick after 60 seconds, and all it read would be read again.
READ_SECONDS = 20.0
_WILL_RETRY, _RETRIED_BY = "dagster/will_retry", "dagster/auto_retry_run_id"
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


@dataclass(frozen=True)
class Watermark:
    """Up to where ended runs were looked at, which ones around there, and which wait for Dagster's retry."""

    # When the sensor first looked: what ended before people asked to be told is history.
    start: float
    after: float
    # By when they came on record.
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


def finished(
    instance: dg.DagsterInstance,
    specs: Sequence[Declaration],
    before: Watermark,
    now: float,
    home: Path,
    *,
    most: int = MOST_RUNS,
    seconds: float = READ_SECONDS,
) -> tuple[list[Report], Watermark]:
    """Reports of the runs that ended since, the longest ago first, and where to go on."""
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
    """Those that were not seen, in the order in which they came on record: however many there are, the next tick goes on."""
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
    """What the command has told by then is not told again: its reports have the same ids."""
    run = record.dagster_run
    return run.tags.get(TOLD_BY_COMMAND) == run.run_id and now - _end(record) < COMMAND_NEWS_SECONDS


def _may_be_retried(instance: dg.DagsterInstance, record: dg.RunRecord, now: float) -> bool:
    """Whether Dagster may still run it again: people hear of the last try only, but they do hear of it."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.FAILURE or _RETRIED_BY in run.tags or not instance.run_retries_enabled:
        return False
    will_retry, since = run.tags.get(_WILL_RETRY), now - _end(record)
    if will_retry is None:
        return since < RETRY_NEWS_SECONDS
    # The daemon that retries may be down, or the run's code gone.
    return will_retry.lower() == "true" and since < RETRY_WAIT_SECONDS


def _reports_if_readable(
    instance: dg.DagsterInstance, specs: Sequence[Declaration], record: dg.RunRecord, home: Path
) -> list[Report] | None:
    """None for a run that cannot be read: people still hear of all others, and of this one if that passes."""
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
        # What another step's failure did not keep from being published, or loaded, is through.
        successes = _successes(instance, others, record, keys, home)
        return [*failures, *(report for report in successes if report.published)]
    return [*_successes(instance, own, record, keys, home)]


def _successes(
    instance: dg.DagsterInstance, own: Sequence[Declaration], record: dg.RunRecord, keys: set[dg.AssetKey], home: Path
) -> Iterator[Success]:
    """What the run brought to an end; an asset beside the extract's own ones says nothing about its refresh."""
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
    """Of a run that made checks and no asset: whether they could be made. What they found is told elsewhere."""
    ident, ended = record.dagster_run.run_id, _end(record)
    if record.dagster_run.status is dg.DagsterRunStatus.FAILURE:
        return [_unverified(failed) for failed in failures_of_run(instance, specs, record, home)]
    return [
        _not_verified(instance, spec, record, reason, home)
        if (reason := not_verified(instance, spec, ident))
        else Recovered(f"{ident}/{spec.name}/verified", spec.name, "verification", ended)
        for spec in specs
        # Where nothing is published yet there is nothing to verify either.
        if last_confirmation(instance, extract_keys(spec).published_datasource) is not None
    ]


def _not_verified(
    instance: dg.DagsterInstance, spec: ExtractSpec, record: dg.RunRecord, reason: str, home: Path
) -> Failure:
    """Its run ended well, but the checks could not look: Snowflake or Tableau did not let them."""
    run_id = record.dagster_run.run_id
    ident, at = f"{run_id}/{spec.name}", _end(record)
    return _unverified(failure(instance, spec, home, ident=ident, names=[], sentence=reason, at=at, run_id=run_id))


def _unverified(failed: Failure) -> Failure:
    """A verification changes nothing, so that there is nothing to say about what is unaffected."""
    cause = failed.cause if failed.cause.is_whole_server else Cause.UNVERIFIED
    return replace(failed, topic="verification", cause=cause, unaffected="")


def _asset_keys(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[dg.AssetKey]:
    """In runs of the extracts' jobs, of assets picked by hand, of a user's job."""
    if run.asset_selection:
        return set(run.asset_selection)
    planned = instance.get_records_for_run(run.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    return {record.asset_key for record in planned.records if record.asset_key is not None}


def _concerns(spec: Declaration, run: dg.DagsterRun, keys: set[dg.AssetKey]) -> bool:
    """By its job or its assets; of a translator's keys the first part is still the extract's name."""
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
