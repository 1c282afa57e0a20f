"""The work of `tir status`: one look at all extracts and loads, from Dagster's log and the state folder alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import click
import dagster as dg

from tir_dagster.alerts.text import span
from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.commands import alert_storage
from tir_dagster.orchestration.checks import known_drift
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import confirmed_events
from tir_dagster.orchestration.names import extract_keys, load_keys
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.hold import HoldFile
from tir_dagster.refresh.state.lease import lease_holder
from tir_dagster.refresh.state.notes import TRUSTED_PARTIAL_HINTS, partial_hints
from tir_dagster.spec.extract import ExtractSpec
from tir_dagster.spec.load import LoadSpec
from tir_dagster.spec.reading import Declared

State = Literal["ok", "running", "pending", "on hold", "problem", "never run"]
_COLOURS: dict[State, str] = {
    "ok": "green",
    "running": "cyan",
    "pending": "yellow",
    "on hold": "yellow",
    "problem": "red",
    "never run": "yellow",
}


@dataclass(frozen=True)
class Line:
    """The state of one extract or load."""

    name: str
    kind: Literal["extract", "load"]
    state: State
    last: str | None = None
    # The source version that people see.
    data_as_of: str | None = None
    rows: int | None = None
    version: str | None = None
    pending: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """All lines, and how many of them need somebody."""

    lines: list[Line]
    attention: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(declared: Declared, instance: dg.DagsterInstance) -> Status:
    """Return the state of everything that is declared."""
    sensors = _running_sensors(instance)
    problems = _problems()
    lines = [_extract(spec, instance, problems.get(spec.name, []), sensors) for spec in declared.extracts]
    lines += [_load(spec, instance, problems.get(spec.name, []), sensors) for spec in declared.loads]
    return Status(lines, sum(line.state in ("problem", "on hold", "never run") for line in lines))


def _running_sensors(instance: dg.DagsterInstance) -> set[str]:
    return {state.instigator_name for state in instance.all_instigator_state() if state.is_running}


def _problems() -> dict[str, list[str]]:
    """Return the open problems by extract or load, in words."""
    problems: dict[str, list[str]] = {}
    for problem in alert_storage().problems():
        for name in problem.affected:
            since = _moment(problem.since)
            problems.setdefault(name, []).append(f"{problem.cause.lower().replace('_', ' ')} since {since}")
    return problems


def _extract(spec: ExtractSpec, instance: dg.DagsterInstance, problems: Sequence[str], sensors: set[str]) -> Line:
    keys, folder = extract_keys(spec), tir_home() / "extracts" / spec.name
    event = next(iter(confirmed_events(instance, keys.published_datasource)), None)
    notes = [*problems]
    is_wrong = bool(problems)
    drift = known_drift(instance, keys, event.confirmation if event else None)
    if drift is not None:
        is_wrong = True
        named = ", ".join(slice_label(name or NO_SLICE_KEY) for name in drift.slices[:3])
        notes.append(f"differs from the source{f' in {named}' if named else ''}: tir verify {spec.name} --rows")
    pending = 0
    try:
        pending = len(ChangeSetStore(folder / "change_sets").pending())
    except TirError as error:
        is_wrong = True
        notes.append(str(error))
    if (count := partial_hints(folder)) > TRUSTED_PARTIAL_HINTS:
        notes.append(f"hints were partial {count} times: every row is compared")
    hold, holder = HoldFile(folder).read(), lease_holder(folder / "lease.json")
    if hold is not None:
        notes.append(f"on hold since {hold.since} by {hold.by}: {hold.reason}")
    if holder is not None:
        notes.append(f"at work: {holder}")
    notes += _automation(spec, sensors)
    state: State = (
        "problem"
        if is_wrong
        else "on hold"
        if hold
        else "running"
        if holder
        else "never run"
        if event is None
        else "pending"
        if pending
        else "ok"
    )
    if event is None:
        return Line(spec.name, "extract", state, pending=pending, notes=[f"first: tir refresh {spec.name}", *notes])
    confirmed = event.confirmation
    return Line(
        spec.name,
        "extract",
        state,
        last=_moment(event.timestamp),
        data_as_of=_shortened(confirmed.source_version),
        rows=confirmed.rows,
        version=confirmed.version,
        pending=pending,
        notes=notes,
    )


def _automation(spec: ExtractSpec, sensors: set[str]) -> Iterator[str]:
    if spec.automation == "condition":
        yield "by Dagster's automation conditions"
        return
    needed = [f"{spec.name}_source"] + ([f"{spec.name}_refresh"] if spec.delivery != "trigger" else [])
    off = [name for name in needed if name not in sensors]
    if off:
        yield f"does not run by itself: turn on the sensor{'s' if len(off) > 1 else ''} {' and '.join(off)}"
    else:
        yield f"watched every {round(spec.thresholds.interval)} s"


def _load(spec: LoadSpec, instance: dg.DagsterInstance, problems: Sequence[str], sensors: set[str]) -> Line:
    records = instance.fetch_materializations(load_keys(spec).source_table, limit=1).records
    last = _moment(records[0].timestamp) if records else None
    state: State = "problem" if problems else "ok" if records else "never run"
    watched = f"{spec.name}_arrival" in sensors
    notes = [*problems, *([] if records else [f"first: tir load {spec.name}"]), *(["watched"] if watched else [])]
    return Line(spec.name, "load", state, last=last, notes=notes)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _shortened(version: str) -> str:
    return datetime.fromisoformat(version).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def status_lines(status: Status, now: datetime) -> list[str]:
    """Return the screen: a line for each, their notes below, and a summary."""
    if not status.lines:
        return ["Nothing is declared: name a spec file with --specs or TIR_SPECS."]
    width = max(len(line.name) for line in status.lines)
    lines = []
    for line in status.lines:
        state = click.style(f"{line.state:<9}", fg=_COLOURS[line.state])
        parts = [f"{line.name:<{width}}", line.kind.ljust(7), state]
        if line.last:
            parts.append(f"{_ago(line.last, now)} ago")
        if line.rows is not None:
            parts.append(f"{line.rows:,} rows as of {line.data_as_of} ({line.version})")
        if line.pending:
            parts.append(f"{line.pending} change set{'s' if line.pending > 1 else ''} pending")
        lines.append("  ".join(parts).rstrip())
        lines += [f"{'':<{width}}  {note}" for note in line.notes]
    count, total = status.attention, len(status.lines)
    summary = click.style("All is well.", fg="green")
    if count:
        summary = click.style(f"{count} of {total} need{'s' if count == 1 else ''} attention.", fg="yellow", bold=True)
    return [*lines, summary]


def _ago(moment: str, now: datetime) -> str:
    then = datetime.strptime(moment, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    return span(max((now - then).total_seconds(), 0))
