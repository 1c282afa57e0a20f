"""The work of `tir load`: run the load's Dagster job in this process, so that every load is in Dagster's history."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tir_dagster.cli.refresh import QUIET_RUN
from tir_dagster.errors import SpecError
from tir_dagster.orchestration.alerts.commands import alerting
from tir_dagster.orchestration.alerts.load_reports import with_people
from tir_dagster.orchestration.build import build_defs
from tir_dagster.orchestration.home import dagster_instance
from tir_dagster.orchestration.interrupts import stopping
from tir_dagster.orchestration.loads import Listener, listening, loader_for
from tir_dagster.orchestration.names import TOLD_BY_COMMAND, load_job_name
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
    files: dict[str, list[str]] = field(default_factory=dict)
    rows_read: int = 0
    rows_rejected: int = 0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    keys_changed: int | None = None
    run_id: str | None = None
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def run_ids(self) -> list[str]:
        return [self.run_id] if self.run_id else []


def find_load(declared: Declared, name: str) -> LoadSpec:
    load = next((load for load in declared.loads if load.name == name), None)
    if load is None:
        known = ", ".join(load.name for load in declared.loads)
        hint = (
            f"The spec file declares {known}"
            if known
            else "Name a spec file that has `loads:` with --specs or TIR_SPECS"
        )
        raise SpecError(f"There is no load {name!r}. {hint}.")
    return with_people(load, declared.extracts)


def preview_load(spec: LoadSpec, progress: Callable[[str], None]) -> Preview:
    """Return what a load would do with each new file and which rows it would reject; without Spark, run or changes."""
    access = SnowflakeAccess.from_environment(os.environ)
    return loader_for(spec, access, spark=_no_spark, log=progress).preview()


def run_load(spec: LoadSpec, progress: Callable[[str], None]) -> LoadOutcome:
    """Run the load's job in this process; raise the run's error if it fails."""
    # Imported here: a dry run needs no job.
    begun = time.perf_counter()
    outcome = LoadOutcome(spec.name, run_id=str(uuid.uuid4()))
    job = build_defs(specs=(), loads=(spec,)).resolve_job_def(load_job_name(spec))
    listener = Listener(progress)
    stop = stopping(spec.name, lambda: _so_far(spec, listener))
    with dagster_instance() as instance, alerting(spec, instance, outcome, progress), stop:
        _run(job, instance, outcome, listener)
        outcome.seconds = round(time.perf_counter() - begun, 3)
    return outcome


def _run(job: Any, instance: Any, outcome: LoadOutcome, listener: Listener) -> None:
    with listening(listener):
        job.execute_in_process(
            run_config=QUIET_RUN,
            instance=instance,
            run_id=outcome.run_id,
            tags={TOLD_BY_COMMAND: outcome.run_id},
            raise_on_error=True,
        )
    if listener.loaded:
        _fill(outcome, listener.loaded[-1])


def _so_far(spec: LoadSpec, listener: Listener) -> str:
    """Say what is in the table when the command is stopped; a load commits once."""
    if listener.loaded:
        return f"Its files are in {spec.table}."
    return f"Either all of its files are in {spec.table} or none; the next load checks that."


def _fill(outcome: LoadOutcome, loaded: Any) -> None:
    outcome.load_id = loaded.load_id or None
    outcome.files = {status.lower(): loaded.of(status) for status in ("LOADED", "REPEATED", "SUPERSEDED")}
    outcome.rows_read, outcome.rows_rejected = loaded.rows, loaded.rejected
    outcome.rows_inserted, outcome.rows_updated = loaded.inserted, loaded.updated
    outcome.rows_deleted = loaded.deleted
    keys = loaded.changed.keys if loaded.changed else ()
    outcome.keys_changed = None if keys is None else len(keys)
    outcome.stages, outcome.warnings = dict(loaded.seconds), list(loaded.warnings)


def outcome_text(outcome: LoadOutcome) -> str:
    if outcome.load_id is None:
        return f"{outcome.load}: no new files ({outcome.seconds:.1f} s)."
    files = {status: len(paths) for status, paths in outcome.files.items() if paths}
    listed = ", ".join(f"{count} {status}" for status, count in files.items())
    changed = [
        f"{outcome.rows_inserted:,} rows inserted",
        f"{outcome.rows_updated:,} updated",
        f"{outcome.rows_deleted:,} deleted",
        f"{outcome.rows_rejected:,} rejected",
    ]
    return f"{outcome.load}: files {listed}; {', '.join(changed)} ({outcome.seconds:.1f} s)."


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


def _no_spark() -> Any:
    raise AssertionError("a dry run needs no Spark")
