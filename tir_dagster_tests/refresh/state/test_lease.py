"""One refresh at a time: who holds the lease, how long it counts, and what others are told."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tir_dagster.refresh.state.lease import (
    EXPIRE_SECONDS,
    LeaseHeldError,
    LeaseLostError,
    _age,
    _read,
    _write,
    guarded,
    lease,
)

HOLD = """
import sys
from pathlib import Path
from tir_dagster.refresh.state.lease import lease
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


def held_by(path: Path, *, age: float, **holder: Any) -> None:
    """The lease of somebody who renewed it so many seconds ago by the disk's clock, whatever his own clock said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"id": "x", "host": "elsewhere", "pid": 1, "purpose": "a run", "since": "1999-12-31 23:59:59 UTC"}
    path.write_text(json.dumps({**known, **holder}), encoding="utf-8")
    grow_old(path, age)


def grow_old(path: Path, seconds: float) -> None:
    written = path.stat().st_mtime - seconds
    os.utime(path, (written, written))


def test_a_second_holder_is_refused_and_told_who_holds_it(path, other):
    with pytest.raises(LeaseHeldError) as caught, lease(path, purpose="me"):
        pass
    message = re.escape(f"orders: process {other.pid} on {socket.gethostname()} (a nightly run, since ")
    assert re.match(message + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\) is refreshing this extract", str(caught.value))


def test_one_who_waits_gets_it_when_the_other_is_done(path, other):
    messages = []
    threading.Timer(0.5, other.stdin.close).start()
    with lease(path, purpose="me", wait_seconds=60, on_wait=messages.append):
        assert other.wait(60) == 0
    (line,) = messages
    assert line.startswith(f"waiting for process {other.pid} on {socket.gethostname()} (a nightly run, since ")


def test_the_lease_of_a_killed_process_is_free_at_once(path, other):
    other.kill()
    other.wait()
    with lease(path, purpose="me"):
        assert json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not path.exists()


def test_on_another_machine_the_last_renewal_counts(path):
    held_by(path, age=EXPIRE_SECONDS - 5)
    with pytest.raises(LeaseHeldError, match="process 1 on elsewhere"), lease(path, purpose="me"):
        pass
    held_by(path, age=EXPIRE_SECONDS + 1)
    with lease(path, purpose="me"):
        pass


@pytest.mark.parametrize("space", ["", "another boot pid:[1]"])
def test_a_process_that_cannot_be_seen_from_here_is_not_taken_for_dead(path, space):
    # Another container of the same host name, and none here has such a process.
    held_by(path, age=1, host=socket.gethostname(), pid=2**22 + 1, space=space)
    with pytest.raises(LeaseHeldError), lease(path, purpose="me"):
        pass


def test_a_guard_is_old_by_the_disks_clock(path):
    guard = path.with_name(f"{path.name}.guard")
    guard.mkdir(parents=True)
    grow_old(guard, EXPIRE_SECONDS + 1)
    with lease(path, purpose="me"):
        pass
    assert sorted(path.parent.iterdir()) == [], "nothing is left behind"


def test_one_who_slept_too_long_is_told_who_took_over(path):
    with lease(path, purpose="me") as mine:
        mine.check()
        grow_old(path, EXPIRE_SECONDS + 1)
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as thief:
            assert thief.stdout.readline() == "held\n"
            with pytest.raises(LeaseLostError, match=rf"and process {thief.pid} on .* \(a nightly run, since"):
                mine.check()
            thief.stdin.close()
        with pytest.raises(LeaseLostError, match="another process took over and has ended already"):
            mine.check()


def test_a_lease_that_grew_old_but_that_nobody_took_is_renewed_by_looking(path):
    with lease(path, purpose="me") as mine:
        grow_old(path, EXPIRE_SECONDS + 1)
        mine.check()
        assert _age(path) < EXPIRE_SECONDS / 2


def test_one_who_slept_inside_the_guard_takes_nothing_from_who_is_in_there_now(path):
    held_by(path, age=0)
    with guarded(path) as slept:
        slept.path.rename(path.with_name("old"))
        with guarded(path) as awake:
            assert not _write(path, replace(_read(path), id="me"), slept)
            assert awake.is_ours()
    assert _read(path).id == "x"


def test_one_who_slept_inside_the_guard_leaves_the_new_one_there(path):
    path.parent.mkdir()
    with guarded(path) as slept:
        slept.path.rmdir()
        slept.path.mkdir()
        # Half a minute later at least; clocks of disks may be coarse.
        grow_old(slept.path, -EXPIRE_SECONDS)
    assert slept.path.is_dir()


def test_a_disk_that_is_away_at_the_end_hides_nothing(path):
    def block() -> None:
        with lease(path, purpose="me"):
            shutil.rmtree(path.parent)
            raise LeaseHeldError("what the block said")

    with pytest.raises(LeaseHeldError, match="what the block said"):
        block()


TURNS = """
import sys, time
from pathlib import Path
from tir_dagster.refresh.state.lease import lease
folder, me = Path(sys.argv[1]), sys.argv[2]
for turn in range(10):
    with lease(folder / "lease.json", purpose=me, wait_seconds=60) as held, (folder / "log").open("a") as log:
        print(me, file=log, flush=True)
        time.sleep(0.01)
        held.check()
        print(me, file=log, flush=True)
"""


def test_two_processes_take_twenty_turns_and_never_at_once(path):
    path.parent.mkdir()
    both = [subprocess.Popen([sys.executable, "-c", TURNS, str(path.parent), name]) for name in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    turns = (path.parent / "log").read_text(encoding="utf-8").split()
    assert turns[0::2] == turns[1::2], "each begins and ends alone"
    assert sorted(turns) == ["a"] * 20 + ["b"] * 20


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
