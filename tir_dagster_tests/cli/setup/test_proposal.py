"""What a first spec proposes, decided from facts alone: keys, slices, detector, delivery, and what is left to people."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest

from tir_dagster.cli.setup.proposal import Place, extract_name, propose, size_of_slices
from tir_dagster.cli.setup.published import DatasourceLook
from tir_dagster.cli.setup.source import ColumnFacts, SourceLook, TableState
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.names import TableName
from tir_dagster.spec.reading import spec_from_mapping

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
TABLE = TableName("DB", "S", "ORDERS")
NEW = Place("sales", "orders", DatasourceLook("sales", "orders", (3, 26)))


def facts(
    name: str, declared: str, *, distinct: int = 10, filled: int = 1000, greatest: date | None = None
) -> ColumnFacts:
    return ColumnFacts(Column.from_snowflake(name, declared), filled, distinct, None, greatest)


def look(*columns: ColumnFacts, **more) -> SourceLook:
    state = TableState(TABLE, rows=1000, **more.pop("state", {}))
    return SourceLook((state,), columns, rows=1000, counted=True, now=NOW, **more)


ID, DAY = facts("ID", "NUMBER(38,0)", distinct=1000), facts("DAY", "DATE")
MONTHS = (("DAY", ((date(2026, 1, 1), 400), (date(2026, 2, 1), 600))),)


def proposed(source: SourceLook, place: Place = NEW) -> dict:
    proposal = propose("orders", source, place, env={})
    # Every proposal is a spec that can be read.
    spec_from_mapping(proposal.mapping, "the proposal")
    return proposal.mapping


def test_a_declared_key_that_was_found_unique_is_taken_without_a_doubt():
    source = look(ID, DAY, unique=("ID",), months=MONTHS, state={"primary_key": ("ID",)})
    assert proposed(source)["row_key"] == ["ID"]
    assert propose("orders", source, NEW, env={}).todos == ()


def test_columns_found_unique_are_taken_and_left_to_people_to_confirm():
    proposal = propose("orders", look(ID, DAY, unique=("ID",), months=MONTHS), NEW, env={})
    assert proposal.todos == ("Check that row_key identifies a row by design, not by chance.",)


def test_without_a_key_whole_slices_are_replaced():
    mapping = proposed(look(DAY, months=MONTHS))
    assert "row_key" not in mapping
    assert mapping["slices"] == {"column": "DAY", "by": "month", "start": "2026-01"}


def test_without_key_and_date_slices_follow_the_values_of_a_column():
    region = facts("REGION", "VARCHAR", distinct=7)
    assert proposed(look(region, facts("AMOUNT", "FLOAT")))["slices"] == {"column": "REGION", "by": "value"}


def test_without_anything_the_likeliest_column_is_the_key_and_people_are_asked():
    proposal = propose("orders", look(facts("TEXT", "VARCHAR", distinct=900)), NEW, env={})
    assert proposal.mapping["row_key"] == ["TEXT"]
    assert proposal.todos == ("Name the columns that identify a row as row_key.",)


@pytest.mark.parametrize(
    ("rows", "today", "expected"),
    [
        (5_000_000, date(2026, 3, 1), "month"),
        (6_000_000, date(2026, 3, 1), "week"),
        (30_000_000, date(2026, 3, 1), "day"),
        (30_000_000, date(2036, 3, 1), "week"),
    ],
)
def test_the_size_of_slices_follows_the_rows_of_a_typical_month(rows: int, today: date, expected: str):
    by, _, typical = size_of_slices([(date(2026, 1, 1), rows), (date(2026, 2, 1), rows)], today=today)
    assert (by, typical) == (expected, rows)


def test_slices_begin_where_the_rows_begin_and_not_at_a_stray_date():
    months = [(date(1900, 1, 1), 1), (date(2026, 1, 1), 5000), (date(2026, 2, 1), 5000), (date(9999, 12, 1), 3)]
    assert size_of_slices(months, today=NOW.date())[:2] == ("month", "2026-01")


def test_change_tracking_comes_before_a_watermark():
    mark = facts("UPDATED_AT", "TIMESTAMP_NTZ", greatest=NOW.replace(tzinfo=None))
    source = look(ID, mark, unique=("ID",))
    assert proposed(source)["changes"] == {"watermark": "UPDATED_AT", "look_back": "10 minutes"}
    tracked = replace(source, tables=(replace(source.main, tracked=True),))
    assert proposed(tracked)["changes"] == {"detector": "feed"}


@pytest.mark.parametrize(
    ("greatest", "filled"),
    [(NOW - timedelta(days=60), 1000), (NOW + timedelta(days=60), 1000), (NOW, 999)],
    ids=["old", "in the future", "with NULLs"],
)
def test_a_time_that_does_not_behave_like_a_watermark_is_none(greatest: datetime, filled: int):
    mark = facts("UPDATED_AT", "TIMESTAMP_NTZ", greatest=greatest.replace(tzinfo=None), filled=filled)
    assert "changes" not in proposed(look(ID, mark, unique=("ID",)))


def test_slices_do_not_follow_a_time_that_updates_move():
    assert "slices" not in proposed(look(ID, facts("UPDATED_AT", "TIMESTAMP_NTZ"), unique=("ID",)))


def test_a_new_datasource_of_many_rows_is_patched_where_the_server_can():
    many = replace(look(ID, unique=("ID",)), rows=50_000_000)
    assert proposed(many)["delivery"] == "patch"
    old = Place("sales", "orders", DatasourceLook("sales", "orders", (3, 12)))
    assert proposed(many, old)["delivery"] == "republish"
    assert proposed(look(ID, unique=("ID",)))["delivery"] == "republish"


def test_columns_that_no_extract_holds_are_left_out():
    assert proposed(look(ID, DAY, unique=("ID",), refused=("PHOTO",)))["columns"] == ["ID", "DAY"]


def test_without_tableau_people_are_told_that_nobody_looked():
    proposal = propose("orders", look(ID, unique=("ID",)), Place("sales", "orders"), env={})
    assert any(todo.startswith("Nobody looked at Tableau") for todo in proposal.todos)


@pytest.mark.parametrize(
    ("text", "name"), [("My Orders (EU)", "my_orders_eu"), ("2026 sales", "extract_2026_sales"), ("訂單", "extract")]
)
def test_names_of_datasources_become_names_of_assets(text: str, name: str):
    assert extract_name(text) == name
