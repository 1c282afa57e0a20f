"""What Snowflake refuses or cuts: long texts, fine fractions, long retentions, roles and warehouses that there are not."""

from __future__ import annotations

from datetime import date, datetime, time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from snowflake.connector.errors import DatabaseError, ProgrammingError

FINE = "2024-01-01 00:00:00.123956"
CUT = datetime.fromisoformat("2024-01-01 00:00:00.123")


def code(sql, statement, params=None):
    with pytest.raises(ProgrammingError) as caught:
        sql(statement, params)
    return caught.value.errno


@pytest.fixture(params=["TABLE", "TEMPORARY TABLE"])
def narrow(connect, request):
    """A session with a table of three columns, the first of which holds three letters."""
    sql = connect()
    sql(f"CREATE OR REPLACE {request.param} NARROW (T VARCHAR(3), N INT, TS TIMESTAMP_NTZ(3))")
    yield sql
    sql("DROP TABLE NARROW")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO NARROW VALUES ('ok', 1, NULL), ('long', 2, NULL)",
        "INSERT INTO NARROW (N, T) SELECT 1, 'long'",
        "INSERT INTO NARROW (T) WITH L AS (SELECT 'long' AS T) SELECT T FROM L",
        "UPDATE NARROW SET T = T || 'ng'",
        "MERGE INTO NARROW t USING (SELECT 'ok' AS T) s ON t.T = s.T WHEN MATCHED THEN UPDATE SET T = 'long'",
        "MERGE INTO NARROW t USING (SELECT 'x' AS T) s ON t.T = s.T WHEN NOT MATCHED THEN INSERT (T) VALUES ('long')",
        "INSERT OVERWRITE INTO NARROW SELECT 'long', 1, NULL",
        "SELECT 'long'::VARCHAR(3)",
    ],
)
def test_a_text_longer_than_its_column_is_refused_and_nothing_changes(narrow, statement):
    narrow("INSERT INTO NARROW VALUES ('ok', 0, NULL)")
    with pytest.raises(ProgrammingError, match=r"String '.+' is too long and would be truncated") as caught:
        narrow(statement)
    assert caught.value.errno == 100078
    assert narrow("SELECT T, N FROM NARROW") == [("ok", 0)]


def test_a_text_that_fits_is_stored_whole(narrow):
    narrow("INSERT INTO NARROW VALUES ('äöü', 1, NULL), (NULL, 2, NULL), (345, 3, NULL)")
    narrow("INSERT INTO NARROW (N) VALUES (4)")
    assert sorted(narrow("SELECT N, T FROM NARROW")) == [(1, "äöü"), (2, None), (3, "345"), (4, None)]


@pytest.mark.parametrize(
    "values", ["SELECT 'a', 1", "SELECT 'a', 1, NULL, 2", "VALUES ('a', 1)", "VALUES ('a', 1, NULL, 2)"]
)
def test_another_number_of_values_is_refused_as_ever(narrow, values):
    assert code(narrow, f"INSERT INTO NARROW {values}") == 2020


def test_bound_rows_keep_to_the_limits(sandbox, connect):
    sql = connect(paramstyle="qmark")
    sql("CREATE OR REPLACE TABLE BOUND (T VARCHAR(3), TS TIMESTAMP_NTZ(0))")
    with sql.connection.cursor() as cursor:
        cursor.executemany("INSERT INTO BOUND VALUES (?, ?)", [("a", FINE), ("b", FINE)])
        assert sql("SELECT DISTINCT TS FROM BOUND") == [(CUT.replace(microsecond=0),)]
        with pytest.raises(ProgrammingError, match="too long"):
            cursor.executemany("INSERT INTO BOUND VALUES (?, ?)", [("a", None), ("long", None)])
    assert code(sql, "INSERT INTO BOUND (T) VALUES (?)", ("long",)) == 100078


