from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks.command import bench, conclude
from benchmarks.docs import (
    DOCS,
    MEASURING,
    NOT_YET,
    README,
    filled,
    goals_excerpt,
    goals_page,
    read_growth,
    read_stages,
    read_starts,
    stages_excerpt,
)
from benchmarks.goals import goals_table
from benchmarks.limits import build_limit, replace_limit, upload_limit
from benchmarks.package_report import STEPS, PackageReport, Way
from benchmarks.report import DELIVERIES, Case, Limit, Report, Stage, apart
from benchmarks.run import CaseStore, Done, Wanted, change_mix, measure_by_key
from benchmarks.starts import BY_SPARK, USUAL, Starts
from tir_dagster.cli.refresh import RefreshOutcome
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import connect
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SERVERS, SandboxHome
from tir_dagster.sandbox.sample import Mix

ROWS = 3_000
SETTING = {
    "machine": {"system": "Linux", "processor": "a processor", "cores": 2, "memory_gb": 24, "load": 0.5},
    "versions": {"Python": "3.11"},
    "date": "2026-11-18 20:00 UTC",
}
COMMAND = [sys.executable, "-m", "benchmarks"]


KINDS = ("full", "by_key", "by_key_1000")
FIELDS = {"refresh", "detector", "delivery", "stage", "seconds", "limit", "rows", "bytes", "waited_for"}


@dataclass(frozen=True)
class Ran:
    """One small bench, kept."""

    report: dict[str, Any]
    told: str
    folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)

    def stages(self, refresh: str, delivery: str) -> dict[str, dict[str, Any]]:
        return {
            entry["stage"]: entry
            for entry in self.entries
            if (entry["refresh"], entry["delivery"]) == (refresh, delivery)
        }


