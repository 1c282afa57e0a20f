"""Random histories of queries' tables: after every finished refresh the extract is what the query shows, as a bag of rows.

The product proposes, finds and plans; DuckDB says what the query shows. And the suite itself is tested: by each of a dozen
mistakes that a refresh could make, and that a random history must notice.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tir_dagster.changes import detectors
from tir_dagster.changes import find_changes as find
from tir_dagster.changes import question as described
from tir_dagster.changes.detectors import _Detection as Detection
from tir_dagster.changes.hints import All, And, Between, ChangeType, Equal, Hint, In, KeyList, Not, Scope, Unknown
from tir_dagster.changes.plan import Reason
from tir_dagster.changes.relation import Dimension
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.changes import following
from tir_dagster_tests.changes.following import Detectors, Differs, FollowedQuery, relation_for, row_slice
from tir_dagster_tests.changes.queries import QUERIES, WHOLE
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, SALES, STAMP, Row, Warehouse

HISTORIES = int(os.environ.get("TIR_PURE_HISTORIES", "180"))

DETECTORS = [
    Detectors("watermark", "diff"),
    Detectors("watermark", "feed"),
    Detectors("watermark", "watermark"),
    Detectors("feed", "watermark"),
    Detectors("feed", "feed"),
    Detectors("feed", "diff"),
    Detectors("diff", "diff"),
    Detectors("diff", "feed"),
    Detectors("hint", "hint"),
    Detectors("hint", "diff"),
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
        name = list(QUERIES)[self.batch % len(QUERIES)]
        detectors = random.choice(DETECTORS)
        note(f"{name}, {detectors}")
        self.warehouse = Warehouse(CONNECTION)
        self.warehouse.tracked = random.random() < 0.9
        self.history = FollowedQuery(self.warehouse, QUERIES[name], detectors)
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
        if at >= len(rows):
            # A refresh in between, before which a row was deleted.
            return
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
        if place := self.some_row():
            table, at = place
            name = self.random.choice([name for name in COLUMNS[table] if name != STAMP])
            self.change_row(table, at, {name: self.random.choice(COLUMNS[table][name])})

    @rule()
    def update_several(self) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.update()

    @rule()
    def update_and_revert(self) -> None:
        if place := self.some_row():
            table, at = place
            before = {name: value for name, value in self.warehouse.tables[table][at].items() if name != STAMP}
            self.change_row(table, at, {name: self.random.choice(COLUMNS[table][name]) for name in before})
            self.change_row(table, at, before)

    @rule()
    def update_nothing(self) -> None:
        if place := self.some_row():
            self.change_row(*place, {})

    @rule()
    def delete(self) -> None:
        if place := self.some_row():
            table, at = place
            rows = list(self.warehouse.tables[table])
            self.gone.append((table, rows.pop(at)))
            self.write(table, rows, [self.gone[-1][1]], [])

    @precondition(lambda self: self.gone)
    @rule()
    def insert_again(self) -> None:
        self.insert_row(*self.gone.pop(self.random.randrange(len(self.gone))))

    @rule()
    def duplicate(self) -> None:
        if place := self.some_row():
            table, at = place
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
        """The file loses, doubles or misplaces a row; the slice where that shows is asked for again, and repairs it."""
        self.run()
        history = self.history
        if not history.server:
            return
        row = self.random.choice(sorted(history.server, key=repr))
        kind = self.random.choice(["loses", "doubles", "misplaces"])
        names = [column.name for column in history.relation.columns]
        key = [column.name for column in history.relation.key]
        one, wrong = Counter([row]), row
        if kind == "misplaces" and key and "DAY" in names and "DAY" not in key:
            at = names.index("DAY")
            day = self.random.choice([day for day in COLUMNS[SALES]["DAY"] if day != row[at]])
            wrong = (*row[:at], day, *row[at + 1 :])
            extract = history.server - one + Counter([wrong])
        else:
            extract = history.server + one if kind == "doubles" else history.server - one
        note(f"the extract {kind} {row}")
        history.base, history.server = replace(history.base, extract=extract), extract
        # At once: a refresh that finds nothing to do would show the drift.
        history.refresh("slices", resync=[row_slice(history.relation, wrong)], hints=self.hints())
        self.forget_what_was_told()

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
        plan = self.history.refresh(hints=hints, **options)
        note(plan.sentence())
        # What changed nothing that is shown is told again with the next change: the base is still the version before both.
        if plan.decision != "none":
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
            if (images := [row for changed_table, row in self.told if changed_table == table])
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


# Hypothesis varies what it found already once it has seen ten: here new histories find more. Each query has a batch.
BATCH = 5


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


@pytest.mark.parametrize("name", QUERIES)
def test_the_queries_here_are_refreshed_by_key(name):
    relation = relation_for(QUERIES[name], Detectors())
    assert (relation.why_full, relation.whole is not None) == (None, name in WHOLE)


def test_the_extract_is_what_the_query_shows_after_any_history():
    play()


# What such histories found


def followed(name: str, detectors: Detectors, tables: dict[TableName, list[dict[str, Any]]]) -> FollowedQuery:
    warehouse = Warehouse(CONNECTION)
    for table, rows in tables.items():
        warehouse.write(table, [dict.fromkeys(COLUMNS[table]) | row for row in rows])
    history = FollowedQuery(warehouse, QUERIES[name], detectors)
    history.refresh()
    return history


def test_a_partner_that_goes_moves_its_rows_out_of_a_group_that_no_feed_names():
    tables = {SALES: [{"ID": 1, "PRODUCT": 1}], PRODUCTS: [{"PRODUCT": 1, "COLOR": "b"}]}
    history = followed("sums without a row key", Detectors("feed", "feed"), tables)
    history.warehouse.write(PRODUCTS, [])
    assert history.refresh().decision == "incremental"


@pytest.mark.parametrize("step", ["staged", "intended", "published"])
@pytest.mark.parametrize("detector", ["watermark", "feed", "diff"])
def test_t6_a_row_that_came_before_a_crash_and_went_after_it_is_gone(detector, step):
    tables = {SALES: [{"ID": 0, "QTY": 1}], PRODUCTS: []}
    history = followed("sums with defaults", Detectors(detector), tables)
    before = history.warehouse.tables[SALES]
    history.warehouse.write(SALES, [*before, before[0] | {"ID": 1}])
    history.refresh(until=step)
    history.warehouse.write(SALES, before)
    assert history.refresh().decision == "incremental"


@pytest.mark.parametrize("step", ["staged", "intended", "published"])
def test_t7_a_value_that_changed_before_a_crash_and_back_after_it_is_the_old_one(step):
    tables = {SALES: [{"ID": 0, "QTY": 1, "PRODUCT": 1}], PRODUCTS: [{"PRODUCT": 1, "PRICE": 1}]}
    history = followed("left", Detectors("feed", "feed"), tables)
    before = history.warehouse.tables[SALES]
    history.warehouse.write(SALES, [before[0] | {"QTY": 0}])
    history.refresh(until=step)
    history.warehouse.write(SALES, before)
    assert history.refresh().decision == "incremental"


# The suite itself: each of these mistakes must be noticed


def only_with(patch: pytest.MonkeyPatch, wanted: Callable[[Detectors], bool], text: str = ".products ") -> None:
    """Where a mistake can only be made by some detectors or queries, the others need not be waited for."""
    here = sys.modules[__name__]
    patch.setattr(here, "DETECTORS", [choice for choice in DETECTORS if wanted(choice)])
    taken_apart = {name: entry for name, entry in QUERIES.items() if name not in WHOLE}
    patch.setattr(here, "QUERIES", {name: entry for name, entry in taken_apart.items() if text in entry.query})


def not_by_diff(choice: Detectors) -> bool:
    return choice.first != "diff"


def ignore_dimensions(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, not_by_diff)
    patch.setattr(Detection, "_referring", lambda self: [])


def ignore_deleted_dimension_rows(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda choice: choice.joined == "diff" and not_by_diff(choice))
    real = Detection._changed_rows
    patch.setattr(Detection, "_changed_rows", lambda *args, **more: real(*args, **more).replace("<> 0", "> 0"))


def only_dimension_updates(patch: pytest.MonkeyPatch) -> None:
    """Keys that are there before and after."""

    def both_sides(self, dimension, *, anything) -> str:
        key, span = detectors._names(dimension.key), self._question.span
        versions = [f"SELECT {key} FROM {dimension.table.sql} {version.sql}" for version in (span.old, span.new)]
        return f"{real(self, dimension, anything=anything)} INTERSECT {' INTERSECT '.join(versions)}"

    only_with(patch, lambda choice: choice.joined == "diff" and not_by_diff(choice))
    real = Detection._changed_rows
    patch.setattr(Detection, "_changed_rows", both_sides)


def count_no_rows_of_marked_tables(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda choice: choice.joined == "watermark")
    real = Detection._changed_rows

    def marked(self, dimension, *, anything) -> str:
        return real(self, replace(dimension, changes=replace(dimension.changes, deletes=False)), anything=anything)

    patch.setattr(Detection, "_changed_rows", marked)


def forget_the_chain(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, not_by_diff, ".makers ")
    patch.setattr(Dimension, "parent", property(lambda self: None))


def no_old_groups(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, not_by_diff, "GROUP BY")
    real = Detection._of_named
    old = f"FROM {detectors.OLD} AS r"
    patch.setattr(
        Detection,
        "_of_named",
        lambda *args: [select for select in real(*args) if not select.split(" JOIN ")[0].endswith(old)],
    )


def old_rows_from_what_is_there_now(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, not_by_diff, "GROUP BY")
    real = Detection._of_named
    patch.setattr(
        Detection, "_of_named", lambda *args: [select.replace(detectors.OLD, detectors.NEW) for select in real(*args)]
    )


def append_to_the_extract(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(following, "replaced", lambda extract, key, keys, fresh: extract + fresh)


def compare_keys_by_equality(patch: pytest.MonkeyPatch) -> None:
    real = detectors._rows_of
    patch.setattr(detectors, "_rows_of", lambda *args: real(*args).replace("IS NOT DISTINCT FROM", "="))


def forget_pending_sets(patch: pytest.MonkeyPatch) -> None:
    """A hint is given once: after a crash only the pending set knows of it. Other detectors look from the base again."""
    only_with(patch, lambda choice: choice.first == "hint", ".sales")
    real = find.find_changes
    patch.setattr(
        find,
        "find_changes",
        lambda relation, question, scope, **more: real(relation, question, replace(scope, pending=()), **more),
    )


def put_back_slices_not_keys(patch: pytest.MonkeyPatch) -> None:
    """What is purged by a re-sync comes back only within the slices that were asked for."""
    real = following.BagComparison.decide

    def by_slice(self, forced, folder):
        found = real(self, forced, folder)
        if forced.slices:
            self.fresh = Counter({r: n for r, n in self.fresh.items() if row_slice(self._relation, r) in forced.slices})
        return found

    patch.setattr(following.BagComparison, "decide", by_slice)


def resync_nothing(patch: pytest.MonkeyPatch) -> None:
    real = find.find_changes
    patch.setattr(
        find,
        "find_changes",
        lambda relation, question, scope, **more: real(relation, question, replace(scope, resync=()), **more),
    )


def look_up_nothing_outside_the_slices(patch: pytest.MonkeyPatch) -> None:
    """Rows that left a slice for another one are not looked for there."""
    patch.setattr(following.BagComparison, "unstaged_keys_in_slices", lambda *_, **__: [])


def look_for_no_deletes(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda choice: choice.first == "watermark", ".sales")
    patch.setattr(Detection, "_recounted", lambda self: [])


def count_no_slices(patch: pytest.MonkeyPatch) -> None:
    """Without history nobody else notices what was deleted behind the watermark's back."""
    only_with(patch, lambda choice: choice.first == "watermark", ".sales")
    patch.setattr(find, "_differing_slices", lambda *_: [])


