"""The command `tir probe-server`. Its work is imported when it runs, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tir_dagster.cli.output import AS_JSON
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.snowflake.names import TableName

if TYPE_CHECKING:
    from tir_dagster.probe.doubts import Findings


@click.command("probe-server", short_help="Ask real servers what no document says.")
@click.option("--scratch", metavar="PROJECT", help="Also publish, patch and delete a small datasource in this project.")
@click.option("--copy-of", metavar="PROJECT/DATASOURCE", help="Also refresh a copy of this extract in that project.")
@click.option("--snowflake", is_flag=True, help="Also ask Snowflake about its session.")
@click.option(
    "--table", "tables", multiple=True, metavar="DB.SCHEMA.TABLE", help="And about a table or view; repeatable."
)
@click.option(
    "--snowflake-scratch", metavar="DB.SCHEMA", help="Also create, alter and drop a small table in this schema."
)
@AS_JSON
def probe_server(
    scratch: str | None,
    copy_of: str | None,
    *,
    snowflake: bool,
    tables: tuple[str, ...],
    snowflake_scratch: str | None,
    as_json: bool,
) -> None:
    """Ask Tableau Server, and Snowflake if told so, what no document says; docs/known-doubts.md has the questions.

    Only reads, unless --scratch or --snowflake-scratch names a place for content of its own, which is deleted at the end.
    The answers name no server, no user and no content.
    """
    if copy_of is not None and (scratch is None or "/" not in copy_of.strip("/")):
        raise click.UsageError("--copy-of PROJECT/DATASOURCE also needs --scratch PROJECT, where the copy goes.")
    if snowflake_scratch is not None and snowflake_scratch.count(".") != 1:
        raise click.UsageError(f"--snowflake-scratch {snowflake_scratch}: write DATABASE.SCHEMA.")
    from tir_dagster.probe.doubts import Findings

    findings = Findings(lambda line: click.echo(line, err=True))
    findings.server["tir_dagster"] = version("tir_dagster")
    asks_snowflake = snowflake or bool(tables) or snowflake_scratch is not None
    with stopping(
        "tir probe-server", lambda: "What it made on the servers is deleted, unless an error says otherwise."
    ):
        if os.environ.get("TABLEAU_SERVER_URL") or not asks_snowflake:
            _ask_tableau(findings, scratch, copy_of)
        if asks_snowflake:
            _ask_snowflake(findings, tables, snowflake_scratch)
    click.echo(json.dumps(findings.as_dict(), indent=2) if as_json else "\n".join(findings.lines()))


def _ask_tableau(findings: Findings, scratch: str | None, copy_of: str | None) -> None:
    from tir_dagster.probe.reading import probe_reading
    from tir_dagster.probe.scratch import Copy, probe_scratch
    from tir_dagster.tableau.access import TableauAccess
    from tir_dagster.tableau.client import TableauClient
    from tir_dagster.tableau.datasources import find_project

    copy = None
    if copy_of is not None:
        copied_project, _, name = copy_of.strip().rpartition("/")
        user, password = (os.environ.get(f"SNOWFLAKE_{part}", "") for part in ("USER", "PASSWORD"))
        if not (user and password):
            raise click.UsageError("--copy-of refreshes the copy with SNOWFLAKE_USER and SNOWFLAKE_PASSWORD. Set them.")
        copy = Copy(copied_project, name, user, password)
    with TableauClient(TableauAccess.from_environment(os.environ)) as client:
        # First: a wrong name is said at once.
        project = find_project(client, scratch) if scratch is not None else None
        probe_reading(client, findings)
        if project is not None:
            with tempfile.TemporaryDirectory(prefix="tir-probe-") as folder:
                probe_scratch(client, project, findings, Path(folder), copy=copy)


def _ask_snowflake(findings: Findings, tables: tuple[str, ...], scratch: str | None) -> None:
    from tir_dagster.probe.warehouse import probe_snowflake, probe_snowflake_scratch
    from tir_dagster.snowflake.connection import SnowflakeAccess

    access = SnowflakeAccess.from_environment(os.environ)
    probe_snowflake(access, [TableName.parse(table) for table in tables], findings)
    if scratch is not None:
        place = TableName.parse(f"{scratch}.T")
        probe_snowflake_scratch(access, place.database, place.schema, findings)
