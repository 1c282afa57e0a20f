"""A spec that does not fit its tables: what is told, and where in the spec."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from tir_dagster.changes.relation import relation_of
from tir_dagster.errors import SpecError, TirError
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.reading import spec_from_mapping
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
        "it. Did you mean DB.S.PRODUCTS? Correct the query, or grant SELECT on the table."
    )


def test_detectors_of_the_first_table_are_said_in_one_place():
    message = refused(changes={"watermark": "STAMP", "tables": {"db.s.sales": {"detector": "feed"}}})
    assert message.startswith("shown: changes.tables.db.s.sales: it is the query's first table, not a joined one.")


def test_two_names_of_one_table_are_refused():
    tables = {"DB.S.PRODUCTS": {"detector": "feed"}, "db.s.products": {"detector": "hint"}}
    message = refused(changes={"tables": tables})
    assert message == "spec.yaml: changes.tables.db.s.products: the same table as DB.S.PRODUCTS; keep one of the two."


def test_slices_by_what_is_no_date_are_told_with_their_field():
    message = refused(slices={"column": "COLOR", "by": "month", "start": "2025-01"})
    assert message.startswith("shown: slices.column: The slice column COLOR holds text. Slice by a DATE or TIMESTAMP")


WHOLE = "SELECT id, day, AVG(qty) OVER (PARTITION BY product) AS mean FROM db.s.sales WHERE product IN (SELECT product FROM db.s.products)"


def test_of_a_query_that_is_compared_as_a_whole_any_output_that_tells_keys_apart_may_be_the_row_key():
    assert "row_key names MEAN, which holds" in refused(WHOLE, row_key="MEAN")
    assert "row_key names QTY, which the query does not have. It has ID, DAY, MEAN." in refused(WHOLE, row_key="QTY")


def test_settings_that_a_query_compared_as_a_whole_has_no_use_for_are_named():
    changes = {"detector": "feed", "tables": {"db.s.products": {"watermark": "STAMP", "duplicates": "fail"}}}
    written = {"name": "shown", "query": WHOLE, "row_key": "ID", "datasource": {"project": "p", "name": "shown"}}
    spec = spec_from_mapping({**written, "changes": changes}, "spec.yaml")
    relation = relation_of(spec, Warehouse(duckdb.connect(config={"threads": 1})))
    assert (relation.why_full, relation.analysed, [column.name for column in relation.key]) == (None, False, ["ID"])
    assert relation.unused_settings == (
        "changes asks for the detector feed, which is not used: `diff` compares the query as a whole instead. It has a subquery.",
        (
            "changes.tables.db.s.products asks for the detector watermark, which is not used: `diff` compares the query as a whole "
            "instead. It has a subquery."
        ),
        (
            "changes.tables.db.s.products.duplicates is not used: the join keys of a query that is compared as a whole are not "
            "known."
        ),
    )


@pytest.fixture(scope="module")
def keyed(sandbox) -> SnowflakeAccess:
    with sandbox.snowflake() as connection:
        for statement in (
            "CREATE DATABASE IF NOT EXISTS KEYED",
            "CREATE OR REPLACE TABLE KEYED.PUBLIC.T (WIDE NUMBER(38,5), FITS NUMBER(18,5), F FLOAT, J VARIANT, CLOCK TIME, D DATE, N NUMBER)",
        ):
            connection.cursor().execute(statement)
    return SnowflakeAccess.from_environment(sandbox.env)


COPY, AGGREGATE = "SELECT * FROM KEYED.PUBLIC.T", "SELECT D, SUM(N) AS N FROM KEYED.PUBLIC.T GROUP BY D"


def key_of(access: SnowflakeAccess, key: str, **settings: Any) -> Any:
    written = {"name": "shown", "row_key": key, "datasource": {"project": "p", "name": "shown"}}
    return relation_of(spec_from_mapping({**written, **settings}, "spec.yaml"), access)


@pytest.mark.parametrize("settings", [{"source": "KEYED.PUBLIC.T"}, {"query": COPY}], ids=["source", "query"])
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("WIDE", "is NUMBER(38,5): an extract holds so many digits as a float"),
        ("F", "holds float"),
        ("J", "holds json"),
        ("CLOCK", "holds times of day"),
    ],
)
def test_a_row_key_whose_values_cannot_be_told_apart_is_refused_before_anything_is_read(keyed, settings, key, reason):
    with pytest.raises(SpecError) as error:
        key_of(keyed, key, **settings)
    assert str(error.value).startswith(f"shown: row_key names {key}, which {reason}")
    assert "Name another column" in str(error.value)
    assert key_of(keyed, "FITS", **settings).key[0].name == "FITS"


def test_the_row_key_of_an_aggregate_is_in_no_extract_and_may_be_wide(keyed):
    (key,) = key_of(keyed, "WIDE", query=AGGREGATE).base_key
    assert (key.precision, key.scale) == (38, 5)
    with pytest.raises(SpecError, match="row_key names F, which holds float"):
        key_of(keyed, "F", query=AGGREGATE)


def test_each_table_is_described_once_however_many_settings_name_its_columns(keyed, warehouse):
    warehouse.forget_queries()
    settings = {"slices": {"column": "D", "by": "month", "start": "2025-01"}, "changes": {"watermark": "N"}}
    assert key_of(keyed, "FITS", source="KEYED.PUBLIC.T", **settings).watermark.name == "N"
    statements = [query["sql"] for query in warehouse.queries()]
    assert [sql.split()[0] for sql in statements] == ["DESCRIBE"], statements
    # And anew the next time: somebody may have changed it.
    key_of(keyed, "FITS", source="KEYED.PUBLIC.T", **settings)
    assert len(warehouse.queries()) == 2
