"""Views in the embedded warehouse: their text, secure ones, tokens, the past through several of them, their changes."""

from __future__ import annotations

import pytest
import snowflake.connector


def refusal(sql, statement):
    with pytest.raises(snowflake.connector.Error) as caught:
        sql(statement)
    return caught.value.errno, caught.value.sqlstate


def definition(sql, view):
    return sql(
        "SELECT VIEW_DEFINITION, IS_SECURE FROM INFORMATION_SCHEMA.VIEWS "
        f"WHERE TABLE_SCHEMA = CURRENT_SCHEMA() AND TABLE_NAME = '{view}'"
    )[0]


def moments(sql, view):
    return sql(
        "SELECT CREATED, LAST_DDL FROM INFORMATION_SCHEMA.TABLES "
        f"WHERE TABLE_SCHEMA = CURRENT_SCHEMA() AND TABLE_NAME = '{view}'"
    )[0]


@pytest.fixture(scope="module", autouse=True)
def tables(sql):
    sql("CREATE TABLE SOLD (ID INT, PRODUCT INT)")
    sql("CREATE TABLE PRICED (PRODUCT INT, PRICE INT)")


def test_the_text_of_a_view_is_the_statement_that_created_it(sql):
    text = "CREATE OR REPLACE VIEW WRITTEN (A COMMENT 'first', B)\n  COMMENT = 'kept' AS (SELECT ID, PRODUCT FROM SOLD)"
    sql(f"{text};")
    assert definition(sql, "WRITTEN") == (text, "NO")
    assert sql("SELECT GET_DDL('VIEW', 'WRITTEN')") == [(f"{text};",)]
    shown = sql("SHOW VIEWS LIKE 'WRIT%'")
    assert [(row[1], row[6], row[7], row[8], row[11]) for row in shown] == [("WRITTEN", "kept", text, "false", "OFF")]
    assert shown[0][0] == moments(sql, "WRITTEN")[0]


def test_only_the_owner_sees_the_text_of_a_secure_view(connect, sql):
    sql("CREATE SECURE VIEW HIDDEN COPY GRANTS AS SELECT ID FROM SOLD")
    sql("CREATE ROLE IF NOT EXISTS ANALYST")
    other = connect(role="ANALYST")
    assert definition(sql, "HIDDEN") == ("CREATE SECURE VIEW HIDDEN COPY GRANTS AS SELECT ID FROM SOLD", "YES")
    assert definition(other, "HIDDEN") == (None, "YES")
    assert other("SHOW VIEWS LIKE 'HIDDEN'")[0][7:9] == ("", "true")
    assert refusal(other, "SELECT GET_DDL('VIEW', 'HIDDEN')") == (2003, "42S02")
    assert other("SELECT COUNT(*) FROM HIDDEN AT(OFFSET => 0)"), "its rows are for everybody"
    sql("ALTER VIEW HIDDEN UNSET SECURE")
    assert definition(other, "HIDDEN")[1] == "NO"


def test_created_moves_with_every_replacement_and_last_ddl_with_everything_done_to_a_view(sql):
    sql("CREATE VIEW MADE AS SELECT ID FROM SOLD")
    created, ddl = moments(sql, "MADE")
    assert ddl == created
    sql("COMMENT ON VIEW MADE IS 'told'")
    commented = moments(sql, "MADE")
    assert (commented[0], commented[1] > ddl) == (created, True)
    sql("CREATE OR REPLACE VIEW MADE AS SELECT ID FROM SOLD")
    again = moments(sql, "MADE")
    assert (again[0] > commented[1], again[1]) == (True, again[0])


def test_the_token_of_a_view_moves_with_each_of_its_tables_and_not_with_the_view(sql):
    sql("CREATE VIEW PAIRED AS SELECT s.ID, p.PRICE FROM SOLD s JOIN PRICED p ON s.PRODUCT = p.PRODUCT")
    sql("CREATE VIEW OVER_PAIRED AS WITH P AS (SELECT * FROM PAIRED) SELECT ID FROM P")
    tokens = []

    def token():
        tokens.append(sql.value("SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('OVER_PAIRED')"))
        return len(set(tokens))

    assert token() == 1
    sql("CREATE OR REPLACE VIEW PAIRED AS SELECT s.ID, p.PRICE FROM SOLD s JOIN PRICED p ON s.PRODUCT = p.PRODUCT")
    sql("ALTER VIEW OVER_PAIRED SET CHANGE_TRACKING = TRUE")
    assert token() == 1
    sql("INSERT INTO PRICED VALUES (7, 70)")
    assert token() == 2
    sql("INSERT INTO SOLD VALUES (700, 7)")
    assert token() == 3
    sql("CREATE OR REPLACE TABLE PRICED (PRODUCT INT, PRICE INT)")
    assert token() == 4


