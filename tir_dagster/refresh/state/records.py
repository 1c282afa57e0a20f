"""What is known between refreshes: change sets, intents and confirmations, and what a crash between them means. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from tir_dagster.changes.change_set import Record
from tir_dagster.changes.plan import Known


@dataclass(frozen=True)
class Intent(Record):
    """Written before a publish: what is about to be published, and what the server held before."""

    extract: str
    change_set: str
    version: str
    base_server_version: str | None
    fingerprint: str
    known: Known
    # The delivery `server`: what people see until Tableau has loaded the rest.
    hole: str | None = None
    # The delivery `patch`: only the change set is sent; and whether the server's rows carry a key column of ours.
    patch: bool = False
    keyed: bool = False
    # The job on the server that the last part of it became.
    job: str | None = None


@dataclass(frozen=True)
class Confirmation(Record):
    """Written once, after a publish: what the server shows now, and everything the next refresh starts from."""

    extract: str
    version: str
    source_version: str
    known: Known
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


class Aftermath(Enum):
    """What a crash left behind, as the server tells it."""

    CLEAN = "nothing was about to be published"
    LANDED = "the publish landed: confirm it late"
    NOT_LANDED = "the server still holds what it held before: publish again"
    HOLE = "a refresh on the server did not end: the kept package is published back first"
    PARTIAL = "a part of the change arrived on the server: it is sent again"
    FORGOTTEN = "the server holds a version of ours that is not on record: confirm it again"
    FOREIGN = "the server holds something that is not ours"


def aftermath(
    *,
    intent: Intent | None,
    confirmed: Confirmation | None,
    server_version: str | None,
    server_fingerprints: Collection[str] = (),
    heals: bool = False,
) -> Aftermath:
    """Decide what happened to the last publish; the fingerprints are those of the server's content, if it was looked at.

    They are of one content, in every form in which a version may have been written down. `heals` tells that the same change, sent again to that content, would give what was intended.
    """
    if intent is not None:
        if server_version == intent.base_server_version:
            return Aftermath.NOT_LANDED
        if confirmed is not None and confirmed.fingerprint in server_fingerprints:
            # Published back, by us or by somebody else: what was there before is there again.
            return Aftermath.NOT_LANDED
        if intent.hole in server_fingerprints:
            return Aftermath.HOLE
        if intent.patch and heals and intent.fingerprint not in server_fingerprints:
            return Aftermath.PARTIAL
        return Aftermath.LANDED if intent.fingerprint in server_fingerprints else Aftermath.FOREIGN
    if confirmed is not None and server_version != confirmed.server_version:
        # A refresh that Tableau itself ran may have left the rows as they were.
        return Aftermath.CLEAN if confirmed.fingerprint in server_fingerprints else Aftermath.FOREIGN
    return Aftermath.CLEAN


def surely_other_rows(fingerprint: str, other: str) -> bool:
    """Whether two fingerprints are of different rows; those of different forms cannot be compared."""
    return fingerprint != other and fingerprint.rpartition(" ")[0] == other.rpartition(" ")[0]
