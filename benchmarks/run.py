"""The run: a sandbox of its own, a first load, a change, a refresh by key and a full one, and the limits of both."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks import limits
from benchmarks.place import own_sandbox
from benchmarks.report import Limit, Refresh, Report, Stage, staged
from tir_dagster.cli.commands import command
from tir_dagster.cli.comparison import Comparison, compare_slices, published_extract, snowflake_of
from tir_dagster.cli.demo import declare_orders
from tir_dagster.cli.refresh import Outcome
from tir_dagster.errors import TirError
from tir_dagster.hyper.package.package import packed, read_package, refresh_change
from tir_dagster.refresh.state.versions import SHELL, Version
from tir_dagster.sandbox import sample
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.versions import SourceVersion, describe, select
from tir_dagster.spec.extract import ExtractSpec

# How the pipeline tells how many rows it read.
_READ = re.compile(r"\bread ([\d,]+) rows")

Say = Callable[[str], None]


def run_bench(folder: Path, *, rows: int, changed: float, seed: int, progress: Say) -> Report:
    """Measure everything in one run, in a place of its own; the sandbox is stopped at the end."""
    with own_sandbox(progress) as env:
        try:
            return _Bench(folder, env, progress).run(rows=rows, changed=changed, seed=seed)
        finally:
            _stop_spark()


def _stop_spark() -> None:
    """Before its folder goes: at its end the JVM looks for its files there."""
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


def change_mix(rows: int, changed: float) -> sample.Mix:
    """So many per cent of the keys, in the proportions of the sample's own change; the rest by rounding are updates."""
    usual = asdict(sample.Mix())
    wanted = max(len(usual), round(rows * changed / 100))
    counts = {kind: max(1, wanted * count // sum(usual.values())) for kind, count in usual.items()}
    counts["updates"] += wanted - sum(counts.values())
    return sample.Mix(**counts)


@dataclass(frozen=True)
class _Done:
    """A refresh with what it left behind."""

    outcome: Outcome
    version: Version
    rows_read: int


class _Bench:
    """What all parts of one run share."""

    def __init__(self, folder: Path, env: Mapping[str, str], progress: Say) -> None:
        self._folder = folder
        self._env = env
        self._progress = progress

    def run(self, *, rows: int, changed: float, seed: int) -> Report:
        load = os.getloadavg()[0]
        spec = self._seed(rows, seed)
        first = self._refresh(spec, "full", "first load")
        loaded = self._measured(first, {})
        change = self._change(rows, changed, seed + 1)
        by_key = self._refresh(spec, "changes", "refresh by key")
        _require_by_key(by_key.outcome)
        keyed = self._measured(by_key, self._key_limits(spec, first, by_key))
        after_key = self._compare(spec)
        full = self._refresh(spec, "full", "full refresh, warm")
        whole = self._measured(full, self._full_limits(spec, full))
        after_full = self._compare(spec)
        return Report(
            rows=rows,
            changed=changed,
            seed=seed,
            cores=os.cpu_count() or 1,
            load=round(load, 2),
            change=asdict(change),
            first=loaded,
            by_key=keyed,
            full=whole,
            file_bytes=full.version.extract.stat().st_size,
            scale=self._scale(full.version),
            equal_by_key=after_key.equal,
            equal_full=after_full.equal,
            slices=max(after_key.slices, after_full.slices),
        )

    def _seed(self, rows: int, seed: int) -> ExtractSpec:
        sample.seed_table(self._env, rows=rows, seed=seed, until=sample.parse_month(None), progress=self._progress)
        sample.seed_datasource(self._env, timeout=3600, progress=self._progress)
        return declare_orders(self._env, self._folder / "bench.yaml")

    def _change(self, rows: int, changed: float, seed: int) -> sample.Mix:
        mix = change_mix(rows, changed)
        self._progress(f"changing {sum(asdict(mix).values()):,} orders")
        sample.change_table(self._env, seed=seed, mix=mix)
        return mix

    def _refresh(self, spec: ExtractSpec, mode: Any, what: str) -> _Done:
        read: list[int] = []

        def hear(line: str) -> None:
            read.extend(int(found.replace(",", "")) for found in _READ.findall(line))
            self._progress(f"{what}: {line}")

        with command(spec, hear) as running:
            outcome = running.refresh(mode, (), allow_empty=False)
            version = running.context.versions.latest()
        assert version is not None, "a refresh that ended well has made a version"
        return _Done(outcome, version, sum(read))

    def _compare(self, spec: ExtractSpec) -> Comparison:
        self._progress("comparing what is published with the source")
        with published_extract(spec, self._env) as hyper:
            return compare_slices(hyper, spec, self._env)

    def _measured(self, done: _Done, found: Mapping[str, Limit]) -> Refresh:
        outcome = done.outcome
        with self._scratch() as folder:
            size = _packed(done.version, folder).stat().st_size
        return Refresh(
            decision=outcome.decision,
            seconds=outcome.seconds,
            stages=staged(outcome.stages, outcome.seconds, found),
            rows_read=done.rows_read,
            rows_purged=outcome.rows_purged,
            rows_appended=outcome.rows_appended,
            bytes_published=size,
        )

    def _key_limits(self, spec: ExtractSpec, before: _Done, done: _Done) -> dict[str, Limit]:
        """The watermark SELECT, Hyper's own replacement of the same change, the upload."""
        self._progress("the limits of the refresh by key")
        access, table = snowflake_of(spec, self._env), TableName.parse(spec.source)
        watermark = str(spec.changes.watermark)
        pinned = f"{table.sql} {_version(before.outcome).sql}"
        since = limits.candidates_since(access, pinned, watermark, spec.changes.look_back)
        query = select(
            table, describe(access, table), version=_version(done.outcome), where=f"{quote(watermark)} >= {since}"
        )
        with self._scratch() as folder:
            return {
                "detect": limits.read_limit(access, query, "bare SELECT by watermark"),
                "apply": limits.replace_limit(
                    before.version.extract, done.version.extract, folder, key=spec.row_key[0], watermark=watermark
                ),
                "publish": limits.upload_limit(_packed(done.version, folder)),
            }

    def _full_limits(self, spec: ExtractSpec, done: _Done) -> dict[str, Limit]:
        """The SELECT of all rows, Hyper's own COPY of them, the upload."""
        self._progress("the limits of the full refresh")
        access, table = snowflake_of(spec, self._env), TableName.parse(spec.source)
        query = select(table, describe(access, table), version=_version(done.outcome))
        with self._scratch() as folder:
            return {
                "detect": limits.read_limit(access, query, "bare SELECT of the same rows"),
                "apply": limits.build_limit(done.version.extract, folder),
                "publish": limits.upload_limit(_packed(done.version, folder)),
            }

    def _scale(self, version: Version) -> tuple[Stage, ...]:
        with self._scratch() as folder:
            copied = limits.copy_limit(version.extract, folder)
            begun = time.perf_counter()
            _packed(version, folder)
            packed = time.perf_counter() - begun
            return Stage("plain copy", copied.seconds), Stage(
                "packing", packed, limits.zip_limit(version.extract, folder)
            )

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="limits-") as folder:
            yield Path(folder)


def _require_by_key(outcome: Outcome) -> None:
    if outcome.decision != "incremental":
        raise TirError(
            f"The refresh after the change was not by key but {outcome.decision} ({outcome.reason}): there is nothing to "
            "compare. Choose a smaller --changed."
        )


def _version(outcome: Outcome) -> SourceVersion:
    assert outcome.source_version is not None, "a refresh that published has read a version"
    return SourceVersion.parse(outcome.source_version)


def _packed(version: Version, folder: Path) -> Path:
    """The package as it was published, made again: the pipeline removes it when it has been sent."""
    shell = read_package(version.folder / SHELL)
    refresh = refresh_change(shell, version.extract, rows=version.manifest["rows"])
    return packed(shell, "package.tdsx", hyper=version.extract, refresh=refresh).write(folder / "package.tdsx")
