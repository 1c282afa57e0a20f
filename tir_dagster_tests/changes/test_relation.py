"""A spec that does not fit its tables: what is told, and where in the spec."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from tir_dagster.changes.relation import relation_of
from tir_dagster.errors import TirError
from tir_dagster.spec_file import spec_from_mapping
from tir_dagster_tests.changes.warehouse import Warehouse

QUERY = """SELECT s.id, s.day, p.color
FROM db.s.sales s
LEFT JOIN db.s.products p ON p.product = s.product"""


def refused(query: str = QUERY, **settings: Any) -> str:
    written = {"name": "shown", "query": query, "row_key": "ID", "datasource": {"project": "p", "name": "shown"}}
    with pytest.raises(TirError) as error:
        relation_of(
            spec_from_mapping({**written, **settings}, "spec.yaml"), Warehouse(duckdb.connect(config={"threads": 1}))
        )
    return str(error.value)


def test_a_table_that_is_not_there_is_told_with_its_place_in_the_query():
    assert refused(QUERY.replace("products", "produkts")) == (
        "shown: `query`, line 3, column 11: DB.S.PRODUKTS does not exist in Snowflake account small, or the role may not see "
        "it. Correct the query, or grant SELECT on the table."
    )


def test_detectors_of_the_first_table_are_said_in_one_place():
    told = refused(changes={"watermark": "STAMP", "tables": {"db.s.sales": {"detector": "feed"}}})
    assert told.startswith("shown: changes.tables.db.s.sales: it is the query's first table, not a joined one.")


def test_two_names_of_one_table_are_refused():
    tables = {"DB.S.PRODUCTS": {"detector": "feed"}, "db.s.products": {"detector": "hint"}}
    told = refused(changes={"tables": tables})
    assert told == "spec.yaml: changes.tables.db.s.products: the same table as DB.S.PRODUCTS; keep one of the two."


def test_slices_by_what_is_no_date_are_told_with_their_field():
    told = refused(slices={"column": "COLOR", "by": "month", "start": "2025-01"})
    assert told.startswith("shown: slices.column: The slice column COLOR holds text. Slice by a DATE or TIMESTAMP")
