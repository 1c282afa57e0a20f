"""A watermark as the detector of a joined table: which of its keys are proposed, and what a plan says of those that are not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import pytest

from tir_dagster.changes.detectors import HintedCandidates, changed_dimension_keys, find_candidates
from tir_dagster.changes.question import ask_question
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.watermarks import lower_bound
from tir_dagster.errors import SpecError
from tir_dagster.snowflake.columns import Column, Kind
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, STAMP, Row, Warehouse

OLD = datetime(2025, 1, 1)  # noqa: DTZ001 - a time without a zone


@pytest.fixture
def warehouse() -> Warehouse:
    return Warehouse(duckdb.connect(config={"threads": 1}))


def relation(warehouse: Warehouse, *, first: dict[str, Any] | None = None, **joined: Any) -> Relation:
    query = "SELECT s.id, p.color FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"
    changes = {**(first or {}), "tables": {str(PRODUCTS): {"watermark": STAMP, "look_back": "30 seconds", **joined}}}
    written = {"name": "shown", "query": query, "row_key": "ID", "changes": changes}
    return relation_of(
        spec_from_mapping({**written, "datasource": {"project": "p", "name": "shown"}}, "a test"), warehouse
    )


def product(number: int | None, color: str = "a", stamp: datetime | None = OLD) -> Row:
    return dict.fromkeys(COLUMNS[PRODUCTS]) | {"PRODUCT": number, "COLOR": color, STAMP: stamp}


def proposed(
    warehouse: Warehouse, before: list[Row], after: list[Row], *, anything: bool = False, **joined: Any
) -> list[Any]:
    """The keys of the joined table that are proposed."""
    warehouse.write(PRODUCTS, before)
    old = warehouse.pin()
    warehouse.write(PRODUCTS, after)
    joined_relation = relation(warehouse, **joined)
    question, _ = ask_question(
        joined_relation, warehouse, since=old, watermark=None, version=warehouse.pin(), changed=[PRODUCTS]
    )
    if anything:
        question = replace(question, described={"P": HintedCandidates(anything=True)})
    (select,) = changed_dimension_keys(joined_relation, question).values()
    return sorted(row[0] for row in set(warehouse.query(select)) if row[0] is not None)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (product(0, "b", OLD + timedelta(minutes=1)), "a later mark"),
        (product(0, "b", OLD), "the same mark as the highest"),
        (product(0, "b", OLD - timedelta(seconds=30)), "a mark as old as the look-back"),
        (product(0, "b", None), "no mark"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_changed_is_proposed(warehouse, after, message):
    older = product(1, stamp=OLD - timedelta(hours=1))
    assert (proposed(warehouse, [product(0), older], [after, older])) == [0], message


def test_a_row_that_went_and_one_that_got_another_key_are_proposed_by_the_keys_they_had(warehouse):
    older = [product(number, stamp=OLD - timedelta(hours=1)) for number in range(3)]
    moved = older[1] | {"PRODUCT": 7, STAMP: OLD}
    assert (proposed(warehouse, [*older, product(3)], [moved, older[2], product(3)])) == [0, 1, 3, 7]


def test_without_deletes_they_are_not_and_the_plan_says_so(warehouse):
    older = [product(number, stamp=OLD - timedelta(hours=1)) for number in range(2)]
    assert (proposed(warehouse, [*older, product(3)], [older[0], product(3)], deletes=False)) == [3]
    (note,) = relation(warehouse, deletes=False).excluded_changes
    assert f"changes.tables.{PRODUCTS}.deletes is false" in note
    assert relation(warehouse).excluded_changes == ()


def test_deleted_rows_of_the_first_table_that_nobody_looks_for_are_told(warehouse):
    (note,) = relation(warehouse, first={"watermark": STAMP, "deletes": False}).excluded_changes
    assert "changes.deletes is false" in note
    assert relation(warehouse, first={"detector": "feed", "deletes": False}).excluded_changes == (), "a feed names them"


@pytest.mark.parametrize(
    ("read", "mark", "repeated"),
    [
        ("2026-10-25T00:59", "2026-10-25T02:58", "2026-10-25T02:00"),
        ("2026-10-25T01:30", "2026-10-25T02:58", "2026-10-25T02:31"),
        ("2026-11-01T08:59", "2026-11-01T01:59", "2026-11-01T01:00"),
        ("2026-04-04T14:59", "2026-04-05T01:59", "2026-04-05T01:30"),
    ],
    ids=["Berlin, before", "Berlin, in the second of the two hours", "Los Angeles", "Lord Howe, half an hour"],
)
def test_marks_in_local_time_that_are_repeated_when_clocks_go_back_are_candidates(read, mark, repeated):
    column, moment = Column("W", Kind.TIMESTAMP), datetime.fromisoformat(f"{read}+00:00")
    assert lower_bound(column, mark, read_at=moment, look_back=60) < f"'{repeated}"


def test_on_other_days_and_with_a_zone_the_look_back_is_what_the_spec_says():
    summer = datetime(2026, 7, 1, 12, tzinfo=UTC)
    local = lower_bound(Column("W", Kind.TIMESTAMP), "2026-07-01T14:00", read_at=summer, look_back=60)
    assert local.startswith("'2026-07-01T13:59:00")
    night = datetime(2026, 10, 25, 1, tzinfo=UTC)
    zoned = lower_bound(Column("W", Kind.INSTANT), "2026-10-25T01:00+00:00", read_at=night, look_back=60)
    assert zoned.startswith("'2026-10-25T00:59:00")


def test_of_a_table_that_had_no_mark_every_row_is_proposed(warehouse):
    assert (proposed(warehouse, [], [product(0), product(None), product(1, stamp=None)])) == [0, 1]


def test_one_who_says_that_anything_changed_is_believed_more_than_the_marks(warehouse):
    older = product(0, stamp=OLD - timedelta(hours=1))
    assert (proposed(warehouse, [older, product(1)], [older | {"COLOR": "b"}, product(1)], anything=True)) == [0]


def test_where_the_history_is_too_short_every_row_is_compared(warehouse):
    old = warehouse.pin()
    warehouse.forget()
    joined_relation = relation(warehouse)
    question, _ = ask_question(
        joined_relation, warehouse, since=old, watermark=None, version=warehouse.pin(), changed=[PRODUCTS]
    )
    candidates = find_candidates(joined_relation, question)
    assert "does not reach back" in (candidates.everything or "")


@pytest.mark.parametrize(("name", "message"), [("STAMPS", "does not have. It has PRODUCT, "), ("COLOR", "holds text")])
def test_a_mark_that_is_not_there_or_does_not_grow_is_told_with_its_place(warehouse, name, message):
    with pytest.raises(SpecError) as error:
        relation(warehouse, watermark=name)
    assert f"changes.tables.{PRODUCTS}.watermark names {name}" in str(error.value)
    assert message in str(error.value)
