"""The preview of a load: files are read and checked as for a load, in this process, and nothing is staged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tir_dagster.loading.merge_sql import repeated_key_reason
from tir_dagster.loading.selection import Chosen
from tir_dagster.loading.staging import REJECTED, Staged, StagePlan, Unit, stage_unit

# More of them are counted, not listed.
MOST_REJECTS = 1_000


@dataclass(frozen=True)
class Reject:
    """A row that the load would reject."""

    path: str
    line: int
    reason: str


@dataclass(frozen=True)
class Preview:
    """What a load would do; `problem` is why it would stop, or empty. Rows are counted by the file's path."""

    files: tuple[Chosen, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    warnings: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class CheckedRows:
    """Rows as a load would find them: the results of all units, counts by file, and the first rejected rows of each unit."""

    staged: list[Staged] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    rejects: list[Reject] = field(default_factory=list)

    def first_rejects(self, files: Sequence[Chosen]) -> tuple[Reject, ...]:
        """Return the first rejected rows, file by file."""
        places = {chosen.file.path: place for place, chosen in enumerate(files)}
        return tuple(sorted(self.rejects, key=lambda row: (places[row.path], row.line))[:MOST_REJECTS])


def check_units(plan: StagePlan, units: Sequence[Unit]) -> CheckedRows:
    """Read the units as a load does, one after the other, with rejected duplicates as in `rejecting_duplicates`."""
    checked, tables = CheckedRows(), list[pa.Table]()
    key = [f"C{place}" for place in plan.target.key] if plan.spec.duplicates == "reject" else []
    for unit in units:

        def keep(file: Path, folder: str, path: str = unit.path) -> None:
            if folder == REJECTED:
                rows = pq.read_table(file, columns=["LINE_NO", "REASON"]).slice(0, MOST_REJECTS).to_pylist()
                checked.rejects.extend(Reject(path, row["LINE_NO"], row["REASON"]) for row in rows)
            elif key:
                table = pq.read_table(file, columns=["LINE_NO", *key])
                tables.append(table.add_column(0, "PATH", pa.repeat(path, table.num_rows)))

        staged = stage_unit(plan, unit, keep)
        checked.staged.append(staged)
        checked.rows[unit.path] += staged.rows
        checked.rejected[unit.path] += staged.rejected
    if tables:
        _reject_duplicates(plan, checked, pa.concat_tables(tables))
    return checked


def _reject_duplicates(plan: StagePlan, checked: CheckedRows, rows: pa.Table) -> None:
    """Reject keys that are repeated in a file, or in a folder that is the whole content."""
    together = plan.spec.snapshot == "folder"
    begin, end = repeated_key_reason(plan.target, together=together)
    paths, lines, *values = rows.to_pydict().values()
    keys = list(zip(*values, strict=True))
    scopes = [key if together else (path, key) for path, key in zip(paths, keys, strict=True)]
    counts = Counter(scopes)
    for path, line, key, scope in zip(paths, lines, keys, scopes, strict=True):
        if counts[scope] > 1:
            checked.rows[path] -= 1
            checked.rejected[path] += 1
            checked.rejects.append(Reject(path, line, f"{begin}{', '.join(map(str, key))}{end}"))
