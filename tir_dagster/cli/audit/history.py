"""The work of `tir history` and `tir why`: what Dagster's log, the kept versions and the kept change sets tell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.cli.kept_revisions import list_revisions
from tir_dagster.cli.refresh import LEASE_WAIT_SECONDS
from tir_dagster.errors import ExtractError, SpecError, TirError
from tir_dagster.hyper.differences import shown_key
from tir_dagster.orchestration.checks import drift_sentence, verified_slices
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import confirmed_events, last_confirmation
from tir_dagster.orchestration.names import TOLD_BY_COMMAND, extract_keys
from tir_dagster.refresh.context import RefreshContext, leased, refresh_context, shape_of
from tir_dagster.refresh.deliveries.trigger import no_spark
from tir_dagster.refresh.state.history import HistoryEntry
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.why import Row, current_rows, parse_key, why_key, why_slice
from tir_dagster.snowflake.columns import Kind
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.datasources import ServerVersion


@dataclass(frozen=True)
class PublishedVersion:
    """One publish: the version, what it shows, how it came about, and where it can still be found."""

    version: str
    confirmed_at: str
    source_version: str
    rows: int
    decision: str
    reason: str | None
    rows_purged: int | None
    rows_appended: int | None
    started_by: str
    run_id: str
    # Slices that were compared with the source as a whole, of all slices; the replaced rows always are.
    slices_compared: int | None
    slices: int | None
    kept_here: bool
    revision: int | None
    published: bool


@dataclass(frozen=True)
class History:
    """What was published, the newest first; and the hold, if there is one."""

    extract: str
    hold: str | None
    versions: list[PublishedVersion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def context_of(spec: ExtractSpec) -> RefreshContext:
    """Return the extract's context for reading its state."""
    return refresh_context(
        spec,
        snowflake=SnowflakeAccess.from_environment(os.environ),
        tableau=TableauAccess.from_environment(os.environ),
        spark=no_spark,
        home=tir_home(),
    )


