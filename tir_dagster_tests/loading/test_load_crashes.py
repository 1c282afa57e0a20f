"""Killed with -9 during staging, before and after the commit; connections lost: table and ledger agree, the next run completes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import requests

from tir_dagster_tests.loading.conftest import SCHEMA

# Five times each by TIR_CRASHES=5, as `make soak` does.
TIMES = int(os.environ.get("TIR_CRASHES", "1"))
STEPS = ["staging", "staged", "copied", "changed", "committed"] if TIMES > 1 else ["staging", "changed", "committed"]
COLUMNS = "ID NUMBER(38,0), NAME VARCHAR"


def kill(place, sandbox, step: str) -> None:
    """The load in another process, killed at the step."""
    file = place.folder.parent / "loads.yaml"
    file.write_text(
        f"loads:\n  - {{name: {place.name}, table: {place.table}, mode: append, reject_share: 0.5,\n"
        f"     files: {{path: 'file://{place.folder}', format: csv, settle: 0 seconds}}}}\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tir_dagster_tests.loading.crash", str(file), step],
        env={**os.environ, **sandbox.env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, f"not killed at {step}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_the_table_is_as_before_or_after_and_the_next_run_completes(landing, sandbox, step):
    place = landing(COLUMNS)
    for time in range(TIMES):
        before = place.rows("ID")
        place.write(f"a{time}.csv", f"ID,NAME\n{time}1,x\n{time}2,y\n{time}3\n")
        place.write(f"b{time}.csv", f"ID,NAME\n{time}4,z\n")
        kill(place, sandbox, step)
        loaded = [entry for entry in place.ledger() if entry[0] in (f"a{time}.csv", f"b{time}.csv")]
        assert (place.rows("ID") == before, len(loaded)) == ((False, 2) if step == "committed" else (True, 0))
        with short_waits(place.access):
            place.load(place.spec(mode="append", reject_share=0.5))
        assert len(place.rows("ID")) == len(before) + 3
        assert len(place.ledger()) == len(set(place.ledger())) == 2 * (time + 1)
        assert len(place.rejects()) == time + 1


def test_a_commit_whose_answer_is_lost_is_not_made_twice(landing, sandbox):
    """Half of COMMIT's answer is an error of the client; the load looks for itself and finds that it is in the table."""
    place = landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,x\n")
    url = f"http://{sandbox.env['SNOWFLAKE_HOST']}:{sandbox.env['SNOWFLAKE_PORT']}"

    def cut(step: str) -> None:
        if step == "changed":
            fault = {"kind": "cut", "when": "during", "path": "query-request"}
            requests.post(f"{url}/sandbox/faults", json=fault, timeout=20).raise_for_status()

    loaded = place.load(place.spec(mode="append"), after=cut)
    requests.delete(f"{url}/sandbox/faults", timeout=20)
    assert (loaded.inserted, place.rows()) == (1, [(1, "x")])
    assert [line for line in place.told if line.startswith("the commit was interrupted")], "the answer was lost"


def test_a_session_that_ends_before_the_commit_is_opened_again_from_what_is_staged(landing, access):
    place = landing(COLUMNS)
    place.write("a.csv", "ID,NAME\n1,x\n")
    ended = []

    def end_session(step: str) -> None:
        if step == "changed" and not ended:
            ended.append(access.query(f"SELECT COUNT(*) FROM {place.table}")[0][0])
            abort_sessions(access)

    loaded = place.load(place.spec(mode="append"), after=end_session)
    assert ended == [0], "nothing was to be seen before the commit"
    assert (loaded.inserted, place.rows(), len(place.ledger())) == (1, [(1, "x")], 1)
    assert [line for line in place.told if line.startswith("the commit was interrupted")], "the session was lost"


def abort_sessions(access) -> None:
    """Whoever waits for a table held by an idle transaction has that one rolled back, as in Snowflake."""
    with short_waits(access):
        access.query(f"UPDATE {SCHEMA}.TIR_LOADED_FILES SET STATUS = STATUS")


@contextmanager
def short_waits(access):
    """The transaction of a process that is gone blocks others for a moment only."""
    url = f"http://{access.host}:{access.port}/sandbox/settings"
    before = requests.get(url, timeout=20).json()
    requests.put(url, json={"idle_transaction_seconds": 0.2}, timeout=20).raise_for_status()
    try:
        yield
    finally:
        requests.put(url, json=before, timeout=20).raise_for_status()
