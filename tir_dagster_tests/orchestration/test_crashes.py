"""Killed with -9 after each step, then one clean run: the extract equals the source, without a full refresh."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tir_dagster.changes.plan import Mode
from tir_dagster.orchestration.commands import Command, Outcome


@pytest.fixture(scope="module")
def loaded(place):
    assert place.refresh().published
    return place


def stage(place, mode: Mode = "changes"):
    """Detection only, as if the process had ended right after it."""
    return place.run(lambda command: _detect(command, mode))


def _detect(command: Command, mode: Mode):
    with command.refresher.leased("test", wait_seconds=60):
        return command._detect(Outcome(command.spec.name, mode), mode, (), allow_empty=False)


def apply_and_die(place, step: str) -> None:
    """Apply the pending change set in another process, killed after the step."""
    specs = place.folder / "extracts.yaml"
    specs.write_text(place.spec_text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tir_dagster_tests.orchestration.crash", str(specs)],
        env={**os.environ, "TIR_CRASH_AFTER": step},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -9, f"not killed after {step}: {done.stdout}{done.stderr}"


def touch(place, note: str) -> None:
    place.sql(
        f"UPDATE MYTABLE SET NOTE = '{note}', UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE)) "
        "WHERE ORDER_ID IN (SELECT ORDER_ID FROM MYTABLE ORDER BY ORDER_ID LIMIT 5)"
    )
    place.sql("DELETE FROM MYTABLE WHERE ORDER_ID IN (SELECT MAX(ORDER_ID) FROM MYTABLE)")


def test_killed_after_staging(loaded):
    touch(loaded, "staged")
    assert stage(loaded) is not None
    outcome = loaded.refresh()
    assert outcome.decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"


@pytest.mark.parametrize("step", ["applied", "verified", "published", "confirmed"])
def test_killed_after(loaded, step):
    touch(loaded, step)
    stage(loaded)
    apply_and_die(loaded, step)
    outcome = loaded.refresh()
    assert outcome.decision != "full", outcome.reason
    assert loaded.published_rows() == loaded.source_rows()
    assert loaded.refresh().decision == "none"


def test_t6_a_row_inserted_before_a_crash_and_deleted_after_it_is_gone(loaded):
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    stamp = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(f"INSERT INTO MYTABLE ({columns}) SELECT 99999999, '2026-01-05'::DATE, 'net zero', 1, {stamp}")
    stage(loaded)
    apply_and_die(loaded, "published")
    assert any(row[0] == 99999999 for row in loaded.published_rows()), "the publish landed"
    loaded.sql("DELETE FROM MYTABLE WHERE ORDER_ID = 99999999")
    outcome = loaded.refresh()
    assert outcome.decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()


def test_t7_a_value_that_changed_before_a_crash_and_back_after_it_shows_the_old_one(loaded):
    ((key, note),) = loaded.sql("SELECT ORDER_ID, NOTE FROM MYTABLE ORDER BY ORDER_ID LIMIT 1")
    stamp = "UPDATED_AT = DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
    loaded.sql(f"UPDATE MYTABLE SET NOTE = 'v1', {stamp} WHERE ORDER_ID = {key}")
    stage(loaded)
    apply_and_die(loaded, "published")
    loaded.sql(f"UPDATE MYTABLE SET NOTE = '{note}', {stamp} WHERE ORDER_ID = {key}")
    assert loaded.refresh().decision == "incremental"
    assert loaded.published_rows() == loaded.source_rows()
