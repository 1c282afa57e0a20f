"""What the actions of a batch do to a Hyper file, beside a model of a few lines that knows no SQL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tableauhyperapi import Connection, SqlType

from tir_dagster.sandbox.tableau.batches import BatchError, read_actions
from tir_dagster.sandbox.tableau.extracts import Hyper
from tir_dagster.sandbox.tableau.patching import apply_batch
from tir_dagster_tests.sandbox.tableau.live import BY_KEY, K, V, action, hyper_file

BOTH = {"op": "and", "args": [BY_KEY, {"op": "eq", "target-col": "V", "source-col": "V"}]}
COMPARE = {
    "eq": lambda one, other: one == other,
    "gt": lambda one, other: one > other,
    "gte": lambda one, other: one >= other,
    "lt": lambda one, other: one < other,
    "lte": lambda one, other: one <= other,
}
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Hyper]:
    process = Hyper()
    yield process
    process.close()


def changed(hyper: Any, engine: Hyper, folder: Path, target: Rows, source: Rows, actions: Any, columns: Any) -> Rows:
    """The target's rows after the batch."""
    extract = hyper_file(hyper, folder / "extract.hyper", target)
    payload = hyper_file(hyper, folder / "payload.hyper", source, columns)
    try:
        apply_batch(engine, extract, payload, read_actions(actions))
    finally:
        with Connection(hyper, extract) as connection:
            rows = connection.execute_list_query('SELECT "K", "V" FROM "Extract"."Extract"')
    return [tuple(row) for row in rows]


def truth(condition: Any, target: Any, source: Any) -> bool | None:
    """The condition in SQL's three values, None being unknown."""
    if "args" in condition:
        values = [truth(part, target, source) for part in condition["args"]]
        decided = condition["op"] == "or"
        return decided if decided in values else None if None in values else not decided
    sides = {"target-col": target, "source-col": source}
    found = [
        row[0 if condition[side] == "K" else 1] if side != "const" else condition[side]["v"]
        for side, row in (*sides.items(), ("const", None))
        if side in condition
    ]
    return None if None in found else COMPARE[condition["op"]](*found)


def model(kind: str, condition: Any, target: Rows, source: Rows) -> Rows:
    def matches(row: Any) -> Rows:
        return [other for other in source if truth(condition, row, other) is True]

    if kind in ("insert", "replace"):
        return (target if kind == "insert" else []) + source
    if kind == "delete":
        return [row for row in target if not matches(row)]
    if any(len(matches(row)) > 1 for row in target):
        raise BatchError("several rows match")
    fresh = [other for other in source if not any(truth(condition, row, other) is True for row in target)]
    return [(matches(row) or [row])[0] for row in target] + (fresh if kind == "upsert" else [])


