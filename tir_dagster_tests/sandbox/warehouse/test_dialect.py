"""Statements whose answer in Snowflake differs from DuckDB's: the warehouse gives Snowflake's, or says it cannot."""

from __future__ import annotations

import itertools
import time
from datetime import date, datetime

import pandas as pd
import pytest
from snowflake.connector.errors import ProgrammingError
from snowflake.connector.pandas_tools import write_pandas


def code(sql, statement):
    with pytest.raises(ProgrammingError) as caught:
        sql(statement)
    return caught.value.errno


@pytest.fixture(scope="module")
def dates(sql):
    sql("CREATE TABLE DATES (D DATE, TS TIMESTAMP_NTZ, TZ TIMESTAMP_TZ, N NUMBER(10,2))")
    sql("INSERT INTO DATES VALUES ('2024-03-05', '2024-03-05 14:07:09.250', '2024-03-05 14:07:09+00:00', 1.5)")
    return sql


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("TO_VARCHAR(D, 'YYYY-MM')", "2024-03"),
        ("TO_CHAR(D, 'DD.MM.YY')", "05.03.24"),
        ("TO_CHAR(TS, 'YYYY-MM-DD\"T\"HH24:MI:SS.FF3')", "2024-03-05T14:07:09.250"),
        ("TO_VARCHAR(TS, 'MON DY HH12 AM')", "Mar Tue 02 PM"),
        ("TO_VARCHAR(TZ, 'yyyymmdd')", "20240305"),
        ("TO_VARCHAR(D)", "2024-03-05"),
    ],
)
def test_dates_and_times_are_written_in_the_wanted_format(dates, expression, expected):
    assert dates(f"SELECT {expression} FROM DATES") == [(expected,)]


def test_a_format_the_warehouse_does_not_know_is_refused(dates):
    assert code(dates, "SELECT TO_VARCHAR(N, '999.00') FROM DATES") == 2
    assert code(dates, "SELECT TO_VARCHAR(D, 'YYYY-WW') FROM DATES") == 2


@pytest.mark.parametrize("expression", ["1 / 0", "N / (N - N)", "MOD(1, 0)", "5 % 0"])
def test_division_by_zero_is_an_error(dates, expression):
    assert code(dates, f"SELECT {expression} FROM DATES") == 100051


def test_other_divisions_are_as_they_were(dates):
    assert dates("SELECT 6 / 3, N / 0.5, MOD(7, 4), 1 / NULL, DIV0(1, 0) FROM DATES") == [(2, 3, 3, None, 0)]


@pytest.mark.parametrize("moment", ["0001-01-01 00:00:00.000001", "2300-06-01 12:00:00.123456", "9999-12-31 23:59:59"])
def test_times_far_away_come_back_exactly(sql, moment):
    assert sql(f"SELECT '{moment}'::TIMESTAMP_NTZ") == [(datetime.fromisoformat(moment),)]


def test_an_update_may_name_its_table(sql):
    sql("CREATE TABLE PREFIXED (A INT, B INT)")
    sql("INSERT INTO PREFIXED VALUES (1, 1)")
    sql("UPDATE PREFIXED SET PREFIXED.B = 2 WHERE PREFIXED.A = 1")
    sql("UPDATE PREFIXED p SET p.B = p.B + 1")
    assert sql("SELECT B FROM PREFIXED") == [(3,)]


def test_dual_is_one_row(sql):
    assert sql("SELECT 1 AS A FROM DUAL") == [(1,)]


def test_a_column_that_would_count_by_itself_is_refused(sql):
    assert code(sql, "CREATE TABLE COUNTS (A INT AUTOINCREMENT, D DATE)") == 2


def test_a_table_like_another_has_its_columns_and_none_of_its_rows(sql):
    sql("CREATE TABLE ORIGINAL (A NUMBER(38,0), P NUMBER(12,2), S VARCHAR)")
    sql("INSERT INTO ORIGINAL VALUES (1, 2.5, 'x')")
    sql("CREATE TABLE COPIED LIKE ORIGINAL")
    sql("CREATE OR REPLACE TABLE COPIED LIKE ORIGINAL")
    assert [row[:2] for row in sql("DESCRIBE TABLE COPIED")] == [row[:2] for row in sql("DESCRIBE TABLE ORIGINAL")]
    assert sql("SELECT * FROM COPIED") == []


@pytest.mark.parametrize(
    "statement",
    [
        "GRANT SELECT ON TABLE SETTLED TO ROLE READER",
        "REVOKE SELECT ON TABLE SETTLED FROM ROLE READER",
        "USE SECONDARY ROLES ALL",
        "ALTER TABLE IF EXISTS NOPE SET CHANGE_TRACKING = TRUE",
        "ALTER SESSION SET TIMEZONE = 'UTC'",
    ],
)
def test_statements_that_change_nothing_here_are_accepted(sql, statement):
    sql("CREATE TABLE IF NOT EXISTS SETTLED (A INT)")
    assert sql(statement) == [("Statement executed successfully.",)]


