"""The commands `tir spark …`: one Spark server in the background for all processes of this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version

import click


@click.group(short_help="One Spark server in the background for all processes.")
def spark() -> None:
    """One Spark server for all processes of this machine, on loopback only. Refreshes and loads use it while it runs.

    TIR_HOME (default: .tir in this folder) selects the server; each home has its own.
    """


@spark.command()
def up() -> None:
    """Start the Spark server in the background and wait until it runs tasks. Does nothing if it already runs."""
    from tir_dagster.orchestration.home import tir_home
    from tir_dagster.spark.server import start_server

    begun = time.monotonic()
    server, started = start_server(tir_home(), os.environ)
    word = f"started in {time.monotonic() - begun:.1f} s" if started else "already running"
    click.echo(f"Spark: {word}, {server.address} (pid {server.pid}). Refreshes and loads of {tir_home()} use it.")


@spark.command()
def down() -> None:
    """Stop the Spark server. Later runs start their own Spark."""
    from tir_dagster.orchestration.home import tir_home
    from tir_dagster.spark.server import stop_server

    server = stop_server(tir_home())
    click.echo(f"Spark: {f'stopped (pid {server.pid})' if server else 'was not running'}")


@spark.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Show the Spark server. Exit code 0 if it runs and is used, otherwise 1."""
    from tir_dagster.orchestration.home import tir_home
    from tir_dagster.spark.server import log_file, server_state

    home, (state, server) = tir_home(), server_state(tir_home())
    alive = server if server and state != "ended" else None
    if as_json:
        process = {name: getattr(alive, name, None) for name in ("address", "pid", "port")}
        click.echo(json.dumps({"home": str(home), "state": state, **process, "log": str(log_file(home))}, indent=2))
    else:
        advice = {
            "ended": "It ended unexpectedly; see its log. Start it again: tir spark up",
            "outdated": "It was started with other package versions and is not used. Restart it: tir spark up",
            "not answering": "It is starting or hangs. Restart it: tir spark up",
        }
        click.echo(f"Spark server of {home}: {state}" + (f", {alive.address} (pid {alive.pid})" if alive else ""))
        click.echo("\n".join(filter(None, [advice.get(state), f"log: {log_file(home)}"])))
    sys.exit(0 if state == "running" else 1)


@spark.command()
def requirements() -> None:
    """Print what the Python of executors on other machines needs, in the versions used here: a file for pip.

    tir_dagster itself is not in it: its code is sent with the tasks.
    """
    from tir_dagster.spark.package import TASK_PACKAGES

    click.echo(f"# for Python {sys.version_info.major}.{sys.version_info.minor}")
    for name in TASK_PACKAGES:
        click.echo(f"{name}=={version(name)}")
