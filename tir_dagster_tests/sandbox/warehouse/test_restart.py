"""What a restart of the warehouse keeps, and what it clears away."""

from __future__ import annotations

import os
import signal
import sqlite3

import pytest
from snowflake.connector.errors import DatabaseError, ProgrammingError

from tir_dagster.sandbox import processes
from tir_dagster_tests.conftest import running_sandbox
from tir_dagster_tests.sandbox.warehouse.conftest import Client

DAYS = 86_400_000_000


def let_time_pass(folder, days):
    """As if everything so far had happened earlier."""
    with sqlite3.connect(folder / "facts.sqlite") as facts:
        facts.execute("UPDATE commits SET committed_us = committed_us - ?", [days * DAYS])
        facts.execute("UPDATE moments SET created_us = created_us - ?", [days * DAYS])
        facts.execute("UPDATE moments SET altered_us = altered_us - ?", [days * DAYS])
        facts.execute("UPDATE moments SET changed_us = changed_us - ?", [days * DAYS])
    facts.close()


def times(sql):
    altered = sql("SELECT LAST_ALTERED FROM D.INFORMATION_SCHEMA.TABLES WHERE TABLE_NAME = 'OLD'")
    return sql.value("SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('D.PUBLIC.OLD')"), altered


@pytest.mark.long
def test_expired_versions_take_no_times_along_and_nothing_that_was_promised(tmp_path):
    with running_sandbox(tmp_path) as sandbox:
        sql = Client(sandbox.snowflake())
        folder = sandbox.home.data("warehouse")
        sql("CREATE DATABASE D")
        for table in ("OLD", "LONG_KEPT"):
            sql(f"CREATE TABLE D.PUBLIC.{table} AS SELECT 1 AS A")
        sql("ALTER TABLE D.PUBLIC.LONG_KEPT SET DATA_RETENTION_TIME_IN_DAYS = 9")
        sql("CREATE TEMP TABLE D.PUBLIC.PASSING AS SELECT 1 AS A")
        processes.stop(sandbox.home)
        let_time_pass(folder, days=8)
        orphan = folder / "data" / "D" / "PUBLIC" / "OLD" / "ducklake-orphan.parquet"
        orphan.parent.mkdir(parents=True, exist_ok=True)
        orphan.write_bytes(b"left by a process that was killed")
        processes.start(sandbox.home)

        with pytest.raises(DatabaseError) as caught:
            sql("SELECT 1")
        assert caught.value.errno == 390104 or "390104" in str(caught.value)
        sql = Client(sandbox.snowflake())
        with pytest.raises(ProgrammingError):
            sql("SELECT * FROM D.PUBLIC.PASSING")
        assert not orphan.exists()
        before = times(sql)
        sql("UPDATE D.PUBLIC.LONG_KEPT SET A = 2")
        sql("INSERT INTO D.PUBLIC.LONG_KEPT VALUES (3)")
        assert sql("SELECT A FROM D.PUBLIC.LONG_KEPT AT(OFFSET => -7*24*3600)") == [(1,)]

        sql("ALTER TABLE D.PUBLIC.LONG_KEPT SET DATA_RETENTION_TIME_IN_DAYS = 1")
        os.kill(processes.status(sandbox.home)["warehouse"].pid, signal.SIGKILL)
        processes.stop(sandbox.home)
        let_time_pass(folder, days=4)
        processes.start(sandbox.home)
        sql = Client(sandbox.snowflake())
        token, altered = times(sql)
        assert int(before[0]) - int(token) == 4 * DAYS * 1000
        assert altered[0][0] < before[1][0][0]
        sql("ALTER TABLE D.PUBLIC.LONG_KEPT SET DATA_RETENTION_TIME_IN_DAYS = 90")
        with pytest.raises(ProgrammingError) as caught:
            sql("SELECT A FROM D.PUBLIC.LONG_KEPT AT(OFFSET => -10*24*3600)")
        assert caught.value.errno == 707
        assert sql("SELECT A FROM D.PUBLIC.LONG_KEPT AT(OFFSET => -24*3600) ORDER BY A") == [(2,), (3,)]

        processes.stop(sandbox.home)
        let_time_pass(folder, days=-30)
        processes.start(sandbox.home)
        sql = Client(sandbox.snowflake())
        before = times(sql)
        sql("INSERT INTO D.PUBLIC.OLD VALUES (2)")
        assert int(times(sql)[0]) > int(before[0]), "a clock that was set back must not turn the token back"
