"""Loads in Dagster: the assets `landed_files` → `source_table`, the arrival sensor, the schedule, and late reports of loads.

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from tir_dagster.crash_points import crash_after
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.sensor import unless_blind
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.names import LoadKeys, load_job_name, load_keys
from tir_dagster.orchestration.resources import SnowflakeParam, SparkParam, snowflake_access, spark_session
from tir_dagster.orchestration.sensing.sensors import ASKED_TAG, INTERVAL_SECONDS, Watch, _attempts, watch_source
from tir_dagster.orchestration.sensing.watching import in_time
from tir_dagster.refresh.state.lease import LeaseHeldError, lease, lease_holder
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.load import LoadSpec

if TYPE_CHECKING:
    from tir_dagster.loading.landing import LandedFile
    from tir_dagster.loading.ledger import Changed, Committed
    from tir_dagster.loading.load import Loader, LoadResult


LOAD_ID, LOAD_IDS, LATE, HINT = "tir/load_id", "tir/load_ids", "tir/late", "tir/hint"
# How many of the newest loads are checked. Every run checks, so an unreported load is among them.
LOOK_BACK = 50
# More late loads than this are reported as one change of unknown rows.
_MOST_LATE = 20
# People may report events by hand; the events of the newest loads are on the newest pages.
_PAGES = 20
LEASE_WAIT_SECONDS = 600.0
# A run's configuration lists its files; the next run takes the others.
MOST_FILES = 500


def hint_metadata(spec: LoadSpec, changed: "Changed | None") -> dict[str, Any]:
    """Return metadata with a hint that describes the change to all extracts on the table; empty if nothing changed."""
    from tir_dagster.changes.hints import ChangeType, Hint, KeyList, Unknown, hint_to_json

    if changed is None:
        return {}
    scope = Unknown() if changed.keys is None else KeyList(changed.columns, changed.keys)
    hint = Hint(TableName.parse(spec.table), ChangeType[changed.kind], scope)
    return {HINT: dg.MetadataValue.json(hint_to_json(hint))}


def late_reports(
    instance: dg.DagsterInstance, loader: "Loader", source_table: dg.AssetKey, ids: Sequence[str]
) -> Iterator[dg.AssetMaterialization]:
    """Yield events of loads that nobody reported, in commit order. The caller holds the lease, or saw that it is free."""
    from tir_dagster.loading.ledger import Changed, committed

    late = committed(loader.access, loader.books, unreported(instance, source_table, ids))
    together = {LOAD_IDS: [load.load_id for load in late]} if len(late) > _MOST_LATE else {}
    for load in late[-1:] if together else late:
        reported = replace(load, changed=Changed("MIXED_CHANGES")) if together else load
        metadata = {**_metadata(loader.spec, reported), LATE: True, **together}
        yield dg.AssetMaterialization(source_table, metadata=metadata)


def unreported(instance: dg.DagsterInstance, source_table: dg.AssetKey, ids: Sequence[str]) -> list[str]:
    """Return the ids of loads without an event. Compared by id, because a load that began first may end last."""
    missing, cursor = dict.fromkeys(ids), None
    for _ in range(_PAGES):
        if not missing:
            break
        page = instance.fetch_materializations(source_table, limit=LOOK_BACK, cursor=cursor)
        for record in page.records:
            for load_id in _load_ids(record.asset_materialization):
                missing.pop(load_id, None)
        if not page.has_more:
            break
        cursor = page.cursor
    return list(missing)


def _load_ids(event: dg.AssetMaterialization | None) -> list[str]:
    values = [event.metadata[name].value for name in (LOAD_ID, LOAD_IDS) if name in event.metadata] if event else []
    return [str(load_id) for value in values for load_id in (value if isinstance(value, list) else [value])]


def _metadata(spec: LoadSpec, load: "Committed") -> dict[str, Any]:
    """Return the metadata of a committed load: its id, its counts and the hint."""
    return {
        LOAD_ID: load.load_id,
        "tir/rows_read": load.rows,
        "tir/rows_rejected": load.rejected,
        "tir/rows_inserted": load.inserted,
        "tir/rows_updated": load.updated,
        "tir/rows_deleted": load.deleted,
        **hint_metadata(spec, load.changed),
    }


def load_metadata(spec: LoadSpec, loaded: "LoadResult") -> dict[str, Any]:
    return {
        **_metadata(spec, loaded),
        "tir/files": loaded.of("LOADED"),
        "tir/files_repeated": loaded.of("REPEATED"),
        "tir/files_superseded": loaded.of("SUPERSEDED"),
        "tir/stages": dict(loaded.seconds),
        "dagster/table_name": spec.table,
    }


class LoadConfig(dg.Config):
    """Which files to load; an empty list means all complete new files.

    A file with a stamp is loaded only if it still has that stamp.
    """

    files: list[str] = Field(default_factory=list)
    stamps: dict[str, str] = Field(default_factory=dict)


def build_load_defs(spec: LoadSpec) -> dg.Definitions:
    """Build the definitions of one load; merge them with your own and with `environment_resources()`."""
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
        config: LoadConfig,
        snowflake: SnowflakeParam,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Iterator[dg.Output[Any] | dg.AssetMaterialization | dg.AssetObservation]:
        from tir_dagster.loading.ledger import recent

        log = context.log.info
        spark = lambda: spark_session(pyspark, state.folder, log=log)  # noqa: E731
        loader = loader_for(spec, snowflake_access(snowflake), spark=spark, log=log)
        with _leased(spec, state, f"run {context.run_id}"):
            ids = recent(loader.access, loader.books, most=LOOK_BACK)
            yield from late_reports(context.instance, loader, keys.source_table, ids)
            loaded = loader.run({path: config.stamps.get(path, "") for path in config.files})
            for warning in loaded.warnings:
                context.log.warning(warning)
            if loaded.load_id:
                yield dg.Output(None, metadata=load_metadata(spec, loaded))
            else:
                context.log.info("no new files")

    return source_table


def _no_spark() -> Any:
    raise AssertionError("only a load starts Spark; to look at files needs none")


def loader_for(
    spec: LoadSpec,
    access: Any,
    *,
    log: Callable[[str], None] = lambda _: None,
    spark: Callable[[], Any] = _no_spark,
) -> "Loader":
    """Build the loader from plain objects; the room `loading` does not know Dagster."""
    from tir_dagster.loading.load import Loader
    from tir_dagster.loading.staging import by_spark

    return Loader(spec, access=access, stager=by_spark(spark), log=log, after=crash_after)


def _lease_path(spec: LoadSpec, state: StateFolder) -> Path:
    return state.folder / "loads" / spec.name / "lease"


@contextmanager
def _leased(spec: LoadSpec, state: StateFolder, purpose: str) -> Iterator[None]:
    try:
        with lease(_lease_path(spec, state), purpose=purpose, wait_seconds=LEASE_WAIT_SECONDS):
            yield
    except LeaseHeldError as error:
        raise TirError(
            f"{spec.name}: another run is loading these files. Wait until it ends, then run again. ({error})"
        ) from None


# Arrival


@dataclass(frozen=True)
class Arrivals:
    """The sensor's cursor: since when each new file is unchanged, the run it requested, and which loads are reported."""

    seen: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    reported: tuple[str, ...] = ()

    @staticmethod
    def parse(cursor: str | None) -> "Arrivals":
        try:
            read = json.loads(cursor or "{}")
            seen = {path: (str(stamp), float(since)) for path, (stamp, since) in read.get("seen", {}).items()}
            return Arrivals(seen, Watch(**read.get("watch", {})), tuple(read.get("told", ())))
        except (ValueError, TypeError, AttributeError):
            return Arrivals()

    def to_cursor(self) -> str:
        return json.dumps({"seen": dict(self.seen), "watch": asdict(self.watch), "told": self.reported})


