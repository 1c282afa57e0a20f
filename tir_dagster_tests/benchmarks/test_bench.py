from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks.command import conclude
from benchmarks.limits import build_limit, replace_limit, upload_limit
from benchmarks.package_report import STEPS, PackageReport, Way
from benchmarks.report import REST, Limit, Refresh, Report, staged
from benchmarks.run import change_mix
from tir_dagster.hyper.engine import connect
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SERVERS, SandboxHome

ROWS = 3_000
COMMAND = [sys.executable, "-m", "benchmarks"]


@dataclass(frozen=True)
class Ran:
    """One small bench, kept."""

    report: dict[str, Any]
    told: str
    folder: Path


def environment(folder: Path) -> dict[str, str]:
    """Temporary files go where the test can see them; servers and specs of somebody else must not be asked."""
    return {**os.environ, "TMPDIR": str(folder), "SNOWFLAKE_HOST": "unreachable.invalid", "TIR_SPECS": "elsewhere.yaml"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """In a process of its own, as people run it: it ends Spark, which other tests of this process share."""
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run(
        [*COMMAND, "--rows", str(ROWS), "--changed", "2", "--keep", "--json"],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (kept,) = folder.glob("tir-bench-*")
    try:
        yield Ran(json.loads(done.stdout), done.stderr, kept)
    finally:
        processes.stop(SandboxHome(kept / "home" / "sandbox"))


def stages(refresh: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in refresh["stages"]}


@pytest.mark.long
def test_the_published_extract_equals_the_source_after_both_refreshes(ran: Ran):
    assert ran.report["equal_by_key"]
    assert ran.report["equal_full"]
    assert ran.report["equal"]
    assert ran.report["slices"] == 25, "24 months and the orders without a date"


@pytest.mark.long
def test_two_per_cent_of_the_keys_change_and_only_they_are_replaced(ran: Ran):
    change, by_key, full = (ran.report[name] for name in ("change", "by_key", "full"))
    assert sum(change.values()) == ROWS * 2 // 100
    assert by_key["decision"] == "incremental"
    assert by_key["rows_purged"] == change["updates"] + change["moves"] + change["deletes"]
    assert by_key["rows_appended"] == change["updates"] + change["moves"] + change["inserts"]
    assert by_key["rows_appended"] <= by_key["rows_read"] < ROWS / 10
    assert full["decision"] == "full"
    assert full["rows_read"] == full["rows_appended"] == ROWS + change["inserts"] - change["deletes"]


@pytest.mark.long
def test_every_second_of_a_refresh_is_in_a_stage_or_named_as_the_rest(ran: Ran):
    for name in ("first", "full", "by_key"):
        refresh = ran.report[name]
        assert {"look", "survey", "spark", "detect", "apply", "verify", "publish", REST} <= stages(refresh).keys()
        assert sum(stage["seconds"] for stage in refresh["stages"]) == pytest.approx(refresh["seconds"], abs=0.05)
        assert stages(refresh)[REST]["seconds"] > 0, f"{name}: stages overlap or are counted twice"


@pytest.mark.long
def test_the_limits_did_the_same_work_as_the_stages_beside_them(ran: Ran):
    for name in ("full", "by_key"):
        refresh = ran.report[name]
        found = stages(refresh)
        assert {stage for stage, value in found.items() if value["limit"]} == {"detect", "apply", "publish"}
        # By key, a refresh reads more than the bare SELECT where the sample's stamps lie in the future.
        bare, read = found["detect"]["limit"]["rows"], refresh["rows_read"]
        assert bare == read if name == "full" else 0 < bare <= read
        assert found["apply"]["limit"]["rows"] == refresh["rows_appended"]
        assert all(value["ratio"] > 0 for value in found.values() if value["limit"])
        assert refresh["limits"] == pytest.approx(
            sum(value["limit"]["seconds"] for value in found.values() if value["limit"]), abs=0.001
        )


@pytest.mark.long
def test_the_published_bytes_are_those_of_the_whole_package(ran: Ran):
    assert ran.report["full"]["bytes_published"] > ran.report["file_bytes"] > 0
    assert {stage["name"] for stage in ran.report["scale"]} == {"plain copy", "packing"}


@pytest.mark.long
def test_progress_goes_to_standard_error(ran: Ran):
    for line in ("rows staged", "refresh by key: ", "the limits of the full refresh", f"kept: {ran.folder}"):
        assert line in ran.told


@pytest.mark.long
def test_the_servers_are_stopped_and_what_was_kept_is_complete(ran: Ran):
    states = processes.status(SandboxHome(ran.folder / "home" / "sandbox"))
    assert not any(state.running for state in states.values())
    assert (ran.folder / "bench.yaml").is_file()
    assert (ran.folder / "dagster" / "dagster.yaml").is_file()
    assert not list(ran.folder.glob("limits-*")), "what the limits wrote is removed at once"


def test_a_terminated_run_leaves_neither_servers_nor_files_behind(tmp_path: Path):
    running = subprocess.Popen(
        [*COMMAND, "--rows", "1000"], env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    assert any("rows staged" in line for line in running.stderr), "it ended before the sandbox was up"
    (folder,) = tmp_path.glob("tir-bench-*")
    pids = [state.pid for state in processes.status(SandboxHome(folder / "home" / "sandbox")).values()]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)
    assert running.returncode == 143
    assert list(tmp_path.iterdir()) == []
    assert len(pids) == len(SERVERS)
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("rows", "changed"), [(1_000, 0.1), (5_000, 1), (2_000_000, 1), (10_000, 40)])
def test_the_change_has_the_share_asked_for_and_something_of_every_kind(rows: int, changed: float):
    counts = asdict(change_mix(rows, changed))
    assert sum(counts.values()) == max(4, round(rows * changed / 100))
    assert all(count > 0 for count in counts.values())


def made_report() -> Report:
    limits = {"detect": Limit("bare SELECT", 2.0, 10)}
    refresh = Refresh("full", 10.0, staged({"publish": 1.0, "detect": 6.0, "novel": 0.5}, 10.0, limits), 10, 0, 10, 500)
    by_key = replace(refresh, decision="incremental", seconds=5.0, rows_read=1)
    return Report(
        rows=10,
        changed=1,
        seed=1,
        cores=2,
        load=0.5,
        change={"inserts": 1},
        first=refresh,
        by_key=by_key,
        full=refresh,
        file_bytes=400,
        scale=(),
        equal_by_key=True,
        equal_full=True,
        slices=3,
    )


def test_stages_come_in_the_order_of_the_flow_and_unknown_ones_are_not_dropped():
    found = made_report().full.stages
    assert [stage.name for stage in found] == ["detect", "publish", "novel", REST]
    assert found[0].ratio == 3.0
    assert found[-1].seconds == 2.5


def test_the_servers_part_of_a_stage_is_not_counted_twice():
    found = staged({"publish": 4.0, "publish_server": 3.0}, 10.0, {})
    assert [(stage.name, stage.seconds) for stage in found] == [("publish", 4.0), (REST, 6.0)]


def test_the_text_says_the_ratios_and_the_verdict():
    lines = made_report().as_text().splitlines()
    assert any(line.split()[:4] == ["detect", "6.00", "2.00", "3.0x"] for line in lines)
    assert any(line.split() == ["seconds", "5.0", "10.0", "0.50x"] for line in lines)
    assert lines[-1] == "Published full: equal to the source in all 3 slices"


def test_an_unequal_extract_is_printed_and_then_an_error(capsys: pytest.CaptureFixture[str]):
    wrong = replace(made_report(), equal_by_key=False)
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
        timeout=300,
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
