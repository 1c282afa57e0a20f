"""Detection: survey the source, decide, find the differing keys, and make a durable change set of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes import sets
from tir_dagster.changes.changesets import ChangeSetStore
from tir_dagster.changes.contracts import refuse_duplicates
from tir_dagster.changes.described import checked_hints
from tir_dagster.changes.doubts import key_warnings, partial_warnings
from tir_dagster.changes.find import Question, Stats, find_changes
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.marks import highest_mark
from tir_dagster.changes.plan import Known, Plan, check_guards, settle_plan
from tir_dagster.changes.propose import looks_for_deletes, propose
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.state import ChangeSet, Confirmation, counts_to_json, stats_to_json
from tir_dagster.errors import GuardError, SourceError
from tir_dagster.source.columns import Column
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import TableName, quote
from tir_dagster.source.pinned import PinnedSource
from tir_dagster.source.versions import Probe, SourceVersion, probe, table_identity
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tir_dagster.changes.workbench import SparkWorkbench

MARGIN_SECONDS = 1.0
QUIET_TRIES = 30
# `keys` are purged from the extract; `ledger_keys` are those of the rows that the ledger knows, which differ if aggregated.
KEYS, LEDGER_KEYS, ROWS, LEDGER, _WORK = "keys", "ledger_keys", "rows", "ledger", "work"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Survey:
    """What the source looks like now, found without Spark and without reading a row."""

    spec: ExtractSpec
    relation: Relation
    known: Known
    version: SourceVersion

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.relation.columns

    @property
    def source(self) -> PinnedSource:
        return self.relation.base(self.version)

    @property
    def shown(self) -> PinnedSource:
        """The rows that people see; where they are aggregated, not those that the ledger knows."""
        relation = self.relation
        return PinnedSource(
            relation.shown(self.version), relation.columns, relation.key, relation.slices, None, self.version
        )

    def changed(self, since: Known) -> set[TableName]:
        """The tables whose token is another one than then."""
        before, now = since.token.split(","), self.known.token.split(",")
        tables = self.relation.tables
        return {table for table, one, other in zip(tables, before, now, strict=False) if one != other}


@dataclass(frozen=True)
class Base:
    """The extract version a change set starts from, as last confirmed."""

    confirmation: Confirmation
    ledger: Path
    stats: Stats
    # Rows that people see by slice, as JSON names them; where they are aggregated, not those that the ledger knows.
    shown: Mapping[str, int] = field(default_factory=dict)

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
    relation = relation_of(spec, access, columns=columns)
    token, version = quiet_together(spec, access, relation.tables, log, sleep)
    known = Known(
        definition=definition_of(spec),
        schema=_digest(
            [
                (one.name, one.kind.value, one.precision, one.scale)
                for one in (*relation.columns, *relation.base_columns)
            ]
        ),
        identity=",".join(table_identity(access, table) for table in relation.tables),
        token=token,
    )
    return Survey(spec, relation, known, version)


def definition_of(spec: ExtractSpec) -> str:
    """A digest of everything in the spec that decides which rows the extract shows and how they are kept."""
    value = asdict(spec) | {"watermark": spec.changes.watermark}
    # What may be created or replaced shows no other rows.
    value["datasource"] = {name: one for name, one in value["datasource"].items() if name not in ("create", "replace")}
    # Tableau itself decides what a triggered refresh shows: here it counts what is watched, and what is refreshed.
    triggered = spec.delivery == "trigger"
    names = ["source", "watch", "datasource"] if triggered else ["source", "columns", "row_key", "slices", "watermark"]
    return _digest({name: value[name] for name in [*names, *(["query"] if spec.query else [])]})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def quiet_together(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    tables: Sequence[TableName],
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, SourceVersion]:
    """One token for all tables, and a version that shows them all; what changes after it is seen next time."""
    for _ in range(QUIET_TRIES):
        moments = [quiet_moment(spec, access, table, log, sleep) for table in tables]
        token = ",".join(one for one, _ in moments)
        # While one was waited for, another may have begun to change.
        if len(tables) == 1 or token == combined_token(probe(access, tables).items()):
            # No table changed between its own moment and this one, so the last of them shows them all.
            return token, max(version for _, version in moments)
    raise GuardError(
        f"{spec.name}: its tables keep changing: they were never quiet together. Nothing was touched. "
        "Refresh when their loads are done, or lower thresholds.quiet_period in the spec."
    )


def combined_token(found: Iterable[tuple[TableName, Probe]]) -> str:
    """One token that changes when any of the tables does; SourceError for a table that gives none."""
    return ",".join(_token(table, probed) for table, probed in found)


def _token(table: TableName, found: Probe) -> str:
    if found.token is None:
        raise SourceError(found.problem or f"{table} gives no change token.")
    return found.token


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
    compare: Sequence[str | None] = (),
    hints: Sequence[Hint] = (),
    allow_empty: bool = False,
    log: Log,
) -> tuple[Plan, ChangeSet | None]:
    """Read what the plan needs and make it durable; gives the settled plan, and no change set if nothing differs."""
    # Here and not above: a plan needs no Spark, and importing it takes seconds.
    from tir_dagster.changes.workbench import SparkWorkbench  # noqa: PLC0415

    refuse_duplicates(surveyed.relation, access, surveyed.version)
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
                    bench,
                    surveyed,
                    plan,
                    base,
                    store,
                    pending,
                    resync,
                    folder,
                    access=access,
                    compare=compare,
                    hints=hints,
                    allow_empty=allow_empty,
                    log=log,
                )
            if plan.decision == "none":
                return plan, None
            if plan.decision == "full":
                before = confirmed.rows if confirmed else 0
                stats, counts = _read_all(bench, surveyed, base, folder, before=before, allow_empty=allow_empty)
            watermark = highest_mark(access, surveyed.source.watermark, surveyed.source.sql)
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
    access: SnowflakeAccess,
    compare: Sequence[str | None],
    hints: Sequence[Hint],
    allow_empty: bool,
    log: Log,
) -> tuple[Plan, Stats, Counts]:
    keyed = [one.id for one in pending if one.decision == "incremental"]
    bench.load_pending([store.path(name) / LEDGER_KEYS for name in keyed])
    hints = checked_hints(hints, surveyed.relation, access)
    candidates, told = propose(surveyed, base.confirmation, access, hints=hints, log=log)
    question = Question(
        candidates=candidates,
        deletes=looks_for_deletes(surveyed, candidates),
        resync=tuple(resync),
        compare=tuple(compare),
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
    warnings = (
        key_warnings(bench, surveyed.spec, joined=bool(surveyed.relation.dimensions))
        if settled.decision == "incremental"
        else ()
    )
    partial = partial_warnings(bench, surveyed.relation, hints, candidates, found.keys)
    settled = replace(settled, warnings=(*settled.warnings, *told, *partial, *warnings))
    counts = (counts_to_json(found.purged), counts_to_json(found.appended))
    if settled.decision == "incremental":
        bench.write_keys("changed", folder / LEDGER_KEYS)
        bench.write_ledger("ledger_after", folder / LEDGER, found.slices)
        if surveyed.relation.aggregated:
            counts = _write_groups(bench, surveyed, found.slices, folder)
            # The rows of the extract, not those behind them.
            settled = replace(settled, purged=sum(counts[0].values()), appended=sum(counts[1].values()))
        else:
            shutil.copytree(folder / LEDGER_KEYS, folder / KEYS)
            bench.write_rows("changed", folder / ROWS)
    return settled, found.after(base.stats), counts


def _write_groups(bench: SparkWorkbench, surveyed: Survey, slices: Sequence[str | None], folder: Path) -> Counts:
    """The groups that the changed rows were in and are in, and what the query shows of them now."""
    width = len(surveyed.source.group)
    staged = bench.write_groups(sets.groups_of(["gone", "fresh"], width), folder / KEYS, folder / ROWS, surveyed.shown)
    purged = {name: (count, 0) for name, count in bench.group_counts("gone").items()}
    appended = {name: (staged.slices.get(name, 0), 0) for name in slices}
    return counts_to_json(purged), counts_to_json(appended)


def _read_all(
    bench: SparkWorkbench, surveyed: Survey, base: Base | None, folder: Path, *, before: int, allow_empty: bool
) -> tuple[Stats, Counts]:
    staged = bench.read_all(ROWS)
    aggregated = surveyed.relation.aggregated
    if not allow_empty:
        # The ledger knows the rows behind the groups that people see.
        _check_left(surveyed.spec, (base.rows if base else 0) if aggregated else before, staged.rows)
    stats = bench.stats(ROWS)
    bench.write_ledger(ROWS, folder / LEDGER, None)
    if not aggregated:
        (folder / _WORK / ROWS).rename(folder / ROWS)
        return stats, (counts_to_json(base.stats) if base else {}, counts_to_json(stats))
    shown = bench.read_shown(folder / ROWS, surveyed.shown)
    if not allow_empty:
        _check_shown(surveyed.spec, 0 if base else before, shown.rows)
    appended = {name: (count, 0) for name, count in shown.slices.items()}
    return stats, (dict(base.shown) if base else {}, counts_to_json(appended))


def _check_left(spec: ExtractSpec, before: int, left: int) -> None:
    if before:
        # Also where our own version is lost: what people see now is known.
        check_guards(spec.name, rows=before, left=left, delete_share=spec.thresholds.delete_share)
    elif left == 0:
        raise GuardError(
            f"{spec.name}: {_what(spec)} is empty. Nothing was touched. "
            f"Load it first; if it is meant to be empty, say so: tir refresh {spec.name} --allow-empty."
        )


def _check_shown(spec: ExtractSpec, before: int, left: int) -> None:
    """The groups that people see; `before` is how many they see now, where our ledger of the rows behind them is lost."""
    if left == 0:
        raise GuardError(
            f"{spec.name}: the query shows nothing, though its tables have rows. Nothing was touched. "
            f"If that is meant to be so, say it: tir refresh {spec.name} --allow-empty."
        )
    check_guards(spec.name, rows=before, left=left, delete_share=spec.thresholds.delete_share)


def _what(spec: ExtractSpec) -> str:
    return spec.source if spec.query is None else "the query's result"
