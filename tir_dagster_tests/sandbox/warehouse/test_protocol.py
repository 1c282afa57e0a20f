"""Snowflake's protocol as the real connector and dagster-snowflake's resource speak it."""

from __future__ import annotations

import gzip
import json
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import snowflake.connector
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from dagster_snowflake import SnowflakeResource
from snowflake.connector.errors import DatabaseError, ProgrammingError
from snowflake.connector.vendored.requests.exceptions import ChunkedEncodingError


def post(url, path, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(f"{url}{path}", data=data, headers=headers, timeout=20)


def test_a_wrong_password_is_refused(sandbox):
    with pytest.raises(DatabaseError, match="Incorrect username or password"):
        sandbox.snowflake(password="wrong")


def test_a_key_pair_signs_in_once_its_public_key_is_known(sandbox, sql):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    body = "".join(public.decode().splitlines()[1:-1])
    env = sandbox.env
    settings = {
        "account": env["SNOWFLAKE_ACCOUNT"],
        "user": env["SNOWFLAKE_USER"],
        "host": env["SNOWFLAKE_HOST"],
        "port": int(env["SNOWFLAKE_PORT"]),
        "protocol": "http",
        "login_timeout": 10,
        "private_key": private,
    }
    with pytest.raises(DatabaseError):
        snowflake.connector.connect(**settings)
    sql(f"ALTER USER {env['SNOWFLAKE_USER']} SET RSA_PUBLIC_KEY = '{body}'")
    with snowflake.connector.connect(**settings) as connection:
        assert connection.cursor().execute("SELECT CURRENT_USER()").fetchone() == (env["SNOWFLAKE_USER"],)


def test_dagster_snowflakes_resource_connects_by_configuration_alone(sandbox):
    env = sandbox.env
    resource = SnowflakeResource(
        account=env["SNOWFLAKE_ACCOUNT"],
        user=env["SNOWFLAKE_USER"],
        password=env["SNOWFLAKE_PASSWORD"],
        additional_snowflake_connection_args={
            "host": env["SNOWFLAKE_HOST"],
            "port": int(env["SNOWFLAKE_PORT"]),
            "protocol": env["SNOWFLAKE_PROTOCOL"],
            "network_timeout": 60,
        },
    )
    with resource.get_connection() as connection:
        assert connection.cursor().execute("SELECT 1 + 1").fetchone() == (2,)


def test_a_large_result_comes_in_many_batches_that_hold_every_row_once(sql):
    sql("CREATE TABLE LARGE AS SELECT RANGE AS A, 'row ' || RANGE AS B FROM RANGE(200000)")
    with sql.connection.cursor() as cursor:
        cursor.execute("SELECT A, B FROM LARGE")
        batches = cursor.get_result_batches()
        assert len(batches) > 2
        assert sum(batch.rowcount for batch in batches) == 200_000
        numbers = [number for batch in batches for number in batch.to_arrow()["A"].to_pylist()]
    assert sorted(numbers) == list(range(200_000))


def test_every_common_type_comes_back_as_the_connector_promises(sql):
    sql(
        "CREATE TABLE TYPES (N NUMBER(38,0), P NUMBER(12,2), F FLOAT, B BOOLEAN, S VARCHAR, D DATE, "
        "T TIME, NTZ TIMESTAMP_NTZ, TZ TIMESTAMP_TZ, X BINARY, J VARIANT)"
    )
    sql(
        "INSERT INTO TYPES SELECT 9007199254740993, -1.25, 0.1, TRUE, 'żółć 🙂', '1969-12-31'::DATE, '23:59:59.999999'::TIME, "
        "'1969-12-31 23:59:59.5'::TIMESTAMP_NTZ, '2026-03-29 02:30:00+01:00'::TIMESTAMP_TZ, TO_BINARY('00FF', 'HEX'), PARSE_JSON('{\"a\": [1]}')"
    )
    sql("INSERT INTO TYPES (N) VALUES (NULL)")
    full, empty = sorted(sql("SELECT * FROM TYPES"), key=lambda row: row[0] is None)
    assert str(full[0]) == "9007199254740993"
    assert str(full[1]) == "-1.25"
    assert full[2:5] == (0.1, True, "żółć 🙂")
    assert full[5].isoformat() == "1969-12-31"
    assert full[6].isoformat() == "23:59:59.999999"
    assert full[7].isoformat() == "1969-12-31T23:59:59.500000"
    assert full[8].astimezone().timestamp() == 1774747800.0
    assert json.loads(full[10]) == {"a": [1]}
    assert empty == (None,) * 11


def test_sums_of_numbers_are_exact(sql):
    sql("CREATE TABLE SUMS (A NUMBER(38,0), P NUMBER(12,2))")
    sql("INSERT INTO SUMS VALUES (9007199254740993, 0.10), (9007199254740993, 0.20)")
    ((total, price),) = sql("SELECT SUM(A), SUM(P) FROM SUMS")
    assert (str(total), str(price)) == ("18014398509481986", "0.30")


def test_a_column_that_needs_a_cast_keeps_its_name_in_arrow(sql):
    with sql.connection.cursor() as cursor:
        assert cursor.execute("SELECT 1::TINYINT AS SMALL, 'x' AS T").fetch_arrow_all().column_names == ["SMALL", "T"]
        table = cursor.execute("SELECT SUM(A) AS TOTAL, 'x' AS T FROM (SELECT 1 AS A)").fetch_arrow_all()
    assert table.to_pydict() == {"TOTAL": [1], "T": ["x"]}


def test_describe_knows_the_declared_types(sql):
    sql(
        "CREATE TABLE DESCRIBED (A NUMBER(38,0) NOT NULL, P NUMBER(12,2), S VARCHAR(20), D DATE, TS TIMESTAMP_NTZ, TZ TIMESTAMP_TZ)"
    )
    described = [(row[0], row[1], row[3]) for row in sql("DESCRIBE TABLE DESCRIBED")]
    assert described == [
        ("A", "NUMBER(38,0)", "N"),
        ("P", "NUMBER(12,2)", "Y"),
        ("S", "VARCHAR(20)", "Y"),
        ("D", "DATE", "Y"),
        ("TS", "TIMESTAMP_NTZ(9)", "Y"),
        ("TZ", "TIMESTAMP_TZ(9)", "Y"),
    ]


def test_a_description_follows_the_table(sql):
    def described() -> list[tuple]:
        return [(row[0], row[1]) for row in sql("DESCRIBE TABLE FOLLOWED")]

    sql("CREATE TABLE FOLLOWED (A INT)")
    assert described() == described() == [("A", "NUMBER(38,0)")]
    sql("ALTER TABLE FOLLOWED ADD COLUMN B VARCHAR(7)")
    assert described() == [("A", "NUMBER(38,0)"), ("B", "VARCHAR(7)")]
    sql("ALTER TABLE FOLLOWED RENAME COLUMN B TO C")
    assert [name for name, _ in described()] == ["A", "C"]
    sql("ALTER TABLE FOLLOWED DROP COLUMN A")
    assert [name for name, _ in described()] == ["C"]
    sql("CREATE OR REPLACE TABLE FOLLOWED (D DATE)")
    assert described() == [("D", "DATE")]
    sql("CREATE TABLE FOLLOWER (E INT)")
    sql("ALTER TABLE FOLLOWED SWAP WITH FOLLOWER")
    assert described() == [("E", "NUMBER(38,0)")]
    sql("DROP TABLE FOLLOWED")
    with pytest.raises(snowflake.connector.errors.ProgrammingError, match="FOLLOWED"):
        described()
    sql("CREATE VIEW FOLLOWED AS SELECT D FROM FOLLOWER")
    assert [name for name, _ in described()] == ["D"]


def test_primary_keys_are_shown_and_not_enforced(sql):
    sql("CREATE TABLE KEYED (A INT, B INT, CONSTRAINT PK PRIMARY KEY (A, B))")
    sql("INSERT INTO KEYED VALUES (1, 1), (1, 1)")
    assert [row[4] for row in sql("SHOW PRIMARY KEYS IN TABLE KEYED")] == ["A", "B"]


def test_show_tables_tells_rows_and_change_tracking(sql):
    sql("CREATE TABLE SHOWN (A INT) CHANGE_TRACKING = TRUE")
    sql("INSERT INTO SHOWN VALUES (1), (2)")
    with sql.connection.cursor(snowflake.connector.DictCursor) as cursor:
        (row,) = cursor.execute("SHOW TABLES LIKE 'shown'").fetchall()
    assert (row["name"], row["rows"], row["change_tracking"]) == ("SHOWN", 2, "ON")


def test_merge_updates_deletes_and_inserts_by_expressions_over_both_sides(sql):
    sql("CREATE TABLE MERGED (A INT, B INT)")
    sql("INSERT INTO MERGED VALUES (1, 10), (2, 20), (3, NULL)")
    counts = sql(
        "MERGE INTO MERGED t USING (SELECT 1 AS A, 5 AS B UNION ALL SELECT 2, NULL UNION ALL SELECT 4, 40) s ON t.A = s.A "
        "WHEN MATCHED AND s.B IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET B = t.B + s.B "
        "WHEN NOT MATCHED THEN INSERT (A, B) VALUES (s.A, s.B * 2)"
    )
    assert counts == [(1, 1, 1)]
    assert sorted(sql("SELECT A, B FROM MERGED"), key=str) == [(1, 15), (3, None), (4, 80)]


def test_a_merge_that_would_update_a_row_twice_is_refused_and_changes_nothing(sql):
    sql("CREATE TABLE AMBIGUOUS (A INT, B INT)")
    sql("INSERT INTO AMBIGUOUS VALUES (1, 0)")
    with pytest.raises(ProgrammingError) as caught:
        sql(
            "MERGE INTO AMBIGUOUS t USING (SELECT 1 AS A, 1 AS B UNION ALL SELECT 1, 2) s ON t.A = s.A WHEN MATCHED THEN UPDATE SET B = s.B"
        )
    assert caught.value.errno == 100090
    assert sql("SELECT * FROM AMBIGUOUS") == [(1, 0)]


def test_copy_into_loads_staged_files_once(sql, tmp_path):
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None]}), tmp_path / "rows.parquet")
    sql("CREATE TABLE LOADED (A INT, B VARCHAR)")
    sql("CREATE STAGE LOADS")
    sql(f"PUT file://{tmp_path}/rows.parquet @LOADS AUTO_COMPRESS=FALSE")
    copy = "COPY INTO LOADED FROM @LOADS FILE_FORMAT=(TYPE=PARQUET) MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE"
    sql(copy)
    sql(copy)
    assert sql("SELECT * FROM LOADED ORDER BY A") == [(1, "x"), (2, None)]
    sql("DROP STAGE LOADS")


