"""Detection: survey the source, decide, find the differing keys, and make a durable change set of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes.changesets import ChangeSetStore
from tir_dagster.changes.find import Question, Stats, find_changes
from tir_dagster.changes.plan import Known, Plan, check_guards, settle_plan
from tir_dagster.changes.state import ChangeSet, Confirmation, counts_to_json, stats_to_json
from tir_dagster.errors import GuardError, SourceError, SpecError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import TableName, quote
from tir_dagster.source.pinned import PinnedTable, sql_literal
from tir_dagster.source.slices import SliceBy, slice_column
from tir_dagster.source.versions import SourceVersion, describe, probe, table_identity
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tir_dagster.changes.workbench import SparkWorkbench

MARGIN_SECONDS = 1.0
QUIET_TRIES = 30
KEYS, ROWS, LEDGER, _WORK = "keys", "rows", "ledger", "work"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Survey:
    """What the source looks like now, found without Spark and without reading a row."""

    spec: ExtractSpec
    table: TableName
    columns: tuple[Column, ...]
    key: tuple[Column, ...]
    slices: SliceBy
    watermark: Column | None
    known: Known
    version: SourceVersion

    @property
    def source(self) -> PinnedTable:
        return PinnedTable(self.table, self.columns, self.key, self.slices, self.watermark, self.version)


@dataclass(frozen=True)
class Base:
    """The extract version a change set starts from, as last confirmed."""

    confirmation: Confirmation
    ledger: Path
    stats: Stats

    @property
    def rows(self) -> int:
        return sum(count for count, _ in self.stats.values())


def survey(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    *,
    columns: Sequence[str] = (),
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> Survey:
    """Look at the source: its columns, its identity, its change token, and a quiet moment to pin."""
    table = TableName.parse(spec.source)
    shown = describe(access, table, tuple(columns) or spec.columns or None)
    named = {column.name: column for column in shown}
    key = tuple(_column(spec, named, name, "row_key") for name in spec.row_key)
    watermark = _watermark(spec, access, table) if spec.changes.watermark else None
    slice_name = _column(spec, named, spec.slices.column, "slices.column").name if spec.slices.column else None
    slices = SliceBy(slice_name, spec.slices.by, spec.slices.zone)
    slice_column(slices, shown)
    token, version = quiet_moment(spec, access, table, log, sleep)
    known = Known(
        definition=definition_of(spec),
        schema=_digest([(column.name, column.kind.value, column.precision, column.scale) for column in shown]),
        identity=table_identity(access, table),
        token=token,
    )
    return Survey(spec, table, shown, key, slices, watermark, known, version)


# A watermark must grow with the changes; of these, texts and times of day do not.
_WATERMARKS = (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT, Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT)


def _watermark(spec: ExtractSpec, access: SnowflakeAccess, table: TableName) -> Column:
    """The watermark's column, which the extract itself may leave out."""
    (column,) = describe(access, table, [spec.changes.watermark or ""])
    if column.kind not in _WATERMARKS:
        raise SpecError(
            f"{spec.name}: changes.watermark names {column.name}, which holds {column.kind.value}. Name a number, date or "
            "timestamp that every change raises, or leave it out: then every row is compared."
        )
    return column


def definition_of(spec: ExtractSpec) -> str:
    """A digest of everything in the spec that decides which rows the extract shows and how they are kept."""
    value = asdict(spec) | {"watermark": spec.changes.watermark}
    # Tableau itself decides what a triggered refresh shows: here it counts what is watched, and what is refreshed.
    triggered = spec.delivery == "trigger"
    names = ("source", "watch", "datasource") if triggered else ("source", "columns", "row_key", "slices", "watermark")
    return _digest({name: value[name] for name in names})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _column(spec: ExtractSpec, columns: dict[str, Column], name: str, field: str) -> Column:
    found = columns.get(name) or columns.get(name.upper())
    if found is None:
        raise SpecError(
            f"{spec.name}: {field} names {name}, which {spec.source} does not have. It has {', '.join(columns)}."
        )
    return found