def test_an_option_is_taken_back(sql):
    sql("CREATE TABLE TAKEN_BACK (A INT) DATA_RETENTION_TIME_IN_DAYS = 7 CHANGE_TRACKING = TRUE")
    sql("ALTER TABLE TAKEN_BACK UNSET DATA_RETENTION_TIME_IN_DAYS")
    assert sql("SHOW TABLES LIKE 'TAKEN_BACK'")[0][10] == "1"


@pytest.mark.parametrize(
    "statement",
    [
        "EXPLAIN SELECT 1",
        "CALL SOMETHING()",
        "SHOW GRANTS",
        "CREATE STREAM S ON TABLE DATES",
        "CREATE OR REPLACE TASK T WAREHOUSE = COMPUTE_WH AS SELECT 1",
        "CREATE PROCEDURE P() RETURNS INT LANGUAGE SQL AS 'x'",
        "DROP STREAM S",
        "SELECT GET_DDL('TABLE', 'DATES')",
        "SELECT HASH_AGG(*) FROM DATES",
        "ALTER SESSION SET JSON_INDENT = 0",
    ],
)
def test_what_the_warehouse_does_not_have_is_refused_as_such(dates, statement):
    assert code(dates, statement) == 2


def test_too_few_values_are_refused_as_such(dates):
    assert code(dates, "INSERT INTO DATES VALUES ('2024-01-01')") == 2020


@pytest.mark.parametrize(
    "expression", ["DATE_TRUNC('month', D)", "TRUNC(D, 'MONTH')", "DATEADD(day, -4, D)", "DATEADD(month, 0, D) - 4"]
)
def test_a_date_stays_a_date(dates, expression):
    assert dates(f"SELECT {expression} FROM DATES") == [(date(2024, 3, 1),)]


def test_a_time_stays_a_time(dates):
    assert dates("SELECT DATE_TRUNC('month', TS), DATEADD(hour, 1, D) FROM DATES") == [
        (datetime(2024, 3, 1), datetime(2024, 3, 5, 1)),  # noqa: DTZ001 - the columns have no zone
    ]


def test_columns_without_a_name_carry_their_own_text(dates):
    with dates.connection.cursor() as cursor:
        cursor.execute("select count(*), max(d), 1+1, D, SUM(n) total, '5'::int, nvl(n, 0) FROM DATES GROUP BY D, N")
        named = ["COUNT(*)", "MAX(D)", "1+1", "D", "TOTAL", "'5'::INT", "NVL(N, 0)"]
        assert [column.name for column in cursor.description] == named
        cursor.execute("with w as (select 1 as a) select a, (select 2), 'x' from w union all select 3, 4, 'y'")
        assert [column.name for column in cursor.description] == ["A", "(SELECT 2)", "'X'"]


def test_an_offset_may_follow_a_space(sql):
    ((moment,),) = sql("SELECT '2024-01-01 10:00:00 +02:00'::TIMESTAMP_TZ")
    assert moment.timestamp() == 1704096000


def test_many_bound_rows_are_one_insert(connect):
    one = connect(paramstyle="qmark")
    one("CREATE TABLE MANY_ROWS (A INT, B VARCHAR, P NUMBER(10,2))")
    rows = [(number, None if number % 7 == 0 else f"row {number}", number / 4) for number in range(1000)]
    started = time.monotonic()
    with one.connection.cursor() as cursor:
        cursor.executemany("INSERT INTO MANY_ROWS (A, B, P) VALUES (?, ?, ?)", rows)
        assert cursor.rowcount == 1000
    assert time.monotonic() - started < 5
    assert [(a, b, float(p)) for a, b, p in one("SELECT A, B, P FROM MANY_ROWS ORDER BY A")] == rows


def test_a_data_frame_is_written_into_an_existing_table(connect):
    one = connect()
    one("CREATE TABLE FRAME (A INT, B VARCHAR)")
    frame = pd.DataFrame({"A": [1, 2], "B": ["x", None]})
    done, _, rows, _ = write_pandas(one.connection, frame, "FRAME")
    assert (done, rows) == (True, 2)
    assert one("SELECT A, B FROM FRAME ORDER BY A") == [(1, "x"), (2, None)]


def test_a_data_frame_creates_and_replaces_its_table(connect):
    one = connect()
    moment = pd.Timestamp("2026-01-02 03:04:05.123456")
    first = pd.DataFrame({"A": [1], "b": [0.5], "DAY": [moment.date()], "AT": [moment], "FLAG": [True], "T": ["it's"]})
    assert write_pandas(one.connection, first, "NEW_FRAME", auto_create_table=True, use_logical_type=True)[0]
    assert one("SELECT * FROM NEW_FRAME") == [(1, 0.5, moment.date(), moment.to_pydatetime(), True, "it's")]
    assert [row[:2] for row in one("DESCRIBE TABLE NEW_FRAME")] == [
        ("A", "NUMBER(38,0)"),
        ("b", "FLOAT"),
        ("DAY", "DATE"),
        ("AT", "TIMESTAMP_NTZ(9)"),
        ("FLAG", "BOOLEAN"),
        ("T", "VARCHAR(16777216)"),
    ]
    write_pandas(one.connection, pd.DataFrame({"A": [2]}), "NEW_FRAME", auto_create_table=True, overwrite=True)
    assert one("SELECT * FROM NEW_FRAME") == [(2,)]
    write_pandas(one.connection, pd.DataFrame({"A": [3]}), "NEW_FRAME", overwrite=True)
    write_pandas(one.connection, pd.DataFrame({"A": [4, 5]}), "NEW_FRAME", auto_create_table=True, chunk_size=1)
    assert one("SELECT * FROM NEW_FRAME ORDER BY A") == [(3,), (4,), (5,)]


