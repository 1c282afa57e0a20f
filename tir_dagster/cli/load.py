"""The work of `tir load`: run the load's Dagster job in this process, so that every load is in Dagster's history."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tir_dagster.cli.declared import find_declared
from tir_dagster.cli.jobs import JobRunner, asset_events, command_tags
from tir_dagster.orchestration.alerts.commands import alerting
from tir_dagster.orchestration.alerts.runs import with_recipients
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.orchestration.loads import HINT, LATE, LOAD_ID, loader_for
from tir_dagster.orchestration.names import load_job_name, load_keys
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.spec.load import LoadSpec
from tir_dagster.spec.reading import Declared

if TYPE_CHECKING:
    from tir_dagster.loading.preview import Preview


@dataclass
class LoadOutcome:
    """The result of a load, as `--json` prints it."""

    load: str
    load_id: str | None = None
    files: dict[str, list[str]] = field(default_factory=lambda: {"loaded": [], "repeated": [], "superseded": []})
    rows_read: int = 0
    rows_rejected: int = 0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    keys_changed: int | None = 0
    run_id: str | None = None
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def run_ids(self) -> list[str]:
        return [self.run_id] if self.run_id else []


def find_load(declared: Declared, name: str) -> LoadSpec:
    return with_recipients(find_declared(declared.loads, name, "load"), declared.extracts)


def preview_load(spec: LoadSpec, progress: Callable[[str], None]) -> Preview:
    """Return what a load would do with each new file and which rows it would reject; without Spark, run or changes."""
    return loader_for(spec, SnowflakeAccess.from_environment(os.environ), log=progress).preview()


def run_load(spec: LoadSpec, progress: Callable[[str], None]) -> LoadOutcome:
    """Run the load's job in this process; raise the run's error if it fails."""
    begun = time.perf_counter()
    outcome = LoadOutcome(spec.name, run_id=str(uuid.uuid4()))
    # A load commits once.
    stop = stopping(
        spec.name, lambda: f"Either all of its files are in {spec.table} or none; the next load checks that."
    )
    with dagster_instance() as instance, alerting(spec, instance, outcome, progress), stop:
        jobs = JobRunner(instance, progress, loads=(spec,))
        tags = command_tags(str(outcome.run_id))
        result = jobs.run(load_job_name(spec), run_id=outcome.run_id, tags=tags)
        outcome.warnings = jobs.take_warnings()
        for event in asset_events(result, load_keys(spec).source_table):
            if LATE not in event:
                _fill(outcome, event)
        outcome.seconds = round(time.perf_counter() - begun, 3)
    return outcome


def _fill(outcome: LoadOutcome, event: dict[str, Any]) -> None:
    outcome.load_id, outcome.stages = event[LOAD_ID], event["tir/stages"]
    endings = {"loaded": "", "repeated": "_repeated", "superseded": "_superseded"}
    outcome.files = {status: event[f"tir/files{ending}"] for status, ending in endings.items()}
    for count in ("rows_read", "rows_rejected", "rows_inserted", "rows_updated", "rows_deleted"):
        setattr(outcome, count, event[f"tir/{count}"])
    if hint := event.get(HINT):
        outcome.keys_changed = len(hint["scope"]["keys"]) if isinstance(hint["scope"], dict) else None


def outcome_text(outcome: LoadOutcome) -> str:
    sentence = f"{outcome.load}: no new files"
    if outcome.load_id is not None:
        files = ", ".join(f"{len(paths)} {status}" for status, paths in outcome.files.items() if paths)
        sentence = (
            f"{outcome.load}: files {files}; {outcome.rows_inserted:,} rows inserted, {outcome.rows_updated:,} updated, "
            f"{outcome.rows_deleted:,} deleted, {outcome.rows_rejected:,} rejected"
        )
    return "\n".join(
        [*(f"warning: {warning}" for warning in outcome.warnings), f"{sentence} ({outcome.seconds:.1f} s)."]
    )


def preview_fields(spec: LoadSpec, preview: Preview) -> dict[str, Any]:
    """The fields that `--dry-run --json` prints."""
    files = [
        {
            "path": choice.file.path,
            "bytes": choice.file.size,
            "status": choice.status,
            "rows_read": preview.rows.get(choice.file.path, 0) + preview.rejected.get(choice.file.path, 0),
            "rows_rejected": preview.rejected.get(choice.file.path, 0),
        }
        for choice in preview.files
    ]
    return {
        "load": spec.name,
        "files": files,
        "rows_read": sum(file["rows_read"] for file in files),
        "rows_rejected": sum(file["rows_rejected"] for file in files),
        "rejects": [asdict(reject) for reject in preview.rejects],
        "warnings": list(preview.warnings),
        "problem": preview.problem or None,
    }


def preview_lines(spec: LoadSpec, preview: Preview) -> list[str]:
    """The lines that `--dry-run` prints: each file, then each row that would be rejected."""
    if not preview.files:
        return [f"{spec.name}: no new files under {spec.files.path}."]
    fields = preview_fields(spec, preview)
    words = {
        "LOADED": "load",
        "REPEATED": "skip: same content as before",
        "SUPERSEDED": "skip: a newer file replaces it",
    }
    lines = [f"{spec.name}: {len(preview.files)} new files for {spec.table} ({spec.mode})"]
    for file in fields["files"]:
        counted = f": {file['rows_read']:,} rows, {file['rows_rejected']:,} rejected" if file["rows_read"] else ""
        lines.append(f"  {file['path']}  {file['bytes']:,} bytes  {words[file['status']]}{counted}")
    lines += [f"  {reject.path}:{reject.line}: {reject.reason}" for reject in preview.rejects]
    if more := fields["rows_rejected"] - len(preview.rejects):
        lines.append(f"  … and {more:,} more rejected rows")
    return lines + [f"warning: {warning}" for warning in preview.warnings]
