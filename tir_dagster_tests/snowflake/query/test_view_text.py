"""What is behind a view, by its text: which tables and views, and whether two texts are the same view."""

from __future__ import annotations

import pytest

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.views import tables_behind, text_digest

VIEW = TableName("DB", "S", "V")


@pytest.mark.parametrize(
    ("query", "tables"),
    [
        ("SELECT A FROM T", {"DB.S.T"}),
        ('(SELECT a.*, COALESCE(b.X, 1) AS X FROM o.t AS a JOIN "o"."t" AS b USING (A))', {"DB.O.T", 'DB."o"."t"'}),
        ("SELECT * FROM OTHER..T", {"OTHER.PUBLIC.T"}),
        # A name that the query defines is no table, but may be one inside its own definition.
        ("WITH T AS (SELECT * FROM T), U AS (SELECT * FROM T) SELECT * FROM U", {"DB.S.T"}),
        ("SELECT A FROM T WHERE A IN (SELECT A FROM X.U) UNION ALL SELECT 1", {"DB.S.T", "DB.X.U"}),
        ("SELECT f.VALUE FROM T, LATERAL FLATTEN(INPUT => T.LIST) AS f", {"DB.S.T"}),
        ("SELECT 1 AS A", set()),
        # A function may read anything, and the clock needs no table.
        ("SELECT MY_FUNCTION(A) FROM T", None),
        ("SELECT * FROM TABLE(MY_ROWS(1))", None),
        ("SELECT * FROM @STAGE", None),
        ("SELECT A FROM T WHERE DAY > CURRENT_DATE", None),
        ("SELECT FROM FROM", None),
    ],
)
def test_the_tables_behind_a_view(query, tables):
    behind = tables_behind(VIEW, f"CREATE OR REPLACE SECURE VIEW V (A COMMENT 'one') COPY GRANTS AS {query}")
    assert behind == (None if tables is None else {TableName.parse(name) for name in tables})


def test_the_text_of_a_view_is_its_words_without_comments_and_without_how_it_was_created():
    one = text_digest("CREATE VIEW V AS SELECT 'A' AS B FROM T")
    assert one == text_digest(
        "/* dbt */ create or replace secure view V AS\n SELECT 'A' AS B -- why\nFROM T /* run 7 */"
    )
    assert one != text_digest("CREATE VIEW V AS SELECT 'B' AS B FROM T")
    assert one != text_digest("CREATE VIEW V AS SELECT A AS B FROM T")
    assert text_digest("CREATE VIEW V AS SELECT 'open") != one, "what cannot be read is compared as it is"
