"""The commands `tir init`, `tir adopt` and `tir doctor`. Their work is imported when they run, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from tir_dagster.cli.output import AS_JSON, tell, working
from tir_dagster.errors import SourceError, SpecError
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.snowflake.names import TableName

COUNT = click.option(
    "--count/--no-count",
    default=None,
    help="Count values in the warehouse, or do not.  [default: count up to 500,000,000 rows]",
)


@click.command(short_help="Write a first spec from what the servers show.")
@click.argument("source", required=False, metavar="[DB.SCHEMA.TABLE]")
@click.option("--query", metavar="SQL|@FILE", help="A SELECT instead of a table.")
@click.option("--datasource", metavar="PROJECT/NAME", help="Where to publish; it may exist or not.")
@click.option("--name", help="Name of the extract.  [default: made of the datasource's name]")
@click.option(
    "--to",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: extracts.yaml, with --dg defs.yaml]",
)
@click.option("--dg", "as_component", is_flag=True, help="Write a component's defs.yaml for a dg project.")
@click.option("--append", is_flag=True, help="Add the extract to an existing spec file.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@COUNT
def init(
    source: str | None,
    query: str | None,
    datasource: str | None,
    name: str | None,
    target: Path | None,
    *,
    as_component: bool,
    append: bool,
    force: bool,
    yes: bool,
    count: bool | None,
) -> None:
    """Look at a Snowflake table (or a query) and a Tableau datasource, and write a commented spec with its reasons.

    Asks for what is missing if it runs on a terminal. Only reads, apart from the file that it writes. The row key is
    the declared primary key, or columns found unique; slices follow the distribution of rows; the detector and the
    delivery follow what the servers can do. What cannot be decided is a comment that begins with TO DO.
    """
    if as_component and append:
        raise click.UsageError(
            "--append adds to a spec file, and a defs.yaml holds one component. Leave one of the two out."
        )
    asks = sys.stdin.isatty() and not yes
    if source is None and query is None:
        source = _asked(
            asks, "Snowflake table (DATABASE.SCHEMA.TABLE)", "Name a table (DATABASE.SCHEMA.TABLE), or give --query."
        )
    if source is not None and query is not None:
        raise click.UsageError("Give a table or --query, not both.")
    if datasource is None:
        datasource = _asked(
            asks, "Tableau datasource (PROJECT/NAME)", "Name the datasource: --datasource PROJECT/NAME."
        )
    project, _, datasource_name = datasource.strip().rpartition("/")
    if not project or not datasource_name:
        raise click.UsageError(f"--datasource {datasource}: write PROJECT/NAME, such as myproject/orders.")
    file = target or Path("defs.yaml" if as_component else "extracts.yaml")
    if file.exists() and not (append or force):
        raise SpecError(
            f"{file} exists. Name another file with --to, add to it with --append, or replace it with --force."
        )
    table = _table(source) if source is not None else None
    text = _query(query) if query is not None else None
    from tir_dagster.cli.setup.draft import defs_text, draft, write_new, write_spec_file
    from tir_dagster.cli.setup.site import optional_client
    from tir_dagster.snowflake.connection import SnowflakeAccess

    with (
        stopping("tir init", lambda: f"{file} was not written."),
        working("tir init", of=source or ""),
        optional_client() as client,
    ):
        made = draft(
            SnowflakeAccess.from_environment(os.environ),
            table=table,
            query=text,
            project=project,
            datasource=datasource_name,
            client=client,
            name=name,
            count=count,
            tell=tell,
        )
    if as_component:
        write_new(file, defs_text(made), force=force)
    else:
        write_spec_file(file, [made], append=append, force=force)
    click.echo(f"{file}: extract {made.name} of {made.source}")
    for field in ("row_key", "slices", "changes", "delivery"):
        click.echo(f"  {field:<9} {made.proposal.in_words(field)}")
    for todo in made.proposal.todos:
        click.echo(f"  to do     {todo}")
    next_step = f"tir --specs {file} plan {made.name}"
    if as_component:
        # Without resources `dg list defs` fails, and its error does not say where they come from.
        next_step = (
            "once in the project, dg.Definitions(resources=tir_dagster.environment_resources()); then dg check defs"
        )
    click.echo(f"Next: {next_step}")


def _asked(asks: bool, what: str, missing: str) -> str:
    if not asks:
        raise click.UsageError(missing)
    return str(click.prompt(what, err=True)).strip()


def _table(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except SourceError as error:
        raise click.UsageError(str(error)) from None


def _query(text: str) -> str:
    """Return the query, read from the file if it is written as @FILE."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--query {text}: {getattr(error, 'strerror', None) or 'not text in UTF-8'}.") from error


