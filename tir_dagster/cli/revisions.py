"""The command `tir revisions`. Its work is imported when it runs, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tir_dagster.spec.reading import load_specs

if TYPE_CHECKING:
    from tir_dagster.cli.kept_revisions import RevisionList, Revisions


@click.command(short_help="List or fetch revisions and kept versions of an extract.")
@click.argument("extract")
@click.option("--fetch", "revision", metavar="N|vN", help="Fetch a revision's package, or a kept version's Hyper file.")
@click.option("--to", "target", type=click.Path(dir_okay=False, path_type=Path), help="The file to write it to.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def revisions(extract: str, revision: str | None, target: Path | None, *, force: bool, as_json: bool) -> None:
    """List the server's revisions of EXTRACT and the versions kept on this machine, or fetch one of them.

    `--fetch 3 --to orders.tdsx` fetches a revision from the server, `--fetch v00000012 --to orders.hyper` a version.
    """
    _check(revision, target, force=force)
    from tir_dagster.cli.commands import find_spec
    from tir_dagster.cli.kept_revisions import Revisions
    from tir_dagster.orchestration.home import dagster_instance

    spec = find_spec(load_specs(), extract)
    with dagster_instance() as instance:
        known = Revisions(spec, instance, lambda line: click.echo(line, err=True))
    if revision is not None and target is not None:
        click.echo(_fetched(known, revision, target, as_json=as_json))
        return
    listed = known.listed()
    click.echo(json.dumps(asdict(listed)) if as_json else "\n".join(_lines(listed, known)))


def _check(revision: str | None, target: Path | None, *, force: bool) -> None:
    if (revision is None) != (target is None):
        raise click.UsageError("--fetch N and --to FILE must be used together.")
    if revision is not None and not re.fullmatch(r"v?\d+", revision, re.ASCII):
        raise click.UsageError(f"{revision!r} is neither a revision such as 3 nor a version such as v00000012.")
    if target is not None and target.exists() and not force:
        raise click.UsageError(f"{target} exists. Name another file, or add --force to replace it.")


def _fetched(known: Revisions, revision: str, target: Path, *, as_json: bool) -> str:
    fetch = (
        known.fetch_version
        if revision.startswith("v")
        else lambda number, file: known.fetch_revision(int(number), file)
    )
    sentence, size = fetch(revision, target), target.stat().st_size
    return (
        json.dumps({"fetched": revision, "file": str(target), "bytes": size})
        if as_json
        else f"{sentence} ({_size(size)})."
    )


def _lines(listed: RevisionList, revisions: Revisions) -> list[str]:
    datasource = revisions.spec.datasource
    lines = [f"{listed.extract}: datasource {datasource.name!r} in project {datasource.project!r}"]
    if listed.datasource_id is None:
        lines.append("  it does not exist yet; a refresh creates it")
    elif listed.revisions is None:
        lines.append("  the server shows no revisions")
    for entry in listed.revisions or ():
        marks = [mark for mark, is_so in (("current", entry.current), ("confirmed", entry.confirmed)) if is_so]
        lines.append(_line(str(entry.number), entry.published_at, entry.bytes, entry.rows, marks))
    lines.append(f"kept in {revisions.versions.folder}")
    version_lines = [
        _line(entry.id, entry.made_at, entry.bytes, entry.rows, ["confirmed"] if entry.confirmed else [])
        for entry in listed.versions
    ]
    return lines + (version_lines or ["  none"])


def _line(name: str, moment: str | None, size: int | None, rows: int | None, marks: list[str]) -> str:
    counted = "-" if rows is None else f"{rows:,} rows"
    line = f"  {name:<10} {moment or '-':<20}  {_size(size):>10}  {counted:>16}  {', '.join(marks)}"
    return line.rstrip()


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} KB"