def complete_files(
    before: Arrivals,
    new: "Sequence[LandedFile]",
    *,
    now: float,
    settle: float,
    unfinished: frozenset[str] = frozenset(),
    in_order: bool = True,
) -> "tuple[dict[str, tuple[str, float]], list[LandedFile]]":
    """Return since when each new file is unchanged, and the complete files to load now, in order.

    If the order matters, a later file must not overtake an earlier incomplete one.
    """
    stable_since: dict[str, tuple[str, float]] = {}
    for file in new:
        stamp, since = before.seen.get(file.path, ("", now))
        stable_since[file.path] = (file.stamp, since if stamp == file.stamp else now)
    ready: list[LandedFile] = []
    for file in new:
        if file.path not in unfinished and now - stable_since[file.path][1] >= settle:
            ready.append(file)
        elif in_order:
            break
    # Without a waiting time there is no need to remember files, of which there may be many.
    return (stable_since if settle else {}), ready[:MOST_FILES]


def _arrival_sensor(spec: LoadSpec, keys: LoadKeys, job: Any) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_arrival",
        job=job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        description=f"Looks for new, complete files under {spec.files.path}; loads them in their order, each once, many per run.",
    )
    def arrival_sensor(context: dg.SensorEvaluationContext, snowflake: SnowflakeParam, state: StateFolder) -> Any:
        before, now = Arrivals.parse(context.cursor), time.time()
        # Read before the files: then the ledger contains the files of a finished run.
        last_run = _attempts(context.instance, job.name, {ASKED_TAG: _run_key(spec, before.watch)}, now).state

        def look_at_files() -> _Look:
            access, lease_path = snowflake_access(snowflake), _lease_path(spec, state)
            return in_time(lambda: _look(spec, access, before, context.instance, lease_path))

        look = unless_blind(spec, "the files could not be listed", look_at_files)
        if isinstance(look, dg.SkipReason):
            return look
        stable_since, ready = complete_files(
            before, look.new, now=now, settle=_settle(spec), unfinished=look.unfinished, in_order=spec.in_order
        )
        watch, waiting = before.watch, "there are no new files"
        if ready:
            watch, waiting = watch_source(
                before.watch,
                token=_token(ready),
                confirmed=None,
                # Files that are still new were not loaded, even if the run succeeded.
                last="failed" if last_run == "done" else last_run,
                now=now,
                quiet=0.0,
                what="load",
            )
        elif look.new:
            waiting = f"{len(look.new)} new files are not complete yet, the first is {look.new[0].path}"
        cursor = Arrivals(stable_since, watch, look.reported).to_cursor()
        if waiting:
            return dg.SensorResult(skip_reason=waiting, cursor=cursor, asset_events=look.late)
        key, paths = _run_key(spec, watch), [file.path for file in ready]
        config = {"files": paths, "stamps": {file.path: file.stamp for file in ready}}
        run_config = {"ops": {keys.source_table.to_python_identifier(): {"config": config}}}
        metadata: dict[str, Any] = {"tir/files": paths, "tir/bytes": sum(file.size for file in ready)}
        return dg.SensorResult(
            run_requests=[dg.RunRequest(run_key=key, tags={ASKED_TAG: key}, run_config=run_config)],
            asset_events=[*look.late, dg.AssetMaterialization(keys.landed_files, metadata=metadata)],
            cursor=cursor,
        )

    return arrival_sensor


