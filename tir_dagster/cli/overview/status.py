"""The work of `tir status`: one look at all extracts and loads, from Dagster's log and the state folder alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import click
import dagster as dg
from dagster._utils.schedules import cron_string_iterator

from tir_dagster.alerts.text import span
from tir_dagster.cli.declared import nothing_declared
from tir_dagster.errors import TirError
from tir_dagster.orchestration.alerts.commands import alert_storage
from tir_dagster.orchestration.checks import drift_sentence
from tir_dagster.orchestration.home import tir_home
from tir_dagster.orchestration.metadata import confirmed_events
from tir_dagster.orchestration.names import extract_keys, load_keys, source_sensor_names
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
    # When Dagster looks or runs by itself next; None: not by itself.
    next: str | None = None
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
    automation, problems = _read_automation(instance), _problems()
    lines = [_extract(spec, instance, problems.get(spec.name, []), automation) for spec in declared.extracts]
    lines += [_load(spec, instance, problems.get(spec.name, []), automation) for spec in declared.loads]
    return Status(lines, sum(line.state in ("problem", "on hold", "never run") for line in lines))


def read_extract(spec: ExtractSpec, instance: dg.DagsterInstance) -> Line:
    """Return the state of one extract."""
    return _extract(spec, instance, _problems().get(spec.name, []), _read_automation(instance))


@dataclass(frozen=True)
class _Automation:
    """Which sensors and schedules are on and when each sensor looks next, and whether Dagster's daemon works at all."""

    sensors: Mapping[str, float | None]
    stopped: frozenset[str]
    has_daemon: bool


def _read_automation(instance: dg.DagsterInstance) -> _Automation:
    states = instance.all_instigator_state()
    ticks: dict[str, float | None] = {}
    for state in states:
        if state.is_running:
            last = getattr(state.instigator_data, "last_tick_start_timestamp", None)
            pause = getattr(state.instigator_data, "min_interval", None)
            ticks[state.instigator_name] = last + pause if last and pause else None
    stopped = frozenset(state.instigator_name for state in states if not state.is_running)
    daemons = instance.get_daemon_statuses(["SENSOR"])
    return _Automation(ticks, stopped, any(status.healthy for status in daemons.values()))


def _problems() -> dict[str, list[str]]:
    """Return the open problems by extract or load, in words."""
    problems: dict[str, list[str]] = {}
    for problem in alert_storage().problems():
        for name in problem.affected:
            since = _moment(problem.since)
            problems.setdefault(name, []).append(f"{problem.cause.lower().replace('_', ' ')} since {since}")
    return problems


def _extract(spec: ExtractSpec, instance: dg.DagsterInstance, problems: Sequence[str], automation: _Automation) -> Line:
    keys, folder = extract_keys(spec), tir_home() / "extracts" / spec.name
    event = next(iter(confirmed_events(instance, keys.published_datasource)), None)
    notes = [*problems]
    is_wrong = bool(problems)
    drift = drift_sentence(instance, spec, keys, event.confirmation if event else None)
    if drift is not None:
        is_wrong = True
        notes.append(drift)
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
    following, by_itself = _following(spec, automation)
    notes += by_itself
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
        return Line(
            spec.name,
            "extract",
            state,
            pending=pending,
            next=following,
            notes=[f"first: tir refresh {spec.name}", *notes],
        )
    confirmed = event.confirmation
    if confirmed.rolled_back and hold is None:
        target = event.metadata.get("tir/rolled_back_to", "an earlier version")
        notes.insert(0, f"rolled back to {target}: the next refresh brings it up to date again")
    return Line(
        spec.name,
        "extract",
        state,
        last=_moment(event.timestamp),
        data_as_of=_shortened(confirmed.source_version),
        rows=confirmed.rows,
        version=confirmed.version,
        pending=pending,
        next=following,
        notes=notes,
    )


