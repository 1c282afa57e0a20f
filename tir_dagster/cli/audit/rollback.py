"""The work of `tir rollback` and `tir release`."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import dagster as dg

from tir_dagster.cli.jobs import command_tags
from tir_dagster.cli.refresh import LEASE_WAIT_SECONDS, Command
from tir_dagster.errors import ExtractError
from tir_dagster.orchestration.alerts.commands import alerting
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.orchestration.metadata import confirmations, last_confirmation
from tir_dagster.orchestration.names import rollback_job_name
from tir_dagster.refresh.context import leased, remove
from tir_dagster.refresh.look import look
from tir_dagster.refresh.rollback import plan_rollback, refuse_trigger
from tir_dagster.refresh.state.hold import HoldFile
from tir_dagster.spec.extract import ExtractSpec

# Instead of a version's name: the one before the published one.
PREVIOUS = "previous"


@dataclass
class RollbackOutcome:
    """The result, as `--json` prints it."""

    extract: str
    to: str
    published: bool = False
    version: str | None = None
    source_version: str | None = None
    rows: int | None = None
    held: bool = False
    sentence: str = ""
    run_ids: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # What alerts show.
    decision: str = "rollback"
    reason: str | None = None
    seconds: float = 0.0


def roll_back(
    spec: ExtractSpec,
    instance: dg.DagsterInstance,
    version: str,
    *,
    hold: str,
    dry_run: bool,
    progress: Callable[[str], None],
) -> RollbackOutcome:
    """Run the extract's rollback job in this process; with `dry_run`, only plan it."""
    refuse_trigger(spec)
    command = Command(spec, instance, progress)
    if version == PREVIOUS:
        version = _previous(command, instance)
    outcome = RollbackOutcome(spec.name, version)
    if dry_run:
        context = replace(command.context, work=command.context.folder / "plan")
        try:
            looked = look(context, last_confirmation(instance, command.keys.published_datasource), repair=False)
            planned = plan_rollback(context, looked, version)
        finally:
            remove(context.work)
        outcome.source_version, outcome.rows = (
            planned.target.manifest["source_version"],
            planned.target.manifest["rows"],
        )
        outcome.sentence = f"{spec.name}: would publish {planned.sentence}. Nothing was changed."
        return outcome
    stop = stopping(spec.name, lambda: f"tir history {spec.name} shows what is published.")
    holding = leased(command.context, "tir rollback", wait_seconds=LEASE_WAIT_SECONDS)
    with alerting(spec, instance, outcome, progress), stop, holding:
        run_id = str(uuid.uuid4())
        outcome.run_ids.append(run_id)
        config = {"to": version, "hold": hold, "by": _who()}
        ops = {"ops": {f"{spec.name}_roll_back": {"config": config}}}
        command.run_job(rollback_job_name(spec), config=ops, tags=command_tags(run_id), run_id=run_id)
        outcome.warnings += command.take_warnings()
    confirmed = last_confirmation(instance, command.keys.published_datasource)
    assert confirmed is not None, "the job confirmed it"
    outcome.published, outcome.version = True, confirmed.version
    outcome.source_version, outcome.rows = confirmed.source_version, confirmed.rows
    outcome.held = command.context.hold.read() is not None
    ending = (
        f"On hold: no refresh changes it until tir release {spec.name}."
        if command.context.hold.read() is not None
        else "The next refresh brings it up to date again; to keep it as it is, add --hold."
    )
    outcome.sentence = (
        f"{spec.name}: rolled back to {version}, {confirmed.rows:,} rows, the source at {confirmed.source_version}; published as "
        f"{confirmed.version}. {ending}"
    )
    return outcome


def _previous(command: Command, instance: dg.DagsterInstance) -> str:
    """Return the version that was published before the one that people see."""
    versions = [confirmed.version for confirmed in confirmations(instance, command.keys.published_datasource)]
    earlier = [version for version in versions if version != versions[0]]
    if not earlier:
        name = command.spec.name
        raise ExtractError(f"{name}: there is no previous version. tir history {name} shows what was published.")
    return earlier[0]


def _who() -> str:
    """Return who runs this, for people to read."""
    user = "somebody"
    with suppress(KeyError, OSError, ImportError):
        user = getpass.getuser()
    return f"{user} on {os.environ.get('HOSTNAME') or socket.gethostname()}"


def release_hold(spec: ExtractSpec) -> tuple[str, bool]:
    """End the hold; return a sentence, and whether there was one."""
    if HoldFile(tir_home() / "extracts" / spec.name).release():
        return f"{spec.name}: released. The next refresh brings it up to date: tir refresh {spec.name}.", True
    return f"{spec.name} was not on hold.", False
