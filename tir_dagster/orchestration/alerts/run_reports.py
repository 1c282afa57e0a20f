"""Reports about finished runs of extracts, read from Dagster's history."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType

from tir_dagster.addresses import host_of
from tir_dagster.alerts.events import Failure, Success
from tir_dagster.alerts.text import moment
from tir_dagster.changes.plan import Reason
from tir_dagster.errors import EQUALS_SOURCE, TirError
from tir_dagster.orchestration.checks import SERVER
from tir_dagster.orchestration.metadata import SOURCE_VERSION, last_confirmation
from tir_dagster.orchestration.names import extract_keys
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.spec.alerts import Cause
from tir_dagster.spec.extract import ExtractSpec

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


def cause_of(names: Iterable[str]) -> Cause:
    """Return the cause, from the class names of the error and its causes."""
    return next((_CAUSES[name] for name in names if name in _CAUSES), Cause.STEP_FAILED)


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


def scope_of(cause: Cause, spec: ExtractSpec, env: Mapping[str, str]) -> str:
    """Return the name of the server that is down; empty for other causes."""
    if cause is Cause.SERVER_DOWN:
        return tableau_scope(spec, env)
    return snowflake_scope(env) if cause is Cause.WAREHOUSE_DOWN else ""


def tableau_scope(spec: ExtractSpec, env: Mapping[str, str]) -> str:
    return host_of(spec.datasource.server or env.get("TABLEAU_SERVER_URL", "")) or "Tableau Server"


def snowflake_scope(env: Mapping[str, str]) -> str:
    return f"Snowflake {env.get('SNOWFLAKE_ACCOUNT', '')}".strip()


def reached_servers(spec: ExtractSpec, *, published: bool) -> tuple[str, ...]:
    """Return the servers that answered a refresh; without a publish, `trigger` reads only the source."""
    source, target = snowflake_scope(os.environ), tableau_scope(spec, os.environ)
    return (source, target) if published or spec.delivery != "trigger" else (source,)


def run_url(run_id: str, env: Mapping[str, str]) -> str:
    base = env.get(URL_VARIABLE, "").rstrip("/")
    return f"{base}/runs/{run_id}" if base and run_id else ""


def unaffected(
    instance: dg.DagsterInstance, spec: ExtractSpec, home: Path, names: Sequence[str], run_id: str = ""
) -> str:
    """Say what the datasource shows after a failure by these errors, as far as it is known."""
    confirmed = last_confirmation(instance, extract_keys(spec).published_datasource)
    as_of = f", data as of {moment(confirmed.source_version)}" if confirmed else ""
    if run_id and _is_published_by(instance, spec, run_id):
        return f"this run had published the datasource before it failed{as_of}"
    if spec.delivery == "trigger" and (not names or _STARTED.intersection(names)):
        return f"Tableau's own refresh may still be under way, or be through; before{as_of or ', not refreshed'}"
    try:
        intent = ChangeSetStore(home / "extracts" / spec.name / "change_sets").intent()
    except _UNREADABLE:
        return f"what the datasource shows is not known, because the extract's state cannot be read; before{as_of}"
    if intent is not None and intent.hole is not None:
        return f"the datasource may lack rows until the next refresh puts them back; before{as_of or ', not refreshed'}"
    # When a part of a patch is refused, earlier parts may already be applied.
    if intent is not None and (intent.patch or "RefusedError" not in names):
        return (
            f"a publish was under way, and the next refresh finds out if it landed; before{as_of or ', not refreshed'}"
        )
    return f"the published datasource is unchanged{as_of}"


def _is_published_by(instance: dg.DagsterInstance, spec: ExtractSpec, run_id: str) -> bool:
    """Return whether the run's own publish step published; other steps only confirm earlier publishes."""
    key = extract_keys(spec).published_datasource
    events = _events(instance, run_id, DagsterEventType.ASSET_MATERIALIZATION)
    return any((event.asset_key, event.step_key) == (key, key.to_python_identifier()) for event in events)