def test_mistakes_have_snowflakes_codes_and_are_not_retried(sql):
    sql("CREATE TABLE MISTAKES (A INT NOT NULL)")
    expected = {
        "SELECT * FROM MISSING": (2003, "42S02"),
        "SELECT MISSING FROM MISTAKES": (904, "42000"),
        "SELEC 1": (1003, "42000"),
        "CREATE TABLE MISTAKES (A INT)": (2002, "42710"),
        "INSERT INTO MISTAKES VALUES (NULL)": (100072, "22000"),
        "SELECT 'x'::NUMBER": (100038, "22018"),
        "CREATE SEQUENCE S": (2, "0A000"),
        "SELECT 1; SELECT 2": (8, "0A000"),
        "DROP TABLE MISSING": (2003, "42S02"),
        "USE SCHEMA MISSING": (2043, "02000"),
    }
    started = time.monotonic()
    seen = {}
    for statement in expected:
        with pytest.raises(DatabaseError) as caught:
            sql(statement)
        seen[statement] = (caught.value.errno, caught.value.sqlstate)
    assert seen == expected
    assert time.monotonic() - started < 20, "the connector retried what will never work"


def test_qualified_names_need_no_current_database(sandbox, sql, tmp_path):
    home = f"{sql.value('SELECT CURRENT_DATABASE()')}.{sql.value('SELECT CURRENT_SCHEMA()')}"
    pq.write_table(pa.table({"A": [1]}), tmp_path / "one.parquet")
    with sandbox.snowflake() as connection:
        cursor = connection.cursor()
        cursor.execute(f"CREATE TABLE {home}.QUALIFIED (A INT)")
        cursor.execute(f"CREATE STAGE {home}.QUALIFIED_FILES")
        cursor.execute(f"PUT file://{tmp_path}/one.parquet @{home}.QUALIFIED_FILES AUTO_COMPRESS=FALSE")
        cursor.execute(
            f"COPY INTO {home}.QUALIFIED FROM @{home}.QUALIFIED_FILES FILE_FORMAT=(TYPE=PARQUET) "
            "MATCH_BY_COLUMN_NAME=CASE_INSENSITIVE"
        )
        assert cursor.execute(f"DESCRIBE TABLE {home}.QUALIFIED").fetchall()[0][:2] == ("A", "NUMBER(38,0)")
        assert cursor.execute(f"SELECT * FROM {home}.QUALIFIED").fetchall() == [(1,)]
        assert cursor.execute("SELECT CURRENT_DATABASE()").fetchone() == (None,)


