"""The result of comparing candidates with the extract: keys to replace, rows removed and rows added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tir_dagster.snowflake.columns import Column, Kind

# NULL in a staged row of a key that has no row any more: only its key counts.
ROW_MARK = Column("__TIR_ROW", Kind.INTEGER)
# NULL in a staged row whose key no hint describes; staged only where hints were given.
HINT_MARK = Column("__TIR_HINTED", Kind.INTEGER)
# Without a row key the slice is the key. Staged beside the columns: a slice without rows has no other place.
SLICE_KEY = Column("__TIR_SLICE", Kind.TEXT)

# Rows by slice; None stands for rows without one.
Counts = Mapping[str | None, int]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """What has to be replaced: the number of keys, and the rows removed and added by slice."""

    keys: int
    purged: Counts
    appended: Counts
    # Of the rows added: how many have a NULL in their key, and how many keys have several rows.
    null_keys: int = 0
    repeated_keys: int = 0
    # Changed keys that no hint describes, where hints were given: how many, and some of them.
    undescribed: int = 0
    undescribed_keys: tuple[Key, ...] = ()
    # The sum of the digests of the removed rows, by slice; None where it was not computed.
    purged_digests: Counts | None = field(default=None, compare=False)

    @property
    def slices(self) -> tuple[str | None, ...]:
        """The slices that lose or gain rows, those without a name last."""
        return tuple(sorted({**self.purged, **self.appended}, key=lambda name: (name is None, name or "")))


@dataclass(frozen=True)
class Forced:
    """What is replaced without comparison: keys of pending change sets, and whole slices."""

    keys: tuple[Path, ...] = ()
    slices: tuple[str | None, ...] = ()
