"""Temporary tables and views: in front of permanent ones of the same name, and seen by their own session only."""

from __future__ import annotations

import pytest
from snowflake.connector.errors import ProgrammingError


def test_a_temporary_table_hides_a_permanent_one_from_its_session_only(connect):
    owner, other = connect(), connect()
    owner("CREATE TABLE HIDDEN (A INT)")
    owner("INSERT INTO HIDDEN VALUES (1)")
    owner("CREATE OR REPLACE TEMP TABLE HIDDEN (A INT, B VARCHAR)")
    owner("INSERT INTO HIDDEN VALUES (2, 'x'), (3, 'y')")
    owner("UPDATE HIDDEN SET B = 'z' WHERE HIDDEN.A = 3")
    owner("DELETE FROM HIDDEN WHERE A = 2")
    assert owner("SELECT A, B FROM HIDDEN") == [(3, "z")]
    assert other("SELECT * FROM HIDDEN") == [(1,)]
    owner("DROP TABLE HIDDEN")
    assert owner("SELECT * FROM HIDDEN") == [(1,)]


def test_temporary_tables_of_two_sessions_do_not_collide(connect):
    clients = [connect(), connect()]
    for number, client in enumerate(clients):
        client(f"CREATE TEMPORARY TABLE MINE AS SELECT {number} AS A")
    assert [client("SELECT A FROM MINE") for client in clients] == [[(0,)], [(1,)]]


def test_the_end_of_the_session_leaves_the_permanent_table_alone(connect):
    owner, other = connect(), connect()
    owner("CREATE TABLE STAYS AS SELECT 1 AS A")
    owner("CREATE TEMP TABLE STAYS AS SELECT 2 AS A")
    owner.connection.close()
    assert other("SELECT A FROM STAYS") == [(1,)]


def test_creating_a_temporary_table_leaves_the_transaction_open(connect):
    one, other = connect(), connect()
    one("CREATE TABLE STILL_OPEN (A INT)")
    one("BEGIN")
    one("INSERT INTO STILL_OPEN VALUES (1)")
    one("CREATE TEMP TABLE KEYS AS SELECT 7 AS A")
    assert other("SELECT * FROM STILL_OPEN") == []
    one("INSERT INTO STILL_OPEN SELECT A FROM KEYS")
    with pytest.raises(ProgrammingError):
        one("SELECT 'x'::INT")
    assert one("SELECT A FROM KEYS") == [(7,)]
    one("COMMIT")
    assert other("SELECT A FROM STILL_OPEN ORDER BY A") == [(1,), (7,)]


def test_a_temporary_table_feeds_a_merge_and_takes_one(connect):
    one = connect()
    one("CREATE TABLE FED (A INT, B INT)")
    one("INSERT INTO FED VALUES (1, 1)")
    one("CREATE TEMP TABLE FEED (A INT, B INT)")
    one("INSERT INTO FEED VALUES (1, 10), (2, 20)")
    merge = (
        "MERGE INTO {} t USING {} s ON t.A = s.A WHEN MATCHED THEN UPDATE SET B = s.B "
        "WHEN NOT MATCHED THEN INSERT (A, B) VALUES (s.A, s.B)"
    )
    assert one(merge.format("FED", "FEED")) == [(1, 1)]
    one("TRUNCATE TABLE FEED")
    assert one(merge.format("FEED", "FED")) == [(2, 0)]
    assert one("SELECT * FROM FEED ORDER BY A") == one("SELECT * FROM FED ORDER BY A") == [(1, 10), (2, 20)]


def test_a_common_table_expression_goes_before_a_temporary_table(connect):
    one = connect()
    one("CREATE TEMP TABLE NAMED AS SELECT 1 AS A")
    assert one("WITH NAMED AS (SELECT 2 AS A) SELECT A FROM NAMED") == [(2,)]


def test_a_temporary_table_is_described(connect):
    one = connect()
    one("CREATE TEMP TABLE LOOKED_AT (A NUMBER(38,0), P NUMBER(12,2), S VARCHAR, D DATE, F FLOAT)")
    assert [row[:2] for row in one("DESCRIBE TABLE LOOKED_AT")] == [
        ("A", "NUMBER(38,0)"),
        ("P", "NUMBER(12,2)"),
        ("S", "VARCHAR(16777216)"),
        ("D", "DATE"),
        ("F", "FLOAT"),
    ]


@pytest.mark.parametrize(
    "statement", ["CREATE VIEW V AS SELECT * FROM LIMITED", "SELECT * FROM LIMITED AT(OFFSET => 0)"]
)
def test_what_temporary_tables_cannot_do_is_refused(connect, statement):
    one = connect()
    one("CREATE TEMP TABLE LIMITED (A INT)")
    with pytest.raises(ProgrammingError) as caught:
        one(statement)
    assert caught.value.errno == 2


def test_a_temporary_view_is_its_sessions_own_and_shows_what_its_tables_hold(connect):
    owner, other = connect(), connect()
    owner("CREATE TABLE SEEN AS SELECT 1 AS A")
    owner("CREATE VIEW SHOWN AS SELECT A FROM SEEN")
    owner("CREATE TEMP TABLE KEPT_BACK AS SELECT 5 AS A")
    owner("CREATE TEMPORARY VIEW SHOWN (B) AS SELECT SEEN.A * 10 FROM SEEN UNION ALL SELECT A FROM KEPT_BACK")
    owner("INSERT INTO SEEN VALUES (2)")
    database = owner.value("SELECT CURRENT_DATABASE()")
    schema = owner.value("SELECT CURRENT_SCHEMA()")
    owner("USE SCHEMA PUBLIC")
    assert owner(f"SELECT B FROM {database}.{schema}.SHOWN ORDER BY B") == [(5,), (10,), (20,)]
    assert other("SELECT A FROM SHOWN ORDER BY A") == [(1,), (2,)]
    owner(f"USE SCHEMA {schema}")
    assert [row[:2] for row in owner("DESCRIBE VIEW SHOWN")] == [("B", "NUMBER(38,0)")]
    owner("DROP VIEW SHOWN")
    assert owner("SELECT A FROM SHOWN ORDER BY A") == [(1,), (2,)]


def test_a_temporary_view_goes_with_a_transaction_that_is_rolled_back(connect):
    one = connect()
    one("BEGIN")
    one("CREATE TEMP VIEW GONE AS SELECT 1 AS A")
    one("ROLLBACK")
    with pytest.raises(ProgrammingError) as caught:
        one("SELECT * FROM GONE")
    assert caught.value.errno == 2003


def test_a_temporary_view_over_a_dropped_table_is_not_another_object(connect):
    one = connect()
    one("CREATE TABLE BELOW AS SELECT 1 AS A")
    one("CREATE VIEW ABOVE AS SELECT 7 AS A")
    one("CREATE TEMP VIEW ABOVE AS SELECT A FROM BELOW")
    one("DROP TABLE BELOW")
    with pytest.raises(ProgrammingError) as caught:
        one("SELECT * FROM ABOVE")
    assert caught.value.errno == 2003
    one("CREATE OR REPLACE TEMP TABLE ABOVE AS SELECT 3 AS A")
    assert one("SELECT * FROM ABOVE") == [(3,)]
