"""Large extracts: the memory of the process that takes rows out of one does not follow its size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tableauserverclient as TSC  # noqa: N812 - the name its own documentation uses

from benchmarks.package_report import STEPS, Way
from benchmarks.package_sample import BYTES_PER_ROW, PROJECT, SINCE, Sample, make_sample, publish_sample
from benchmarks.package_ways import Task, run_way
from tir_dagster_tests.conftest import Sandbox

MEGABYTE = 1_000_000
SMALL, LARGE = 8 * MEGABYTE, 64 * MEGABYTE


def repacked(sandbox: Sandbox, folder: Path, size: int) -> tuple[Sample, Way]:
    """Download, purge, pack and publish an extract of this size, over HTTP, in a process of its own."""
    name = f"large-{size}"
    sample = make_sample(folder, size // BYTES_PER_ROW)
    publish_sample(sample, [name], sandbox.env)
    return sample, run_way("ours", Task(PROJECT, name, SINCE.isoformat(), str(folder)), sandbox.env)


@pytest.fixture(scope="module")
def measured(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[Sample, Way]]]:
    yield {size: repacked(sandbox, tmp_path_factory.mktemp("large"), size) for size in (SMALL, LARGE)}
    with sandbox.tableau() as server:
        for item in [
            datasource for datasource in TSC.Pager(server.datasources) if datasource.name.startswith("large-")
        ]:
            server.datasources.delete(item.id)


def test_the_extracts_have_the_sizes_asked_for_and_the_newest_rows_leave_them(measured):
    for size, (sample, way) in measured.items():
        assert 0.7 * size < sample.hyper_bytes < 1.4 * size, "BYTES_PER_ROW is wrong"
        assert sample.package.stat().st_size > 0.4 * sample.hyper_bytes, "its rows compress away"
        assert 0 < way.rows == sample.remains.rows < sample.rows
        assert way.seconds.keys() == set(STEPS)
        assert way.bytes_published > 0.9 * sample.hyper_bytes, "stored, not deflated"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_memory_does_not_follow_the_size_of_the_extract(measured):
    small, large = measured[SMALL][1], measured[LARGE][1]
    assert small.peak is not None
    assert large.peak is not None
    grown = large.peak - small.peak
    assert grown < (LARGE - SMALL) / 2, f"{grown / MEGABYTE:.0f} MB more for {(LARGE - SMALL) / MEGABYTE:.0f} MB more"
    assert large.peak < 300 * MEGABYTE, f"{large.peak / MEGABYTE:.0f} MB"
    assert large.hyper_peak is not None
    assert large.hyper_peak > 50 * MEGABYTE, "Hyper's own process is counted apart"