def failure(
    instance: dg.DagsterInstance,
    spec: ExtractSpec,
    home: Path,
    *,
    ident: str,
    names: Sequence[str],
    sentence: str,
    at: float,
    step: str = "",
    run_id: str = "",
) -> Failure:
    """Build the report of a failure with its details; `names` are the class names of its errors."""
    cause = cause_of(names)
    return Failure(
        id=ident,
        extract=spec.name,
        cause=cause,
        sentence=sentence,
        at=at,
        step=step,
        scope=scope_of(cause, spec, os.environ),
        run_id=run_id,
        run_url=run_url(run_id, os.environ),
        datasource=f"{spec.datasource.project}/{spec.datasource.name}",
        unaffected=unaffected(instance, spec, home, names, run_id),
    )


def failures_of_run(
    instance: dg.DagsterInstance, specs: Sequence[ExtractSpec], record: dg.RunRecord, home: Path
) -> list[Failure]:
    """Return one failure per extract whose step failed; for all extracts of the run if no step failed."""
    run_id, at = record.dagster_run.run_id, record.end_time or record.update_timestamp.timestamp()
    steps = failed_steps(instance, run_id)
    failures = []
    for spec in specs:
        own = [ending for ending in steps if _is_step_of(spec, ending[0])] or (
            [] if steps else run_ending(instance, run_id)
        )
        for step, names, sentence in own[:1]:
            failures.append(
                failure(
                    instance,
                    spec,
                    home,
                    ident=f"{run_id}/{spec.name}",
                    names=names,
                    sentence=sentence,
                    at=at,
                    step=step.replace("__", " / "),
                    run_id=run_id,
                )
            )
    return failures


def _is_step_of(spec: ExtractSpec, step: str) -> bool:
    """Return whether the step belongs to the extract: a step of an asset, of its checks, or of the verification."""
    keys = tuple(key.to_python_identifier() for key in vars(extract_keys(spec)).values())
    return step == f"{spec.name}_verification" or step.startswith(keys)


Ending = tuple[str, list[str], str]


def failed_steps(instance: dg.DagsterInstance, run_id: str) -> list[Ending]:
    """Return step, names of its errors, and sentence of each failed step."""
    endings = []
    for event in _events(instance, run_id, DagsterEventType.STEP_FAILURE):
        chain = _chain(event.step_failure_data.error)
        cause = next((error for error in chain if error.cls_name not in _WRAPPERS), None)
        names = [error.cls_name or "" for error in chain]
        endings.append((event.step_key or "", names, _error_text(cause) if cause else event.message or ""))
    return endings


def run_ending(instance: dg.DagsterInstance, run_id: str) -> list[Ending]:
    """Return the error of a run that failed outside of its steps: a dead process, a blocking check, a failed launch."""
    for event in _events(instance, run_id, DagsterEventType.RUN_FAILURE):
        chain = _chain(getattr(event.event_specific_data, "error", None))
        sentence = _error_text(chain[-1]) if chain else event.message
        return [("", [error.cls_name or "" for error in chain], sentence or "the run ended without an error message")]
    return [("", [], "the run ended without an error message")]


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


def _events(instance: dg.DagsterInstance, run_id: str, kind: DagsterEventType) -> list[Any]:
    records = instance.get_records_for_run(run_id, of_type=kind).records
    return [record.event_log_entry.dagster_event for record in records if record.event_log_entry.dagster_event]


def not_verified(instance: dg.DagsterInstance, spec: ExtractSpec, run_id: str) -> str:
    """Return why the run's checks could not compare; empty if they could, whatever they found."""
    key = extract_keys(spec).published_datasource
    for event in _events(instance, run_id, DagsterEventType.ASSET_CHECK_EVALUATION):
        check = event.asset_check_evaluation_data
        # These checks fail as a warning only if they could not compare.
        compares = check.asset_key == key and check.check_name in (EQUALS_SOURCE, SERVER)
        if compares and not check.passed and check.severity is not dg.AssetCheckSeverity.ERROR:
            return check.description or f"the check {check.check_name} could not be made"
    return ""


