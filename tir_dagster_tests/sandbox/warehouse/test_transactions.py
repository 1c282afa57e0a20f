"""Transactions as Snowflake has them: a failed statement does not end one, and what is lost is never half-committed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from snowflake.connector.errors import DatabaseError, ProgrammingError


def code(client, statement):
    with pytest.raises(DatabaseError) as caught:
        client(statement)
    return caught.value.errno


def blocked_in_the_middle(connect, table):
    """A session whose open transaction has just been given up for another one."""
    sleeper, worker = connect(), connect()
    sleeper(f"CREATE OR REPLACE TABLE {table} (V INT)")
    sleeper(f"INSERT INTO {table} VALUES (1)")
    sleeper("BEGIN")
    sleeper(f"UPDATE {table} SET V = 2")
    worker(f"UPDATE {table} SET V = V + 10")
    return sleeper, worker


@pytest.mark.parametrize("failing", ["INSERT INTO FAILS VALUES ('x')", "SELECT 'x'::INT", "SELECT * FROM NOPE"])
def test_a_failed_statement_leaves_the_transaction_as_it_was(connect, failing):
    one, other = connect(), connect()
    one("CREATE OR REPLACE TABLE FAILS (A INT)")
    one("BEGIN")
    one("INSERT INTO FAILS VALUES (5)")
    with pytest.raises(ProgrammingError):
        one(failing)
    assert one("SELECT A FROM FAILS") == [(5,)]
    one("INSERT INTO FAILS VALUES (6)")
    assert other("SELECT A FROM FAILS") == []
    one("COMMIT")
    assert other("SELECT A FROM FAILS ORDER BY A") == [(5,), (6,)]


def test_a_rollback_after_a_failed_statement_undoes_everything(connect):
    one = connect()
    one("CREATE TABLE UNDONE (A INT)")
    one("BEGIN")
    one("INSERT INTO UNDONE VALUES (5)")
    assert code(one, "INSERT INTO UNDONE VALUES ('x')") == 100038
    one("ROLLBACK")
    assert one("SELECT * FROM UNDONE") == []


def test_a_statement_that_fails_half_way_leaves_nothing_in_the_transaction(connect):
    one = connect()
    one("CREATE TABLE HALF_WAY (A INT, B INT NOT NULL)")
    one("BEGIN")
    one("INSERT INTO HALF_WAY VALUES (1, 1)")
    statement = (
        "MERGE INTO HALF_WAY t USING (SELECT 1 AS A UNION ALL SELECT 2) s ON t.A = s.A "
        "WHEN NOT MATCHED THEN INSERT (A, B) VALUES (s.A, 7) WHEN MATCHED THEN UPDATE SET B = NULL"
    )
    assert code(one, statement) == 100072
    one("COMMIT")
    assert one("SELECT A, B FROM HALF_WAY") == [(1, 1)]


def test_statements_made_again_mean_the_schema_they_were_sent_in(connect):
    one = connect()
    home = one.value("SELECT CURRENT_SCHEMA()")
    one("CREATE SCHEMA IF NOT EXISTS ELSEWHERE")
    one(f"USE SCHEMA {home}")
    one("CREATE TABLE MOVED (A INT)")
    one("BEGIN")
    one("INSERT INTO MOVED VALUES (1)")
    one("USE SCHEMA ELSEWHERE")
    assert code(one, "SELECT 'x'::INT") == 100038
    one("COMMIT")
    assert one.value("SELECT CURRENT_SCHEMA()") == "ELSEWHERE"
    assert one(f"SELECT A FROM {home}.MOVED") == [(1,)]


def test_after_an_idle_transaction_is_given_up_nothing_runs_until_it_is_ended(connect, soon_idle):
    sleeper, worker = blocked_in_the_middle(connect, "GIVEN_UP")
    worker("CREATE OR REPLACE TABLE BESIDE (A INT)")
    assert code(sleeper, "INSERT INTO BESIDE VALUES (1)") == 625
    assert code(sleeper, "SELECT 1") == 625
    assert code(sleeper, "COMMIT") == 625
    assert worker("SELECT * FROM BESIDE") == []
    assert sleeper("SELECT V FROM GIVEN_UP") == [(11,)]


def test_a_rollback_after_the_loss_holds_for_a_session_without_autocommit(connect, soon_idle):
    sleeper, worker = connect(autocommit=False), connect()
    worker("CREATE TABLE MANUAL (V INT)")
    worker("INSERT INTO MANUAL VALUES (1)")
    sleeper("UPDATE MANUAL SET V = 2000")
    worker("UPDATE MANUAL SET V = V + 10")
    assert code(sleeper, "UPDATE MANUAL SET V = 3000") == 625
    sleeper("ROLLBACK")
    assert worker("SELECT V FROM MANUAL") == [(11,)]


def test_a_new_transaction_after_the_loss_is_a_whole_one(connect, soon_idle):
    sleeper, worker = blocked_in_the_middle(connect, "ANEW")
    sleeper("BEGIN")
    sleeper("UPDATE ANEW SET V = V + 100")
    sleeper("COMMIT")
    worker("UPDATE ANEW SET V = V + 1000")
    assert worker("SELECT V FROM ANEW") == [(1111,)]


def test_a_transaction_at_work_is_not_idle(connect, soon_idle):
    worker, waiter = connect(), connect()
    worker("CREATE TABLE AT_WORK (V INT)")
    worker("INSERT INTO AT_WORK VALUES (0)")
    worker("BEGIN")
    worker("UPDATE AT_WORK SET V = V + 1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter, "UPDATE AT_WORK SET V = V + 10")
        until = time.monotonic() + 1
        while time.monotonic() < until:
            worker("UPDATE AT_WORK SET V = V + 0")
        worker("COMMIT")
        waiting.result(timeout=20)
    assert worker("SELECT V FROM AT_WORK") == [(11,)]


def test_changes_succeed_next_to_inserts_of_other_sessions(connect):
    setup = connect()
    setup("CREATE TABLE SHARED (A INT, N INT)")
    setup("INSERT INTO SHARED VALUES (-1, 0)")

    def insert(client, first):
        for number in range(first, first + 6):
            client(f"INSERT INTO SHARED VALUES ({number}, 0)")

    def change(client):
        for _ in range(4):
            assert client("UPDATE SHARED SET N = N + 1 WHERE A = -1") == [(1, 0)]
            client("MERGE INTO SHARED t USING (SELECT -1 AS A) s ON t.A = s.A WHEN MATCHED THEN UPDATE SET N = t.N + 1")

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(insert, connect(), 100 * at) for at in range(3)] + [pool.submit(change, connect())]
        for job in jobs:
            job.result(timeout=60)
    assert setup("SELECT N FROM SHARED WHERE A = -1") == [(8,)]
    assert setup("SELECT COUNT(*) FROM SHARED") == [(19,)]


def test_a_transaction_commits_next_to_an_insert_of_another_session(connect):
    one, other = connect(), connect()
    one("CREATE TABLE BESIDES (A INT)")
    one("INSERT INTO BESIDES VALUES (1)")
    one("BEGIN")
    one("UPDATE BESIDES SET A = A + 10 WHERE A = 1")
    one("INSERT INTO BESIDES VALUES (2)")
    other("INSERT INTO BESIDES VALUES (3)")
    one("COMMIT")
    assert other("SELECT A FROM BESIDES ORDER BY A") == [(2,), (3,), (11,)]


def test_a_cancel_reaches_a_statement_that_waits_for_a_lock_and_no_later_one(connect):
    holder, waiter = connect(), connect()
    holder("CREATE TABLE WAITED_FOR (A INT)")
    holder("INSERT INTO WAITED_FOR VALUES (1)")
    holder("BEGIN")
    holder("UPDATE WAITED_FOR SET A = 2")
    started = time.monotonic()
    with pytest.raises(ProgrammingError) as caught, waiter.connection.cursor() as cursor:
        cursor.execute("UPDATE WAITED_FOR SET A = 3", timeout=1)
    assert caught.value.errno == 604
    assert time.monotonic() - started < 8
    assert waiter("SELECT A FROM WAITED_FOR") == [(1,)]
    holder("COMMIT")
    waiter("UPDATE WAITED_FOR SET A = A + 1")
    assert waiter("SELECT A FROM WAITED_FOR") == [(3,)]


def test_many_waiting_statements_do_not_keep_the_holder_from_committing(connect):
    holder, crowd = connect(), connect()
    holder("CREATE TABLE CROWDED (N INT)")
    holder("INSERT INTO CROWDED VALUES (0)")
    holder("BEGIN")
    holder("UPDATE CROWDED SET N = 1000")
    cursor = crowd.connection.cursor()
    cursor.execute_async("UPDATE CROWDED SET N = N + 1")
    for _ in range(140):
        cursor.execute_async("SELECT 1")
    started = time.monotonic()
    assert holder("SELECT N FROM CROWDED") == [(1000,)]
    holder("COMMIT")
    assert time.monotonic() - started < 8
    cursor.get_results_from_sfqid(cursor.sfqid)
    assert cursor.fetchall() == [(1,)]
    assert holder("SELECT N FROM CROWDED") == [(1001,)]
