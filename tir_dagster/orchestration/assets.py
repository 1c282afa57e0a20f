"""The four assets of an extract: source_table, changed_keys, purged_extract, published_datasource.

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from dagster_snowflake import SnowflakeResource
from pydantic import Field

from tir_dagster.changes.changesets import new_id
from tir_dagster.changes.state import ChangeSet, Confirmation, slice_label
from tir_dagster.errors import TirError
from tir_dagster.orchestration.confirmations import CONFIRMATION, last_confirmation
from tir_dagster.orchestration.partitions import change_set_partitions, rest_of, slice_partitions
from tir_dagster.orchestration.resources import StateFolder, TableauResource, snowflake_access, spark_session
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.orchestration.flow import Looked, Refresher

LEASE_WAIT_SECONDS = 3600.0


class Detection(dg.Config):
    """How to look for changes; `slices` are re-synced whatever the watermark says."""

    mode: str = "changes"
    slices: list[str] = Field(default_factory=list)
    allow_empty: bool = False


class Application(dg.Config):
    """Which change set to apply; without one the run's slices are re-synced."""

    change_set: str = ""


@dataclass(frozen=True)
class ExtractKeys:
    """The asset keys of one extract."""

    source_table: dg.AssetKey
    changed_keys: dg.AssetKey
    purged_extract: dg.AssetKey
    published_datasource: dg.AssetKey


_listener: ContextVar[tuple[Callable[[str], None] | None, dict[str, float] | None]] = ContextVar(
    "listener", default=(None, None)
)


@contextmanager
def progress_to(listener: Callable[[str], None], stages: dict[str, float]) -> Iterator[None]:
    """Inside the block, runs in this process also tell the listener, and add their times to the stages."""
    token = _listener.set((listener, stages))
    try:
        yield
    finally:
        _listener.reset(token)


def extract_keys(spec: ExtractSpec) -> ExtractKeys:
    names = ("source_table", "changed_keys", "purged_extract", "published_datasource")
    return ExtractKeys(*(dg.AssetKey([spec.name, name]) for name in names))


def refresher_for(
    spec: ExtractSpec,
    *,
    snowflake: SnowflakeResource,
    tableau: TableauResource,
    pyspark: LazyPySparkResource,
    state: StateFolder,
    log: Any,
) -> "Refresher":
    """The extract's refresh with plain objects; the rooms know nothing of Dagster."""
    from tir_dagster.orchestration.flow import Refresher  # noqa: PLC0415

    listener, stages = _listener.get()

    def tell(line: str) -> None:
        log(line)
        if listener is not None:
            listener(line)

    made = Refresher(
        spec,
        snowflake=snowflake_access(snowflake),
        tableau=tableau.access(),
        spark=lambda: spark_session(pyspark, state.folder),
        home=state.folder,
        log=tell,
    )
    if stages is not None:
        made.stages.seconds = stages
    return made


def build_assets(spec: ExtractSpec) -> list[Any]:
    """All assets of the extract, in the order the data flows."""
    keys = extract_keys(spec)
    return [_source_table(spec, keys), _changed_keys(spec, keys), _purged_extract(spec, keys), _published(spec, keys)]


def _source_table(spec: ExtractSpec, keys: ExtractKeys) -> dg.AssetSpec:
    return dg.AssetSpec(
        key=keys.source_table,
        group_name=spec.name,
        kinds={"snowflake"},
        description=f"The Snowflake table {spec.source}, as the source sensor observes it.",
        metadata={"dagster/table_name": spec.source},
    )


