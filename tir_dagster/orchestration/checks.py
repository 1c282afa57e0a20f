"""Asset checks: the gate before a publish, the verification of the published extract, and recorded drift.

No postponed annotations here: Dagster reads the types of resources from the functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import dagster as dg

from tir_dagster.changes.change_set import NO_SLICE_KEY, place_label, place_of
from tir_dagster.errors import EQUALS_SOURCE, ROWS_ADD_UP, SERVER_HOLDS_IT, TirError, VerificationError
from tir_dagster.orchestration.io_managers import StateFolder
from tir_dagster.orchestration.metadata import last_confirmation
from tir_dagster.orchestration.names import ExtractKeys, verify_job_name
from tir_dagster.orchestration.resources import SnowflakeParam, SparkParam, TableauResource
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.hyper.purge import Applied
    from tir_dagster.refresh.context import RefreshContext
    from tir_dagster.refresh.state.versions import Version
    from tir_dagster.refresh.verify import ExtractVerification, Finding


# Metadata of a failed check: the version that it compared or started from, the slices that differ, and whether the refresh was a repair.
VERSION, DIFFERENT, REPAIR = "tir/version", "tir/different_slices", "tir/repair"


@dataclass(frozen=True)
class Drift:
    """The slices in which the confirmed version differs from the source; `unrepaired` when replacing them did not help."""

    slices: tuple[str | None, ...]
    unrepaired: bool = False
    # Of several tables: slices of others than the main one.
    others: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    main: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """All of them for people."""
        places = {self.main: self.slices, **self.others}
        return tuple(place_label(table, name) for table, slices in places.items() for name in slices)


def known_drift(instance: dg.DagsterInstance, keys: ExtractKeys, confirmed: Confirmation | None) -> Drift | None:
    """Return the drift that the last verification, or the gate of a failed refresh, found in the confirmed version.

    Drift of an older version no longer counts after a newer one is published.
    """
    if confirmed is None:
        return None
    assets = (keys.published_datasource, keys.purged_extract)
    failures = [_failure(instance, key, EQUALS_SOURCE, confirmed.version) for key in assets]
    # The server may hold keys that neither the source nor the local version has: replacing keys cannot remove them.
    failures.append(_other_rows(instance, keys, confirmed.version))
    failed = [failure for failure in failures if failure is not None]
    if not failed:
        return None
    places = {place_of(label, confirmed.tables) for failure in failed for label in failure.get(DIFFERENT, ())}
    repaired = any(failure.get(REPAIR) for failure in failed)
    slices = {
        table: tuple(
            sorted((name for other, name in places if other == table), key=lambda name: (name is None, name or ""))
        )
        for table in confirmed.tables
    }
    main, *others = confirmed.tables
    return Drift(
        slices[main], repaired or not places, {table: slices[table] for table in others if slices[table]}, main
    )


def drift_sentence(
    instance: dg.DagsterInstance, spec: ExtractSpec, keys: ExtractKeys, confirmed: Confirmation | None
) -> str | None:
    """Return what is known to differ, and the command that shows it; None if nothing is."""
    drift = known_drift(instance, keys, confirmed)
    if drift is None or confirmed is None:
        return None
    named = ", ".join(drift.labels[:3])
    what, option = "differs from the source", ""
    if _other_rows(instance, keys, confirmed.version) is not None:
        what, option = "the server holds other rows than were confirmed", " --server"
    return f"{what}{f' in {named}' if named else ''}: tir verify {spec.name}{option} --rows"


def verified_slices(instance: dg.DagsterInstance, keys: ExtractKeys) -> dict[str, int]:
    """Return how many slices verifications compared and found equal, by version, as far as the last ones tell."""
    key = dg.AssetCheckKey(keys.published_datasource, EQUALS_SOURCE)
    verified: dict[str, int] = {}
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=_MOST_CHECKS):
        event = record.event.dagster_event if record.event else None
        data = event.event_specific_data if event else None
        if isinstance(data, dg.AssetCheckEvaluation) and data.passed:
            metadata = {name: getattr(entry, "value", None) for name, entry in data.metadata.items()}
            version, count = metadata.get(VERSION), metadata.get("tir/slices_compared")
            if isinstance(version, str) and isinstance(count, int):
                verified.setdefault(version, count)
    return verified


def _other_rows(instance: dg.DagsterInstance, keys: ExtractKeys, version: str) -> dict[str, Any] | None:
    failed = _failure(instance, keys.published_datasource, SERVER_HOLDS_IT, version)
    return None if failed is None else {**failed, REPAIR: True}


def verified_drift(instance: dg.DagsterInstance, keys: ExtractKeys, confirmed: Confirmation | None) -> str | None:
    """Return a text for the source sensor if a verification found drift; the sensor retries a failed gate anyway."""
    if confirmed is None:
        return None
    checks = (EQUALS_SOURCE, SERVER_HOLDS_IT)
    failed = (_failure(instance, keys.published_datasource, name, confirmed.version) for name in checks)
    return None if all(failure is None for failure in failed) else f"drift@{confirmed.version}"


def _failure(instance: dg.DagsterInstance, asset: dg.AssetKey, check: str, version: str) -> dict[str, Any] | None:
    """Return the metadata of the asset's last check of that name if it failed as an error at that version."""
    key = dg.AssetCheckKey(asset, check)
    record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    event = record.event if record else None
    data = event.dagster_event.event_specific_data if event and event.dagster_event else None
    # While the check runs, the record only says that it is planned.
    if not isinstance(data, dg.AssetCheckEvaluation) or data.passed or data.severity is not dg.AssetCheckSeverity.ERROR:
        return None
    metadata = {name: getattr(entry, "value", None) for name, entry in data.metadata.items()}
    return metadata if metadata.get(VERSION) == version else None