keys = st.none() | st.integers(-1, 3)
texts = st.none() | st.sampled_from(["a", "b", ""])
tables = st.lists(st.tuples(keys, texts), max_size=6)
plain = st.builds(
    lambda op, one: {"op": op, "target-col": one, "source-col": one},
    st.sampled_from(sorted(COMPARE)),
    st.sampled_from("KV"),
)
constant = st.builds(
    lambda op, side, v: {"op": op, side: "K", "const": {"type": "integer", "v": v}},
    st.sampled_from(sorted(COMPARE)),
    st.sampled_from(["target-col", "source-col"]),
    st.integers(-1, 3),
)
conditions = st.recursive(
    plain | constant | st.just(BY_KEY),
    lambda inner: st.builds(
        lambda op, args: {"op": op, "args": args},
        st.sampled_from(["and", "or"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
# A delete's payload may hold nothing but columns of its condition: BOTH names them all.
steps = st.one_of(
    st.sampled_from([("insert", None), ("replace", None), ("delete", BOTH)]),
    st.tuples(st.just("delete"), conditions.map(lambda inner: {"op": "or", "args": [BOTH, inner]})),
    st.tuples(st.sampled_from(["update", "upsert"]), st.just(BY_KEY) | conditions),
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(target=tables, source=tables, batch=st.lists(steps, min_size=1, max_size=3))
def test_every_batch_does_what_the_model_says(
    hyper: Any, engine: Hyper, tmp_path: Path, target: Rows, source: Rows, batch: Any
) -> None:
    expected: Rows | None = list(target)
    try:
        for kind, condition in batch:
            expected = model(kind, condition, expected, source)
    except BatchError:
        expected = None
    actions = [action(kind, condition) for kind, condition in batch]
    if expected is None:
        with pytest.raises(BatchError, match="Several rows"):
            changed(hyper, engine, tmp_path, target, source, actions, (K, V))
        expected = target
    else:
        assert as_set(changed(hyper, engine, tmp_path, target, source, actions, (K, V))) == as_set(expected)
    with Connection(hyper, tmp_path / "extract.hyper") as connection:
        assert as_set(connection.execute_list_query('SELECT "K", "V" FROM "Extract"."Extract"')) == as_set(expected)


def as_set(rows: Any) -> list[tuple[str, ...]]:
    return sorted(tuple(map(repr, row)) for row in rows)


@pytest.mark.parametrize(
    ("kind", "condition"),
    [("insert", None), ("replace", None), ("delete", BOTH), ("update", BY_KEY), ("upsert", BY_KEY), ("upsert", BOTH)],
    ids=itertools.count(),
)
def test_an_action_meets_nulls_and_rows_that_are_there_twice(
    hyper: Any, engine: Hyper, tmp_path: Path, kind: str, condition: Any
) -> None:
    target = [(1, "a"), (2, "b"), (2, "b"), (2, "other"), (None, "n"), (3, None)]
    source = [(2, "b"), (None, "n"), (3, None), (9, "new"), (9, "new")]
    expected = model(kind, condition, target, source)
    assert as_set(expected) != as_set(target)
    found = changed(hyper, engine, tmp_path, target, source, [action(kind, condition)], (K, V))
    assert as_set(found) == as_set(expected)


def test_a_null_key_is_equal_to_nothing(hyper: Any, engine: Hyper, tmp_path: Path) -> None:
    """Which is why nullable keys cannot be replaced: the old row stays, and the new one comes on top."""
    rows = changed(hyper, engine, tmp_path, [(None, "old")], [(None, "new")], [action("upsert", BY_KEY)], (K, V))
    assert rows == [(None, "old"), (None, "new")]


@pytest.mark.parametrize(
    ("step", "columns", "why"),
    [
        (action("insert", **{"source-table": "Other"}), [K, V], "for the source table"),
        (action("insert"), [K, ("W", SqlType.text())], "['W'] of the source table Extract.Extract are not in"),
        (action("insert"), [("K", SqlType.int()), V], "column 'K' do not match"),
        (action("update", BY_KEY), [("K", SqlType.text())], "target-col 'K' and source-col 'K' do not match"),
        (action("delete", BY_KEY), [K, V], "['V'] of the source table Extract.Extract are not named by the condition"),
        (action("replace"), [K], "lacks columns ['V']"),
        (action("update", {**BY_KEY, "target-col": "NONE"}), [K, V], "no column 'NONE'"),
        (action("upsert", BY_KEY), [K, V], "Several rows of Extract.Extract match one row"),
    ],
    ids=itertools.count(),
)
def test_a_batch_that_does_not_fit_changes_nothing(
    hyper: Any, engine: Hyper, tmp_path: Path, step: Any, columns: Any, why: str
) -> None:
    before = action("delete", {"op": "lt", "target-col": "K", "const": {"type": "integer", "v": 1}}, source=False)
    values = {SqlType.text(): "2", SqlType.int(): 2, SqlType.big_int(): 2}
    source = [tuple(values[kind] for _, kind in columns)] * 2
    with pytest.raises(BatchError) as caught:
        changed(hyper, engine, tmp_path, [(0, "a"), (2, "b")], source, [before, step], columns)
    assert why in str(caught.value)
    with Connection(hyper, tmp_path / "extract.hyper") as connection:
        assert connection.execute_scalar_query('SELECT COUNT(*) FROM "Extract"."Extract"') == 2


def test_a_schema_may_be_left_out_where_the_table_is_clear(hyper: Any, engine: Hyper, tmp_path: Path) -> None:
    step = {"action": "insert", "target-table": "Extract", "source-table": "Extract"}
    assert changed(hyper, engine, tmp_path, [], [(1, "a")], [step], (K, V)) == [(1, "a")]


def test_columns_are_matched_by_name_and_those_left_out_are_null(hyper: Any, engine: Hyper, tmp_path: Path) -> None:
    assert changed(hyper, engine, tmp_path, [], [("a", 1)], [action("insert")], (V, K)) == [(1, "a")]
    assert changed(hyper, engine, tmp_path, [], [("a",)], [action("insert")], [V]) == [(None, "a")]


@pytest.mark.parametrize(
    ("constant", "accepted"),
    [
        ({"type": "datetime", "v": "2020-01-02T00:30:00+01:00"}, "CAST('2020-01-01 23:30:00' AS TIMESTAMP)"),
        ({"type": "datetime", "v": "2020-01-02T00:30:00Z"}, "CAST('2020-01-02 00:30:00' AS TIMESTAMP)"),
        ({"type": "date", "v": "2020-01-02"}, "CAST('2020-01-02' AS DATE)"),
        ({"type": "string", "v": "it's"}, "CAST('it''s' AS TEXT)"),
        ({"type": "double", "v": -1.5e3}, "CAST('-1500.0' AS DOUBLE PRECISION)"),
        ({"type": "boolean", "v": True}, "CAST('true' AS BOOL)"),
        ({"type": "integer", "v": "12"}, "CAST('12' AS BIGINT)"),
    ],
    ids=itertools.count(),
)
def test_a_constant_becomes_sql(constant: Any, accepted: str) -> None:
    step = action("delete", {"op": "eq", "target-col": "K", "const": constant}, source=False)
    assert read_actions([step])[0].condition.right.sql == accepted


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (action("merge"), "unknown action 'merge'"),
        ({"action": "insert"}, "no target-table"),
        ({"action": "insert", "target-table": "t"}, "needs a source-table"),
        (action("insert", BY_KEY), "takes no condition"),
        (action("delete", source=False), "needs a condition"),
        (action("delete", BY_KEY, source=False), "names a source-col"),
        (action("delete", BY_KEY, where="x"), "unknown properties ['where']"),
        (action("delete", {"op": "is-null", "target-col": "K"}), "unknown op 'is-null'"),
        (action("delete", {"op": ["eq"]}), "unknown op \"['eq']\""),
        (action("delete", {"op": "not", "args": [BY_KEY]}), "unknown op 'not'"),
        (action("delete", {"op": "and", "args": []}), "takes a list of conditions"),
        (action("delete", {"op": "eq", "target-col": "K"}), "compares two of"),
        (action("delete", {"op": "eq", "target-col": "K", "const": 3}), "a const has a type"),
        (action("delete", {"op": "eq", "target-col": "K", "const": {"type": "integer", "v": None}}), "no const of"),
        (action("delete", {"op": "eq", "target-col": "K", "const": {"type": "integer", "v": "1; x"}}), "no const of"),
        (action("delete", {"op": "eq", "target-col": "K", "const": {"type": "uuid", "v": "1"}}), "unknown type"),
        (action("delete", {"op": "eq", "target-col": 5, "source-col": "K"}), "not the name of a column"),
    ],
    ids=itertools.count(),
)
def test_a_malformed_action_is_refused_with_its_number(step: Any, why: str) -> None:
    with pytest.raises(BatchError) as caught:
        read_actions([action("insert"), step])
    assert str(caught.value).startswith("Action 2 is malformed: ")
    assert why in str(caught.value)


def test_a_condition_is_not_nested_without_end() -> None:
    nested: Any = BY_KEY
    for _ in range(51):
        nested = {"op": "and", "args": [nested]}
    with pytest.raises(BatchError, match="nested"):
        read_actions([action("delete", nested)])
