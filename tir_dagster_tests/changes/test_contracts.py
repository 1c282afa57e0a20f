"""Keys of a joined table that are there more than once: told, or refused, as the spec says."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from tir_dagster.changes.relation import Relation, relation_of
from tir_dagster.changes.warnings import refuse_duplicates
from tir_dagster.errors import GuardError, SpecError
from tir_dagster.spec.reading import spec_from_mapping
from tir_dagster_tests.changes.warehouse import COLUMNS, PRODUCTS, Warehouse

JOINED = "JOIN db.s.products p ON p.product = s.product"


def relation(warehouse: Warehouse, changes: dict[str, Any], *, joined: str = JOINED) -> Relation:
    query = f"SELECT s.id, p.color FROM db.s.sales s {joined}"
    written = {"name": "shown", "query": query, "row_key": "ID", "changes": changes}
    spec = spec_from_mapping({**written, "datasource": {"project": "p", "name": "shown"}}, "a test")
    return relation_of(spec, warehouse)


def stocked(*keys: tuple[int | None, int | None]) -> Warehouse:
    """Products of these numbers and makers."""
    warehouse = Warehouse(duckdb.connect(config={"threads": 1}))
    rows = [{"PRODUCT": product, "MAKER": maker} for product, maker in keys]
    warehouse.write(PRODUCTS, [dict.fromkeys(COLUMNS[PRODUCTS]) | row for row in rows])
    return warehouse


def fail(**more: Any) -> dict[str, Any]:
    return {"tables": {str(PRODUCTS): {"duplicates": "fail", **more}}}


def test_keys_that_are_there_more_than_once_are_named():
    warehouse = stocked(*((key, 0) for key in (1, 1, 2, 3, 3, 3)))
    with pytest.raises(GuardError) as error:
        refuse_duplicates(relation(warehouse, fail()), warehouse, warehouse.pin())
    message = str(error.value)
    assert "shown: DB.S.PRODUCTS has keys (PRODUCT) more than once: 1 (2 rows); 3 (3 rows)." in message
    assert message.endswith(
        "Nothing was touched. Fix the table, or set changes.tables.DB.S.PRODUCTS.duplicates to warn."
    )


def test_many_of_them_are_not_all_named():
    warehouse = stocked(*((key, 0) for key in range(7) for _ in range(2)))
    with pytest.raises(GuardError, match=r"4 \(2 rows\) and more\. Rows"):
        refuse_duplicates(relation(warehouse, fail()), warehouse, warehouse.pin())


def test_keys_of_two_columns_repeat_only_together_and_null_joins_nothing():
    two = f"{JOINED} AND p.maker = s.other"
    warehouse = stocked((1, 1), (1, 2), (None, 1), (None, 1), (2, None), (2, None))
    refuse_duplicates(relation(warehouse, fail(), joined=two), warehouse, warehouse.pin())
    with pytest.raises(GuardError, match=r"PRODUCT\) more than once: 1 \(2 rows\); 2 \(2 rows\)"):
        refuse_duplicates(relation(warehouse, fail()), warehouse, warehouse.pin())


def test_without_the_policy_they_are_let_through():
    warehouse = stocked((1, 0), (1, 0))
    refuse_duplicates(relation(warehouse, {}), warehouse, warehouse.pin())


def test_the_first_table_has_no_such_policy():
    with pytest.raises(SpecError, match=r"changes.duplicates: unknown field"):
        relation(stocked(), {"duplicates": "fail"})