ROW_JUMP = "row_count_jump"
SERVER, UNIQUE_KEY, JOINS = SERVER_HOLDS_IT, "unique_row_key", "mandatory_joins"
# At most so many results of a check are read.
_MOST_CHECKS = 200
# At most this many differing slices are shown.
_SHOWN_SLICES = 50

_WORDS = {
    ROWS_ADD_UP: "Rows after the refresh = rows before - purged + appended, read back from the closed file.",
    EQUALS_SOURCE: "The replaced rows in the closed file equal the rows that were read (L1). The slices compared in this refresh equal the "
    "source at the same version: counts, sums, extremes, digests (L2).",
    ROW_JUMP: "The extract did not grow or shrink by more than `checks.row_jump` allows.",
    SERVER: "The downloaded content of the server equals the confirmed version.",
    UNIQUE_KEY: "Every row of the extract has a unique row key without NULLs.",
    JOINS: "No row is hidden because its partner in an inner join is missing.",
}
_PUBLISHED = (
    "The published version equals the source at that version's own moment: after a publish the replaced rows, in a "
    "verification every slice."
)


# The gate before a publish


def gate_specs(spec: ExtractSpec, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """Return the checks of every refresh; a version that fails a blocking one is neither kept nor published."""
    gate = [dg.AssetCheckSpec(name, asset=key, blocking=True, description=_WORDS[name]) for name in _GATE]
    jump = dg.AssetCheckSpec(ROW_JUMP, asset=key, description=_WORDS[ROW_JUMP])
    return [*gate, *([jump] if spec.checks.row_jump is not None else [])]


_GATE = (ROWS_ADD_UP, EQUALS_SOURCE)


def compared_slices(version: "Version") -> dict[str, list[str]]:
    """Return the slices that were compared as a whole when the version was made, by the source version of the comparison."""
    compared: dict[str, list[str]] = {}
    for table in version.tables:
        for name, source_version in version.of(table).manifest.get("compared", {}).items():
            compared.setdefault(source_version, []).append(place_label(table, None if name == NO_SLICE_KEY else name))
    return compared


def gate_results(
    spec: ExtractSpec, version: "Version", applied: "Applied | None", before: int | None
) -> Iterator[dg.AssetCheckResult]:
    """Yield the results of the gate; if nothing was applied, the existing version passed it when it was made."""
    rows = version.manifest["rows"]
    if applied is None:
        sums = f"nothing was applied; version {version.id} has {rows:,} rows"
    else:
        sums = f"{applied.before:,} - {applied.purged:,} + {applied.appended:,} = {applied.after:,}"
    compared = compared_slices(version)
    levels = "L1: the replaced rows in the file equal the rows that were read."
    for source_version, names in compared.items():
        which = "" if source_version == version.manifest["source_version"] else " of the version before"
        levels += f" L2: {', '.join(names)}{which} equal the source at {source_version}."
    yield dg.AssetCheckResult(passed=True, check_name=ROWS_ADD_UP, description=sums)
    yield dg.AssetCheckResult(
        passed=True,
        check_name=EQUALS_SOURCE,
        description=levels,
        metadata={"tir/slices_compared": sum(map(len, compared.values()))},
    )
    if spec.checks.row_jump is not None:
        from tir_dagster.refresh.verify import row_jump

        yield _result(ROW_JUMP, row_jump(before, rows, spec.checks.row_jump), dg.AssetCheckSeverity.WARN)


def gate_failure(
    error: VerificationError, confirmed: Confirmation | None, *, repair: bool = False
) -> dg.AssetCheckResult:
    """Return the failed check that stopped the refresh; the run fails with the same message.

    Its metadata tells the next refresh the version it started from, and whether it was a repair of drifted slices.
    """
    started = {VERSION: confirmed.version, REPAIR: repair} if confirmed else {}
    failure_metadata = {**_slices_shown(error.slices), **started}
    return dg.AssetCheckResult(passed=False, check_name=error.check, description=str(error), metadata=failure_metadata)


def evaluation(result: dg.AssetCheckResult, key: dg.AssetKey, *, blocking: bool = False) -> dg.AssetCheckEvaluation:
    """Return the result as an event that any step may yield, not only the one that declares the check."""
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=str(result.check_name),
        passed=result.passed,
        metadata=result.metadata,
        severity=result.severity,
        description=result.description,
        blocking=blocking,
    )


