"""The stage `detect`: find the keys that differ, and make a durable change set of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tir_dagster.changes.change_set import (
    BEFORE,
    FORM,
    KEYS,
    NO_SLICE_KEY,
    ROWS,
    ChangeSet,
    counts_from_json,
    counts_to_json,
    slice_label,
    table_folder,
)
from tir_dagster.changes.detectors import Question
from tir_dagster.changes.difference import Counts, Difference
from tir_dagster.changes.find_changes import ChangedKeys, ComparisonScope, find_changes
from tir_dagster.changes.hints import ChangeType, Hint, Unknown
from tir_dagster.changes.plan import Plan, check_guards, settle_plan, settle_tables
from tir_dagster.changes.question import ask_question, checked_hints, lacks_history
from tir_dagster.changes.warnings import contract_warnings, key_warnings, partial_warnings, refuse_duplicates
from tir_dagster.changes.watermarks import highest_mark
from tir_dagster.crash_points import crash_after
from tir_dagster.errors import GuardError
from tir_dagster.files import need_space
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.measuring import waiting_for
from tir_dagster.refresh.confirm import prune_versions
from tir_dagster.refresh.context import Looked, RefreshContext, shape_of
from tir_dagster.refresh.plan import Request
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.notes import TRUSTED_PARTIAL_HINTS, partial_hints
from tir_dagster.refresh.state.records import Confirmation
from tir_dagster.refresh.state.shared import SharedSource
from tir_dagster.refresh.state.versions import Version
from tir_dagster.refresh.survey import Log, Survey, listed_tables, read_tokens
from tir_dagster.refresh.verify import SlicesInTurn, compare_in_turn
from tir_dagster.snowflake.connection import SnowflakeAccess, SnowflakeError
from tir_dagster.snowflake.versions import SourceVersion, Span
from tir_dagster.spec.extract import ExtractSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


from typing import TYPE_CHECKING

from tir_dagster.changes.detectors import staged_columns
from tir_dagster.changes.relation import Relation
from tir_dagster.hyper.fingerprints import Fingerprint, read_fingerprints, snowflake_sql
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import with_cut_keys
from tir_dagster.spark.staging import StagedRows, stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WORK = "work"


@dataclass(frozen=True)
class Base:
    """The extract version a change set starts from, as last confirmed: its file, and its rows by slice."""

    confirmation: Confirmation
    version: Version
    shape: ExtractShape
    slices: Mapping[str | None, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(self.slices.values())


def _check_unchanged(surveyed: Survey, access: SnowflakeAccess) -> None:
    """Raise if the source changed while it was read without Time Travel: the reads may show different versions."""
    tables = surveyed.relation.tables
    if surveyed.version.kept or read_tokens(access, tables)[0] == surveyed.known.token:
        return
    raise GuardError(
        f"{surveyed.spec.name}: {listed_tables(tables)} changed while it was read, and Time Travel does not keep what it was before "
        "(DATA_RETENTION_TIME_IN_DAYS is 0). Nothing was touched. Refresh when the load is done, or give the table a "
        "retention of a day."
    )


@dataclass(frozen=True)
class _Detection:
    """The detection of one table: what the source shows, what the extract has of it, and where its files are staged."""

    surveyed: Survey
    plan: Plan
    base: Base | None
    confirmed: Confirmation | None
    request: Request
    reader: SourceReader
    folder: Path
    # Files with the keys of pending change sets.
    pending_keys: tuple[Path, ...]
    pending: bool


@dataclass(frozen=True)
class _Differing:
    """What differs in one table; all of it, where everything is loaded."""

    difference: Difference
    changes: ChangedKeys | None = None
    turn: SlicesInTurn | None = None


def make_change_set(
    surveyed: Survey,
    plan: Plan,
    *,
    ident: str,
    access: SnowflakeAccess,
    start_spark: Callable[[], SparkSession],
    shared: SharedSource,
    store: ChangeSetStore,
    bases: Mapping[str, Base | None],
    confirmed: Mapping[str, Confirmation | None],
    request: Request,
    log: Log,
) -> tuple[Plan, ChangeSet | None]:
    """Read what the plan needs and make it durable; return the final plan, and the change set if anything differs.

    Of an extract of several tables each is read by itself, at one version, and all are one change set.
    """
    spec, pending = surveyed.spec, store.pending()
    whole = next((one for one in confirmed.values() if one is not None), None)
    with store.staging(ident) as staging:
        detections = {}
        for table in spec.parts:
            part, planned = surveyed.of(table), plan.of(table)
            if planned.decision != "none":
                refuse_duplicates(part.relation, access, part.version)
            folder = table_folder(staging, table)
            folder.mkdir(parents=True, exist_ok=True)
            keyed = [one for one in pending if one.decision == "incremental" and table in one.changing]
            detections[table] = _Detection(
                surveyed=part,
                plan=planned,
                base=bases[table],
                confirmed=confirmed[table],
                request=request.of(surveyed, table),
                reader=SourceReader(start_spark, access, part.relation, part.version, folder / _WORK, shared, log),
                folder=folder,
                pending_keys=tuple(file for one in keyed for file in store.keys(one.id, table)),
                pending=bool(keyed),
            )
        differing: dict[str, _Differing] = {}
        if plan.decision == "incremental" and all(base is not None for base in bases.values()):
            for table, detection in detections.items():
                if detection.plan.decision == "incremental":
                    differing[table] = _find(detection, access)
            plan = _settled(surveyed, plan, detections, differing, allow_empty=request.allow_empty)
            for found in differing.values():
                if found.changes and found.changes.everything:
                    log(f"every row was read and compared, because {found.changes.everything}")
        if plan.decision == "none":
            return plan, None
        if plan.decision == "full":
            differing = {
                table: _load_all(detection, allow_empty=request.allow_empty) for table, detection in detections.items()
            }
        parts = {}
        for table, detection in detections.items():
            found = differing.get(table, _Differing(Difference(0, {}, {})))
            watermark = detection.confirmed.watermark if detection.confirmed else None
            if plan.of(table).decision != "none":
                source = detection.surveyed.source
                watermark = highest_mark(access, source.watermark, source.sql)
                _check_unchanged(detection.surveyed, access)
            shutil.rmtree(detection.folder / _WORK, ignore_errors=True)
            parts[table] = _change_of(detection, plan.of(table), found, ident=ident, watermark=watermark)
        main = parts[spec.main.table]
        change_set = replace(
            main,
            base=whole.version if whole else None,
            known=surveyed.known,
            mode=plan.mode,
            decision=plan.decision,
            reason=plan.reason.name if plan.reason else None,
            keys=sum(part.keys for part in parts.values()),
            rows=sum(part.rows for part in parts.values()),
            settles=tuple(pending_set.id for pending_set in pending),
            warnings=plan.warnings,
            sentence=plan.sentence(),
            reports=tuple(sorted(request.reports)),
            origin=tuple(request.origin),
            partial_hints=any(part.partial_hints for part in parts.values()),
            parts=parts if spec.tables else {},
        )
        crash_after("compared")
        return plan, store.commit(change_set, staging)


def _change_of(detection: _Detection, plan: Plan, found: _Differing, *, ident: str, watermark: str | None) -> ChangeSet:
    """Return the change of one table."""
    surveyed, difference, base = detection.surveyed, found.difference, detection.base
    return ChangeSet(
        id=ident,
        extract=surveyed.spec.name,
        base=detection.confirmed.version if detection.confirmed else None,
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
        partial_hints=found.changes.partial_hints if found.changes else False,
        form=FORM,
        odd_keys=(difference.null_keys, difference.repeated_keys) if plan.decision == "incremental" else None,
        purged_digests=_digests_to_json(difference.purged_digests),
        **(_turn_to_json(base, found.turn) if base is not None and found.turn is not None else {}),
    )


def _load_all(detection: _Detection, *, allow_empty: bool) -> _Differing:
    """Stage all rows; what was compared before is replaced."""
    _remove_found(detection.folder)
    staged = detection.reader.read_all(detection.folder / ROWS)
    was_empty = detection.confirmed is not None and detection.confirmed.rows == 0
    # One of several tables that was meant to be empty does not stop the others.
    if not allow_empty and not (detection.surveyed.spec.table and was_empty):
        before = detection.confirmed.rows if detection.confirmed else 0
        check_left(detection.surveyed.spec, before, staged.rows)
    base = detection.base
    return _Differing(Difference(0, base.slices if base else {}, staged.slices))


def _digests_to_json(digests: Counts | None) -> dict[str, str] | None:
    return None if digests is None else {name: str(value) for name, value in counts_to_json(digests).items()}


def _turn_to_json(base: Base, turn: SlicesInTurn) -> dict[str, Any]:
    drifted = tuple(NO_SLICE_KEY if name is None else name for name in turn.different)
    equal = [name for name in turn.compared if name not in drifted]
    return {"verified": dict.fromkeys(equal, base.confirmation.source_version), "drifted": drifted}


def _find(detection: _Detection, access: SnowflakeAccess) -> _Differing:
    """Find the keys to replace, with warnings about hints and fallbacks; meanwhile, compare slices of the base in turn."""
    surveyed, base, folder = detection.surveyed, detection.base, detection.folder
    assert base is not None, "the plan is to replace keys of it"
    to_compare = ComparisonScope(detection.request.resync, detection.request.compare, detection.pending_keys)
    relation = surveyed.relation
    hints = checked_hints(detection.request.hints, relation, access)
    # While the warehouse looks for changes, Hyper has nothing to do.
    with _beside() as pool:
        comparing_slices = pool.submit(
            compare_in_turn,
            access,
            relation,
            base.confirmation,
            base.version,
            # Earlier releases did not know that such columns may differ in the last digit.
            replace(base.shape, loose=base.shape.loose | relation.unrepeatable),
            count=surveyed.spec.verify.slices_per_run,
        )

        def ask(*, try_history: bool) -> tuple[Question, tuple[str, ...]]:
            return ask_question(
                relation,
                access,
                since=SourceVersion.parse(base.confirmation.source_version),
                watermark=base.confirmation.watermark,
                version=surveyed.version,
                changed=surveyed.changed(base.confirmation.known),
                hints=hints,
                try_history=try_history,
            )

        def compare(question: Question, scope: ComparisonScope) -> ChangedKeys:
            with comparing(base.version.extract, base.shape) as comparison:
                return find_changes(
                    relation, question, scope, reader=detection.reader, comparison=comparison, folder=folder
                )

        try:
            # Almost always there is a history; to ask for it first would read every feed of changes twice.
            question, warnings = ask(try_history=False)
            changes = compare(question, to_compare)
        except SnowflakeError as error:
            if not lacks_history(error):
                raise
            question, warnings = ask(try_history=True)
            changes = compare(question, to_compare)
        with waiting_for("Hyper"):
            turn = comparing_slices.result()
    if turn is not None and turn.different:
        warnings = (*warnings, _drift_warning(surveyed.spec, turn))
        _remove_found(folder)
        changes = compare(question, replace(to_compare, resync=(*to_compare.resync, *turn.different)))
    partial = partial_warnings(relation, hints, changes.difference)
    contracts = contract_warnings(relation, question, access)
    # Where only hints tell of changes, a slice that differs was described by none of them.
    missed = turn is not None and bool(turn.different) and surveyed.spec.changes.by == "hint"
    warnings = (*warnings, *changes.warnings, *contracts, *partial)
    changes = replace(changes, warnings=warnings, partial_hints=bool(partial) or missed)
    return _Differing(changes.difference, changes, turn)


@contextmanager
def _beside() -> Iterator[ThreadPoolExecutor]:
    """Give a thread for other work; an error in the block does not wait for it."""
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _drift_warning(spec: ExtractSpec, turn: SlicesInTurn) -> str:
    names = ", ".join(slice_label(NO_SLICE_KEY if name is None else name) for name in turn.different)
    lines = next(iter(turn.different.values()))
    return (
        f"{spec.name}: the extract differed from the source at its own version in {names} ({'; '.join(lines[:3])}): all rows "
        "there are replaced. The detector may not see every change, such as an update that leaves the watermark or a hint that is "
        "too narrow: check `changes` in the spec. If nothing explains it, somebody may have changed the extract's file."
    )


def _remove_found(folder: Path) -> None:
    for name in (KEYS, ROWS, BEFORE):
        shutil.rmtree(folder / name, ignore_errors=True)


def _settled(
    surveyed: Survey,
    plan: Plan,
    detections: Mapping[str, _Detection],
    differing: Mapping[str, _Differing],
    *,
    allow_empty: bool,
) -> Plan:
    """Return the plan with what was found, with the warnings of each table."""
    spec, thresholds = surveyed.spec, surveyed.spec.thresholds
    rows = {table: detection.base.rows if detection.base else 0 for table, detection in detections.items()}
    limits: dict[str, Any] = {
        "policy": spec.policy,
        "full_share": thresholds.full_share,
        "allow_empty": allow_empty,
    }
    if spec.tables:
        settled = settle_tables(
            plan,
            {table: found.difference for table, found in differing.items()},
            rows=rows,
            pending=[table for table, detection in detections.items() if detection.pending],
            delete_share={table: part.thresholds.delete_share for table, part in spec.parts.items()},
            **limits,
        )
    else:
        settled = settle_plan(
            plan,
            differing[""].difference,
            rows=rows[""],
            pending=detections[""].pending,
            delete_share=thresholds.delete_share,
            **limits,
        )
    warnings = settled.warnings
    for table, found in differing.items():
        part = detections[table].surveyed
        warnings += found.changes.warnings if found.changes else ()
        if settled.of(table).decision == "incremental":
            warnings += key_warnings(part.spec, found.difference, joined=bool(part.relation.dimensions))
    return replace(settled, warnings=tuple(dict.fromkeys(warnings)))


def check_left(spec: ExtractSpec, before: int, left: int) -> None:
    if before:
        # Also if our own version is lost: the number of published rows is known.
        check_guards(spec.name, rows=before, left=left, delete_share=spec.thresholds.delete_share, table=spec.table)
    elif left == 0:
        what = spec.source if spec.query is None else "the query's result"
        raise GuardError(
            f"{spec.name}: {what} is empty. Nothing was touched. "
            f"Load it first; if it is meant to be empty, say so: tir refresh {spec.name} --allow-empty."
        )


# The stage


@dataclass(frozen=True)
class Detected:
    """The plan as it turned out, and the change set if anything differs."""

    plan: Plan
    change_set: ChangeSet | None


def detect(
    context: RefreshContext, looked: Looked, surveyed: Survey, plan: Plan, request: Request, *, ident: str
) -> Detected:
    """Read what changed and make it durable as a change set of this name."""
    crash_after("planned")
    context.hold.check(context.spec.name)
    context.check_lease()
    context.change_sets.clean()
    views = {table: looked.of(table) for table in context.spec.parts}
    bases = {table: _base(view, surveyed.of(table)) for table, view in views.items()}
    _need_room(context, looked)

    @cache
    def start_spark() -> SparkSession:
        # Only when the first large result needs it.
        with context.stages.timed("spark"), waiting_for("Spark"):
            return context.spark()

    hints, warnings = _believed(context, surveyed, request.hints)
    plan = replace(plan, warnings=(*plan.warnings, *warnings))
    with context.stages.timed("detect"), context.snowflake.kept_open():
        plan, change_set = make_change_set(
            surveyed,
            plan,
            ident=ident,
            access=context.snowflake,
            start_spark=start_spark,
            shared=context.shared,
            store=context.change_sets,
            bases=bases,
            confirmed={table: view.confirmed for table, view in views.items()},
            request=replace(request, hints=tuple(hints)),
            log=context.log,
        )
    crash_after("staged")
    return Detected(plan, change_set)


def _base(looked: Looked, surveyed: Survey) -> Base | None:
    """Return what the extract has of a table."""
    if looked.base is None or looked.confirmed is None:
        return None
    slices = counts_from_json(looked.base.manifest["slice_rows"])
    # The key is what the spec and the query say now: an earlier release may have found none.
    shape = replace(shape_of(looked.base), key=tuple(column.name for column in surveyed.relation.key))
    return Base(looked.confirmed, looked.base, shape, slices)


def _believed(
    context: RefreshContext, surveyed: Survey, hints: Sequence[Hint]
) -> tuple[Sequence[Hint], tuple[str, ...]]:
    """Return the hints to use: those of a sender who described too little twice only say that anything may have changed."""
    count = partial_hints(context.folder)
    parts = [surveyed.of(table) for table in context.spec.parts]
    hinted = [part for part in parts if part.spec.changes.by == "hint"]
    if count <= TRUSTED_PARTIAL_HINTS or not (hints or hinted):
        return hints, ()
    warning = (
        f"{context.spec.name}: hints described less than had changed {count} times, so they are no longer trusted alone: every row is"
        f" compared. Correct the job that sends them, then load everything once: tir refresh {context.spec.name} --full."
    )
    anything = (Hint(part.relation.table, ChangeType.MIXED_CHANGES, Unknown()) for part in hinted or parts)
    return (*hints, *anything), (warning,)


def _need_room(context: RefreshContext, looked: Looked) -> None:
    """Raise if there is no space for the next version and its package."""
    prune_versions(context, looked.confirmed)
    datasource, base = looked.server.datasource, looked.base
    size = base.extract.stat().st_size if base else (datasource.size_mb or 0) * 1_000_000 if datasource else 0
    need_space(context.folder, 2 * size)


@dataclass(frozen=True)
class SourceReader:
    """The source at one pinned version; rows are staged below a folder."""

    start_spark: Callable[[], SparkSession]
    access: SnowflakeAccess
    relation: Relation
    version: SourceVersion
    folder: Path
    shared: SharedSource
    log: Callable[[str], None]

    def stage(
        self, statement: str, *, hinted: bool = False, span: Span | None = None, changes: Sequence[str] = ()
    ) -> tuple[Path, ...]:
        """Run the statement and stage its rows; return the files.

        Parts of it that only read changes between two versions are read once for all extracts that have both versions.
        """
        own = statement
        if span is not None:
            for select in changes:
                statement = statement.replace(select, self.shared.changes(select, span))
        columns, folder = staged_columns(self.relation, hinted=hinted), self.folder / "candidates"
        try:
            staged = stage(self.start_spark, self.access, statement, columns, folder)
        except SnowflakeError:
            if statement == own:
                raise
            # The shared result may be gone.
            self.log("the changes that another extract has read could not be used; they are read again")
            staged = stage(self.start_spark, self.access, own, columns, folder)
        self.log(staged.summary + (", of changes that extracts share" if statement != own else ""))
        return staged.files

    def read_all(self, folder: Path) -> StagedRows:
        """Stage all rows that people see."""
        rows = with_cut_keys(self.relation.from_clause(self.version), self.relation.key)
        listed = ", ".join(quote(column.name) for column in self.relation.columns)
        query = f"SELECT {listed} FROM {rows} AS r"
        staged = stage(self.start_spark, self.access, query, self.relation.columns, folder, slices=self.relation.slices)
        self.log(staged.summary)
        return staged

    def slice_digests(self) -> Mapping[str | None, Fingerprint]:
        """Return, by slice, how many rows there are and a digest of their keys."""
        relation = self.relation
        names = {
            *(column.name for column in relation.key),
            *([relation.slices.column] if relation.slices.column else []),
        }
        columns = [column for column in relation.columns if column.name in names]
        rows: Any = self.access.query(snowflake_sql(columns, relation.from_clause(self.version), relation.slices))
        return read_fingerprints(rows, columns)