@dataclass(frozen=True)
class _Look:
    """New files in order, the incomplete ones of them, events of unreported loads, and the ids of all reported loads."""

    new: "list[LandedFile]"
    unfinished: frozenset[str]
    late: list[dg.AssetMaterialization]
    reported: tuple[str, ...]


def _look(spec: LoadSpec, access: Any, before: Arrivals, instance: dg.DagsterInstance, lease_path: Path) -> _Look:
    from tir_dagster.loading.ledger import recent
    from tir_dagster.loading.selection import news

    loader = loader_for(spec, access)
    with loader.access.kept_open():
        loads = recent(loader.access, loader.books, most=LOOK_BACK)
        late: list[dg.AssetMaterialization] = []
        reported = tuple(load_id for load_id in loads if load_id in before.reported)
        # A running load reports before it releases its lease. So check the lease between reading the loads and reporting.
        if len(reported) < len(loads) and lease_holder(lease_path) is None:
            unreported_ids = [load_id for load_id in loads if load_id not in reported]
            late = list(late_reports(instance, loader, load_keys(spec).source_table, unreported_ids))
            reported = tuple(loads)
        listing, ledger = loader.listing(), loader.ledger()
    return _Look(news(listing.files, ledger.known), listing.unfinished, late, reported)


def _settle(spec: LoadSpec) -> float:
    """Return how long a file must be unchanged: zero on S3, which shows only complete objects, and with markers."""
    at_once = spec.files.complete == "marker" or spec.files.path.startswith("s3://")
    return 0.0 if at_once else spec.files.settle


def _token(files: "Sequence[LandedFile]") -> str:
    text = "\n".join(f"{file.path} {file.stamp}" for file in files)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]


def _run_key(spec: LoadSpec, watch: Watch) -> str:
    return f"{spec.name}-{watch.requested}" + (f"-{watch.attempt}" if watch.attempt else "")
