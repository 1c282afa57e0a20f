"""What detectors propose: where in the source changed rows may be. The ledger decides which of them are changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tir_dagster.source.columns import Column
from tir_dagster.source.names import quote
from tir_dagster.source.pinned import sql_literal

Values = tuple[tuple[Any, ...], ...]
# What queries call the slice of a row.
SLICE_NAME = "TIR_SLICE"


@dataclass(frozen=True)
class Referring:
    """Rows whose columns refer to one of these keys of a joined table."""

    columns: tuple[str, ...]
    # The columns that are referred to: their types decide how values are compared, as in the join itself.
    key: tuple[Column, ...]
    keys: Values

    @property
    def sql(self) -> str:
        return matching(self.columns, self.key, self.keys)


@dataclass(frozen=True)
class Candidates:
    """Rows that may have changed. Conditions are on the rows the ledger knows."""

    # Every row is one.
    everything: bool = False
    # Rows at or after this watermark, an SQL literal, and rows without one.
    since: str | None = None
    referring: tuple[Referring, ...] = ()
    # Queries that give keys, under the key columns' names; these may have no row any more.
    named: tuple[str, ...] = ()
    # Queries that give keys, or without a row key slices under SLICE_NAME, whose rows differ between the two versions.
    differing: tuple[str, ...] = ()


def matching(columns: Sequence[str], types: Sequence[Column], keys: Values) -> str:
    """A condition for rows whose columns hold one of these keys, none of which holds a NULL: NULL never joins."""
    if len(columns) == 1:
        return f"{quote(columns[0])} IN ({', '.join(sql_literal(types[0], key[0]) for key in keys)})"
    tests = (
        " AND ".join(
            f"{quote(name)} = {sql_literal(column, value)}"
            for name, column, value in zip(columns, types, key, strict=True)
        )
        for key in keys
    )
    return f"({' OR '.join(f'({test})' for test in tests)})"
