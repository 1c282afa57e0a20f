"""Killed with -9 after each step, then one clean run: the extract equals the source, without a full refresh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.processes import wait_for
from tir_dagster_tests.sandbox.tableau.helpers import Admin

# `make soak` kills three times after each step; in short T6 kills after the publish, T7 before its end.
TIMES = int(os.environ.get("TIR_CRASHES", "1"))
STEPS = ["applied", "verified", "intended", "landed", "published", "confirmed"]
PATCH_STEPS = ["applied", "verified", "intended", "sent", "published", "confirmed"] if TIMES > 1 else ["sent"]


@pytest.fixture
def loaded(loaded: Place) -> Place:
    """The same extract, its datasource with a tag."""
    loaded.tag("dear")
    return loaded


def tags(place) -> set[str]:
    with place.sandbox.tableau() as server:
        return next(iter(server.datasources.filter(name=place.spec.datasource.name))).tags


def apply_and_die(place, step: str) -> None:
    """Apply the pending change set in another process, killed after the step."""
    die(place, step, "tir_dagster_tests.orchestration.crash", "{specs}")


def refresh_and_die(place, step: str) -> None:
    """The command itself, killed after the step."""
    die(place, step, "tir_dagster.cli.main", "--specs", "{specs}", "refresh", place.spec.name)


def die(place, step: str, module: str, *arguments: str) -> None:
    specs = place.folder / "extracts.yaml"
    specs.write_text(place.spec_text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", module, *(argument.format(specs=specs) for argument in arguments)],
        env={**os.environ, "TIR_CRASH_AFTER": step},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -9, f"not killed after {step}: {done.stdout}{done.stderr}"


def heals(place) -> None:
    """One clean run later everything is equal, without a full refresh, and there is nothing left to do."""
    outcome = place.refresh()
    assert outcome.decision != "full", outcome.reason
    assert place.published_rows() == place.source_rows()
    assert place.refresh().decision == "none"


@pytest.mark.parametrize("time", range(TIMES))
def test_killed_after_planning(loaded, time):
    loaded.touch(f"planned {time}")
    refresh_and_die(loaded, "planned")
    heals(loaded)


@pytest.mark.long
@pytest.mark.parametrize("time", range(TIMES))
def test_killed_after_staging(loaded, time):
    loaded.touch(f"staged {time}")
    refresh_and_die(loaded, "staged")
    heals(loaded)


@pytest.mark.long
@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize("step", STEPS)
def test_killed_after(loaded, step, time):
    loaded.touch(f"{step} {time}")
    loaded.detect()
    apply_and_die(loaded, step)
    heals(loaded)
    assert tags(loaded) == {"dear"}


@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize("step", PATCH_STEPS)
def test_killed_while_only_the_change_is_sent_after(patched, step, time):
    patched.touch(f"patch {step} {time}")
    patched.detect()
    before = changes_on_the_server(patched)
    apply_and_die(patched, step)
    heals(patched)
    assert changes_on_the_server(patched) == before + 1, "sent again, it runs once"


@pytest.mark.long
@pytest.mark.parametrize("time", range(TIMES))
def test_killed_between_two_parts_of_a_change(patched, time):
    long = " || ".join(f"MD5(ORDER_ID::VARCHAR || '{time} {number}')" for number in range(40))
    patched.sql(
        f"UPDATE MYTABLE SET NOTE = {long}, UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE)) "
        "WHERE ORDER_ID IN (SELECT ORDER_ID FROM MYTABLE ORDER BY ORDER_ID LIMIT 1200)"
    )
    patched.detect()
    before = changes_on_the_server(patched)
    apply_and_die(patched, "sent")
    assert changes_on_the_server(patched) == before + 1
    lines: list[str] = []
    assert patched.refresh(listen=lines.append).decision == "none", "what was left is sent first, and confirmed late"
    parts = {int(match[1]) for match in (re.search(r"\(\d+ of (\d+)\)$", line) for line in lines) if match}
    assert changes_on_the_server(patched) == before + max(parts) > before + 1, "the other parts, and none of them twice"
    heals(patched)


# Stopped by a signal


@contextmanager
def refreshing(place, log: Path) -> Iterator[subprocess.Popen]:
    """The command in a process group of its own, as a terminal starts it."""
    specs = place.folder / "extracts.yaml"
    specs.write_text(place.spec_text, encoding="utf-8")
    command = [sys.executable, "-m", "tir_dagster.cli.main", "--specs", str(specs), "refresh", place.spec.name]
    with log.open("wb") as lines:
        started = subprocess.Popen(command, stdout=lines, stderr=lines, start_new_session=True)
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def press_ctrl_c(started: subprocess.Popen) -> int:
    """As a terminal does: to the command and everything that it started."""
    os.killpg(started.pid, signal.SIGINT)
    return started.wait(timeout=60)


def last_line(log: Path) -> str:
    """What the command said at its end, after nothing else but progress."""
    *others, last = log.read_text().splitlines()
    assert [line for line in others if not re.match(r"\[ *[\d.]+ s\] ", line)] == []
    return last


def test_ctrl_c_while_spark_starts_is_one_line_and_the_next_refresh_heals(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("TIR_SPARK_ROWS", "0")
    loaded.touch("stopped")
    log = tmp_path / "log"
    with refreshing(loaded, log) as started:
        wait_for(lambda: "starting Spark" in log.read_text(), "Spark", log=log)
        assert press_ctrl_c(started) == 130, log.read_text()
    line = last_line(log)
    assert re.fullmatch(
        r"orders: stopped by Ctrl-C\. The published datasource is unchanged, data as of .* UTC\. Run it again\.", line
    )
    heals(loaded)


@pytest.mark.long
def test_ctrl_c_while_it_publishes_says_that_the_next_refresh_finds_out(loaded, tmp_path):
    loaded.touch("stopped while it published")
    log, admin = tmp_path / "log", Admin(loaded.sandbox.tableau_url)
    store = ChangeSetStore(loaded.folder / "state" / "extracts" / "orders" / "change_sets")
    admin.fault("delay", method="POST", path="/(fileUploads|datasources)$", seconds=10)
    with refreshing(loaded, log) as started:
        wait_for(store.intent, "the publish", log=log)
        assert press_ctrl_c(started) == 130, log.read_text()
    admin.clear_faults()
    assert "A publish was under way, and the next refresh finds out if it landed" in last_line(log)
    heals(loaded)


def changes_on_the_server(place: Place) -> int:
    with place.sandbox.tableau() as server:
        jobs = server.jobs.filter(title=place.spec.datasource.name)
        return len({job.id for job in jobs if job.type == "update_uploaded_file"})


def test_t6_a_row_inserted_before_a_crash_and_deleted_after_it_is_gone(loaded):
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    stamp = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(f"INSERT INTO MYTABLE ({columns}) SELECT 99999999, '2026-01-05'::DATE, 'net zero', 1, {stamp}")
    loaded.detect()
    apply_and_die(loaded, "published")
    assert any("int 99999999" in row for row in loaded.published_rows()), "the publish landed"
    loaded.sql("DELETE FROM MYTABLE WHERE ORDER_ID = 99999999")
    outcome = loaded.refresh()
    assert outcome.decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()


def test_t7_a_value_that_changed_before_a_crash_and_back_after_it_shows_the_old_one(loaded):
    ((key, note),) = loaded.sql("SELECT ORDER_ID, NOTE FROM MYTABLE ORDER BY ORDER_ID LIMIT 1")
    stamp = "UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'v1', {stamp} WHERE ORDER_ID = {key}")
    loaded.detect()
    apply_and_die(loaded, "landed")
    assert tags(loaded) == set(), "taken by the publish"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = '{note}', {stamp} WHERE ORDER_ID = {key}")
    assert loaded.refresh().decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()
    assert tags(loaded) == {"dear"}