@click.command(short_help="List a site's extracts that could be kept by key.")
@click.option(
    "--project", "projects", multiple=True, metavar="PATH", help="Only this project and those below it; repeatable."
)
@click.option(
    "--look",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="How many extracts to look inside, at most.",
)
@click.option(
    "--write",
    "target",
    type=click.Path(path_type=Path),
    help="Write draft specs to this folder, or to this .yaml file.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Write drafts of these only (NAME or PROJECT/NAME); repeatable."
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@COUNT
@AS_JSON
def adopt(
    projects: tuple[str, ...],
    look: int,
    target: Path | None,
    only: tuple[str, ...],
    *,
    force: bool,
    count: bool | None,
    as_json: bool,
) -> None:
    """List the extracts of a site, how many hours of refresh each took in the last week, and whether it could be kept by key.

    Ranked by the hours that would be saved. Only reads on the server; documents are downloaded without their extracts.
    With --write, drafts specs for those that can be kept by key (or for --only), as tir init does. Exit code 1 if a
    draft could not be made.
    """
    if only and target is None:
        raise click.UsageError("--only chooses what --write FOLDER or --write FILE.yaml writes. Give both.")
    from tir_dagster.cli.setup.adopting import write_drafts
    from tir_dagster.cli.setup.site import chosen_candidates, looking_client, scan_lines, scan_site

    written: list[str] = []
    failed: list[str] = []
    with (
        stopping("tir adopt", lambda: "Nothing was changed on the server."),
        working("tir adopt", doing="listing the site's datasources"),
        looking_client() as client,
    ):
        scan = scan_site(client, projects, most_inside=look, tell=tell)
        if target is not None:
            chosen = chosen_candidates(scan, only)
            written, failed = write_drafts(client, chosen, target, force=force, count=count, tell=tell)
    if as_json:
        click.echo(json.dumps({**scan.as_dict(), "written": written, "failed": failed}))
    else:
        click.echo("\n".join([*scan_lines(scan), *(f"written: {file}" for file in written)]))
    for problem in failed:
        click.echo(f"not written: {problem}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


GROUPS = ("machine", "snowflake", "tableau", "slack", "servicenow", "s3")


@click.command(short_help="Check this machine and the servers, and say what to fix.")
@click.argument("groups", nargs=-1, type=click.Choice(GROUPS), metavar="[GROUP]...")
@click.option("--spark", is_flag=True, help="Also start Spark, which takes some seconds.")
@click.option("--timeout", type=click.IntRange(min=1), default=60, show_default=True, help="Seconds for each check.")
@click.option("--env", "environment", is_flag=True, help="List the environment variables, and whether they are set.")
@AS_JSON
def doctor(groups: tuple[str, ...], timeout: int, *, spark: bool, environment: bool, as_json: bool) -> None:
    """Check this machine, Snowflake, Tableau, and Slack, ServiceNow and S3 where they are configured or declared.

    GROUP chooses some of: machine, snowflake, tableau, slack, servicenow, s3. Each line is ok, a warning, or a failure
    with what to do. Exit code 1 if there is a failure. Nothing is written on the servers.
    """
    from tir_dagster.cli.setup.checks import finding_lines, run_group, summary
    from tir_dagster.cli.setup.doctor import Installation, read_declared
    from tir_dagster.cli.setup.environment import environment_lines, variable_states

    declared, _ = read_declared()
    if environment:
        states = variable_states(os.environ, declared.extracts)
        click.echo(json.dumps([one.as_dict() for one in states]) if as_json else "\n".join(environment_lines(states)))
        return
    installation = Installation(os.environ, declared, with_spark=spark)
    findings = []
    checked = f"{' '.join(groups)}{' --spark' if spark else ''}".strip()
    with stopping("tir doctor", lambda: "Nothing was changed."), working("tir doctor", of=checked):
        for group in groups or installation.wanted():
            tell(f"checking {group}")
            for finding in run_group(group, installation.checks(group), seconds=timeout):
                findings.append(finding)
                if not as_json:
                    click.echo("\n".join(finding_lines(finding)))
    click.echo(json.dumps([finding.as_dict() for finding in findings]) if as_json else summary(findings))
    if any(finding.state == "failure" for finding in findings):
        raise click.exceptions.Exit(1)
