"""Random histories of queries' tables: after every finished refresh the extract is what the query shows, as a bag of rows.

The product proposes, finds and plans; DuckDB says what the query shows. And the suite itself is tested: by each of a dozen
mistakes that a refresh could make, and that a random history must notice.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tir_dagster.changes import affected, described, find, propose, sets
from tir_dagster.changes.candidates import Candidates
from tir_dagster.changes.hints import All, And, Between, ChangeType, Equal, Hint, In, KeyList, Not, Scope, Unknown
from tir_dagster.changes.plan import Reason
from tir_dagster.source.names import TableName
from tir_dagster_tests.changes import viewhistory
from tir_dagster_tests.changes.viewhistory import Detectors, Differs, History, Shown, relation_for
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, SALES, STAMP, Row, Warehouse

HISTORIES = int(os.environ.get("TIR_PURE_HISTORIES", "150"))

LEFT = "FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"
INNER = "FROM db.s.sales s JOIN db.s.products p ON p.product = s.product"
CHAIN = f"{LEFT} LEFT JOIN db.s.makers m ON m.maker = p.maker"
DETAIL = "SELECT s.id, s.day, s.qty * COALESCE(p.price, 0) AS amount, COALESCE(p.color, 'N/A') AS color"
BY_COLOR = (
    """SELECT s.day, COALESCE(p.color, 'N/A') AS color, SUM(s.qty * COALESCE(p.price, 0)) AS amount, COUNT(*) AS n"""
)
BY_DAY_AND_COLOR = "GROUP BY s.day, COALESCE(p.color, 'N/A')"
QUERIES: dict[str, Shown] = {
    "copy": Shown("SELECT id, day, qty + 1 AS more, note FROM db.s.sales"),
    "filtered copy": Shown("SELECT id, day, qty FROM db.s.sales WHERE COALESCE(note, 'b') <> 'a'"),
    "copy without slices": Shown("SELECT id, day, qty FROM db.s.sales", sliced=False),
    "copy without a row key": Shown("SELECT id, day, qty FROM db.s.sales", row_key=()),
    "copy with a key of two": Shown("SELECT id, other, day, qty FROM db.s.sales", row_key=("ID", "OTHER")),
    "left": Shown(f"{DETAIL} {LEFT}"),
    "inner": Shown(f"{DETAIL} {INNER}"),
    "filter on the optional side": Shown(f"SELECT id, day, s.qty {LEFT} WHERE p.color = 'a' OR p.price IS NULL"),
    "chain": Shown(f"SELECT s.id, s.day, p.color, m.title {CHAIN}"),
    "mandatory behind optional": Shown(f"SELECT s.id, s.day, m.title {LEFT} JOIN db.s.makers m ON m.maker = p.maker"),
    "two join keys": Shown(
        "SELECT s.id, s.day, p.color FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product AND p.maker = s.other"
    ),
    "condition over both sides": Shown(f"SELECT s.id, s.day, p.color {LEFT} AND p.since <= s.qty", sliced=False),
    "joined twice": Shown(
        f"SELECT s.id, s.day, p.color AS one, q.color AS two {LEFT} JOIN db.s.products q ON q.product = s.other"
    ),
    "sums with defaults": Shown(f"{BY_COLOR} {LEFT} {BY_DAY_AND_COLOR}"),
    "sums of the mandatory": Shown(f"{BY_COLOR} {INNER} {BY_DAY_AND_COLOR}"),
    "sums without a row key": Shown(f"{BY_COLOR} {LEFT} {BY_DAY_AND_COLOR}", row_key=()),
    "having": Shown(
        f"SELECT s.qty, MAX(p.price) AS top, COUNT(*) AS n {LEFT} WHERE s.note <> 'b' OR s.note IS NULL GROUP BY s.qty "
        "HAVING MIN(p.price) > 0 OR COUNT(DISTINCT p.color) > 1",
        sliced=False,
    ),
    "sums over a chain": Shown(f"SELECT m.title, SUM(s.qty) AS qty, COUNT(*) AS n {CHAIN} GROUP BY m.title", sliced=False),
    "distinct": Shown(f"SELECT DISTINCT p.color, s.day {LEFT}"),
}  # fmt: skip
DETECTORS = [
    Detectors("watermark", "snapshot"),
    Detectors("watermark", "feed"),
    Detectors("watermark", "watermark"),
    Detectors("feed", "watermark"),
    Detectors("feed", "feed"),
    Detectors("feed", "snapshot"),
    Detectors("snapshot", "snapshot"),
    Detectors("snapshot", "feed"),
    Detectors("hint", "hint"),
    Detectors("hint", "snapshot"),
]
SLICES = (None, "2025-03", "2025-04")
LATE = timedelta(seconds=20)


def random_row(table: TableName, random: Random) -> Row:
    return {name: random.choice(of) if of else None for name, of in COLUMNS[table].items()}


class Following(RuleBasedStateMachine):
    """Tables that change in all ways, an extract that follows, and a writer who may tell what was done.

    Hypothesis chooses what happens, a seed to which rows: strategies prefer equal values, where little can be missed.
    """

    batch = 0

    @initialize(number=st.integers(0, 2**32))
    def first_load(self, number: int) -> None:
        self.random = random = Random(f"{self.batch}, {number}")
        name = list(QUERIES)[self.batch * 7 % len(QUERIES)]
        detectors = random.choice(DETECTORS)
        note(f"{name}, {detectors}")
        self.warehouse = Warehouse(CONNECTION)
        self.warehouse.tracked = random.random() < 0.9
        # More changed keys than these are not named one by one: then every row is compared.
        affected.MOST_KEYS = random.choice([1, *[10_000] * 4])
        self.history = History(self.warehouse, QUERIES[name], detectors)
        self.tables = self.history.relation.tables
        self.busy: Sequence[TableName] = self.tables
        self.gone: list[tuple[TableName, Row]] = []
        self.told: list[tuple[TableName, Row]] = []
        self.last = self.warehouse.tick()
        for table in self.tables:
            for _ in range(random.randint(1, 5)):
                self.insert_row(table, random_row(table, random))
        assert self.history.refresh().reason is Reason.FIRST_LOAD
        self.forget_what_was_told()

    # What happens to the tables

    def insert_row(self, table: TableName, row: Row) -> None:
        self.write(table, [*self.warehouse.tables[table], row | self.stamp()], [], [row])

    def stamp(self) -> Row:
        self.last = self.warehouse.tick()
        return {STAMP: self.last}

    def write(self, table: TableName, rows: list[Row], old: Sequence[Row], new: Sequence[Row]) -> None:
        """Rows of a table as they are from now on; and those that differ, as they were and as they are."""
        note(f"{table.name}: {[(*row.values(),) for row in old]} -> {[(*row.values(),) for row in new]}")
        self.warehouse.write(table, rows)
        self.told += [(table, row) for row in (*old, *new)]
        if len(self.told) > 6 and self.history.base is not None:
            self.run()

    def change_row(self, table: TableName, at: int, changes: Row) -> None:
        rows = [dict(row) for row in self.warehouse.tables[table]]
        old = dict(rows[at])
        rows[at].update(changes | self.stamp())
        self.write(table, rows, [old], [rows[at]])

    def some_row(self) -> tuple[TableName, int] | None:
        table = self.random.choice(self.busy)
        rows = self.warehouse.tables[table]
        return (table, self.random.randrange(len(rows))) if rows else None

    @rule()
    def insert(self) -> None:
        table = self.random.choice(self.busy)
        self.insert_row(table, random_row(table, self.random))

    @rule()
    def arrive_late(self) -> None:
        """A row that comes, or changes, with a stamp before the last one's, or with none."""
        table = self.random.choice(self.busy)
        rows = list(self.warehouse.tables[table])
        old = [rows.pop(self.random.randrange(len(rows)))] if rows and self.random.random() < 0.5 else []
        row = random_row(table, self.random) | {STAMP: self.random.choice([self.last - LATE, None])}
        # One that changes often keeps the key that others know it by: no count tells of it.
        kept = list(COLUMNS[table])[: self.random.randint(0, 2)] if old else []
        row |= {name: old[0][name] for name in kept}
        self.write(table, [*rows, row], old, [row])

    @rule()
    def update(self) -> None:
        if found := self.some_row():
            table, at = found
            name = self.random.choice([name for name in COLUMNS[table] if name != STAMP])
            self.change_row(table, at, {name: self.random.choice(COLUMNS[table][name])})

    @rule()
    def update_several(self) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.update()

    @rule()
    def update_and_revert(self) -> None:
        if found := self.some_row():
            table, at = found
            before = {name: value for name, value in self.warehouse.tables[table][at].items() if name != STAMP}
            self.change_row(table, at, {name: self.random.choice(COLUMNS[table][name]) for name in before})
            self.change_row(table, at, before)

    @rule()
    def update_nothing(self) -> None:
        if found := self.some_row():
            self.change_row(*found, {})

    @rule()
    def delete(self) -> None:
        if found := self.some_row():
            table, at = found
            rows = list(self.warehouse.tables[table])
            self.gone.append((table, rows.pop(at)))
            self.write(table, rows, [self.gone[-1][1]], [])

    @precondition(lambda self: self.gone)
    @rule()
    def insert_again(self) -> None:
        self.insert_row(*self.gone.pop(self.random.randrange(len(self.gone))))

    @rule()
    def duplicate(self) -> None:
        if found := self.some_row():
            table, at = found
            self.insert_row(table, dict(self.warehouse.tables[table][at]))

    @rule()
    def truncate_and_reload(self) -> None:
        """All rows go, and most of them come back, in another order."""
        table = self.random.choice(self.busy)
        before, stamp = self.warehouse.tables[table], self.stamp()
        after = [row | stamp for row in before if self.random.random() < 0.9]
        self.random.shuffle(after)
        self.write(table, after, before, after)

    @rule()
    def lose_the_history(self) -> None:
        if self.random.random() < 0.2:
            note("Time Travel reaches no further back")
            self.warehouse.forget()

    # What happens to the extract

    @rule()
    def refresh(self) -> None:
        if not self.told:
            self.update()
        self.run()

    @rule()
    def change_and_refresh(self) -> None:
        self.random.choice([self.update, self.delete, self.insert])()
        self.run()
        assert self.history.refresh().decision == "none", "a second refresh found something to do"

    @rule()
    def refresh_everything_or_some_slices(self) -> None:
        if self.random.random() < 0.2:
            self.run(mode="full")
        else:
            self.run(mode="slices", resync=self.some_slices())

    @rule()
    def crash(self) -> None:
        self.random.choice([self.update, self.delete, self.insert])()
        self.run(until=self.random.choice(["staged", "staged", "intended", "published"]))

    @rule()
    def drift(self) -> None:
        """The file loses or doubles a row; its slice is asked for again, and mends it."""
        self.run()
        history = self.history
        if not history.server:
            return
        row = self.random.choice(sorted(history.server, key=repr))
        more = self.random.random() < 0.5
        extract = history.server + Counter([row]) if more else history.server - Counter([row])
        note(f"the extract {'doubles' if more else 'loses'} {row}")
        history.base = replace(history.base, extract=extract)
        self.run(mode="slices", resync=[history.slice_of(row), *self.some_slices()])

    @rule()
    def publish_something_else(self) -> None:
        if self.random.random() < 0.2:
            self.history.publish(Counter([("theirs",)]))
            assert self.history.refresh().reason is Reason.FOREIGN_PUBLISH
            self.forget_what_was_told()

    def some_slices(self) -> list[str | None]:
        slices = SLICES if self.history.shown.sliced else ("all",)
        return self.random.sample(slices, self.random.randint(1, len(slices)))

    def run(self, **options: Any) -> None:
        """A refresh; before it, some crash, and the tables change again."""
        if "until" not in options and self.random.random() < 0.25:
            self.crash()
            self.random.choice([self.update, self.delete, self.insert])()
        hints = self.hints()
        note(f"refresh {options}, hints {hints}")
        note(self.history.refresh(hints=hints, **options).sentence())
        self.forget_what_was_told()

    def forget_what_was_told(self) -> None:
        """It is told once. And often all that happens next happens to one table."""
        self.told.clear()
        self.busy = self.random.choice([self.tables, self.tables[:1], self.tables[1:2], self.tables[1:]]) or self.tables

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.run()

    # What the writer tells

    def hints(self) -> list[Hint]:
        """All that was done, where nothing else tells; else anything: exact, broad, partial or nonsense."""
        alone = [
            table
            for table in self.tables
            if (self.history.detectors.first if table == SALES else self.history.detectors.joined) == "hint"
        ]
        hints = [
            Hint(table, self.random.choice(list(ChangeType)), self.scope(table, images))
            for table in alone
            if (images := [row for told, row in self.told if told == table])
        ]
        if self.random.random() < 0.2:
            table = self.random.choice(self.tables)
            partial = Hint(
                table, self.random.choice(list(ChangeType)), self.scope(table, [random_row(table, self.random)])
            )
            hints.append(partial)
        return hints

    def scope(self, table: TableName, images: list[Row]) -> Scope:
        """A scope that holds all these rows, and maybe more."""
        names = [name for name in COLUMNS[table] if name != STAMP]
        name = self.random.choice(names)
        values = tuple(dict.fromkeys(row[name] for row in images))
        other = next((value for value in COLUMNS[table][name] if value not in values), None)
        scopes: list[Scope] = [
            KeyList(tuple(names), tuple(tuple(row[name] for name in names) for row in images)),
            KeyList((names[0],), tuple((row[names[0]],) for row in images)),
            In(name, values),
            All(),
            Unknown(),
        ]
        if other is not None:
            scopes.append(Not(Equal(name, other)))
        if None not in values and not isinstance(values[0], str):
            scopes.append(And((Between(name, min(values), max(values)), Not(Equal(name, None)))))
        return self.random.choice(scopes)