def success_of_run(instance: dg.DagsterInstance, spec: ExtractSpec, record: dg.RunRecord, home: Path) -> Success | None:
    """Return the success of a publish, or of a run with nothing to publish; None if a refresh has yet to follow."""
    run_id, keys = record.dagster_run.run_id, extract_keys(spec)
    materializations = materialized(instance, run_id)
    at = record.end_time or record.update_timestamp.timestamp()
    success = Success(
        id=f"{run_id}/{spec.name}",
        extract=spec.name,
        at=at,
        datasource=f"{spec.datasource.project}/{spec.datasource.name}",
        run_id=run_id,
        run_url=run_url(run_id, os.environ),
        seconds=seconds_of(record),
        scopes=reached_servers(spec, published=False),
    )
    published = materializations.get(keys.published_datasource)
    if published is not None:
        return _published(instance, spec, success, published, materializations.get(keys.purged_extract, {}))
    detected = keys.changed_keys in materializations and keys.purged_extract not in materializations
    # A refresh follows a detection that found something.
    return None if detected or _is_pending(spec, home) else success


def _is_pending(spec: ExtractSpec, home: Path) -> bool:
    try:
        return bool(ChangeSetStore(home / "extracts" / spec.name / "change_sets").pending())
    except _UNREADABLE:
        # Unreadable, so treat it as not published.
        return True


def _published(
    instance: dg.DagsterInstance,
    spec: ExtractSpec,
    success: Success,
    published: Mapping[str, Any],
    applied: Mapping[str, Any],
) -> Success:
    metadata = {**applied, **published}
    reason = str(metadata.get("tir/reason") or applied.get("tir/reason") or "")
    staged, detection = _staged(instance, spec, str(applied.get("tir/change_set", "")))
    return Success(
        **{
            **vars(success),
            "published": True,
            "scopes": reached_servers(spec, published=True),
            "datasource_url": _link(metadata.get("dagster/uri")),
            "decision": str(metadata.get("tir/decision") or "incremental"),
            "reason": reason,
            "why": in_words(reason),
            "rows_purged": int(applied.get("tir/rows_purged", 0)),
            "rows_appended": int(metadata.get("tir/rows_appended", 0)),
            "rows": metadata.get("dagster/row_count"),
            "slices": tuple(staged.get("tir/slices") or ()),
            "warnings": (*(staged.get("tir/warnings") or ()), *(metadata.get("tir/warnings") or ())),
            "seconds": success.seconds + detection,
            "as_of": str(metadata.get(SOURCE_VERSION, "")),
        }
    )


def in_words(reason: str) -> str:
    """Return the plan's words for the reason of a full refresh."""
    return Reason[reason].value if reason in Reason.__members__ else ""


def _link(uri: Any) -> str:
    return uri if isinstance(uri, str) and uri.startswith(("http://", "https://")) else ""


def _staged(instance: dg.DagsterInstance, spec: ExtractSpec, change_set: str) -> tuple[Mapping[str, Any], float]:
    """Return the metadata of the staged change set, and the seconds of its detection run."""
    if not change_set:
        return {}, 0.0
    records_filter = dg.AssetRecordsFilter(asset_key=extract_keys(spec).changed_keys, asset_partitions=[change_set])
    records = instance.fetch_materializations(records_filter, limit=1).records
    if not records or records[0].asset_materialization is None:
        return {}, 0.0
    run = instance.get_run_record_by_id(records[0].run_id)
    return _plain(records[0].asset_materialization), seconds_of(run) if run else 0.0


def materialized(instance: dg.DagsterInstance, run_id: str) -> dict[dg.AssetKey, dict[str, Any]]:
    """Return the metadata of each materialized asset; partitions of one asset are merged."""
    metadata: dict[dg.AssetKey, dict[str, Any]] = {}
    for event in _events(instance, run_id, DagsterEventType.ASSET_MATERIALIZATION):
        materialization = event.step_materialization_data.materialization
        metadata[materialization.asset_key] = {**metadata.get(materialization.asset_key, {}), **_plain(materialization)}
    return metadata


def _plain(materialization: dg.AssetMaterialization) -> dict[str, Any]:
    return {name: getattr(entry, "value", None) for name, entry in materialization.metadata.items()}


def seconds_of(record: dg.RunRecord) -> float:
    return round(record.end_time - record.start_time, 3) if record.end_time and record.start_time else 0.0
