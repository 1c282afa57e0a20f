"""The commands `tir sandbox …`. Their work is imported when they run, so that `tir --help` answers at once."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tir_dagster.cli.output import working
from tir_dagster.sandbox import processes
from tir_dagster.sandbox.home import SandboxHome

if TYPE_CHECKING:
    from tir_dagster.sandbox.processes import ServerState

PORT = click.IntRange(1, 65535)
COUNT = click.IntRange(min=0)
SEED = click.IntRange(min=0)


@click.group(short_help="The embedded servers, on this machine only.")
def sandbox() -> None:
    """The embedded Snowflake, Tableau Server, Slack, ServiceNow and S3, on this machine only.

    TIR_HOME (default: .tir in this folder) selects the sandbox; each home has its own.
    """


@sandbox.command(short_help="Start the servers in the background.")
@click.option("--warehouse-port", type=PORT, help="Port of the warehouse.  [default: the last one used, or a free one]")
@click.option("--tableau-port", type=PORT, help="Port of Tableau Server.  [default: the last one used, or a free one]")
@click.option(
    "--people-port", type=PORT, help="Port of Slack and ServiceNow.  [default: the last one used, or a free one]"
)
@click.option("--storage-port", type=PORT, help="Port of the S3 stand-in.  [default: the last one used, or a free one]")
def up(**ports: int | None) -> None:
    """Start the servers in the background. Does nothing if they already run."""
    chosen_ports = {name.removesuffix("_port"): port for name, port in ports.items() if port}
    for server, port in chosen_ports.items():
        if other := next((name for name in chosen_ports if name != server and chosen_ports[name] == port), None):
            raise click.UsageError(f"--{server}-port and --{other}-port are both {port}. Choose two different ports.")
    begun = time.monotonic()
    home = SandboxHome.from_environment()
    with working("tir sandbox up"):
        states = processes.start(home, chosen_ports)
    for state in states.values():
        word = "started" if state.started_now else "already running"
        click.echo(f"{state.server}: {word}, {state.url} (pid {state.pid})")
    if any(state.started_now for state in states.values()):
        click.echo(f"The sandbox in {home.root} is up ({time.monotonic() - begun:.1f} s).")
        click.echo('To set its addresses and secrets in this shell: eval "$(tir sandbox env)"')


@sandbox.command()
def down() -> None:
    """Stop the servers. Their data stays."""
    with working("tir sandbox down"):
        states = processes.stop(SandboxHome.from_environment())
    for state in states.values():
        click.echo(f"{state.server}: {f'stopped (pid {state.pid})' if state.pid else 'was not running'}")


@sandbox.command(short_help="Show every server.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Show every server. Exit code 0 if all run, otherwise 1."""
    home = SandboxHome.from_environment()
    states = processes.status(home)
    if as_json:
        click.echo(
            json.dumps(
                {"home": str(home.root), "servers": {name: _as_json(state) for name, state in states.items()}}, indent=2
            )
        )
    else:
        click.echo(f"Sandbox in {home.root}")
        for state in states.values():
            _print_state(state)
    sys.exit(0 if all(state.running for state in states.values()) else 1)


@sandbox.command(short_help="Print the variables that clients need.")
def env() -> None:
    """Print the variables that clients need, as `export` lines: eval "$(tir sandbox env)"."""
    for name, value in processes.environment(SandboxHome.from_environment()).items():
        click.echo(f"export {name}={shlex.quote(value)}")


@sandbox.command(short_help="Delete data and logs; keep names.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(yes: bool) -> None:
    """Delete the sandbox's data and logs; names, secrets and ports stay."""
    home = SandboxHome.from_environment()
    if not yes:
        click.confirm(f"Delete all tables, datasources and logs of the sandbox in {home.root}?", abort=True)
    with working("tir sandbox reset"):
        states = processes.reset(home)
    click.echo(f"The sandbox in {home.root} is empty now.")
    for state in states.values():
        if state.running:
            click.echo(f"{state.server}: started again, {state.url} (pid {state.pid})")


@sandbox.command(short_help="Fill the sandbox with the sample.")
@click.option("--rows", type=click.IntRange(min=1), default=200_000, show_default=True, help="Orders in the table.")
@click.option("--seed", type=SEED, default=1, show_default=True, help="Another seed gives other orders.")
@click.option("--until", metavar="YYYY-MM", help="The last of the 24 months.  [default: the current one]")
@click.option(
    "--job-seconds",
    type=click.IntRange(min=1),
    default=900,
    show_default=True,
    help="How long to wait for the datasource's first refresh.",
)
def seed(rows: int, seed: int, until: str | None, job_seconds: int) -> None:
    """Fill the sandbox: the table MYDB.MYSCHEMA.MYTABLE and the datasource "mydatasource" on it.

    An existing sample is replaced. The same options give the same rows.
    """
    from tir_dagster.sandbox import sample

    try:
        month = sample.parse_month(until)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--until") from error
    environment = processes.environment(SandboxHome.from_environment())
    begun = time.monotonic()
    with working("tir sandbox seed", of=f"{rows} rows"):
        table = sample.seed_table(environment, rows=rows, seed=seed, until=month, progress=click.echo)
        click.echo(f"Table {sample.TABLE}: {table.rows:,} rows, {table.months} ({table.seconds:.1f} s).")
        datasource = sample.seed_datasource(environment, timeout=job_seconds, progress=click.echo)
    click.echo(
        f'Datasource "{datasource.name}" in project "{datasource.project}": published and refreshed'
        f" ({datasource.seconds:.1f} s)."
    )
    click.echo(f"Done in {time.monotonic() - begun:.1f} s. Next: tir sandbox change")


@sandbox.command(short_help="Change the sample table and print the changes.")
@click.option("--seed", type=SEED, default=1, show_default=True, help="Another seed gives another change.")
@click.option("--inserts", type=COUNT, default=400, show_default=True, help="New orders, some in old months.")
@click.option("--updates", type=COUNT, default=300, show_default=True, help="Changed orders of old months.")
@click.option("--moves", type=COUNT, default=60, show_default=True, help="Orders that get a date in another month.")
@click.option("--deletes", type=COUNT, default=200, show_default=True, help="Deleted orders.")
@click.option(
    "--recent",
    type=click.IntRange(min=2),
    help="Change only this many newest months, and only orders with a date.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def change(seed: int, recent: int | None, as_json: bool, **counts: int) -> None:
    """Change the sample table in one transaction, as a business would, and print the changes by month."""
    from tir_dagster.sandbox import sample

    environment = processes.environment(SandboxHome.from_environment())
    with working("tir sandbox change"):
        account = sample.change_table(environment, seed=seed, mix=sample.Mix(**counts), recent=recent)
    click.echo(json.dumps(account.as_json(), indent=2) if as_json else account.as_text())


def _as_json(state: ServerState) -> dict[str, Any]:
    fields = {"running": state.running, "state": state.state, "url": state.url, "pid": state.pid, "port": state.port}
    return {**fields, "log": str(state.log), "data": str(state.data), "bytes": state.size}


def _print_state(state: ServerState) -> None:
    where = f"  {state.url}  (pid {state.pid})" if state.pid else ""
    click.echo(f"{state.server}: {state.state}{where}")
    click.echo(f"  data  {state.data}  ({_in_words(state.size)})")
    click.echo(f"  log   {state.log}")


def _in_words(size: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
