"""Replace by key: after any history and any mode of refresh, the extract is the source, as a bag of rows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tir_dagster.changes.candidates import Candidates
from tir_dagster.changes.find import Question, find_changes
from tir_dagster.changes.plan import Plan, settle_plan
from tir_dagster.errors import GuardError
from tir_dagster_tests.changes.bench import Row, SmallBench, bag, stats_of

KEYS = st.one_of(st.none(), st.integers(0, 4))
SLICES = st.sampled_from([None, "2025-03", "2025-04", "2025-05"])
VALUES = st.sampled_from([None, "a", "b"])


class History:
    """A source that changes, an extract that follows, and the ledger beside it."""

    def __init__(self) -> None:
        self.source: list[Row] = []
        self.extract: list[Row] = []
        self.clock = 1
        self.since = 0

    def apply(self, step) -> None:
        kind, *args = step
        self.clock += 1
        if kind == "insert":
            self.source.append(Row(*args, stamp=self.clock))
        elif kind == "update":
            self._change(args[0], lambda row: dataclasses.replace(row, value=args[1], stamp=self.clock))
        elif kind == "rekey":
            self._change(args[0], lambda row: dataclasses.replace(row, key=args[1], stamp=self.clock))
        elif kind == "move":
            self._change(args[0], lambda row: dataclasses.replace(row, slice=args[1], stamp=self.clock))
        elif kind == "move silently":
            self._change(args[0], lambda row: dataclasses.replace(row, slice=args[1]))
        elif kind == "delete one":
            self.source = [row for at, row in enumerate(self.source) if at != args[0] % (len(self.source) or 1)]
        elif kind == "delete":
            self.source = [row for row in self.source if row.key != args[0]]
        elif kind == "reload":
            self.source = [dataclasses.replace(row, stamp=self.clock) for row in self.source]

    def _change(self, key, new) -> None:
        self.source = [new(row) if row.key == key else row for row in self.source]

    def refresh(self, *, resync=(), compare=(), since=True) -> SmallBench:
        """An incremental refresh; gives the workbench, to see what was read."""
        bench = SmallBench(self.source, self.extract)
        candidates = Candidates(since=str(self.since)) if since else Candidates(everything=True)
        question = Question(candidates, resync=tuple(resync), compare=tuple(compare))
        ledger = stats_of([(row.key, row.slice) for row in self.extract])
        found = find_changes(bench, question, ledger)
        changed = bench.keys("changed")
        assert found.unexplained == ()
        # The bench's fresh rows carry hashes; the extract gets the source rows they stand for.
        fresh = [row for row in self.source if row.key in changed]
        assert sorted(bench.rows("fresh"), key=repr) == sorted(((r.key, r.slice, r.hash) for r in fresh), key=repr)
        self.extract = [row for row in self.extract if row.key not in changed] + fresh
        assert sorted(bench.rows("ledger_after"), key=repr) == sorted(
            ((row.key, row.slice, row.hash) for row in self.extract), key=repr
        )
        self.since = self.clock
        return bench


STEP = st.one_of(
    st.tuples(st.just("insert"), KEYS, SLICES, VALUES),
    st.tuples(st.just("insert"), KEYS, SLICES, VALUES),
    st.tuples(st.just("update"), KEYS, VALUES),
    st.tuples(st.just("rekey"), KEYS, KEYS),
    st.tuples(st.just("move"), KEYS, SLICES),
    st.tuples(st.just("move silently"), KEYS, SLICES),
    st.tuples(st.just("delete one"), st.integers(0, 20)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("reload")),
)
ROUND = st.tuples(st.lists(STEP, max_size=6), st.lists(SLICES, max_size=2), st.lists(SLICES, max_size=2), st.booleans())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rounds=st.lists(ROUND, min_size=1, max_size=4))
def test_the_extract_equals_the_source_after_any_history(rounds):
    history = History()
    for steps, resync, compare, use_watermark in rounds:
        for step in steps:
            history.apply(step)
        history.refresh(resync=resync, compare=compare, since=use_watermark)
        assert bag(history.extract) == bag(history.source)
        assert history.refresh().keys("changed") == set(), "a second refresh found something to do"


def loaded(*rows) -> History:
    history = History()
    for row in rows:
        history.apply(("insert", *row))
    history.refresh()
    return history


def test_t9_null_slice_null_key_and_duplicate_keys_equal_the_rebuild():
    history = loaded(
        (None, None, "a"), (None, "2025-03", "a"), (1, "2025-03", "a"), (1, "2025-04", "b"), (2, None, "a")
    )
    history.apply(("insert", 1, "2025-05", "b"))
    history.apply(("insert", None, None, "b"))
    history.refresh()
    assert bag(history.extract) == bag(history.source)


@pytest.mark.parametrize("resynced", ["2025-03", "2025-05"])
def test_t10_a_row_that_moved_from_march_to_may_is_there_once_whichever_slice_is_resynced(resynced):
    history = loaded((1, "2025-03", "a"), (2, "2025-03", "a"), (3, "2025-05", "a"))
    history.apply(("move silently", 1, "2025-05"))
    history.refresh(resync=[resynced])
    assert [row.slice for row in history.extract if row.key == 1] == ["2025-05"]
    assert bag(history.extract) == bag(history.source)


def test_a_change_behind_the_watermarks_back_is_found_when_its_slice_is_resynced():
    history = loaded((1, "2025-03", "a"), (2, "2025-04", "a"))
    history.source = [dataclasses.replace(row, value="b") if row.key == 1 else row for row in history.source]
    assert history.refresh().keys("changed") == set(), "nothing points at it"
    assert history.refresh(resync=["2025-03"]).keys("changed") == {1}
    assert bag(history.extract) == bag(history.source)


def test_a_slice_that_is_compared_gives_only_what_differs_also_what_left_it():
    history = loaded((4, "2025-04", "a"), (1, "2025-03", "a"), (2, "2025-03", "a"), (3, "2025-03", "a"))
    history.source = [dataclasses.replace(row, value="b") if row.key in (1, 4) else row for row in history.source]
    history.apply(("move silently", 2, "2025-05"))
    assert history.refresh(compare=["2025-03"]).keys("changed") == {1, 2}
    assert history.refresh(compare=["2025-03"]).keys("changed") == set()


def test_a_deleted_key_is_found_without_reading_a_row():
    history = loaded((1, "2025-03", "a"), (2, "2025-03", "a"))
    history.apply(("delete", 1))
    bench = history.refresh()
    assert bench.keys("changed") == {1}
    assert bench.rows("sought_rows") == []


def test_one_of_two_rows_of_a_key_deleted_leaves_the_other():
    history = loaded((1, "2025-03", "a"), (1, "2025-04", "b"))
    history.apply(("delete one", 0))
    history.refresh()
    assert bag(history.extract) == bag(history.source) == {(1, "2025-04", "b"): 1}


def test_a_reload_of_equal_rows_moves_nothing():
    history = loaded((1, "2025-03", "a"), (None, None, "a"))
    history.apply(("reload",))
    assert history.refresh().keys("changed") == set()


def test_nothing_is_looked_up_when_counts_and_checksums_agree():
    history = loaded((1, "2025-03", "a"), (2, "2025-04", "a"))
    history.apply(("update", 1, "b"))
    assert history.refresh().reads == ["touched"]


def settled(history, **thresholds) -> Plan:
    bench = SmallBench(history.source, history.extract)
    ledger = stats_of([(row.key, row.slice) for row in history.extract])
    found = find_changes(bench, Question(Candidates(since=str(history.since))), ledger)
    limits = {"delete_share": 0.3, "full_share": 0.5, **thresholds}
    return settle_plan(Plan("e", "changes", "incremental"), found, ledger, policy="auto", pending=False, **limits)


def test_t11_a_truncated_source_stops_the_refresh_before_anything_is_touched():
    history = loaded(*((key, "2025-03", "a") for key in range(10)))
    history.source = []
    with pytest.raises(GuardError, match="the source is empty"):
        settled(history)


def test_t11_a_source_caught_half_loaded_stops_the_refresh():
    history = loaded(*((key, "2025-03", "a") for key in range(10)))
    history.source = history.source[:5]
    with pytest.raises(GuardError, match="5 of 10 rows would vanish"):
        settled(history)


def test_many_changes_are_a_full_refresh_with_its_reason():
    history = loaded(*((key, "2025-03", "a") for key in range(10)))
    for key in range(6):
        history.apply(("update", key, "b"))
    plan = settled(history)
    assert (plan.decision, plan.reason.name) == ("full", "COST_THRESHOLD")
