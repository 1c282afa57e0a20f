"""The commands `tir webhooks …`: register webhooks in Tableau and receive its events. Heavy imports are inside the commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tir_dagster.tableau.client import TableauClient
    from tir_dagster.tableau.webhooks import Webhook

DEFAULT_PORT = 8642


@click.group(short_help="Receive events when Tableau refreshes a datasource.")
def webhooks() -> None:
    """Receive events when Tableau refreshes a datasource, by schedule or by hand.

    Each refresh becomes an observation of the extract's `published_datasource` in Dagster.
    """


@webhooks.command(short_help="Register the webhooks in Tableau.")
@click.option("--url", required=True, help="Public address of the receiver, such as https://host/tir.")
def register(url: str) -> None:
    """Register the webhooks in Tableau; their URL ends with TIR_WEBHOOK_SECRET. Safe to repeat."""
    from tir_dagster.tableau.webhooks import receiver_url, register_webhooks, webhook_secret

    address = receiver_url(url, webhook_secret(os.environ))
    with _site() as (client, label):
        for hook in register_webhooks(client, label, address):
            click.echo(_line(hook))


@webhooks.command("list", short_help="List the registered webhooks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(as_json: bool) -> None:
    """List the webhooks that were registered from this Dagster history."""
    from tir_dagster.tableau.webhooks import our_webhooks

    with _site() as (client, label):
        registered = our_webhooks(client, label)
    if as_json:
        click.echo(json.dumps({"webhooks": [_as_json(hook) for hook in registered]}, indent=2))
    else:
        click.echo("\n".join(map(_line, registered)) or "No webhooks are registered.")


@webhooks.command(short_help="Remove the registered webhooks.")
def remove() -> None:
    """Remove the webhooks that were registered from this Dagster history."""
    from tir_dagster.tableau.webhooks import remove_webhooks

    with _site() as (client, label):
        removed = remove_webhooks(client, label)
    click.echo(f"{len(removed)} webhooks removed." if removed else "No webhooks were registered.")


@webhooks.command(short_help="Receive events and record them in Dagster.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0 selects a free port."
)
def listen(host: str, port: int) -> None:
    """Receive Tableau's events and record them in Dagster's history. Ctrl-C ends it.

    Speaks plain HTTP. Tableau requires HTTPS, so put a proxy with a certificate in front. Only calls whose path ends with
    TIR_WEBHOOK_SECRET are accepted.
    """
    from tir_dagster.cli.webhook_receiver import Receiver
    from tir_dagster.orchestration.home import dagster_instance, tir_home
    from tir_dagster.orchestration.sensing.webhooks import Observer
    from tir_dagster.tableau.webhooks import SECRET_VARIABLE, webhook_secret

    secret = webhook_secret(os.environ)
    with dagster_instance() as instance:
        note = Observer(instance, tir_home()).note
        try:
            receiver = Receiver((host, port), secret, note=note, say=click.echo)
        except OSError as error:
            raise click.ClickException(
                f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port, or another --host."
            ) from error
        with receiver:
            click.echo(f"Listening on http://{host}:{receiver.server_port}/ and {SECRET_VARIABLE}; Ctrl-C ends it.")
            try:
                receiver.serve_forever()
            except KeyboardInterrupt:
                click.echo("Ended.")


@contextmanager
def _site() -> Iterator[tuple[TableauClient, str]]:
    """Yield a client of the environment's site, and the label in the names of this project's webhooks."""
    from tir_dagster.orchestration.home import dagster_instance
    from tir_dagster.orchestration.sensing.webhooks import instance_label
    from tir_dagster.tableau.access import TableauAccess
    from tir_dagster.tableau.calls import Use
    from tir_dagster.tableau.client import TableauClient

    access = TableauAccess.from_environment(os.environ).limited_to({Use.WEBHOOKS})
    with dagster_instance() as instance:
        label = instance_label(instance)
    with TableauClient(access) as client:
        yield client, label


def _line(hook: Webhook) -> str:
    state = "" if hook.enabled else f" (disabled, register again: {hook.reason or 'reason unknown'})"
    return f"{hook.event}: {hook.shown_url}{state}"


def _as_json(hook: Webhook) -> dict[str, Any]:
    fields = {"id": hook.id, "name": hook.name, "event": hook.event, "url": hook.shown_url}
    return {**fields, "enabled": hook.enabled, "reason": hook.reason}
