"""Reports about single runs of extracts and loads, read from Dagster's history."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import dagster as dg
from dagster import DagsterEventType

from tir_dagster.addresses import host_of
from tir_dagster.alerts.events import Failure, Recovered, Report, Success
from tir_dagster.alerts.text import moment
from tir_dagster.changes.plan import Reason
from tir_dagster.errors import EQUALS_SOURCE, TirError
from tir_dagster.orchestration.checks import SERVER
from tir_dagster.orchestration.metadata import PLAN, SOURCE_VERSION, last_confirmation
from tir_dagster.orchestration.names import (
    detect_job_name,
    extract_keys,
    load_job_name,
    load_keys,
    refresh_job_name,
    refresh_now_job_name,
    verify_job_name,
)
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.hold import HeldError
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.alerts import Cause, OthersAlerts, Topic
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec

Declaration: TypeAlias = ExtractSpec | LoadSpec

URL_VARIABLE = "TIR_DAGSTER_URL"
_CAUSES = {
    "ServerDownError": Cause.SERVER_DOWN,
    "SignInError": Cause.SERVER_DOWN,
    "SnowflakeDownError": Cause.WAREHOUSE_DOWN,
    "GuardError": Cause.GUARD,
    "SpecError": Cause.SPEC_UNFIT,
    "VerificationError": Cause.CHECK_FAILED,
    "DagsterAssetCheckFailedError": Cause.CHECK_FAILED,
    **dict.fromkeys(
        ("JobFailedError", "JobCancelledError", "JobTimeoutError", "JobVanishedError"),
        Cause.JOB_FAILED,
    ),
}
# The file is damaged, or a running refresh removes it at this moment.
_UNREADABLE = (OSError, ValueError, TypeError)
# After these errors, a job may still run on the server.
_STARTED = frozenset({"JobTimeoutError", "JobVanishedError", "UnknownOutcomeError"})
# Dagster's wrappers; the error inside has the better message.
_WRAPPERS = ("DagsterExecutionStepExecutionError", "DagsterSubprocessError", "RetryRequested")


def with_recipients(load: LoadSpec, extracts: Sequence[ExtractSpec]) -> LoadSpec:
    """Return the load with alerts: its own, or those of the first extract that reads its table.

    The people of the extract get only failures and recoveries: a successful load shows in their extract.
    """
    if load.alerts is not None:
        return load
    from tir_dagster.changes.relation import watched_tables

    table = TableName.parse(load.table)
    alerts = next((extract.alerts for extract in extracts if extract.alerts and table in watched_tables(extract)), None)
    return replace(load, alerts=OthersAlerts(**vars(alerts)) if alerts else None)


# Failures


def failure(
    spec: Declaration,
    cause: Cause,
    sentence: str,
    *,
    ident: str,
    at: float,
    run_id: str = "",
    step: str = "",
    unaffected: str = "",
    topic: Topic | None = None,
) -> Failure:
    """Build the report of a failure, with its place, its server and the address of its run."""
    return Failure(
        id=ident,
        extract=spec.name,
        cause=cause,
        sentence=sentence,
        at=at,
        step=step,
        scope=_servers(spec).get(cause, ""),
        run_id=run_id,
        run_url=_run_url(run_id),
        datasource=place_of(spec),
        unaffected=unaffected,
        topic=topic,
    )


def failure_by_errors(
    instance: dg.DagsterInstance, spec: Declaration, home: Path, names: Sequence[str], sentence: str, **fields: Any
) -> Failure:
    """Build the report of a failed refresh or load; `names` are the class names of its errors."""
    cause = cause_of(names)
    if isinstance(spec, LoadSpec):
        cause = cause if cause is Cause.WAREHOUSE_DOWN else Cause.LOAD_FAILED
        transaction = "a load is one transaction: the table has all of it or nothing"
        return failure(spec, cause, sentence, **fields, unaffected=transaction, topic="load")
    shown = unaffected(instance, spec, home, names, fields.get("run_id", ""))
    return failure(spec, cause, sentence, **fields, unaffected=shown)


def cause_of(names: Iterable[str]) -> Cause:
    """Return the cause, from the class names of the error and its causes."""
    return next((_CAUSES[name] for name in names if name in _CAUSES), Cause.STEP_FAILED)


def is_held(names: Iterable[str]) -> bool:
    """Return whether a refresh was refused because people put the extract on hold: that is no failure."""
    return HeldError.__name__ in names


def error_names(error: BaseException) -> list[str]:
    names: list[str] = []
    current: BaseException | None = error
    while current is not None and len(names) < 50:
        names += [cls.__name__ for cls in type(current).__mro__]
        current = current.__cause__ or current.__context__
    return names


def sentence_of(error: BaseException) -> str:
    """Return the error as text; errors of other packages with their class name."""
    message = str(error).strip()
    return message if isinstance(error, TirError) else f"{type(error).__name__}: {message}".rstrip(": ")


def place_of(spec: Declaration) -> str:
    return spec.table if isinstance(spec, LoadSpec) else f"{spec.datasource.project}/{spec.datasource.name}"


def snowflake_server() -> str:
    return f"Snowflake {os.environ.get('SNOWFLAKE_ACCOUNT', '')}".strip()


def _servers(spec: Declaration) -> dict[Cause, str]:
    """Return the names of the servers that the spec needs, by the cause that says that they are down."""
    if isinstance(spec, LoadSpec):
        return {Cause.WAREHOUSE_DOWN: snowflake_server()}
    tableau = host_of(spec.datasource.server or os.environ.get("TABLEAU_SERVER_URL", "")) or "Tableau Server"
    return {Cause.WAREHOUSE_DOWN: snowflake_server(), Cause.SERVER_DOWN: tableau}


def reached_servers(spec: Declaration, *, published: bool = False) -> tuple[str, ...]:
    """Return the servers that answered a refresh or a load; without a publish, `trigger` reads only the source."""
    only_source = isinstance(spec, ExtractSpec) and spec.delivery == "trigger" and not published
    return (snowflake_server(),) if only_source else tuple(_servers(spec).values())


def _run_url(run_id: str) -> str:
    base = os.environ.get(URL_VARIABLE, "").rstrip("/")
    return f"{base}/runs/{run_id}" if base and run_id else ""


def unaffected(
    instance: dg.DagsterInstance, spec: ExtractSpec, home: Path, names: Sequence[str], run_id: str = ""
) -> str:
    """Say what the datasource shows after a failure by these errors, as far as it is known."""
    confirmed = last_confirmation(instance, extract_keys(spec).published_datasource)
    as_of = f", data as of {moment(confirmed.source_version)}" if confirmed else ""
    before = f"before{as_of or ', not refreshed'}"
    if run_id and _is_published_by(instance, spec, run_id):
        return f"this run had published the datasource before it failed{as_of}"
    if spec.delivery == "trigger" and (not names or _STARTED.intersection(names)):
        return f"Tableau's own refresh may still be under way, or be through; {before}"
    try:
        intent = _change_sets(spec, home).intent()
    except _UNREADABLE:
        return f"what the datasource shows is not known, because the extract's state cannot be read; before{as_of}"
    if intent is not None and intent.hole is not None:
        return f"the datasource may lack rows until the next refresh puts them back; {before}"
    # When a part of a patch is refused, earlier parts may already be applied.
    if intent is not None and (intent.patch or "RefusedError" not in names):
        return f"a publish was under way, and the next refresh finds out if it landed; {before}"
    return f"the published datasource is unchanged{as_of}"


def _is_published_by(instance: dg.DagsterInstance, spec: ExtractSpec, run_id: str) -> bool:
    """Return whether the run's own publish step published; other steps only confirm earlier publishes."""
    key = extract_keys(spec).published_datasource
    events = _events(instance, run_id, DagsterEventType.ASSET_MATERIALIZATION)
    return any((event.asset_key, event.step_key) == (key, key.to_python_identifier()) for event in events)


