"""The four assets of an extract: source_table, changed_keys, purged_extract, published_datasource.

No postponed annotations here: Dagster reads the types of config and resources from the functions.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import dagster as dg

from tir_dagster.changes.change_set import FORM, ChangeSet
from tir_dagster.errors import TirError, VerificationError
from tir_dagster.orchestration import metadata
from tir_dagster.orchestration.checks import (
    Drift,
    evaluation,
    gate_failure,
    gate_results,
    gate_specs,
    known_drift,
    published_evaluations,
)
from tir_dagster.orchestration.io_managers import CHANGE_SET_IO, HYPER_IO, OPTIONAL, StateFolder, staged_metadata
from tir_dagster.orchestration.metadata import last_confirmation, snowflake_url
from tir_dagster.orchestration.names import ExtractKeys, detect_job_name, pool_name
from tir_dagster.orchestration.partitions import (
    SENSIBLE_SLICES,
    add_slices,
    change_set_partitions,
    covering_range,
    extract_partitions,
    failed_slices,
    known_slices,
    many_slices,
    retire_change_sets,
    slices_of_run,
)
from tir_dagster.orchestration.requests import Detection, DetectionConfig, run_detection
from tir_dagster.orchestration.resources import (
    SnowflakeParam,
    SparkParam,
    TableauResource,
    clean_staging,
    snowflake_access,
    spark_session,
)
from tir_dagster.orchestration.sensing.upstream import source_dep, upstream_deps, upstream_keys
from tir_dagster.orchestration.translation import ExtractAssets
from tir_dagster.refresh.state.change_sets import new_id
from tir_dagster.refresh.state.versions import Version
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.hyper.purge import Applied
    from tir_dagster.refresh.context import Looked, RefreshContext
    from tir_dagster.refresh.survey import Survey

LEASE_WAIT_SECONDS = 3600.0
# An older change set is detected again: Time Travel may no longer reach its version.
STALE = timedelta(hours=6)

StepContext = dg.OpExecutionContext | dg.AssetExecutionContext
Events = Iterator[
    dg.Output[Any] | dg.AssetObservation | dg.AssetMaterialization | dg.AssetCheckResult | dg.AssetCheckEvaluation
]


class ApplyConfig(dg.Config):
    """Which change set to apply; without one, re-sync the run's slices, or with `full` load everything."""

    change_set: str = ""
    full: bool = False


def context_for(
    spec: ExtractSpec,
    *,
    snowflake: SnowflakeParam,
    tableau: TableauResource,
    pyspark: SparkParam,
    state: StateFolder,
    log: Callable[[str], None],
) -> "RefreshContext":
    """Build the refresh context from Dagster's resources; the room `refresh` does not know Dagster."""
    from tir_dagster.refresh import stages

    return stages.refresh_context(
        spec,
        snowflake=snowflake_access(snowflake),
        tableau=tableau.access(),
        spark=lambda: spark_session(pyspark, state.folder, log=log),
        home=state.folder,
        log=log,
    )


def build_assets(assets: ExtractAssets) -> list[Any]:
    """Build all assets of the extract, in the order the data flows."""
    return [*assets.external(), _changed_keys(assets), _purged_extract(assets), _published(assets)]


def _changed_keys(assets: ExtractAssets) -> dg.AssetSpec:
    """The change sets that detections stage, one partition each.

    Not materializable by itself: only a detection can name a new change set. If it were, "Materialize all" in the UI
    would ask people for one, because the other assets depend on it.
    """
    spec, keys = assets.spec, assets.keys
    asset = assets.by_part["changed_keys"].replace_attributes(
        deps=[source_dep(spec, keys.source_table), *assets.joined], partitions_def=change_set_partitions(spec)
    )
    return asset.with_io_manager_key(CHANGE_SET_IO)


