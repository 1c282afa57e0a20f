"""`python -m tir_dagster_tests.soak`: refresh one extract hundreds of times; nothing may grow. Writes build/soak.json and a picture.

A run that was stopped goes on where it was: its sandbox, its state and its measures are kept in the folder until all refreshes are done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from tir_dagster.cli.refresh import Command
from tir_dagster.orchestration.home import dagster_home, dagster_instance, tir_home
from tir_dagster.orchestration.partitions import change_set_partitions
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.sandbox import sample
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.reading import parse_specs
from tir_dagster_tests.conftest import Sandbox, running_sandbox
from tir_dagster_tests.long_runs import STOPPED, SURVIVAL, Kept, ran_to_its_end, today, write_survival
from tir_dagster_tests.orchestration.conftest import SPEC, download
from tir_dagster_tests.packages import plain, rows_of

ROWS, CHANGED = 3_000, 20
_FIRST_ADDED = 100_000_000


@dataclass(frozen=True)
class Measure:
    """What one refresh took, and what is there after it."""

    seconds: float
    extract_bytes: int
    # The state folder without its history, which keeps its entries for days.
    state_bytes: int
    state_files: int
    history_bytes: int
    dagster_bytes: int
    partitions: int
    memory_bytes: int
    hyper_memory_bytes: int


# How each is judged: its title, its unit, and whether its growth from one refresh to the next is meant.
SHOWN: dict[str, tuple[str, float, str, bool]] = {
    "extract_bytes": ("the extract's file", 1e6, "MB", False),
    "state_bytes": ("the state folder without its history", 1e6, "MB", False),
    "state_files": ("files in it", 1, "files", False),
    "history_bytes": ("history, by refresh", 1e3, "KB", True),
    "dagster_bytes": ("Dagster's history, by refresh", 1e3, "KB", True),
    "partitions": ("change sets kept as partitions", 1, "partitions", False),
    "memory_bytes": ("memory of the process", 1e6, "MB", False),
    "hyper_memory_bytes": ("memory of hyperd", 1e6, "MB", False),
    "seconds": ("seconds", 1, "s", False),
}
# Seconds depend on what else the machine does: they are only shown.
_JUDGED = [name for name in SHOWN if name != "seconds"]
# What may come on top of a tenth: memory that a process keeps for later, and files of SQLite that grow by pages.
_SLACK = {"memory_bytes": 40e6, "hyper_memory_bytes": 60e6, "state_files": 8, "state_bytes": 2e5}
# A hundred change sets are kept, and the one at hand.
_MOST = {"partitions": 101}
_MORE = 1.1


def series(measures: Sequence[Measure], name: str) -> list[float]:
    """Return the values of a measure, or how much it grew by each refresh."""
    values = [float(getattr(measure, name)) for measure in measures]
    if not SHOWN[name][3]:
        return values
    return [after - before for before, after in pairwise(values)]


def growing(measures: Sequence[Measure]) -> list[str]:
    """Return what is greater at the end than it was in the first half, in sentences.

    The greatest values are compared: a file grows until it is built anew. Of a history it is the average growth by refresh.
    """
    sentences = []
    for name in _JUDGED:
        title, unit, text, is_growth = SHOWN[name]
        values = series(measures, name)
        if name in _MOST:
            # It grows until then.
            values = [max(value, _MOST[name]) for value in values]
        first, last = values[: max(1, len(values) // 2)], values[-max(1, len(values) // 4) :]
        before, after = (mean(first), mean(last)) if is_growth else (max(first), max(last))
        if after > _MORE * before + _SLACK.get(name, 0 if name in _MOST else 4096):
            sentences.append(f"{title}: {before / unit:,.2f} {text} in the first half, {after / unit:,.2f} at the end")
    return sentences


# The picture


def picture(measures: Sequence[Measure]) -> str:
    """Return an SVG with a line for each measure, from the first refresh to the last."""
    width, height, left, gap = 860, 90, 250, 14
    rows = []
    for place, (name, (title, unit, text, _)) in enumerate(SHOWN.items()):
        values = [value / unit for value in series(measures, name)] or [0.0]
        top, most = place * (height + gap) + gap, max(*values, 1e-9)
        step = (width - left - gap) / max(1, len(values) - 1)
        points = " ".join(
            f"{left + at * step:.1f},{top + height - value / most * (height - 10):.1f}"
            for at, value in enumerate(values)
        )
        rows.append(
            f'<rect x="{left}" y="{top}" width="{width - left - gap}" height="{height}" fill="#f4f6f8"/>'
            f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
            f'<text x="{gap}" y="{top + 30}" font-weight="bold">{title}</text>'
            f'<text x="{gap}" y="{top + 52}">last {values[-1]:,.2f}, most {most:,.2f} {text}</text>'
        )
    total = len(SHOWN) * (height + gap) + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" font-size="13">'
        f'<rect width="{width}" height="{total}" fill="white"/>{"".join(rows)}</svg>\n'
    )


# The run


@dataclass
class Place:
    """The sample, an extract of it, and how often it was refreshed."""

    sandbox: Sandbox
    spec: ExtractSpec
    folder: Path
    count: int = 0
    # By this process.
    refreshed: int = 0

    def change(self) -> None:
        """Update some orders, insert one, and delete the one of the refresh before: as many rows as ever."""
        self.count = self._changes() + 1
        stamp = "DATEADD('second', 1, (SELECT MAX(UPDATED_AT) FROM MYTABLE))"
        added = _FIRST_ADDED + self.count
        columns = "ORDER_DATE, CUSTOMER, QUANTITY"
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            cursor = connection.cursor()
            cursor.execute(
                f"UPDATE MYTABLE SET NOTE = 'note {self.count:06d}', UPDATED_AT = {stamp} WHERE ORDER_ID IN"
                f" (SELECT ORDER_ID FROM MYTABLE ORDER BY MD5(ORDER_ID::VARCHAR || '{self.count}') LIMIT {CHANGED})"
            )
            cursor.execute(
                f"INSERT INTO MYTABLE (ORDER_ID, {columns}, UPDATED_AT) SELECT {added}, {columns}, {stamp} FROM MYTABLE"
                " WHERE ORDER_ID = (SELECT MIN(ORDER_ID) FROM MYTABLE)"
            )
            cursor.execute(f"DELETE FROM MYTABLE WHERE ORDER_ID > {_FIRST_ADDED} AND ORDER_ID < {added}")

    def _changes(self) -> int:
        """Return how often the table was changed, also by runs that were stopped."""
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            ((last,),) = connection.cursor().execute("SELECT MAX(ORDER_ID) FROM MYTABLE").fetchall()
        return max(0, int(last) - _FIRST_ADDED)

    def refresh(self) -> Measure:
        self.change()
        begun = time.monotonic()
        with dagster_instance() as instance:
            outcome = Command(self.spec, instance, lambda _: None).refresh("changes", (), allow_empty=False)
            seconds = time.monotonic() - begun
            partitions = len(change_set_partitions(self.spec).get_partition_keys(dynamic_partitions_store=instance))
        assert outcome.published, outcome
        assert outcome.decision == "incremental" or self.refreshed == 0, f"refresh {self.count}: {outcome.reason}"
        self.refreshed += 1
        return self._measured(seconds, partitions)

    def _measured(self, seconds: float, partitions: int) -> Measure:
        state = tir_home() / "extracts" / self.spec.name
        latest = VersionStore(state / "versions").latest()
        assert latest is not None
        sizes = _sizes(state)
        history = {path: size for path, size in sizes.items() if (state / "history") in path.parents}
        others = {path: size for path, size in sizes.items() if path not in history}
        return Measure(
            seconds=round(seconds, 3),
            extract_bytes=latest.extract.stat().st_size,
            state_bytes=sum(others.values()),
            state_files=len(others),
            history_bytes=sum(history.values()),
            dagster_bytes=sum(_sizes(dagster_home()).values()),
            partitions=partitions,
            memory_bytes=_resident_bytes(os.getpid()),
            hyper_memory_bytes=sum(map(_resident_bytes, _hyper_processes())),
        )

    def check(self) -> None:
        """Raise AssertionError unless the datasource has the rows of the table."""
        package = download(self.sandbox, self.spec.datasource.name, self.folder / "seen")
        published = Counter(tuple(map(plain, row)) for row in rows_of(package, self.folder / "seen"))
        with self.sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
            cursor = connection.cursor()
            names = sorted(row[0] for row in cursor.execute("DESCRIBE TABLE MYTABLE").fetchall())
            rows = cursor.execute(f"SELECT {', '.join(names)} FROM MYTABLE").fetchall()
        assert published == Counter(tuple(map(plain, row)) for row in rows), "the extract does not equal the source"


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes[path] = path.stat().st_size
        except OSError:
            continue
    return sizes


def _resident_bytes(pid: int) -> int:
    """Return the memory that the process holds; 0 where the system does not show it."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _hyper_processes() -> list[int]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    pids = [int(pid) for pid in children.read_text(encoding="ascii").split()] if children.is_file() else []
    return [pid for pid in pids if b"hyperd" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def soaked_place(folder: Path) -> Iterator[Place]:
    """Give the sample in a sandbox of its own, and the extract on it; or those that a stopped run left in the folder."""
    before = dict(os.environ)
    with running_sandbox(folder) as sandbox:
        os.environ.update(sandbox.env)
        os.environ.update({"TIR_HOME": str(folder / "state"), "DAGSTER_HOME": str(folder / "dagster")})
        os.environ.pop("TIR_SPECS", None)
        try:
            seeded = folder / "seeded"
            if not seeded.exists():
                sample.seed_table(sandbox.env, rows=ROWS, seed=1, until=sample.parse_month(None))
                sample.seed_datasource(sandbox.env, timeout=120)
                seeded.touch()
            with sandbox.snowflake(database="MYDB", schema="MYSCHEMA") as connection:
                ((first,),) = (
                    connection.cursor().execute("SELECT TO_CHAR(MIN(ORDER_DATE), 'YYYY-MM') FROM MYTABLE").fetchall()
                )
            text = SPEC.replace("START", first).replace("quiet_period: 1 second", "quiet_period: 0 seconds")
            (spec,) = parse_specs(text, "soak.yaml")
            yield Place(sandbox, spec, folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


def soak(place: Place, kept: Kept, refreshes: int, *, tell: Callable[[str], Any]) -> None:
    """Refresh until so many are measured; the first one of a run, which starts hyperd and may load everything, is not."""
    place.refresh()
    begun, before = time.monotonic(), len(kept.results)
    for number in range(before + 1, refreshes + 1):
        last = place.refresh()
        kept.add(asdict(last))
        if number % 10 == 0 or number == refreshes:
            minutes = (time.monotonic() - begun) / (number - before) * (refreshes - number) / 60
            tell(
                f"{number} of {refreshes} refreshes, about {minutes:.0f} min left: the last one took {last.seconds:.1f} s, extract {last.extract_bytes / 1e6:.2f} MB, state"
                f" {last.state_bytes / 1e6:.2f} MB, memory {last.memory_bytes / 1e6:.0f} MB"
            )
    place.check()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tir_dagster_tests.soak", description=__doc__)
    parser.add_argument("--refreshes", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where soak.json and soak.svg go")
    parser.add_argument("--write-docs", action="store_true", help="write docs/survival.md and docs/soak.svg, too")
    options = parser.parse_args()
    folder: Path = options.folder / "soak"
    kept = Kept.of(options.folder / "soak.jsonl", {"rows": ROWS, "changed": CHANGED})
    if not kept.results:
        shutil.rmtree(folder, ignore_errors=True)
    at_its_end = ran_to_its_end(
        lambda: _soaked(folder.absolute(), kept, options.refreshes), command=" ".join(sys.orig_argv)
    )
    measures = [Measure(**result) for result in kept.results]
    (options.folder / "soak.json").write_text(json.dumps(kept.results), encoding="utf-8")
    (options.folder / "soak.svg").write_text(picture(measures), encoding="utf-8")
    sentences = growing(measures) if measures else []
    for sentence in sentences:
        print(f"it grows: {sentence}", file=sys.stderr)
    if options.write_docs:
        SURVIVAL.with_name("soak.svg").write_text(picture(measures), encoding="utf-8")
        write_survival("soak", report(measures, options.refreshes, sentences))
    if at_its_end:
        kept.finish()
        shutil.rmtree(folder, ignore_errors=True)
        if not sentences:
            shown = options.folder / "soak.svg"
            print(f"{len(measures)} refreshes: nothing grows, and the extract equals its source ({shown})")
    if sentences:
        return 1
    return 0 if at_its_end else STOPPED


def _soaked(folder: Path, kept: Kept, refreshes: int) -> None:
    with soaked_place(folder) as place:
        soak(place, kept, refreshes, tell=lambda line: print(line, flush=True))


def report(measures: Sequence[Measure], wanted: int, sentences: Sequence[str]) -> str:
    """Return the table of a run, as the page shows it."""
    done = f"{len(measures):,}" if len(measures) == wanted else f"{len(measures):,} of {wanted:,}"
    found = "; ".join(sentences) or "nothing grows"
    lines = [
        f"`make soak REFRESHES={wanted}` ({today()}): {done} refreshes, {CHANGED} of {ROWS:,} rows changed before each; {found}.",
        "",
        "| | first tenth | last tenth | most |",
        "|---|---|---|---|",
    ]
    for name, (title, unit, text, _) in SHOWN.items():
        values = [value / unit for value in series(measures, name)]
        tenth = max(1, len(values) // 10)
        if values:
            shown = (mean(values[:tenth]), mean(values[-tenth:]), max(values))
            lines.append(f"| {title} | " + " | ".join(f"{value:,.2f} {text}" for value in shown) + " |")
    return "\n".join([*lines, "", "![Each measure, from the first refresh to the last](soak.svg)"])


if __name__ == "__main__":
    sys.exit(main())