def list_history(spec: ExtractSpec, instance: dg.DagsterInstance, *, limit: int) -> History:
    """Return the confirmed versions of the extract with what is known of them."""
    context, notes = context_of(spec), []
    events = list(confirmed_events(instance, extract_keys(spec).published_datasource))[:limit]
    kept = {version.id for version in context.versions.versions()}
    entries = {entry.version: entry for entry in context.history.entries()}
    verified = verified_slices(instance, extract_keys(spec))
    try:
        revisions = {entry.number for entry in list_revisions(spec, instance).revisions or ()}
    except TirError as error:
        revisions = set()
        notes.append(f"The server's revisions are unknown: {error}")
    hold = context.hold.read()
    versions = []
    for place, event in enumerate(events):
        confirmation, metadata = event.confirmation, event.metadata
        manifest = entries[confirmation.version].manifest if confirmation.version in entries else {}
        revision = _revision(confirmation.server_version)
        versions.append(
            PublishedVersion(
                version=confirmation.version,
                confirmed_at=datetime.fromtimestamp(event.timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                source_version=confirmation.source_version,
                rows=confirmation.rows,
                decision=str(metadata.get("tir/decision") or _decision(entries.get(confirmation.version))),
                reason=metadata.get("tir/reason") or _reason(entries.get(confirmation.version)),
                rows_purged=manifest.get("rows_purged"),
                rows_appended=manifest.get("rows_appended"),
                started_by=_starter(instance, event.run_id),
                run_id=event.run_id,
                slices_compared=_compared(manifest, verified.get(confirmation.version)),
                slices=_count(manifest, "slice_rows"),
                kept_here=confirmation.version in kept,
                revision=revision if revision in revisions else None,
                published=place == 0,
            )
        )
    return History(spec.name, hold.sentence(spec.name) if hold else None, versions, notes)


def _compared(manifest: Mapping[str, Any], verified: int | None) -> int | None:
    """Return how many slices were compared as a whole: when the version was made, or by a verification since then."""
    compared = _count(manifest, "compared")
    return verified if compared is None else max(compared, verified or 0)


def _count(manifest: Mapping[str, Any], name: str) -> int | None:
    """Return how many slices there are, of all tables; None where it is not known."""
    parts = (manifest.get("tables") or {"": manifest}).values()
    return sum(len(part[name]) for part in parts) if all(name in part for part in parts) else None


def _decision(entry: HistoryEntry | None) -> str:
    return entry.change_set.decision if entry is not None and entry.change_set is not None else "unknown"


def _reason(entry: HistoryEntry | None) -> str | None:
    return entry.change_set.reason if entry is not None and entry.change_set is not None else None


def _revision(server_version: str) -> int | None:
    try:
        return ServerVersion.parse(server_version).revision
    except ValueError:
        return None


def _starter(instance: dg.DagsterInstance, run_id: str) -> str:
    """Say who or what started the run."""
    run = instance.get_run_by_id(run_id) if run_id else None
    if run is None:
        return "a run that was deleted" if run_id else "recorded without a run"
    tags = run.tags
    for tag, word in (
        ("dagster/sensor_name", "sensor"),
        ("dagster/schedule_name", "schedule"),
        ("dagster/backfill", "backfill"),
        ("user", "user"),
    ):
        if tag in tags:
            return tags[tag] if tags[tag].startswith("tir ") else f"{word} {tags[tag]}"
    if tags.get(TOLD_BY_COMMAND) == run_id:
        return "tir rollback" if run.job_name.endswith("_rollback") else "tir refresh"
    return f"a run of {run.job_name}"


def history_lines(history: History) -> list[str]:
    """Return the history for people."""
    lines = [f"{history.extract}: {'nothing was published yet' if not history.versions else 'what was published'}"]
    for version in history.versions:
        moved = (
            ""
            if version.rows_purged is None
            else f", {version.rows_purged:,} rows removed, {version.rows_appended:,} added"
        )
        reason = f" ({version.reason})" if version.reason else ""
        where = [
            *(["published"] if version.published else []),
            *(["kept here"] if version.kept_here else []),
            *([f"revision {version.revision} on the server"] if version.revision is not None else []),
        ]
        compared = (
            f"; {version.slices_compared} of {version.slices} slices compared whole"
            if version.slices_compared is not None
            else ""
        )
        lines.append(
            f"  {version.version}  {version.confirmed_at}  {version.rows:>12,} rows  {version.decision}{reason}{moved}"
        )
        lines.append(
            f"      source at {version.source_version}; by {version.started_by}{compared}; {', '.join(where) or 'no longer kept'}"
        )
    lines += [f"on hold: {history.hold}"] if history.hold else []
    return [*lines, *history.notes]


@dataclass(frozen=True)
class WhyStep:
    """What one refresh did."""

    version: str
    confirmed_at: str
    source_version: str
    what: str
    announced_by: list[str]
    # By column: the value before and after, where the row was changed.
    changes: dict[str, list[str | None]] = field(default_factory=dict)
    before: list[dict[str, str | None]] | None = None
    after: list[dict[str, str | None]] | None = None
    rows_removed: int | None = None
    rows_added: int | None = None
    sum_change: str | None = None


@dataclass(frozen=True)
class Why:
    """The answer: what refreshes did, the newest first, and what is published now."""

    extract: str
    subject: str
    steps: list[WhyStep]
    now: list[dict[str, str | None]] | None
    since: str | None
    column: str | None = None
    # What is known to be wrong with what is published.
    known: str | None = None


def tell_why(
    spec: ExtractSpec,
    instance: dg.DagsterInstance,
    *,
    keys: Sequence[str],
    slice_name: str | None,
    column: str | None,
    table: str | None = None,
) -> Why:
    """Return what refreshes did to a row, or to a slice."""
    # Hyper opens a file for one process only: a refresh that begins meanwhile would fail.
    with leased(context_of(spec), "tir why", wait_seconds=LEASE_WAIT_SECONDS) as context:
        return _tell_why(context, instance, keys=keys, slice_name=slice_name, column=column, table=table)


def _tell_why(
    context: RefreshContext,
    instance: dg.DagsterInstance,
    *,
    keys: Sequence[str],
    slice_name: str | None,
    column: str | None,
    table: str | None = None,
) -> Why:
    spec = context.spec
    confirmed = last_confirmation(instance, extract_keys(spec).published_datasource)
    version = context.known_version(confirmed.version) if confirmed else None
    if version is None:
        raise ExtractError(f"{spec.name}: no published version is kept here. Run tir refresh {spec.name}.")
    version, table = _of_table(spec, version, table)
    shape = shape_of(version)
    if column is not None:
        names = {name.upper(): name for name in (c.name for c in shape.columns)}
        if column.upper() not in names:
            raise SpecError(f"{spec.name} has no column {column!r}. It has {', '.join(names.values())}.")
        column = names[column.upper()]
        kind = next(each.kind for each in shape.columns if each.name == column)
        if slice_name is not None and kind not in (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT):
            raise SpecError(
                f"{column} is of type {kind.value}, which has no sum. Name a column of numbers, or leave --column out."
            )
    known = drift_sentence(instance, spec, extract_keys(spec), confirmed)
    entries = context.history.entries()
    since = min((entry.confirmed_at for entry in entries), default=None)
    oldest = since.strftime("%Y-%m-%d %H:%M UTC") if since else None
    if slice_name is not None:
        key = NO_SLICE_KEY if slice_name == slice_label(NO_SLICE_KEY) else slice_name
        steps = [
            _step(
                change.entry,
                "replaced rows",
                rows_removed=change.purged,
                rows_added=change.appended,
                sum_change=None if change.sum_change is None else f"{change.sum_change:+f}",
            )
            for change in why_slice(context, shape, key, column, table=table)
        ]
        subject = f"{table and f'{table}, '}slice {slice_name}"
        return Why(spec.name, subject, steps, None, oldest, column, known)
    values = parse_key(shape, keys)
    steps = []
    for change in why_key(context, shape, values, table=table):
        if column is not None and change.kind == "changed" and column not in change.changed_columns:
            continue
        before, after = (
            None if rows is None else [_texts(row) for row in rows] for rows in (change.before, change.after)
        )
        changes = {
            name: [_text(change.before[0].get(name)), _text(change.after[0][name])]
            for name in change.changed_columns
            if change.before and change.after and (column is None or name == column)
        }
        steps.append(_step(change.entry, change.kind, changes=changes, before=before, after=after))
    subject = f"{table and f'{table}, '}{shown_key(shape.key, values)}"
    return Why(spec.name, subject, steps, [_texts(row) for row in current_rows(version, values)], oldest, column, known)


def _of_table(spec: ExtractSpec, version: Version, table: str | None) -> tuple[Version, str]:
    """Return the version as one of the named table, and the table's name; the main one if none is named."""
    if table is None:
        table = version.tables[0]
    known = next((name for name in version.tables if name and name.casefold() == table.casefold()), "")
    if table and not known:
        has = (
            f"It has {', '.join(version.tables)}." if version.tables != ("",) else "It has only one: leave --table out."
        )
        raise SpecError(f"{spec.name} has no table {table!r}. {has}")
    return version.of(known), known


def _step(entry: HistoryEntry, what: str, **fields: Any) -> WhyStep:
    origin = list(entry.change_set.origin) if entry.change_set is not None else []
    if entry.change_set is None:
        what = f"{what} by a rollback to {entry.manifest.get('rolled_back_to')}"
    elif entry.change_set.decision == "full":
        what = f"{what} by a full load" + (f" ({entry.change_set.reason})" if entry.change_set.reason else "")
    moment = entry.confirmed_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return WhyStep(entry.version, moment, entry.source_version, what, origin, **fields)


def _texts(row: Row) -> dict[str, str | None]:
    return {name: _text(value) for name, value in row.items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def why_lines(why: Why) -> list[str]:
    """Return the answer for people."""
    lines = [f"{why.extract}: {why.subject}"]
    for step in why.steps:
        lines.append(f"  {step.version}  {step.confirmed_at}  {_what(step)}; source at {step.source_version}")
        lines += [
            f"      {name}: {'NULL' if old is None else old} → {'NULL' if new is None else new}"
            for name, (old, new) in step.changes.items()
        ]
        for label, rows in (("before", step.before), ("after", step.after)):
            if not step.changes:
                lines += [f"      {label}: {_row_text(row, why.column)}" for row in rows or ()]
        lines += [f"      announced by {announcement}" for announcement in step.announced_by]
    if why.now is not None:
        lines.append(f"  now: {'; '.join(_row_text(row, why.column) for row in why.now) or 'no row of this key'}")
    if why.known:
        lines.append(f"  known: {why.known}")
    reach = f"The history reaches back to {why.since}" if why.since else "There is no history yet"
    changed = "" if why.steps else "; no refresh since then changed it"
    return [*lines, f"{reach}{changed}."]


def _what(step: WhyStep) -> str:
    if step.rows_removed is None:
        return step.what if step.rows_added is None else f"{step.what}: {step.rows_added:,} rows since then"
    total = f", {step.sum_change} to the sum" if step.sum_change is not None else ""
    return f"{step.rows_removed:,} rows removed, {step.rows_added:,} added{total}"


def _row_text(row: dict[str, str | None], column: str | None) -> str:
    chosen = {column: row.get(column)} if column is not None else row
    return shown_key(chosen, list(chosen.values()))