def build_detect_job(assets: ExtractAssets) -> dg.JobDefinition:
    """Build the job that finds what changed and stages it as a partition of `changed_keys`."""
    spec, keys = assets.spec, assets.keys

    # Named like an asset's step: run config and alerts use this name.
    @dg.op(name=keys.changed_keys.to_python_identifier(), out={}, pool=pool_name(spec))
    def changed_keys(
        context: dg.OpExecutionContext,
        config: DetectionConfig,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        extract = context_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        clean_staging(pyspark, log=context.log.warning)
        # Events are yielded inside the lease: outside of it, another run might already have settled the change set.
        from tir_dagster.refresh import stages

        with stages.leased(extract, f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS) as refresh:
            looked = _look(context, refresh, keys)
            yield from _confirm_late(refresh, looked, keys, context.log.warning)
            detection = run_detection(
                context.instance, refresh, looked, keys, config, ident=context.partition_key, warn=context.log.warning
            )
            sentence = detection.plan.sentence()
            context.log.info(sentence)
            yield _observation(refresh, keys, detection.surveyed, sentence)
            if detection.change_set is not None:
                yield _staged(refresh, keys, detection)
            else:
                # Earlier detections that failed are no longer needed.
                _retire(context, refresh, keys, settled=context.partition_key)

    @dg.graph(name=detect_job_name(spec))
    def detection() -> None:
        changed_keys()

    return detection.to_job(
        partitions_def=change_set_partitions(spec),
        executor_def=dg.in_process_executor,
        description=f"Find what changed in {spec.main_table} and stage it as a change set.",
    )


def _staged(refresh: "RefreshContext", keys: ExtractKeys, detection: Detection) -> dg.AssetMaterialization:
    """Return the materialization event of a new change set."""
    change_set = detection.change_set
    assert change_set is not None
    relations = detection.surveyed.relations
    content = metadata.change_set_metadata(change_set, metadata.columns_of(relations), refresh.stages.seconds)
    lineage = metadata.lineage_from_source(relations, keys.source_table)
    location = staged_metadata(refresh.change_sets, change_set)
    profile = metadata.profile_metadata(refresh.stages.profile)
    return dg.AssetMaterialization(
        keys.changed_keys, partition=change_set.id, metadata={**content, **lineage, **location, **profile}
    )


def _look(context: StepContext, refresh: "RefreshContext", keys: ExtractKeys) -> "Looked":
    from tir_dagster.refresh import stages

    looked = stages.look(refresh, last_confirmation(context.instance, keys.published_datasource))
    _warn(context, looked.warnings)
    return looked


def _warn(context: StepContext, warnings: Sequence[str]) -> None:
    for warning in warnings:
        context.log.warning(warning)


def _confirm_late(
    refresh: "RefreshContext", looked: "Looked", keys: ExtractKeys, warn: Callable[..., None]
) -> Iterator[dg.AssetMaterialization | dg.AssetCheckEvaluation]:
    """Confirm an earlier publish that is not on record. Settle it only after the event is stored: when the generator resumes."""
    from tir_dagster.refresh import stages

    if looked.late is not None:
        refresh.log("an earlier publish of this extract was not recorded; it is confirmed now")
        yield from metadata.late_events(looked.late, keys)
        stages.settle(refresh, looked.late)
        yield from published_evaluations(refresh, looked.late, keys, warn=warn)


def _observation(
    refresh: "RefreshContext", keys: ExtractKeys, surveyed: "Survey", sentence: str
) -> dg.AssetObservation:
    url = snowflake_url(refresh.snowflake.account, refresh.snowflake.host, surveyed.relation.table)
    source = metadata.source_metadata(surveyed.known.token, surveyed.columns, url=url)
    return dg.AssetObservation(
        keys.source_table,
        metadata={
            metadata.PLAN: sentence,
            **source,
            metadata.SOURCE_VERSION: str(surveyed.version),
            "tir/stages": dict(refresh.stages.seconds),
            **metadata.profile_metadata(refresh.stages.profile),
        },
    )


def _purged_extract(assets: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = assets.spec, assets.keys
    deps: list[Any] = [dg.AssetDep(keys.changed_keys, partition_mapping=dg.AllPartitionMapping()), *upstream_deps(spec)]
    if spec.automation == "condition" and keys.source_table not in upstream_keys(spec):
        # The automation condition reads this dependency; a run by condition detects by itself.
        deps.append(keys.source_table)

    @dg.asset(
        **assets.attributes("purged_extract"),
        deps=deps,
        partitions_def=extract_partitions(spec),
        backfill_policy=dg.BackfillPolicy.single_run() if extract_partitions(spec) else None,
        io_manager_key=HYPER_IO,
        check_specs=gate_specs(spec, keys.purged_extract),
        pool=pool_name(spec),
    )
    def purged_extract(
        context: dg.AssetExecutionContext,
        config: ApplyConfig,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        slices = slices_of_run(spec, context.run.tags, known_slices(context.instance, spec))
        extract = context_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        from tir_dagster.refresh import stages

        with stages.leased(extract, f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS) as refresh:
            looked = _look(context, refresh, keys)
            yield from _confirm_late(refresh, looked, keys, context.log.warning)
            applied = yield from _applied(context, refresh, looked, config, slices, keys=keys)
            for name in slices:
                context.add_asset_metadata(
                    metadata.slice_metadata(applied.version, applied.change_set, name), partition_key=name
                )
            yield from _superseded(context.instance, spec, keys, applied, slices)
            version_metadata = applied.metadata
            yield dg.Output(
                applied.version,
                metadata={**version_metadata, **metadata.same_columns(version_metadata, keys.changed_keys)},
            )
            yield from applied.gate(spec, looked)

    return purged_extract


@dataclass(frozen=True)
class _AppliedVersion:
    """A version that passed the gate, with its change set; without a change set, the published version."""

    change_set: ChangeSet | None
    version: Version
    counted: "Applied | None"
    metadata: dict[str, Any]

    def gate(self, spec: ExtractSpec, looked: "Looked") -> Iterator[dg.AssetCheckResult]:
        before = looked.base.manifest["rows"] if looked.base else None
        yield from gate_results(spec, self.version, self.counted, before)


def _applied(
    context: dg.AssetExecutionContext,
    refresh: "RefreshContext",
    looked: "Looked",
    config: ApplyConfig,
    slices: list[str],
    *,
    keys: ExtractKeys,
) -> Generator[dg.AssetCheckEvaluation, None, _AppliedVersion]:
    """Choose or detect a change set and apply it; if the gate fails, yield a failed check and raise."""
    spec = refresh.spec
    drift = known_drift(context.instance, keys, looked.confirmed)
    change_set, sentence = _chosen(context, refresh, looked, config, slices, keys=keys, drift=drift)
    context.log.info(sentence)
    if change_set is not None:
        # A run by hand may find new values.
        slices_known = add_slices(context.instance, spec, change_set.touched)
        if len(slices_known) > SENSIBLE_SLICES:
            context.log.warning(many_slices(spec, len(slices_known)))
    try:
        version, counted, version_metadata = _apply(refresh, looked, change_set, sentence)
    except VerificationError as error:
        # Recorded as a failed check and as a failed run: no version was made.
        failed = gate_failure(error, looked.confirmed, repair=drift is not None)
        yield evaluation(failed, keys.purged_extract, blocking=True)
        raise
    return _AppliedVersion(change_set, version, counted, version_metadata)


def _superseded(
    instance: dg.DagsterInstance, spec: ExtractSpec, keys: ExtractKeys, applied: _AppliedVersion, slices: Sequence[str]
) -> Iterator[dg.AssetMaterialization]:
    """Yield events for slices whose last run failed and that this run does not name: the new version contains them, too."""
    for name in failed_slices(instance, spec, keys.purged_extract):
        if name not in slices:
            slice_counts = metadata.slice_metadata(applied.version, applied.change_set, name)
            yield dg.AssetMaterialization(
                keys.purged_extract,
                partition=name,
                description="Its own run failed; a later refresh brought all slices up to date.",
                metadata={**applied.metadata, **slice_counts},
            )


def _chosen(
    context: dg.AssetExecutionContext,
    refresh: "RefreshContext",
    looked: "Looked",
    config: ApplyConfig,
    slices: list[str],
    *,
    keys: ExtractKeys,
    drift: Drift | None,
) -> tuple[ChangeSet | None, str]:
    """Return the newest pending change set if it is usable; otherwise detect a new one. Also return the plan's sentence."""
    pending = refresh.change_sets.pending()
    if config.change_set and not config.full and drift is None and pending and _usable(pending[-1], looked):
        return pending[-1], pending[-1].sentence
    mode = "full" if config.full else "slices" if slices and not config.change_set else "changes"
    request = DetectionConfig(mode=mode, slices=[] if config.full else slices)
    detection = run_detection(
        context.instance, refresh, looked, keys, request, ident=new_id(), warn=context.log.warning
    )
    return detection.change_set, detection.plan.sentence()


def _usable(change_set: ChangeSet, looked: "Looked") -> bool:
    """Return whether it starts from the confirmed version, is recent enough to be verified, and has the current form."""
    from tir_dagster.snowflake.versions import SourceVersion

    age = datetime.now(UTC) - SourceVersion.parse(change_set.source_version).moment
    if change_set.base != (looked.confirmed.version if looked.confirmed else None) or age > STALE:
        return False
    by_key = looked.base is not None and not looked.foreign and change_set.form == FORM
    return change_set.decision == "full" or by_key


def _apply(
    refresh: "RefreshContext", looked: "Looked", change_set: ChangeSet | None, sentence: str
) -> tuple[Version, "Applied | None", dict[str, Any]]:
    """Apply the change set; return the new version, its counts and its metadata. Without one, return the published version."""
    from tir_dagster.refresh import stages

    if change_set is not None:
        result = stages.apply(refresh, looked, change_set)
        version, applied = result.version, result.counts
        version_metadata = metadata.version_metadata(version, change_set, applied, refresh.stages.seconds)
        return version, applied, version_metadata | metadata.profile_metadata(refresh.stages.profile)
    if looked.base is None:
        # Unreachable as plans are made today: without a base there is always a reason for a full refresh.
        raise TirError(f"{refresh.spec.name}: there is no extract yet and nothing to load. Run tir refresh --full.")
    return looked.base, None, metadata.unchanged_metadata(looked.base, sentence, refresh.stages.seconds)


def _published(assets: ExtractAssets) -> dg.AssetsDefinition:
    spec, keys = assets.spec, assets.keys
    sliced = extract_partitions(spec) is not None
    mapping = dg.AllPartitionMapping() if sliced else None

    @dg.asset(
        **assets.attributes("published_datasource"),
        # A run of this asset alone makes the first version itself.
        ins={"purged_extract": dg.AssetIn(keys.purged_extract, partition_mapping=mapping, metadata={OPTIONAL: True})},
        # It has no partitions, but `dagster asset materialize --partition-range` requires this of every selected asset.
        backfill_policy=dg.BackfillPolicy.single_run() if sliced else None,
        # The confirmation is the event itself; there is nothing to store beside it. Checkers see Nothing as None.
        dagster_type=dg.Nothing,
        output_required=False,
        pool=pool_name(spec),
    )
    def published_datasource(
        context: dg.AssetExecutionContext,
        purged_extract: Version | None,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Events:
        extract = context_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        from tir_dagster.refresh import stages

        with stages.leased(extract, f"run {context.run_id}", wait_seconds=LEASE_WAIT_SECONDS) as refresh:
            looked = _look(context, refresh, keys)
            yield from _confirm_late(refresh, looked, keys, context.log.warning)
            version = _to_publish(refresh, looked, purged_extract)
            if version is None and _is_alone(context, keys):
                # Materialized by hand, without purged_extract: the user wants a refresh.
                version = yield from _refreshed_here(context, refresh, looked, keys)
            if version is None:
                sentence = f"{spec.name}: nothing to publish, the newest version is the confirmed one."
                context.log.info(sentence)
                yield dg.AssetObservation(keys.published_datasource, metadata={metadata.PLAN: sentence})
                return
            published = stages.publish(refresh, looked, version)
            _warn(context, published.warnings)
            confirmed_metadata = metadata.confirmation_metadata(
                published.confirmation,
                version=version,
                stages=refresh.stages.seconds,
                sent_bytes=published.sent_bytes,
                uri=published.datasource.webpage_url or "",
                reason=published.full_reason.name if published.full_reason else None,
                warnings=[*looked.warnings, *published.warnings],
            )
            confirmation = confirmed_metadata.pop(metadata.CONFIRMATION)
            yield dg.Output(
                None,
                metadata={
                    **confirmed_metadata,
                    **metadata.same_columns(confirmed_metadata, keys.purged_extract),
                    **metadata.profile_metadata(refresh.stages.profile),
                    metadata.CONFIRMATION: confirmation,
                },
            )
            stages.settle(refresh, published.confirmation)
            _retire(context, refresh, keys, settled=max(published.confirmation.change_sets, default=""))
            yield from published_evaluations(refresh, published.confirmation, keys, warn=context.log.warning)

    return cast("dg.AssetsDefinition", published_datasource)


def _is_alone(context: dg.AssetExecutionContext, keys: ExtractKeys) -> bool:
    """Return whether the run materializes `published_datasource` without `purged_extract`."""
    return keys.purged_extract not in context.job_def.asset_layer.executable_asset_keys


def _refreshed_here(
    context: dg.AssetExecutionContext, refresh: "RefreshContext", looked: "Looked", keys: ExtractKeys
) -> Generator[dg.AssetMaterialization | dg.AssetCheckEvaluation, None, Version | None]:
    """Do the work of `purged_extract`, yield its events, and return the version to publish; None if nothing differs."""
    spec, instance = refresh.spec, context.instance
    applied = yield from _applied(context, refresh, looked, ApplyConfig(), [], keys=keys)
    if applied.change_set is None:
        return None
    known = known_slices(instance, spec)
    slices = slices_of_run(spec, covering_range(spec, applied.change_set.touched, known), known)
    yield from _superseded(instance, spec, keys, applied, slices)
    names: list[str | None] = [*slices] or [None]
    for name in names:
        slice_counts = {} if name is None else metadata.slice_metadata(applied.version, applied.change_set, name)
        yield dg.AssetMaterialization(
            keys.purged_extract, partition=name, metadata={**applied.metadata, **slice_counts}
        )
    for result in applied.gate(spec, looked):
        yield evaluation(result, keys.purged_extract)
    return applied.version


def _to_publish(refresh: "RefreshContext", looked: "Looked", input_version: Version | None) -> Version | None:
    """Return the version to publish, or None if there is none, or the server already shows it or a newer one.

    This is the input version, unless another run made a newer one while this step waited for the lease.
    """
    if input_version is None:
        return None
    newest = refresh.versions.latest()
    version = input_version
    if newest is not None and newest.id != input_version.id:
        refresh.log(f"using version {newest.id}: another run made it after {input_version.id}, the input of this step")
        version = newest
    confirmed = looked.confirmed.version if looked.confirmed else None
    if version.id == confirmed:
        return None
    if looked.confirmed and version.manifest["source_version"] <= looked.confirmed.source_version:
        # Made by a run that died; a later version is confirmed.
        return None
    if version.manifest.get("server_version") != looked.server.version_text:
        raise TirError(
            f"{refresh.spec.name}: the datasource changed on the server since version {version.id} was made. Nothing was "
            f"published. Refresh again: the next refresh starts from the current datasource."
        )
    if version.manifest["base"] != confirmed:
        raise TirError(
            f"{refresh.spec.name}: version {version.id} does not start from the confirmed version. Nothing was published. Refresh again."
        )
    return version


def _retire(context: StepContext, refresh: "RefreshContext", keys: ExtractKeys, *, settled: str) -> None:
    """Remove partitions of old change sets; a failure here is only a warning, because the run itself succeeded."""
    try:
        pending = {change_set.id for change_set in refresh.change_sets.pending()}
        removed = retire_change_sets(
            context.instance, refresh.spec, keys.changed_keys, pending=pending, settled=settled
        )
    except Exception as error:
        context.log.warning("partitions of old change sets were not removed; the next refresh tries again: %s", error)
        return
    if removed:
        context.log.info("removed the partitions of %d settled or failed change sets", len(removed))
