"""The preview of a load: files are read and checked as for a load, and nothing is staged."""

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
from tir_dagster.loading.tables import Target
from tir_dagster.spec.load import LoadSpec

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


class Checker:
    """Reads files as a load does, one after the other in this process, and keeps what it finds."""

    def __init__(self, spec: LoadSpec, plan: Sequence[Chosen]) -> None:
        self._spec, self._paths = spec, [chosen.file.path for chosen in plan]
        self._keys: list[pa.Table] = []
        self.staged: list[Staged] = []
        self.rows: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._rejects: list[Reject] = []

    @property
    def rejects(self) -> tuple[Reject, ...]:
        """The first rejected rows, file by file."""
        places = {path: place for place, path in enumerate(self._paths)}
        return tuple(sorted(self._rejects, key=lambda row: (places[row.path], row.line))[:MOST_REJECTS])

    def read(self, plan: StagePlan, units: Sequence[Unit], target: Target) -> list[Staged]:
        columns = [f"C{place}" for place in target.key] if self._spec.duplicates == "reject" else []

        def keep(file: Path, folder: str) -> None:
            if folder == REJECTED:
                self._keep_rejects(file)
            elif columns:
                self._keys.append(pq.read_table(file, columns=["FILE_NO", "LINE_NO", *columns]))

        for unit in units:
            staged = stage_unit(plan, unit, keep)
            self.staged.append(staged)
            self.rows[unit.path] += staged.rows
            self.rejected[unit.path] += staged.rejected
        self._reject_duplicates(target)
        return self.staged

    def _keep_rejects(self, file: Path) -> None:
        listed = pq.read_table(file, columns=["FILE_NO", "LINE_NO", "REASON"]).slice(0, MOST_REJECTS).to_pylist()
        self._rejects += [Reject(self._paths[row["FILE_NO"]], row["LINE_NO"], row["REASON"]) for row in listed]

    def _reject_duplicates(self, target: Target) -> None:
        """Reject keys that are repeated in a file, or in a folder that is the whole content; see `rejecting_duplicates`."""
        if not self._keys:
            return
        together = self._spec.snapshot == "folder"
        begin, end = repeated_key_reason(target, together=together)
        values = pa.concat_tables(self._keys).to_pydict()
        files, lines = values.pop("FILE_NO"), values.pop("LINE_NO")
        keys = list(zip(*values.values(), strict=True))
        scopes = [key if together else (file, key) for file, key in zip(files, keys, strict=True)]
        counts = Counter(scopes)
        for file, line, key, scope in zip(files, lines, keys, scopes, strict=True):
            if counts[scope] > 1:
                path = self._paths[file]
                self.rows[path] -= 1
                self.rejected[path] += 1
                self._rejects.append(Reject(path, line, f"{begin}{', '.join(map(str, key))}{end}"))