def environment(folder: Path) -> dict[str, str]:
    """Temporary files go where the test can see them; servers and specs of somebody else must not be asked."""
    return {**os.environ, "TMPDIR": str(folder), "SNOWFLAKE_HOST": "unreachable.invalid", "TIR_SPECS": "elsewhere.yaml"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """In a process of its own, as people run it: it ends Spark, which other tests of this process share."""
    folder, written = tmp_path_factory.mktemp("bench"), tmp_path_factory.mktemp("written") / "build" / "bench.json"
    few = ["--rows", str(ROWS), "--changed", "2", "--detector", "watermark", "--output", str(written)]
    done = subprocess.run(
        [*COMMAND, *few, "--keep", "--json"],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (kept,) = folder.glob("tir-bench-*")
    try:
        yield Ran(json.loads(done.stdout), done.stderr, kept, json.loads(written.read_text(encoding="utf-8")))
    finally:
        processes.stop(SandboxHome(kept / "home" / "sandbox"))


@pytest.mark.long
def test_the_published_extracts_equal_the_source_after_all_refreshes(ran: Ran):
    assert ran.report["equal"]
    assert ran.report["slices"] == 25, "24 months and the orders without a date"


@pytest.mark.long
def test_the_file_lists_every_stage_of_every_refresh_and_its_total(ran: Ran):
    assert ran.entries == ran.report["entries"]
    assert {(entry["refresh"], entry["delivery"]) for entry in ran.entries} == {
        (kind, delivery) for kind in KINDS for delivery in DELIVERIES
    }
    assert {entry["detector"] for entry in ran.entries} == {"watermark"}
    for entry in ran.entries:
        assert entry.keys() - {"memory", "calls"} == FIELDS
    for kind, delivery in product(KINDS, DELIVERIES):
        found = ran.stages(kind, delivery)
        # Spark is not asked for so few rows.
        assert [name for name in found if name != "spark"] == [
            *("lease", "look", "survey", "quiet period", "detect", "shell", "apply", "verify", "publish"),
            *("rest", "server", "total"),
        ]
        ours = [entry["seconds"] for name, entry in found.items() if name not in ("server", "quiet period", "total")]
        assert sum(ours) == pytest.approx(found["total"]["seconds"], abs=0.05)
        assert found["rest"]["seconds"] > 0, f"{kind}, {delivery}: stages overlap or are counted twice"


@pytest.mark.long
def test_two_per_cent_of_the_keys_change_and_only_they_are_replaced(ran: Ran):
    mix = change_mix(ROWS * 2 // 100)
    for delivery in DELIVERIES:
        moved = moved_rows(mix)
        found = ran.stages("by_key", delivery)
        assert found["total"]["rows"] == found["apply"]["rows"] == moved
        # The rows of the change, a key alone for each delete, and what has the watermark's last value.
        assert moved / 2 <= found["detect"]["rows"] < ROWS / 10
        assert ran.stages("full", delivery)["detect"]["rows"] == ROWS
        few = change_mix(ROWS // 10)
        assert ran.stages("by_key_1000", delivery)["total"]["rows"] == moved_rows(few)


def moved_rows(mix: Mix) -> int:
    """Rows purged and rows appended; what is updated or moved is both."""
    return mix.deletes + mix.inserts + 2 * (mix.updates + mix.moves)


@pytest.mark.long
def test_a_patch_sends_the_change_and_a_republish_the_extract(ran: Ran):
    sent = {delivery: ran.stages("by_key", delivery)["publish"]["bytes"] for delivery in DELIVERIES}
    assert 0 < sent["patch"] < sent["republish"]


@pytest.mark.long
def test_the_limits_did_the_same_work_as_the_stages_beside_them(ran: Ran):
    for kind, delivery in product(KINDS, DELIVERIES):
        found = ran.stages(kind, delivery)
        beside = {name for name, entry in found.items() if entry["limit"] is not None}
        assert beside == {"detect", "apply", "publish", "total"}
        parts = [found[name]["limit"] for name in ("detect", "apply", "publish")]
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(found["total"]["limit"], abs=0.001)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_the_memory_of_each_process_is_told_apart(ran: Ran):
    for kind, delivery in product(KINDS, DELIVERIES):
        memory = ran.stages(kind, delivery)["total"]["memory"]
        assert {"python", "hyper", "spark"} <= memory.keys()
        assert all(20e6 < memory[name] < 4e9 for name in ("python", "hyper", "spark"))


@pytest.mark.long
def test_the_servers_own_work_is_apart_and_its_calls_are_counted(ran: Ran):
    for kind, delivery in product(KINDS, DELIVERIES):
        found = ran.stages(kind, delivery)
        assert found["server"]["seconds"] > 0
        assert found["total"]["calls"].keys() == {"warehouse", "Tableau"}
        assert all(count > 0 for count in found["total"]["calls"].values())


@pytest.mark.long
def test_every_goal_that_can_be_measured_is_told(ran: Ran):
    told = " ".join(goal["what"] for goal in ran.report["goals"])
    for what in (
        "by key, republish",
        "faster than full",
        "full, republish",
        "1,000 keys, republish",
        "1,000 keys, patch",
    ):
        assert what in told


@pytest.mark.long
def test_progress_goes_to_standard_error(ran: Ran):
    for line in ("rows staged", "by_key, watermark, patch: ", "the limits of the full refresh", f"kept: {ran.folder}"):
        assert line in ran.told


@pytest.mark.long
def test_the_servers_are_stopped_and_what_was_kept_is_complete(ran: Ran):
    states = processes.status(SandboxHome(ran.folder / "home" / "sandbox"))
    assert not any(state.running for state in states.values())
    assert (ran.folder / "patch.yaml").is_file()
    assert (ran.folder / "dagster" / "dagster.yaml").is_file()
    assert not list(ran.folder.glob("limits-*")), "what the limits wrote is removed at once"


def test_a_terminated_run_leaves_neither_servers_nor_files_behind(tmp_path: Path):
    running = subprocess.Popen(
        [*COMMAND, "--rows", "1000", "--output", str(tmp_path / "written" / "bench.json")],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert any("rows staged" in line for line in running.stderr), "it ended before the sandbox was up"
    (folder,) = tmp_path.glob("tir-bench-*")
    pids = [state.pid for state in processes.status(SandboxHome(folder / "home" / "sandbox")).values()]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)
    assert running.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["written"], "what was measured is kept"
    assert len(pids) == len(SERVERS)
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("rows", "changed", "keys"), [(1_000, 0.1, (4, 100)), (5_000, 1, (50, 500)), (2_000_000, 1, (20_000, 1_000))]
)
def test_the_changes_have_the_size_asked_for_and_something_of_every_kind(
    rows: int, changed: float, keys: tuple[int, int]
):
    wanted = Wanted(rows, changed, seed=1).keys
    assert tuple(wanted.values()) == keys
    for count in keys:
        counts = asdict(change_mix(count))
        assert sum(counts.values()) == count
        assert all(part > 0 for part in counts.values())


def made_case(refresh: str, delivery: str, seconds: float, *, detector: str = "watermark") -> Case:
    stages = [
        Stage("survey", 3.0, waited_for={"quiet period": 2.0, "warehouse": 0.5}),
        Stage("detect", seconds, 10, 100, {"warehouse": 1.0}, Limit("bare SELECT", 2.0, 10)),
        Stage("publish", 4.0, 10, 500, {"Tableau": 3.0}, Limit("upload", 0.5)),
    ]
    return Case(
        refresh,
        detector,
        delivery,
        apart(stages, server=2.5),
        server=2.5,
        rows_purged=1,
        rows_appended=2,
        memory={"python": 300_000_000},
        calls={"warehouse": 7},
    )


def made_report() -> Report:
    return Report(
        rows=10,
        changed=1,
        seed=1,
        cores=2,
        load=0.5,
        cases=(
            made_case("full", "republish", 100.0),
            made_case("by_key", "republish", 6.0),
            made_case("by_key", "republish", 8.0, detector="feed"),
            made_case("by_key_1000", "patch", 1.5),
        ),
        file_bytes=400,
        copy=Limit("a plain copy", 0.25),
        equal_by_delivery={"republish": True, "patch": True},
        slices=3,
    )


def test_the_quiet_period_and_the_servers_work_are_apart_from_the_stages():
    case = made_case("by_key", "patch", 6.0)
    assert {stage.name: stage.seconds for stage in case.stages} == {
        "survey": 1.0,
        "quiet period": 2.0,
        "detect": 6.0,
        "publish": 1.5,
    }
    assert (case.seconds, case.limits) == (8.5, 2.5), "the quiet period is in no total"
    assert case.own == 8.5 - 1.5, "without the warehouse's 1.5 s"
    assert case.beside_limits == 7.0 + 2.0, "with a bare SELECT instead"


def test_the_server_is_never_said_to_have_worked_longer_than_was_waited_for_it():
    (publish,) = apart([Stage("publish", 4.0, waited_for={"Tableau": 3.0})], server=9.0)
    assert publish.seconds == 1.0


def test_goals_are_told_with_what_was_reached():
    goals = {goal.what: goal for goal in made_report().goals}
    total = goals["by key, republish, watermark: ours and a bare SELECT, to all limits"]
    assert (total.reached, total.goal, total.met) == (9.0 / 2.5, 4, True)
    faster = goals["by key, republish, watermark: faster than full, with the warehouse"]
    assert (faster.reached, faster.met) == (102.5 / 8.5, True)
    assert goals["by key, republish, watermark: faster than full, our own"].reached == (102.5 - 1.5) / (8.5 - 1.5)
    assert goals["by key, republish, feed: faster than full, our own"].met
    assert goals["1,000 keys, patch, watermark: our own"].reached == 1.5 + 1.0 + 1.5 - 1.5
    assert goals["peak memory of our Python process"].reached == 300


def test_the_text_shows_detectors_side_by_side_and_the_verdict():
    lines = made_report().as_text().splitlines()
    assert any(line.split() == ["stage", "watermark", "feed", "limit", "the", "limit", "is"] for line in lines)
    assert any(line.split()[:4] == ["detect", "6.00", "8.00", "2.00"] for line in lines)
    assert any(line.split()[:4] == ["total", "8.50", "10.50", "2.50"] for line in lines)
    assert any("faster than full" in line and line.endswith("  met") for line in lines)
    assert lines[-1] == "Published by patch: equal to the source in all 3 slices"


def test_the_page_on_measuring_shows_the_refresh_by_key():
    shown = stages_excerpt(made_report())
    assert "make bench ROWS=10" in shown
    assert "    Refresh by key, republish: 1 rows purged, 2 appended" in shown
    assert "Full refresh" not in shown


def test_a_report_is_read_as_it_was_written():
    report = made_report()
    assert Report.from_dict(json.loads(json.dumps(asdict(report)))) == report


# What is kept of a run that ended early


WANTED = Wanted(10, 1, seed=1)


def test_refreshes_of_a_run_that_ended_early_are_kept(tmp_path: Path):
    file = tmp_path / "build" / "bench.jsonl"
    CaseStore(file, WANTED, SETTING, resume=False).add(made_case("by_key", "patch", 6.0))
    with file.open("a", encoding="utf-8") as opened:
        opened.write('{"refresh": "by_k')  # killed while it wrote
    resumed = CaseStore(file, WANTED, {**SETTING, "date": "later"}, resume=True)
    assert resumed.of("by_key") == [made_case("by_key", "patch", 6.0)]
    assert resumed.setting == SETTING, "the run's own machine and date"
    resumed.add(made_case("by_key", "patch", 5.0))
    assert resumed.of("by_key") == [made_case("by_key", "patch", 5.0)], "measured again, with its step"
    with pytest.raises(TirError, match="asked for something else"):
        CaseStore(file, replace(WANTED, rows=20), SETTING, resume=True)
    assert CaseStore(file, WANTED, SETTING, resume=False).cases == {}


class PlayedBench:
    """Tells what it was asked to do; a refresh ends the run where `ends_at` says so."""

    def __init__(self, ends_at: int = 0) -> None:
        self.told: list[str] = []
        self._left = ends_at

    def change(self, keys: int) -> None:
        self.told.append(f"change {keys}")

    def refresh(self, refresh: str, delivery: str, detector: str) -> Done:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self.told.append(f"{refresh} {detector} {delivery}")
        outcome = RefreshOutcome("bench", "changes", decision="incremental")
        return Done(made_case(refresh, delivery, 6.0, detector=detector), outcome, None, None)

    def key_limits(self, done: Done) -> dict[str, Limit]:
        self.told.append("key limits")
        return {"detect": Limit("bare SELECT", 1.0)}

    def upload_limit(self, done: Done) -> Limit:
        return Limit("upload", 1.0)


def play(bench: PlayedBench, folder: Path, *, resume: bool) -> CaseStore:
    wanted = replace(WANTED, rows=1_000, detectors=("watermark", "feed"))
    store = CaseStore(folder / "bench.jsonl", wanted, SETTING, resume=resume)
    measure_by_key(bench, wanted, store, bench.told.append)  # type: ignore[arg-type]
    return store


def test_a_resumed_run_changes_and_measures_only_what_is_missing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        play(PlayedBench(ends_at=4), tmp_path, resume=False)
    bench = PlayedBench()
    store = play(bench, tmp_path, resume=True)
    # The second delivery of a change is missing: both follow a new one.
    assert bench.told[:3] == ["change 10", "by_key feed republish", "by_key feed patch"]
    assert [line for line in bench.told if "change" in line] == ["change 10", "change 100", "change 100"]
    assert bench.told.count("key limits") == 1, "those of the change of one per cent are known"
    assert len(store.cases) == 2 * 2 * 2
    assert all({"detect", "publish"} == case.limits_by_stage.keys() for case in store.cases.values())
    assert any("2 refreshes by key are measured, 4 are left: about" in line for line in bench.told)


# Goals


def made_starts() -> Starts:
    seconds = {USUAL: (4.0, 9.0, 5.0), BY_SPARK: (8.0, 9.0, 7.0)}
    warm = dict.fromkeys(seconds, (2.0, 4.0, 3.0))
    return Starts(200_000, 1_000, cold=seconds, warm=warm, tick_statements=1, equal=True, **SETTING)


def test_goals_of_starts_are_told_by_medians():
    starts = made_starts()
    assert [(goal.reached, goal.met) for goal in starts.goals] == [(5 / 3, True), (8 / 3, False), (1, True)]
    assert "all rows by the Spark Connect server" in starts.as_text()
    assert Starts.from_dict(json.loads(json.dumps(starts.as_dict()))).as_text() == starts.as_text()


def test_the_table_of_goals_names_the_run_of_each_and_the_short_one_one_detector():
    table = goals_table(made_report(), None, made_starts())
    assert "| **10 orders, 1 % of the keys changed** | | | |" in table
    assert "| by key, republish, watermark: faster than full, our own | 14.43 x | ≥ 8.00 x | met |" in table
    assert "| statements of a sensor's tick without a change | 1.00 | ≤ 1.00 | met |" in table
    assert "NOT met" in table
    short = goals_table(made_report(), None, made_starts(), short=True)
    assert ("republish, feed:" in table, "republish, feed:" in short) == (True, False)
    assert short.count("watermark") == table.count("watermark")


def test_without_a_run_there_are_no_goals():
    assert goals_excerpt(None, None, None) == NOT_YET
    assert goals_table(made_report(), None, None, short=True) in goals_excerpt(made_report(), None, None)


def test_the_published_goals_and_stages_are_those_of_the_recorded_runs():
    report, recorded = read_stages(), (read_stages(), read_growth(), read_starts())
    readme = README.read_text(encoding="utf-8")
    assert filled(readme, "goals", goals_excerpt(*recorded)) == readme
    assert (DOCS / "goals.md").is_file() == any(recorded)
    assert not any(recorded) or (DOCS / "goals.md").read_text(encoding="utf-8") == goals_page(*recorded)
    if report is not None:
        page = MEASURING.read_text(encoding="utf-8")
        assert report.equal
        assert filled(page, "stages", stages_excerpt(report)) == page


def test_sizes_that_are_no_numbers_are_refused():
    for wrong in ("many", "1000,x", "10"):
        done = CliRunner().invoke(bench, ["--growth", wrong])
        assert (done.exit_code, "--growth" in done.stderr) == (2, True)


def test_an_unequal_extract_is_printed_and_then_an_error(capsys: pytest.CaptureFixture[str]):
    wrong = replace(made_report(), equal_by_delivery={"patch": False})
    with pytest.raises(click.ClickException) as failure:
        conclude(wrong, as_json=True)
    assert failure.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One small bench of packages, in a process of its own."""
    folder = tmp_path_factory.mktemp("packages")
    done = subprocess.run(
        [*COMMAND, "package", "--gb", "0.005", "--json"],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Ran(json.loads(done.stdout), done.stderr, folder)


def test_both_ways_publish_what_has_to_remain_and_every_step_is_timed(packaged: Ran):
    report = packaged.report
    assert report["equal"]
    for way in (report["ours"], report["plain"]):
        assert list(way["seconds"]) == list(STEPS)
        assert all(seconds > 0 for seconds in way["seconds"].values())
        assert way["rows"] == report["rows"] - report["purged"]
        assert way["total"] == pytest.approx(sum(way["seconds"].values()), abs=0.01)
    assert 0.03 < report["purged"] / report["rows"] < 0.05, "30 days of 730"
    assert report["increment_value"] == "#2025-11-30#"


def test_ours_publishes_stored_bytes_and_the_plain_way_deflated_ones(packaged: Ran):
    report = packaged.report
    assert report["ours"]["bytes_published"] > 0.9 * report["hyper_bytes"]
    assert report["plain"]["bytes_published"] < 0.8 * report["hyper_bytes"]
    assert report["package_bytes"] < 0.8 * report["hyper_bytes"], "what both begin with is deflated"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_the_memory_of_each_process_is_told_apart_from_hypers(packaged: Ran):
    for way in (packaged.report["ours"], packaged.report["plain"]):
        assert 20e6 < way["before"] <= way["peak"] < 300e6
        assert way["hyper_peak"] > 20e6


def test_a_bench_of_packages_leaves_nothing_behind_and_tells_its_progress(packaged: Ran):
    assert list(packaged.folder.iterdir()) == []
    for line in ("making an extract of", "publishing it twice", "ours: download", "plain: download"):
        assert line in packaged.told


def made_package_report() -> PackageReport:
    ours = Way(dict.fromkeys(STEPS, 1.0), 90, 1_000_000_000, 150_000_000, 100_000_000, 400_000_000)
    plain = Way({**ours.seconds, "pack": 21.0}, 90, 600_000_000, 80_000_000, 60_000_000, 400_000_000)
    return PackageReport(100, 1_000_000_000, 600_000_000, 10, "#2025-11-30#", 2, 0.1, ours, plain, equal=True)


def test_the_text_of_packages_says_steps_memory_and_where_deflating_would_pay():
    text = made_package_report().as_text()
    lines = [line.split() for line in text.splitlines()]
    assert ["pack", "1.00", "21.00", "0.05x"] in lines
    assert ["seconds", "4.0", "24.0", "0.17x"] in lines
    assert ["MB", "published", "1,000.0", "600.0", "1.67x"] in lines
    assert ["peak", "MB", "of", "the", "process", "150", "80", "1.88x"] in lines
    # 400 MB more in 20 s less.
    assert "Deflating would pay over less than 160 Mbit/s." in text
    assert text.endswith("Published by both: 90 rows up to #2025-11-30#: equal to what had to remain")


def test_where_memory_is_not_counted_the_text_says_so():
    made = made_package_report()
    uncounted = [replace(way, peak=None, before=None, hyper_peak=None) for way in (made.ours, made.plain)]
    assert "Memory is counted on Linux only." in replace(made, ours=uncounted[0], plain=uncounted[1]).as_text()
    assert "Linux" not in made.as_text()


def test_a_package_that_is_not_what_had_to_remain_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(click.ClickException):
        conclude(replace(made_package_report(), equal=False), as_json=False)
    assert "NOT what had to remain" in capsys.readouterr().out


def hyper_file(path: Path, rows: list[tuple[int, int]]) -> Path:
    """An extract of a key and a watermark."""
    values = ", ".join(f"({key}, timestamp '2026-01-01 00:00:{second:02d}')" for key, second in rows)
    with connect(path, create=True) as connection:
        connection.execute_command('CREATE SCHEMA "Extract"')
        connection.execute_command('CREATE TABLE "Extract"."Extract" ("K" BIGINT NOT NULL, "W" TIMESTAMP)')
        connection.execute_command(f'INSERT INTO "Extract"."Extract" VALUES {values}')
    return path


def rows_of(path: Path) -> list[tuple[int, int]]:
    with connect(path) as connection:
        found = connection.execute_list_query(
            'SELECT "K", EXTRACT(SECOND FROM "W") FROM "Extract"."Extract" ORDER BY 1'
        )
    return [(int(key), int(second)) for key, second in found]


def test_the_bare_replacement_really_turns_one_extract_into_the_other(tmp_path: Path):
    before = hyper_file(tmp_path / "v1.hyper", [(1, 1), (2, 2), (3, 3)])
    after = hyper_file(tmp_path / "v2.hyper", [(1, 1), (3, 5), (4, 5)])
    folder = tmp_path / "scratch"
    folder.mkdir()
    limit = replace_limit(before, after, folder, key="K", watermark="W")
    assert limit.rows == 2
    assert rows_of(folder / "replaced.hyper") == rows_of(after)


def test_the_bare_build_really_holds_all_rows(tmp_path: Path):
    extract = hyper_file(tmp_path / "v1.hyper", [(1, 1), (2, 2)])
    folder = tmp_path / "scratch"
    folder.mkdir()
    assert build_limit(extract, folder).rows == 2
    assert rows_of(folder / "built.hyper") == [(1, 1), (2, 2)]


def test_the_bare_upload_sends_every_byte(tmp_path: Path):
    package = tmp_path / "package.tdsx"
    package.write_bytes(b"x" * 3_000_001)
    assert upload_limit(package).seconds > 0
