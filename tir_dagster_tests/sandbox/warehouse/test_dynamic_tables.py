"""Dynamic tables in the embedded warehouse: created of a query, changed by their refreshes alone, with a past and changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import snowflake.connector

from tir_dagster.sandbox.warehouse.lake import Lake
from tir_dagster.sandbox.warehouse.locks import TableLocks
from tir_dagster.sandbox.warehouse.names import TableName
from tir_dagster.sandbox.warehouse.results import ResultStore
from tir_dagster.sandbox.warehouse.session import Context, Session, new_query_id

OPTIONS = "TARGET_LAG = '1 hour' WAREHOUSE = LOADING"


def refusal(sql, statement):
    with pytest.raises(snowflake.connector.Error) as caught:
        sql(statement)
    return caught.value.errno


@pytest.fixture(scope="module", autouse=True)
def source(sql):
    sql("CREATE WAREHOUSE IF NOT EXISTS LOADING WAREHOUSE_SIZE = XSMALL")
    sql("CREATE TABLE BASE (A INT, B VARCHAR)")


@pytest.fixture(autouse=True)
def filled(sql):
    sql("DELETE FROM BASE")
    sql("INSERT INTO BASE VALUES (1, 'x'), (2, NULL), (2, NULL)")


def test_a_dynamic_table_shows_its_query_as_of_the_last_refresh_and_its_token_moves_with_its_rows_only(sql):
    sql(f"CREATE OR REPLACE DYNAMIC TABLE SEEN (K, V) {OPTIONS} AS SELECT A, B FROM BASE WHERE A < 9")
    token = "SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('SEEN')"
    rows = "SELECT K, V FROM SEEN ORDER BY K, V"
    first, then = sql.value(token), sql.now()
    sql("INSERT INTO BASE VALUES (9, 'hidden')")
    sql("ALTER DYNAMIC TABLE SEEN REFRESH")
    assert sql.value(token) == first, "no row of it changed"
    sql("DELETE FROM BASE WHERE A = 2")
    sql("INSERT INTO BASE VALUES (2, NULL), (3, 'z')")
    assert sql(rows) == [(1, "x"), (2, None), (2, None)]
    sql("ALTER DYNAMIC TABLE SEEN REFRESH")
    assert sql.value(token) > first
    assert sql(rows) == [(1, "x"), (2, None), (3, "z")]
    assert sql(f"SELECT COUNT(*) FROM SEEN AT(TIMESTAMP => {then})") == [(3,)]
    changes = f"SELECT K, V, METADATA$ACTION FROM SEEN CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {then})"
    assert sorted(sql(changes)) == [(2, None, "DELETE"), (3, "z", "INSERT")]


def test_a_table_that_is_refreshed_in_full_has_no_changes(sql):
    sql(f"CREATE DYNAMIC TABLE WHOLE {OPTIONS} REFRESH_MODE = FULL AS SELECT A FROM BASE")
    since = sql.now()
    with pytest.raises(snowflake.connector.Error, match="Change tracking is not supported on dynamic table"):
        sql(f"SELECT * FROM WHOLE CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since})")
    sql("INSERT INTO BASE VALUES (4, 'w')")
    sql("ALTER DYNAMIC TABLE WHOLE REFRESH")
    assert sql("SELECT COUNT(*) FROM WHOLE") == [(4,)]


def test_nobody_else_changes_its_rows(sql):
    sql(f"CREATE OR REPLACE DYNAMIC TABLE SEEN {OPTIONS} AS SELECT A, B FROM BASE")
    for change in (
        "INSERT INTO SEEN VALUES (1, 'y')",
        "UPDATE SEEN SET A = 1",
        "DELETE FROM SEEN",
        "TRUNCATE TABLE SEEN",
    ):
        with pytest.raises(snowflake.connector.Error, match="DML operations are not allowed on dynamic table"):
            sql(change)
    assert sql("SELECT COUNT(*) FROM SEEN") == [(3,)]


def test_what_is_shown_of_dynamic_tables(sql):
    text = f"CREATE OR REPLACE DYNAMIC TABLE SEEN {OPTIONS} AS SELECT A, COUNT(*) AS N FROM BASE GROUP BY A"
    sql(text)
    columns = "TABLE_TYPE, IS_DYNAMIC, IS_INSERTABLE_INTO, ROW_COUNT, RETENTION_TIME"
    facts = f"SELECT {columns} FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = CURRENT_SCHEMA() AND TABLE_NAME = "
    assert sql(f"{facts} 'SEEN'") == [("BASE TABLE", "YES", "NO", 2, 1)]
    assert sql(f"{facts} 'BASE'")[0][1:3] == ("NO", "YES")
    sql("ALTER DYNAMIC TABLE SEEN SUSPEND")
    sql("ALTER DYNAMIC TABLE SEEN SET TARGET_LAG = '2 days'")
    with sql.connection.cursor(snowflake.connector.DictCursor) as cursor:
        (shown,) = cursor.execute("SHOW DYNAMIC TABLES LIKE 'SE%'").fetchall()
    seen = {
        name: shown[name] for name in ("target_lag", "refresh_mode", "warehouse", "text", "scheduling_state", "rows")
    }
    assert tuple(seen.values()) == ("2 days", "INCREMENTAL", "LOADING", text, "SUSPENDED", 2)
    sql("DROP DYNAMIC TABLE SEEN")
    assert sql("SHOW DYNAMIC TABLES LIKE 'SE%'") == []
    assert refusal(sql, "DROP DYNAMIC TABLE BASE") == 2003


def test_one_that_follows_another_is_refreshed_after_it_and_not_read_before(sql):
    sql(f"CREATE OR REPLACE DYNAMIC TABLE SEEN {OPTIONS} AS SELECT A, B FROM BASE")
    sql(
        "CREATE DYNAMIC TABLE BEHIND TARGET_LAG = DOWNSTREAM WAREHOUSE = LOADING INITIALIZE = ON_SCHEDULE "
        "AS SELECT COUNT(*) AS N FROM SEEN"
    )
    with pytest.raises(snowflake.connector.Error, match=r"BEHIND' is not initialized\. Please run a manual refresh"):
        sql("SELECT * FROM BEHIND")
    sql("INSERT INTO BASE VALUES (5, 'v')")
    sql("ALTER DYNAMIC TABLE BEHIND REFRESH")
    assert sql("SELECT N FROM BEHIND") == [(4,)]


def test_one_that_was_never_refreshed_goes_with_its_database(connect):
    sql = connect()
    sql("CREATE DATABASE SHORT_LIVED")
    sql(f"CREATE DYNAMIC TABLE SHORT_LIVED.PUBLIC.EMPTY {OPTIONS} INITIALIZE = ON_SCHEDULE AS SELECT 1 AS A")
    sql("DROP DATABASE SHORT_LIVED")
    assert sql("SELECT 1") == [(1,)]


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("TARGET_LAG = '1 hour' WAREHOUSE = NO_SUCH_WAREHOUSE AS SELECT A FROM BASE", 2043),
        ("TARGET_LAG = '1 hour' AS SELECT A FROM BASE", 1420),
        ("WAREHOUSE = LOADING AS SELECT A FROM BASE", 1420),
        ("TARGET_LAG = '5 seconds' WAREHOUSE = LOADING AS SELECT A FROM BASE", 1420),
        (f"{OPTIONS} REFRESH_MODE = INCREMENTAL AS SELECT A FROM BASE WHERE A IN (SELECT A FROM BASE)", 2),
        (f"{OPTIONS} AS SELECT A FROM NO_SUCH_TABLE", 2003),
    ],
)
def test_what_cannot_be_one_is_refused(sql, statement, code):
    assert refusal(sql, f"CREATE DYNAMIC TABLE NEVER {statement}") == code
    assert sql("SHOW TABLES LIKE 'NEVER'") == []


def test_a_target_lag_refreshes_by_itself(tmp_path):
    lake = Lake(tmp_path / "lake")
    lake.create_database("D")
    context = Context(user="U", database="D", schema="PUBLIC", warehouse="LOADING")
    session = Session(lake, TableLocks(), ResultStore(tmp_path / "results"), context)

    def run(statement):
        return session.execute(statement, new_query_id())

    run("CREATE WAREHOUSE IF NOT EXISTS LOADING")
    run("CREATE TABLE T AS SELECT 1 AS A")
    run(f"CREATE DYNAMIC TABLE DT {OPTIONS} AS SELECT A FROM T")
    run("INSERT INTO T VALUES (2)")
    name = TableName("D", "PUBLIC", "DT")
    session.refresh_due_tables()
    facts = lake.dynamic(name)
    assert facts is not None
    assert lake.row_count(lake.facts(name)) == 1, "not yet"
    lake.note_dynamic(replace(facts, is_suspended=True, refreshed_us=0))
    session.refresh_due_tables()
    assert lake.row_count(lake.facts(name)) == 1, "it is suspended"
    run("ALTER DYNAMIC TABLE DT RESUME")
    session.refresh_due_tables()
    assert lake.row_count(lake.facts(name)) == 2
    session.close()
    lake.close()
