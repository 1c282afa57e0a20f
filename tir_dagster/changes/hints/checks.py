"""Checks of hints against the keys: whether the type is true, and whether all changes are described."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from tir_dagster.changes.hints.model import ChangeType, Hint, Key, Unknown, is_number, value_text

_SHOWN_KEYS = 5


@dataclass(frozen=True)
class Resolution:
    """The keys that a hint's scope hits: before the change (in the extract) and after it (in the source)."""

    hint: Hint
    old_keys: frozenset[Key]
    new_keys: frozenset[Key]

    @property
    def keys(self) -> frozenset[Key]:
        """The keys to compare: those of both sides, whatever the type claims."""
        return self.old_keys | self.new_keys

    @property
    def warnings(self) -> tuple[str, ...]:
        return type_warnings(self.hint, old_keys=self.old_keys, new_keys=self.new_keys)


def type_warnings(hint: Hint, *, old_keys: Collection[Key], new_keys: Collection[Key]) -> tuple[str, ...]:
    """Warn if the keys in the scope, in the extract and in the source, contradict the declared type."""
    if isinstance(hint.scope, Unknown):
        # Every key is in this scope, so the keys say nothing about it.
        return ()
    old, new = set(old_keys), set(new_keys)
    says = f"{hint.table}: a hint says {hint.type.name}, but"
    match hint.type:
        case ChangeType.ADD_ROWS if old:
            finding = f"its scope hits {_counted(old)} that the extract has already"
            return (f"{says} {finding}. They are replaced, not added twice; if rows changed too, use MIXED_CHANGES.",)
        case ChangeType.REMOVE_ROWS if new:
            finding = f"the source still has {_counted(new)} in its scope"
            return (
                f"{says} {finding}. They stay in the extract; if not all were removed, narrow the scope or use MIXED_CHANGES.",
            )
        case ChangeType.UPDATE_ROWS if old != new:
            sides = [(new - old, "source", "extract"), (old - new, "extract", "source")]
            hits = [
                f"{_counted(keys)} in the {side} but not in the {other_side}"
                for keys, side, other_side in sides
                if keys
            ]
            finding = f"its scope hits {' and '.join(hits)}"
            return (
                f"{says} {finding}. They are replaced like all others; if rows were added, removed or moved, use MIXED_CHANGES.",
            )
    return ()


def partial_warning(hints: Iterable[Hint], *, detected: int, described: int, missed: Collection[Key]) -> str | None:
    """Warn if changes were found that no hint describes: `missed` are those keys."""
    tables = ", ".join(dict.fromkeys(str(hint.table) for hint in hints))
    keys = set(missed)
    if not keys or not tables:
        return None
    return (
        f"The hints for {tables} were partial: {detected:,} changed keys were found, {described:,} were described, and "
        f"{_counted(keys)} in no hint {_are(keys)} refreshed as well. Let the job describe all its changes, or use the scope unknown."
    )


def _are(keys: Collection[Key]) -> str:
    return "is" if len(keys) == 1 else "are"


def _counted(keys: Collection[Key]) -> str:
    """The number of keys, and the first few of them."""
    first = nsmallest(_SHOWN_KEYS, keys, key=_rank)
    more = ", …" if len(keys) > len(first) else ""
    return f"{len(keys):,} {'key' if len(keys) == 1 else 'keys'} ({', '.join(map(_key_text, first))}{more})"


def _rank(key: Key) -> tuple[Any, ...]:
    return tuple(_place(value) for value in key)


def _place(value: Any) -> tuple[int, Any, str]:
    """An order for values of any types: numbers by size, NULLs last."""
    if is_number(value) and value == value:  # noqa: PLR0124 - NaN has no order
        return (0, value, "")
    return (2 if value is None else 1, 0, f"{type(value).__name__} {value}")


def _key_text(key: Key) -> str:
    texts = ["NULL" if value is None else value_text(value) for value in key]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
