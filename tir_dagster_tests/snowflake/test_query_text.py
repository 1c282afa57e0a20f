"""What the warehouse answers to a query that was taken apart is what it answers to the query as written."""

from __future__ import annotations

import pytest

from tir_dagster.snowflake.query import analyse, base_sql, view_sql


@pytest.mark.parametrize(
    "query",
    [
        "SELECT ID, F IS NOT FALSE AS X FROM {} WHERE F IS NOT TRUE",
        "SELECT ID, F FROM {} WHERE F IS TRUE OR (F IS FALSE) IS NOT TRUE",
        "SELECT ID, LAST_DAY(D, month) AS X, DATE_TRUNC(month, D) AS Y FROM {}",
        "SELECT ID, V:a.b::string || '' AS X, EXTRACT(month FROM D) AS Y, -- both\n .5+N::number(10,2) Z FROM {} WHERE N NOT IN (7)",
    ],
)
def test_a_query_gives_the_rows_that_it_gives_as_written(access, make_table, query):
    table = make_table(
        "ID NUMBER, F BOOLEAN, D DATE, MONTH NUMBER, N NUMBER(5,1), V VARIANT",
        "SELECT 1, TRUE, '2025-02-03', 7, 1.5, PARSE_JSON('{\"a\": {\"b\": 1}}')",
        "SELECT 2, FALSE, '2025-03-31', 8, 2, NULL",
        "SELECT 3, NULL, NULL, NULL, 3, NULL",
    )
    written = query.format(table.sql)
    view = analyse(written, {table: ["ID", "F", "D", "MONTH", "N", "V"]})
    assert view.kind == "copy", view.why_full
    expected = sorted(access.query(written))
    assert sorted(access.query(view_sql(view, None))) == expected
    assert sorted(access.query(base_sql(view, row_key=["ID"], watermark=None, version=None).sql)) == expected
    assert expected, "or nothing was compared"