def _changed_keys(spec: ExtractSpec, keys: ExtractKeys) -> dg.AssetsDefinition:
    @dg.asset(
        key=keys.changed_keys,
        deps=[keys.source_table],
        group_name=spec.name,
        kinds={"pyspark", "parquet"},
        partitions_def=change_set_partitions(spec),
        output_required=False,
        description=f"Keys of {spec.source} whose rows differ from the extract's, with their fresh rows: one partition "
        "per change set, pending until a publish confirms it.",
    )
    def changed_keys(
        context: dg.AssetExecutionContext,
        config: Detection,
        snowflake: SnowflakeResource,
        tableau: TableauResource,
        pyspark: LazyPySparkResource,
        state: StateFolder,
    ) -> Iterator[dg.Output[None] | dg.AssetObservation | dg.AssetMaterialization]:
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            looked = _look(context, refresher, keys)
            yield from late_events(looked.late, keys)
            change_set, sentence = _detect(refresher, looked, config, context.partition_key)
        context.log.info(sentence)
        if change_set is None:
            yield dg.AssetObservation(keys.source_table, metadata={"tir/plan": sentence})
            return
        yield dg.Output(None, metadata=_change_set_metadata(change_set, refresher))

    return changed_keys


def _look(context: dg.AssetExecutionContext, refresher: "Refresher", keys: ExtractKeys) -> "Looked":
    return refresher.look(last_confirmation(context.instance, keys.published_datasource))


def late_events(late: Confirmation | None, keys: ExtractKeys) -> Iterator[dg.AssetMaterialization]:
    """A publish that landed before its run died is confirmed by whoever notices."""
    if late is not None:
        yield dg.AssetMaterialization(
            keys.published_datasource,
            description="Confirmed late: the run that published it ended before it could say so.",
            metadata=_confirmation_metadata(late),
        )


def _detect(refresher: "Refresher", looked: "Looked", config: Detection, ident: str) -> tuple[ChangeSet | None, str]:
    if looked.late is not None:
        refresher.settle(looked.late)
    surveyed = refresher.survey(looked)
    plan = refresher.plan(looked, surveyed, config.mode, config.slices)  # type: ignore[arg-type]
    if plan.decision == "none":
        return None, plan.sentence()
    resync: list[str | None] = []
    if config.mode == "slices" and looked.base is not None:
        from tir_dagster.changes.state import stats_from_json  # noqa: PLC0415

        present = stats_from_json(looked.base.manifest["ledger_stats"])
        resync = [*config.slices, *rest_of(refresher.spec, config.slices, [None, *present])]
    plan, change_set = refresher.detect(
        looked, surveyed, plan, ident=ident, resync=list(dict.fromkeys(resync)), allow_empty=config.allow_empty
    )
    return change_set, plan.sentence()


def _purged_extract(spec: ExtractSpec, keys: ExtractKeys) -> dg.AssetsDefinition:
    @dg.asset(
        key=keys.purged_extract,
        deps=[dg.AssetDep(keys.changed_keys, partition_mapping=dg.AllPartitionMapping())],
        group_name=spec.name,
        kinds={"tableau"},
        partitions_def=slice_partitions(spec.slices),
        backfill_policy=dg.BackfillPolicy.single_run() if slice_partitions(spec.slices) else None,
        description="The Hyper extract, purged of the changed keys, with their fresh rows in place, verified against the "
        "source. A run by hand on slices re-syncs them.",
    )
    def purged_extract(
        context: dg.AssetExecutionContext,
        config: Application,
        snowflake: SnowflakeResource,
        tableau: TableauResource,
        pyspark: LazyPySparkResource,
        state: StateFolder,
    ) -> None:
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            looked = _look(context, refresher, keys)
            for event in late_events(looked.late, keys):
                context.log_event(event)
            change_set = _chosen(context, refresher, looked, config)
            if change_set is None:
                context.add_output_metadata({"tir/plan": f"{spec.name}: nothing to do, the source has not changed."})
                return
            version, applied = refresher.apply(looked, change_set)
        metadata = {
            "dagster/row_count": applied.after,
            "tir/plan": change_set.sentence,
            "tir/rows_purged": applied.purged,
            "tir/rows_appended": applied.appended,
            "tir/version": version.id,
            "tir/source_version": change_set.source_version,
            "tir/stages": refresher.stages.seconds,
        }
        _describe_slices(context, change_set, metadata)

    return purged_extract