def quiet_moment(
    spec: ExtractSpec, access: SnowflakeAccess, table: TableName, log: Log, sleep: Callable[[float], None]
) -> tuple[str, SourceVersion]:
    """The change token and a version that surely shows the change it stands for.

    The token is read first: a change that comes later can then be in the version but not in the token, which costs
    a look next time; the other way round it would be lost.
    """
    quiet = max(spec.thresholds.quiet_period, MARGIN_SECONDS)
    for _ in range(QUIET_TRIES):
        found = probe(access, [table])[table]
        if found.token is None:
            raise SourceError(found.problem or f"{table} gives no change token.")
        now, altered = _clock(access, table)
        age = (now - altered).total_seconds()
        if age >= quiet:
            return found.token, SourceVersion(now - timedelta(seconds=MARGIN_SECONDS))
        log(f"{table} changed {age:.1f} s ago; waiting until it has been quiet for {quiet:g} s")
        sleep(quiet - age + 0.05)
    raise GuardError(
        f"{spec.name}: {table} keeps changing: it was never quiet for {quiet:g} seconds. Nothing was touched. "
        "Refresh when its load is done, or lower thresholds.quiet_period in the spec."
    )


def _clock(access: SnowflakeAccess, table: TableName) -> tuple[datetime, datetime]:
    rows = access.query(
        f"SELECT CURRENT_TIMESTAMP()::TIMESTAMP_TZ, LAST_ALTERED::TIMESTAMP_TZ "
        f"FROM {quote(table.database)}.INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (table.schema, table.name),
    )
    if not rows:
        raise SourceError(f"{table} does not exist, or the role may not see it. Check the name and the grants.")
    return rows[0][0], rows[0][1]


def make_change_set(
    surveyed: Survey,
    plan: Plan,
    *,
    ident: str,
    access: SnowflakeAccess,
    spark: SparkSession,
    store: ChangeSetStore,
    base: Base | None,
    confirmed: Confirmation | None,
    resync: Sequence[str | None] = (),
    allow_empty: bool = False,
    log: Log,
) -> tuple[Plan, ChangeSet | None]:
    """Read what the plan needs and make it durable; gives the settled plan, and no change set if nothing differs."""
    # Here and not above: a plan needs no Spark, and importing it takes seconds.
    from tir_dagster.changes.workbench import SparkWorkbench  # noqa: PLC0415

    pending = store.pending()
    with store.staging(ident) as folder:
        bench = SparkWorkbench(
            spark,
            access,
            surveyed.source,
            folder=folder / _WORK,
            ledger=base.ledger if base else None,
            log=log,
        )
        try:
            if plan.decision == "incremental" and base is not None:
                plan, stats, counts = _find(
                    bench, surveyed, plan, base, store, pending, resync, folder, allow_empty=allow_empty
                )
            if plan.decision == "none":
                return plan, None
            if plan.decision == "full":
                before = confirmed.rows if confirmed else 0
                stats, counts = _read_all(bench, surveyed, base, folder, before=before, allow_empty=allow_empty)
            watermark = _highest_watermark(access, surveyed.source)
        finally:
            bench.close()
        shutil.rmtree(folder / _WORK, ignore_errors=True)
        made = ChangeSet(
            id=ident,
            extract=surveyed.spec.name,
            base=confirmed.version if confirmed else None,
            source_version=str(surveyed.version),
            known=surveyed.known,
            mode=plan.mode,
            decision=plan.decision,
            reason=plan.reason.name if plan.reason else None,
            keys=plan.keys or 0,
            rows=sum(counts[1].values()),
            purged=counts[0],
            appended=counts[1],
            ledger_stats=stats_to_json(stats),
            watermark=watermark,
            settles=tuple(one.id for one in pending),
            warnings=plan.warnings,
            sentence=plan.sentence(),
        )
        return plan, store.commit(made, folder)


Counts = tuple[dict[str, int], dict[str, int]]


