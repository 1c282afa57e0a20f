"""The run: a sandbox of its own, seeded once; full refreshes, changes, refreshes by key, and the limits of all of them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks import limits, memory
from benchmarks.kept import KeptValues
from benchmarks.place import own_sandbox
from benchmarks.report import BY_KEY, BY_KEY_1000, DELIVERIES, DETECTORS, FULL, Case, Limit, Report, Stage, apart
from benchmarks.stand_in import StandIns
from tir_dagster.cli.demo.comparison import SliceComparison, compare_slices, published_extract, snowflake_of
from tir_dagster.cli.refresh import RefreshOutcome, command
from tir_dagster.errors import TirError
from tir_dagster.orchestration.home import tir_home
from tir_dagster.refresh.profile import StageProfile
from tir_dagster.refresh.state.versions import Version
from tir_dagster.sandbox import sample
from tir_dagster.sandbox.sample.datasource import signed_in
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.versions import SourceVersion, describe, select
from tir_dagster.spark.staging import SMALL_VARIABLE
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs

FEW_KEYS = 1_000
# Enough to let everything that a first refresh loads be loaded.
_WARM_UP_ROWS = 1_000
# The sample's changes are stamped seconds apart, so without a look-back only the last one's rows are candidates.
_SPEC = """\
extracts:
  - name: bench_{delivery}
    source: MYDB.MYSCHEMA.MYTABLE
    row_key: ORDER_ID
    slices: {{column: ORDER_DATE, by: month, start: {start}}}
    changes: {{watermark: UPDATED_AT, look_back: 0 seconds}}
    delivery: {delivery}
    datasource:
      project: {project}
      name: bench_{delivery}
      credentials: {{username_env: SNOWFLAKE_USER, password_env: SNOWFLAKE_PASSWORD}}
