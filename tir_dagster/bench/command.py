"""The command itself. The work is imported when it runs, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import click

from tir_dagster.bench.place import own_place
from tir_dagster.bench.report import Report


@click.command()
@click.option(
    "--rows", type=click.IntRange(min=1_000), default=2_000_000, show_default=True, help="Orders in the sample."
)
@click.option(
    "--changed",
    type=click.FloatRange(min=0, max=40, min_open=True),
    default=1,
    show_default=True,
    help="How many per cent of the keys change.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Another seed, other orders.")
@click.option("--keep", is_flag=True, help="Keep the folder of the run: specs, versions, Dagster's history.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench(rows: int, changed: float, seed: int, *, keep: bool, as_json: bool) -> None:
    """Measure a full refresh and one by key on a sandbox of their own, each stage beside its bare limit.

    Compare the ratios, which come from one run on one machine; seconds differ from machine to machine. Exit code 1 if
    the published extract differs from the source.
    """
    progress = _progress()
    with own_place(rows, keep=keep, progress=progress) as folder:
        from tir_dagster.bench.run import run_bench  # noqa: PLC0415 - Dagster, Spark, the clients: seconds

        report = run_bench(folder, rows=rows, changed=changed, seed=seed, progress=progress)
    conclude(report, as_json=as_json)


def conclude(report: Report, *, as_json: bool) -> None:
    """Print the numbers; they count for nothing if the extract is wrong."""
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    if not report.equal:
        raise click.ClickException("the published extract differs from the source.")


def _progress() -> Callable[[str], None]:
    """Lines with the time since the start, on standard error: standard output stays a script's."""
    begun = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"[{time.monotonic() - begun:6.1f} s] {line}", err=True)

    return tell
