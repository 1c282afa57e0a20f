"""The warehouse stays small when the data is not: many rows in, out again four times at once, wide rows."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tir_dagster.sandbox import processes, sample
from tir_dagster_tests.conftest import running_sandbox

# The short form has as much room as it needs and little more; the long one (`make soak`) shows that 3 GB are enough.
ROWS, LIMIT = (2_000_000, 3 << 30) if "TIR_SIZE" in os.environ else (250_000, 1 << 30)


def peak_memory(pid: int) -> int:
    """The most memory the process ever held, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def read_all(sandbox) -> tuple[int, int]:
    """Every row through the connector: how many there are, and the sum of their keys."""
    rows = keys = 0
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {sample.TABLE}")
        for batch in cursor.fetch_arrow_batches():
            rows += batch.num_rows
            keys += sum(batch["ORDER_ID"].to_numpy().tolist())
    return rows, keys


def test_many_rows_are_seeded_and_read_by_four_at_once_in_bounded_memory(tmp_path):
    with running_sandbox(tmp_path) as sandbox:
        sample.seed_table(sandbox.env, rows=ROWS, seed=1, until=sample.parse_month(None))
        with ThreadPoolExecutor(4) as readers:
            read = list(readers.map(lambda _: read_all(sandbox), range(4)))
        peak = peak_memory(processes.status(sandbox.home)["warehouse"].pid)
    assert [rows for rows, _ in read] == [ROWS] * 4
    assert len({keys for _, keys in read}) == 1
    assert peak < LIMIT, f"the warehouse held {peak >> 20} MB at its peak"


def memory(pid: int) -> int:
    """What the process holds now, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def test_answers_that_were_delivered_take_no_memory(sandbox):
    pid = processes.status(sandbox.home)["warehouse"].pid
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS SIZES")

        def read() -> int:
            return len(cursor.execute("SELECT REPEAT('x', 300) || RANGE AS A FROM RANGE(50000)").fetchall())

        def growth() -> int:
            before = memory(pid)
            assert {read() for _ in range(5)} == {50_000}
            return memory(pid) - before

        read()
        # The allocator may keep some of what it got for the next answer, so one round may grow. A leak grows in each.
        grown = min(growth() for _ in range(4))
    assert grown < 40 << 20, f"5 answers of 15 MB each left {grown >> 20} MB behind, four times in a row"


def test_rows_of_any_width_come_in_answers_of_bounded_size(sandbox):
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS SIZES")
        cursor.execute("SELECT REPEAT('x', 1000000) AS A FROM RANGE(40)")
        batches = cursor.get_result_batches()
        assert sum(batch.rowcount for batch in batches) == 40
        assert batches[0].rowcount == 1
        assert max(batch.rowcount for batch in batches) <= 16
