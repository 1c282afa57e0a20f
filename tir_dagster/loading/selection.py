"""Which of the files that are there a load takes, and what becomes of the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from tir_dagster.loading.landing import LandedFile, Listing, order_key
from tir_dagster.spec.load import LoadSpec

Status = Literal["LOADED", "REPEATED", "SUPERSEDED"]


@dataclass(frozen=True)
class Known:
    """The ledger's newest entry of a path; `times` is how often the path is in the ledger."""

    times: int
    stamp: str
    digest: str


@dataclass(frozen=True)
class Chosen:
    """A file, what becomes of it, and its next number in the ledger."""

    file: LandedFile
    status: Status
    digest: str
    order_key: str
    times: int


def news(files: Iterable[LandedFile], known: Mapping[str, Known]) -> list[LandedFile]:
    """The files that the ledger does not know as they are."""
    return [file for file in files if file.path not in known or known[file.path].stamp != file.stamp]


def in_turn(spec: LoadSpec, listing: Listing, known: Mapping[str, Known]) -> list[LandedFile]:
    """The complete files; where the order matters, only up to the first new one that is not complete."""
    waiting = {file.path for file in news(listing.files, known)} & listing.unfinished if spec.in_order else set()
    turn = takewhile(lambda file: file.path not in waiting, listing.files)
    return [file for file in turn if file.path not in listing.unfinished]


def choose(
    spec: LoadSpec,
    files: Sequence[LandedFile],
    known: Mapping[str, Known],
    *,
    digest: Callable[[LandedFile], str],
    newest: str | None,
) -> list[Chosen]:
    """What a load does with the files, which are in their order; `newest` is the largest order key loaded so far.

    The digest is asked for only where something depends on it: whoever reads the rows of a file tells it, too.
    """
    chosen = []
    for file in news(files, known):
        before = known.get(file.path)
        content = digest(file) if before is not None else ""
        status: Status = "REPEATED" if before is not None and before.digest == content else "LOADED"
        chosen.append(_entry(spec, file, status, known, content))
    return chosen if spec.mode != "truncate" else _only_newest(spec, chosen, files, known, newest)


def _entry(spec: LoadSpec, file: LandedFile, status: Status, known: Mapping[str, Known], digest: str = "") -> Chosen:
    before = known.get(file.path)
    return Chosen(file, status, digest, _order(spec, file), before.times if before else 0)


def _order(spec: LoadSpec, file: LandedFile) -> str:
    """What whole contents sort by: the file, or the folder that holds their parts."""
    by_folder = spec.mode == "truncate" and spec.snapshot == "folder"
    return file.folder if by_folder else order_key(file, spec.files)


def _only_newest(
    spec: LoadSpec,
    chosen: list[Chosen],
    files: Sequence[LandedFile],
    known: Mapping[str, Known],
    newest: str | None,
) -> list[Chosen]:
    """Of several whole contents only the newest counts, and none that is older than the one loaded."""
    fresh = {entry.order_key for entry in chosen if entry.status == "LOADED"}
    winner = max(fresh, default=None)
    if winner is not None and newest is not None and winner < newest:
        winner = None
    kept = []
    for entry in chosen:
        stays = entry.status != "LOADED" or entry.order_key == winner
        kept.append(entry if stays else replace(entry, status="SUPERSEDED"))
    if winner is None or spec.snapshot == "file":
        return kept
    # A folder's content is all its files, also those that came and were loaded earlier.
    listed = {entry.file.path for entry in kept if entry.status == "LOADED"}
    again = [file for file in files if file.folder == winner and file.path not in listed]
    kept = [entry for entry in kept if entry.file.path not in {file.path for file in again}]
    kept += [_entry(spec, file, "LOADED", known) for file in again]
    # Of a key that is in several parts the later part's row counts, whichever part came again.
    places = {file.path: place for place, file in enumerate(files)}
    return sorted(kept, key=lambda entry: places[entry.file.path])