def _change_sets(spec: ExtractSpec, home: Path) -> ChangeSetStore:
    return ChangeSetStore(home / "extracts" / spec.name / "change_sets")


# A run and its events


class FailedStep(NamedTuple):
    """A failed step, the class names of its errors, and its message; a run that failed outside of its steps has no step."""

    step: str
    names: list[str]
    sentence: str


class EndedRun:
    """A run in Dagster's history, and the folder of the extracts' state."""

    def __init__(self, instance: dg.DagsterInstance, record: dg.RunRecord, home: Path) -> None:
        self.instance, self.record, self.home = instance, record, home
        self.run = record.dagster_run
        self.id = self.run.run_id
        self.ended = record.end_time or record.update_timestamp.timestamp()

    def events(self, kind: DagsterEventType) -> list[Any]:
        return _events(self.instance, self.id, kind)

    @cached_property
    def asset_keys(self) -> set[dg.AssetKey]:
        """The assets of an extract's job, of selected assets, or of a user's job."""
        planned = DagsterEventType.ASSET_MATERIALIZATION_PLANNED
        return set(self.run.asset_selection or (event.asset_key for event in self.events(planned)))

    @cached_property
    def failed_steps(self) -> list[FailedStep]:
        steps = []
        for event in self.events(DagsterEventType.STEP_FAILURE):
            chain = _chain(event.step_failure_data.error)
            cause = next((error for error in chain if error.cls_name not in _WRAPPERS), None)
            sentence = _error_text(cause) if cause else event.message or ""
            steps.append(FailedStep(event.step_key or "", [error.cls_name or "" for error in chain], sentence))
        return steps

    def ending(self) -> FailedStep:
        """Return the error of a run that failed outside of its steps: a dead process, a blocking check, a failed launch."""
        sentence, chain = "", []
        for event in self.events(DagsterEventType.RUN_FAILURE)[:1]:
            chain = _chain(getattr(event.event_specific_data, "error", None))
            sentence = _error_text(chain[-1]) if chain else event.message or ""
        names = [error.cls_name or "" for error in chain]
        return FailedStep("", names, sentence or "the run ended without an error message")

    @cached_property
    def materialized(self) -> dict[dg.AssetKey, dict[str, Any]]:
        """The metadata of each materialized asset; partitions of one asset are merged."""
        metadata: dict[dg.AssetKey, dict[str, Any]] = {}
        for event in self.events(DagsterEventType.ASSET_MATERIALIZATION):
            materialization = event.step_materialization_data.materialization
            metadata.setdefault(materialization.asset_key, {}).update(_plain(materialization))
        return metadata


