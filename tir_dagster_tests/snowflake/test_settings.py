"""Defaults of an account that would change what our statements mean: they do harm in a plain session, and none in ours."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path

import pytest
from snowflake.connector.errors import ProgrammingError

from tir_dagster.errors import SourceError
from tir_dagster.sandbox.warehouse.parameters import PARAMETERS
from tir_dagster.snowflake import connection
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.pinned import sql_literal
from tir_dagster.snowflake.settings import SETTINGS
from tir_dagster.snowflake.slices import SliceBy, slice_filter_snowflake, slice_sql_snowflake
from tir_dagster.snowflake.versions import describe, describe_query, select

NOON = datetime.fromisoformat("2024-02-13T12:00:00")
DOCS = Path(__file__).parents[2] / "docs" / "snowflake.md"


@pytest.fixture
def account_default(run):
    """Sets session parameters for the whole account, and takes them back at the end."""
    names = []

    def set_default(name: str, value: str) -> None:
        run(f"ALTER ACCOUNT SET {name} = {value}")
        names.append(name)

    yield set_default
    for name in names:
        run(f"ALTER ACCOUNT UNSET {name}")


@pytest.fixture
def plain(sandbox):
    """Runs one statement in a session that takes the account's defaults, as any client's would."""

    def run_plainly(sql: str) -> object:
        with sandbox.snowflake(database="SRC", schema="PUBLIC") as connection, connection.cursor() as cursor:
            try:
                return cursor.execute(sql).fetchall()
            except ProgrammingError as error:
                return error.errno

    return run_plainly


@pytest.mark.parametrize(
    ("name", "value", "sql", "expected"),
    [
        ("DATE_INPUT_FORMAT", "'DD/MM/YYYY'", "SELECT '2024-02-13'::DATE", date(2024, 2, 13)),
        ("TIME_INPUT_FORMAT", "'HH12:MI AM'", "SELECT '13:30:00'::TIME", time(13, 30)),
        (
            *("TIMESTAMP_INPUT_FORMAT", "'MM/DD/YYYY HH24:MI:SS'"),
            *("SELECT '2024-02-13T12:00:00.000000'::TIMESTAMP_NTZ", NOON),
        ),
        ("DATE_OUTPUT_FORMAT", "'DD.MM.YYYY'", "SELECT TO_VARCHAR('2024-02-13'::DATE)", "2024-02-13"),
        ("TIME_OUTPUT_FORMAT", "'HH12.MI'", "SELECT TO_VARCHAR('13:30:00'::TIME)", "13:30:00"),
        (
            *("TIMESTAMP_TYPE_MAPPING", "TIMESTAMP_TZ"),
            *("SELECT TO_TIMESTAMP('2024-02-13 12:00:00')", NOON),
        ),
        (
            *("TIMEZONE", "'America/New_York'"),
            *("SELECT CAST('2024-02-13T01:00:00+00:00'::TIMESTAMP_LTZ AS DATE)", date(2024, 2, 13)),
        ),
        ("WEEK_START", "7", "SELECT DATE_TRUNC('WEEK', '2024-02-13'::DATE)::DATE", date(2024, 2, 12)),
        ("WEEK_START", "1", "SELECT DAYOFWEEK('2024-02-18'::DATE)", 0),
        ("WEEK_OF_YEAR_POLICY", "1", "SELECT WEEK('2024-02-13'::DATE)", 7),
    ],
)
def test_a_default_that_changes_a_value_changes_none_of_ours(
    account_default, plain, access, name, value, sql, expected
):
    assert access.query(sql) == [(expected,)]
    account_default(name, value)

    assert plain(sql) != [(expected,)], f"{name} does no harm here, so nothing is shown"
    assert access.query(sql) == [(expected,)]


def test_a_limit_of_rows_cuts_no_result_of_ours(account_default, plain, access):
    account_default("ROWS_PER_RESULTSET", "1")
    sql = "SELECT 1 AS A UNION ALL SELECT 2 ORDER BY A"

    assert plain(sql) == [(1,)]
    assert access.query(sql) == [(1,), (2,)]


def test_columns_in_small_letters_keep_their_names(account_default, sandbox, access):
    account_default("QUOTED_IDENTIFIERS_IGNORE_CASE", "TRUE")
    sql = 'SELECT 1 AS "id"'

    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        assert [column.name for column in cursor.describe(sql)] == ["ID"]
    assert [column.name for column in describe_query(access, sql)] == ["id"]


def test_what_is_written_without_a_transaction_stays(account_default, sandbox, access, make_table):
    table = make_table("ID INT")
    account_default("AUTOCOMMIT", "FALSE")

    connection = sandbox.snowflake()
    connection.cursor().execute(f"INSERT INTO {table.sql} VALUES (1)")
    connection.close()
    assert access.query(f"SELECT ID FROM {table.sql}") == []
    access.query(f"INSERT INTO {table.sql} VALUES (2)")
    assert access.query(f"SELECT ID FROM {table.sql}") == [(2,)]


def test_a_merge_of_two_rows_for_one_key_is_refused(account_default, plain, access, make_table):
    table = make_table("ID INT, A INT", "VALUES (1, 0)")
    merge = (
        f"MERGE INTO {table.sql} t USING (SELECT 1 AS ID, 1 AS A UNION ALL SELECT 1, 2) s ON t.ID = s.ID "
        "WHEN MATCHED THEN UPDATE SET A = s.A"
    )
    account_default("ERROR_ON_NONDETERMINISTIC_MERGE", "FALSE")

    assert plain(merge) == [(1,)]
    with pytest.raises(SourceError, match="Duplicate row detected"):
        access.query(merge)


def test_a_failed_statement_leaves_a_transaction_of_ours(account_default, sandbox, access, make_table):
    table = make_table("ID INT")
    account_default("TRANSACTION_ABORT_ON_ERROR", "TRUE")

    def commit_after_a_failure(connection):
        cursor = connection.cursor()
        for statement in ("BEGIN", f"INSERT INTO {table.sql} VALUES (1)", "SELECT 1 / 0", "COMMIT"):
            with suppress(ProgrammingError):
                cursor.execute(statement)

    with sandbox.snowflake(autocommit=True) as connection:
        commit_after_a_failure(connection)
    assert access.query(f"SELECT ID FROM {table.sql}") == []
    with access.connect() as connection:
        commit_after_a_failure(connection)
    assert access.query(f"SELECT ID FROM {table.sql}") == [(1,)]


def test_every_parameter_of_a_session_is_set_or_said_to_be_left(access, sandbox):
    told = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", DOCS.read_text()))

    assert PARAMETERS.keys() - told == set(), "docs/snowflake.md names each: set, or why it is left"
    shown = {row[0]: row[1] for row in access.query("SHOW PARAMETERS IN SESSION")}
    wanted = {setting.name: str(setting.value).lower() for setting in SETTINGS}
    assert {name: shown[name].lower() for name in wanted} == wanted


def test_the_table_of_settings_is_the_one_in_the_code():
    lines = [f"| `{each.name}` | `{_shown(each.value)}` | {each.reason} |" for each in SETTINGS]

    found = [line for line in DOCS.read_text().splitlines() if re.match(r"\| `[A-Z0-9_]+` \| `", line)]
    assert found == lines, "put these lines into docs/snowflake.md:\n" + "\n".join(lines)


def _shown(value: object) -> str:
    return str(value).upper() if isinstance(value, bool) else str(value)


def test_a_user_chooses_the_week_and_what_changes_no_meaning(sandbox):
    args = {
        "account": "a",
        "user": "u",
        "password": "p",
        "session_parameters": {
            "QUERY_TAG": "t",
            "week_start": 7,
            "STATEMENT_TIMEOUT_IN_SECONDS": 60,
            "TIMEZONE": "CET",
        },
    }

    sent = SnowflakeAccess.from_connection_args(args).connection_args()["session_parameters"]
    assert (sent["WEEK_START"], sent["STATEMENT_TIMEOUT_IN_SECONDS"]) == (7, 60)
    assert (sent["QUERY_TAG"], sent["TIMEZONE"], sent["ROWS_PER_RESULTSET"]) == ("t", "UTC", 0)


def test_literals_slices_and_names_mean_the_same_in_a_hostile_account(access, make_table, request):
    table = make_table(
        'ID INT, D DATE, TS TIMESTAMP_NTZ, TZ TIMESTAMP_TZ, "small" VARCHAR',
        "VALUES (1, '2024-02-13', '2024-02-13 23:30:00.123456', '2024-02-13T23:30:00+00:00', 'x'), "
        "(2, '2024-02-14', '2024-02-14 00:30:00', '2024-02-14T00:30:00+00:00', 'y')",
    )
    request.getfixturevalue("hostile_account")

    columns = describe(access, table)
    assert [column.name for column in columns] == ["ID", "D", "TS", "TZ", "small"]
    row = access.query(f"{select(table, columns)} ORDER BY ID")[0]
    for column, value in zip(columns, row, strict=True):
        same = f"{quote(column.name)} = {sql_literal(column, value)}"
        assert access.query(select(table, columns[:1], where=same)) == [(1,)], column.name
    for by, column, key in (("day", "TZ", "2024-02-13"), ("week", "D", "2024-02-12"), ("month", "TS", "2024-02")):
        slices = SliceBy(column, by)
        shown = access.query(f"SELECT ID, {slice_sql_snowflake(slices, columns)} FROM {table.sql} ORDER BY ID")
        assert (shown[0], len(shown)) == ((1, key), 2)
        found = access.query(select(table, columns[:1], where=slice_filter_snowflake(slices, columns, [key])))
        assert found == [row[:1] for row in shown if row[1] == key]


def test_an_optional_parameter_that_the_account_refuses_is_left_out_and_told_once(sandbox, caplog, monkeypatch):
    choices = (("NO_SUCH_PARAMETER", 1),)
    access = replace(SnowflakeAccess.from_environment(sandbox.env), choices=choices)
    with pytest.raises(SourceError, match="NO_SUCH_PARAMETER"):
        access.query("SELECT 1")
    monkeypatch.setattr(connection, "OPTIONAL", frozenset({"NO_SUCH_PARAMETER"}))
    monkeypatch.setattr(connection, "_refused_settings", {})
    assert [access.query("SELECT 1") for _ in range(2)] == [[(1,)], [(1,)]]
    (line,) = [record.message for record in caplog.records if "refuses the session parameter" in record.message]
    assert "NO_SUCH_PARAMETER" in line
