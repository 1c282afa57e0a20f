"""An extract of a query that follows a small warehouse: the product's own detection and plan, an extract that is a bag in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

from tir_dagster.changes import find_changes as find
from tir_dagster.changes.difference import ROW_MARK, SLICE_KEY, Difference, Forced
from tir_dagster.changes.find_changes import ComparisonScope
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.plan import Mode, Plan, Reason, Situation, SourceState, plan_refresh
from tir_dagster.changes.question import ask_question, checked_hints
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.watermarks import highest_mark
from tir_dagster.refresh.server_content import outcome_by_content
from tir_dagster.refresh.state.records import Confirmation, Intent
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.slices import slice_of
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster.tableau.outcome import PublishOutcome
from tir_dagster_tests.changes.warehouse import MAKERS, PRODUCTS, STAMP, Warehouse

Values = tuple[Any, ...]
Bag = Counter[Values]


@dataclass(frozen=True)
class Shown:
    """A query, and how its extract is kept."""

    query: str
    row_key: tuple[str, ...] = ("ID",)
    sliced: bool = True


@dataclass(frozen=True)
class Detectors:
    """How changes of the first table are found, and those of the joined ones."""

    first: str = "diff"
    joined: str = "diff"

    def settings(self, query: str) -> dict[str, Any]:
        joined = {"detector": self.joined, **self._marked(self.joined)}
        tables = {str(table): joined for table in (PRODUCTS, MAKERS) if str(table) in query.upper()}
        return {"detector": self.first, "tables": tables, **self._marked(self.first)}

    def _marked(self, detector: str) -> dict[str, Any]:
        return {"watermark": STAMP, "look_back": "30 seconds"} if detector == "watermark" else {}


@cache
def relation_for(shown: Shown, detectors: Detectors) -> Relation:
    slices = {"slices": {"column": "DAY", "by": "month", "start": "2025-01"}} if shown.sliced else {}
    spec = spec_from_mapping(
        {
            "name": "shown",
            "query": shown.query,
            "row_key": list(shown.row_key),
            "changes": detectors.settings(shown.query),
            "datasource": {"project": "p", "name": "shown"},
            **slices,
        },
        "a history",
    )
    return relation_of(spec, _empty())


@cache
def _empty() -> Warehouse:
    """Tables to be described."""
    return Warehouse(duckdb.connect(config={"threads": 1}))


@dataclass(frozen=True)
class KeyFile:
    """Keys of a pending change set, as a comparison takes them in place of a Parquet file."""

    keys: frozenset[Values]


class BagReader:
    """Stages rows as lists: column names and values."""

    def __init__(self, warehouse: Warehouse, relation: Relation, version: SourceVersion) -> None:
        self._warehouse, self._relation, self._version = warehouse, relation, version
        self.rows = 0

    def stage(self, statement: str, *, hinted: bool = False, **_: Any) -> list[dict[str, Any]]:
        staged = self._warehouse.named_rows(statement)
        self.rows += len(staged)
        return staged

    def slice_digests(self) -> Mapping[str | None, Any]:
        rows = self._warehouse.query(f"SELECT * FROM {self._relation.from_clause(self._version)}")
        return digests(self._relation, Counter(rows))


class BagComparison:
    """What Hyper does, on a bag."""

    def __init__(self, relation: Relation, extract: Bag) -> None:
        self._relation, self._extract = relation, extract
        self._names = [column.name for column in relation.columns]
        self._key_of = key_of(relation)
        self.clear()
        self.changed: frozenset[Values] = frozenset()
        self.fresh: Bag = Counter()

    def clear(self) -> None:
        self._staged: list[dict[str, Any]] = []
        self._everything = False

    def add(self, staged: list[dict[str, Any]], *, everything: bool = False, hinted: bool = False) -> None:
        self._staged += staged
        self._everything = self._everything or everything

    def slice_digests(self) -> Mapping[str | None, Any]:
        return digests(self._relation, self._extract)

    def unstaged_keys_in_slices(self, slices: Sequence[str | None], *, most: int) -> list[Values]:
        inside = {self._key_of(row) for row in self._extract if row_slice(self._relation, row) in slices}
        return sorted(inside - self._staged_keys(), key=repr)[:most]

    def unstaged_keys_in_files(self, files: Sequence[KeyFile], *, most: int) -> list[Values]:
        return sorted({key for file in files for key in file.keys} - self._staged_keys(), key=repr)[:most]

    def _staged_keys(self) -> set[Values]:
        names = [column.name for column in self._relation.key] or [SLICE_KEY.name]
        return {tuple(row[name] for name in names) for row in self._staged}

    def decide(self, forced: Forced, folder: Path) -> Difference:
        del folder
        fresh = Counter(
            tuple(row[name] for name in self._names) for row in self._staged if row[ROW_MARK.name] is not None
        )
        candidates = {self._key_of(row) for row in self._extract} if self._everything else self._staged_keys()
        stale = Counter({row: n for row, n in self._extract.items() if self._key_of(row) in candidates})
        changed = {self._key_of(row) for row in ((fresh - stale) + (stale - fresh))}
        changed |= {key for file in forced.keys for key in file.keys}
        rows = [*fresh, *self._extract]
        changed |= {self._key_of(row) for row in rows if row_slice(self._relation, row) in forced.slices}
        self.changed = frozenset(changed)
        self.fresh = Counter({row: n for row, n in fresh.items() if self._key_of(row) in changed})
        return Difference(len(changed), {}, {})


def key_of(relation: Relation) -> Callable[[Values], Values]:
    names = [column.name for column in relation.columns]
    if not relation.key:
        return lambda row: (row_slice(relation, row),)
    places = [names.index(column.name) for column in relation.key]
    return lambda row: tuple(row[at] for at in places)


def row_slice(relation: Relation, row: Values) -> str | None:
    names = [column.name for column in relation.columns]
    column = relation.slices.column
    return slice_of(relation.slices, row[names.index(column)] if column else None)


def digests(relation: Relation, rows: Bag) -> dict[str | None, Any]:
    by_slice: dict[str | None, list[Values]] = {}
    key = key_of(relation)
    for row in rows.elements():
        by_slice.setdefault(row_slice(relation, row), []).append(key(row))
    return {name: sorted(keys, key=repr) for name, keys in by_slice.items()}


@dataclass(frozen=True)
class Version:
    """An extract as it is kept between refreshes."""

    extract: Bag
    confirmation: Confirmation


@dataclass(frozen=True)
class Pending:
    """A change set that no confirmation has settled."""

    id: str
    decision: str
    reason: str | None
    keys: frozenset[Values]


@dataclass
class FollowedQuery:
    """The refresh as the product does it, from look to confirmation, with everything it keeps."""

    warehouse: Warehouse
    shown: Shown
    detectors: Detectors
    base: Version | None = None
    server: Bag | None = None
    server_version: int = 0
    pending: list[Pending] = field(default_factory=list)
    intended: tuple[Intent, Version] | None = None
    runs: int = 0
    everything: str | None = None

    @property
    def relation(self) -> Relation:
        return relation_for(self.shown, self.detectors)

    def refresh(
        self,
        mode: Mode = "changes",
        *,
        resync: Sequence[str | None] = (),
        hints: Sequence[Hint] = (),
        until: str = "confirmed",
    ) -> Plan:
        """One refresh, ended after a step as a crash would end it; a finished one leaves the right rows behind."""
        self.runs += 1
        foreign = self._look()
        version, state = self.warehouse.pin(), SourceState("definition", "schema", "identity", self._token())
        plan = plan_refresh(self._situation(state, mode, foreign=foreign, hinted=bool(hints)))
        new_version: Version | None = None
        if plan.decision == "full":
            new_version = self._version(self._all_shown(version), version, state)
            self._stage(plan, frozenset())
        elif plan.decision == "incremental":
            plan, new_version = self._replace(version, state, plan, resync, hints)
        if new_version is not None and self._deliver(new_version, until) != "confirmed":
            return plan
        self._check(version)
        return plan

    # Look

    def _look(self) -> bool:
        """What a crash left behind is repaired; whether somebody else published."""
        if self.base is None and self.intended is None:
            return False
        intent, version = self.intended or (None, None)
        verdict = outcome_by_content(
            intent=intent,
            confirmed=self.base.confirmation if self.base else None,
            server_version=str(self.server_version),
            server_fingerprints=(fingerprint(self.server),),
        )
        if verdict is PublishOutcome.LANDED and version is not None:
            self._confirm(version)
        self.intended = None
        return verdict is PublishOutcome.FOREIGN

    def _token(self) -> str:
        return ",".join(str(self.warehouse.tokens[table]) for table in self.relation.tables)

    def _changed(self, state: SourceState) -> set[TableName]:
        assert self.base is not None
        before, now = self.base.confirmation.known.token.split(","), state.token.split(",")
        return {
            table
            for table, old_token, new_token in zip(self.relation.tables, before, now, strict=True)
            if old_token != new_token
        }

    def _situation(self, state: SourceState, mode: Mode, *, foreign: bool, hinted: bool) -> Situation:
        return Situation(
            extract="shown",
            mode=mode,
            policy="auto",
            now=state,
            confirmed=self.base.confirmation.known if self.base else None,
            base_present=self.base is not None,
            foreign=foreign,
            pending=tuple(change_set.id for change_set in self.pending),
            due_reason=next((Reason[change_set.reason] for change_set in self.pending if change_set.reason), None),
            hinted=hinted,
            opaque=self.relation.why_full,
        )

    # Detect and apply

    def _all_shown(self, version: SourceVersion) -> Bag:
        listed = ", ".join(f'"{column.name}"' for column in self.relation.columns)
        return Counter(self.warehouse.query(f"SELECT {listed} FROM {self.relation.from_clause(version)}"))

    def _replace(
        self,
        version: SourceVersion,
        state: SourceState,
        plan: Plan,
        resync: Sequence[str | None],
        hints: Sequence[Hint],
    ) -> tuple[Plan, Version | None]:
        assert self.base is not None
        relation, confirmed = self.relation, self.base.confirmation
        question, warnings = ask_question(
            relation,
            self.warehouse,
            since=SourceVersion.parse(confirmed.source_version),
            watermark=confirmed.watermark,
            version=version,
            changed=self._changed(state),
            hints=checked_hints(hints, relation, self.warehouse),
        )
        pending = tuple(KeyFile(change_set.keys) for change_set in self.pending if change_set.decision == "incremental")
        comparison = BagComparison(relation, self.base.extract)
        changes = find.find_changes(
            relation,
            question,
            ComparisonScope(tuple(resync), pending=pending),
            reader=BagReader(self.warehouse, relation, version),
            comparison=comparison,
            folder=Path(),
        )
        self.everything = changes.everything
        plan = replace(plan, keys=changes.difference.keys, warnings=(*warnings, *changes.warnings))
        if not changes.difference.keys and not pending:
            return replace(plan, decision="none"), None
        self._stage(plan, comparison.changed)
        extract = replaced(self.base.extract, key_of(relation), comparison.changed, comparison.fresh)
        return plan, self._version(extract, version, state)

    def _version(self, extract: Bag, version: SourceVersion, state: SourceState) -> Version:
        source = self.relation.base(version)
        confirmation = Confirmation(
            extract="shown",
            version=str(self.runs),
            source_version=str(version),
            known=state,
            watermark=highest_mark(self.warehouse, source.watermark, source.sql),
            datasource_id="",
            server_version="",
            fingerprint=fingerprint(extract),
            rows=extract.total(),
            change_sets=tuple(change_set.id for change_set in self.pending),
        )
        return Version(extract, confirmation)

    # Deliver

    def _stage(self, plan: Plan, keys: frozenset[Values]) -> None:
        """From here on the keys are pending."""
        reason = plan.reason.name if plan.reason else None
        self.pending.append(Pending(str(self.runs), plan.decision, reason, keys))

    def _deliver(self, new_version: Version, until: str) -> str:
        """As far as the crash lets it come."""
        if until == "staged":
            return until
        confirmed, server = new_version.confirmation, str(self.server_version)
        intent = Intent("shown", str(self.runs), confirmed.version, server, confirmed.fingerprint, confirmed.known)
        self.intended = (intent, new_version)
        if until == "intended":
            return until
        self.publish(new_version.extract)
        if until == "published":
            return until
        self._confirm(new_version)
        return "confirmed"

    def publish(self, extract: Bag) -> None:
        self.server, self.server_version = extract, self.server_version + 1

    def _confirm(self, new_version: Version) -> None:
        confirmation = replace(new_version.confirmation, server_version=str(self.server_version))
        self.base, self.intended = replace(new_version, confirmation=confirmation), None
        settled = {*new_version.confirmation.change_sets, new_version.confirmation.version}
        self.pending = [change_set for change_set in self.pending if change_set.id not in settled]

    # The law

    def _check(self, version: SourceVersion) -> None:
        names = [column.name for column in self.relation.columns]
        same(
            "the extract, and what the query shows", self.server, self.warehouse.shown(self.shown.query, version), names
        )


class Differs(AssertionError):  # noqa: N818 - says what it found
    """What the suite is there to find."""


def same(label: str, actual: Bag | None, expected: Bag, names: Sequence[str]) -> None:
    if actual != expected:
        actual = actual or Counter()
        extra, missing = dict(actual - expected), dict(expected - actual)
        raise Differs(f"{label} ({', '.join(names)}): too many {extra}, too few {missing}")


def replaced(extract: Bag, key: Callable[[Values], Values], keys: Collection[Values], fresh: Bag) -> Bag:
    """E' = { r in E : key(r) not in S } + { r in V_new : key(r) in S }."""
    remaining = Counter({row: count for row, count in extract.items() if key(row) not in keys})
    return remaining + fresh


def fingerprint(extract: Mapping[Values, int] | None) -> str:
    return repr(sorted((extract or {}).items(), key=repr))
