"""The selection of files: which ones a load takes, and what becomes of the others. Pure."""

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
    """A file, what the load does with it, and its next number in the ledger."""

    file: LandedFile
    status: Status
    digest: str
    order_key: str
    times: int


def news(files: Iterable[LandedFile], known: Mapping[str, Known]) -> list[LandedFile]:
    """Return the files that are new, or have changed since the ledger's entry."""
    return [file for file in files if file.path not in known or known[file.path].stamp != file.stamp]


def in_turn(spec: LoadSpec, listing: Listing, known: Mapping[str, Known]) -> list[LandedFile]:
    """Return the complete files; if the order matters, only up to the first new file that is not complete."""
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
    """Decide what a load does with the files, which are in their order; `newest` is the largest order key loaded so far.

    The digest is computed only if the decision depends on it; otherwise it is computed while the rows are read.
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
    """Return the key by which contents are sorted: the file's, or the folder that holds the parts."""
    by_folder = spec.mode == "truncate" and spec.snapshot == "folder"
    return file.folder if by_folder else order_key(file, spec.files)


def _only_newest(
    spec: LoadSpec,
    chosen: list[Chosen],
    files: Sequence[LandedFile],
    known: Mapping[str, Known],
    newest: str | None,
) -> list[Chosen]:
    """Keep only the newest of several whole contents, and none that is older than the loaded one."""
    winner = max((entry.order_key for entry in chosen if entry.status == "LOADED"), default=None)
    if winner is not None and newest is not None and winner < newest:
        winner = None
    entries = {
        entry.file.path: replace(entry, status="SUPERSEDED")
        if entry.status == "LOADED" and entry.order_key != winner
        else entry
        for entry in chosen
    }
    if winner is not None and spec.snapshot == "folder":
        # The content of a folder is all its files, also those that were loaded earlier.
        parts = [file for file in files if file.folder == winner]
        whole = {file.path: _entry(spec, file, "LOADED", known) for file in parts}
        entries |= {**whole, **{path: entry for path, entry in entries.items() if entry.status == "LOADED"}}
    # If a key is in several parts, the row of the later part counts, whichever part was sent again.
    return [entries[file.path] for file in files if file.path in entries]
