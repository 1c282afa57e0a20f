"""Folders in internal stages, as the real connector speaks to them: PUT, COPY into temporary tables, REMOVE."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from snowflake.connector.errors import ProgrammingError

STAGE = 'STG."My Schema".S'


@pytest.fixture(scope="module")
def staged(sandbox, tmp_path_factory):
    """A session with a stage whose schema needs quotes, and a file to put."""
    file = tmp_path_factory.mktemp("stages") / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "Name": ["x", None], "MORE": [1.5, 2.5]}), file)
    with sandbox.snowflake() as connection, connection.cursor() as cursor:

        def run(sql: str) -> list[tuple]:
            return cursor.execute(sql).fetchall()

        run("CREATE DATABASE IF NOT EXISTS STG")
        run('CREATE SCHEMA IF NOT EXISTS STG."My Schema"')
        run(f"CREATE STAGE IF NOT EXISTS {STAGE}")
        yield run, file


def put(run, file, folder: str) -> list[tuple]:
    return run(f"PUT 'file://{file}' '@{STAGE}/{folder}/' AUTO_COMPRESS=FALSE OVERWRITE=TRUE")


def copy(run, table: str, folder: str, matching: str = "CASE_INSENSITIVE") -> list[tuple]:
    return run(
        f"COPY INTO {table} FROM '@{STAGE}/{folder}/' FILE_FORMAT=(TYPE=PARQUET) MATCH_BY_COLUMN_NAME={matching}"
    )


def test_a_folder_is_copied_into_a_temporary_table_by_the_names_of_its_columns(staged):
    run, file = staged
    assert put(run, file, "one")[0][6] == "UPLOADED"
    run('CREATE OR REPLACE TEMPORARY TABLE STG."My Schema".T (NAME VARCHAR, ID NUMBER, OTHER DATE)')
    report = copy(run, 'STG."My Schema".T', "one")
    assert [row[:4] for row in report] == [("s/one/a.parquet", "LOADED", "2", "2")]
    assert run('SELECT ID, NAME, OTHER FROM STG."My Schema".T ORDER BY ID') == [(1, "x", None), (2, None, None)]


def test_one_folder_holds_nothing_of_another_and_a_removed_one_is_empty(staged):
    run, file = staged
    put(run, file, "load1/rows")
    put(run, file, "load2/rows")
    assert run(f"REMOVE '@{STAGE}/load1/'") == [("s/load1/rows/a.parquet", "removed")]
    run('CREATE OR REPLACE TEMPORARY TABLE STG."My Schema".U (ID NUMBER)')
    assert copy(run, 'STG."My Schema".U', "load1/rows") == [("Copy executed with 0 files processed.",)]
    assert len(copy(run, 'STG."My Schema".U', "load2/rows")) == 1


def test_a_copy_inside_a_transaction_goes_with_its_rollback(staged):
    run, file = staged
    put(run, file, "back")
    run('CREATE OR REPLACE TABLE STG."My Schema".V ("id" NUMBER, "Name" VARCHAR)')
    run("BEGIN")
    copy(run, 'STG."My Schema".V', "back", "CASE_SENSITIVE")
    assert run('SELECT COUNT(*) FROM STG."My Schema".V') == [(2,)]
    run("ROLLBACK")
    assert run('SELECT COUNT(*) FROM STG."My Schema".V') == [(0,)]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("REMOVE '@STG.PUBLIC.NONE/a/'", "Stage 'STG.PUBLIC.NONE' does not exist"),
        (f"REMOVE '@{STAGE}/../../etc/'", "invalid URL prefix"),
        (f"COPY INTO STG.PUBLIC.X FROM '@{STAGE}/a/' FILE_FORMAT=(TYPE=CSV)", "Unsupported|does not exist"),
    ],
)
def test_what_is_not_there_is_said(staged, sql, said):
    run, _ = staged
    with pytest.raises(ProgrammingError, match=said):
        run(sql)
