"""One refresh at a time: who holds the lease, how long it counts, and what others are told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tir_dagster.changes.lease import EXPIRE_SECONDS, LeaseHeldError, lease

HOLD = """
import sys
from pathlib import Path
from tir_dagster.changes.lease import lease
with lease(Path(sys.argv[1]), purpose="a nightly run"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders" / "lease.json"


@pytest.fixture
def other(path: Path):
    """Another process that holds the lease until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def held_by(path: Path, *, host: str, pid: int, age: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = {"id": "x", "host": host, "pid": pid, "purpose": "a run", "renewed": time.time() - age}
    path.write_text(json.dumps(holder), encoding="utf-8")


def test_a_second_holder_is_refused_and_told_who_holds_it(path, other):
    with pytest.raises(LeaseHeldError) as caught, lease(path, purpose="me"):
        pass
    assert f"orders: process {other.pid} on {socket.gethostname()} (a nightly run)" in str(caught.value)


def test_one_who_waits_gets_it_when_the_other_is_done(path, other):
    told = []
    threading.Timer(0.5, other.stdin.close).start()
    with lease(path, purpose="me", wait_seconds=60, on_wait=told.append):
        assert other.wait(60) == 0
    assert told == [f"waiting for process {other.pid} on {socket.gethostname()} (a nightly run)"], "told once"


def test_the_lease_of_a_killed_process_is_free_at_once(path, other):
    other.kill()
    other.wait()
    with lease(path, purpose="me"):
        assert json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not path.exists()


def test_on_another_machine_the_last_renewal_counts(path):
    held_by(path, host="elsewhere", pid=1, age=EXPIRE_SECONDS - 5)
    with pytest.raises(LeaseHeldError, match="process 1 on elsewhere"), lease(path, purpose="me"):
        pass
    held_by(path, host="elsewhere", pid=1, age=EXPIRE_SECONDS + 1)
    with lease(path, purpose="me"):
        pass


def test_the_same_thread_may_take_it_again_and_another_thread_may_not(path):
    refused = []

    def try_it() -> None:
        try:
            with lease(path, purpose="a thread"):
                pass
        except LeaseHeldError as error:
            refused.append(error)

    with lease(path, purpose="a command"), lease(path, purpose="its run"):
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert len(refused) == 1


def test_what_cannot_be_read_is_no_lease(path):
    path.parent.mkdir(parents=True)
    path.write_text("{ half", encoding="utf-8")
    with lease(path, purpose="me"):
        pass
