"""Runs the checks of `tir doctor`: each with a time limit, none able to stop the others; and shows their findings."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click

from tir_dagster.addresses import hide_credentials
from tir_dagster.errors import TirError

State = Literal["ok", "warning", "failure"]
_COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "failure": "red"}


@dataclass(frozen=True)
class Finding:
    """What a check found: ok, or a warning or failure with what to do about it."""

    group: str
    name: str
    state: State
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """A finding without the names of its check."""

    state: State
    detail: str
    fix: str = ""


def ok(detail: str) -> Result:
    return Result("ok", detail)


def warning(detail: str, fix: str = "") -> Result:
    return Result("warning", detail, fix)


def failure(detail: str, fix: str = "") -> Result:
    return Result("failure", detail, fix)


@dataclass(frozen=True)
class Check:
    """One question; an error of the project is a failure, and its text says what to do."""

    name: str
    ask: Callable[[], Result | Iterable[Result]]
    # What it may take in any case, however few seconds others have.
    at_least: float = 0.0


Checks = Callable[[], Iterator[Check]]


def run_group(group: str, checks: Checks, *, seconds: float) -> Iterator[Finding]:
    """Run the checks of a group in a thread of its own; one that takes longer than `seconds` ends the group."""
    answers: queue.Queue[tuple[Check | None, list[Result] | None]] = queue.Queue()
    whole = Check(group, list)

    def work() -> None:
        try:
            for check in checks():
                answers.put((check, None))
                answers.put((check, _asked(check)))
        except Exception as error:
            answers.put((whole, [_broken(error)]))
        finally:
            answers.put((None, None))

    threading.Thread(target=copy_context().run, args=(work,), daemon=True, name=f"doctor-{group}").start()
    check: Check | None = whole
    while check is not None:
        limit = max(seconds, check.at_least)
        name = check.name
        try:
            check, results = answers.get(timeout=limit)
        except queue.Empty:
            # The thread cannot be ended; it is a daemon, and the process ends soon.
            detail = f"no answer within {limit:g} s; what follows in this group was not checked"
            yield Finding(group, name, "failure", detail, "Check network, proxy and server; then run again.")
            return
        for result in results or ():
            yield Finding(group, check.name if check else group, result.state, result.detail, result.fix)


def _asked(check: Check) -> list[Result]:
    try:
        answer = check.ask()
        return [answer] if isinstance(answer, Result) else list(answer)
    except Exception as error:
        return [_broken(error)]


def _broken(error: Exception) -> Result:
    if isinstance(error, TirError):
        return failure(str(error))
    # Of another library: its text may be long, and may quote an address.
    return failure(f"{type(error).__name__}: {hide_credentials(' '.join(str(error).split()))[:300]}")


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as people read it: a line, and below it what to do."""
    state = click.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
    fix = [f"{'':<9}{'':<11}{finding.fix}"] if finding.fix else []
    return [f"{state} {finding.group:<10} {finding.name}: {finding.detail}", *fix]


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line."""
    states = [finding.state for finding in findings]
    failures, warnings = states.count("failure"), states.count("warning")
    if not failures and not warnings:
        return click.style(f"All {len(states)} checks are well.", fg="green")
    counted = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((failures, "failure"), (warnings, "warning"))
        if count
    ]
    return click.style(f"{len(states)} checks: {' and '.join(counted)}.", fg="red" if failures else "yellow")