def resolve_hints_on_the_new_side_only(patch: pytest.MonkeyPatch) -> None:
    only_with(patch, lambda choice: choice.joined == "hint")
    real = described._described

    def new_side(*args):
        selects = real(*args)
        return replace(selects, queries=selects.queries[::2])

    patch.setattr(described, "_described", new_side)


def believe_the_watermark_alone(patch: pytest.MonkeyPatch) -> None:
    """Rows that a joined table's change reaches are forgotten where the first table changed, too."""
    only_with(patch, lambda choice: choice.first == "watermark")
    real = Detection._referring

    def alone(self) -> list[str]:
        return [] if self._relation.table in self._question.changed else real(self)

    patch.setattr(Detection, "_referring", alone)


def compare_what_is_shown_by_key_alone(patch: pytest.MonkeyPatch) -> None:
    """Rows whose values changed are the same where only keys are compared."""
    only_with(patch, lambda choice: choice.first == "diff", ".sales")
    patch.setattr(detectors, "numbered", lambda _: {})


def only_compared_as_a_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "QUERIES", WHOLE)


def watch_the_first_table_alone(patch: pytest.MonkeyPatch) -> None:
    only_compared_as_a_whole(patch)
    real = Detection.candidates

    def alone(self) -> detectors.Candidates:
        mine = self._relation.table in self._question.changed
        return real(self) if mine else detectors.Candidates()

    patch.setattr(Detection, "candidates", alone)


def forget_what_the_query_no_longer_shows(patch: pytest.MonkeyPatch) -> None:
    only_compared_as_a_whole(patch)
    real = Detection._differing
    patch.setattr(Detection, "_differing", lambda self: real(self).replace("<> 0", "> 0"))


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    ignore_dimensions,
    ignore_deleted_dimension_rows,
    only_dimension_updates,
    count_no_rows_of_marked_tables,
    forget_the_chain,
    no_old_groups,
    old_rows_from_what_is_there_now,
    append_to_the_extract,
    compare_keys_by_equality,
    forget_pending_sets,
    put_back_slices_not_keys,
    resync_nothing,
    look_up_nothing_outside_the_slices,
    look_for_no_deletes,
    count_no_slices,
    resolve_hints_on_the_new_side_only,
    believe_the_watermark_alone,
    compare_what_is_shown_by_key_alone,
    watch_the_first_table_alone,
    forget_what_the_query_no_longer_shows,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.replace("_", " "))
def test_each_mutant_is_killed(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(Differs):
        play(shrink=False)
