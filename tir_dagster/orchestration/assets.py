"""The four assets of an extract: source_table, changed_keys, purged_extract, published_datasource.

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import dagster as dg

from tir_dagster.changes.changesets import new_id
from tir_dagster.changes.state import ChangeSet
from tir_dagster.errors import TirError, VerificationError
from tir_dagster.extract.versions import Version
from tir_dagster.orchestration import metadata
from tir_dagster.orchestration.checks import gate_failure, gate_results, gate_specs
from tir_dagster.orchestration.confirmations import last_confirmation
from tir_dagster.orchestration.detecting import Detection, detect
from tir_dagster.orchestration.drift import Drift, known_drift
from tir_dagster.orchestration.hosting import host_of
from tir_dagster.orchestration.io_managers import CHANGE_SET_IO, HYPER_IO
from tir_dagster.orchestration.names import ExtractKeys, pool_name
from tir_dagster.orchestration.partitions import (
    SENSIBLE_SLICES,
    change_set_partitions,
    extract_partitions,
    many_slices,
    retire_change_sets,
    slices_of_run,
)
from tir_dagster.orchestration.pictures import snowflake_url
from tir_dagster.orchestration.resources import (
    SnowflakeParam,
    SparkParam,
    StateFolder,
    TableauResource,
    snowflake_access,
    spark_session,
)
from tir_dagster.orchestration.translation import ExtractAssets
from tir_dagster.orchestration.upstream import source_dep, upstream_deps, upstream_keys
from tir_dagster.orchestration.value_slices import add_slices, known_slices
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.changes.detect import Survey
    from tir_dagster.extract.purge import Applied
    from tir_dagster.orchestration.flow import Looked, Refresher
    from tir_dagster.orchestration.steps import Prepared

LEASE_WAIT_SECONDS = 3600.0
# A change set older than this is made anew: Time Travel may no longer reach its version.
STALE = timedelta(hours=6)

Events = Iterator[dg.Output[Any] | dg.AssetObservation | dg.AssetMaterialization | dg.AssetCheckResult]


class Application(dg.Config):
    """Which change set to apply; without one the run's slices are re-synced, or everything is loaded anew."""

    change_set: str = ""
    full: bool = False


def refresher_for(
    spec: ExtractSpec,
    *,
    snowflake: SnowflakeParam,
    tableau: TableauResource,
    pyspark: SparkParam,
    state: StateFolder,
    log: Callable[[str], None],
) -> "Refresher":
    """The extract's refresh with plain objects; the rooms know nothing of Dagster."""
    from tir_dagster.orchestration.flow import Refresher  # noqa: PLC0415

    host = host_of(spec.name)
    if host is None:
        return Refresher(
            spec,
            snowflake=snowflake_access(snowflake),
            tableau=tableau.access(),
            spark=lambda: spark_session(pyspark, state.folder),
            home=state.folder,
            log=log,
        )

    def tell(line: str) -> None:
        log(line)
        host.listener(line)

    # On a terminal, what the JVM prints would stand between our lines.
    host.refresher.lend(tell, lambda: spark_session(pyspark, state.folder, quiet=True))
    return host.refresher


def build_assets(shown: ExtractAssets) -> list[Any]:
    """All assets of the extract, in the order the data flows."""
    return [*shown.external(), _changed_keys(shown), _purged_extract(shown), _published(shown)]