def _find(
    bench: SparkWorkbench,
    surveyed: Survey,
    plan: Plan,
    base: Base,
    store: ChangeSetStore,
    pending: Sequence[ChangeSet],
    resync: Sequence[str | None],
    folder: Path,
    *,
    allow_empty: bool,
) -> tuple[Plan, Stats, Counts]:
    keyed = [one.id for one in pending if one.decision == "incremental"]
    bench.load_pending([store.path(name) / KEYS for name in keyed])
    question = Question(
        since=_since(surveyed, base.confirmation),
        deletes=surveyed.spec.changes.deletes,
        resync=tuple(resync),
        pending=bool(keyed),
    )
    found = find_changes(bench, question, base.stats)
    thresholds = surveyed.spec.thresholds
    settled = settle_plan(
        plan,
        found,
        base.stats,
        policy=surveyed.spec.policy,
        delete_share=thresholds.delete_share,
        full_share=thresholds.full_share,
        pending=bool(keyed),
        allow_empty=allow_empty,
    )
    warnings = _key_warnings(bench, surveyed) if settled.decision == "incremental" else ()
    settled = replace(settled, warnings=(*settled.warnings, *warnings))
    if settled.decision == "incremental":
        bench.write_keys("changed", folder / KEYS)
        bench.write_rows("changed", folder / ROWS)
        bench.write_ledger("ledger_after", folder / LEDGER, found.slices)
    after = found.after(base.stats)
    return settled, after, (counts_to_json(found.purged), counts_to_json(found.appended))


def _read_all(
    bench: SparkWorkbench, surveyed: Survey, base: Base | None, folder: Path, *, before: int, allow_empty: bool
) -> tuple[Stats, Counts]:
    staged = bench.read_all(ROWS)
    if before and not allow_empty:
        # Also where our own version is lost: what people see now is known.
        share = surveyed.spec.thresholds.delete_share
        check_guards(surveyed.spec.name, rows=before, left=staged.rows, delete_share=share)
    if not before and staged.rows == 0 and not allow_empty:
        raise GuardError(
            f"{surveyed.spec.name}: {surveyed.table} is empty. Nothing was touched. "
            f"Load it first; if it is meant to be empty, say so: tir refresh {surveyed.spec.name} --allow-empty."
        )
    stats = bench.stats(ROWS)
    bench.write_ledger(ROWS, folder / LEDGER, None)
    (folder / _WORK / ROWS).rename(folder / ROWS)
    purged = counts_to_json(base.stats) if base else {}
    return stats, (purged, counts_to_json(stats))


def _key_warnings(bench: SparkWorkbench, surveyed: Survey) -> tuple[str, ...]:
    """NULLs and duplicates in the row key are replaced null-safely and as bags; people should know of them."""
    if not surveyed.key:
        return ()
    nulls, repeated = bench.odd_keys("fresh")
    names = ", ".join(surveyed.spec.row_key)
    warnings = [f"{nulls:,} changed rows have a NULL in the row key ({names})."] if nulls else []
    warnings += [f"{repeated:,} changed keys have more than one row ({names} is not unique)."] if repeated else []
    return tuple(warnings)


# A time without a zone may be any wall clock's.
_FURTHEST_CLOCK = timedelta(hours=14)


def _since(surveyed: Survey, confirmed: Confirmation) -> str | None:
    """From where on rows are candidates: the last confirmed watermark minus the look-back, as an SQL literal.

    A stamp in the future would hide every update until then: it counts as the moment it was read at. A time without a
    zone is in the future only where no clock on earth shows it yet.
    """
    column, highest = surveyed.watermark, confirmed.watermark
    if column is None or highest is None:
        return None
    back = timedelta(seconds=surveyed.spec.changes.look_back)
    read = SourceVersion.parse(confirmed.source_version).moment
    wall = read.replace(tzinfo=None)
    if column.kind is Kind.DATE:
        day = date.fromisoformat(highest)
        day = day if day <= (wall + _FURTHEST_CLOCK).date() else (wall - _FURTHEST_CLOCK).date()
        return sql_literal(column, day - timedelta(days=-(-back // timedelta(days=1))))
    if column.kind in (Kind.TIMESTAMP, Kind.INSTANT):
        stamp = datetime.fromisoformat(highest)
        if stamp.tzinfo:
            return sql_literal(column, min(stamp, read) - back)
        return sql_literal(column, (stamp if stamp <= wall + _FURTHEST_CLOCK else wall - _FURTHEST_CLOCK) - back)
    return sql_literal(column, highest)


def _highest_watermark(access: SnowflakeAccess, source: PinnedTable) -> str | None:
    if source.watermark is None:
        return None
    value = access.query(f"SELECT MAX({quote(source.watermark.name)}) FROM {source.pinned}")[0][0]
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).isoformat(timespec="microseconds")
    return None if value is None else str(value)
