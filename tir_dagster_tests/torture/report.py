"""The table of a torture: point by point, how many kills, and what the clean runs did."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tir_dagster_tests.torture.blows import ANY_TIME
from tir_dagster_tests.torture.playing import Result


def write_report(results: Sequence[Result], folder: Path, *, seed: int) -> str:
    """Write torture.md and torture.json into the folder; return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = table(results, seed=seed)
    (folder / "torture.md").write_text(text + "\n", encoding="utf-8")
    listed = [asdict(result) for result in results]
    (folder / "torture.json").write_text(json.dumps({"seed": seed, "results": listed}, indent=1), encoding="utf-8")
    return text


def short_report(results: Sequence[Result], command: str, *, cases: int) -> str:
    """Return what was played and a short table: kills of the run by point, all else by blow."""
    hits: Counter[tuple[str, str]] = Counter()
    kills: Counter[tuple[str, str]] = Counter()
    healed: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        case = result.case
        rows = [(case.blow, point if case.blow == "kill" else "any point") for point in case.points]
        for row, blow in zip(rows, result.blows, strict=False):
            hits[row] += blow.reached
            kills[row] += blow.kills
        for row in dict.fromkeys(rows[: len(result.blows)]):
            healed[row]["FAILED" if result.failure else result.healed] += 1
    of = f"{len(results):,}" if len(results) == cases else f"{len(results):,} of {cases:,}"
    failed = sum(bool(result.failure) for result in results)
    others = sum(hits.values()) - sum(kills.values())
    lines = [
        f"{command}: {sum(kills.values()):,} kills and {others:,} other blows in {of} cases; {failed or 'none'} failed.",
        "",
        "| blow | after | hits | kills | the clean runs |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(healed, key=lambda row: (row[0] != "kill", row)):
        ended = ", ".join(f"{outcome} {count}" for outcome, count in sorted(healed[row].items()))
        lines.append(f"| {row[0]} | {row[1]} | {hits[row]} | {kills[row]} | {ended} |")
    return "\n".join(lines)


def table(results: Sequence[Result], *, seed: int) -> str:
    """Return the table as Markdown."""
    hits: Counter[tuple[str, str, str]] = Counter()
    kills: Counter[tuple[str, str, str]] = Counter()
    healed: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        for point, blow in zip(result.case.points, result.blows, strict=False):
            row = (result.case.blow, result.case.subject, point)
            hits[row] += blow.reached
            kills[row] += blow.kills
        for point in dict.fromkeys(result.case.points[: len(result.blows)]):
            outcome = "FAILED" if result.failure else result.healed
            healed[result.case.blow, result.case.subject, point][outcome] += 1
    failed = sum(bool(result.failure) for result in results)
    others = sum(hits.values()) - sum(kills.values())
    lines = [
        f"Seed {seed}: {len(results):,} cases with {sum(kills.values()):,} kills and {others:,} other blows; {failed} failed.",
        "",
        "| blow | to | after | hits | kills | the clean runs |",
        "|---|---|---|---|---|---|",
    ]
    for row, outcomes in healed.items():
        ended = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
        lines.append(f"| {row[0]} | {row[1]} | {row[2]} | {hits[row]} | {kills[row]} | {ended} |")
    lines += [
        "",
        f"`{ANY_TIME}`: at a random moment of the run. A clean run finds nothing to do (none) where the kill came late.",
    ]
    return "\n".join(lines)
