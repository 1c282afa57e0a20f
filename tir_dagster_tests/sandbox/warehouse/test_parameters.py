"""Session parameters: known ones only, of account, user and session, and honoured or refused."""

from __future__ import annotations

import pytest
from snowflake.connector.errors import DatabaseError, ProgrammingError


def code(sql, statement):
    with pytest.raises(ProgrammingError) as caught:
        sql(statement)
    return caught.value.errno


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("ALTER SESSION SET NO_SUCH_PARAMETER = 1", 1006),
        ("ALTER SESSION UNSET NO_SUCH_PARAMETER", 1006),
        ("ALTER ACCOUNT SET NO_SUCH_PARAMETER = 1", 1006),
        ("ALTER USER NOBODY SET TIMEZONE = 'UTC'", 2003),
        ("ALTER SESSION SET WEEK_START = 8", 1008),
        ("ALTER SESSION SET AUTOCOMMIT = 'sometimes'", 1008),
        ("ALTER SESSION SET TIMEZONE = 'Middle/Earth'", 1008),
        ("ALTER SESSION SET JSON_INDENT = 0", 2),
        ("ALTER SESSION SET BINARY_OUTPUT_FORMAT = 'BASE64'", 2),
        ("ALTER ACCOUNT SET DEFAULT_DDL_COLLATION = 'en-ci'", 2),
        ("ALTER SESSION SET DATE_INPUT_FORMAT = 'YYYY-WW'", 2),
    ],
)
def test_a_name_or_value_that_there_is_not_is_refused(sql, statement, expected):
    assert code(sql, statement) == expected


def test_a_login_with_a_parameter_that_is_not_there_is_refused(connect):
    for parameters in ({"NO_SUCH_PARAMETER": 1}, {"JSON_INDENT": 4}):
        with pytest.raises(DatabaseError):
            connect(session_parameters=parameters)


def test_a_session_begins_with_the_defaults_of_the_user_and_then_of_the_account(sandbox, connect):
    user = sandbox.env["SNOWFLAKE_USER"]
    sql = connect()
    shown = "SHOW PARAMETERS LIKE 'ROWS_PER%' IN SESSION"
    sql("ALTER ACCOUNT SET ROWS_PER_RESULTSET = 3 WEEK_START = 1")
    try:
        sql(f"ALTER USER {user} SET ROWS_PER_RESULTSET = 2")
        later = connect()
        assert [row[:4] for row in later(shown)] == [("ROWS_PER_RESULTSET", "2", "0", "USER")]
        assert len(later("SELECT COLUMN1 FROM VALUES (1), (2), (3), (4)")) == 2
        later("ALTER SESSION SET ROWS_PER_RESULTSET = 0")
        assert [row[3] for row in later(shown)] == ["SESSION"]
        later("ALTER SESSION UNSET ROWS_PER_RESULTSET")
        assert [row[1] for row in later(shown)] == ["2"]
        sql(f"ALTER USER {user} UNSET ROWS_PER_RESULTSET")
        assert connect()(shown)[0][1] == "3"
        assert len(sql("SELECT COLUMN1 FROM VALUES (1), (2), (3), (4)")) == 4, "a session keeps what it began with"
    finally:
        sql(f"ALTER USER {user} UNSET ROWS_PER_RESULTSET")
        sql("ALTER ACCOUNT UNSET ROWS_PER_RESULTSET, WEEK_START")


@pytest.mark.parametrize(
    ("setting", "query", "expected"),
    [
        ("WEEK_START = 1", "SELECT DAYOFWEEK('2024-02-18'::DATE), DAYOFWEEK('2024-02-19'::DATE)", (7, 1)),
        ("WEEK_START = 7", "SELECT DAYOFWEEK('2024-02-18'::DATE), DATE_PART(DOW, '2024-02-17'::DATE)", (1, 7)),
        ("DATE_INPUT_FORMAT = 'DD/MM/YYYY'", "SELECT TO_VARCHAR(TO_DATE('13/02/2024'))", ("2024-02-13",)),
        ("DATE_OUTPUT_FORMAT = 'DD.MM.YY'", "SELECT '2024-02-13'::DATE::VARCHAR, 1.50::VARCHAR", ("13.02.24", "1.50")),
        (
            "TIMEZONE = 'Europe/Zurich'",
            "SELECT '2024-06-01 01:00:00'::TIMESTAMP_LTZ = '2024-05-31T23:00:00+00:00'::TIMESTAMP_TZ",
            (True,),
        ),
    ],
)
def test_a_setting_is_honoured(connect, setting, query, expected):
    sql = connect()
    sql(f"ALTER SESSION SET {setting}")

    assert sql(query) == [expected]


def test_text_that_does_not_fit_the_format_is_refused(connect):
    sql = connect()
    sql("ALTER SESSION SET DATE_INPUT_FORMAT = 'DD/MM/YYYY'")

    assert code(sql, "SELECT '2024-02-13'::DATE") == 100096


def test_text_that_is_stored_is_read_by_the_format(connect):
    sql = connect()
    sql("CREATE TABLE READ_SO (D DATE, TS TIMESTAMP_NTZ(3), N INT)")
    sql("ALTER SESSION SET DATE_INPUT_FORMAT = 'DD/MM/YYYY' TIMESTAMP_INPUT_FORMAT = 'DD/MM/YYYY HH24:MI'")
    sql("INSERT INTO READ_SO VALUES ('13/02/2024', '13/02/2024 10:30', 1)")
    sql("INSERT INTO READ_SO (N, D) SELECT 2, '14/02/2024'")
    sql("UPDATE READ_SO SET D = '15/02/2024' WHERE N = 2")

    assert code(sql, "INSERT INTO READ_SO (D) VALUES ('2024-02-13')") == 100096
    assert sql("SELECT TO_VARCHAR(D), TO_CHAR(TS, 'HH24:MI') FROM READ_SO ORDER BY N") == [
        ("2024-02-13", "10:30"),
        ("2024-02-15", None),
    ]


def test_weeks_that_cannot_be_counted_so_are_refused(connect):
    sql = connect()
    sql("ALTER SESSION SET WEEK_START = 7")

    assert code(sql, "SELECT WEEK('2024-02-13'::DATE)") == 2
    assert code(sql, "SELECT DATEDIFF(WEEK, '2024-02-13'::DATE, '2024-02-20'::DATE)") == 2


def test_names_in_small_letters_are_those_in_capitals_if_case_is_ignored(connect):
    sql = connect()
    sql("ALTER SESSION SET QUOTED_IDENTIFIERS_IGNORE_CASE = TRUE")
    sql('CREATE TABLE "small_name" ("id" INT)')

    assert [row[0] for row in sql("DESCRIBE TABLE SMALL_NAME")] == ["ID"]


def test_a_statement_that_takes_too_long_is_ended(connect):
    sql = connect()
    sql("ALTER SESSION SET STATEMENT_TIMEOUT_IN_SECONDS = 1")

    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    assert code(sql, endless) == 630
    assert sql("SELECT 1") == [(1,)]
