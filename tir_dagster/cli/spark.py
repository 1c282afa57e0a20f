"""`tir spark`: one Spark for all processes of this machine, kept in the background."""

from __future__ import annotations

import json
import os
import sys
import time

import click


@click.group(short_help="One Spark for all processes, kept in the background.")
def spark() -> None:
    """One Spark for all processes of this machine, on loopback only: refreshes and loads use it while it runs.

    TIR_HOME (default: .tir in this folder) chooses the server; two homes are two servers.
    """


@spark.command()
def up() -> None:
    """Start the Spark server in the background and wait until it runs tasks; harmless when it already runs."""
    from tir_dagster.orchestration.home import tir_home  # noqa: PLC0415
    from tir_dagster.spark.server import start_server  # noqa: PLC0415

    begun = time.monotonic()
    server, started = start_server(tir_home(), os.environ)
    word = f"started in {time.monotonic() - begun:.1f} s" if started else "already running"
    click.echo(f"Spark: {word}, {server.address} (pid {server.pid}). Refreshes and loads of {tir_home()} use it.")


@spark.command()
def down() -> None:
    """End the Spark server; later runs start a Spark of their own."""
    from tir_dagster.orchestration.home import tir_home  # noqa: PLC0415
    from tir_dagster.spark.server import stop_server  # noqa: PLC0415

    server = stop_server(tir_home())
    click.echo(f"Spark: {f'stopped (pid {server.pid})' if server else 'was not running'}")


@spark.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Show the Spark server; exit code 0 when it runs and is used, else 1."""
    from tir_dagster.orchestration.home import tir_home  # noqa: PLC0415
    from tir_dagster.spark.server import log_file, server_state  # noqa: PLC0415

    state, server = server_state(tir_home())
    alive = server if server and state != "ended" else None
    if as_json:
        fields = {
            "home": str(tir_home()),
            "state": state,
            "address": alive.address if alive else None,
            "pid": alive.pid if alive else None,
            "port": alive.port if alive else None,
            "log": str(log_file(tir_home())),
        }
        click.echo(json.dumps(fields, indent=2))
    else:
        more = {
            "ended": "It ended by itself; its log says why. Start it again: tir spark up",
            "outdated": "It was started by other versions of the packages and is not used. Start it anew: tir spark up",
            "not answering": "It is starting, or hangs. Start it anew: tir spark up",
        }
        where = f", {alive.address} (pid {alive.pid})" if alive else ""
        click.echo(f"Spark server of {tir_home()}: {state}{where}")
        click.echo("\n".join(filter(None, [more.get(state), f"log: {log_file(tir_home())}"])))
    sys.exit(0 if state == "running" else 1)
