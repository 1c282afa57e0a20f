"""The run of the bench of packages: a sandbox of its own, one large package twice on it, and each way on one of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.package_report import PackageReport, Way
from benchmarks.package_sample import (
    BYTES_PER_ROW,
    PROJECT,
    SINCE,
    Content,
    Sample,
    content_of,
    make_sample,
    publish_sample,
)
from benchmarks.package_ways import WAYS, Task, run_way
from benchmarks.place import own_sandbox
from tir_dagster.hyper.engine import close_shared_engine
from tir_dagster.hyper.package.package import read_package
from tir_dagster.refresh.datasource import fetch_shell
from tir_dagster.tableau.access import TableauAccess
from tir_dagster.tableau.client import TableauClient
from tir_dagster.tableau.datasources import find_datasource, find_project

Say = Callable[[str], None]


def run_package_bench(folder: Path, *, size: int, progress: Say) -> PackageReport:
    """Measure both ways on an extract of about so many bytes; the sandbox is stopped at the end."""
    load = os.getloadavg()[0]
    with own_sandbox(progress) as env:
        rows = max(size // BYTES_PER_ROW, 1_000)
        progress(f"making an extract of {rows:,} rows")
        sample = make_sample(folder, rows)
        progress(f"publishing it twice, {sample.package.stat().st_size / 1e6:,.0f} MB each")
        publish_sample(sample, list(WAYS), env)
        close_shared_engine()
        ways = {name: measure(name, folder, env, progress) for name in WAYS}
        progress("comparing what both have published")
        published_rows = [_published(name, folder / "look", env) for name in WAYS]
    return _report(sample, ways, equal=all(rows == sample.remains for rows in published_rows), load=load)


def measure(name: str, folder: Path, env: Mapping[str, str], progress: Say) -> Way:
    """One way, beginning with a disk that has nothing left to write."""
    work = folder / name
    work.mkdir()
    os.sync()
    progress(f"{name}: download, purge, pack, publish")
    try:
        return run_way(name, Task(PROJECT, name, SINCE.isoformat(), str(work)), env)
    finally:
        shutil.rmtree(work)


def _published(name: str, folder: Path, env: Mapping[str, str]) -> Content | None:
    """What anybody would download now; None where its document says another value than its rows."""
    with TableauClient(TableauAccess.from_environment(env)) as client:
        datasource = find_datasource(client, project=find_project(client, PROJECT), name=name)
        shell, hyper = fetch_shell(client, datasource, folder)
    content = content_of(hyper)
    value = read_package(shell).last_increment
    shutil.rmtree(folder)
    return content if content.last == value else None


def _report(sample: Sample, ways: Mapping[str, Way], *, equal: bool, load: float) -> PackageReport:
    return PackageReport(
        rows=sample.rows,
        hyper_bytes=sample.hyper_bytes,
        package_bytes=sample.package.stat().st_size,
        purged=sample.rows - sample.remains.rows,
        increment_value=sample.remains.last,
        cores=os.cpu_count() or 1,
        load=round(load, 2),
        ours=ways["ours"],
        plain=ways["plain"],
        equal=equal,
    )
