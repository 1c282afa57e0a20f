"""Declared tables found in a datasource of several logical tables, and every difference named at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tir_dagster.errors import DatasourceError
from tir_dagster.hyper.package.matching import (
    DeclaredRelationship,
    DeclaredTable,
    PhysicalTable,
    find_matches,
    match_tables,
)
from tir_dagster.hyper.package.object_model import ObjectModel, read_object_model
from tir_dagster.snowflake.names import TableName
from tir_dagster_tests.hyper.star_document import (
    COLUMNS,
    DECLARED,
    HYPER_GRAPH,
    HYPER_MAP,
    HYPER_ONLY,
    HYPER_TABLES,
    RELATED,
    STAR,
    STORED,
    equal,
)

ORDERS, CUSTOMERS, ORDER_DATE, SHIP_DATE = DECLARED


@pytest.fixture(scope="module")
def model() -> ObjectModel:
    return read_object_model(STAR.encode())


def model_of(*edits: tuple[str, str]) -> ObjectModel:
    text = STAR
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return read_object_model(text.encode())


def problems(
    declared: Sequence[DeclaredTable] = DECLARED,
    model: ObjectModel | None = None,
    hyper_tables: Sequence[PhysicalTable] = HYPER_TABLES,
    relationships: Sequence[DeclaredRelationship] = (),
) -> tuple[str, ...]:
    return find_matches(declared, model or model_of(), hyper_tables, relationships=relationships).problems


def with_table(table: DeclaredTable) -> tuple[DeclaredTable, ...]:
    return tuple(table if other.name == table.name else other for other in DECLARED)


def test_every_declared_table_has_its_table_in_the_hyper_file_and_its_columns_there(model: ObjectModel):
    matched = match_tables(DECLARED, model, HYPER_TABLES, relationships=RELATED)
    captions = ("ORDERS", "CUSTOMERS", "Order Date", "Ship Date")
    assert [(name, match.physical.schema, match.physical.name) for name, match in matched.items()] == [
        (table.name, "Extract", STORED[caption]) for table, caption in zip(DECLARED, captions, strict=True)
    ]
    for match, caption in zip(matched.values(), captions, strict=True):
        assert match.names == {source: stored for source, _, stored in COLUMNS[caption]}
        assert match.logical.caption == caption


def test_the_order_of_tables_does_not_matter(model: ObjectModel):
    turned = match_tables(DECLARED[::-1], model, HYPER_TABLES[::-1], relationships=RELATED[::-1])
    assert turned == match_tables(DECLARED, model, HYPER_TABLES, relationships=RELATED)


def test_a_missing_table_is_told_with_the_one_that_may_be_meant():
    other = replace(CUSTOMERS, name="costumers", source=TableName("SHOP", "PUBLIC", "COSTUMERS"))
    assert problems((ORDERS, other, ORDER_DATE, SHIP_DATE)) == (
        "it has no logical table for the spec's table costumers (SHOP.PUBLIC.COSTUMERS) (did you mean CUSTOMERS, which reads SHOP.PUBLIC.CUSTOMERS?)",
        "no table of the spec keeps its logical table CUSTOMERS, which reads SHOP.PUBLIC.CUSTOMERS",
    )


def test_a_table_like_none_is_told_with_all_that_there_are():
    people = DeclaredTable("people", ("ID",), TableName("SHOP", "PUBLIC", "X"))
    assert problems((*DECLARED, people)) == (
        "it has no logical table for the spec's table people (SHOP.PUBLIC.X); it has ORDERS, CUSTOMERS, Order Date, Ship Date",
    )


def test_a_logical_table_that_nothing_would_refresh_is_told():
    assert problems(DECLARED[:3]) == (
        "no table of the spec keeps its logical table Ship Date, which reads SHOP.PUBLIC.DATES",
    )


def test_one_table_in_two_boxes_needs_their_names():
    days = replace(ORDER_DATE, name="days")
    assert problems((ORDERS, CUSTOMERS, days, SHIP_DATE)) == (
        "the spec's table days (SHOP.PUBLIC.DATES) may be its logical table Order Date or Ship Date; name it in the spec as one of them",
    )


def test_two_declared_tables_are_not_one_logical_table():
    assert problems((*DECLARED, replace(ORDERS, name="sales"))) == (
        "the spec's tables orders and sales are one logical table, ORDERS, which reads SHOP.PUBLIC.ORDERS",
    )


def test_a_table_of_the_right_name_that_reads_another_source_is_told():
    assert problems(with_table(replace(CUSTOMERS, source=TableName("SHOP", "OLD", "PEOPLE")))) == (
        "its logical table CUSTOMERS reads SHOP.PUBLIC.CUSTOMERS, and the spec's table customers SHOP.OLD.PEOPLE",
    )


def test_a_table_is_also_found_by_the_name_of_its_source_elsewhere():
    facts = replace(ORDERS, name="facts", source=TableName("SHOP", "OLD", "ORDERS"))
    assert problems((facts, *DECLARED[1:])) == (
        "its logical table ORDERS reads SHOP.PUBLIC.ORDERS, and the spec's table facts SHOP.OLD.ORDERS",
    )


def test_a_table_that_another_one_reads_is_not_taken_by_its_name():
    people = replace(CUSTOMERS, name="people")
    other = replace(CUSTOMERS, source=TableName("SHOP", "PUBLIC", "OTHERS"))
    assert problems((ORDERS, people, other, ORDER_DATE, SHIP_DATE)) == (
        "it has no logical table for the spec's table customers (SHOP.PUBLIC.OTHERS) (did you mean CUSTOMERS, which reads SHOP.PUBLIC.CUSTOMERS?)",
    )


def test_parts_that_the_document_does_not_know_are_not_compared():
    assert not problems(model=model_of(("dbname='SHOP' ", "")))


def test_without_descriptions_of_its_columns_a_table_cannot_be_filled():
    records = re.sub(r"<metadata-records>.*?</metadata-records>", "", STAR, flags=re.DOTALL)
    told = problems(model=read_object_model(re.sub(r"<cols>.*</cols>", "", records).encode()))
    assert (
        f"the table {HYPER_TABLES[0]} of its Hyper file has the columns {', '.join(ORDERS.columns)}, which its document does not describe"
        in told
    )


def test_names_of_sources_are_compared_without_their_case():
    assert not problems(
        model=model_of(("[PUBLIC].[CUSTOMERS]", "[public].[customers]"), ("dbname='SHOP'", "dbname='shop'"))
    )


TABLE = "table='[PUBLIC].[CUSTOMERS]' type='table' /></properties>"
QUERY = "SELECT CUSTOMER_ID, NAME, REGION FROM SHOP.PUBLIC.CUSTOMERS WHERE NAME <> 'x'"
TEXT = "type='text'>select customer_id, name, region from shop.public.customers where name &lt;&lt;&gt;&gt; 'x'</relation></properties>"


def test_a_query_is_found_as_custom_sql_whatever_its_name():
    declared = with_table(replace(CUSTOMERS, source=None, query=QUERY))
    custom = model_of((TABLE, TEXT), ("caption='CUSTOMERS'", "caption='Custom SQL Query'"))
    matched = match_tables(declared, custom, HYPER_TABLES, relationships=RELATED)
    assert matched["customers"].logical.caption == "Custom SQL Query"
    more = with_table(replace(declared[1], columns=(*CUSTOMERS.columns, "CITY")))
    assert problems(more, custom) == (
        "its logical table Custom SQL Query lacks the columns CITY, which the spec needs",
    )


@pytest.mark.parametrize(
    ("table", "edit", "problem"),
    [
        (replace(CUSTOMERS, source=None, query=QUERY), None, "its logical table CUSTOMERS reads SHOP.PUBLIC.CUSTOMERS, and the spec's table customers a query"),
        (replace(CUSTOMERS, source=None, query="SELECT 1 AS ONE"), TEXT, "the custom SQL of its logical table CUSTOMERS is not the query in the spec"),
        (CUSTOMERS, TEXT, "its logical table CUSTOMERS reads custom SQL, and the spec's table customers the table SHOP.PUBLIC.CUSTOMERS"),
        (CUSTOMERS, "type='join' /></properties>", "its logical table CUSTOMERS joins several tables; make the join a query of the spec, and custom SQL in Tableau"),
    ],
)  # fmt: skip
def test_what_a_logical_table_reads_instead_is_told(table: DeclaredTable, edit: str | None, problem: str):
    model = model_of((TABLE, edit)) if edit else model_of()
    assert problems(with_table(table), model) == (problem,)


def test_columns_that_would_not_be_filled_or_not_be_there_are_told():
    orders = replace(ORDERS, columns=ORDERS.columns[:-1], needed=("ORDER_ID", "UPDATED_AT"), only=("ORDER_ID",))
    assert problems(with_table(orders)) == (
        "its logical table ORDERS has the columns REGION, which SHOP.PUBLIC.ORDERS does not have",
        "its logical table ORDERS lacks the columns UPDATED_AT, which the spec needs",
        "its logical table ORDERS also has the columns CUSTOMER_ID, ORDERED_ON, SHIPPED_ON, which the spec's table orders leaves out",
    )


def test_a_hyper_file_that_is_not_the_documents_is_told():
    orders, customers, *_, shipped = HYPER_TABLES
    other = replace(customers, name="CUSTOMERS_0")
    strange = replace(shipped, columns=("DAY1", "MONTH"))
    listed = f"Extract.{orders.name}, Extract.CUSTOMERS_0, Extract.{HYPER_TABLES[2].name}, Extract.{shipped.name}"
    assert problems(hyper_tables=(orders, other, HYPER_TABLES[2], strange)) == (
        f"the logical table CUSTOMERS cannot be kept: its table Extract.{customers.name} is not in the Hyper file, which has {listed}",
        f"the table Extract.{shipped.name} of its Hyper file lacks the columns WEEK1, which its document describes",
        f"the table Extract.{shipped.name} of its Hyper file has the columns MONTH, which its document does not describe",
        "its Hyper file has the table Extract.CUSTOMERS_0, which none of its logical tables names",
    )


def test_a_column_of_the_file_is_filled_by_one_column_of_the_source_only():
    model = model_of(("<remote-name>DAY1</remote-name>", "<remote-name>WEEK1</remote-name>"))
    assert problems(model=model) == (
        "its logical table Ship Date describes the columns WEEK1 of its Hyper file more than once",
        f"the table {HYPER_TABLES[3]} of its Hyper file has the columns DAY1, which its document does not describe",
    )


def test_a_calculation_that_the_extract_stores_is_told():
    marker = "<metadata-record class='column'><remote-name>NAME</remote-name>"
    live, extract = STAR.split("<extract ")
    record = marker.replace(">NAME<", ">tier<") + (
        f"<local-name>[Calculation_1]</local-name><parent-name>[{STORED['CUSTOMERS']}]</parent-name>"
        f"<object-id>[{STORED['CUSTOMERS']}]</object-id></metadata-record>"
    )
    model = read_object_model(f"{live}<extract {extract.replace(marker, record + marker)}".encode())
    hyper = [
        replace(table, columns=(*table.columns, "tier")) if table.name == STORED["CUSTOMERS"] else table
        for table in HYPER_TABLES
    ]
    assert problems(model=model, hyper_tables=hyper) == ("its logical table CUSTOMERS stores calculated fields (tier)",)


def test_relationships_are_kept_as_they_are_drawn_unless_some_are_declared():
    assert not problems(model=model_of(("op='='", "op='&lt;'")))
    assert len(problems(model=model_of(("op='='", "op='&lt;'")), relationships=RELATED)) == len(RELATED)


def test_every_difference_of_a_relationship_is_told():
    to_customers, to_order_date, to_ship_date = RELATED
    declared = (
        replace(
            to_customers, columns=to_customers.columns[:1], cardinality="one_to_many", every_first_row_matches=False
        ),
        DeclaredRelationship("customers", "order_date", (("NAME", "DAY"),)),
        to_ship_date,
    )
    assert problems(relationships=declared) == (
        "it relates ORDERS and CUSTOMERS by CUSTOMER_ID = CUSTOMER_ID and REGION = REGION, and the spec by CUSTOMER_ID = CUSTOMER_ID",
        "the cardinality of ORDERS and CUSTOMERS is many_to_one there, which promises more than one_to_many in the spec",
        "the referential integrity of ORDERS and CUSTOMERS says that all records of ORDERS match, and the spec does not",
        "it does not relate CUSTOMERS and Order Date, as the spec does",
        "it relates Order Date and ORDERS by DAY = ORDERED_ON, and the spec does not",
    )
    assert not problems(relationships=(to_customers, to_order_date, to_ship_date))


def test_a_datasource_may_promise_less_than_the_spec():
    more = replace(RELATED[0], cardinality="one_to_one", every_second_row_matches=True)
    ships = replace(RELATED[2], cardinality="one_to_many", every_first_row_matches=True, every_second_row_matches=True)
    assert not problems(relationships=(more, RELATED[1], ships))


def test_a_relationship_by_calculations_is_not_the_declared_one():
    model = model_of(("op='[SHIPPED_ON]'", "op='DATE([SHIPPED_ON])'"))
    assert problems(model=model, relationships=RELATED) == (
        "it relates Ship Date and ORDERS by DAY = DATE([SHIPPED_ON]), and the spec by DAY = SHIPPED_ON",
    )


def test_a_further_condition_is_a_difference():
    further = (
        f"<expression op='AND'>{equal('SHIPPED_ON', 'DAY (DATES1)')}<expression op='ISNULL([REGION])' /></expression>"
    )
    model = model_of((equal("SHIPPED_ON", "DAY (DATES1)"), further))
    assert problems(model=model, relationships=RELATED) == (
        "it relates Ship Date and ORDERS by DAY = SHIPPED_ON and ISNULL([REGION]), and the spec by DAY = SHIPPED_ON",
    )


def test_a_promise_of_either_side_is_one_more_and_none_takes_them_all():
    turned = replace(RELATED[1], first="order_date", second="orders", columns=(("DAY", "ORDERED_ON"),))
    assert problems(relationships=(RELATED[0], replace(turned, cardinality="many_to_one"), RELATED[2])) == (
        "the cardinality of Order Date and ORDERS is one_to_many there, which promises more than many_to_one in the spec",
    )
    silent = replace(RELATED[0], cardinality=None, every_first_row_matches=None)
    assert not problems(relationships=(silent, replace(turned, cardinality=None), RELATED[2]))


def test_relationships_of_a_table_without_its_place_are_not_told_beside_it():
    assert problems((*DECLARED[:2], SHIP_DATE), relationships=(RELATED[0], RELATED[2])) == (
        "no table of the spec keeps its logical table Order Date, which reads SHOP.PUBLIC.DATES",
    )


@pytest.mark.parametrize("graph", ["", HYPER_GRAPH])
@pytest.mark.parametrize("columns", ["", HYPER_MAP])
def test_a_published_hyper_file_is_found_by_the_names_of_its_tables(columns: str, graph: str):
    tables = tuple(
        PhysicalTable("Extract", name, table.columns) for name, table in (("orders", ORDERS), ("customers", CUSTOMERS))
    )
    model = read_object_model((HYPER_ONLY % (columns, graph)).encode())
    declared = DeclaredRelationship("orders", "customers", (("CUSTOMER_ID",) * 2,), cardinality="many_to_one")
    related = [declared] if graph and columns else []
    matched = match_tables((ORDERS, CUSTOMERS), model, tables, relationships=related)
    assert {name: match.physical for name, match in matched.items()} == {"orders": tables[0], "customers": tables[1]}


def test_a_hyper_file_from_an_extract_is_found_without_what_tableau_added_to_its_names():
    model = read_object_model((HYPER_ONLY % ("", "")).replace("orders", STORED["ORDERS"]).encode())
    tables = (HYPER_TABLES[0], PhysicalTable("Extract", "customers", CUSTOMERS.columns))
    assert match_tables((ORDERS, CUSTOMERS), model, tables)["orders"].physical == HYPER_TABLES[0]


def test_the_tables_of_a_join_that_are_stored_one_by_one_are_no_logical_tables():
    older = re.sub(r"<_\.fcp\.\w+\.true\.\.\.object-graph>.*object-graph>", "", STAR, flags=re.DOTALL)
    model = read_object_model(older.replace(STORED["ORDERS"], "orders").encode())
    stored = (replace(HYPER_TABLES[0], name="orders"), *HYPER_TABLES[1:])
    joined = (
        "its logical table orders joins several tables; make the join a query of the spec, and custom SQL in Tableau"
    )
    assert joined in problems(DECLARED[:1], model, stored)


def test_all_problems_are_one_error_that_says_what_to_do(model: ObjectModel):
    with pytest.raises(DatasourceError) as refused:
        match_tables(
            DECLARED[:2],
            model,
            HYPER_TABLES[:3],
            datasource="datasource sales/Star",
            also=["its extract is filtered (NAME)"],
        )
    assert str(refused.value) == (
        "The datasource sales/Star does not show what the spec says: its extract is filtered (NAME); "
        "no table of the spec keeps its logical table Order Date, which reads SHOP.PUBLIC.DATES; "
        "no table of the spec keeps its logical table Ship Date, which reads SHOP.PUBLIC.DATES. Nothing was touched. "
        "Change the spec, or change the datasource in Tableau and publish it again."
    )