def test_the_past_of_nested_views_has_the_names_that_their_columns_were_given(sql):
    sql("CREATE TABLE PLAIN (A INT, B INT)")
    sql("INSERT INTO PLAIN VALUES (1, 10)")
    sql('CREATE VIEW NAMED (X, "y z") AS SELECT A, B FROM PLAIN')
    sql('CREATE VIEW AROUND AS SELECT "y z" AS Z, X FROM NAMED')
    then = sql.now()
    sql("UPDATE PLAIN SET B = 20")
    assert sql(f'SELECT X, "y z" FROM NAMED AT(TIMESTAMP => {then})') == [(1, 10)]
    assert sql(f"SELECT Z, X FROM AROUND AT(TIMESTAMP => {then})") == [(10, 1)]


def test_a_view_has_no_past_before_a_table_behind_it_was_created_anew(sql):
    sql("CREATE TABLE RENEWED (A INT)")
    sql("INSERT INTO RENEWED VALUES (1)")
    sql("CREATE VIEW ON_RENEWED AS SELECT A FROM RENEWED")
    then = sql.now()
    assert sql(f"SELECT A FROM ON_RENEWED AT(TIMESTAMP => {then})") == [(1,)]
    sql("CREATE OR REPLACE TABLE RENEWED AS SELECT 2 AS A")
    assert refusal(sql, f"SELECT A FROM ON_RENEWED AT(TIMESTAMP => {then})") == (707, "02000")
    assert sql("SELECT A FROM ON_RENEWED") == [(2,)]


def test_changes_of_a_view_are_those_of_its_rows(sql):
    sql("CREATE TABLE LEFT_ROWS (A INT, B INT)")
    sql("CREATE TABLE RIGHT_ROWS (A INT, C INT)")
    sql("INSERT INTO LEFT_ROWS VALUES (1, 1), (2, 2), (3, 99)")
    sql("INSERT INTO RIGHT_ROWS VALUES (1, 10), (2, 20), (3, 30)")
    sql("CREATE VIEW BOTH_ROWS AS SELECT l.A, C FROM LEFT_ROWS l JOIN RIGHT_ROWS r ON l.A = r.A WHERE B < 50")
    sql("CREATE VIEW OUTER_ROWS AS SELECT A FROM BOTH_ROWS")
    early = sql.now()
    changes = "SELECT * EXCLUDE (METADATA$ROW_ID) FROM {} CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {})"
    sql("ALTER VIEW OUTER_ROWS SET CHANGE_TRACKING = TRUE")
    assert refusal(sql, changes.format("BOTH_ROWS", early)) == (91930, "2F003")
    since = sql.now()
    sql("UPDATE RIGHT_ROWS SET C = 11 WHERE A = 1")
    sql("UPDATE LEFT_ROWS SET B = 3 WHERE A = 3")
    sql("DELETE FROM LEFT_ROWS WHERE A = 2")
    assert sorted(sql(changes.format("BOTH_ROWS", since))) == [
        (1, 10, "DELETE", False),
        (1, 11, "INSERT", False),
        (2, 20, "DELETE", False),
        (3, 30, "INSERT", False),
    ]
    assert sorted(sql(changes.format("OUTER_ROWS", since))) == [(2, "DELETE", False), (3, "INSERT", False)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT PRODUCT, COUNT(*) AS N FROM SOLD GROUP BY PRODUCT",
        "SELECT DISTINCT PRODUCT FROM SOLD",
        "SELECT s.ID FROM SOLD s LEFT JOIN PRICED p ON s.PRODUCT = p.PRODUCT",
        "SELECT ID FROM SOLD WHERE PRODUCT IN (SELECT PRODUCT FROM PRICED)",
        "SELECT ID FROM SOLD QUALIFY ROW_NUMBER() OVER (PARTITION BY PRODUCT ORDER BY ID) = 1",
        "SELECT ID FROM SOLD UNION SELECT PRICE FROM PRICED",
    ],
)
def test_a_view_that_does_more_than_join_and_filter_has_no_changes(sql, query):
    sql(f"CREATE OR REPLACE VIEW TOO_MUCH CHANGE_TRACKING = TRUE AS {query}")
    since = sql.now()
    with pytest.raises(snowflake.connector.Error, match="Change tracking is not supported on queries with"):
        sql(f"SELECT * FROM TOO_MUCH CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since})")