"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What to measure."""

    rows: int
    changed: float
    seed: int
    detectors: Sequence[str] = DETECTORS
    deliveries: Sequence[str] = DELIVERIES

    @property
    def keys(self) -> dict[str, int]:
        """How many keys change for each refresh by key; few stay few of a small table."""
        return {
            BY_KEY: max(4, round(self.rows * self.changed / 100)),
            BY_KEY_1000: min(FEW_KEYS, max(4, self.rows // 10)),
        }


class CaseStore:
    """The refreshes by key of a run, kept as soon as they are measured. Full ones are not: what follows begins with them."""

    def __init__(self, file: Path, wanted: Wanted, setting: Mapping[str, Any], *, resume: bool) -> None:
        self._kept = KeptValues(file, asdict(wanted), setting, resume=resume)
        self.cases = {case.id: case for case in map(Case.from_dict, self._kept.values)}

    @property
    def setting(self) -> dict[str, Any]:
        return self._kept.setting

    def add(self, case: Case) -> None:
        self.cases[case.id] = case
        self._kept.add(asdict(case))

    def of(self, refresh: str) -> list[Case]:
        return [case for case in self.cases.values() if case.refresh == refresh]


def run_bench(folder: Path, wanted: Wanted, store: CaseStore, progress: Say) -> Report:
    """Measure what is not in the store yet, in a place of its own; the sandbox is stopped at the end."""
    with measuring(folder, progress) as bench:
        bench.warm_up(wanted.deliveries)
        bench.seed(wanted.rows, wanted.seed)
        full = [bench.refresh(FULL, delivery, wanted.detectors[0]) for delivery in wanted.deliveries]
        newest = measure_by_key(bench, wanted, store, progress) or full[-1]
        # Last: what the connector leaves in memory would be counted as a refresh's.
        shared = bench.full_limits(newest)
        whole = [done.beside({**shared, "publish": bench.upload_limit(done)}) for done in full]
        extract = newest.version.extract
        compared = {delivery: bench.compare(delivery) for delivery in wanted.deliveries}
        return Report(
            rows=wanted.rows,
            changed=wanted.changed,
            seed=wanted.seed,
            cores=os.cpu_count() or 1,
            load=store.setting["machine"]["load"],
            cases=(*whole, *(store.cases[step] for step in _steps(wanted))),
            file_bytes=extract.stat().st_size,
            copy=bench.copy_limit(extract),
            equal_by_delivery={delivery: one.equal for delivery, one in compared.items()},
            slices=max(one.slices for one in compared.values()),
        )


def _steps(wanted: Wanted) -> list[tuple[str, str, str]]:
    """All refreshes by key: the same kind of change for every detector, brought by every delivery."""
    return list(product(wanted.keys, wanted.detectors, wanted.deliveries))


def measure_by_key(bench: Bench, wanted: Wanted, store: CaseStore, progress: Say) -> Done | None:
    """Measure the refreshes by key that are missing; return the last one."""
    begun, measured, done = time.monotonic(), 0, None
    for refresh, detector in product(wanted.keys, wanted.detectors):
        steps = [(refresh, detector, delivery) for delivery in wanted.deliveries]
        if all(step in store.cases for step in steps):
            continue
        bench.change(wanted.keys[refresh])
        for *_, delivery in steps:
            done = bench.refresh(refresh, delivery, detector)
            _require_by_key(done.outcome)
            store.add(done.beside(_limits(bench, done, store.of(refresh))))
            measured += 1
        left = len(set(_steps(wanted)) - store.cases.keys())
        minutes = (time.monotonic() - begun) / measured * left / 60
        progress(f"{measured} refreshes by key are measured, {left} are left: about {minutes:,.0f} min")
    return done


def _limits(bench: Bench, done: Done, known: Sequence[Case]) -> dict[str, Limit]:
    """The limits of a refresh by key; those that others of its kind have are its own, too."""
    shared = known[0].limits_by_stage if known else bench.key_limits(done)
    sent = [case.limits_by_stage["publish"] for case in known if case.delivery == done.case.delivery]
    return {**shared, "publish": sent[0] if sent else bench.upload_limit(done)}


@contextmanager
def measuring(folder: Path, progress: Say) -> Iterator[Bench]:
    """A sandbox and a Spark of its own for the block."""
    with own_sandbox(progress) as env:
        try:
            yield Bench(folder, env, progress)
        finally:
            session = SparkSession.getActiveSession()
            if session is not None:
                # Before its folder goes: at its end the JVM looks for its files there.
                session.stop()


def change_mix(keys: int) -> sample.Mix:
    """So many keys, in the proportions of the sample's own change; the rest by rounding are updates."""
    usual = asdict(sample.Mix())
    counts = {kind: max(1, keys * count // sum(usual.values())) for kind, count in usual.items()}
    counts["updates"] += keys - sum(counts.values())
    return sample.Mix(**counts)


@dataclass(frozen=True)
class Done:
    """A refresh, and the versions before and after it."""

    case: Case
    outcome: RefreshOutcome
    newest: Version | None
    before: Version | None

    @property
    def version(self) -> Version:
        """The version that the refresh has left; only the delivery `trigger` leaves none."""
        assert self.newest is not None, "a refresh that ended well has made a version"
        return self.newest

    def beside(self, found: Mapping[str, Limit]) -> Case:
        """The refresh with its stages' limits."""
        stages = [replace(stage, limit=found.get(stage.name)) for stage in self.case.stages]
        return replace(self.case, stages=tuple(stages))


class Bench:
    """One extract for each delivery, on the table of one sandbox."""

    def __init__(self, folder: Path, env: Mapping[str, str], progress: Say) -> None:
        self._folder = folder
        self.env = env
        self._progress = progress
        self.stand_ins = StandIns.at(env)
        self._specs: dict[str, ExtractSpec] = {}
        self._changes = 0

    def warm_up(self, deliveries: Sequence[str]) -> None:
        """Publish a small extract by each delivery: Spark, Hyper, Dagster and the clients are loaded then."""
        self._progress("warming up")
        self.seed(_WARM_UP_ROWS, seed=1)
        # A package that people made has a document around the rows; the one of a patch is a Hyper file of our own. The project
        # is made with it.
        sample.seed_datasource(self.env, timeout=600, name="bench_republish")
        first = SnowflakeAccess.from_environment(self.env).query(f"SELECT MIN(ORDER_DATE) FROM {sample.TABLE}")[0][0]
        for delivery in deliveries:
            text = _SPEC.format(delivery=delivery, start=f"{first:%Y-%m}", project=sample.PROJECT)
            (self._folder / f"{delivery}.yaml").write_text(text, encoding="utf-8")
            (self._specs[delivery],) = parse_specs(text, f"{delivery}.yaml")
            # By Spark, though the rows are few: it must be there for what is measured.
            os.environ[SMALL_VARIABLE] = "0"
            try:
                self.refresh(FULL, delivery, "watermark")
            finally:
                del os.environ[SMALL_VARIABLE]

    def seed(self, rows: int, seed: int, until: sample.Month | None = None) -> None:
        # Up to the last month: stamps of this one may lie in the future, and a watermark goes back a day for those.
        until = until or sample.parse_month(None).plus(-1)
        sample.seed_table(self.env, rows=rows, seed=seed, until=until, progress=self._progress)

    def change(self, keys: int) -> None:
        """Change so many keys, scattered over all months."""
        self._progress(f"changing {keys:,} orders")
        self._changes += 1
        sample.change_table(self.env, seed=self._changes, mix=change_mix(keys))

    def refresh(self, refresh: str, delivery: str, detector: str) -> Done:
        """Measure one refresh."""
        # A file names a watermark only for that detector. Here it always stays, or the extract would be another one.
        spec = self._specs[delivery]
        spec = replace(spec, changes=replace(spec.changes, detector=detector))  # type: ignore[arg-type]
        return self.play(spec, refresh)

    def play(self, spec: ExtractSpec, refresh: str) -> Done:
        """Measure one refresh of this extract."""
        what = f"{refresh}, {spec.changes.detector}, {spec.delivery}"
        memory.forget_peaks()
        job = self.stand_ins.forget()
        with command(spec, lambda line: self._progress(f"{what}: {line}")) as running:
            before = running.context.versions.latest()
            mode: Any = "full" if refresh == FULL else "changes"
            outcome = running.refresh(mode, (), allow_empty=True)
            version = running.context.versions.latest()
        server, calls = self.stand_ins.work(job)
        self._progress(f"{what}: {outcome.seconds:.1f} s, of which {server:.1f} s the server's own work")
        case = Case(
            refresh=refresh,
            detector=str(spec.changes.detector),
            delivery=spec.delivery,
            stages=apart(map(_stage, outcome.profile), server),
            server=server,
            rows_purged=outcome.rows_purged,
            rows_appended=outcome.rows_appended,
            memory=memory.peaks(),
            calls=calls,
        )
        return Done(case, outcome, version, before)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return SnowflakeAccess.from_environment(self.env).query(sql)

    @staticmethod
    def state_of(extract: str) -> Path:
        """Where the extract's versions and change sets are."""
        return tir_home() / "extracts" / extract

    def remove(self, name: str) -> None:
        """Delete the datasource of that name and the state of the extract on it: large files that nobody needs any more."""
        with signed_in(self.env) as server:
            for item in list(server.datasources.filter(name=name)):
                server.datasources.delete(item.id)
        shutil.rmtree(self.state_of(name), ignore_errors=True)

    def compare(self, delivery: str) -> SliceComparison:
        """Hold what is published beside the source as it is now."""
        self._progress(f"comparing what {delivery} published with the source")
        spec = self._specs[delivery]
        with published_extract(spec, self.env) as hyper:
            return compare_slices(hyper, spec, self.env)

    # Limits

    def key_limits(self, done: Done) -> dict[str, Limit]:
        """The watermark SELECT, and Hyper's own replacement of the same change."""
        self._progress("the limits of the refresh by key")
        assert done.before is not None, "a refresh by key starts from a version"
        spec = self._specs[done.case.delivery]
        access, table, watermark = self._access(spec), TableName.parse(spec.source), str(spec.changes.watermark)
        pinned = f"{table.sql} {SourceVersion.parse(done.before.manifest['source_version']).sql}"
        since = limits.candidates_since(access, pinned, watermark)
        query = select(table, describe(access, table), version=_version(done), where=f"{quote(watermark)} > {since}")
        with self._scratch() as folder:
            return {
                "detect": limits.read_limit(access, query, "bare SELECT of the changed rows"),
                "apply": limits.replace_limit(
                    done.before.extract, done.version.extract, folder, key=spec.row_key[0], watermark=watermark
                ),
            }

    def full_limits(self, done: Done) -> dict[str, Limit]:
        """The SELECT of all rows, and Hyper's own COPY of them, at the version of this refresh."""
        self._progress("the limits of the full refresh")
        spec = self._specs[done.case.delivery]
        access, table = self._access(spec), TableName.parse(spec.source)
        query = select(table, describe(access, table), version=_version(done))
        with self._scratch() as folder:
            return {
                "detect": limits.read_limit(access, query, "bare SELECT of the same rows"),
                "apply": limits.build_limit(done.version.extract, folder),
            }

    def upload_limit(self, done: Done) -> Limit:
        """One upload of as many bytes as the publish sent."""
        with self._scratch() as folder:
            sent = folder / "sent"
            with sent.open("wb") as file:
                file.truncate(done.case.stage("publish").bytes or 0)
            return limits.upload_limit(sent)

    def copy_limit(self, extract: Path) -> Limit:
        with self._scratch() as folder:
            return limits.copy_limit(extract, folder)

    def _access(self, spec: ExtractSpec) -> SnowflakeAccess:
        return snowflake_of(spec, self.env)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="limits-") as folder:
            yield Path(folder)


def _stage(stage: StageProfile) -> Stage:
    waited = {str(whom): seconds for whom, seconds in stage.waited_for.items()}
    return Stage(stage.stage, stage.seconds, stage.rows, stage.bytes, waited)


def _require_by_key(outcome: RefreshOutcome) -> None:
    if outcome.decision != "incremental":
        raise TirError(
            f"The refresh after the change was not by key but {outcome.decision} ({outcome.reason}): there is nothing to "
            "compare. Choose a smaller --changed."
        )


def _version(done: Done) -> SourceVersion:
    return SourceVersion.parse(done.version.manifest["source_version"])