def _events(instance: dg.DagsterInstance, run_id: str, kind: DagsterEventType) -> list[Any]:
    records = instance.get_records_for_run(run_id, of_type=kind).records
    return [record.event_log_entry.dagster_event for record in records if record.event_log_entry.dagster_event]


def _chain(error: Any) -> list[Any]:
    chain: list[Any] = []
    while error is not None and len(chain) < 10:
        chain.append(error)
        error = error.cause or error.context
    return chain


def _error_text(error: Any) -> str:
    """Return the error's message; with its class name if it is not an error of this project."""
    message = str(error.message).strip()
    head, _, rest = message.partition(f"{error.cls_name}: ")
    return rest if rest and head.startswith("tir_dagster.") else f"{error.cls_name}: {rest or message}"


def _plain(materialization: dg.AssetMaterialization) -> dict[str, Any]:
    return {name: getattr(entry, "value", None) for name, entry in materialization.metadata.items()}


# The reports of a run


def reports_of_run(run: EndedRun, specs: Sequence[Declaration]) -> list[Report]:
    """Return the reports of a run for each extract and load that it concerns."""
    own = [spec for spec in specs if _concerns(spec, run)]
    if _only_verifies(run, own):
        verified = [_verification_of_run(run, spec) for spec in own if isinstance(spec, ExtractSpec)]
        return [report for report in verified if report is not None]
    failed = run.run.status is dg.DagsterRunStatus.FAILURE
    failures = {spec.name: found for spec in own if failed and (found := failure_of_run(run, spec)) is not None}
    # Other assets in the run do not count as a refresh of the extract.
    others = [spec for spec in own if spec.name not in failures and _works_on(spec, run)]
    successes = [success for spec in others if (success := success_of_run(run, spec)) is not None]
    # Of a failed run, only those count that published although another step failed.
    return [*failures.values(), *(success for success in successes if success.published or not failed)]


