"""Sensors: the source changed and is quiet → detection; a change set is ready → refresh. Pure decisions, thin edges.

For an extract that Tableau refreshes itself, the source sensor requests the refresh. If a requested run failed or vanished, the
sensors request it again, each time later. Dagster never launches a run key twice, so every attempt has its own key. No postponed annotations here: Dagster reads the resources' types.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import dagster as dg

from tir_dagster.orchestration.alerts.sensor import unless_blind
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.metadata import SOURCE_VERSION, TOUCHED, last_confirmation
from tir_dagster.orchestration.names import ExtractKeys, application_config
from tir_dagster.orchestration.partitions import (
    PARTITION,
    UNFINISHED,
    change_set_partitions,
    covering_range,
    slice_requests,
)
from tir_dagster.orchestration.resources import SnowflakeParam, TableauResource
from tir_dagster.orchestration.sensing.watching import WatchedSource, confirmed_state, in_time, news
from tir_dagster.refresh.state.call_budget import FOLDER, CallBudget, clock_text
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.retries import Backoff
from tir_dagster.spec.extract import ExtractSpec

INTERVAL_SECONDS = 30
CHANGE_SET_TAG = "tir/change_set"
ASKED_TAG = "tir/asked"
BACK_OFF = Backoff(first_seconds=60.0, most_seconds=3600.0, jitter=0.0)
# The run of a killed process stays "started" forever. After this time another run may try: the lease keeps them apart.
STUCK_SECONDS = 3600.0
# People may report events by hand; a detection's event is among the newest.
_LOOK_BACK = 50

RunState = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class Watch:
    """The source sensor's cursor: the token and since when; the requested token, how often and when."""

    token: str | None = None
    since: float = 0.0
    requested: str | None = None
    attempt: int = 0
    asked: float = 0.0
    change_set: str | None = None

    @staticmethod
    def parse(cursor: str | None) -> "Watch":
        try:
            return Watch(**json.loads(cursor or "{}"))
        except (ValueError, TypeError):
            return Watch()

    def to_cursor(self) -> str:
        return json.dumps(asdict(self))


def watch_source(
    before: Watch,
    *,
    token: str,
    confirmed: str | None,
    last: RunState,
    now: float,
    quiet: float,
    what: str = "detection",
) -> tuple[Watch, str]:
    """Return the new cursor, and why nothing is requested; an empty reason means: request the run (a detection, or `what`).

    `last` is the state of the last requested run.
    """
    watch = replace(before, token=token, since=before.since if before.token == token else now)
    if token == confirmed:
        return watch, "the source has not changed since the last confirmation"
    if before.requested is not None and last == "running":
        return watch, f"a {what} is running"
    attempt = 0
    if token == before.requested:
        if last == "done":
            return watch, "this change was already checked"
        attempt = before.attempt + 1
        if (wait := before.asked + back_off(attempt) - now) > 0:
            return watch, f"the {what} failed; the next attempt is in {wait:.0f} seconds"
    if now - watch.since < quiet:
        return watch, f"the source changed and has been quiet for {now - watch.since:.0f} of {quiet:g} seconds"
    return replace(watch, requested=token, attempt=attempt, asked=now), ""


def back_off(attempt: int) -> float:
    """Return the seconds to wait before this attempt: none, one minute, two, four, … up to an hour."""
    return 0.0 if attempt < 1 else BACK_OFF.seconds(attempt)


@dataclass(frozen=True)
class Ready:
    """A staged change set, read from its materialization."""

    change_set: str
    source_version: str
    touched: tuple[str, ...]


@dataclass(frozen=True)
class Attempts:
    """The previous refreshes of a change set: how many, the state of the last one, and its time."""

    runs: int = 0
    state: RunState = "failed"
    last: float = 0.0


