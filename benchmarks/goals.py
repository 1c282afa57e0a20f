"""The goals beside what was reached, from the recorded runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.growth import Growth
from benchmarks.report import Goal, Report
from benchmarks.starts import Starts

# They were set for these.
ROWS, CHANGED = 10_000_000, 1.0


def goals_table(report: Report | None, growth: Growth | None, starts: Starts | None, *, short: bool = False) -> str:
    """Return a Markdown table of the goals of each recorded run; the short one has the first detector only."""
    lines = ["| | reached | goal | |", "|---|--:|--:|---|"]
    for goals, of in _goals_by_run(report, growth, starts):
        shown = [goal for goal in goals if not (short and is_of_another_detector(goal))]
        if shown:
            lines += [f"| **{of}** | | | |", *map(_line, shown)]
    return "\n".join(lines)


def is_of_another_detector(goal: Goal) -> bool:
    """Tell if the goal is of a detector that short tables leave out."""
    return any(f", {detector}:" in goal.what for detector in ("feed", "diff"))


def _goals_by_run(
    report: Report | None, growth: Growth | None, starts: Starts | None
) -> Iterator[tuple[Sequence[Goal], str]]:
    if report is not None:
        yield report.goals, f"{report.rows:,} orders, {report.changed:g} % of the keys changed"
    if growth is not None:
        yield growth.goals, growth.title("rows")
    if starts is not None:
        yield starts.goals, f"{starts.rows:,} orders, {starts.keys:,} keys changed"


def _line(goal: Goal) -> str:
    sign = "≥" if goal.at_least else "≤"
    unit = f" {goal.unit}" if goal.unit else ""
    return f"| {goal.what} | {goal.reached:.2f}{unit} | {sign} {goal.goal:.2f}{unit} | {goal.verdict} |"
