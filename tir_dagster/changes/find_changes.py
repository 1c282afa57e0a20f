"""Which keys differ between the extract and the source at one version: detectors propose, the extract decides.

The sequence is here; a reader (Spark and Snowflake in a refresh) stages rows, a comparison (Hyper) holds them beside the extract.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tir_dagster.changes.detectors import (
    Candidates,
    Question,
    candidates_statement,
    everything_statement,
    find_candidates,
    keys_statement,
    slices_select,
)
from tir_dagster.changes.difference import Difference, Forced, Key
from tir_dagster.changes.hints import Scope
from tir_dagster.changes.relation import Relation
from tir_dagster.snowflake.versions import Span

# Keys that come from outside the warehouse travel there as literals; more of them than this, and every row is read instead.
MOST_LITERALS = 20_000
# In one statement: neither too many nor too long for Snowflake's megabyte.
_KEYS_PER_STATEMENT = 2_000
_TEXT_PER_STATEMENT = 200_000

SliceDigests = Mapping[str | None, Any]


class Reader(Protocol):
    """Reads the source at one pinned version."""

    def stage(
        self, statement: str, *, hinted: bool = False, span: Span | None = None, changes: Sequence[str] = ()
    ) -> Any:
        """Run the statement and stage its rows; return what the comparison takes.

        `changes` are SELECTs inside of it that others may have run, too: of what changed in a table over the span.
        """

    def slice_digests(self) -> SliceDigests:
        """Return, by slice, a value that tells how many rows there are and which keys they have."""


class KeyComparison(Protocol):
    """The base extract, with staged rows beside it."""

    def add(self, staged: Any, *, everything: bool = False, hinted: bool = False) -> None: ...

    def clear(self) -> None: ...

    def slice_digests(self) -> SliceDigests: ...

    def unstaged_keys_in_slices(self, slices: Sequence[str | None], *, most: int) -> list[Key]: ...

    def unstaged_keys_in_files(self, files: Sequence[Path], *, most: int) -> list[Key]: ...

    def unstaged_keys_in_scope(self, scope: Scope, *, most: int) -> list[Key]: ...

    def decide(self, forced: Forced, folder: Path) -> Difference: ...


@dataclass(frozen=True)
class ComparisonScope:
    """What is compared or replaced in addition to the detectors' candidates.

    All rows of `compare` slices are candidates; those of `resync` slices are replaced, whatever the comparison says, and so are
    the keys of pending change sets.
    """

    resync: tuple[str | None, ...] = ()
    compare: tuple[str | None, ...] = ()
    pending: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ChangedKeys:
    """The keys that differ, and why every row had to be read, if so."""

    difference: Difference
    everything: str | None = None
    warnings: tuple[str, ...] = ()
    # Hints described less than had changed.
    partial_hints: bool = False


def find_changes(
    relation: Relation,
    question: Question,
    scope: ComparisonScope,
    *,
    reader: Reader,
    comparison: KeyComparison,
    folder: Path,
) -> ChangedKeys:
    """Stage the candidates' rows, compare them with the extract, and write the keys to replace and their rows."""
    candidates = find_candidates(relation, question)
    why = candidates.everything
    if why is None:
        why = _stage_candidates(relation, question, scope, candidates, reader, comparison)
    if why is not None:
        comparison.clear()
        comparison.add(reader.stage(everything_statement(relation, question.span.new)), everything=True)
    difference = comparison.decide(Forced(scope.pending, scope.resync), folder)
    return ChangedKeys(difference, why, candidates.warnings)


def _stage_candidates(
    relation: Relation,
    question: Question,
    scope: ComparisonScope,
    candidates: Candidates,
    reader: Reader,
    comparison: KeyComparison,
) -> str | None:
    """Stage the candidates' rows; return why every row must be read instead, or None."""
    slices = [*scope.resync, *scope.compare]
    if candidates.count_slices:
        slices += _differing_slices(reader.slice_digests(), comparison.slice_digests())
    slices = list(dict.fromkeys(slices))
    selects = [*candidates.selects, *([slices_select(relation, question.span.new, slices)] if slices else [])]
    if selects:
        statement = candidates_statement(relation, question.span, selects, described=candidates.described)
        hinted = bool(candidates.described)
        staged = reader.stage(statement, hinted=hinted, span=question.span, changes=candidates.changes)
        comparison.add(staged, hinted=hinted)
    # Rows that the extract has in these slices, and the source elsewhere or not at all.
    outside = comparison.unstaged_keys_in_slices(slices, most=MOST_LITERALS + 1) if slices else []
    outside += comparison.unstaged_keys_in_files(scope.pending, most=MOST_LITERALS + 1)
    for hinted_scope in candidates.in_extract:
        outside += comparison.unstaged_keys_in_scope(hinted_scope, most=MOST_LITERALS + 1)
    if len(outside) > MOST_LITERALS:
        return f"more than {MOST_LITERALS:,} keys that only the extract has would have to be looked up"
    for part in _parts(list(dict.fromkeys(outside))):
        comparison.add(reader.stage(keys_statement(relation, question.span.new, part)))
    return None


def _differing_slices(source: SliceDigests, extract: SliceDigests) -> list[str | None]:
    return [name for name in {**source, **extract} if source.get(name) != extract.get(name)]


def _parts(keys: Sequence[Key]) -> Iterator[list[Key]]:
    part: list[Key] = []
    length = 0
    for key in keys:
        part.append(key)
        length += sum(len(str(value)) for value in key)
        if len(part) == _KEYS_PER_STATEMENT or length > _TEXT_PER_STATEMENT:
            yield part
            part, length = [], 0
    if part:
        yield part