def _concerns(spec: Declaration, run: EndedRun) -> bool:
    """Return whether the run belongs to the spec, by its job or its assets."""
    if isinstance(spec, LoadSpec):
        return _works_on(spec, run)
    checked = {key.asset_key for key in run.run.asset_check_selection or ()}
    return (
        _works_on(spec, run)
        or run.run.job_name == verify_job_name(spec)
        or any(key.path[0] == spec.name and len(key.path) == 2 for key in run.asset_keys)
        or extract_keys(spec).published_datasource in checked
    )


def job_names(spec: Declaration) -> tuple[str, ...]:
    """Return the jobs that load, or refresh."""
    if isinstance(spec, LoadSpec):
        return (load_job_name(spec),)
    return detect_job_name(spec), refresh_job_name(spec), refresh_now_job_name(spec)


def _works_on(spec: Declaration, run: EndedRun) -> bool:
    """Return whether the run loads, or refreshes."""
    if isinstance(spec, LoadSpec):
        own = {load_keys(spec).source_table}
    else:
        keys = extract_keys(spec)
        own = {keys.changed_keys, keys.purged_extract, keys.published_datasource}
    return run.run.job_name in job_names(spec) or bool(run.asset_keys & own)


def _only_verifies(run: EndedRun, specs: Sequence[Declaration]) -> bool:
    by_job = any(run.run.job_name == verify_job_name(spec) for spec in specs if isinstance(spec, ExtractSpec))
    return not run.asset_keys and (by_job or bool(run.run.asset_check_selection))


def failure_of_run(run: EndedRun, spec: Declaration) -> Failure | None:
    """Return the failure of the spec's step, or of a run without a failed step; None if only other steps failed, or on hold."""
    own = [failed for failed in run.failed_steps if _is_step_of(spec, failed.step)]
    if run.failed_steps and not own:
        return None
    step, names, sentence = own[0] if own else run.ending()
    if is_held(names):
        return None
    fields = {"ident": f"{run.id}/{spec.name}", "at": run.ended, "step": step.replace("__", " / "), "run_id": run.id}
    return failure_by_errors(run.instance, spec, run.home, names, sentence, **fields)


def _is_step_of(spec: Declaration, step: str) -> bool:
    """Return whether the step belongs to the spec: a step of an asset, of its checks, or of the verification."""
    if isinstance(spec, LoadSpec):
        return step == load_keys(spec).source_table.to_python_identifier()
    keys = tuple(key.to_python_identifier() for key in vars(extract_keys(spec)).values())
    return step == f"{spec.name}_verification" or step.startswith(keys)


def _verification_of_run(run: EndedRun, spec: ExtractSpec) -> Report | None:
    """Return whether the run's checks could compare; `history` reports the drift that they found."""
    if run.run.status is dg.DagsterRunStatus.FAILURE:
        failed = failure_of_run(run, spec)
        if failed is None:
            return None
        cause = failed.cause if failed.cause.is_whole_server else Cause.UNVERIFIED
        # A verification changes nothing, so `unaffected` stays empty.
        return replace(failed, topic="verification", cause=cause, unaffected="")
    if last_confirmation(run.instance, extract_keys(spec).published_datasource) is None:
        # Nothing published yet, so nothing to verify.
        return None
    if reason := _not_verified(run, spec):
        # A run succeeds although its checks could not read Snowflake or Tableau.
        ident = f"{run.id}/{spec.name}"
        return failure(spec, Cause.UNVERIFIED, reason, ident=ident, at=run.ended, run_id=run.id)
    return Recovered(f"{run.id}/{spec.name}/verified", spec.name, "verification", run.ended)


def _not_verified(run: EndedRun, spec: ExtractSpec) -> str:
    """Return why the run's checks could not compare; empty if they could, whatever they found."""
    key = extract_keys(spec).published_datasource
    for event in run.events(DagsterEventType.ASSET_CHECK_EVALUATION):
        check = event.asset_check_evaluation_data
        # These checks fail as a warning only if they could not compare.
        compares = check.asset_key == key and check.check_name in (EQUALS_SOURCE, SERVER)
        if compares and not check.passed and check.severity is not dg.AssetCheckSeverity.ERROR:
            return check.description or f"the check {check.check_name} could not be made"
    return ""