def test_a_moment_of_a_data_frame_is_a_number_unless_logical_types_are_asked_for(connect):
    one = connect()
    frame = pd.DataFrame({"MOMENT": [pd.Timestamp("2026-01-01")]})
    write_pandas(one.connection, frame, "NUMBERED", auto_create_table=True)
    assert one("SELECT MOMENT FROM NUMBERED") == [(1767225600 * 10**9,)]
    with pytest.raises(ProgrammingError) as caught, pytest.warns(UserWarning, match="timezone"):
        write_pandas(
            one.connection, frame.assign(MOMENT=frame.MOMENT.dt.tz_localize("UTC")), "ZONED", auto_create_table=True
        )
    assert caught.value.errno == 2


def test_the_schema_of_staged_files_is_inferred(connect, tmp_path):
    one = connect()
    pd.DataFrame({"A": [1], "B": ["x"]}).to_parquet(tmp_path / "first.parquet")
    pd.DataFrame({"A": [1]}).to_parquet(tmp_path / "second.parquet")
    one("CREATE STAGE INFERRED")
    one("CREATE FILE FORMAT PARQUETS TYPE = PARQUET")
    one(f"PUT 'file://{tmp_path}/*.parquet' '@INFERRED' AUTO_COMPRESS = FALSE")
    inferred = "TABLE(INFER_SCHEMA(LOCATION => '@INFERRED', FILE_FORMAT => '{}'))"
    assert one(f"SELECT * FROM {inferred.format('PARQUETS')} ORDER BY ORDER_ID") == [
        ("A", "NUMBER(38, 0)", True, "$1:A::NUMBER(38, 0)", "first.parquet, second.parquet", 0),
        ("B", "TEXT", True, "$1:B::TEXT", "first.parquet", 1),
    ]
    with pytest.raises(ProgrammingError) as caught:
        one(f"SELECT * FROM {inferred.format('NO_SUCH_FORMAT')}")
    assert caught.value.errno == 2003


def test_a_copy_whose_files_are_purged_is_not_made_again_without_them(connect, tmp_path):
    one = connect()
    pd.DataFrame({"A": [1, 2]}).to_parquet(tmp_path / "some.parquet")
    one("CREATE STAGE PURGED")
    one("CREATE TABLE PURGED_INTO (A INT)")
    one(f"PUT 'file://{tmp_path}/some.parquet' @PURGED AUTO_COMPRESS = FALSE")
    one("BEGIN")
    selected = """(SELECT $1:"A"::NUMBER(38, 0) FROM '@PURGED')"""
    options = "FILE_FORMAT = (TYPE = PARQUET) PURGE = TRUE ON_ERROR = 'ABORT_STATEMENT'"
    assert one(f"COPY INTO PURGED_INTO (A) FROM {selected} {options}")[0][:4] == (
        "purged/some.parquet",
        "LOADED",
        "2",
        "2",
    )
    # A statement that fails in a transaction has the others made again.
    with pytest.raises(ProgrammingError):
        one("INSERT INTO PURGED_INTO SELECT 'x'::INT")
    with pytest.raises(ProgrammingError) as caught:
        one("COMMIT")
    assert caught.value.errno == 625
    assert one("SELECT * FROM PURGED_INTO") == []


def test_a_table_made_of_a_query_may_hold_texts(sql):
    sql("CREATE TABLE MADE_OF_TEXTS AS SELECT RANGE::VARCHAR AS A, MD5(RANGE::VARCHAR(20)) AS B FROM RANGE(3)")
    assert sql("SELECT A FROM MADE_OF_TEXTS ORDER BY A") == [("0",), ("1",), ("2",)]


def test_the_first_row_by_an_order_with_nulls_is_the_first(sql):
    rows = [(114, "'2025-03-31'", 1), (115, "NULL", 1), (110, "'2025-03-05'", 1), (5, "'2025-04-07'", 2)]
    for at, order in enumerate(itertools.permutations(rows)):
        listed = " UNION ALL ".join(
            f"SELECT {number} AS ID, {day}::DATE AS DAY, {product} AS P" for number, day, product in order
        )
        first = (
            f"SELECT ID FROM ({listed}) AS t QUALIFY ROW_NUMBER() OVER (PARTITION BY P ORDER BY DAY) = 1 ORDER BY ID"
        )
        assert sql(first) == [(5,), (110,)], f"order {at}"
