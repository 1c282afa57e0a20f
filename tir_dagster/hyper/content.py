"""What an extract holds, by slice: fingerprints, sums that follow a replacement by arithmetic, digests to recognise content by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import NO_SLICE_KEY, ChangeSet
from tir_dagster.hyper.casts import Loaded
from tir_dagster.hyper.features import is_older_feature
from tir_dagster.hyper.fingerprints import SUMS, Fingerprint, extract_fingerprints, read_fingerprints
from tir_dagster.hyper.fingerprints import snowflake_sql as fingerprint_sql
from tir_dagster.hyper.replace import Shape

Prints = Mapping[str | None, Fingerprint]
# A digest says its form: over rows and row digests by slice. Earlier releases wrote one over other features, without a word before it.
_FORM = "sums"
_NOTHING = Fingerprint(dict.fromkeys(SUMS, 0))


def content_fingerprints(extract: Path, shape: Shape, *, only: Collection[str | None] | None = None) -> Prints:
    """Return all features of what the extract holds, by slice."""
    return extract_fingerprints(
        extract, shape.columns, shape.slices, only=only, names=shape.names or None, loose=shape.loose
    )


def source_fingerprints(
    query: Callable[[str], list[tuple[Any, ...]]],
    table_sql: str,
    shape: Shape,
    *,
    only: Collection[str | None] | None = None,
) -> Prints:
    """Return all features of what the source shows, by slice."""
    sql = fingerprint_sql(shape.columns, table_sql, shape.slices, only=only, loose=shape.loose)
    return read_fingerprints(query(sql), shape.columns, loose=shape.loose)


def content_sums(
    extract: Path, shape: Shape, condition: Callable[[Sequence[Loaded]], str | None] | None = None
) -> Prints:
    """Return rows and the sum of their digests, by slice; with a condition, of the rows that meet it."""
    return extract_fingerprints(
        extract,
        shape.columns,
        shape.slices,
        names=shape.names or None,
        loose=shape.loose,
        condition=condition,
        sums_only=True,
    )


def purged_sums(change_set: ChangeSet) -> Prints | None:
    """Return rows and the sum of their digests that leave the base, by slice, as the detection found them; None if it did not."""
    if change_set.purged_digests is None:
        return None
    return {
        None if name == NO_SLICE_KEY else name: Fingerprint(
            dict(zip(SUMS, (rows, int(change_set.purged_digests[name])), strict=True))
        )
        for name, rows in change_set.purged.items()
    }


def bring_forward(before: Prints, *, purged: Prints, appended: Prints) -> Prints:
    """Return the sums after a replacement, from those before it."""
    after: dict[str | None, Fingerprint] = {}
    for name in dict.fromkeys((*before, *purged, *appended)):
        kept, gone, fresh = (side.get(name, _NOTHING) for side in (before, purged, appended))
        sums = {one: kept[one] - gone[one] + fresh[one] for one in SUMS}
        if any(sums.values()):
            after[name] = Fingerprint(sums)
    return after


def sums_to_json(sums: Prints) -> dict[str, dict[str, str]]:
    """Digests are too long for JSON numbers of other readers, so all are text."""
    return {
        NO_SLICE_KEY if name is None else name: {one: str(found[one]) for one in SUMS} for name, found in sums.items()
    }


def sums_from_json(value: Mapping[str, Mapping[str, str]]) -> Prints:
    return {
        None if name == NO_SLICE_KEY else name: Fingerprint({one: int(found[one]) for one in SUMS})
        for name, found in value.items()
    }


def slice_rows(prints: Prints) -> dict[str, int]:
    """Return the number of rows by slice, as JSON names them."""
    return {NO_SLICE_KEY if name is None else name: int(found["rows"]) for name, found in prints.items()}


def content_digest(prints: Prints) -> str:
    """Return a digest of an extract's rows, the same for equal rows in any order and in any file; its form stands before it."""
    return f"{_FORM} {_hashed(sums_to_json(prints))}"


def content_digests(prints: Prints, shape: Shape) -> tuple[str, ...]:
    """Return the digest in every form: a version may have been written down by an earlier release."""
    older = {
        name or NO_SLICE_KEY: {one: value for one, value in found.items() if is_older_feature(one, shape.columns)}
        for name, found in prints.items()
    }
    return content_digest(prints), _hashed(older)


def slice_digests(sums: Prints) -> dict[str, str]:
    """Return a short digest of each slice's rows, for people and for a look at which slice changed."""
    return {name: _hashed(found)[:16] for name, found in sums_to_json(sums).items()}


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