def _changed_keys(shown: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = shown.spec, shown.keys

    @dg.asset(
        **shown.attributes("changed_keys"),
        deps=[source_dep(spec, keys.source_table)],
        partitions_def=change_set_partitions(spec),
        io_manager_key=CHANGE_SET_IO,
        output_required=False,
        pool=pool_name(spec),
    )
    def changed_keys(
        context: dg.AssetExecutionContext,
        config: Detection,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        # Events are yielded inside the lease: outside of it, somebody else might already have settled the change set.
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            prepared = refresher.take_prepared()
            looked = prepared.looked if prepared else _look(context, refresher, keys)
            yield from _confirm_late(refresher, looked, keys)
            prepared = prepared or _prepare(context, refresher, looked, keys)
            change_set, sentence = detect(context, refresher, prepared, config, context.partition_key)
            context.log.info(sentence)
            yield _observation(refresher, keys, prepared.surveyed, sentence)
            if change_set is not None:
                told = metadata.change_set_metadata(change_set, prepared.surveyed.columns, refresher.stages.seconds)
                lineage = metadata.lineage_from_source(prepared.surveyed.relation, keys.source_table)
                yield dg.Output(change_set, metadata={**told, **lineage})

    return changed_keys


def _look(context: dg.AssetExecutionContext, refresher: "Refresher", keys: ExtractKeys) -> "Looked":
    known = len(refresher.warnings)
    looked = refresher.look(last_confirmation(context.instance, keys.published_datasource))
    _warn(context, refresher.warnings[known:])
    return looked


def _warn(context: dg.AssetExecutionContext, warnings: Sequence[str]) -> None:
    for warning in warnings:
        context.log.warning(warning)


def _confirm_late(refresher: "Refresher", looked: "Looked", keys: ExtractKeys) -> Iterator[dg.AssetMaterialization]:
    """Settled only once the event is on record, which it is when the generator goes on."""
    if looked.late is not None:
        yield from metadata.late_events(looked.late, keys)
        refresher.settle(looked.late)


def _observation(refresher: "Refresher", keys: ExtractKeys, surveyed: "Survey", sentence: str) -> dg.AssetObservation:
    url = snowflake_url(refresher.snowflake.account, refresher.snowflake.host, surveyed.relation.table)
    shown = metadata.source_metadata(surveyed.known.token, surveyed.columns, url=url)
    return dg.AssetObservation(
        keys.source_table,
        metadata={metadata.PLAN: sentence, metadata.SOURCE_VERSION: str(surveyed.version), **shown},
    )


def _prepare(
    context: dg.AssetExecutionContext, refresher: "Refresher", looked: "Looked", keys: ExtractKeys
) -> "Prepared":
    from tir_dagster.orchestration.preparing import prepare_detection  # noqa: PLC0415

    return prepare_detection(refresher, looked, context.instance, keys)


def _purged_extract(shown: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = shown.spec, shown.keys
    deps: list[Any] = [dg.AssetDep(keys.changed_keys, partition_mapping=dg.AllPartitionMapping()), *upstream_deps(spec)]
    if spec.automation == "condition" and keys.source_table not in upstream_keys(spec):
        # What the condition looks at; a run by condition detects by itself.
        deps.append(keys.source_table)

    @dg.asset(
        **shown.attributes("purged_extract"),
        deps=deps,
        partitions_def=extract_partitions(spec),
        backfill_policy=dg.BackfillPolicy.single_run() if extract_partitions(spec) else None,
        io_manager_key=HYPER_IO,
        check_specs=gate_specs(spec, keys.purged_extract),
        pool=pool_name(spec),
    )
    def purged_extract(
        context: dg.AssetExecutionContext,
        config: Application,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        slices = slices_of_run(spec, context.run.tags, known_slices(context.instance, spec))
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            looked = _look(context, refresher, keys)
            yield from _confirm_late(refresher, looked, keys)
            drift = known_drift(context.instance, keys, looked.confirmed)
            change_set, sentence = _chosen(context, refresher, looked, config, slices, keys=keys, drift=drift)
            context.log.info(sentence)
            if change_set is not None:
                # A run by hand may find values that nobody knew.
                slices_known = add_slices(context.instance, spec, change_set.touched)
                if len(slices_known) > SENSIBLE_SLICES:
                    context.log.warning(many_slices(spec, len(slices_known)))
            try:
                version, applied, told = _apply(refresher, looked, change_set, sentence)
            except VerificationError as error:
                # On record as a failed check, and then as the failed run that it is: no version was made.
                yield gate_failure(error, looked.confirmed, repair=drift is not None)
                raise
            for name in slices:
                context.add_asset_metadata(metadata.slice_metadata(version, change_set, name), partition_key=name)
            yield dg.Output(version, metadata={**told, **metadata.same_columns(told, keys.changed_keys)})
            before = looked.base.manifest["rows"] if looked.base else None
            yield from gate_results(spec, version, applied, before)

    return purged_extract


def _chosen(
    context: dg.AssetExecutionContext,
    refresher: "Refresher",
    looked: "Looked",
    config: Application,
    slices: list[str],
    *,
    keys: ExtractKeys,
    drift: Drift | None,
) -> tuple[ChangeSet | None, str]:
    """The newest pending change set, if it starts from what is confirmed; by hand, too late or after drift a new one."""
    pending = refresher.change_sets.pending()
    if config.change_set and not config.full and drift is None and pending and _usable(pending[-1], looked):
        return pending[-1], pending[-1].sentence
    mode = "full" if config.full else "slices" if slices and not config.change_set else "changes"
    detection = Detection(mode=mode, slices=[] if config.full else slices)
    return detect(context, refresher, _prepare(context, refresher, looked, keys), detection, new_id())


def _usable(change_set: ChangeSet, looked: "Looked") -> bool:
    """Whether it starts from what is there now, and is young enough to be verified at its own version."""
    from tir_dagster.source.versions import SourceVersion  # noqa: PLC0415

    age = datetime.now(UTC) - SourceVersion.parse(change_set.source_version).moment
    if change_set.base != (looked.confirmed.version if looked.confirmed else None) or age > STALE:
        return False
    return change_set.decision == "full" or (looked.base is not None and not looked.foreign)


def _apply(
    refresher: "Refresher", looked: "Looked", change_set: ChangeSet | None, sentence: str
) -> tuple[Version, "Applied | None", dict[str, Any]]:
    """The version with the change set in it; without one, the version that is published, so that nothing follows."""
    if change_set is not None:
        version, applied = refresher.apply(looked, change_set)
        return version, applied, metadata.version_metadata(version, change_set, applied, refresher.stages.seconds)
    if looked.base is None:
        # Unreachable as plans are made today: without a base there is always a reason for a full refresh.
        raise TirError(f"{refresher.spec.name}: there is no extract yet and nothing to load. Run tir refresh --full.")
    return looked.base, None, metadata.unchanged_metadata(looked.base, sentence, refresher.stages.seconds)


def _published(shown: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = shown.spec, shown.keys
    sliced = extract_partitions(spec) is not None
    mapping = dg.AllPartitionMapping() if sliced else None

    @dg.asset(
        **shown.attributes("published_datasource"),
        ins={"purged_extract": dg.AssetIn(keys.purged_extract, partition_mapping=mapping)},
        # It has no partitions, but `dagster asset materialize --partition-range` asks it of every selected asset.
        backfill_policy=dg.BackfillPolicy.single_run() if sliced else None,
        # The confirmation is the event itself; there is nothing to store beside it. Checkers see Nothing as None.
        dagster_type=dg.Nothing,
        output_required=False,
        pool=pool_name(spec),
    )
    def published_datasource(
        context: dg.AssetExecutionContext,
        purged_extract: Version,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        refresher = refresher_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        with refresher.leased(f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS):
            looked = _look(context, refresher, keys)
            yield from _confirm_late(refresher, looked, keys)
            version = _to_publish(refresher, looked, purged_extract)
            if version is None:
                said = f"{spec.name}: nothing to publish, the newest version is the confirmed one."
                context.log.info(said)
                yield dg.AssetObservation(keys.published_datasource, metadata={metadata.PLAN: said})
                return
            known = len(refresher.warnings)
            published = refresher.publish(looked, version)
            _warn(context, refresher.warnings[known:])
            told = metadata.confirmation_metadata(
                published.confirmation,
                version=version,
                stages=refresher.stages.seconds,
                sent_bytes=refresher.sent_bytes,
                uri=published.found.webpage_url or "",
                reason=refresher.full_reason,
                warnings=refresher.warnings,
            )
            yield dg.Output(None, metadata={**told, **metadata.same_columns(told, keys.purged_extract)})
            refresher.settle(published.confirmation)
            _retire(context, refresher)

    return cast("dg.AssetsDefinition", published_datasource)


def _to_publish(refresher: "Refresher", looked: "Looked", given: Version) -> Version | None:
    """The version to publish, or None when the confirmed one is the newest.

    While this step waited for the lease, another run may have made or published a newer version than the one given.
    """
    version = refresher.versions.latest() or given
    confirmed = looked.confirmed.version if looked.confirmed else None
    if version.id == confirmed:
        return None
    if looked.confirmed and version.manifest["source_version"] <= looked.confirmed.source_version:
        # Made by a run that died, and a later one is confirmed.
        return None
    if version.manifest.get("server_version") != looked.server.version_text:
        raise TirError(
            f"{refresher.spec.name}: the datasource changed on the server since version {version.id} was made. Nothing was "
            f"published. Refresh again: it then starts from what is there."
        )
    if version.manifest["base"] != confirmed:
        raise TirError(
            f"{refresher.spec.name}: version {version.id} does not start from what is confirmed. Refresh again."
        )
    return version


def _retire(context: dg.AssetExecutionContext, refresher: "Refresher") -> None:
    """Tidying up must not fail a run whose publish is confirmed."""
    try:
        pending = {one.id for one in refresher.change_sets.pending()}
        gone = retire_change_sets(context.instance, refresher.spec, pending=pending)
    except Exception as error:
        context.log.warning("partitions of old change sets were not removed; the next refresh tries again: %s", error)
        return
    if gone:
        context.log.info("removed the partitions of %d settled change sets", len(gone))
