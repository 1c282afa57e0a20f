"""Verification of a new version before it is published: what was replaced (L1), and whole slices in turn (L2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import NO_SLICE_KEY, ROWS, ChangeSet, parts_of, slice_label
from tir_dagster.errors import EQUALS_SOURCE, VerificationError
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.content import Prints, content_fingerprints, slice_rows, source_fingerprints
from tir_dagster.hyper.fingerprints import different_slices
from tir_dagster.hyper.replace import Shape, staged_keys

_MOST_NAMED = 5


def verify_replaced(extract: Path, change_set: ChangeSet, folder: Path, shape: Shape) -> None:
    """Raise unless the rows of the replaced keys, read back from the closed file, are the staged ones (L1)."""
    with comparing(extract, shape) as comparison:
        comparison.add(parts_of(folder / ROWS))
        wrong = comparison.misplaced_keys(staged_keys(folder), most=_MOST_NAMED + 1)
    if wrong:
        many = f"more than {_MOST_NAMED}" if len(wrong) > _MOST_NAMED else str(len(wrong))
        raise _not_as_read(change_set, f", of {many} keys")


def verify_loaded(sums: Prints, change_set: ChangeSet) -> None:
    """Raise unless a file that was loaded anew has as many rows in each slice as were read (L1)."""
    if slice_rows(sums) != {name: count for name, count in change_set.appended.items() if count}:
        raise _not_as_read(change_set, "")


def _not_as_read(change_set: ChangeSet, what: str) -> VerificationError:
    return VerificationError(
        f"{change_set.extract}: the new extract does not hold the rows that were read{what}. Nothing was published. "
        "Run the refresh again; if that differs too, report it.",
        check=EQUALS_SOURCE,
    )


def verify_slices(
    extract: Path,
    name: str,
    slices: Collection[str | None],
    *,
    shape: Shape,
    table_sql: str,
    query: Callable[[str], list[tuple[Any, ...]]],
) -> None:
    """Raise if whole slices differ from the source at the same version (L2)."""
    if not slices:
        return
    ours = content_fingerprints(extract, shape, only=slices)
    theirs = source_fingerprints(query, table_sql, shape, only=slices)
    if different := different_slices(ours, theirs):
        first, lines = next(iter(different.items()))
        raise VerificationError(
            f"{name}: the new extract differs from the source in {len(different)} slices, in "
            f"{first or 'rows without a slice'} for example: {'; '.join(lines[:3])}. Nothing was published. The next refresh "
            "replaces these slices, and loads everything if that does not help; if that differs too, report it.",
            check=EQUALS_SOURCE,
            slices={slice_label(one or NO_SLICE_KEY): found for one, found in different.items()},
        )


def slices_in_turn(verified: Mapping[str, str], present: Iterable[str], count: int) -> list[str]:
    """Return the slices that were longest not verified; `verified` tells the source version at which each last was."""
    return sorted(present, key=lambda name: (verified.get(name, ""), name))[:count]
