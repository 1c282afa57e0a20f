"""An extract of several tables in the spec file: what is read, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tir_dagster.changes.relation import read_tables
from tir_dagster.errors import SpecError
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster.spec.tables import Relationship, order_of_reference

GOOD: dict[str, Any] = {
    "name": "sales",
    "datasource": {"name": "Sales", "project": "p"},
    "tables": [
        {"name": "CUSTOMERS", "source": "A.B.CUSTOMERS", "row_key": "ID"},
        {
            "name": "ORDERS",
            "source": "A.B.ORDERS",
            "row_key": "ID",
            "slices": {"by": "month", "column": "DAY", "start": "2024-01"},
            "changes": {"watermark": "UPDATED_AT"},
            "main": True,
        },
        {"name": "REGIONS", "query": "SELECT REGION, USERS FROM A.B.R", "row_key": ["REGION"]},
    ],
    "relationships": [
        {"table": "ORDERS", "refers_to": "CUSTOMERS", "columns": {"CUSTOMER_ID": "ID"}},
        {"table": "CUSTOMERS", "refers_to": "REGIONS", "columns": ["REGION"]},
    ],
}


def parsed(value: dict[str, Any]) -> ExtractSpec:
    (spec,) = parse_specs(yaml.safe_dump({"extracts": [value]}), "extracts.yaml")
    return spec


def test_each_table_is_an_extract_of_its_own_the_main_one_first():
    spec = parsed(GOOD)
    assert list(spec.parts) == ["ORDERS", "CUSTOMERS", "REGIONS"]
    orders, customers, regions = spec.parts.values()
    assert spec.main is orders
    assert (orders.table, orders.row_key, orders.slices.by, orders.changes.by) == (
        "ORDERS",
        ("ID",),
        "month",
        "watermark",
    )
    assert (customers.slices.by, customers.changes.by, customers.datasource) == ("none", "diff", spec.datasource)
    assert regions.main_table == "A.B.R"
    assert [table.name for table in read_tables(spec)] == ["ORDERS", "CUSTOMERS", "R"]
    assert spec.main_table == "A.B.ORDERS"


def test_without_a_main_table_it_is_the_first():
    value = {**GOOD, "tables": [{**table, "main": False} for table in GOOD["tables"]]}
    assert parsed(value).main.table == "CUSTOMERS"


def test_an_extract_of_one_table_is_its_own_only_part():
    spec = parsed({"name": "o", "source": "A.B.C", "row_key": "ID", "datasource": GOOD["datasource"]})
    assert spec.parts == {"": spec}
    assert spec.main is spec


def test_columns_of_the_same_names_are_a_list():
    assert [dict(one.columns) for one in parsed(GOOD).relationships] == [{"CUSTOMER_ID": "ID"}, {"REGION": "REGION"}]


def table(at: int, **fields: Any) -> dict[str, Any]:
    tables = [dict(one) for one in GOOD["tables"]]
    tables[at] = {name: value for name, value in {**tables[at], **fields}.items() if value is not None}
    return {**GOOD, "tables": tables}


def related(*relationships: dict[str, Any]) -> dict[str, Any]:
    return {**GOOD, "relationships": list(relationships)}


FIRST, SECOND = GOOD["relationships"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            table(0, main=True),
            ".tables[1].main: CUSTOMERS is the main table already, and there is only one; take it from ORDERS.",
        ),
        (
            table(0, row_key=None),
            ".tables[0].row_key: CUSTOMERS: give a row key, or slices: without both, nothing smaller",
        ),
        (
            table(0, name="orders"),
            ".tables[1].name: a second table is named orders; names are unique, whatever their case.",
        ),
        (table(0, name="ORDERS"), ".tables[1].name: a second table is named ORDERS; names are unique"),
        (table(0, name="a/b"), ".tables[0].name: begin with a letter, then letters, digits"),
        (table(0, source="nonsense"), ".tables[0].source: give the table as DATABASE.SCHEMA.TABLE"),
        (table(0, rowkey="ID"), ".tables[0].rowkey: unknown field; did you mean `row_key`?"),
        ({**GOOD, "tables": GOOD["tables"][:1], "relationships": []}, ".tables: one table needs no `tables`"),
        ({**GOOD, "source": "A.B.C"}, ".source: each of the `tables` has its own; give it there."),
        ({**GOOD, "row_key": "ID"}, ".row_key: each of the `tables` has its own; give it there."),
        ({**GOOD, "delivery": "server"}, ".delivery: `server` goes on from one last value"),
        (
            related({**FIRST, "refers_to": "CUSTOMER"}, SECOND),
            ".relationships[0].refers_to: no table is named 'CUSTOMER'; did you mean CUSTOMERS?",
        ),
        (
            related({**FIRST, "refers_to": "ORDERS"}, SECOND),
            ".relationships[0].refers_to: a table is not related to itself.",
        ),
        (
            related({**FIRST, "columns": []}, SECOND),
            ".relationships[0].columns: name the columns that have the same values",
        ),
        (related(FIRST, SECOND, FIRST), ".relationships[2]: ORDERS → CUSTOMERS: the two tables are related already"),
        (
            related(FIRST, SECOND, {**FIRST, "refers_to": "REGIONS"}),
            ".relationships[2]: ORDERS → REGIONS: other relationships connect them already, and Tableau takes one way only; leave one out.",
        ),
        (related(FIRST), ".relationships: REGIONS: related to no table that CUSTOMERS is related to"),
        (
            related({**FIRST, "cardinality": "one"}, SECOND),
            "'one' is not one of many_to_one, one_to_one, many_to_many.",
        ),
        (
            {
                "name": "o",
                "source": "A.B.C",
                "row_key": "I",
                "datasource": GOOD["datasource"],
                "relationships": [FIRST],
            },
            ".relationships: only an extract of several `tables` has relationships.",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(value, message):
    with pytest.raises(SpecError) as refused:
        parsed(value)
    assert f"extracts[0]{message}" in str(refused.value) or message in str(refused.value)


def test_a_delivery_that_copies_nothing_needs_neither_keys_nor_relationships():
    value = {**table(0, row_key=None), "delivery": "trigger", "relationships": []}
    assert parsed(value).parts["CUSTOMERS"].lacks_key


def test_what_others_refer_to_comes_first():
    lines = parsed(GOOD).relationships
    assert order_of_reference(["ORDERS", "CUSTOMERS", "REGIONS"], lines) == ("REGIONS", "CUSTOMERS", "ORDERS")
    assert order_of_reference(["ORDERS", "REGIONS"], lines) == ("ORDERS", "REGIONS")
    circle = (Relationship("A", "B", {"x": "y"}), Relationship("B", "A", {"x": "y"}))
    assert sorted(order_of_reference(["A", "B"], circle)) == ["A", "B"], "it ends in any case"
