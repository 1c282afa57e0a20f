"""The records between refreshes: intents and confirmations. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def rolled_back(self) -> bool:
        """Whether it is of a version that was published again."""
        return any(name.startswith(ROLLBACK) for name in self.change_sets)


def surely_other_rows(fingerprint: str, other: str) -> bool:
    """Whether two fingerprints are of different rows; those of different forms cannot be compared."""
    return fingerprint != other and fingerprint.rpartition(" ")[0] == other.rpartition(" ")[0]