# The verification of what is published


def verification_names(spec: ExtractSpec) -> list[str]:
    """Return the names of the checks of `published_datasource`."""
    return [
        EQUALS_SOURCE,
        *([UNIQUE_KEY] if any(part.row_key for part in spec.parts.values()) else []),
        *([JOINS] if any(part.query is not None for part in spec.parts.values()) else []),
        *([SERVER] if spec.checks.server else []),
    ]


def build_verification(
    spec: ExtractSpec, keys: ExtractKeys, context_for: Callable[..., Any]
) -> dg.AssetChecksDefinition:
    """Build one step for the selected checks; none of them blocks, because the extract is already published."""
    words = {**_WORDS, EQUALS_SOURCE: _PUBLISHED}
    specs = [
        dg.AssetCheckSpec(name, asset=keys.published_datasource, description=words[name])
        for name in verification_names(spec)
    ]

    @dg.multi_asset_check(specs=specs, name=f"{spec.name}_verification", can_subset=True)
    def verification(
        context: dg.AssetCheckExecutionContext,
        snowflake: SnowflakeParam,
        tableau: TableauResource,
        pyspark: SparkParam,
        state: StateFolder,
    ) -> Iterator[dg.AssetCheckResult]:
        extract = context_for(
            spec, snowflake=snowflake, tableau=tableau, pyspark=pyspark, state=state, log=context.log.info
        )
        from tir_dagster.refresh import stages

        check_names = sorted(key.name for key in context.selected_asset_check_keys)
        # Under the lease: a refresh could remove the version that is compared.
        with stages.leased(extract, f"run {context.run.run_id}", wait_seconds=_LEASE_WAIT_SECONDS) as refresh:
            confirmed = last_confirmation(context.instance, keys.published_datasource)
            yield from _verify(refresh, confirmed, check_names)

    return verification


