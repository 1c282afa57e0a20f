"""Logical tables and relationships of a document: read to the letter, and refused where they contradict themselves."""

from __future__ import annotations

import re

import pytest

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.package.document import Document
from tir_dagster.hyper.package.object_model import (
    Comparison,
    EndPoint,
    LogicalColumn,
    ObjectModel,
    Relationship,
    read_object_model,
)
from tir_dagster_tests.hyper.star_document import (
    COLUMNS,
    HYPER_GRAPH,
    HYPER_MAP,
    HYPER_ONLY,
    HYPER_RECORDS,
    OBJECT_MODEL,
    STAR,
    STORED,
    equal,
)


def read(text: str) -> ObjectModel:
    return read_object_model(text.encode(), name="datasource Star")


def test_every_logical_table_has_its_source_its_stored_table_and_the_columns_of_both():
    model = read(STAR)
    assert [(table.id, table.caption) for table in model.tables] == [(STORED[name], name) for name in STORED]
    assert [table.source for table in model.tables] == [
        ("SHOP", "PUBLIC", name) for name in ("ORDERS", "CUSTOMERS", "DATES", "DATES")
    ]
    assert [table.stored for table in model.tables] == [("Extract", name) for name in STORED.values()]
    for table in model.tables:
        assert [(column.source, column.local_name, column.stored) for column in table.columns] == [
            (source, f"[{local}]", stored) for source, local, stored in COLUMNS[table.caption]
        ]


def test_relationships_have_their_columns_and_options_on_the_right_sides():
    orders, customers, ordered, shipped = STORED.values()
    assert read(STAR).relationships == (
        Relationship(
            EndPoint(orders, every_row_matches=True),
            EndPoint(customers, unique=True),
            (
                Comparison("=", "[CUSTOMER_ID]", "[CUSTOMER_ID (CUSTOMERS)]"),
                Comparison("=", "[REGION]", "[REGION (CUSTOMERS)]"),
            ),
        ),
        Relationship(EndPoint(ordered, unique=True), EndPoint(orders), (Comparison("=", "[DAY]", "[ORDERED_ON]"),)),
        Relationship(EndPoint(orders), EndPoint(shipped), (Comparison("=", "[SHIPPED_ON]", "[DAY (DATES1)]"),)),
    )
    assert [line.cardinality for line in read(STAR).relationships] == ["many_to_one", "one_to_many", "many_to_many"]


def test_people_decide_over_what_the_database_says_of_a_key():
    text = STAR.replace("is-db-set-unique-key='true'", "is-db-set-unique-key='true' unique-key='false'")
    assert read(text).relationships[1].cardinality == "many_to_many"


def test_comparisons_turn_with_their_sides():
    text = STAR.replace(
        equal("SHIPPED_ON", "DAY (DATES1)"), equal("DAY (DATES1)", "SHIPPED_ON").replace("'='", "'&lt;='")
    )
    (comparison,) = read(text).relationships[2].comparisons
    assert comparison == Comparison(">=", "[SHIPPED_ON]", "[DAY (DATES1)]")
    assert read(text).relationships[2].turned().comparisons == (Comparison("<=", "[DAY (DATES1)]", "[SHIPPED_ON]"),)


def test_related_calculations_are_kept_as_they_are_written():
    calculated = "<expression op='='><expression _.fcp.RelationshipCalculations.true...op='DATE([SHIPPED_ON])' /><expression op='[DAY (DATES1)]' /></expression>"
    either = f"<expression op='OR'>{equal('A', 'B')}{equal('C', 'D')}</expression>"
    plain = equal("SHIPPED_ON", "DAY (DATES1)")
    line = read(STAR.replace(plain, f"<expression op='AND'>{calculated}{either}</expression>")).relationships[2]
    assert line.comparisons == (Comparison("=", "DATE([SHIPPED_ON])", "[DAY (DATES1)]"),)
    assert line.other == "OR(=([A], [B]), =([C], [D]))"


def test_a_document_without_prefixes_says_the_same():
    plain = re.sub(rf"<{OBJECT_MODEL}\.false\.\.\.relation[^>]*/>", "", STAR)
    assert read(re.sub(r"_\.fcp\.\w+\.true\.\.\.", "", plain)) == read(STAR)


def test_what_only_old_versions_read_is_passed_over():
    old = f"<{OBJECT_MODEL}.false...relation name='OLD' table='[PUBLIC].[OLD]' type='table' /><relation connection"
    assert read(STAR.replace("<properties context=''><relation connection", f"<properties context=''>{old}")) == read(
        STAR
    )


def test_records_without_an_object_belong_to_the_table_that_they_name():
    older = re.sub(rf"<{OBJECT_MODEL}\.true\.\.\.object-id>[^<]*</{OBJECT_MODEL}\.true\.\.\.object-id>", "", STAR)
    assert older != STAR
    assert read(older) == read(STAR)


def test_an_object_without_an_extracts_relation_is_stored_where_its_columns_are():
    assert read(re.sub(r"<properties context='extract'>.*?</properties>", "", STAR)) == read(STAR)