def test_a_failed_statement_leaves_the_session_usable(sql):
    with pytest.raises(ProgrammingError):
        sql("SELECT * FROM MISSING")
    assert sql("SELECT 1") == [(1,)]


def test_writers_of_one_table_wait_for_each_other_and_none_is_lost(connect):
    setup = connect()
    setup("CREATE TABLE COUNTER (N INT)")
    setup("INSERT INTO COUNTER VALUES (0)")
    clients = [connect() for _ in range(4)]

    def count(client):
        for _ in range(5):
            client("UPDATE COUNTER SET N = N + 1")

    threads = [threading.Thread(target=count, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert setup("SELECT N FROM COUNTER") == [(20,)]


def test_an_idle_transaction_that_blocks_another_one_is_rolled_back(connect, soon_idle):
    sleeper, worker = connect(), connect()
    sleeper("CREATE TABLE BLOCKED (A INT)")
    sleeper("INSERT INTO BLOCKED VALUES (1)")
    sleeper("BEGIN")
    sleeper("UPDATE BLOCKED SET A = 2")
    worker("UPDATE BLOCKED SET A = A + 10")
    assert worker("SELECT A FROM BLOCKED") == [(11,)]
    with pytest.raises(DatabaseError):
        sleeper("COMMIT")


def test_a_session_that_ends_rolls_back_its_transaction(connect):
    leaver, other = connect(), connect()
    leaver("CREATE TABLE LEFT_OPEN (A INT)")
    leaver("BEGIN")
    leaver("INSERT INTO LEFT_OPEN VALUES (1)")
    leaver.connection.close()
    assert other("SELECT * FROM LEFT_OPEN") == []


def test_temporary_tables_go_with_their_session(connect):
    owner, other = connect(), connect()
    owner("CREATE TEMPORARY TABLE PASSING (A INT)")
    owner("INSERT INTO PASSING VALUES (1)")
    assert owner("SELECT * FROM PASSING") == [(1,)]
    owner.connection.close()
    with pytest.raises(ProgrammingError):
        other("SELECT * FROM PASSING")


def test_an_asynchronous_query_is_found_by_its_id(sql):
    with sql.connection.cursor() as cursor:
        cursor.execute_async("SELECT 40 + 2")
        query_id = cursor.sfqid
        while sql.connection.is_still_running(sql.connection.get_query_status(query_id)):
            time.sleep(0.05)
        cursor.get_results_from_sfqid(query_id)
        assert cursor.fetchall() == [(42,)]


def test_a_repeated_request_runs_once(sandbox, url, sql):
    sql("CREATE TABLE ONCE (A INT)")
    token = sql.connection.rest.token
    body = {
        "sqlText": f"INSERT INTO {sql.value('SELECT CURRENT_DATABASE()')}.{sql.value('SELECT CURRENT_SCHEMA()')}.ONCE VALUES (1)"
    }
    for _ in range(3):
        answer = post(url, "/queries/v1/query-request?requestId=same", body, Authorization=f'Snowflake Token="{token}"')
        assert answer.json()["success"]
    assert sql("SELECT COUNT(*) FROM ONCE") == [(1,)]


def test_what_ran_is_on_record_with_role_warehouse_tag_and_rows(url, sql):
    requests.delete(f"{url}/sandbox/queries", timeout=20)
    sql("ALTER SESSION SET QUERY_TAG = 'nightly'")
    for statement in (
        "CREATE OR REPLACE WAREHOUSE LOADING",
        "USE WAREHOUSE LOADING",
        "CREATE OR REPLACE ROLE LOADER",
        "USE ROLE LOADER",
    ):
        sql(statement)
    sql("SELECT 1 AS MARK")
    (entry,) = [
        row for row in requests.get(f"{url}/sandbox/queries", timeout=20).json()["queries"] if "MARK" in row["sql"]
    ]
    assert (entry["query_tag"], entry["warehouse"], entry["role"]) == ("nightly", "LOADING", "LOADER")
    assert entry["rows"] == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (b"not json", {}),
        (b"[1, 2]", {}),
        (b'{"data": null}', {}),
        (b"not gzip", {"Content-Encoding": "gzip"}),
        (gzip.compress(b'{"data": {}}', mtime=0)[:-4], {"Content-Encoding": "gzip"}),
    ],
)
def test_malformed_logins_are_answered_in_the_protocols_form(url, body, headers):
    answer = post(url, "/session/v1/login-request", body, **headers)
    assert answer.status_code in (200, 400)
    assert answer.json()["success"] is False
    assert answer.json()["message"]


