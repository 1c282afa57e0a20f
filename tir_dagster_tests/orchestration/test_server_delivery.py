"""The delivery `server`: purged from the smallest changed value on, and loaded by Tableau's own incremental refresh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import requests

from tir_dagster.errors import DatasourceError
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.orchestration.conftest import Place
from tir_dagster_tests.processes import wait_for

STAMP = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"


@pytest.fixture(scope="module")
def served(place) -> Place:
    """The same datasource, delivered by the server, and loaded once."""
    text = place.spec_text.replace("    thresholds:", "    delivery: server\n    thresholds:")
    (spec,) = parse_specs(text, "test.yaml")
    extract = Place(place.sandbox, spec, text, place.folder, place.before)
    outcome = extract.refresh()
    assert (outcome.decision, outcome.reason, outcome.published) == ("full", "FIRST_LOAD", True)
    assert extract.published_rows() == extract.source_rows()
    return extract


def calls(place: Place, what: str) -> list[dict]:
    """What the stand-in was asked since the sandbox began, by a part of the path."""
    answer = requests.get(f"{place.sandbox.tableau_url}/sandbox/calls", timeout=30).json()
    listed = answer["calls"] if isinstance(answer, dict) else answer
    return [call for call in listed if what in str(call)]


def publishes(place: Place, action: Callable[[], None]) -> int:
    """How often a datasource was published meanwhile."""
    assert requests.delete(f"{place.sandbox.tableau_url}/sandbox/calls", timeout=30).ok
    action()
    return sum(call["method"] == "POST" and call["path"].endswith("/datasources") for call in calls(place, "POST"))


def fault(place: Place, **wanted: object) -> None:
    """The next refresh job goes wrong in this way."""
    answer = requests.post(
        f"{place.sandbox.tableau_url}/sandbox/faults", json={"path": "/refresh$", "times": 1, **wanted}, timeout=30
    )
    assert answer.ok, answer.text


def clear_faults(place: Place) -> None:
    assert requests.delete(f"{place.sandbox.tableau_url}/sandbox/faults", timeout=30).ok


def refreshes_incrementally(place: Place) -> None:
    outcome = place.refresh()
    assert outcome.decision == "incremental", outcome.reason
    assert place.published_rows() == place.source_rows()
    assert place.refresh().decision == "none"


def test_changes_of_all_kinds_are_loaded_by_tableau(served):
    # Rows without a date would need a full refresh: a test of its own.
    served.sql("DELETE FROM MYTABLE WHERE ORDER_DATE IS NULL")
    served.sql(
        f"UPDATE MYTABLE SET NOTE = 'changed', UPDATED_AT = {STAMP} WHERE ORDER_DATE > '2026-06-01' AND ORDER_ID % 50 = 0"
    )
    served.sql("DELETE FROM MYTABLE WHERE ORDER_DATE > '2026-06-01' AND ORDER_ID % 50 = 1")
    served.sql(
        f"UPDATE MYTABLE SET ORDER_DATE = '2026-07-03'::DATE, UPDATED_AT = {STAMP} WHERE ORDER_DATE = '2026-08-03'"
    )
    outcome = served.refresh()
    assert outcome.reason == "NULL_INCREMENT", "rows without a date left: Tableau can only load everything"
    assert served.published_rows() == served.source_rows()
    served.sql(
        f"UPDATE MYTABLE SET NOTE = 'again', UPDATED_AT = {STAMP} WHERE ORDER_DATE > '2026-06-01' AND ORDER_ID % 50 = 2"
    )
    served.sql("DELETE FROM MYTABLE WHERE ORDER_DATE > '2026-06-01' AND ORDER_ID % 50 = 3")
    assert publishes(served, lambda: refreshes_incrementally(served)) == 1, "what was purged, once"


def test_rows_that_are_only_new_are_loaded_without_a_publish(served):
    columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
    served.sql(
        f"INSERT INTO MYTABLE ({columns}) SELECT 5000000, DATEADD('day', 1, MAX(ORDER_DATE)), 'new', 1, {STAMP} FROM MYTABLE"
    )
    assert publishes(served, lambda: refreshes_incrementally(served)) == 0, "nobody saw a hole"


def test_a_failed_refresh_puts_the_kept_package_back_and_the_next_one_heals(served):
    served.sql(f"UPDATE MYTABLE SET NOTE = 'fails', UPDATED_AT = {STAMP} WHERE ORDER_DATE > '2026-09-01'")
    before = served.published_rows()
    fault(served, kind="fail_job", path="/mydatasource$", notes="the warehouse is suspended")
    with pytest.raises(DatasourceError) as caught:
        served.refresh()
    assert "the warehouse is suspended" in str(caught.value)
    assert "The datasource is as it was before" in str(caught.value)
    assert served.published_rows() == before
    refreshes_incrementally(served)


def test_killed_while_rows_are_missing_the_next_refresh_brings_them_back_first(served):
    served.sql(f"UPDATE MYTABLE SET NOTE = 'killed', UPDATED_AT = {STAMP} WHERE ORDER_DATE > '2026-09-01'")
    served.detect()
    # The package is published, and the refresh is told to wait.
    fault(served, kind="status", status=429, retry_after=300, times=9)
    asked = len(calls(served, "/refresh"))
    specs = served.folder / "extracts.yaml"
    specs.write_text(served.spec_text, encoding="utf-8")
    with (served.folder / "killed.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "tir_dagster_tests.orchestration.crash", str(specs)],
            stdout=log,
            stderr=log,
            env={**os.environ},
        )

    def is_asked() -> bool:
        assert running.poll() is None, (served.folder / "killed.log").read_text(encoding="utf-8")
        return len(calls(served, "/refresh")) > asked

    wait_for(is_asked, "the refresh that is told to wait", seconds=180, pause=0.2)
    running.kill()
    running.wait()
    clear_faults(served)
    assert sum(served.published_rows().values()) < sum(served.source_rows().values()), "the hole is there"
    refreshes_incrementally(served)


@pytest.mark.long
def test_a_source_that_changes_while_tableau_reads_is_equal_after_one_more_refresh(served):
    served.sql(f"UPDATE MYTABLE SET NOTE = 'first', UPDATED_AT = {STAMP} WHERE ORDER_DATE > '2026-10-01'")
    fault(served, kind="slow_job", path="/mydatasource$", seconds=3)
    changed = []

    def listen(line: str) -> None:
        if "waiting for job" in line and not changed:
            columns = "ORDER_ID, ORDER_DATE, CUSTOMER, QUANTITY, UPDATED_AT"
            served.sql(f"INSERT INTO MYTABLE ({columns}) SELECT 6000000, '2026-10-20'::DATE, 'meanwhile', 1, {STAMP}")
            changed.append(line)

    outcome = served.refresh(listen=listen)
    assert changed
    assert outcome.published
    served.sql("DELETE FROM MYTABLE WHERE ORDER_ID = 6000000")
    refreshes_incrementally(served)
