from __future__ import annotations

import threading

import pytest

from tir_dagster.measuring import moved, waiting_for
from tir_dagster.refresh.context import Stages
from tir_dagster.refresh.profile import REST, Profile, StageProfile, profile_table, whole


def test_a_stage_collects_what_it_moves_and_for_whom_it_waits():
    profile = Profile()
    with profile.timed("detect"):
        with waiting_for("warehouse"):
            pass
        moved(rows=3, bytes=100)
        moved(rows=4)
    (stage,) = profile.stages
    assert (stage.stage, stage.rows, stage.bytes) == ("detect", 7, 100)
    assert stage.waited_for.keys() == {"warehouse"}
    assert 0 < stage.waited_for["warehouse"] <= stage.seconds


def test_an_inner_wait_counts_for_its_own_and_not_for_the_outer_one(monkeypatch: pytest.MonkeyPatch):
    # Begin of the stage, of the outer wait, of the inner one; their ends in reverse.
    clock = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    profile = Profile()
    with profile.timed("detect"), waiting_for("Hyper"), waiting_for("Spark"):
        pass
    (stage,) = profile.stages
    assert stage.waited_for == {"Spark": 3.0, "Hyper": 5.0}
    assert stage.seconds == 10.0


def test_a_stage_inside_another_one_counts_by_itself_alone(monkeypatch: pytest.MonkeyPatch):
    # Begin of detect, of its wait, of spark (twice: its own, and what detect leaves out), of spark's wait; ends in reverse.
    clock = iter([0.0, 1.0, 2.0, 2.0, 3.0, 6.0, 7.0, 7.0, 9.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    profile = Profile()
    with profile.timed("detect"), waiting_for("Hyper"), profile.timed("spark"), waiting_for("Spark"):
        pass
    spark, detect = profile.stages
    assert (spark.stage, spark.seconds, spark.waited_for) == ("spark", 5.0, {"Spark": 3.0})
    assert (detect.stage, detect.seconds, detect.waited_for) == ("detect", 5.0, {"Hyper": 3.0})


def test_outside_of_a_stage_and_in_other_threads_nothing_is_counted():
    profile = Profile()
    moved(rows=1)
    with waiting_for("lease"):
        pass

    def beside() -> None:
        moved(rows=1)
        with waiting_for("Tableau"):
            pass

    with profile.timed("look"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    (stage,) = profile.stages
    assert (stage.rows, stage.bytes, stage.waited_for) == (None, None, {})


def test_a_stage_that_fails_is_counted_too():
    stages = Stages()
    with pytest.raises(ValueError, match="no"), stages.timed("publish"):
        raise ValueError("no")
    assert [stage.stage for stage in stages.profile.stages] == ["publish"]
    assert stages.seconds.keys() == {"publish"}


def test_a_stage_that_runs_again_is_one_stage_of_the_whole():
    stages = Stages()
    with stages.timed("look"), waiting_for("Tableau"):
        moved(rows=1)
    with stages.timed("publish"):
        pass
    with stages.timed("look"), waiting_for("Tableau"):
        moved(rows=2)
    assert [(stage.stage, stage.rows) for stage in stages.profile.stages] == [("look", 3), ("publish", None)]
    together = whole(stages.profile.ended, seconds=60.0)
    assert [stage.stage for stage in together] == ["look", "publish", REST]
    assert sum(stage.seconds for stage in together) == pytest.approx(60.0)
    assert stages.seconds.keys() == {"look", "publish"}


def test_the_table_names_the_longest_wait_first_and_leaves_out_what_nobody_would_notice():
    stages = [
        StageProfile("detect", 2.5, 1_000, 20_000, {"warehouse": 0.5, "Spark": 1.25, "Hyper": 0.001}),
        StageProfile(REST, 1.0),
    ]
    head, detect, rest = profile_table(stages).splitlines()
    assert head.split() == ["stage", "seconds", "rows", "bytes", "waited", "for"]
    assert detect.split(maxsplit=4) == ["detect", "2.50", "1,000", "20,000", "Spark 1.25 s, warehouse 0.50 s"]
    assert rest.split() == ["Dagster", "and", "the", "rest", "1.00", "-", "-"]


def test_json_has_milliseconds_and_waits_that_anybody_would_notice():
    stage = StageProfile("survey", 2.34567, waited_for={"quiet period": 2.25049, "Hyper": 0.0001})
    assert stage.as_dict() == {
        "stage": "survey",
        "seconds": 2.346,
        "rows": None,
        "bytes": None,
        "waited_for": {"quiet period": 2.25},
    }
