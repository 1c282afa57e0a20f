"""A disk that is full: one clear error, nothing half-written, and all is well when there is room again.

The limit on the size of a process's files stands in for the disk: it fails writes the same way, without privileges.
"""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
from snowflake.connector.errors import DatabaseError

from tir_dagster.sandbox import processes
from tir_dagster_tests.conftest import running_sandbox


@contextmanager
def no_room(pid: int):
    """No file of the process may grow beyond 64 KiB."""
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, unlimited[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


def inserted(run, number) -> bool:
    """Ten small rows, which go into the catalog itself; whether the warehouse took them."""
    try:
        run(f"INSERT INTO D.PUBLIC.T SELECT {number}, REPEAT('x', 500) FROM RANGE(10)")
    except DatabaseError:
        return False
    return True


@pytest.mark.long
def test_the_warehouse_says_so_and_loses_and_invents_nothing(tmp_path):
    with running_sandbox(tmp_path) as sandbox:
        connection = sandbox.snowflake()
        run = lambda sql: connection.cursor().execute(sql).fetchall()  # noqa: E731
        run("CREATE DATABASE D")
        run("CREATE TABLE D.PUBLIC.T (A INT, B VARCHAR)")
        run("INSERT INTO D.PUBLIC.T SELECT RANGE, 'kept' FROM RANGE(1000)")
        with no_room(processes.status(sandbox.home)["warehouse"].pid):
            for _ in range(3):
                with pytest.raises(DatabaseError) as caught:
                    run("INSERT INTO D.PUBLIC.T SELECT RANGE, MD5(RANGE::VARCHAR) FROM RANGE(1000000)")
                assert caught.value.errno == 603
            kept = 1000 + sum(10 for number in range(100) if inserted(run, number))
        assert run("SELECT COUNT(*), COUNT(DISTINCT A) FROM D.PUBLIC.T") == [(kept, 1000)]
        run("INSERT INTO D.PUBLIC.T VALUES (-1, 'after')")
        processes.stop(sandbox.home)
        processes.start(sandbox.home)
        connection = sandbox.snowflake()
        assert run("SELECT COUNT(*) FROM D.PUBLIC.T") == [(kept + 1,)]
