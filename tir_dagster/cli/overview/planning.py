"""The work of `tir plan`: what a refresh would do, why, and what it may take, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from tir_dagster.changes.change_set import NO_SLICE_KEY, slice_label
from tir_dagster.changes.difference import Counts
from tir_dagster.changes.plan import Plan
from tir_dagster.cli.overview.past import Estimate, PastRefresh, megabytes
from tir_dagster.refresh.preview import Preview
from tir_dagster.spec.extract import ExtractSpec

_WIDTH, _MOST_SLICES, _LEFT = 20, 36, 12
_THEN = {
    "republish": "the whole extract is published again",
    "patch": "only the change is sent to the server",
    "server": "Tableau reads the newest part again",
    "trigger": "Tableau refreshes the datasource itself",
}


@dataclass(frozen=True)
class Outlook:
    """A plan with what it would move and what earlier refreshes let expect."""

    spec: ExtractSpec
    plan: Plan
    preview: Preview | None = None
    estimate: Estimate | None = None
    explain: tuple[str, ...] = ()
    # The refresh that made what is published now.
    newest: PastRefresh | None = None

    def as_dict(self, slices: Sequence[str]) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        plan, preview = self.plan, self.preview or Preview(self.plan)
        moves = preview.moves
        return {
            "extract": self.spec.name,
            "mode": plan.mode,
            "decision": plan.decision,
            "reason": plan.reason.name if plan.reason else None,
            "slices": list(slices),
            "warnings": plan.warnings,
            "notes": plan.notes,
            "sentence": plan.sentence(),
            "candidates": moves.candidates if moves else None,
            "keys": {"changed": moves.changed_keys, "new": moves.new_keys, "gone": moves.gone_keys} if moves else None,
            "rows": preview.rows,
            "rows_after": preview.rows_after,
            "rows_by_slice": {
                slice_label(name): {"removed": removed, "added": added} for name, removed, added in _by_slice(preview)
            },
            **({"tables": self._tables(preview)} if preview.parts else {}),
            "everything": preview.everything,
            "uncounted": preview.uncounted,
            "would_stop": preview.stop,
            "pending": [{"id": change_set.id, "keys": change_set.keys} for change_set in preview.pending],
            "spec_changes": list(preview.spec_changes),
            "estimate": asdict(self.estimate) if self.estimate else None,
            "extract_bytes": self.newest.extract_bytes if self.newest else None,
            "rebuilt_above_bytes": self.newest.rebuilt_above if self.newest else None,
            **({"explain": list(self.explain)} if self.explain else {}),
        }

    def _tables(self, preview: Preview) -> dict[str, Any]:
        """Return the same of each table."""
        fields = (
            "decision",
            "reason",
            "candidates",
            "keys",
            "rows",
            "rows_after",
            "rows_by_slice",
            "everything",
            "uncounted",
        )
        listed = {}
        for table, part in preview.parts.items():
            told = Outlook(self.spec.parts[table], part.plan, part).as_dict(())
            listed[table] = {name: told[name] for name in fields}
        return listed

    def lines(self) -> list[str]:
        """Return the plan for people."""
        plan, preview = self.plan, self.preview
        lines = [click.style(plan.sentence(), bold=True)]
        if preview is not None and preview.stop:
            lines.append(click.style(f"The refresh would stop: {preview.stop}", fg="red"))
        lines += [click.style(f"warning: {warning}", fg="yellow") for warning in plan.warnings]
        if preview is not None and plan.decision != "none":
            lines += self._explained(preview)
        if preview is not None and preview.pending:
            lines.append(_entry("pending", _pending(preview)))
        return [*lines, *plan.notes, *self.explain]

    def _explained(self, preview: Preview) -> list[str]:
        lines = self._spec_changes(preview)
        if preview.parts:
            for table, part in preview.parts.items():
                lines.append(click.style(f"  {table}{'' if part.plan.decision != 'none' else ': as it is'}", bold=True))
                lines += _table_lines(self.spec.parts[table], part) if part.plan.decision != "none" else []
        else:
            lines += _table_lines(self.spec, preview)
        lines.append(_entry("then", _THEN[self.spec.delivery]))
        if self.plan.decision == "incremental" and self.newest is not None:
            lines += _file(self.newest)
        estimate = self.estimate.sentence() if self.estimate else "unknown: no refresh of this kind is in the history"
        return [*lines, _entry("takes", estimate)]

    def _spec_changes(self, preview: Preview) -> list[str]:
        if not preview.spec_changes:
            return []
        first, *more = preview.spec_changes
        return [_entry("the spec", first), *(_entry("", line) for line in more)]


def _table_lines(spec: ExtractSpec, preview: Preview) -> list[str]:
    """Say what happens to the extract, or to one of its tables."""
    plan, moves = preview.plan, preview.moves
    lines = [_entry("found by", _detector(spec))] if plan.decision == "incremental" else []
    if preview.everything:
        lines.append(_entry("compares", f"every row, because {preview.everything}"))
    if moves is not None:
        kinds = f"{moves.changed_keys:,} changed, {moves.new_keys:,} new, {moves.gone_keys:,} gone"
        lines.append(_entry("candidates", f"{moves.candidates:,} keys; {moves.difference.keys:,} differ: {kinds}"))
    if preview.uncounted:
        lines.append(_entry("not counted", preview.uncounted))
    lines += _slice_lines(preview)
    lines += _staying(preview) if plan.decision == "incremental" else []
    return [*lines, *_guard(spec, preview)]


def one_line(outlook: Outlook) -> str:
    """Return the plan in a line: the sentence, whether it would stop, what it may take."""
    preview, took = outlook.preview, outlook.estimate
    if preview is not None and preview.stop:
        return f"{outlook.plan.sentence()} {click.style('It would stop at the guard', fg='red')}: tir plan {outlook.spec.name}"
    takes = f" About {max(took.seconds, 1):,.0f} s." if took and outlook.plan.decision != "none" else ""
    return f"{outlook.plan.sentence()}{takes}"


def _entry(name: str, text: str) -> str:
    return f"  {name:<{_LEFT}}{text}"


def _detector(spec: ExtractSpec) -> str:
    watermark = f" {spec.changes.watermark}" if spec.changes.watermark else ""
    return f"{spec.changes.by}{watermark} on {spec.main_table}"


def _file(newest: PastRefresh) -> list[str]:
    """Say how large the extract's file is, and when it is built anew: purged rows leave room in it."""
    if newest.extract_bytes is None or newest.rebuilt_above is None:
        return []
    text = f"{megabytes(newest.extract_bytes)}, with the room that purged rows left; built anew above {megabytes(newest.rebuilt_above)}"
    return [_entry("file", text)]


