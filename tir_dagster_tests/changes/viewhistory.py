"""An extract of a query that follows a small warehouse: the product's own decisions, an extract that is a bag in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import duckdb

from tir_dagster.changes import find, propose, sets
from tir_dagster.changes.described import checked_hints
from tir_dagster.changes.detect import Survey
from tir_dagster.changes.find import Found, Question, Stats
from tir_dagster.changes.hints import Hint
from tir_dagster.changes.marks import highest_mark
from tir_dagster.changes.plan import Known, Mode, Plan, Reason, Situation, plan_refresh, settle_plan
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.state import Aftermath, Confirmation, Intent, aftermath
from tir_dagster.source.slices import slice_of
from tir_dagster.source.versions import SourceVersion
from tir_dagster.spec_file import spec_from_mapping
from tir_dagster_tests.changes.duckbench import DuckBench, plain, stats_of
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

    first: str = "snapshot"
    joined: str = "snapshot"

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
class Version:
    """An extract and the ledger beside it, as they are kept between refreshes."""

    extract: Bag
    ledger: Bag
    stats: Stats
    confirmation: Confirmation


@dataclass(frozen=True)
class Pending:
    """A change set that no confirmation has settled."""

    id: str
    decision: str
    reason: str | None
    keys: frozenset[Values]


@dataclass
class History:
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
    _read: tuple[SourceVersion, DuckBench] | None = None

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
        surveyed = self._survey()
        plan = plan_refresh(self._situation(surveyed, mode, foreign=foreign, hinted=bool(hints)))
        made: Version | None = None
        if plan.decision == "full":
            made = self._read_all(surveyed)
            self._stage(plan, frozenset())
        elif plan.decision == "incremental":
            plan, made = self._replace(surveyed, plan, resync, hints)
        if made is not None and self._deliver(made, until) != "confirmed":
            return plan
        self._check(surveyed.version)
        return plan

    # Look

    def _look(self) -> bool:
        """What a crash left behind is mended; whether somebody else published."""
        if self.base is None and self.intended is None:
            return False
        intent, version = self.intended or (None, None)
        verdict = aftermath(
            intent=intent,
            confirmed=self.base.confirmation if self.base else None,
            server_version=str(self.server_version),
            server_fingerprints=[fingerprint(self.server)],
        )
        if verdict is Aftermath.LANDED and version is not None:
            self._confirm(version)
        self.intended = None
        return verdict is Aftermath.FOREIGN

    def _bench(self, version: SourceVersion) -> DuckBench:
        """One for each version: all reads see the same rows."""
        if self._read is None or self._read[0] != version:
            self._read = (version, DuckBench(self.warehouse, self.relation.base(version)))
        return self._read[1]

    def _survey(self) -> Survey:
        warehouse, relation = self.warehouse, self.relation
        token = ",".join(str(warehouse.tokens[table]) for table in relation.tables)
        return Survey(relation.spec, relation, Known("definition", "schema", "identity", token), warehouse.pin())

    def _situation(self, surveyed: Survey, mode: Mode, *, foreign: bool, hinted: bool) -> Situation:
        return Situation(
            extract="shown",
            mode=mode,
            policy="auto",
            now=surveyed.known,
            confirmed=self.base.confirmation.known if self.base else None,
            base_present=self.base is not None,
            foreign=foreign,
            pending=tuple(one.id for one in self.pending),
            owed=next((Reason[one.reason] for one in self.pending if one.reason), None),
            hinted=hinted,
            opaque=surveyed.relation.why_full is not None,
        )

    # Detect and apply

    def _read_all(self, surveyed: Survey) -> Version:
        bench = self._bench(surveyed.version)
        ledger = bench.ledger_rows("base")
        return self._version(surveyed, self._all_shown(surveyed), Counter(ledger), bench.stats("base"))

    def _all_shown(self, surveyed: Survey) -> Bag:
        return Counter(self.warehouse.query(surveyed.shown.select()))

    def _replace(
        self, surveyed: Survey, plan: Plan, resync: Sequence[str | None], hints: Sequence[Hint]
    ) -> tuple[Plan, Version | None]:
        assert self.base is not None
        base, warehouse = self.base, self.warehouse
        bench = self._bench(surveyed.version)
        bench.load("ledger", base.ledger.elements())
        keyed = [one for one in self.pending if one.decision == "incremental"]
        bench.load("pending", {key for one in keyed for key in one.keys}, keys_only=True)
        checked = checked_hints(hints, surveyed.relation, warehouse)
        candidates, told = propose.propose(surveyed, base.confirmation, warehouse, hints=checked, log=lambda _: None)
        deletes = propose.looks_for_deletes(surveyed, candidates)
        question = Question(candidates, deletes=deletes, resync=tuple(resync), pending=bool(keyed))
        found = find.find_changes(bench, question, base.stats)
        # Nothing here is too much to be replaced by key, and nothing too little.
        settled = settle_plan(
            plan, found, base.stats, policy="auto", delete_share=1.0, full_share=float("inf"), pending=bool(keyed), allow_empty=True
        )  # fmt: skip
        settled = replace(settled, warnings=told)
        if settled.decision == "none":
            return settled, None
        if settled.decision == "full":
            raise Differs(settled.sentence())
        self._stage(settled, frozenset(bench.keys("changed")))
        return settled, self._applied(surveyed, bench, found)

    def _applied(self, surveyed: Survey, bench: DuckBench, found: Found) -> Version:
        """The one rule, and the ledger's slices that were touched."""
        assert self.base is not None
        keys, fresh = self._keys_and_rows(surveyed, bench, found)
        extract = replaced(self.base.extract, self._key_of(surveyed.relation), keys, fresh)
        touched = set(found.slices)
        after = [row for row in bench.ledger_rows("ledger_after") if row[bench.width] in touched]
        kept = [row for row in self.base.ledger.elements() if row[bench.width] not in touched]
        return self._version(surveyed, extract, Counter(kept + after), found.after(self.base.stats))

    def _keys_and_rows(self, surveyed: Survey, bench: DuckBench, found: Found) -> tuple[Collection[Values], Bag]:
        """What is purged: groups of an aggregate, row keys, or else slices; and what comes in their place."""
        relation = surveyed.relation
        if relation.aggregated:
            groups = {row[1:] for row in bench.rows(sets.groups_of(["gone", "fresh"], bench.groups))}
            key_of = self._key_of(relation)
            now = self._all_shown(surveyed)
            return groups, Counter({row: count for row, count in now.items() if key_of(row) in groups})
        fresh = Counter(bench.shown_rows("fresh"))
        if not relation.key:
            return {(name,) for name in found.slices}, fresh
        return bench.keys("changed"), fresh

    def _key_of(self, relation: Relation) -> Callable[[Values], Values]:
        names = [column.name for column in relation.columns]
        if not relation.key:
            at = names.index("DAY")
            return lambda row: (slice_of(relation.slices, row[at]),)
        places = [names.index(column.name) for column in relation.key]
        return lambda row: plain(row[at] for at in places)

    def slice_of(self, row: Values) -> str | None:
        relation = self.relation
        names = [column.name for column in relation.columns]
        column = relation.slices.column
        return slice_of(relation.slices, row[names.index(column)] if column else None)

    def _version(self, surveyed: Survey, extract: Bag, ledger: Bag, stats: Stats) -> Version:
        confirmation = Confirmation(
            extract="shown",
            version=str(self.runs),
            source_version=str(surveyed.version),
            known=surveyed.known,
            watermark=highest_mark(self.warehouse, surveyed.source.watermark, surveyed.source.sql),
            datasource_id="",
            server_version="",
            fingerprint=fingerprint(extract),
            rows=extract.total(),
            change_sets=tuple(one.id for one in self.pending),
        )
        return Version(extract, ledger, stats, confirmation)

    # Deliver

    def _stage(self, plan: Plan, keys: frozenset[Values]) -> None:
        """From here on the keys are pending."""
        reason = plan.reason.name if plan.reason else None
        self.pending.append(Pending(str(self.runs), plan.decision, reason, keys))

    def _deliver(self, made: Version, until: str) -> str:
        """As far as the crash lets it come."""
        if until == "staged":
            return until
        confirmed, server = made.confirmation, str(self.server_version)
        intent = Intent("shown", str(self.runs), confirmed.version, server, confirmed.fingerprint, confirmed.known)
        self.intended = (intent, made)
        if until == "intended":
            return until
        self.publish(made.extract)
        if until == "published":
            return until
        self._confirm(made)
        return "confirmed"

    def publish(self, extract: Bag) -> None:
        self.server, self.server_version = extract, self.server_version + 1

    def _confirm(self, made: Version) -> None:
        confirmation = replace(made.confirmation, server_version=str(self.server_version))
        self.base, self.intended = replace(made, confirmation=confirmation), None
        settled = {*made.confirmation.change_sets, made.confirmation.version}
        self.pending = [one for one in self.pending if one.id not in settled]

    # The law

    def _check(self, version: SourceVersion) -> None:
        assert self.base is not None
        bench = self._bench(version)
        names = [column.name for column in self.relation.columns]
        same(
            "the extract, and what the query shows", self.server, self.warehouse.shown(self.shown.query, version), names
        )
        same(
            "the ledger, and the rows behind the query",
            self.base.ledger,
            Counter(bench.ledger_rows("base")),
            ["ledger"],
        )
        width = bench.width
        counted = stats_of([(row[:width], row[width]) for row in self.base.ledger.elements()])
        if self.base.stats != counted:
            raise Differs(f"the ledger's checksums: {self.base.stats}, not {counted}")


class Differs(AssertionError):  # noqa: N818 - says what it found
    """What the suite is there to find."""


def same(what: str, one: Bag | None, other: Bag, names: Sequence[str]) -> None:
    if one != other:
        one = one or Counter()
        extra, missing = dict(one - other), dict(other - one)
        raise Differs(f"{what} ({', '.join(names)}): too many {extra}, too few {missing}")


def replaced(extract: Bag, key_of: Callable[[Values], Values], keys: Collection[Values], fresh: Bag) -> Bag:
    """E' = { r in E : key(r) not in S } + { r in V_new : key(r) in S }."""
    kept = Counter({row: count for row, count in extract.items() if key_of(row) not in keys})
    return kept + fresh


def fingerprint(extract: Mapping[Values, int] | None) -> str:
    return repr(sorted((extract or {}).items(), key=repr))