def refresh_due(
    ready: Ready | None, *, confirmed: Confirmation | None, attempts: Attempts, busy: bool, now: float
) -> tuple[str | None, str]:
    """Return the run key of the refresh to start, or None and the reason.

    Only the newest change set is refreshed: it settles the earlier ones.
    """
    if ready is None:
        return None, "no change set is ready"
    if confirmed is not None and _covers(confirmed, ready):
        return None, f"change set {ready.change_set} is published"
    if busy:
        return None, "a refresh is running"
    if attempts.runs and attempts.state == "done":
        return None, f"change set {ready.change_set} was refreshed and there was nothing to publish"
    if (wait := attempts.last + back_off(attempts.runs) - now) > 0:
        return None, f"the refresh failed; the next attempt is in {wait:.0f} seconds"
    return f"{ready.change_set}-{attempts.runs}" if attempts.runs else ready.change_set, ""


def _covers(confirmed: Confirmation, ready: Ready) -> bool:
    # Versions are times in UTC in one ISO format, so they sort as text.
    return ready.change_set in confirmed.change_sets or confirmed.source_version >= ready.source_version


def build_sensors(spec: ExtractSpec, keys: ExtractKeys, detect_job: Any, refresh_job: Any) -> list[Any]:
    """Build the sensors that start detection and refresh; with automation conditions, one that reports changes."""
    if spec.automation == "condition":
        return _reporting_sensors(spec, keys)
    return [_source_sensor(spec, keys, detect_job), _refresh_sensor(spec, keys, refresh_job)]


def _reporting_sensors(spec: ExtractSpec, keys: ExtractKeys) -> list[Any]:
    """Build the reporting sensor; none if the source is an asset defined elsewhere, which its own load materializes."""
    return [] if "source_table" in spec.asset_keys else [_reporting_sensor(spec, keys)]


def _reporting_sensor(spec: ExtractSpec, keys: ExtractKeys) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_source",
        minimum_interval_seconds=round(spec.thresholds.interval),
        description=f"Probes {spec.main_table} by one cheap query; reports its update when it changed and has been quiet.",
    )
    def source_sensor(context: dg.SensorEvaluationContext, snowflake: SnowflakeParam, state: StateFolder) -> Any:
        if hold := state.hold(spec.name).read():
            return dg.SkipReason(hold.sentence(spec.name))
        before, now = Watch.parse(context.cursor), time.time()
        confirmed = last_confirmation(context.instance, keys.published_datasource)
        look = _look(
            spec,
            snowflake,
            lambda state: watch_source(
                before,
                token=state + news(context.instance, spec, keys, confirmed),
                confirmed=confirmed_state(confirmed),
                # Dagster retries a failed run: a reported change is not reported again.
                last="done",
                now=now,
                quiet=spec.thresholds.quiet_period,
                what="refresh",
            ),
        )
        if isinstance(look, dg.SkipReason):
            return look
        watch, waiting, source_metadata = look
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=watch.to_cursor())
        updated = dg.AssetMaterialization(keys.source_table, metadata=source_metadata)
        return dg.SensorResult(asset_events=[updated], cursor=watch.to_cursor())

    return source_sensor


def _source_sensor(spec: ExtractSpec, keys: ExtractKeys, detect_job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_source",
        job=detect_job,
        minimum_interval_seconds=round(spec.thresholds.interval),
        description=f"Probes {spec.main_table} by one cheap query; starts a detection when it changed and has been quiet.",
    )
    def source_sensor(context: dg.SensorEvaluationContext, snowflake: SnowflakeParam, state: StateFolder) -> Any:
        if hold := state.hold(spec.name).read():
            return dg.SkipReason(hold.sentence(spec.name))
        before, now = Watch.parse(context.cursor), time.time()
        confirmed = last_confirmation(context.instance, keys.published_datasource)
        last, empty = _last_detection(context.instance, keys, detect_job.name, before, now)
        look = _look(
            spec,
            snowflake,
            lambda state: watch_source(
                replace(before, change_set=None) if empty else before,
                token=state + news(context.instance, spec, keys, confirmed),
                confirmed=confirmed_state(confirmed),
                last=last,
                now=now,
                quiet=spec.thresholds.quiet_period,
            ),
        )
        if isinstance(look, dg.SkipReason):
            return look
        watch, waiting, source_metadata = look
        # The detection cannot delete its own partition, because its run still uses it.
        partitions = change_set_partitions(spec)
        deleted = [partitions.build_delete_request([empty])] if empty else []
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=watch.to_cursor(), dynamic_partitions_requests=deleted)
        ident = new_id()
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=_detection_key(spec, watch), partition_key=ident)],
            dynamic_partitions_requests=[*deleted, partitions.build_add_request([ident])],
            asset_events=[dg.AssetObservation(keys.source_table, metadata=source_metadata)],
            cursor=replace(watch, change_set=ident).to_cursor(),
        )

    return source_sensor


