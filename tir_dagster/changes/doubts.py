"""What people should know of a change set though it is right: odd row keys, and hints that told too little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tir_dagster.changes import sets
from tir_dagster.changes.candidates import Candidates
from tir_dagster.changes.hints import Hint, partial_warning
from tir_dagster.changes.relation import Relation
from tir_dagster.spec import ExtractSpec

if TYPE_CHECKING:
    from tir_dagster.changes.workbench import SparkWorkbench


def partial_warnings(
    bench: SparkWorkbench, relation: Relation, hints: Sequence[Hint], candidates: Candidates, keys: int
) -> tuple[str, ...]:
    """A warning if more changed in the first table than its hints described."""
    mine = [hint for hint in hints if hint.table == relation.table]
    detected = relation.spec.changes.by == "watermark" and not candidates.everything
    if not mine or not detected or not candidates.named or candidates.referring:
        return ()
    bench.define("missed", sets.lacking_keys("touched_changed", "named_keys", bench.width))
    told = partial_warning(mine, detected=keys, described=keys - bench.count("missed"), missed=bench.keys("missed"))
    return (told,) if told else ()


def key_warnings(bench: SparkWorkbench, spec: ExtractSpec, *, joined: bool) -> tuple[str, ...]:
    """NULLs and duplicates in the row key are replaced null-safely and as bags."""
    if not spec.row_key:
        return ()
    nulls, repeated = bench.odd_keys("fresh")
    names = ", ".join(spec.row_key)
    warnings = [f"{nulls:,} changed rows have a NULL in the row key ({names})."] if nulls else []
    if repeated:
        why = "by a join, or because it is" if joined else f"{names} is"
        warnings.append(f"{repeated:,} changed keys have more than one row ({why} not unique).")
    return tuple(warnings)
