"""No going back: what a refresh asks for, in counts instead of seconds, held against a recorded budget."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession

from benchmarks.contest import extract_of
from benchmarks.contest_ways import BY_NAME, Way
from benchmarks.run import Bench, change_mix, measuring
from tir_dagster.errors import TirError
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.sandbox import sample
from tir_dagster.spark.staging import SMALL_VARIABLE
from tir_dagster.spec.extract import ExtractSpec

BUDGET = Path(__file__).with_name("budget.json")
ROWS, KEYS, SEED = 3_000, 100, 1
# Always the same months: the same rows in the same slices, whenever it runs.
UNTIL = sample.Month(2025, 12)
# How much more than its budget a count may be. Counts without a line here are exact. Sizes of packages and of answers differ with
# the zone of a time, a name or a page of Hyper; a datasource is read once more where a second has not passed since a change.
TOLERANCE: Mapping[str, float] = {
    "bytes read": 0.05,
    "REST bytes sent": 0.1,
    "REST bytes received": 0.1,
    "state bytes": 0.1,
}
SPARE: Mapping[str, int] = {"REST calls": 2}
# Not held against anything: it depends on how busy the machine is.
POLLS = "job polls"

Say = Callable[[str], None]
Counts = Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """One refresh whose counts are held against the budget; `decision` is what it has to be."""

    name: str
    way: Way
    decision: str = "incremental"
    in_short: bool = False
    by_spark: bool = False


_REPUBLISH = BY_NAME["republish_watermark"]
_FULL = replace(_REPUBLISH, refresh="full")
# In this order: what changed is new to the first refresh of each extract only.
CASES = (
    Measured("republish, watermark", _REPUBLISH, in_short=True),
    Measured("republish, feed", BY_NAME["republish_feed"]),
    Measured("republish, diff", BY_NAME["republish_diff"]),
    Measured("patch, watermark", BY_NAME["patch"], in_short=True),
    Measured("server, watermark", BY_NAME["server"]),
    Measured("trigger", BY_NAME["trigger"], "full"),
    Measured("nothing changed", _REPUBLISH, "none", in_short=True),
    Measured("full", _FULL, "full", in_short=True),
    Measured("full, by Spark", _FULL, "full", by_spark=True),
)


@dataclass(frozen=True)
class Check:
    """Counts of this run beside the recorded ones."""

    counts: Mapping[str, Counts]
    budget: Mapping[str, Counts]

    @property
    def over(self) -> list[tuple[str, str]]:
        """The refreshes and the counts in which more was asked for than the budget allows."""
        return [
            (name, meter)
            for name, counts in self.counts.items()
            for meter, count in counts.items()
            if meter != POLLS and count > allowed(meter, self.budget.get(name, {}).get(meter, 0))
        ]

    @property
    def equal(self) -> bool:
        return not self.over

    @property
    def moved(self) -> list[str]:
        """What recording anew changes, in lines."""
        return [
            f"{name}: {meter} {self.budget.get(name, {}).get(meter, 0):,} -> {count:,}"
            for name, counts in self.counts.items()
            for meter, count in counts.items()
            if meter != POLLS and count != self.budget.get(name, {}).get(meter)
        ]

    def as_dict(self) -> dict[str, Any]:
        over = [{"refresh": name, "count": meter} for name, meter in self.over]
        return {"rows": ROWS, "keys": KEYS, "counts": self.counts, "budget": self.budget, "over": over}

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"What a refresh of {ROWS:,} orders, {KEYS} of them changed, asks for (budget in brackets)"
        over = set(self.over)
        for name, counts in self.counts.items():
            yield f"  {name}"
            for meter, count in counts.items():
                recorded = self.budget.get(name, {}).get(meter, 0)
                verdict = f"OVER: {allowed(meter, recorded):,} are allowed" if (name, meter) in over else ""
                beside = "" if meter == POLLS else f"[{recorded:,}]"
                yield f"    {meter:<22}{count:>12,} {beside:>14}  {verdict}".rstrip()
        if over:
            yield "A refresh asks for more than it did. Find out why; if it has to, record it: python -m benchmarks --check --record"


def allowed(meter: str, recorded: int) -> int:
    """The most that a count may be where so much was recorded."""
    return recorded + SPARE.get(meter, 0) + int(recorded * TOLERANCE.get(meter, 0.0))


def read_budget() -> dict[str, dict[str, int]]:
    known: dict[str, dict[str, int]] = json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.is_file() else {}
    return known


def record(check: Check) -> None:
    """Let what was counted be the budget; refreshes that were not played keep theirs."""
    counts = {
        name: {meter: n for meter, n in counts.items() if meter != POLLS} for name, counts in check.counts.items()
    }
    BUDGET.write_text(json.dumps({**check.budget, **counts}, indent=1) + "\n", encoding="utf-8")


def run_check(folder: Path, *, short: bool, progress: Say) -> Check:
    """Play every refresh at its fixed size, and count."""
    cases = [case for case in CASES if case.in_short or not short]
    with measuring(folder, progress) as bench:
        bench.seed(ROWS, SEED, UNTIL)
        specs = _prepared(bench, cases, progress)
        # Of the newest months, where every delivery works as it is meant to.
        sample.change_table(bench.env, seed=1, mix=change_mix(KEYS), recent=2)
        counts: dict[str, Counts] = {}
        for case in cases:
            progress(f"counting: {case.name}")
            counts[case.name] = _counted(bench, specs[case.way.name], case)
    return Check(counts, read_budget())


def _prepared(bench: Bench, cases: Sequence[Measured], progress: Say) -> dict[str, ExtractSpec]:
    """All extracts, loaded once."""
    first = bench.query(f"SELECT MIN(ORDER_DATE) FROM {sample.TABLE}")[0][0]
    ways = {case.way.name: case.way for case in cases}
    # Every datasource has a package around its rows, but the one of `patch`.
    for way in ways.values():
        if way.delivery != "patch":
            sample.seed_datasource(bench.env, timeout=600, name=way.shown_name)
    specs = {}
    for way in ways.values():
        spec = extract_of(way, f"{first:%Y-%m}")
        # The pause would read the table's token more or less often.
        specs[way.name] = replace(spec, thresholds=replace(spec.thresholds, quiet_period=0.0))
        progress(f"first load: {way.title}")
        bench.play(specs[way.name], "by_key")
    return specs


def _counted(bench: Bench, spec: ExtractSpec, case: Measured) -> dict[str, int]:
    state = bench.state_of(spec.name)
    # As if it were the only extract: others would have read the changes already.
    shutil.rmtree(state.parents[1] / "shared", ignore_errors=True)
    before, jobs = _files(state), _spark_work()
    if case.by_spark:
        os.environ[SMALL_VARIABLE] = "0"
    try:
        outcome = bench.play(spec, case.way.refresh).outcome
    finally:
        os.environ.pop(SMALL_VARIABLE, None)
    if outcome.decision != case.decision:
        raise TirError(f"{case.name}: the refresh was {outcome.decision} ({outcome.reason}), not {case.decision}.")
    written = {name: kept for name, kept in _files(state).items() if before.get(name) != kept}
    with dagster_instance() as instance:
        events = sum(_events(instance, run) for run in outcome.run_ids)
    spark = _spark_work()
    return {
        **bench.stand_ins.meters(),
        "Spark jobs": spark[0] - jobs[0],
        "Spark tasks": spark[1] - jobs[1],
        "Dagster runs": len(outcome.run_ids),
        "Dagster events": events,
        "state files": len(written),
        "state bytes": sum(size for _, _, size in written.values()),
    }


def _events(instance: dg.DagsterInstance, run: str) -> int:
    """Events of a run; lines of its log are not counted."""
    return sum(record.is_dagster_event for record in instance.all_logs(run))


def _files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """All files of an extract's state, with what changes when one is written."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            files[str(path.relative_to(folder))] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return files


def _spark_work() -> tuple[int, int]:
    """Jobs and tasks of this process's Spark so far."""
    session = SparkSession.getActiveSession()
    if session is None:
        return 0, 0
    tracker = session.sparkContext.statusTracker()
    tasks = 0
    jobs = tracker.getJobIdsForGroup(None)
    for job in jobs:
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info else ():
            details = tracker.getStageInfo(stage)
            tasks += details.numTasks if details else 0
    return len(jobs), tasks