def test_a_statement_without_a_session_is_refused(url):
    answer = post(url, "/queries/v1/query-request", {"sqlText": "SELECT 1"}, Authorization='Snowflake Token="x"')
    assert (answer.json()["success"], answer.json()["code"]) == (False, "390104")


def test_paths_of_result_chunks_do_not_escape(url):
    answer = requests.get(f"{url}/results/..%2F..%2Fidentity/0", timeout=20)
    assert answer.status_code == 404


def test_a_cut_or_failing_call_is_retried_by_the_connector_and_the_statement_runs_once(url, sql):
    sql("CREATE TABLE FAULTY (A INT)")
    for fault in (
        {"kind": "cut", "when": "before"},
        {"kind": "cut", "when": "after"},
        {"kind": "status", "status": 503},
        {"kind": "status", "status": 429, "retry_after": 1},
    ):
        requests.post(f"{url}/sandbox/faults", json={**fault, "path": "query-request"}, timeout=20).raise_for_status()
        sql("INSERT INTO FAULTY VALUES (1)")
    assert requests.get(f"{url}/sandbox/faults", timeout=20).json() == {"faults": []}
    assert sql("SELECT COUNT(*) FROM FAULTY") == [(4,)]


def test_half_an_answer_is_an_error_of_the_connector_and_the_statement_has_run(url, sql):
    sql("CREATE TABLE HALF (A INT)")
    fault = {"kind": "cut", "when": "during", "path": "query-request"}
    requests.post(f"{url}/sandbox/faults", json=fault, timeout=20).raise_for_status()
    with pytest.raises(ChunkedEncodingError):
        sql("INSERT INTO HALF VALUES (1)")
    assert sql("SELECT COUNT(*) FROM HALF") == [(1,)]
