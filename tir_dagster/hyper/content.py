"""The content of an extract by slice: fingerprints, sums that are updated after a replacement, digests that identify content."""

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
from tir_dagster.hyper.replace import ExtractShape

Prints = Mapping[str | None, Fingerprint]
# A digest says its form: over rows and row digests by slice. Earlier releases wrote one over other features, without a word before it.
_FORM = "sums"
_NOTHING = Fingerprint(dict.fromkeys(SUMS, 0))


def content_fingerprints(
    extract: Path, shape: ExtractShape, *, only: Collection[str | None] | None = None, sums_only: bool = False
) -> Prints:
    """Return all features of what the extract holds, by slice; with `sums_only`, those that tell whether it differs at all."""
    return extract_fingerprints(
        extract,
        shape.columns,
        shape.slices,
        only=only,
        names=shape.names or None,
        loose=shape.loose,
        table_id=shape.table,
        sums_only=sums_only,
    )


def source_fingerprints(
    query: Callable[[str], list[tuple[Any, ...]]],
    table_sql: str,
    shape: ExtractShape,
    *,
    only: Collection[str | None] | None = None,
    sums_only: bool = False,
) -> Prints:
    """Return the same features of what the source shows, by slice."""
    sql = fingerprint_sql(shape.columns, table_sql, shape.slices, only=only, loose=shape.loose, sums_only=sums_only)
    return read_fingerprints(query(sql), shape.columns, loose=shape.loose, sums_only=sums_only)


def content_sums(
    extract: Path, shape: ExtractShape, condition: Callable[[Sequence[Loaded]], str | None] | None = None
) -> Prints:
    """Return rows and the sum of their digests, by slice; with a condition, of the rows that meet it."""
    return extract_fingerprints(
        extract,
        shape.columns,
        shape.slices,
        names=shape.names or None,
        loose=shape.loose,
        table_id=shape.table,
        condition=condition,
        sums_only=True,
    )


def purged_sums(change_set: ChangeSet) -> Prints | None:
    """Return the removed rows and the sum of their digests, by slice, as the detection computed them; None if it did not."""
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
        old, removed, fresh = (side.get(name, _NOTHING) for side in (before, purged, appended))
        sums = {feature: old[feature] - removed[feature] + fresh[feature] for feature in SUMS}
        if any(sums.values()):
            after[name] = Fingerprint(sums)
    return after


def sums_to_json(sums: Prints) -> dict[str, dict[str, str]]:
    """Return the sums for JSON, all as text: digests are too long for the numbers of other JSON readers."""
    return {
        NO_SLICE_KEY if name is None else name: {feature: str(fingerprint[feature]) for feature in SUMS}
        for name, fingerprint in sums.items()
    }


def sums_from_json(value: Mapping[str, Mapping[str, str]]) -> Prints:
    return {
        None if name == NO_SLICE_KEY else name: Fingerprint({feature: int(fingerprint[feature]) for feature in SUMS})
        for name, fingerprint in value.items()
    }


def slice_rows(prints: Prints) -> dict[str, int]:
    """Return the number of rows by slice, as JSON names them."""
    return {NO_SLICE_KEY if name is None else name: int(fingerprint["rows"]) for name, fingerprint in prints.items()}


def content_digest(prints: Prints) -> str:
    """Return a digest of an extract's rows, the same for equal rows in any order and in any file; its form stands before it."""
    return f"{_FORM} {_hashed(sums_to_json(prints))}"


def content_digests(prints: Prints, shape: ExtractShape) -> tuple[str, ...]:
    """Return the digest in every form: a version may have been written down by an earlier release."""
    older = {
        name or NO_SLICE_KEY: {
            feature: value for feature, value in fingerprint.items() if is_older_feature(feature, shape.columns)
        }
        for name, fingerprint in prints.items()
    }
    return content_digest(prints), _hashed(older)


def joined_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of several tables, from that of each."""
    return f"{_FORM} {_hashed(dict(digests))}"


def slice_digests(sums: Prints) -> dict[str, str]:
    """Return a short digest of each slice's rows, for people and for a look at which slice changed."""
    return {name: _hashed(slice_sums)[:16] for name, slice_sums in sums_to_json(sums).items()}


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
