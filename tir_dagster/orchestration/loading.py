"""Loads in Dagster: `landed_files` → `source_table`, the arrival sensor, the schedule. Pure decisions, thin edges.

A load's `source_table` is materialized by the load, with what changed as `tir/hint`: every extract that reads the table takes
it from there. No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from tir_dagster.changes.lease import LeaseHeldError, lease
from tir_dagster.errors import TirError
from tir_dagster.loading.declared import LoadSpec
from tir_dagster.orchestration.resources import SnowflakeParam, SparkParam, StateFolder, snowflake_access, spark_session
from tir_dagster.orchestration.sensors import ASKED_TAG, INTERVAL_SECONDS, Watch, _tried, watch_source

if TYPE_CHECKING:
    from tir_dagster.loading.landing import LandedFile
    from tir_dagster.loading.ledger import Changed, Committed
    from tir_dagster.loading.load import Loaded, Loader

LOAD_ID, HINT = "tir/load_id", "tir/hint"
LEASE_WAIT_SECONDS = 600.0
# A run's configuration names its files; the next run takes the others.
MOST_FILES = 500
# Loads that were committed and never reported; more of them are told as a change of anything.
_MOST_LATE = 20
_LOOK_BACK = 50


@dataclass(frozen=True)
class LoadKeys:
    """The asset keys of one load."""

    landed_files: dg.AssetKey
    source_table: dg.AssetKey


def load_keys(spec: LoadSpec) -> LoadKeys:
    return LoadKeys(dg.AssetKey([spec.name, "landed_files"]), dg.AssetKey([spec.name, "source_table"]))


def load_job_name(spec: LoadSpec) -> str:
    return f"{spec.name}_load"


class Landed(dg.Config):
    """Which files to load; none named means all that are there, complete and new."""

    files: list[str] = Field(default_factory=list)


@dataclass
class Listener:
    """A command that runs the job in its own process hears the lines, and gets what was loaded."""

    tell: Callable[[str], None]
    loaded: "list[Loaded]" = field(default_factory=list)


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def build_load_defs(spec: LoadSpec) -> dg.Definitions:
    """The definitions of one load; merge them with a project's own, and with resources by environment."""
    keys = load_keys(spec)
    landed = dg.AssetSpec(
        keys.landed_files,
        group_name=spec.name,
        kinds={"s3" if spec.files.path.startswith("s3://") else "file", spec.files.format},
        description=f"Files under {spec.files.path}, as the arrival sensor sees them: complete, new, in their order.",
        metadata={"dagster/uri": spec.files.path},
    )
    job = dg.define_asset_job(
        load_job_name(spec),
        selection=[keys.source_table],
        executor_def=dg.in_process_executor,
        description=f"Load new files of {spec.files.path} into {spec.table}, in one transaction.",
    )
    schedules = []
    if spec.schedule:
        schedules.append(dg.ScheduleDefinition(name=f"{spec.name}_schedule", job=job, cron_schedule=spec.schedule))
    return dg.Definitions(
        assets=[landed, _source_table(spec, keys)],
        jobs=[job],
        sensors=[_arrival_sensor(spec, keys, job)],
        schedules=schedules,
    )


