"""The run behind `--growth`: for each size a table, an extract for each delivery, and changes of every number of keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import requests

from benchmarks.bags import compare_published, write_source
from benchmarks.contest import JOB_SECONDS, REVISIONS, extract_of
from benchmarks.contest_ways import BY_NAME
from benchmarks.growth import SHARES, Growth, Point, PointStore, Say, keys_at
from benchmarks.run import Bench, change_mix, measuring
from tir_dagster.orchestration.interrupts import StoppedError
from tir_dagster.sandbox import sample
from tir_dagster.spec.extract import ExtractSpec

# By the name under which it is shown: what a growth is measured of.
MEASURED = {
    "full": "full",
    "republish": "republish_watermark",
    "patch": "patch",
    "server": "server",
    "trigger": "trigger",
}
# Loads everything, however little has changed: measured once for each size.
_WHOLE = ("full", "trigger")
# Refreshes before the one that is measured: as many as versions are kept, and one more. From then on the oldest file is
# brought forward instead of copying the newest one, as in every refresh that follows.
_BEFORE = 4
_RECENT = 2
_LEAST_PART = 50


def run_growth(
    folder: Path,
    sizes: Sequence[int],
    *,
    keys: int,
    seed: int,
    store: PointStore,
    deliveries: Sequence[str],
    progress: Say,
    shares: Sequence[float] = SHARES,
) -> Growth:
    """Measure what is not in the store yet. The fixed size is the largest of at most 10,000,000 rows."""
    sizes = sorted(sizes)
    keys = min(keys, sizes[0] // _LEAST_PART)
    fixed = max([size for size in sizes if size <= 10_000_000], default=sizes[0])
    with measuring(folder, progress) as bench:
        address = f"{bench.env['TABLEAU_SERVER_URL']}/sandbox/settings"
        requests.put(address, json={"revisions_kept": REVISIONS}, timeout=30).raise_for_status()
        bench.warm_up(("republish",))
        wanted = {size: keys_at(size, keys=keys, fixed=fixed, shares=shares) for size in sizes}
        points = [
            (size, count, name)
            for size in sizes
            for name in deliveries
            for count in _counts(name, wanted[size], keys, size)
        ]
        clock = Clock(points, store, progress)
        for size in sizes:
            missing = [name for name in deliveries if any((rows, of) == (size, name) for rows, _, of in clock.left())]
            if missing:
                _Size(bench, folder, size, keys, store, clock, progress).run(missing, wanted[size], seed)
    return Growth(keys=keys, fixed=fixed, points=tuple(p for p in store.points if p.rows in sizes), **store.setting)


def _counts(name: str, wanted: Sequence[int], keys: int, rows: int) -> list[int]:
    if name in _WHOLE:
        return [keys]
    # The newest months, which `server` is measured on, have a twelfth of the rows, and not all of them can change.
    return [count for count in wanted if name != "server" or count <= rows // _LEAST_PART]


class Clock:
    """Says how much is left, and about how long it takes: as long for each row as what was measured."""

    def __init__(self, points: Sequence[tuple[int, int, str]], store: PointStore, progress: Say) -> None:
        self._points, self._store, self._progress = points, store, progress
        self._begun, self._rows = time.monotonic(), sum(rows for rows, *_ in self.left())

    def left(self) -> list[tuple[int, int, str]]:
        return [point for point in self._points if not self._store.has(*point)]

    def tell(self) -> None:
        left = self.left()
        rows = sum(rows for rows, *_ in left)
        minutes = (time.monotonic() - self._begun) / max(self._rows - rows, 1) * rows / 60
        self._progress(f"{len(self._points) - len(left)} of {len(self._points)} points: about {minutes:,.0f} min left")


class _Size:
    """One table, and an extract for each delivery on it."""

    def __init__(
        self, bench: Bench, folder: Path, rows: int, keys: int, store: PointStore, clock: Clock, progress: Say
    ) -> None:
        self._bench, self._folder, self._rows, self._keys = bench, folder, rows, keys
        self._store, self._clock, self._progress = store, clock, progress
        self._changes = 0

    def run(self, names: Sequence[str], wanted: Sequence[int], seed: int) -> None:
        self._bench.seed(self._rows, seed)
        first = self._bench.query(f"SELECT MIN(ORDER_DATE) FROM {sample.TABLE}")[0][0]
        for name in names:
            way = BY_NAME[MEASURED[name]]
            # Each size has datasources of its own: another table is another extract.
            spec = extract_of(replace(way, name=f"{way.name}_{self._rows}"), f"{first:%Y-%m}")
            try:
                self._delivery(name, spec, wanted)
            except StoppedError:
                raise
            except Exception as error:
                text = " ".join(str(error).split())[:500]
                self._progress(f"{name}, {self._rows:,} rows: failed: {text}")
                self._store.add(Point(self._rows, self._keys, name, error=text))
            finally:
                self._bench.remove(spec.name)

    def _delivery(self, name: str, spec: ExtractSpec, wanted: Sequence[int]) -> None:
        """Load the extract, let it reach its everyday state, and then measure every change, the smallest one first."""
        if name in ("server", "trigger"):
            sample.seed_datasource(self._bench.env, timeout=JOB_SECONDS, name=spec.datasource.name)
        self._bench.play(spec, "by_key")
        if name in ("republish", "patch"):
            for _ in range(_BEFORE):
                self._change(name, min(wanted))
                self._bench.play(spec, "by_key")
        for count in _counts(name, wanted, self._keys, self._rows):
            self._change(name, count)
            done = self._bench.play(spec, "full" if name == "full" else "by_key")
            size = done.newest.extract.stat().st_size if done.newest else 0
            point = Point.of(done.case, rows=self._rows, keys=count, name=name, extract_bytes=size)
            self._store.add(replace(point, equal=self._equal(spec) if count == self._keys else True))
            self._clock.tell()

    def _change(self, name: str, keys: int) -> None:
        self._changes += 1
        recent = _RECENT if name == "server" else None
        sample.change_table(self._bench.env, seed=self._changes, mix=change_mix(keys), recent=recent)

    def _equal(self, spec: ExtractSpec) -> bool:
        """Whether what is published equals the source; looked at once for each delivery and size."""
        source = self._folder / "source.hyper"
        write_source(self._bench.env, source)
        return (
            compare_published(self._bench.env, project=sample.PROJECT, name=spec.datasource.name, source=source).orders
            == 0
        )