def test_finer_fractions_are_cut_off(narrow):
    narrow(f"INSERT INTO NARROW VALUES ('a', 1, '{FINE}')")
    narrow(f"INSERT INTO NARROW SELECT 'b', 2, '{FINE}'::TIMESTAMP_NTZ")
    narrow(f"UPDATE NARROW SET TS = '{FINE}' WHERE N = 2")
    assert narrow(f"SELECT DISTINCT TS, '{FINE}'::TIMESTAMP_NTZ(3) FROM NARROW") == [(CUT, CUT)]
    kinds = ["VARCHAR(3)", "NUMBER(38,0)", "TIMESTAMP_NTZ(3)"]
    assert [row[1] for row in narrow("DESCRIBE TABLE NARROW")] == kinds


def test_limits_follow_their_columns(sql):
    sql("CREATE TABLE FOLLOWED (C CHAR, H TIME(0), Z TIMESTAMP_TZ(3))")
    sql("ALTER TABLE FOLLOWED RENAME COLUMN C TO D")
    sql("ALTER TABLE FOLLOWED ADD COLUMN E VARCHAR(2)")
    sql("CREATE TABLE COPIED LIKE FOLLOWED")
    sql("ALTER TABLE FOLLOWED RENAME TO RENAMED")
    for table in ("RENAMED", "COPIED"):
        assert code(sql, f"INSERT INTO {table} (D) VALUES ('ab')") == 100078
        assert code(sql, f"INSERT INTO {table} (E) VALUES ('abc')") == 100078
        sql(f"INSERT INTO {table} VALUES ('a', '10:11:12.9', '{FINE}', 'ab')")
        assert sql(f"SELECT H, Z::TIMESTAMP_NTZ FROM {table}") == [(time(10, 11, 12), CUT)]
    sql("ALTER TABLE RENAMED ALTER COLUMN E SET DATA TYPE VARCHAR(3)")
    sql("INSERT INTO RENAMED (E) VALUES ('abc')")
    assert code(sql, "INSERT INTO RENAMED (E) VALUES ('abcd')") == 100078


def test_a_query_with_declared_columns_keeps_to_the_limits(sql):
    assert code(sql, "CREATE TABLE QUERIED (T VARCHAR(3)) AS SELECT 'long'") == 100078
    sql(f"CREATE TABLE QUERIED (N INT, TS TIMESTAMP_NTZ(3)) AS SELECT 1, '{FINE}'::TIMESTAMP_NTZ")
    assert sql("SELECT N, TS FROM QUERIED") == [(1, CUT)]