def _chosen(
    context: dg.AssetExecutionContext, refresher: "Refresher", looked: "Looked", config: Application
) -> ChangeSet | None:
    """The newest pending change set, if it starts from what is confirmed; by hand or too late, a new one."""
    pending = refresher.change_sets.pending()
    base = looked.confirmed.version if looked.confirmed else None
    if config.change_set and pending and pending[-1].base == base:
        return pending[-1]
    slices = list(context.partition_keys) if context.has_partition_key or context.has_partition_key_range else []
    detection = Detection(mode="slices" if slices and not config.change_set else "changes", slices=slices)
    made, sentence = _detect(refresher, looked, detection, new_id())
    context.log.info(sentence)
    return made


def _describe_slices(context: dg.AssetExecutionContext, change_set: ChangeSet, metadata: Mapping[str, Any]) -> None:
    if not (context.has_partition_key or context.has_partition_key_range):
        context.add_output_metadata(dict(metadata))
        return
    for name in context.partition_keys:
        mine = {
            "tir/slice_purged": change_set.purged.get(name, 0),
            "tir/slice_appended": change_set.appended.get(name, 0),
            "dagster/partition_row_count": change_set.ledger_stats.get(name, (0, "0"))[0],
        }
        context.add_asset_metadata({**metadata, **mine}, partition_key=name)


def _published(spec: ExtractSpec, keys: ExtractKeys) -> dg.AssetsDefinition:
    sliced = slice_partitions(spec.slices) is not None
    mapping = dg.AllPartitionMapping() if sliced else None

    @dg.asset(
        key=keys.published_datasource,
        deps=[dg.AssetDep(keys.purged_extract, partition_mapping=mapping)],
        group_name=spec.name,
        kinds={"tableau"},
        output_required=False,
        description=f"The datasource {spec.datasource.name!r} in project {spec.datasource.project!r} on Tableau Server. "
        "One event is one confirmation: what the server shows, and from which version of the source.",
    )
    def published_datasource(
        context: dg.AssetExecutionContext,
        snowflake: SnowflakeResource,
        tableau: TableauResource,
        pyspark: LazyPySparkResource,
        state: StateFolder,
    ) -> Iterator[dg.Output[None]]:
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            looked = _look(context, refresher, keys)
            for event in late_events(looked.late, keys):
                context.log_event(event)
            version = refresher.versions.latest()
            confirmed = looked.confirmed.version if looked.confirmed else None
            if version is None or version.id == confirmed:
                context.log.info("nothing to publish: the newest version is the confirmed one")
                return
            if version.manifest["base"] != confirmed and version.manifest["base"] is not None:
                raise TirError(
                    f"{spec.name}: version {version.id} does not start from what is confirmed. Refresh again."
                )
            confirmation, warnings = refresher.publish(looked, version)
            for warning in warnings:
                context.log.warning(warning)
            yield dg.Output(None, metadata=_confirmation_metadata(confirmation, stages=refresher.stages.seconds))
            refresher.settle(confirmation)

    return published_datasource


def _change_set_metadata(change_set: ChangeSet, refresher: "Refresher") -> dict[str, Any]:
    by_slice = {
        slice_label(name): f"{change_set.purged.get(name, 0):,} purged, {change_set.appended.get(name, 0):,} appended"
        for name in sorted({**change_set.purged, **change_set.appended})
    }
    return {
        "tir/plan": change_set.sentence,
        "tir/decision": change_set.decision,
        "tir/reason": change_set.reason or "",
        "tir/keys": change_set.keys,
        "tir/rows": change_set.rows,
        "tir/source_version": change_set.source_version,
        "tir/slices": by_slice,
        "tir/touched": [name for name in change_set.touched if name is not None],
        "tir/warnings": list(change_set.warnings),
        "tir/stages": refresher.stages.seconds,
    }


def _confirmation_metadata(confirmation: Confirmation, *, stages: Mapping[str, float] | None = None) -> dict[str, Any]:
    return {
        CONFIRMATION: confirmation.to_json(),
        "tir/source_version": confirmation.source_version,
        "tir/server_version": confirmation.server_version,
        "tir/datasource_id": confirmation.datasource_id,
        "tir/version": confirmation.version,
        "dagster/row_count": confirmation.rows,
        "tir/stages": dict(stages or {}),
    }
