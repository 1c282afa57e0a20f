from __future__ import annotations

import pytest

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.names import TableName, literal, quote


@pytest.mark.parametrize(
    ("text", "stored", "text_form"),
    [
        ("db.schema.orders", ("DB", "SCHEMA", "ORDERS"), "DB.SCHEMA.ORDERS"),
        ('db."My Schema".Orders', ("DB", "My Schema", "ORDERS"), 'DB."My Schema".ORDERS'),
        ('DB.S."a.b"', ("DB", "S", "a.b"), 'DB.S."a.b"'),
        ('DB.S."say ""hi"""', ("DB", "S", 'say "hi"'), 'DB.S."say ""hi"""'),
        (' "db" . s . t$1 ', ("db", "S", "T$1"), '"db".S.T$1'),
    ],
)
def test_a_name_is_read_as_snowflake_stores_it(text, stored, text_form):
    table = TableName.parse(text)

    assert (table.database, table.schema, table.name) == stored
    assert str(table) == text_form
    assert TableName.parse(str(table)) == table == TableName.parse(table.sql)


def test_missing_parts_come_from_the_connection():
    assert str(TableName.parse("orders", database="db", schema='"Mixed"')) == 'DB."Mixed".ORDERS'
    assert str(TableName.parse("s.orders", database="db")) == "DB.S.ORDERS"


@pytest.mark.parametrize("text", ["orders", "a.b.c.d", "", "a..b", "a.b.c d", 'a.b."c', "a.b.1c", "a.b.c;drop"])
def test_anything_else_is_no_name(text):
    with pytest.raises(SourceError, match=r"DATABASE\.SCHEMA\.TABLE"):
        TableName.parse(text)


def test_quotes_cannot_be_left():
    assert quote('a"b') == '"a""b"'
    assert literal("it's \\'") == "'it''s \\\\'''"