def _source_table(spec: LoadSpec, keys: LoadKeys) -> dg.AssetsDefinition:
    @dg.asset(  # type: ignore[call-overload]
        key=keys.source_table,
        deps=[keys.landed_files],
        group_name=spec.name,
        kinds={"snowflake", "pyspark"},
        dagster_type=dg.Nothing,
        output_required=False,
        description=f"{spec.table} after files were loaded by `{spec.mode}`. One event is one committed load, with the keys "
        "that it changed.",
        metadata={"dagster/table_name": spec.table},
    )
    def source_table(
        context: dg.AssetExecutionContext,
        config: Landed,
        snowflake: SnowflakeParam,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Iterator[dg.Output[Any] | dg.AssetMaterialization | dg.AssetObservation]:
        loader = _loader(context, spec, snowflake=snowflake, pyspark=pyspark, state=state)
        with _leased(spec, state, f"run {context.run_id}"):
            yield from _late_reports(context.instance, loader, keys)
            loaded = loader.run(config.files)
            if heard := _listener.get():
                heard.loaded.append(loaded)
            for warning in loaded.warnings:
                context.log.warning(warning)
            if loaded.load_id:
                yield dg.Output(None, metadata=load_metadata(spec, loaded))
            else:
                context.log.info("no new files")

    return source_table


def _loader(
    context: dg.AssetExecutionContext,
    spec: LoadSpec,
    *,
    snowflake: SnowflakeParam,
    pyspark: SparkParam,
    state: StateFolder,
) -> "Loader":
    """The load of this run: its lines go to the run's log, and to a command that listens."""
    heard = _listener.get()

    def tell(line: str) -> None:
        context.log.info(line)
        if heard:
            heard.tell(line)

    # On a terminal, what the JVM prints would stand between our lines.
    spark = lambda: spark_session(pyspark, state.folder, quiet=heard is not None)  # noqa: E731
    return loader_for(spec, snowflake_access(snowflake), spark=spark, log=tell)


def loader_for(spec: LoadSpec, access: Any, *, spark: Callable[[], Any], log: Callable[[str], None]) -> "Loader":
    """The load with plain objects; its room knows nothing of Dagster."""
    from tir_dagster.loading.load import Loader  # noqa: PLC0415
    from tir_dagster.loading.staging import by_spark  # noqa: PLC0415
    from tir_dagster.orchestration.steps import crash_after  # noqa: PLC0415 - with it come the clients of a refresh

    return Loader(spec, access=access, stager=by_spark(spark), log=log, after=crash_after)


@contextmanager
def _leased(spec: LoadSpec, state: StateFolder, purpose: str) -> Iterator[None]:
    path = state.folder / "loads" / spec.name / "lease"
    try:
        with lease(path, purpose=purpose, wait_seconds=LEASE_WAIT_SECONDS):
            yield
    except LeaseHeldError as error:
        raise TirError(f"{spec.name}: another run is loading these files. Wait until it is done. ({error})") from None


# What is reported


def load_metadata(spec: LoadSpec, loaded: "Loaded") -> dict[str, Any]:
    return {
        LOAD_ID: loaded.load_id,
        "tir/files": loaded.of("LOADED"),
        "tir/files_repeated": loaded.of("REPEATED"),
        "tir/files_superseded": loaded.of("SUPERSEDED"),
        "tir/rows_read": loaded.rows,
        "tir/rows_rejected": loaded.rejected,
        "tir/rows_inserted": loaded.inserted,
        "tir/rows_updated": loaded.updated,
        "tir/rows_deleted": loaded.deleted,
        "tir/stages": dict(loaded.seconds),
        "dagster/table_name": spec.table,
        **hint_metadata(spec, loaded.changed),
    }


def hint_metadata(spec: LoadSpec, changed: "Changed | None") -> dict[str, Any]:
    """What changed, as every extract on the table understands it; nothing if nothing did."""
    from tir_dagster.changes.hints import ChangeType, Hint, KeyList, Unknown, hint_to_json  # noqa: PLC0415
    from tir_dagster.source.names import TableName  # noqa: PLC0415

    if changed is None:
        return {}
    scope = Unknown() if changed.keys is None else KeyList(changed.columns, changed.keys)
    hint = Hint(TableName.parse(spec.table), ChangeType[changed.kind], scope)
    return {HINT: dg.MetadataValue.json(hint_to_json(hint))}


def _late_reports(instance: dg.DagsterInstance, loader: "Loader", keys: LoadKeys) -> Iterator[dg.AssetMaterialization]:
    """Loads that were committed by a run that died before it could say so."""
    from tir_dagster.loading.ledger import Changed, committed  # noqa: PLC0415

    late = committed(loader.access, loader.books, since=_last_reported(instance, keys))
    if len(late) > _MOST_LATE:
        newest = late[-1]
        yield _late_event(loader.spec, keys, newest, Changed("MIXED_CHANGES"))
        return
    for one in late:
        yield _late_event(loader.spec, keys, one, one.changed)


def _late_event(spec: LoadSpec, keys: LoadKeys, one: "Committed", changed: "Changed | None") -> dg.AssetMaterialization:
    shown = {"tir/rows_read": one.rows, "tir/rows_inserted": one.inserted, "tir/rows_updated": one.updated}
    told: dict[str, Any] = {LOAD_ID: one.load_id, "tir/late": True, **shown, "tir/rows_deleted": one.deleted}
    return dg.AssetMaterialization(keys.source_table, metadata={**told, **hint_metadata(spec, changed)})


def _last_reported(instance: dg.DagsterInstance, keys: LoadKeys) -> str:
    records = instance.fetch_materializations(keys.source_table, limit=_LOOK_BACK).records
    events = [record.asset_materialization for record in records]
    found = [event.metadata[LOAD_ID].value for event in events if event and LOAD_ID in event.metadata]
    return max((str(one) for one in found), default="")


# Arrival


@dataclass(frozen=True)
class Arrivals:
    """What the sensor remembers: since when each new file has looked as it does, and what it asked for."""

    seen: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)

    @staticmethod
    def parse(cursor: str | None) -> "Arrivals":
        try:
            read = json.loads(cursor or "{}")
            seen = {path: (str(stamp), float(since)) for path, (stamp, since) in read.get("seen", {}).items()}
            return Arrivals(seen, Watch(**read.get("watch", {})))
        except (ValueError, TypeError, AttributeError):
            return Arrivals()

    def to_cursor(self) -> str:
        return json.dumps({"seen": dict(self.seen), "watch": asdict(self.watch)})


