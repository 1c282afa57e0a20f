"""Random histories of queries' tables: after every finished refresh the extract is what the query shows, as a bag of rows.

The product proposes, finds and plans; DuckDB says what the query shows. And the suite itself is tested: by each of a dozen
mistakes that a refresh could make, and that a random history must notice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tir_dagster.changes import detectors
from tir_dagster.changes import find_changes as find
from tir_dagster.changes import question as described
from tir_dagster.changes.detectors import _Detection as Detection
from tir_dagster.changes.relation import Dimension
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.changes import following, random_histories
from tir_dagster_tests.changes.following import Detectors, Differs, FollowedQuery, relation_for, row_slice
from tir_dagster_tests.changes.queries import QUERIES, WHOLE
from tir_dagster_tests.changes.random_histories import BATCH, CONNECTION, DETECTORS, play_batch
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, SALES, Warehouse

HISTORIES = int(os.environ.get("TIR_PURE_HISTORIES", "180"))


def play(*, shrink: bool = True) -> None:
    for number in range(-(-HISTORIES // BATCH)):
        play_batch(number, shrink=shrink, seeded="TIR_PURE_HISTORIES" not in os.environ)


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
    here = random_histories
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
    patch.setattr(random_histories, "QUERIES", WHOLE)


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
