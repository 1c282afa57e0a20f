"""The records between refreshes: intents and confirmations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tir_dagster.changes.change_set import Record
from tir_dagster.changes.plan import SourceState

# The change set of a version that was published again has a name that begins so; there is none.
ROLLBACK = "rollback-"


@dataclass(frozen=True)
class Intent(Record):
    """Written before a publish: what is about to be published, and what the server held before."""

    extract: str
    change_set: str
    version: str
    base_server_version: str | None
    fingerprint: str
    known: SourceState
    # The delivery `server`: what people see until Tableau has loaded the rest.
    hole: str | None = None
    # The delivery `patch`: only the change set is sent; and whether the server's rows carry a key column of ours.
    patch: bool = False
    keyed: bool = False
    # The job on the server that the last part of it became.
    job: str | None = None
    # A publish by a job was asked for; until its answer is here, `job` is unknown.
    by_job: bool = False


@dataclass(frozen=True)
class TableState(Record):
    """What a confirmation tells of one of several tables."""

    known: SourceState
    watermark: str | None
    fingerprint: str
    rows: int


@dataclass(frozen=True)
class Confirmation(Record):
    """Written once, after a publish: what the server shows now, and everything the next refresh starts from."""

    extract: str
    version: str
    source_version: str
    known: SourceState
    watermark: str | None
    datasource_id: str
    server_version: str
    fingerprint: str
    rows: int
    change_sets: tuple[str, ...]
    # The delivery `server`: the source changed while Tableau read it, so from this increment value on the server shows
    # a later moment than `source_version`; the next refresh reads it again.
    lag: str | None = None
    # The delivery `patch`: the server's rows carry a key column of ours.
    keyed: bool = False
    # Reported hints and materializations that were used: by their numbers, because clocks differ.
    reports: tuple[int, ...] = ()
    # The datasource as messages name it; empty in records of earlier releases.
    datasource: str = ""
    # The delivery `server`: an increment reads the rows of the last value once more, beside those that are there.
    reads_again: bool = False
    # When the last job that the rows show ended, by the server's clock, if that is later than what its version shows.
    jobs_until: str | None = None
    # Of an extract of several tables, each one; the fingerprint above is of all of them.
    parts: Mapping[str, TableState] = field(default_factory=dict)

    @classmethod
    def restored(cls, name: str, value: Any) -> Any:
        if name == "parts":
            return {table: TableState.from_mapping(part) for table, part in value.items()}
        return super().restored(name, value)

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self.parts) or ("",)

    def of(self, table: str) -> Confirmation:
        """Return what is confirmed of this table; an extract of one table is its only part, without a name."""
        if not table:
            return self
        part = self.parts[table]
        return replace(
            self,
            known=part.known,
            watermark=part.watermark,
            fingerprint=part.fingerprint,
            rows=part.rows,
            parts={},
        )

    @property
    def rolled_back(self) -> bool:
        """Whether it is of a version that was published again."""
        return any(name.startswith(ROLLBACK) for name in self.change_sets)


def surely_other_rows(fingerprint: str, other: str) -> bool:
    """Whether two fingerprints are of different rows; those of different forms cannot be compared."""
    return fingerprint != other and fingerprint.rpartition(" ")[0] == other.rpartition(" ")[0]