def build_trigger_sensors(spec: ExtractSpec, keys: ExtractKeys, refresh_job: Any) -> list[Any]:
    """Build the only sensor of an extract that Tableau refreshes itself."""
    if spec.automation == "condition":
        return _reporting_sensors(spec, keys)
    return [_trigger_sensor(spec, keys, refresh_job)]


def _trigger_sensor(spec: ExtractSpec, keys: ExtractKeys, refresh_job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_source",
        job=refresh_job,
        minimum_interval_seconds=round(spec.thresholds.interval),
        description=f"Probes {', '.join([spec.main_table, *spec.watch])} by one cheap query; starts the refresh by Tableau when "
        "one of them changed and all have been quiet.",
    )
    def source_sensor(
        context: dg.SensorEvaluationContext, snowflake: SnowflakeParam, tableau: TableauResource, state: StateFolder
    ) -> Any:
        if hold := state.hold(spec.name).read():
            return dg.SkipReason(hold.sentence(spec.name))
        before, now = Watch.parse(context.cursor), time.time()
        confirmed = last_confirmation(context.instance, keys.published_datasource)
        asked_tag = {ASKED_TAG: _detection_key(spec, replace(before, token=before.requested))}
        look = _look(
            spec,
            snowflake,
            lambda state: watch_source(
                before,
                token=state,
                confirmed=confirmed_state(confirmed),
                last=_attempts(context.instance, refresh_job.name, asked_tag, now).state,
                now=now,
                quiet=spec.thresholds.quiet_period,
                what="refresh",
            ),
            # Without columns: Tableau decides which columns it loads.
            describe=lambda source: {"tir/token": source.token},
        )
        if isinstance(look, dg.SkipReason):
            return look
        watch, waiting, source_metadata = look
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=watch.to_cursor())
        if postponed := budget_wait(spec, tableau, state):
            seen = replace(before, token=watch.token, since=watch.since)
            return dg.SensorResult(skip_reason=postponed, cursor=seen.to_cursor())
        key = _detection_key(spec, watch)
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=key, tags={ASKED_TAG: key})],
            asset_events=[dg.AssetObservation(keys.source_table, metadata=source_metadata)],
            cursor=watch.to_cursor(),
        )

    return source_sensor


def _look(
    spec: ExtractSpec,
    snowflake: SnowflakeParam,
    watch: Callable[[str], tuple[Watch, str]],
    describe: Callable[[WatchedSource], dict[str, Any]] = WatchedSource.metadata,
) -> tuple[Watch, str, dict[str, Any]] | dg.SkipReason:
    """Read the source; return the decision of `watch`, and the source's metadata if a run is requested."""

    def look() -> tuple[Watch, str, dict[str, Any]]:
        source = in_time(lambda: WatchedSource(spec, snowflake))
        new_watch, waiting = watch(source.state)
        return new_watch, waiting, {} if waiting else in_time(lambda: describe(source))

    return unless_blind(spec, "the source could not be read", look)


def _detection_key(spec: ExtractSpec, watch: Watch) -> str:
    return f"{spec.name}-{watch.token}" + (f"-{watch.attempt}" if watch.attempt else "")


def _last_detection(
    instance: dg.DagsterInstance, keys: ExtractKeys, job: str, before: Watch, now: float
) -> tuple[RunState, str | None]:
    """Return the state of the last requested detection, and its partition if it found nothing."""
    if before.change_set is None:
        return "done", None
    state = _attempts(instance, job, {PARTITION: before.change_set}, now).state
    if state == "done" and before.change_set not in instance.get_materialized_partitions(keys.changed_keys):
        return state, before.change_set
    return state, None


