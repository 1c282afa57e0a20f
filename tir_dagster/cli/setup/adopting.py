"""Drafts for the extracts that `tir adopt` found: one file each in a folder, or all in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tir_dagster.cli.setup.draft import Draft, draft, write_spec_file
from tir_dagster.cli.setup.proposal import extract_name
from tir_dagster.cli.setup.site import Candidate
from tir_dagster.errors import SpecError, TirError
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.tableau.client import TableauClient


def write_drafts(
    client: TableauClient,
    chosen: Sequence[Candidate],
    target: Path,
    *,
    force: bool,
    count: bool | None,
    tell: Callable[[str], None],
) -> tuple[list[str], list[str]]:
    """Write the drafts; return the files, and a sentence for each extract of which none could be made."""
    names = _names(chosen)
    is_file = target.suffix in (".yaml", ".yml")
    files = {name: target if is_file else target / f"{name}.yaml" for name in names}
    if (taken := sorted({str(file) for file in files.values() if file.exists()})) and not force:
        raise SpecError(
            f"{', '.join(taken)} exist{'s' if len(taken) == 1 else ''}. Name another place, or replace with --force."
        )
    access = SnowflakeAccess.from_environment(os.environ)
    drafts: list[Draft] = []
    failed: list[str] = []
    for number, (name, candidate) in enumerate(zip(names, chosen, strict=True), start=1):
        tell(f"{number} of {len(chosen)}: drafting {candidate.path}")
        try:
            drafts.append(_draft(client, access, candidate, name, count=count, tell=tell))
        except TirError as error:
            failed.append(f"{candidate.path}: {error}")
    if is_file and drafts:
        write_spec_file(target, drafts, append=False, force=force)
    elif drafts:
        for made in drafts:
            write_spec_file(files[made.name], [made], append=False, force=force)
    return sorted({str(files[made.name]) for made in drafts}), failed


def _names(chosen: Sequence[Candidate]) -> list[str]:
    """Return a name for each; those of one name get the project's in front, or a number."""
    names: list[str] = []
    for candidate in chosen:
        options = [extract_name(candidate.name), extract_name(candidate.path)]
        options += [f"{options[1]}_{number}" for number in range(2, len(chosen) + 2)]
        names.append(next(name for name in options if name not in names))
    return names


def _draft(
    client: TableauClient,
    access: SnowflakeAccess,
    candidate: Candidate,
    name: str,
    *,
    count: bool | None,
    tell: Callable[[str], None],
) -> Draft:
    if candidate.source is None:
        raise SpecError("it does not say which one table or query of Snowflake it shows. Draft it by tir init.")
    return draft(
        access,
        table=candidate.source.table,
        query=candidate.source.query,
        project=candidate.project,
        datasource=candidate.name,
        client=client,
        name=name,
        count=count,
        tell=tell,
    )
