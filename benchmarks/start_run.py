"""The run behind `starts`: the same refresh in a new process and in this one, while a Spark Connect server is up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.run import Bench, measuring
from benchmarks.starts import BY_SPARK, USUAL, Starts
from tir_dagster.errors import TirError
from tir_dagster.orchestration.sensing.watching import FRESH_SECONDS, SharedProbes
from tir_dagster.sandbox import sample
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.spark.staging import SMALL_VARIABLE

_DELIVERY = "republish"
_TIR = (sys.executable, "-m", "tir_dagster.cli.main")
_PATIENCE = 1_800

Say = Callable[[str], None]


def run_starts(
    folder: Path, *, rows: int, keys: int, repetitions: int, setting: Mapping[str, Any], progress: Say
) -> Starts:
    """Measure both in turn, in a place of its own; servers are stopped at the end."""
    cold: dict[str, list[float]] = {USUAL: [], BY_SPARK: []}
    warm: dict[str, list[float]] = {USUAL: [], BY_SPARK: []}
    with measuring(folder, progress) as bench, _spark_server(progress):
        bench.warm_up((_DELIVERY,))
        bench.seed(rows, seed=1)
        bench.refresh("full", _DELIVERY, "watermark")
        for number in range(repetitions):
            for name, limit in ((USUAL, ""), (BY_SPARK, "0")):
                with _small_rows(limit):
                    bench.change(keys)
                    warm[name].append(_seconds(lambda: bench.refresh("by_key", _DELIVERY, "watermark")))
                    bench.change(keys)
                    cold[name].append(_seconds(lambda: _in_a_new_process(folder)))
                progress(
                    f"round {number + 1} of {repetitions}, {name}: cold {cold[name][-1]:.1f} s, warm {warm[name][-1]:.1f} s"
                )
        equal = bench.compare(_DELIVERY).equal
        statements = _tick_statements(bench)
    return Starts(rows=rows, keys=keys, cold=cold, warm=warm, tick_statements=statements, equal=equal, **setting)


@contextmanager
def _spark_server(progress: Say) -> Iterator[None]:
    progress("starting a Spark Connect server")
    _tir("spark", "up")
    try:
        yield
    finally:
        _tir("spark", "down")


@contextmanager
def _small_rows(limit: str) -> Iterator[None]:
    if limit:
        os.environ[SMALL_VARIABLE] = limit
    try:
        yield
    finally:
        os.environ.pop(SMALL_VARIABLE, None)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return round(time.perf_counter() - begun, 3)


def _in_a_new_process(folder: Path) -> None:
    _tir("--specs", str(folder / f"{_DELIVERY}.yaml"), "refresh", f"bench_{_DELIVERY}")


def _tir(*arguments: str) -> None:
    done = subprocess.run([*_TIR, *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    if done.returncode:
        raise TirError(f"tir {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")


def _tick_statements(bench: Bench) -> int:
    """What sensors ask when they look again: the first look learns which tables there are."""
    access, now = SnowflakeAccess.from_environment(bench.env), 0.0
    probes, tables = SharedProbes(lambda: now), [TableName.parse(sample.TABLE)]
    probes.probe(access, tables, asker="bench")
    now += 2 * FRESH_SECONDS
    bench.stand_ins.forget()
    probes.probe(access, tables, asker="bench")
    return bench.stand_ins.meters()["statements"]
