"""Detection: survey the source, decide, find the differing keys, and make a durable change set of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes.change_set import FORM, KEYS, ROWS, ChangeSet, counts_to_json
from tir_dagster.changes.difference import Difference
from tir_dagster.changes.find import Asked, Found, find_changes
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.marks import highest_mark
from tir_dagster.changes.plan import Known, Plan, check_guards, settle_plan
from tir_dagster.changes.question import ask_question, checked_hints
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.warnings import contract_warnings, key_warnings, partial_warnings, refuse_duplicates
from tir_dagster.errors import GuardError, SourceError
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.replace import Shape
from tir_dagster.refresh.source_reader import SourceReader
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.pinned import PinnedSource
from tir_dagster.snowflake.versions import Probe, SourceVersion, is_kept, probe, table_facts
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A version lies this long before the last look: transactions in flight then have ended.
MARGIN_SECONDS = 1.0
# And at least this long after the token was told: the warehouse's machines do not share one clock.
AFTER_TOKEN_SECONDS = 0.25
QUIET_TRIES = 30
_WORK = "work"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Settled:
    """The source as an extract already shows it: the token of its tables, and a version at which they were quiet."""

    token: str
    version: SourceVersion


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

    def changed(self, since: Known) -> set[TableName]:
        """The tables whose token is another one than then."""
        before, now = since.token.split(","), self.known.token.split(",")
        tables = self.relation.tables
        return {table for table, one, other in zip(tables, before, now, strict=False) if one != other}


@dataclass(frozen=True)
class Base:
    """The extract version a change set starts from, as last confirmed: its file, and its rows by slice."""

    confirmation: Confirmation
    extract: Path
    shape: Shape
    slices: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(self.slices.values())


def survey(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    *,
    columns: Sequence[str] = (),
    settled: Settled | None = None,
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> Survey:
    """Look at the source: its columns, its identity, its change token, and a quiet moment to pin."""
    relation = relation_of(spec, access, columns=columns)
    # Before anything is read: DDL that comes later is seen next time.
    facts = {table: table_facts(access, table) for table in relation.tables}
    token, version = quiet_moment(spec, access, relation.tables, settled=settled, log=log, sleep=sleep)
    known = Known(
        definition=definition_of(spec),
        schema=_digest(
            [
                (one.name, one.kind.value, one.precision, one.scale)
                for one in (*relation.columns, *relation.base_columns)
            ]
        ),
        identity=",".join(one.identity for one in facts.values()),
        token=token,
        ddl=",".join(one.ddl for one in facts.values()),
        role=role_of(spec),
    )
    kept = all(is_kept(access, table, one, version) for table, one in facts.items())
    return Survey(spec, relation, known, replace(version, kept=kept))


def definition_of(spec: ExtractSpec) -> str:
    """A digest of everything in the spec that decides which rows the extract shows and how they are kept."""
    value = asdict(spec) | {"source": spec.main_table, "watermark": spec.changes.watermark}
    # What may be created or replaced shows no other rows.
    value["datasource"] = {name: one for name, one in value["datasource"].items() if name not in ("create", "replace")}
    # Tableau itself decides what a triggered refresh shows: here it counts what is watched, and what is refreshed.
    triggered = spec.delivery == "trigger"
    names = ["source", "watch", "datasource"] if triggered else ["source", "columns", "row_key", "slices", "watermark"]
    return _digest({name: value[name] for name in [*names, *(["query"] if spec.query else [])]})


def role_of(spec: ExtractSpec) -> str:
    """The role that the spec reads with, as Snowflake spells it: row access and masking policies may depend on it."""
    role = spec.snowflake.role or ""
    return role if role.startswith('"') else role.upper()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def quiet_moment(
    spec: ExtractSpec,
    access: SnowflakeAccess,
    tables: Sequence[TableName],
    *,
    settled: Settled | None = None,
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, SourceVersion]:
    """One token for all tables, and a version that surely shows every change that the token stands for.

    The token is read first; the version lies between that reading and a second one, a margin before the second. So it
    shows what the token tells, and transactions that were in flight then have ended. A change that comes later can be in
    the version but not in the token, which costs a look next time; the other way round it would be lost. Nothing else
    says when rows changed: LAST_ALTERED of a view does not move with its tables.
    """
    token, seen = _tokens(access, tables)
    if settled is not None and token == settled.token:
        # Nothing changed since a version that was quiet then.
        return token, max(settled.version, _before(seen, MARGIN_SECONDS))
    quiet = spec.thresholds.quiet_period
    wait = max(quiet, MARGIN_SECONDS) + AFTER_TOKEN_SECONDS
    left = wait
    for _ in range(QUIET_TRIES):
        sleep(left)
        again, now = _tokens(access, tables)
        if again != token and quiet > 0:
            log(f"{_listed(tables)} changed; waiting until all has been quiet for {quiet:g} s")
            token, seen, left = again, now, wait
            continue
        # By the warehouse's clock, which is the one that the version is on.
        left = wait - (now.moment - seen.moment).total_seconds()
        if left <= 0:
            return token, _before(now, MARGIN_SECONDS)
    raise GuardError(
        f"{spec.name}: {_listed(tables)} keeps changing: never quiet for {quiet:g} seconds. Nothing was touched. "
        "Refresh when the load is done, or lower thresholds.quiet_period in the spec."
    )


def _tokens(access: SnowflakeAccess, tables: Sequence[TableName]) -> tuple[str, SourceVersion]:
    """The token of all tables, and the warehouse's clock when it was asked for."""
    found = probe(access, tables)
    token = combined_token(found.items())
    seen = next(one.seen for one in found.values())
    assert seen is not None, "a token has its moment"
    return token, seen