def _attempts(instance: dg.DagsterInstance, job: str, tags: Mapping[str, str], now: float) -> Attempts:
    records = instance.get_run_records(dg.RunsFilter(job_name=job, tags=dict(tags)))
    if not records:
        return Attempts()
    newest = records[0]
    return Attempts(len(records), _state(newest, now), newest.end_time or newest.create_timestamp.timestamp())


def _state(record: dg.RunRecord, now: float) -> RunState:
    if record.dagster_run.status is dg.DagsterRunStatus.SUCCESS:
        return "done"
    if record.dagster_run.status in UNFINISHED and now - record.create_timestamp.timestamp() < STUCK_SECONDS:
        return "running"
    return "failed"


def _refresh_sensor(spec: ExtractSpec, keys: ExtractKeys, refresh_job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_refresh",
        job=refresh_job,
        minimum_interval_seconds=round(spec.thresholds.interval),
        description="Starts the refresh of the touched slices when a change set is ready: one run, one publish.",
    )
    def refresh_sensor(context: dg.SensorEvaluationContext, tableau: TableauResource, state: StateFolder) -> Any:
        if hold := state.hold(spec.name).read():
            return dg.SkipReason(hold.sentence(spec.name))
        now, instance = time.time(), context.instance
        ready = last_ready(instance, keys.changed_keys)
        key, reason = refresh_due(
            ready,
            confirmed=last_confirmation(instance, keys.published_datasource),
            attempts=_attempts(instance, refresh_job.name, {CHANGE_SET_TAG: ready.change_set}, now)
            if ready
            else Attempts(),
            busy=_busy(instance, refresh_job.name, now),
            now=now,
        )
        if key is not None and (postponed := budget_wait(spec, tableau, state)):
            key, reason = None, postponed
        is_due = key is not None and ready is not None
        known, partition_requests = slice_requests(
            instance, spec, keys.published_datasource, ready.touched if ready and is_due else ()
        )
        if key is None or ready is None:
            return dg.SensorResult(skip_reason=reason, dynamic_partitions_requests=partition_requests)
        request = dg.RunRequest(
            run_key=key,
            tags={**covering_range(spec, ready.touched, known), CHANGE_SET_TAG: ready.change_set},
            run_config=application_config(keys, ready.change_set),
        )
        return dg.SensorResult(run_requests=[request], dynamic_partitions_requests=partition_requests)

    return refresh_sensor


def budget_wait(spec: ExtractSpec, tableau: TableauResource, state: StateFolder) -> str:
    """Return why a refresh has to wait for the calls that Tableau allows in an hour; empty if it may start.

    A run would find the same and fail. Only sites whose calls are limited have a file to look into.
    """
    if not (state.folder / FOLDER).is_dir():
        return ""
    from tir_dagster.refresh.context import NEEDED_CALLS, tableau_for

    budget = CallBudget(state.folder, tableau_for(tableau.access(), spec), spec.name)
    wait = budget.free_at(NEEDED_CALLS[spec.delivery])
    return (
        f"Tableau allows no more {wait[0].shown} before {clock_text(wait[1])}: the refresh is postponed" if wait else ""
    )


def last_ready(instance: dg.DagsterInstance, changed_keys: dg.AssetKey) -> Ready | None:
    """Return the newest change set that a detection materialized; skip events reported by hand."""
    for record in instance.fetch_materializations(changed_keys, limit=_LOOK_BACK).records:
        event = record.asset_materialization
        if event is None or event.partition is None:
            continue
        touched, version = (getattr(event.metadata.get(name), "value", None) for name in (TOUCHED, SOURCE_VERSION))
        if isinstance(touched, list) and isinstance(version, str):
            return Ready(event.partition, version, tuple(touched))
    return None


def _busy(instance: dg.DagsterInstance, job: str, now: float) -> bool:
    unfinished = instance.get_run_records(dg.RunsFilter(job_name=job, statuses=UNFINISHED))
    return any(_state(record, now) == "running" for record in unfinished)
