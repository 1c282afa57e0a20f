"""`tir verify`, `tir history`, `tir why`, `tir rollback` and `tir release`. Heavy imports are inside the commands."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from tir_dagster.cli.declared import find_declared
from tir_dagster.cli.output import AS_JSON, tell, working
from tir_dagster.spec.reading import load_specs


@click.command(short_help="Compare what is published with its source.")
@click.argument("extract")
@click.option(
    "--all-slices",
    is_flag=True,
    help="Compare every slice.  [default: those that the last refresh touched, and three that were longest not compared]",
)
@click.option("--rows", is_flag=True, help="Name the rows that differ: missing, extra, stale.")
@click.option("--values", is_flag=True, help="With --rows: also print the values of both sides.")
@click.option("--server", is_flag=True, help="Also download what the server holds, and compare it.")
@click.option(
    "--repair", is_flag=True, help="Replace what differs and compare again; if that does not help, load everything."
)
@AS_JSON
def verify(
    extract: str, *, all_slices: bool, rows: bool, values: bool, server: bool, repair: bool, as_json: bool
) -> None:
    """Compare what EXTRACT shows with its source, at the source version that it shows.

    Exit code 1 if something differs, or could not be compared. The result is recorded as the checks of published_datasource, so the
    next refresh repairs what differs.
    """
    if values and not rows:
        raise click.UsageError("--values shows the values of rows that differ. Add --rows, or leave --values out.")
    spec = find_declared(load_specs(), extract, "extract")
    with working(f"tir verify {extract}", of="--all-slices" if all_slices else ""):
        from tir_dagster.cli.audit import verify as work
        from tir_dagster.cli.refresh import Command
        from tir_dagster.orchestration.alerts.commands import tell_verified
        from tir_dagster.orchestration.home import dagster_instance

        with dagster_instance() as instance:
            command = Command(spec, instance, tell)

            def check(*, every: bool = False) -> work.VerifyOutcome:
                return work.verify(
                    command,
                    instance,
                    all_slices=all_slices or every,
                    rows=rows,
                    values=values,
                    server=server,
                    progress=tell,
                )

            outcome = check()
            tell_verified(spec, instance, outcome, tell, found=outcome.told)
            if repair and outcome.compared and not outcome.equal:
                click.echo("\n".join(work.lines_of(outcome)), err=True)
                outcome = work.repair(command, instance, lambda: check(every=True), tell)
                tell_verified(spec, instance, outcome, tell, found=outcome.told)
    click.echo(json.dumps(outcome.as_dict()) if as_json else "\n".join(work.lines_of(outcome)))
    if not (outcome.equal and outcome.compared):
        raise click.exceptions.Exit(1)


@click.command(short_help="List what was published, when, by whom.")
@click.argument("extract")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many, the newest first."
)
@AS_JSON
def history(extract: str, *, limit: int, as_json: bool) -> None:
    """List what was published of EXTRACT: versions, their source version and rows, who started them, and where they are kept."""
    spec = find_declared(load_specs(), extract, "extract")
    with working(f"tir history {extract}", doing="listing versions here and revisions on the server"):
        from tir_dagster.cli.audit import history as work
        from tir_dagster.orchestration.home import dagster_instance

        with dagster_instance() as instance:
            listed = work.list_history(spec, instance, limit=limit)
    if as_json:
        click.echo(json.dumps(asdict(listed)))
    else:
        click.echo("\n".join(work.history_lines(listed)))


@click.command(short_help="Tell which refreshes changed a row or a slice.")
@click.argument("extract")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="VALUE|NAME=VALUE",
    help="The row's key; repeat it for a key of several columns.",
)
@click.option("--slice", "slice_name", help="A slice instead of a row, such as 2026-03.")
@click.option("--table", help="Of an extract of several tables: which one; left out, the main one.")
@click.option("--column", help="Only this column; with --slice, how much refreshes added to its sum.")
@AS_JSON
def why(
    extract: str,
    *,
    keys: tuple[str, ...],
    slice_name: str | None,
    table: str | None,
    column: str | None,
    as_json: bool,
) -> None:
    """Tell why a row or a slice of EXTRACT looks as it does: which refreshes replaced it, from what to what, and what announced them.

    The rows that refreshes replaced are kept for `keep.history` days (default 30).
    """
    if bool(keys) == bool(slice_name):
        raise click.UsageError("Give either --key or --slice.")
    spec = find_declared(load_specs(), extract, "extract")
    with working(f"tir why {extract}", doing="looking through what refreshes replaced"):
        from tir_dagster.cli.audit import history as work
        from tir_dagster.orchestration.home import dagster_instance

        with dagster_instance() as instance:
            answer = work.tell_why(spec, instance, keys=keys, slice_name=slice_name, column=column, table=table)
    click.echo(json.dumps(asdict(answer)) if as_json else "\n".join(work.why_lines(answer)))


@click.command(short_help="Publish an earlier version again.")
@click.argument("extract")
@click.option(
    "--to",
    "version",
    required=True,
    metavar="VERSION",
    help="A kept version, such as v00000012 (see tir history), or `previous`: the one that was published before.",
)
@click.option("--hold", is_flag=True, help="Also keep refreshes from undoing it, until tir release.")
@click.option("--reason", default="rolled back by hand", show_default=True, help="With --hold: why; people see it.")
@click.option("--dry-run", is_flag=True, help="Only show what would be published.")
@AS_JSON
def rollback(extract: str, *, version: str, hold: bool, reason: str, dry_run: bool, as_json: bool) -> None:
    """Publish VERSION of EXTRACT again, guarded and confirmed like a refresh. The next refresh brings it up to date again."""
    spec = find_declared(load_specs(), extract, "extract")
    with working(f"tir rollback {extract}"):
        from tir_dagster.cli.audit import rollback as work
        from tir_dagster.orchestration.home import dagster_instance

        kept = reason if hold else ""
        with dagster_instance() as instance:
            outcome = work.roll_back(spec, instance, version, hold=kept, dry_run=dry_run, progress=tell)
    click.echo(json.dumps(asdict(outcome)) if as_json else outcome.sentence)


@click.command(short_help="End the hold of an extract.")
@click.argument("extract")
@AS_JSON
def release(extract: str, *, as_json: bool) -> None:
    """End the hold that `tir rollback --hold` put on EXTRACT: sensors and refreshes work again."""
    spec = find_declared(load_specs(), extract, "extract")
    from tir_dagster.cli.audit.rollback import release_hold

    sentence, was_held = release_hold(spec)
    click.echo(json.dumps({"extract": extract, "released": was_held}) if as_json else sentence)