def _by_slice(preview: Preview) -> list[tuple[str, int, int]]:
    purged, appended = _named(preview.purged), _named(preview.appended)
    return [(name, purged.get(name, 0), appended.get(name, 0)) for name in sorted({**purged, **appended})]


def _named(counts: Counts) -> Mapping[str, int]:
    return {NO_SLICE_KEY if name is None else name: count for name, count in counts.items()}


def _slice_lines(preview: Preview) -> list[str]:
    rows = _by_slice(preview)
    moved = {name: max(removed, added) for name, removed, added in rows}
    busiest = set(sorted(moved, key=lambda name: -moved[name])[:_MOST_SLICES])
    most, width = max(moved.values(), default=0), max((len(slice_label(name)) for name in moved), default=0)
    lines = [
        f"    {slice_label(name):<{width}}{removed:>12,} removed{added:>12,} added  {_bar(moved[name], most)}".rstrip()
        for name, removed, added in rows
        if name in busiest
    ]
    if not lines:
        return []
    gone, come = sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines = [_entry("rows", f"{gone:,} removed, {come:,} added in {len(rows)} slices"), *lines]
    if preview.plan.decision == "full":
        # All of them: the total says it.
        return lines[:1]
    left = len(rows) - len(busiest)
    return [*lines, f"    and {left} slice{'s' if left > 1 else ''} with fewer rows"] if left else lines


def _bar(count: int, most: int) -> str:
    return "█" * max(round(_WIDTH * count / most), 1) if count else ""


def _staying(preview: Preview) -> list[str]:
    if preview.moves is None or preview.rows is None:
        return []
    rows = preview.rows - sum(preview.purged.values())
    touched = {name for name, _, _ in _by_slice(preview)}
    slices = [name for name in _named(preview.slice_rows) if name not in touched]
    return [
        _entry(
            "stays", f"{rows:,} of {preview.rows:,} rows; {len(slices)} of {len(preview.slice_rows)} slices as they are"
        )
    ]


def _guard(spec: ExtractSpec, preview: Preview) -> list[str]:
    """Say what the guard makes of the rows that would be left."""
    after, allowed = preview.rows_after, f"thresholds.delete_share allows {spec.thresholds.delete_share:.0%}"
    if preview.stop:
        return [_entry("guard", click.style(f"stops the refresh; {allowed}", fg="red"))]
    if after is None or not preview.rows:
        return []
    fewer = preview.rows - after
    change = f"{fewer / preview.rows:.1%} of the rows fewer" if fewer > 0 else f"{-fewer:,} rows more"
    return [_entry("guard", f"passes: {preview.rows:,} rows become {after:,} ({change}; {allowed} fewer)")]


def _pending(preview: Preview) -> str:
    sets = ", ".join(f"{change_set.id} ({change_set.keys:,} keys)" for change_set in preview.pending)
    return f"{len(preview.pending)} change set{'s' if len(preview.pending) > 1 else ''} of refreshes that did not finish, applied with it: {sets}"
