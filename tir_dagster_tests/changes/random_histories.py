"""A random history of tables, and an extract of a query that follows them: Spark, Hyper and servers are not needed.

The product proposes, finds and plans; DuckDB says what the query shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import duckdb
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tir_dagster.changes.hints import All, And, Between, ChangeType, Equal, Hint, In, KeyList, Not, Scope, Unknown
from tir_dagster.changes.plan import Reason
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.changes.following import Detectors, FollowedQuery, row_slice
from tir_dagster_tests.changes.queries import QUERIES
from tir_dagster_tests.changes.warehouse import COLUMNS, SALES, STAMP, Row, Warehouse

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


def play_batch(number: int, *, count: int = BATCH, shrink: bool = True, seeded: bool = True) -> None:
    """Play so many histories of one query; with `seeded`, the same number gives the same histories."""

    class Batch(Following):
        batch = number

    run_state_machine_as_test(
        seed(number)(Batch) if seeded else Batch,
        settings=settings(
            max_examples=count,
            stateful_step_count=10,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
