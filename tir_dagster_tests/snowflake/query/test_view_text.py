"""What is behind a view, by its text: which tables and views, and whether two texts are the same view."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tir_dagster.snowflake.connection import MISSING_OBJECT, SnowflakeError
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query.views import ViewDefinition, tables_behind, text_digest, view_definition

VIEW = TableName("DB", "S", "V")
FIRST, LATER = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))


@dataclass
class Schema:
    """INFORMATION_SCHEMA of two databases: by a table's full name, its kind, when it was created and altered, its text."""

    objects: dict[str, tuple[str, datetime, datetime, str | None]]
    refused: str = ""

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        if self.refused and f'"{self.refused}".INFORMATION_SCHEMA' in sql:
            raise SnowflakeError("not authorized", errno=min(MISSING_OBJECT))
        names = {name: TableName.parse(name) for name in self.objects}
        return [
            (name.schema, name.name, *self.objects[text])
            for text, name in names.items()
            if f'"{name.database}".INFORMATION_SCHEMA' in sql and f"t.TABLE_NAME = '{name.name}'" in sql
        ]


SEEN = {
    "DB.S.V": ("VIEW", LATER, LATER, "CREATE VIEW V AS SELECT * FROM INNER_V JOIN OTHER.S.U USING (A)"),
    "DB.S.INNER_V": ("VIEW", FIRST, FIRST, "CREATE VIEW INNER_V AS SELECT * FROM T"),
    "DB.S.T": ("BASE TABLE", FIRST, FIRST, None),
    "OTHER.S.U": ("BASE TABLE", FIRST, FIRST, None),
}


def defined(*, refused: str = "", **changed: tuple[Any, ...] | None) -> ViewDefinition:
    """What is known of the view, with some objects otherwise or, as None, not seen."""
    names = {name.rsplit(".", 1)[1]: name for name in SEEN}
    objects = {**SEEN, **{names[name]: facts for name, facts in changed.items()}}
    access: Any = Schema({name: facts for name, facts in objects.items() if facts is not None}, refused)
    return view_definition(access, VIEW)


def test_a_view_is_told_by_its_text_and_by_all_that_is_behind_it():
    known = defined()
    assert None not in (known.text, known.behind, known.ddl)
    view, inner, table = SEEN["DB.S.V"], SEEN["DB.S.INNER_V"], SEEN["DB.S.T"]
    assert defined(INNER_V=(inner[0], LATER, LATER, inner[3])) == known, "created again with the same text"
    assert defined(V=(*view[:3], f"{view[3]} WHERE A > 0")).text != known.text
    assert defined(INNER_V=(*inner[:3], f"{inner[3]} WHERE A > 0")).behind != known.behind
    assert defined(T=(table[0], LATER, FIRST, None)).behind != known.behind
    altered = defined(T=(table[0], FIRST, LATER, None))
    assert (altered.behind, altered.ddl == known.ddl) == (known.behind, False)
    assert defined(INNER_V=(inner[0], FIRST, LATER, inner[3])).ddl != known.ddl


@pytest.mark.parametrize(
    "hidden",
    [{"T": None}, {"INNER_V": (*SEEN["DB.S.INNER_V"][:3], None)}, {"INNER_V": None}, {"refused": "OTHER"}],
)
def test_what_the_role_may_not_see_behind_a_view_is_unknown(hidden):
    assert defined(**hidden) == ViewDefinition(text=defined().text)
    assert str(defined(**hidden)).endswith("/?/?")


def test_nothing_is_known_of_a_view_whose_text_is_hidden():
    assert str(defined(V=(*SEEN["DB.S.V"][:3], None))) == str(defined(V=None)) == "?/?/?"


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
