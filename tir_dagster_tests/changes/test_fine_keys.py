"""Row keys and groups with nanoseconds: the extract holds microseconds, so keys are compared as microseconds everywhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import duckdb
import pytest

from tir_dagster.changes.detectors import keys_statement
from tir_dagster.changes.hints import ChangeType, Hint, In
from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.snowflake.pinned import sql_literal
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster_tests.changes import warehouse
from tir_dagster_tests.changes.following import Detectors, FollowedQuery, Shown
from tir_dagster_tests.changes.warehouse import COLUMNS, SALES, STAMP, Row, Warehouse, for_duckdb

VERSION = SourceVersion(datetime(2025, 1, 1, tzinfo=UTC))
CUT = datetime(2024, 1, 1, 0, 0, 0, 123456)  # noqa: DTZ001 - a time without a zone


class DescribingWarehouse:
    """A table whose key has nanoseconds, as DESCRIBE shows it."""

    account = "small"

    def query(self, sql: str, params: object = None) -> list[tuple[Any, ...]]:
        assert sql.startswith("DESCRIBE TABLE")
        return [("K", "TIMESTAMP_NTZ(9)", "COLUMN", "Y"), ("V", "VARCHAR", "COLUMN", "Y")]


@pytest.fixture
def table() -> duckdb.DuckDBPyConnection:
    """Two keys that differ in their nanoseconds alone, and another one."""
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("ATTACH ':memory:' AS DB; CREATE SCHEMA DB.S; CREATE TABLE DB.S.T (K TIMESTAMP_NS, V VARCHAR)")
    for fraction, value in (("123456001", "a"), ("123456789", "b"), ("123457000", "c")):
        connection.execute(f"INSERT INTO DB.S.T VALUES ('2024-01-01 00:00:00.{fraction}', '{value}')")
    return connection


@pytest.fixture
def relation() -> Relation:
    written = {"name": "fine", "source": "DB.S.T", "row_key": "K", "datasource": {"project": "p", "name": "fine"}}
    return relation_of(spec_from_mapping(written, "a test"), DescribingWarehouse())  # type: ignore[arg-type]


def asked(table: duckdb.DuckDBPyConnection, sql: str) -> list[Any]:
    return [row[0] for row in table.execute(for_duckdb(sql.replace(VERSION.sql, ""))).fetchall()]


def test_rows_whose_keys_the_extract_cannot_tell_apart_have_one_key(table, relation):
    base = relation.base(VERSION)
    same = f'"K" IS NOT DISTINCT FROM {sql_literal(relation.key[0], CUT)}'
    assert sorted(asked(table, f'SELECT "V" FROM {base.sql} WHERE {same}')) == ["a", "b"]
    assert len(asked(table, f'SELECT DISTINCT "K" FROM {base.sql}')) == 2


def test_keys_that_a_feed_or_a_hint_names_are_the_same_ones(table, relation):
    named = f"SELECT DISTINCT {relation.fact_key_sql} FROM {relation.table.sql}"
    joined = f'SELECT t."V" FROM {relation.base(VERSION).sql} AS t WHERE EXISTS (SELECT 1 FROM ({named}) c WHERE c."K" = t."K")'
    assert sorted(asked(table, joined)) == ["a", "b", "c"]


def test_keys_that_only_the_extract_knows_are_found_by_what_it_holds(table, relation):
    assert sorted(asked(table, f'SELECT "V" FROM ({keys_statement(relation, VERSION, [(CUT,)])})')) == ["a", "b"]


# Queries

GROUPED = "SELECT stamp, SUM(qty) AS qty, COUNT(*) AS n FROM db.s.sales GROUP BY stamp"
SHOWN = {
    "rows": Shown("SELECT stamp, id, qty FROM db.s.sales", ("STAMP",), sliced=False),
    "groups of rows with a key": Shown(GROUPED, ("ID",), sliced=False),
    "groups of rows without one": Shown(GROUPED, (), sliced=False),
    "groups of rows whose key is fine": Shown(
        "SELECT other, SUM(qty) AS qty, COUNT(*) AS n FROM db.s.sales GROUP BY other", ("STAMP",), sliced=False
    ),
}


@pytest.fixture
def fine(monkeypatch) -> Warehouse:
    """A warehouse whose stamps have nanoseconds; whoever reads them here gets microseconds, as an extract does."""
    monkeypatch.setitem(warehouse._TYPES, (), "TIMESTAMP_NS")
    monkeypatch.setitem(warehouse._DECLARED, "TIMESTAMP_NS", "TIMESTAMP_NTZ(9)")
    monkeypatch.setitem(warehouse._FIELDS, "TIMESTAMP_NS", "TIMESTAMP_NTZ")
    return Warehouse(duckdb.connect(config={"threads": 1}))


def sale(number: int, fraction: str, quantity: int) -> Row:
    return dict.fromkeys(COLUMNS[SALES]) | {"ID": number, STAMP: f"2024-01-01 00:00:00.{fraction}", "QTY": quantity}


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("detector", ["diff", "feed", "hint", "watermark"])
def test_what_the_extract_cannot_tell_apart_is_replaced_together(fine, shown, detector):
    rows = [sale(1, "123456001", 1), sale(2, "123456001", 2), sale(3, "123456789", 3), sale(4, "123457000", 4)]
    fine.write(SALES, rows)
    history = FollowedQuery(fine, SHOWN[shown], Detectors(detector))
    history.refresh()
    hints = [Hint(SALES, ChangeType.MIXED_CHANGES, In("ID", (2, 3)))] if detector == "hint" else []
    for changed in (
        [rows[0], sale(2, "123456001", 9), *rows[2:]],
        # From one group to the other, though no column of the row changes that the extract could show.
        [rows[0], sale(2, "123456789", 9), *rows[2:]],
        [rows[0], sale(2, "123456789", 9), rows[3]],
    ):
        fine.write(SALES, changed)
        # It compares what people see then with what the query shows.
        history.refresh(hints=hints)
