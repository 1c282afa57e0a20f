"""The command itself. The work is imported when it runs, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.contest_ways import BY_NAME
from benchmarks.package_report import PackageReport
from benchmarks.place import own_place
from benchmarks.report import DELIVERIES, DETECTORS, Report

if TYPE_CHECKING:
    from benchmarks.contest_report import Contest
    from benchmarks.growth import Growth
    from benchmarks.load_run import LoadReport
    from benchmarks.star import StarReport
    from benchmarks.starts import Starts

# By estimate: the lake, packages and three versions of both extracts, and what is staged, for each order.
_BYTES_PER_ROW = 1_000
# In the contest every way has an extract of its own.
_CONTEST_BYTES_PER_ROW = 3_000
# Of an extract, its packages on both sides, and what the servers unpack to look into them.
_COPIES = 10
_GIGABYTE = 1_000_000_000
_LEAST_ROWS = 1_000
Progress = Callable[[str], None]


def _sizes(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Numbers of rows, with commas between them."""
    try:
        sizes = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r}: write numbers of rows, such as 1000000,5000000") from None
    if any(size < _LEAST_ROWS for size in sizes):
        raise click.BadParameter(f"{text!r}: each size has at least {_LEAST_ROWS:,} rows")
    return sizes


@click.group(invoke_without_command=True, short_help="Measure refreshes beside their bare limits.")
@click.option(
    "--rows", type=click.IntRange(min=_LEAST_ROWS), default=2_000_000, show_default=True, help="Orders in the sample."
)
@click.option(
    "--changed",
    type=click.FloatRange(min=0, max=40, min_open=True),
    default=1,
    show_default=True,
    help="How many per cent of the keys change.",
)
@click.option(
    "--detector", "detectors", type=click.Choice(DETECTORS), multiple=True, help="Only these.  [default: all]"
)
@click.option(
    "--delivery", "deliveries", type=click.Choice(DELIVERIES), multiple=True, help="Only these.  [default: all]"
)
@click.option(
    "--growth",
    metavar="ROWS,ROWS,…",
    callback=_sizes,
    help="Instead: how refreshes grow with the extract, at 10,000 changed keys, and with the change.",
)
@click.option(
    "--growth-of",
    type=click.Choice(["full", "republish", "patch", "server", "trigger"]),
    multiple=True,
    help="Measure the growth of these only.  [default: all]",
)
@click.option("--resume", is_flag=True, help="Go on with the results of an earlier run that ended before its time.")
@click.option(
    "--write-docs",
    is_flag=True,
    help="Write docs/benchmarks, the README's goals, and the tables of docs/scale.md or docs/measuring.md, instead of build/benchmarks.",
)
@click.option(
    "--check", is_flag=True, help="Instead: count what refreshes ask for, and fail if that is more than recorded."
)
@click.option("--short", is_flag=True, help="With --check: a few refreshes only, without Spark.")
@click.option("--record", is_flag=True, help="With --check: let what was counted be the budget, and print what moved.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Another seed, other orders.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/bench.json"),
    show_default=True,
    help="Where the list of stages is written.",
)
@click.option("--keep", is_flag=True, help="Keep the folder of the run: specs, versions, Dagster's history.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.pass_context
def bench(
    context: click.Context,
    /,
    rows: int,
    changed: float,
    detectors: tuple[str, ...],
    deliveries: tuple[str, ...],
    growth: tuple[int, ...],
    growth_of: tuple[str, ...],
    seed: int,
    output: Path,
    *,
    resume: bool,
    write_docs: bool,
    check: bool,
    short: bool,
    record: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Measure full refreshes and refreshes by key on a sandbox of their own, each stage beside its bare limit.

    Compare the ratios, which come from one run on one machine; seconds differ from machine to machine. Exit code 1 if
    a published extract differs from the source.
    """
    if context.invoked_subcommand is not None:
        return
    progress, output = _progress(), output.absolute()
    if check:
        run_counts(short=short, record_anew=record, keep=keep, as_json=as_json, progress=progress)
        return
    report: Report | Growth
    if growth:
        report = run_growths(
            growth, growth_of, seed, resume=resume, write_docs=write_docs, keep=keep, progress=progress
        )
    else:
        from benchmarks.machine import setting

        before = setting()
        with own_place(rows * _BYTES_PER_ROW, keep=keep, progress=progress) as folder:
            from benchmarks.docs import write_stages
            from benchmarks.run import CaseStore, Wanted, run_bench

            wanted = Wanted(rows, changed, seed, detectors or DETECTORS, deliveries or DELIVERIES)
            store = CaseStore(output.with_suffix(".jsonl"), wanted, before, resume=resume)
            report = run_bench(folder, wanted, store, progress)
        progress(f"written: {write_stages(report, store.setting, in_docs=write_docs)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report.entries, indent=1) + "\n", encoding="utf-8")
    progress(f"written: {output}")
    conclude(report, as_json=as_json)


def run_growths(
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    seed: int,
    *,
    resume: bool,
    write_docs: bool,
    keep: bool,
    progress: Progress,
) -> Growth:
    """Measure growth; points are written to build/growth as soon as they exist."""
    from benchmarks.machine import setting

    points, before = Path("build/growth/points.jsonl").absolute(), setting()
    with own_place(max(sizes) * _BYTES_PER_ROW, keep=keep, progress=progress) as folder:
        from benchmarks.docs import write_growth
        from benchmarks.growth import KEYS, PointStore
        from benchmarks.growth_run import MEASURED, run_growth

        store = PointStore(points, seed, before, resume=resume)
        deliveries = names or tuple(MEASURED)
        report = run_growth(folder, sizes, keys=KEYS, seed=seed, store=store, deliveries=deliveries, progress=progress)
    progress(f"written: {write_growth(report, in_docs=write_docs)}")
    return report


def run_counts(*, short: bool, record_anew: bool, keep: bool, as_json: bool, progress: Progress) -> None:
    """Hold the counts of refreshes against benchmarks/budget.json, or record them there."""
    with own_place(_GIGABYTE, keep=keep, progress=progress) as folder:
        from benchmarks.check import record, run_check

        found = run_check(folder, short=short, progress=progress)
    if record_anew:
        record(found)
        click.echo("\n".join(found.moved) or "Nothing moved.")
        return
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.as_text())
    if not found.equal:
        raise click.ClickException("a refresh asks for more than its budget (benchmarks/budget.json).")


@bench.command(short_help="Measure the repacking of a large package.")
@click.option(
    "--gb",
    type=click.FloatRange(min=0.001, max=100),
    default=1,
    show_default=True,
    help="About how many gigabytes the extract has.",
)
@click.option("--keep", is_flag=True, help="Keep the folder of the run: the package, the servers' data and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def package(gb: float, *, keep: bool, as_json: bool) -> None:
    """Measure how the newest rows leave a published extract, from the download to the publish, beside a plain script.

    Time by step, and the most memory that each process held; Hyper's process apart. Exit code 1 if what either has
    published is not what had to remain.
    """
    size, progress = round(gb * _GIGABYTE), _progress()
    with own_place(_COPIES * size, keep=keep, progress=progress) as folder:
        from benchmarks.package_run import run_package_bench

        report = run_package_bench(folder, size=size, progress=progress)
    conclude(report, as_json=as_json)


@bench.command(short_help="Measure a load of files beside a bare COPY.")
@click.option(
    "--rows", type=click.IntRange(min=1_000), default=5_000_000, show_default=True, help="Orders in the Parquet files."
)
@click.option("--keep", is_flag=True, help="Keep the folder of the run: the files, the servers' data and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def load(rows: int, *, keep: bool, as_json: bool) -> None:
    """Measure a load of Parquet files by Spark beside PUT and COPY of the same files by one process.

    Exit code 1 if both tables differ.
    """
    progress = _progress()
    with own_place(rows * _BYTES_PER_ROW, keep=keep, progress=progress) as folder:
        from benchmarks.load_run import run_load_bench

        report = run_load_bench(folder, rows=rows, progress=progress)
    conclude(report, as_json=as_json)


@bench.command(short_help="Compare every way to bring an extract up to date, on the same data and the same change.")
@click.option(
    "--rows", type=click.IntRange(min=_LEAST_ROWS), default=2_000_000, show_default=True, help="Orders in the sample."
)
@click.option(
    "--changed",
    type=click.FloatRange(min=0, max=40, min_open=True),
    default=1,
    show_default=True,
    help="How many per cent of the keys change.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1, max=20),
    default=3,
    show_default=True,
    help="Repetitions of each way; a way that takes more than a minute runs once.",
)
@click.option("--way", "ways", type=click.Choice(list(BY_NAME)), multiple=True, help="Only these.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Another seed, other orders.")
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    default=900,
    show_default=True,
    help="Seconds after which a script is stopped; it counts as failed.",
)
@click.option("--resume", is_flag=True, help="Go on with the results of an earlier run that ended before its time.")
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/contest"),
    show_default=True,
    help="Where each result is written as soon as it exists.",
)
@click.option(
    "--write-docs", is_flag=True, help="Write docs/benchmarks and the README's table instead of build/benchmarks."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def contest(
    rows: int,
    changed: float,
    repetitions: int,
    ways: tuple[str, ...],
    seed: int,
    limit: float,
    work: Path,
    *,
    resume: bool,
    write_docs: bool,
    as_json: bool,
) -> None:
    """Measure our deliveries and detectors, Tableau's own refreshes, a script of 2021, pandas, pantab and hyperleaup.

    All on one table, after the same change, in turn; what each has published is compared with the source row by row. Exit
    code 1 if one of ours differs from it or failed.
    """
    from benchmarks.machine import setting

    progress, work = _progress(), work.absolute()
    with own_place(rows * _CONTEST_BYTES_PER_ROW, keep=False, progress=progress) as folder:
        from benchmarks.contest import Asked, Store, run_contest
        from benchmarks.docs import write_contest

        asked = Asked(rows, changed, seed, repetitions, ways or tuple(BY_NAME), limit)
        report = run_contest(folder, asked, Store(work, asked, setting(), resume=resume), progress)
    progress(f"written: {write_contest(report, in_docs=write_docs)}")
    conclude(report, as_json=as_json)


@bench.command(short_help="Compare a refresh in a new process with one in a process that has everything loaded.")
@click.option("--rows", type=click.IntRange(min=_LEAST_ROWS), default=200_000, show_default=True, help="Orders.")
@click.option("--keys", type=click.IntRange(min=8), default=1_000, show_default=True, help="How many of them change.")
@click.option("--repetitions", type=click.IntRange(min=1, max=20), default=3, show_default=True, help="Of each.")
@click.option(
    "--write-docs", is_flag=True, help="Write docs/benchmarks and the README's goals instead of build/benchmarks."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def starts(rows: int, keys: int, repetitions: int, *, write_docs: bool, as_json: bool) -> None:
    """Measure what the start of `tir refresh` costs while a Spark Connect server is up, and what a sensor's tick asks.

    Exit code 1 if what was published differs from the source.
    """
    from benchmarks.machine import setting

    progress, before = _progress(), setting()
    with own_place(rows * _BYTES_PER_ROW, keep=False, progress=progress) as folder:
        from benchmarks.docs import write_starts
        from benchmarks.start_run import run_starts

        report = run_starts(folder, rows=rows, keys=keys, repetitions=repetitions, setting=before, progress=progress)
    progress(f"written: {write_starts(report, in_docs=write_docs)}")
    conclude(report, as_json=as_json)


@bench.command(
    short_help="Compare a joined extract with one of two tables when one row changes that all facts refer to."
)
@click.option(
    "--facts",
    type=click.IntRange(min=_LEAST_ROWS),
    default=1_000_000,
    show_default=True,
    help="Facts that refer to the row.",
)
@click.option("--resume", is_flag=True, help="Go on with the results of an earlier run that ended before its time.")
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/star"),
    show_default=True,
    help="Where each result is written as soon as it exists.",
)
@click.option(
    "--write-docs",
    is_flag=True,
    help="Write docs/benchmarks and the table of docs/star.md instead of build/benchmarks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def star(facts: int, work: Path, *, resume: bool, write_docs: bool, as_json: bool) -> None:
    """Measure what one changed row of a dimension moves: a joined extract and a star, by `republish` and by `patch`.

    All are refreshed by key, on the same tables. Exit code 1 if one failed or differs from the source.
    """
    from benchmarks.machine import setting

    progress, file = _progress(), work.absolute() / "results.jsonl"
    with own_place(facts * _CONTEST_BYTES_PER_ROW, keep=False, progress=progress) as folder:
        from benchmarks.docs import write_star
        from benchmarks.star import StarStore
        from benchmarks.star_run import DIMENSION, run_star

        asked = {"facts": facts, "dimension": DIMENSION}
        report = run_star(folder, facts, StarStore(file, asked, setting(), resume=resume), progress)
    progress(f"written: {write_star(report, in_docs=write_docs)}")
    conclude(report, as_json=as_json)


def conclude(
    report: Report | Growth | PackageReport | LoadReport | Contest | Starts | StarReport, *, as_json: bool
) -> None:
    """Print the numbers; they count for nothing if the extract is wrong."""
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    if not report.equal:
        raise click.ClickException("what was published is not what it should be.")


def _progress() -> Progress:
    """Lines with the time since the start, on standard error: standard output stays a script's."""
    begun = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"[{time.monotonic() - begun:6.1f} s] {line}", err=True)

    return tell