CONNECTION = duckdb.connect(config={"threads": 1})


# Hypothesis varies what it found already once it has seen ten: here new histories find more.
BATCH = 10


def play(*, shrink: bool = True) -> None:
    for number in range(-(-HISTORIES // BATCH)):
        play_batch(number, shrink=shrink)


def play_batch(number: int, *, shrink: bool) -> None:
    class Batch(Following):
        batch = number

    chosen = "TIR_PURE_HISTORIES" not in os.environ
    run_state_machine_as_test(
        seed(number)(Batch) if chosen else Batch,
        settings=settings(
            max_examples=BATCH,
            stateful_step_count=10,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def most_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Histories set it: it is put back."""
    monkeypatch.setattr(affected, "MOST_KEYS", affected.MOST_KEYS)


@pytest.mark.parametrize("name", QUERIES)
def test_the_queries_here_are_refreshed_by_key(name):
    assert relation_for(QUERIES[name], Detectors()).why_full is None


def test_the_extract_is_what_the_query_shows_after_any_history():
    play()


# What such histories found


def following(name: str, detectors: Detectors, tables: dict[TableName, list[dict[str, Any]]]) -> History:
    warehouse = Warehouse(CONNECTION)
    for table, rows in tables.items():
        warehouse.write(table, [dict.fromkeys(COLUMNS[table]) | row for row in rows])
    history = History(warehouse, QUERIES[name], detectors)
    history.refresh()
    return history


def test_a_partner_that_goes_moves_its_rows_out_of_a_group_that_no_feed_names():
    tables = {SALES: [{"ID": 1, "PRODUCT": 1}], PRODUCTS: [{"PRODUCT": 1, "COLOR": "b"}]}
    history = following("sums without a row key", Detectors("feed", "feed"), tables)
    history.warehouse.write(PRODUCTS, [])
    assert history.refresh().decision == "incremental"


def test_keys_with_a_null_do_not_hide_others_behind_the_limit(monkeypatch):
    monkeypatch.setattr(affected, "MOST_KEYS", 1)
    keys = [(0, None), (1, None), (1, 1)]
    tables = {SALES: [{"ID": 1, "PRODUCT": 1, "OTHER": 1}], PRODUCTS: []}
    history = following("two join keys", Detectors(), tables)
    partners = [{"PRODUCT": product, "MAKER": maker, "COLOR": "a"} for product, maker in keys]
    history.warehouse.write(PRODUCTS, [dict.fromkeys(COLUMNS[PRODUCTS]) | row for row in partners])
    assert history.refresh().decision == "incremental"


@pytest.mark.parametrize("step", ["staged", "intended", "published"])
@pytest.mark.parametrize("detector", ["watermark", "feed", "snapshot"])
def test_t6_a_row_that_came_before_a_crash_and_went_after_it_is_gone(detector, step):
    tables = {SALES: [{"ID": 0, "QTY": 1}], PRODUCTS: []}
    history = following("sums with defaults", Detectors(detector), tables)
    before = history.warehouse.tables[SALES]
    history.warehouse.write(SALES, [*before, before[0] | {"ID": 1}])
    history.refresh(until=step)
    history.warehouse.write(SALES, before)
    assert history.refresh().decision == "incremental"


@pytest.mark.parametrize("step", ["staged", "intended", "published"])
def test_t7_a_value_that_changed_before_a_crash_and_back_after_it_is_the_old_one(step):
    tables = {SALES: [{"ID": 0, "QTY": 1, "PRODUCT": 1}], PRODUCTS: [{"PRODUCT": 1, "PRICE": 1}]}
    history = following("left", Detectors("feed", "feed"), tables)
    before = history.warehouse.tables[SALES]
    history.warehouse.write(SALES, [before[0] | {"QTY": 0}])
    history.refresh(until=step)
    history.warehouse.write(SALES, before)
    assert history.refresh().decision == "incremental"


# The suite itself: each of these mistakes must be noticed


def only_with(patch: pytest.MonkeyPatch, wanted: Callable[[Detectors], bool], tables: str = "products") -> None:
    """Where a mistake can only be made by some detectors or queries, the others need not be waited for."""
    here = sys.modules[__name__]
    patch.setattr(here, "DETECTORS", [one for one in DETECTORS if wanted(one)])
    patch.setattr(here, "QUERIES", {name: shown for name, shown in QUERIES.items() if f".{tables} " in shown.query})


def ignore_dimensions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(propose, "affected", lambda *_, **__: (Candidates(), ()))


def ignore_deleted_dimension_rows(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda detectors: detectors.joined == "snapshot")
    real = affected._differing
    patch.setattr(affected, "_differing", lambda *args: real(*args).replace("SUM(TIR_N) <> 0", "SUM(TIR_N) > 0"))


def count_no_rows_of_marked_tables(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda detectors: detectors.joined == "watermark")
    nothing = "SELECT * FROM (SELECT {0} FROM {1}) WHERE FALSE"
    patch.setattr(
        affected, "_recounted", lambda dimension, new, old: nothing.format(affected._listed(dimension.key), new)
    )


def only_dimension_updates(patch: pytest.MonkeyPatch) -> None:
    """Keys that are there before and after."""

    def both_sides(dimension, span) -> str:
        key = affected._listed(dimension.key)
        versions = [f"SELECT {key} FROM {dimension.table.sql} {version.sql}" for version in (span.old, span.new)]
        return f"{real(dimension, span)} INTERSECT {' INTERSECT '.join(versions)}"

    only_with(patch, lambda detectors: detectors.joined == "snapshot")
    real = affected._differing
    patch.setattr(affected, "_differing", both_sides)


def forget_the_chain(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda _: True, "makers")
    patch.setattr(affected, "_referring_keys", lambda *_: set())


def no_old_groups(patch: pytest.MonkeyPatch) -> None:
    real = sets.groups_of
    patch.setattr(
        sets, "groups_of", lambda relations, groups: real([one for one in relations if one != "gone"], groups)
    )


def old_groups_from_what_is_there_now(patch: pytest.MonkeyPatch) -> None:
    """The ledger is asked for the groups of keys that are gone; those of others are taken as they are now."""
    vanished = "(SELECT * FROM gone g WHERE NOT EXISTS (SELECT 1 FROM fresh f WHERE f.k0 IS NOT DISTINCT FROM g.k0))"
    real = sets.groups_of
    patch.setattr(
        sets,
        "groups_of",
        lambda relations, groups: real([vanished if one == "gone" else one for one in relations], groups),
    )


def append_to_the_ledger(patch: pytest.MonkeyPatch) -> None:
    def appended(ledger: str, keys: str, fresh: str, width: int, groups: int = 0) -> str:
        columns = sets.row_columns(width, groups)
        return f"SELECT {columns} FROM {ledger} UNION ALL SELECT {columns} FROM {fresh}"

    patch.setattr(sets, "replaced", appended)


def append_to_the_extract(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(viewhistory, "replaced", lambda extract, key_of, keys, fresh: extract + fresh)


def compare_keys_by_equality(patch: pytest.MonkeyPatch) -> None:
    def equal(one: str, other: str, width: int) -> str:
        return " AND ".join(f"{one}.k{at} = {other}.k{at}" for at in range(width))

    patch.setattr(sets, "same_key", equal)


def forget_pending_sets(patch: pytest.MonkeyPatch) -> None:
    """A hint is given once: after a crash only the pending set knows of it. Other detectors look from the base again."""
    only_with(patch, lambda detectors: detectors.first == "hint", "sales")
    real = find.find_changes
    patch.setattr(
        find, "find_changes", lambda bench, question, stats: real(bench, replace(question, pending=False), stats)
    )


def put_back_slices_not_keys(patch: pytest.MonkeyPatch) -> None:
    """What is purged by a re-sync comes back only within the slices that were asked for."""

    def by_slice(bench, question, stats):
        found = real(bench, question, stats)
        if question.resync:
            bench.define("all_fresh", "SELECT * FROM fresh")
            bench.define("fresh", sets.in_slices("all_fresh", question.resync))
        return found

    real = find.find_changes
    patch.setattr(find, "find_changes", by_slice)


def resync_nothing(patch: pytest.MonkeyPatch) -> None:
    real = find.find_changes
    patch.setattr(find, "find_changes", lambda bench, question, stats: real(bench, replace(question, resync=()), stats))


def look_for_no_deletes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(propose, "looks_for_deletes", lambda *_: False)


def resolve_hints_on_the_new_side_only(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda detectors: detectors.joined == "hint")
    real = described._described

    def new_side(*args):
        found = real(*args)
        return replace(found, queries=found.queries[::2])

    patch.setattr(described, "_described", new_side)


def believe_the_watermark_alone(patch: pytest.MonkeyPatch) -> None:
    """Rows that a joined table's change reaches are forgotten where the first table changed, too."""
    only_with(patch, lambda detectors: detectors.first == "watermark")
    real = propose.propose

    def alone(*args, **options):
        candidates, told = real(*args, **options)
        return (replace(candidates, referring=()) if candidates.since else candidates), told

    patch.setattr(propose, "propose", alone)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    ignore_dimensions,
    ignore_deleted_dimension_rows,
    count_no_rows_of_marked_tables,
    only_dimension_updates,
    forget_the_chain,
    no_old_groups,
    old_groups_from_what_is_there_now,
    append_to_the_ledger,
    append_to_the_extract,
    compare_keys_by_equality,
    forget_pending_sets,
    put_back_slices_not_keys,
    resync_nothing,
    look_for_no_deletes,
    resolve_hints_on_the_new_side_only,
    believe_the_watermark_alone,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.replace("_", " "))
def test_each_mutant_is_killed(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(Differs):
        play(shrink=False)