def success_of_run(run: EndedRun, spec: Declaration) -> Success | None:
    """Return the success of a load, of a publish, or of a run with nothing to publish; None if a refresh has yet to follow."""
    success = Success(
        id=f"{run.id}/{spec.name}",
        extract=spec.name,
        at=run.ended,
        datasource=place_of(spec),
        run_id=run.id,
        run_url=_run_url(run.id),
        seconds=_seconds(run.record),
        scopes=reached_servers(spec),
    )
    if isinstance(spec, LoadSpec):
        loaded = run.materialized.get(load_keys(spec).source_table)
        return replace(success, of="load", published=loaded is not None, facts=_load_facts(loaded or {}))
    keys = extract_keys(spec)
    if keys.published_datasource in run.materialized:
        return _published(run, spec, success)
    detected = keys.changed_keys in run.materialized and keys.purged_extract not in run.materialized
    # A refresh follows a detection that found something.
    return None if detected or _is_pending(spec, run.home) else success


def _load_facts(metadata: Mapping[str, Any]) -> dict[str, str]:
    counted = ((kind, metadata.get(f"tir/rows_{kind}")) for kind in ("inserted", "updated", "deleted", "rejected"))
    rows = ", ".join(f"{int(count):,} {kind}" for kind, count in counted if count)
    files = metadata.get("tir/files")
    return {**({"Files": str(len(files))} if isinstance(files, list) else {}), **({"Rows": rows} if rows else {})}


def _is_pending(spec: ExtractSpec, home: Path) -> bool:
    try:
        return bool(_change_sets(spec, home).pending())
    except _UNREADABLE:
        # Unreadable, so treat it as not published.
        return True


def _published(run: EndedRun, spec: ExtractSpec, success: Success) -> Success:
    keys = extract_keys(spec)
    applied = run.materialized.get(keys.purged_extract, {})
    metadata = {**applied, **run.materialized[keys.published_datasource]}
    decision = str(metadata.get("tir/decision") or "incremental")
    reason = str(metadata.get("tir/reason") or applied.get("tir/reason") or "")
    staged, detection = _staged(run.instance, spec, str(applied.get("tir/change_set", "")))
    uri = metadata.get("dagster/uri")
    return replace(
        success,
        published=True,
        scopes=reached_servers(spec, published=True),
        datasource_url=uri if isinstance(uri, str) and uri.startswith(("http://", "https://")) else "",
        decision=decision,
        reason=reason,
        why=str(metadata.get(PLAN, "")) if decision == "rollback" else in_words(reason),
        rows_purged=int(applied.get("tir/rows_purged", 0)),
        rows_appended=int(metadata.get("tir/rows_appended", 0)),
        rows=metadata.get("dagster/row_count"),
        slices=tuple(staged.get("tir/slices") or ()),
        warnings=(*(staged.get("tir/warnings") or ()), *(metadata.get("tir/warnings") or ())),
        seconds=success.seconds + detection,
        as_of=str(metadata.get(SOURCE_VERSION, "")),
    )


def in_words(reason: str) -> str:
    """Return the plan's words for the reason of a full refresh."""
    return Reason[reason].value if reason in Reason.__members__ else ""


def _staged(instance: dg.DagsterInstance, spec: ExtractSpec, change_set: str) -> tuple[Mapping[str, Any], float]:
    """Return the metadata of the staged change set, and the seconds of its detection run."""
    if not change_set:
        return {}, 0.0
    records_filter = dg.AssetRecordsFilter(asset_key=extract_keys(spec).changed_keys, asset_partitions=[change_set])
    records = instance.fetch_materializations(records_filter, limit=1).records
    if not records or records[0].asset_materialization is None:
        return {}, 0.0
    run = instance.get_run_record_by_id(records[0].run_id)
    return _plain(records[0].asset_materialization), _seconds(run) if run else 0.0


def _seconds(record: dg.RunRecord) -> float:
    return round(record.end_time - record.start_time, 3) if record.end_time and record.start_time else 0.0
