"""Alerts about current conditions: drift, from the last verification checks, and stale datasources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import dagster as dg

from tir_dagster.alerts.events import Failure, Recovered, Report
from tir_dagster.alerts.memory import Trouble
from tir_dagster.alerts.text import span
from tir_dagster.errors import EQUALS_SOURCE
from tir_dagster.orchestration.alerts.run_reports import run_url
from tir_dagster.orchestration.checks import SERVER, verification_names
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.spec.alerts import Cause, Topic
from tir_dagster.spec.extract import ExtractSpec


def condition_reports(
    instance: dg.DagsterInstance,
    specs: Sequence[ExtractSpec],
    troubles: Sequence[Trouble],
    *,
    since: float,
    now: float,
) -> list[Report]:
    """Return reports of drift that checks found since then, and of extracts that are staler than `freshness` allows."""
    return [
        report
        for spec in specs
        for report in (*_drift(instance, spec, troubles, since), *_freshness(instance, spec, troubles, now))
    ]


def _open(spec: ExtractSpec, topic: Topic, troubles: Sequence[Trouble]) -> Trouble | None:
    return next((trouble for trouble in troubles if trouble.affected.get(spec.name) == topic), None)


def _drift(
    instance: dg.DagsterInstance, spec: ExtractSpec, troubles: Sequence[Trouble], since: float
) -> Iterator[Report]:
    """Yield one report about all last checks; a check that could not compare is ignored."""
    # A check that the spec no longer has never runs again: ignore its last result.
    names = {EQUALS_SOURCE, SERVER} & set(verification_names(spec))
    results = [result for name in sorted(names) if (result := _last_result(instance, spec, name)) is not None]
    failed = [result for result in results if not result.passed]
    newest = max((result.at for result in failed or results), default=0.0)
    trouble = _open(spec, "drift", troubles)
    if newest <= (trouble.latest if trouble else since):
        return
    if failed:
        yield _drifted(spec, failed)
    elif trouble:
        yield Recovered(f"{results[-1].run_id}/{spec.name}/no-drift", spec.name, "drift", newest)


class _CheckResult:
    """A check's last result."""

    def __init__(self, record: dg.AssetCheckExecutionRecord, evaluation: dg.AssetCheckEvaluation) -> None:
        self.run_id = record.run_id
        self.at = record.event.timestamp if record.event else record.create_timestamp
        self.passed = evaluation.passed
        self.sentence = evaluation.description or f"the check {evaluation.check_name} failed"


def _last_result(instance: dg.DagsterInstance, spec: ExtractSpec, name: str) -> _CheckResult | None:
    key = dg.AssetCheckKey(extract_keys(spec).published_datasource, name)
    record = instance.get_latest_asset_check_evaluation_record(key)
    evaluation = record.evaluation if record is not None and record.event is not None else None
    if record is None or not isinstance(evaluation, dg.AssetCheckEvaluation):
        return None
    # A check that failed as a warning could not compare: it shows neither drift nor its end.
    unknown = not evaluation.passed and evaluation.severity is not dg.AssetCheckSeverity.ERROR
    return None if unknown else _CheckResult(record, evaluation)


def _drifted(spec: ExtractSpec, failed: Sequence[_CheckResult]) -> Failure:
    last = max(failed, key=lambda result: result.at)
    return Failure(
        id=f"{last.run_id}/{spec.name}/drift",
        extract=spec.name,
        cause=Cause.DRIFT,
        sentence=" ".join(result.sentence for result in failed),
        at=last.at,
        run_id=last.run_id,
        run_url=run_url(last.run_id, os.environ),
        datasource=f"{spec.datasource.project}/{spec.datasource.name}",
    )


def _freshness(
    instance: dg.DagsterInstance, spec: ExtractSpec, troubles: Sequence[Trouble], now: float
) -> Iterator[Report]:
    """Apply the rule of the asset's freshness policy, also where Dagster's daemon does not evaluate it."""
    if spec.freshness is None:
        return
    last = instance.get_latest_materialization_event(extract_keys(spec).published_datasource)
    trouble = _open(spec, "freshness", troubles)
    if last is None:
        return
    if now - last.timestamp > spec.freshness:
        # Reported once, until something is published.
        if trouble is None:
            yield _stale(spec, last.timestamp, now)
    elif trouble is not None and last.timestamp > trouble.latest:
        yield Recovered(f"{spec.name}/fresh/{last.timestamp:.3f}", spec.name, "freshness", last.timestamp)


def _stale(spec: ExtractSpec, published: float, now: float) -> Failure:
    moment = f"{datetime.fromtimestamp(published, UTC):%Y-%m-%d %H:%M} UTC"
    return Failure(
        id=f"{spec.name}/stale/{published:.3f}",
        extract=spec.name,
        cause=Cause.STALE,
        sentence=f"Nothing was published since {moment}; `freshness` allows {span(spec.freshness or 0)}.",
        at=now,
        datasource=f"{spec.datasource.project}/{spec.datasource.name}",
    )