def _before(version: SourceVersion, seconds: float) -> SourceVersion:
    return SourceVersion(version.moment - timedelta(seconds=seconds))


def _listed(tables: Sequence[TableName]) -> str:
    return ", ".join(map(str, tables))


def combined_token(found: Iterable[tuple[TableName, Probe]]) -> str:
    """One token that changes when any of the tables does; SourceError for a table that gives none."""
    return ",".join(_token(table, probed) for table, probed in found)


def _token(table: TableName, found: Probe) -> str:
    if found.token is None:
        raise SourceError(found.problem or f"{table} gives no change token.")
    return found.token


def readable_version(
    access: SnowflakeAccess, tables: Sequence[TableName], version: SourceVersion, token: str
) -> SourceVersion | None:
    """The version as it can be read: by Time Travel; as it is now if there is none and nothing changed since; else None."""
    if all(is_kept(access, table, table_facts(access, table), version) for table in tables):
        return version
    return replace(version, kept=False) if _tokens(access, tables)[0] == token else None


def _check_unchanged(surveyed: Survey, access: SnowflakeAccess) -> None:
    """Several reads without Time Travel are of one version only if no change came between them."""
    tables = surveyed.relation.tables
    if surveyed.version.kept or _tokens(access, tables)[0] == surveyed.known.token:
        return
    raise GuardError(
        f"{surveyed.spec.name}: {_listed(tables)} changed while it was read, and Time Travel does not keep what it was before "
        "(DATA_RETENTION_TIME_IN_DAYS is 0). Nothing was touched. Refresh when the load is done, or give the table a "
        "retention of a day."
    )


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
    reports: Iterable[int] = (),
    allow_empty: bool = False,
    log: Log,
) -> tuple[Plan, ChangeSet | None]:
    """Read what the plan needs and make it durable; gives the settled plan, and no change set if nothing differs."""
    relation = surveyed.relation
    refuse_duplicates(relation, access, surveyed.version)
    pending = store.pending()
    with store.staging(ident) as folder:
        reader = SourceReader(spark, access, relation, surveyed.version, folder / _WORK, log)
        difference = Difference(0, {}, {})
        if plan.decision == "incremental" and base is not None:
            keyed = [one.id for one in pending if one.decision == "incremental"]
            asked = Asked(tuple(resync), tuple(compare), tuple(file for one in keyed for file in store.keys(one)))
            found = _find(surveyed, base, asked, hints, reader=reader, access=access, folder=folder)
            difference = found.difference
            plan = _settled(surveyed, plan, base, found, pending=bool(keyed), allow_empty=allow_empty)
            if found.everything:
                log(f"every row was read and compared, because {found.everything}")
        if plan.decision == "none":
            return plan, None
        if plan.decision == "full":
            shutil.rmtree(folder / KEYS, ignore_errors=True)
            shutil.rmtree(folder / ROWS, ignore_errors=True)
            staged = reader.read_all(folder / ROWS)
            if not allow_empty:
                _check_left(surveyed.spec, confirmed.rows if confirmed else 0, staged.rows)
            difference = Difference(0, base.slices if base else {}, staged.slices)
        watermark = highest_mark(access, surveyed.source.watermark, surveyed.source.sql)
        _check_unchanged(surveyed, access)
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
            rows=sum(difference.appended.values()),
            purged=counts_to_json(difference.purged),
            appended=counts_to_json(difference.appended),
            watermark=watermark,
            settles=tuple(one.id for one in pending),
            warnings=plan.warnings,
            sentence=plan.sentence(),
            reports=tuple(sorted(reports)),
            form=FORM,
        )
        return plan, store.commit(made, folder)


def _find(
    surveyed: Survey,
    base: Base,
    asked: Asked,
    hints: Sequence[Hint],
    *,
    reader: SourceReader,
    access: SnowflakeAccess,
    folder: Path,
) -> Found:
    """Find the keys to replace; what hints and fallbacks give rise to is among the warnings."""
    relation = surveyed.relation
    hints = checked_hints(hints, relation, access)
    question, warnings = ask_question(
        relation,
        access,
        since=SourceVersion.parse(base.confirmation.source_version),
        watermark=base.confirmation.watermark,
        version=surveyed.version,
        changed=surveyed.changed(base.confirmation.known),
        hints=hints,
    )
    with comparing(base.extract, base.shape) as comparison:
        found = find_changes(relation, question, asked, reader=reader, comparison=comparison, folder=folder)
    partial = partial_warnings(relation, hints, found.difference)
    contracts = contract_warnings(relation, question, access)
    return replace(found, warnings=(*warnings, *found.warnings, *contracts, *partial))


def _settled(surveyed: Survey, plan: Plan, base: Base, found: Found, *, pending: bool, allow_empty: bool) -> Plan:
    thresholds = surveyed.spec.thresholds
    settled = settle_plan(
        plan,
        found.difference,
        rows=base.rows,
        policy=surveyed.spec.policy,
        delete_share=thresholds.delete_share,
        full_share=thresholds.full_share,
        pending=pending,
        allow_empty=allow_empty,
    )
    warnings = (*settled.warnings, *found.warnings)
    if settled.decision == "incremental":
        warnings += key_warnings(surveyed.spec, found.difference, joined=bool(surveyed.relation.dimensions))
    return replace(settled, warnings=warnings)


def _check_left(spec: ExtractSpec, before: int, left: int) -> None:
    if before:
        # Also where our own version is lost: what people see now is known.
        check_guards(spec.name, rows=before, left=left, delete_share=spec.thresholds.delete_share)
    elif left == 0:
        what = spec.source if spec.query is None else "the query's result"
        raise GuardError(
            f"{spec.name}: {what} is empty. Nothing was touched. "
            f"Load it first; if it is meant to be empty, say so: tir refresh {spec.name} --allow-empty."
        )