def published_evaluations(
    refresh: "RefreshContext", confirmation: Confirmation, keys: ExtractKeys, *, warn: Callable[..., None]
) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield check results that are known right after a publish.

    Without them, Dagster shows the checks as not evaluated after every publish. Checks that must query the source or the
    server again are left to the verification.
    """
    try:
        results = _known_at_publish(refresh, confirmation)
    except Exception as error:
        # An error here must not fail a run whose publish is confirmed.
        warn("the check results of the publish were not reported; the next verification reports them: %s", error)
        return
    yield from (evaluation(result, keys.published_datasource) for result in results)


def _known_at_publish(refresh: "RefreshContext", confirmation: Confirmation) -> list[dg.AssetCheckResult]:
    from tir_dagster.refresh.verify import ExtractVerification, Finding

    verification = ExtractVerification(refresh, confirmation)
    verified = f"Verified before the publish: the rows replaced by version {confirmation.version} equal the source at "
    equal = Finding(
        True, f"{verified}{confirmation.source_version}. {verify_job_name(refresh.spec)} compares every slice."
    )
    looked_at = {VERSION: confirmation.version}
    results = [_result(EQUALS_SOURCE, equal, dg.AssetCheckSeverity.ERROR, looked_at)]
    if UNIQUE_KEY in verification_names(refresh.spec):
        finding = verification.unique_row_key(known=True)
        results.append(_result(UNIQUE_KEY, finding, dg.AssetCheckSeverity.WARN, looked_at))
    return results


_LEASE_WAIT_SECONDS = 3600.0


def _verify(refresh: Any, confirmed: Any, check_names: Sequence[str]) -> Iterator[dg.AssetCheckResult]:
    from tir_dagster.refresh.verify import ExtractVerification, Finding, not_verified

    if confirmed is None:
        nothing = Finding(False, f"Nothing is published yet. Run tir refresh {refresh.spec.name}.", open=True)
        yield from (_result(name, nothing, dg.AssetCheckSeverity.WARN) for name in check_names)
        return
    try:
        verification = ExtractVerification(refresh, confirmed)
    except TirError as error:
        yield from (_result(name, not_verified(error), dg.AssetCheckSeverity.WARN) for name in check_names)
        return
    looked_at = {VERSION: confirmed.version}
    for name in check_names:
        severity = dg.AssetCheckSeverity.ERROR if name in (EQUALS_SOURCE, SERVER) else dg.AssetCheckSeverity.WARN
        yield _result(name, _finding(verification, name), severity, looked_at)


def _finding(verification: "ExtractVerification", name: str) -> "Finding":
    from tir_dagster.refresh.verify import not_verified

    checks = {
        EQUALS_SOURCE: verification.equals_source,
        SERVER: verification.server_holds_it,
        UNIQUE_KEY: verification.unique_row_key,
        JOINS: verification.mandatory_joins,
    }
    try:
        return checks[name]()
    except TirError as error:
        return not_verified(error)


def _result(
    name: str, finding: "Finding", severity: dg.AssetCheckSeverity, more: Mapping[str, str] = MappingProxyType({})
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=finding.passed,
        check_name=name,
        description=finding.sentence,
        # A comparison that could not be made is not drift.
        severity=dg.AssetCheckSeverity.WARN if finding.open else severity,
        metadata={**finding.counted, **_slices_shown(finding.slices), **more},
    )


def verified_finding(refresh: "RefreshContext", confirmation: Confirmation) -> "Finding":
    """Compare every slice of the confirmed version with its source; an error is a finding, too."""
    from tir_dagster.refresh.verify import ExtractVerification, not_verified

    try:
        return ExtractVerification(refresh, confirmation).equals_source()
    except TirError as error:
        return not_verified(error)


def finding_result(check: str, finding: "Finding", version: str) -> dg.AssetCheckResult:
    """Return the result of a comparison with the source or the server that a command made."""
    return _result(check, finding, dg.AssetCheckSeverity.ERROR, {VERSION: version})


def _slices_shown(slices: Any) -> dict[str, Any]:
    """Return metadata with the differences by slice, as a table."""
    if not slices:
        return {}
    lines = [f"| {name} | {'; '.join(slices[name][:3])} |" for name in sorted(slices)[:_SHOWN_SLICES]]
    table = "\n".join(["| slice | what differs |", "|---|---|", *lines])
    return {"tir/different": dg.MetadataValue.md(table), DIFFERENT: sorted(slices)}