def settled(
    before: Arrivals, new: "Sequence[LandedFile]", *, now: float, settle: float
) -> "tuple[dict[str, tuple[str, float]], list[LandedFile]]":
    """Since when each new file is unchanged, and the files to load now: in their order, up to the first unfinished one.

    A later file must not overtake an earlier one that is still being written.
    """
    seen: dict[str, tuple[str, float]] = {}
    for file in new:
        stamp, since = before.seen.get(file.path, ("", now))
        seen[file.path] = (file.stamp, since if stamp == file.stamp else now)
    ready: list[LandedFile] = []
    for file in new:
        if now - seen[file.path][1] < settle:
            break
        ready.append(file)
    return seen, ready[:MOST_FILES]


def _arrival_sensor(spec: LoadSpec, keys: LoadKeys, job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_arrival",
        job=job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        description=f"Looks for new, complete files under {spec.files.path}; loads them in their order, each once, many per run.",
    )
    def arrival_sensor(context: dg.SensorEvaluationContext, snowflake: SnowflakeParam) -> Any:
        before, now = Arrivals.parse(context.cursor), time.time()
        try:
            new = _new_files(spec, snowflake_access(snowflake))
        except TirError as error:
            return dg.SkipReason(f"the files could not be looked at: {error}")
        seen, ready = settled(before, new, now=now, settle=_settle(spec))
        if not ready:
            waiting = f"{len(new)} new files are not complete yet" if new else "there are no new files"
            return dg.SensorResult(skip_reason=waiting, cursor=Arrivals(seen, before.watch).to_cursor())
        asked = {ASKED_TAG: _run_key(spec, before.watch)}
        watch, waiting = watch_source(
            before.watch,
            token=_token(ready),
            confirmed=None,
            last=_tried(context.instance, job.name, asked, now).state,
            now=now,
            quiet=0.0,
            what="load",
        )
        cursor = Arrivals(seen, watch).to_cursor()
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=cursor)
        key = _run_key(spec, watch)
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=key, tags={ASKED_TAG: key}, run_config=load_config(keys, ready))],
            asset_events=[dg.AssetMaterialization(keys.landed_files, metadata=_landed_metadata(ready))],
            cursor=cursor,
        )

    return arrival_sensor


def _new_files(spec: LoadSpec, access: Any) -> "list[LandedFile]":
    from tir_dagster.loading.choosing import news  # noqa: PLC0415
    from tir_dagster.loading.ledger import read_ledger  # noqa: PLC0415

    loader = loader_for(spec, access, spark=_no_spark, log=lambda _: None)
    return news(loader.listed(), read_ledger(loader.access, loader.books).known)


def _no_spark() -> Any:
    raise AssertionError("a sensor starts no Spark")


def _settle(spec: LoadSpec) -> float:
    """S3 shows an object when it is whole; a marker says it of a file."""
    at_once = spec.files.complete == "marker" or spec.files.path.startswith("s3://")
    return 0.0 if at_once else spec.files.settle


def load_config(keys: LoadKeys, files: "Sequence[LandedFile]") -> dict[str, Any]:
    config = {"files": [file.path for file in files]}
    return {"ops": {keys.source_table.to_python_identifier(): {"config": config}}}


def _landed_metadata(files: "Sequence[LandedFile]") -> dict[str, Any]:
    return {"tir/files": [file.path for file in files], "tir/bytes": sum(file.size for file in files)}


def _token(files: "Sequence[LandedFile]") -> str:
    told = "\n".join(f"{file.path} {file.stamp}" for file in files)
    return hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest()[:16]


def _run_key(spec: LoadSpec, watch: Watch) -> str:
    return f"{spec.name}-{watch.requested}" + (f"-{watch.attempt}" if watch.attempt else "")
