"""Random histories loaded by Tableau itself: whatever happened, the datasource equals its source as a bag."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tir_dagster.errors import DatasourceError
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.served import KEYS, Clock, Done, Served
from tir_dagster_tests.sandbox.tableau.helpers import Admin

# For each type of the increment key; `make soak` plays a hundred.
HISTORIES = int(os.environ.get("TIR_HISTORIES", "1"))
ROWS, VALUES = 8, 12
# Larger than every value of the histories.
BEYOND = 100
LOADING = "waiting for jobs on the server"


@pytest.fixture(scope="module")
def clock(sandbox: Sandbox) -> Iterator[Clock]:
    yield Clock.of_server(sandbox.tableau_url)
    Admin(sandbox.tableau_url).set(clock_offset_seconds=0.0)


@pytest.fixture(scope="module")
def all_served(sandbox, spark, clock, tmp_path_factory) -> Iterator[dict[str, Served]]:
    """One extract for each type of key, loaded once; histories go on from one another."""
    extracts = {}
    for key in KEYS:
        extracts[key] = Served(sandbox, spark, tmp_path_factory.mktemp(key), key, rows=ROWS, server_clock=clock)
        assert extracts[key].refresh().reason == "FIRST_LOAD"
        assert extracts[key].published_rows() == extracts[key].source_rows()
    yield extracts
    for served in extracts.values():
        served.close()


@pytest.fixture
def served(all_served) -> Served:
    """Of the type with the finest values; equal to its source, whatever the test before left."""
    extract = all_served["datetime"]
    extract.declare()
    extract.refresh()
    return extract


def fresh_keys(served: Served, *numbers: int) -> list[int]:
    """Rows of their own for a test, one for each of these values, loaded."""
    keys = [1000 * served.clock + at for at, _ in enumerate(numbers)]
    for key, number in zip(keys, numbers, strict=True):
        served.act(("insert", key, served.value(number), "'fresh'"))
    served.refresh()
    return keys


# The oracle: what the change between two states of the source must lead to.


def expected(before: Counter, after: Counter) -> tuple[str, str | None]:
    """Decision and reason, by the rows alone: (I, K, V, W)."""
    changed = {row[1] for row in (before - after) + (after - before)}
    if not changed:
        return "none", None
    purged, appended = (sum(n for row, n in rows.items() if row[1] in changed) for rows in (before, after))
    held = sum(before.values())
    if held and max(purged, appended) > held:
        return "full", "COST_THRESHOLD"
    if all(row[0] is None for row in before):
        return "full", "EXTRACT_EMPTIED"
    images = [row[0] for row in [*before, *after] if row[1] in changed]
    if None in images:
        return "full", "NULL_INCREMENT"
    remain = [row[0] for row in before if row[0] is not None and _order(row[0]) < min(map(_order, images))]
    return ("incremental", None) if remain else ("full", "EXTRACT_EMPTIED")


def _order(value: str) -> tuple[int, str]:
    """The order of values as `plain` writes them."""
    kind, text = value.split(" ", 1)
    return (int(text), "") if kind in ("int", "Decimal") else (0, text)


Step = tuple[Any, ...]


def steps_of(key: str) -> Any:
    numbers = st.integers(0, VALUES - 1)
    # Rarely none: one such change makes the whole refresh a full one.
    values = st.one_of(*[numbers.map(KEYS[key].value)] * 9, st.just("NULL"))
    keys = st.integers(0, ROWS + 2)
    texts = st.sampled_from(["NULL", "'a'", "'b'"])
    return st.one_of(
        st.tuples(st.just("insert"), keys, values, texts),
        st.tuples(st.just("insert"), keys, values, texts),
        st.tuples(st.just("update"), keys, texts),
        st.tuples(st.just("move"), keys, values),
        st.tuples(st.just("move"), keys, values),
        st.tuples(st.just("rekey"), keys, keys),
        st.tuples(st.just("touch"), keys),
        st.tuples(st.just("delete"), keys),
        st.tuples(st.just("delete from"), numbers.map(KEYS[key].value)),
    )


@st.composite
def histories(draw: Any) -> tuple[str, list[tuple[list[Step], list[Step]]]]:
    """A type of key, and rounds: what happens before a refresh, and what happens while Tableau loads."""
    key = draw(st.sampled_from(sorted(KEYS)))
    some = st.lists(steps_of(key), min_size=1, max_size=3)
    return key, draw(st.lists(st.tuples(some, st.one_of(st.just([]), some)), min_size=2, max_size=2))


def meanwhile(served: Served, steps: Sequence[Step]) -> tuple[Callable[[str], None], list[str]]:
    """A listener that changes the source once, when Tableau is about to load; and the lines on which it did."""
    heard: list[str] = []

    def listen(line: str) -> None:
        if line.startswith(LOADING) and not heard:
            heard.append(line)
            for step in steps:
                served.act(step)

    return listen, heard


def rests(served: Served) -> None:
    """The source is quiet: what is published equals it, and there is nothing left to do."""
    assert served.published_rows() == served.source_rows()
    assert served.refresh().decision == "none", "a second refresh found something to do"


@settings(
    max_examples=HISTORIES * len(KEYS),
    deadline=None,
    # Not shrunk: a smaller history that fails costs minutes; this one is printed as it is.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize="TIR_HISTORIES" not in os.environ,
)
@given(drawn=histories())
def test_what_tableau_loaded_equals_the_source_after_any_history(all_served, drawn):
    key, rounds = drawn
    served = all_served[key]
    for steps, interference in rounds:
        before = served.source_rows()
        for step in steps:
            served.act(step)
        after = served.source_rows()
        listen, heard = meanwhile(served, interference)
        done = served.refresh(listen=listen)
        note(f"{steps} while {interference}: {done.decision} {done.reason}")
        assert (done.decision, done.reason) == expected(before, after)
        if heard:
            note(f"and then: {served.refresh().reason}")
        rests(served)


# What only certain histories show


def lagging(served: Served, *steps: Step, mode: Any = "full") -> Done:
    """A refresh while which the source changed: confirmed, and the server is ahead."""
    listen, heard = meanwhile(served, steps)
    done = served.refresh(mode, listen=listen)
    assert heard, "nothing was loaded"
    assert done.confirmation is not None
    assert done.confirmation.lag is not None
    return done


@pytest.mark.long
def test_what_came_and_went_while_tableau_loaded_everything_goes(served):
    done = lagging(served, ("insert", -1, served.value(BEYOND), "'meanwhile'"))
    assert done.reason == "REQUESTED"
    served.act(("delete", -1))
    assert served.published_rows() != served.source_rows()
    follow = served.refresh()
    assert (follow.decision, follow.reason) == ("incremental", None), "no key differs, and yet there is something to do"
    rests(served)


@pytest.mark.long
def test_what_came_and_went_without_an_increment_value_needs_everything_again(served):
    lagging(served, ("insert", -1, "NULL", "'meanwhile'"))
    served.act(("delete", -1))
    follow = served.refresh()
    assert (follow.decision, follow.reason) == ("full", "NULL_INCREMENT")
    rests(served)


@pytest.mark.long
def test_what_came_and_went_below_the_changed_rows_while_tableau_read_goes(served):
    fresh_keys(served, BEYOND)
    (upper,) = fresh_keys(served, BEYOND + 8)
    served.act(("update", upper, "'changed'"))
    # Tableau reads beyond the largest value that remains, which is smaller than the one from which on was purged.
    lagging(served, ("insert", -1, served.value(BEYOND + 4), "'meanwhile'"), mode="changes")
    served.act(("delete", -1))
    follow = served.refresh()
    assert (follow.decision, follow.reason) == ("incremental", None)
    rests(served)


@pytest.mark.long
def test_a_source_that_never_rests_is_followed_without_an_error(served):
    (key,) = fresh_keys(served, BEYOND)
    lagging(served, ("insert", -1, "NULL", "'one'"))
    for number in range(2):
        done = lagging(served, ("update", key, f"'{number}'"), mode="changes")
    assert done.reason is None, "the row without a value is settled, and no reason to load everything again"
    served.act(("delete", -1))
    served.refresh()
    rests(served)


@pytest.mark.long
def test_a_lag_that_ends_in_a_hole_is_mended_from_the_kept_version(served):
    """Killed while rows are missing, and the server had shown later rows than the version that is put back."""
    (key,) = fresh_keys(served, BEYOND)
    served.act(("update", key, "'changed'"))
    lagging(served, ("insert", -1, served.value(2 * BEYOND), "'meanwhile'"), mode="changes")
    served.act(("delete", -1))
    served.act(("update", key, "'again'"))
    admin = Admin(served.url)

    def die(line: str) -> None:
        if line.startswith(LOADING):
            # Nothing can be put back any more, as if the process had died.
            admin.fault("status", method="POST", path="/(datasources|fileUploads)", status=500, times=50)
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        served.refresh(listen=die)
    admin.clear_faults()
    assert sum(served.published_rows().values()) < sum(served.source_rows().values()), "the hole is there"
    assert served.refresh().reason is None
    assert "the datasource is whole again" in served.lines
    rests(served)


def test_a_refresh_that_tableau_ran_itself_is_compared_and_not_repeated(served):
    served.act(("insert", -2, served.value(3 * BEYOND), "'new'"))
    with served.sandbox.tableau() as server:
        server.jobs.wait_for_job(server.datasources.refresh(served.datasource_id, True), timeout=60)
    assert served.refresh().reason == "FOREIGN_PUBLISH"
    assert not [line for line in served.lines if line.startswith(LOADING)], "its rows are what they must be"
    rests(served)


def test_a_datasource_that_lacks_only_new_rows_is_loaded_from_there_at_first(served):
    served.act(("insert", -3, served.value(4 * BEYOND), "'new'"))
    served.confirmed = None
    shutil.rmtree(served.refresher.versions.folder)
    assert served.refresh().reason == "FIRST_LOAD"
    assert [line for line in served.lines if line.startswith(f"{LOADING}: incremental")]
    assert not [line for line in served.lines if line.startswith("publishing")], "nobody saw a hole"
    rests(served)


@pytest.mark.long
def test_with_incremental_only_tableau_is_not_asked_for_everything(served):
    served.declare(settings={"policy": "incremental_only"})
    before = served.published_rows()
    served.act(("insert", -4, "NULL", "'no date'"))
    with pytest.raises(DatasourceError, match=r"everything, because .*NULL_INCREMENT.*incremental_only"):
        served.refresh()
    assert served.published_rows() == before
    assert served.refresh("full").reason == "REQUESTED"
    rests(served)


@pytest.mark.long
def test_a_table_without_a_row_key_and_never_extracted_is_loaded_and_then_followed_by_slices(
    sandbox, spark, clock, tmp_path
):
    served = Served(sandbox, spark, tmp_path, settings={"row_key": []}, extracted=False, server_clock=clock)
    assert served.refresh().reason == "FIRST_LOAD"
    assert served.published_rows() == served.source_rows()
    served.act(("move", 20, served.value(7)))
    served.act(("delete", 23))
    assert served.refresh().decision == "incremental"
    rests(served)
    served.close()