def test_a_column_without_a_live_record_has_its_source_from_the_list_of_columns():
    record = re.search(
        r"<metadata-record class='column'><remote-name>CUSTOMER_ID</remote-name>\s*<local-name>\[CUSTOMER_ID \(C.*?</metadata-record>",
        STAR,
    )
    assert record is not None
    customers = read(STAR.replace(record[0], "")).tables[1]
    assert LogicalColumn("[CUSTOMER_ID (CUSTOMERS)]", "CUSTOMER_ID", "CUSTOMER_ID (CUSTOMERS)") in customers.columns


def test_custom_sql_and_joins_are_no_single_source_table():
    table = "table='[PUBLIC].[CUSTOMERS]' type='table' /></properties>"
    query = read(STAR.replace(table, "type='text'>SELECT * FROM C WHERE ID &lt;&lt; 3</relation></properties>")).tables[
        1
    ]
    assert (query.source, query.relation and query.relation.sql) == ((), "SELECT * FROM C WHERE ID < 3")
    assert query.shown == "CUSTOMERS, which reads custom SQL"
    assert (
        read(STAR.replace(table, "type='join' /></properties>")).tables[1].shown
        == "CUSTOMERS, which reads several tables"
    )


def test_a_live_document_has_no_stored_tables():
    model = read(
        re.sub(r"<extract .*</extract>", "", STAR, flags=re.DOTALL).replace(" context='extract'", " context='x'")
    )
    assert [table.stored for table in model.tables] == [None] * 4
    assert model.tables[0].columns[0] == LogicalColumn("[ORDER_ID]", "ORDER_ID", None)


@pytest.mark.parametrize("graph", ["", HYPER_GRAPH])
def test_a_published_hyper_file_has_stored_tables_and_no_source(graph: str):
    model = read(HYPER_ONLY % ("", graph))
    assert [(table.caption, table.stored, table.relation, table.source, table.columns) for table in model.tables] == [
        ("orders", ("Extract", "orders"), None, (), ()),
        ("customers", ("Extract", "customers"), None, (), ()),
    ]


@pytest.mark.parametrize(
    ("columns", "graph"), [(HYPER_RECORDS, ""), (HYPER_RECORDS, HYPER_GRAPH), (HYPER_MAP, HYPER_GRAPH)]
)
def test_a_published_hyper_file_has_stored_columns_and_no_source(columns: str, graph: str):
    orders, customers = read(HYPER_ONLY % (columns, graph)).tables
    assert orders.columns == (LogicalColumn("[CUSTOMER_ID]", None, "CUSTOMER_ID"),)
    assert customers.columns == (LogicalColumn("[CUSTOMER_ID (customers)]", None, "CUSTOMER_ID"),)


def test_a_relation_that_names_no_connection_reads_from_the_only_one():
    assert read(STAR.replace("<relation connection='snowflake.1'", "<relation")) == read(STAR)
    assert read(STAR.replace("dbname='SHOP' ", "")).tables[0].shown == "ORDERS, which reads PUBLIC.ORDERS"


def test_columns_belong_to_the_object_that_they_name_whatever_their_relation_is_called():
    live, extract = STAR.split("<extract ")
    renamed = live.replace("<parent-name>[CUSTOMERS]</parent-name>", "<parent-name>[PEOPLE]</parent-name>")
    assert read(f"{renamed}<extract {extract}") == read(STAR)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (("DATE([DAY (DATES1)])", "[SHIPPED_ON]"), ("[SHIPPED_ON]", "DATE([DAY (DATES1)])")),
        (("[DAY (DATES1)]", "DATE([SHIPPED_ON])"), ("DATE([SHIPPED_ON])", "[DAY (DATES1)]")),
    ],
)
def test_a_calculation_is_on_the_other_side_of_the_column(written: tuple[str, str], read_as: tuple[str, str]):
    calculated = f"<expression op='='><expression op='{written[0]}' /><expression op='{written[1]}' /></expression>"
    line = read(STAR.replace(equal("SHIPPED_ON", "DAY (DATES1)"), calculated)).relationships[2]
    assert line.comparisons == (Comparison("=", *read_as),)


def test_a_parsed_document_is_read_as_well():
    assert read_object_model(Document(STAR.encode())) == read(STAR)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            STORED["CUSTOMERS"],
            STORED["ORDERS"],
            r"2 of its logical tables have the id ORDERS .*; 2 of .* are stored in Extract\.ORDERS",
        ),
        (
            f" id='{STORED['ORDERS']}'",
            "",
            "one of its logical tables has no id; a relationship leads to the logical table ORDERS",
        ),
        (
            f"<first-end-point object-id='{STORED['Order Date']}'",
            "<first-end-point object-id='gone'",
            "table gone, which it does not have",
        ),
        (f"<second-end-point object-id='{STORED['Ship Date']}' />", "", "the logical table without an id, which"),
        (f"object-id='{STORED['Ship Date']}' />", f"object-id='{STORED['ORDERS']}' />", "to itself"),
        ("</objects>", "", "it is not well-formed XML"),
        ("<datasource ", "<!DOCTYPE d [<!ENTITY a 'aaaaaaaa'>]><datasource ", "declares a document type"),
        ("datasource", "workbook", "it does not describe a datasource"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused_with_the_reason(old: str, new: str, sentence: str):
    assert old in STAR
    with pytest.raises(ExtractError, match=sentence) as refused:
        read(STAR.replace(old, new))
    assert str(refused.value).startswith("The document of the datasource Star cannot be used: ")
    assert str(refused.value).endswith("open it with Tableau Desktop, save it and publish it anew.")