def _following(spec: ExtractSpec, automation: _Automation) -> tuple[str | None, list[str]]:
    """Return when Dagster looks or runs next, and what is missing for that."""
    planned = {
        f"{spec.name}_full_refresh": ("everything is loaded", spec.schedules.full_refresh),
        f"{spec.name}_verify": ("verification", spec.schedules.verify),
    }
    moments = [
        (moment, what)
        for name, (what, cron) in planned.items()
        if cron and name not in automation.stopped and (moment := _next_of(cron, spec.main.slices.zone))
    ]
    runs = [f"{what} {moment:%Y-%m-%d %H:%M} UTC" for moment, what in sorted(moments)]
    needed = source_sensor_names(spec)
    if off := [name for name in needed if name not in automation.sensors]:
        hint = f"does not run by itself: turn on the sensor{'s' if len(off) > 1 else ''} {' and '.join(off)}"
        return "; ".join(runs) or None, [hint]
    way = "conditions" if spec.automation == "condition" else f"look every {round(spec.thresholds.interval)} s"
    tick = automation.sensors[needed[0]]
    if tick is not None and automation.has_daemon:
        way = f"look in {max(round(tick - time.time()), 0)} s"
    missing = "its sensors are on, but Dagster's daemon does not run: start tir dev or dagster-daemon run"
    return "; ".join([way, *runs]), [] if automation.has_daemon else [missing]


def _next_of(cron: str, zone: str) -> datetime | None:
    """Return when the schedule is due next, in UTC."""
    moment = next(cron_string_iterator(time.time(), cron, zone), None)
    return moment.astimezone(UTC) if moment else None


def _load(spec: LoadSpec, instance: dg.DagsterInstance, problems: Sequence[str], automation: _Automation) -> Line:
    records = instance.fetch_materializations(load_keys(spec).source_table, limit=1).records
    last = _moment(records[0].timestamp) if records else None
    state: State = "problem" if problems else "ok" if records else "never run"
    watched = "looks for files" if f"{spec.name}_arrival" in automation.sensors and automation.has_daemon else None
    notes = [*problems, *([] if records else [f"first: tir load {spec.name}"])]
    return Line(spec.name, "load", state, last=last, next=watched, notes=notes)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _shortened(version: str) -> str:
    return datetime.fromisoformat(version).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def status_lines(status: Status, now: datetime) -> list[str]:
    """Return the screen: a line for each, their notes below, and a summary."""
    if not status.lines:
        return [nothing_declared()]
    table = [("name", "", "state", "refreshed", "rows", "data as of", "version", "next")]
    for line in status.lines:
        ago = f"{_ago(line.last, now)} ago" if line.last else ""
        rows = "" if line.rows is None else f"{line.rows:,}"
        pending = f"{line.pending} change set{'s' if line.pending > 1 else ''} pending" if line.pending else None
        following = "; ".join(filter(None, [pending, line.next])) or "by hand"
        table.append(
            (line.name, line.kind, line.state, ago, rows, line.data_as_of or "", line.version or "", following)
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [click.style(_row(table[0], widths), bold=True)]
    for line, cells in zip(status.lines, table[1:], strict=True):
        coloured = click.style(f"{line.state:<{widths[2]}}", fg=_COLOURS[line.state])
        lines.append(_row(cells, widths).replace(f"  {line.state:<{widths[2]}}", f"  {coloured}", 1))
    # Below the table, so that it is one line for each: on one screen as long as there are no more of them than that has lines.
    lines += [f"{line.name}: {note}" for line in status.lines for note in line.notes]
    count, total = status.attention, len(status.lines)
    summary = click.style("All is well.", fg="green")
    if count:
        summary = click.style(f"{count} of {total} need{'s' if count == 1 else ''} attention.", fg="yellow", bold=True)
    return [*lines, summary]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return the cells below each other; numbers to the right."""
    rows = 4
    return "  ".join(
        f"{cell:>{width}}" if at == rows else f"{cell:<{width}}"
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _ago(moment: str, now: datetime) -> str:
    then = datetime.strptime(moment, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    return span(max((now - then).total_seconds(), 0))
