"""The command `tir revisions`. Its work is imported when it runs, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tir_dagster.cli.declared import find_declared
from tir_dagster.cli.output import AS_JSON, tell, working
from tir_dagster.spec.reading import load_specs

if TYPE_CHECKING:
    from tir_dagster.cli.kept_revisions import RevisionList
    from tir_dagster.spec.extract import ExtractSpec


@click.command(short_help="List or fetch revisions and kept versions of an extract.")
@click.argument("extract")
@click.option("--fetch", "revision", metavar="N|vN", help="Fetch a revision's package, or a kept version's Hyper file.")
@click.option("--to", "target", type=click.Path(dir_okay=False, path_type=Path), help="The file to write it to.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@AS_JSON
def revisions(extract: str, revision: str | None, target: Path | None, *, force: bool, as_json: bool) -> None:
    """List the server's revisions of EXTRACT and the versions kept on this machine, or fetch one of them.

    `--fetch 3 --to orders.tdsx` fetches a revision from the server, `--fetch v00000012 --to orders.hyper` a version.
    """
    _check(revision, target, force=force)
    spec = find_declared(load_specs(), extract, "extract")
    if revision is None or target is None:
        with working(f"tir revisions {extract}", doing="listing the server's revisions and the versions kept here"):
            from tir_dagster.cli import kept_revisions as work
            from tir_dagster.orchestration.home import dagster_instance

            with dagster_instance() as instance:
                listed = work.list_revisions(spec, instance)
        folder = work.version_store(spec).folder
        click.echo(json.dumps(asdict(listed)) if as_json else "\n".join(_lines(listed, spec, folder)))
        return
    with working(f"tir revisions {extract}", of="--fetch"):
        from tir_dagster.cli import kept_revisions as work

        if revision.startswith("v"):
            sentence = work.fetch_version(spec, revision, target)
        else:
            sentence = work.fetch_revision(spec, int(revision), target, tell)
    size = target.stat().st_size
    fields = {"fetched": revision, "file": str(target), "bytes": size}
    click.echo(json.dumps(fields) if as_json else f"{sentence} ({_size(size)}).")


def _check(revision: str | None, target: Path | None, *, force: bool) -> None:
    if (revision is None) != (target is None):
        raise click.UsageError("--fetch N and --to FILE must be used together.")
    if revision is not None and not re.fullmatch(r"v?\d+", revision, re.ASCII):
        raise click.UsageError(f"{revision!r} is neither a revision such as 3 nor a version such as v00000012.")
    if target is not None and target.exists() and not force:
        raise click.UsageError(f"{target} exists. Name another file, or add --force to replace it.")


def _lines(listed: RevisionList, spec: ExtractSpec, folder: Path) -> list[str]:
    lines = [f"{spec.name}: datasource {spec.datasource.name!r} in project {spec.datasource.project!r}"]
    if listed.datasource_id is None:
        lines.append("  it does not exist yet; a refresh creates it")
    elif listed.revisions is None:
        lines.append("  the server shows no revisions")
    for entry in listed.revisions or ():
        marks = [mark for mark, is_so in (("current", entry.current), ("confirmed", entry.confirmed)) if is_so]
        lines.append(_line(str(entry.number), entry.published_at, entry.bytes, entry.rows, marks))
    lines.append(f"kept in {folder}")
    for version in listed.versions:
        marks = ["confirmed"] if version.confirmed else []
        lines.append(_line(version.id, version.made_at, version.bytes, version.rows, marks))
    return lines if listed.versions else [*lines, "  none"]


def _line(name: str, moment: str | None, size: int | None, rows: int | None, marks: list[str]) -> str:
    counted = "-" if rows is None else f"{rows:,} rows"
    line = f"  {name:<10} {moment or '-':<20}  {_size(size):>10}  {counted:>16}  {', '.join(marks)}"
    return line.rstrip()


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} KB"