def test_loads_keep_to_the_limits(connect, tmp_path):
    sql = connect()
    pq.write_table(pa.table({"T": ["a", "long"], "TS": [CUT, CUT]}), tmp_path / "long.parquet")
    pq.write_table(pa.table({"T": ["a"], "TS": [datetime.fromisoformat(FINE)]}), tmp_path / "fine.parquet")
    sql("CREATE OR REPLACE TABLE LOADED (T VARCHAR(3), TS TIMESTAMP_NTZ(3))")
    sql("CREATE STAGE FOLDERS")
    for name in ("long", "fine"):
        sql(f"CREATE STAGE {name}")
        sql(f"PUT 'file://{tmp_path}/{name}.parquet' '@FOLDERS/{name}/' AUTO_COMPRESS=FALSE")
        sql(f"PUT 'file://{tmp_path}/{name}.parquet' @{name} AUTO_COMPRESS=FALSE")
    copy = "FILE_FORMAT=(TYPE=PARQUET) MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE"
    assert code(sql, f"COPY INTO LOADED FROM '@FOLDERS/long/' {copy}") == 100078
    assert code(sql, f"COPY INTO LOADED FROM @long {copy}") == 100078
    assert sql("SELECT * FROM LOADED") == []
    sql(f"COPY INTO LOADED FROM '@FOLDERS/fine/' {copy}")
    sql(f"COPY INTO LOADED FROM @fine {copy}")
    assert sql("SELECT * FROM LOADED") == [("a", CUT), ("a", CUT)]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("CREATE TABLE R (A INT) DATA_RETENTION_TIME_IN_DAYS = 91", 1008),
        ("CREATE TRANSIENT TABLE R (A INT) DATA_RETENTION_TIME_IN_DAYS = 2", 1008),
        ("CREATE TEMPORARY TABLE R (A INT) DATA_RETENTION_TIME_IN_DAYS = 2", 1008),
        ("ALTER TABLE KEPT SET DATA_RETENTION_TIME_IN_DAYS = 91", 1008),
        ("ALTER TABLE PASSING SET DATA_RETENTION_TIME_IN_DAYS = 2", 1008),
        ("USE ROLE NO_SUCH_ROLE", 2043),
        ("USE WAREHOUSE NO_SUCH_WAREHOUSE", 2043),
        ("DROP ROLE NO_SUCH_ROLE", 2003),
        ("CREATE ROLE SYSADMIN", 2002),
        (
            "SELECT * FROM KEPT CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => DATEADD(second, -1, CURRENT_TIMESTAMP()))",
            1015,
        ),
    ],
)
def test_what_snowflake_refuses_is_refused(connect, statement, expected):
    sql = connect()
    sql("CREATE TABLE IF NOT EXISTS KEPT (A INT) DATA_RETENTION_TIME_IN_DAYS = 90 CHANGE_TRACKING = TRUE")
    sql("CREATE TRANSIENT TABLE IF NOT EXISTS PASSING (A INT) DATA_RETENTION_TIME_IN_DAYS = 1")

    assert code(sql, statement) == expected
    assert [row[4] for row in sql("SHOW TABLES LIKE 'PASSING'")] == ["TRANSIENT"]


def test_roles_and_warehouses_are_used_by_name(connect):
    sql = connect()
    for statement in (
        "CREATE ROLE IF NOT EXISTS READER",
        "CREATE WAREHOUSE IF NOT EXISTS SMALL WITH WAREHOUSE_SIZE = XSMALL",
    ):
        sql(statement)
    used = connect(role="READER", warehouse="SMALL")
    assert used("SELECT CURRENT_ROLE(), CURRENT_WAREHOUSE()") == [("READER", "SMALL")]
    used("USE WAREHOUSE COMPUTE_WH")
    assert [row[0] for row in used("SHOW WAREHOUSES LIKE 'COMP%'")] == ["COMPUTE_WH"]
    assert connect(warehouse="NO_SUCH_WAREHOUSE")("SELECT CURRENT_WAREHOUSE()") == [(None,)]
    with pytest.raises(DatabaseError, match="NO_SUCH_ROLE") as caught:
        connect(role="NO_SUCH_ROLE")
    assert caught.value.errno == 390189


def test_times_without_brackets_are_those_with_them(sql):
    ((today, now, clock),) = sql("SELECT CURRENT_DATE, CURRENT_TIMESTAMP, CURRENT_TIME")
    assert (isinstance(today, date), isinstance(now, datetime), isinstance(clock, time)) == (True, True, True)
    assert sql("SELECT CURRENT_DATE = CURRENT_DATE(), CURRENT_TIMESTAMP() >= CURRENT_DATE") == [(True, True)]


def test_an_update_tells_how_many_rows_met_several(connect):
    sql = connect()
    sql("CREATE OR REPLACE TABLE MET (A INT, B INT)")
    sql("INSERT INTO MET VALUES (1, 0), (2, 0), (3, 0)")
    update = "UPDATE MET SET B = s.B FROM (SELECT 1 AS A, 1 AS B UNION ALL SELECT 1, 2 UNION ALL SELECT 2, 3) s WHERE MET.A = s.A"
    with sql.connection.cursor() as cursor:
        cursor.execute(update)
        named = ["number of rows updated", "number of multi-joined rows updated"]
        assert [column.name for column in cursor.description] == named
        assert cursor.fetchall() == [(2, 1)]
    sql("ALTER SESSION SET ERROR_ON_NONDETERMINISTIC_UPDATE = TRUE")
    assert code(sql, update) == 100090
