"""RESULT_SCAN inside of statements: the rows and types of a query that another session has run."""

from __future__ import annotations

import pytest
from snowflake.connector.errors import ProgrammingError

VALUES = (
    "SELECT COLUMN1::INT AS N, (COLUMN1 / 4)::NUMBER(12,2) AS D, DATEADD('hour', COLUMN1, '1969-12-31 22:30:15.25'::TIMESTAMP_NTZ) AS T, "
    "'2025-03-01 10:00:00.123456 +0100'::TIMESTAMP_TZ AS Z, '10:11:12.5'::TIME AS H, '2025-01-01'::DATE AS Y, 'ä' || COLUMN1 AS S, "
    "COLUMN1 > 1 AS B FROM VALUES (1), (2), (NULL)"
)


def kept(sandbox, sql: str) -> tuple[str, list]:
    """The query's id and rows; its session is closed."""
    with sandbox.snowflake() as connection:
        cursor = connection.cursor().execute(sql)
        return cursor.sfqid, cursor.fetchall()


def scan(query: str) -> str:
    return f"(SELECT * FROM TABLE(RESULT_SCAN('{query}')))"


def test_a_result_has_its_rows_and_types_in_another_session(sandbox, run):
    query, rows = kept(sandbox, VALUES)
    assert sorted(run(f"SELECT * FROM {scan(query)} AS r"), key=str) == sorted(rows, key=str)
    assert run(
        f"SELECT COUNT(*) FROM {scan(query)} AS a JOIN {scan(query)} AS b ON a.T = b.T AND a.H = b.H AND a.Z = b.Z"
    ) == [(2,)]


def test_a_large_result_and_an_empty_one_can_be_read(sandbox, run):
    large, _ = kept(sandbox, "SELECT SEQ4() AS N FROM TABLE(GENERATOR(ROWCOUNT => 200000))")
    assert run(f"SELECT COUNT(*), SUM(N) FROM {scan(large)} AS r") == [(200_000, 199_999 * 100_000)]
    empty, _ = kept(sandbox, f"SELECT * FROM ({VALUES}) AS v WHERE N > 5")
    assert run(f"SELECT N, T FROM {scan(empty)} AS r UNION ALL SELECT 1, NULL") == [(1, None)]


def test_a_result_that_is_not_there_is_an_error(run):
    with pytest.raises(ProgrammingError) as error:
        run(f"SELECT * FROM {scan('00000000-0000-0000-0000-000000000000')} AS r")
    assert error.value.errno == 709
