"""What a refresh would move, counted in the warehouse: the detectors' candidates, and which of their rows differ between two versions.

The extract shows the source at its own version, so the source's rows of then stand for the extract's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tir_dagster.changes.detectors import (
    NEW,
    OLD,
    Candidates,
    Question,
    numbered,
    purge_key,
    select_list,
    slices_select,
    source_sql,
)
from tir_dagster.changes.difference import Counts, Difference
from tir_dagster.changes.relation import Relation
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.slices import slice_filter_snowflake, slice_sql_snowflake
from tir_dagster.snowflake.versions import SourceVersion

Query = Callable[[str], Sequence[Sequence[Any]]]
_SLICE, _COUNT = quote("TIR_SLICE"), quote("TIR_N")


@dataclass(frozen=True)
class Moves:
    """Keys that detectors propose, those of them whose rows differ, and the rows that would leave and arrive."""

    candidates: int
    difference: Difference
    # Of the keys that differ: those without rows before, without rows now, and the others.
    new_keys: int
    gone_keys: int
    changed_keys: int


def count_moves(
    relation: Relation,
    question: Question,
    candidates: Candidates,
    query: Query,
    *,
    resync: Sequence[str | None] = (),
    compare: Sequence[str | None] = (),
) -> Moves:
    """Count the candidates whose rows differ between the two versions, those in `compare` slices, and all rows of `resync` slices.

    Where every row is to be compared, all keys of both versions are candidates. Raise if the old version cannot be read.
    """
    selects = list(candidates.selects)
    if slices := tuple(dict.fromkeys((*resync, *compare))):
        selects += [slices_select(relation, version, slices) for version in (question.span.old, question.span.new)]
    if candidates.everything:
        selects = [
            f"SELECT {select_list(purge_key(relation))} FROM {source_sql(relation, version)} AS r"
            for version in (question.span.old, question.span.new)
        ]
    if not selects:
        return Moves(0, Difference(0, {}, {}), 0, 0, 0)
    rows = query(_statement(relation, question, selects, resync))
    (_, _, proposed, both, new, gone) = next(row for row in rows if row[0] == "keys")
    by_slice = [row for row in rows if row[0] == "rows"]
    purged = {row[1]: int(row[2]) for row in by_slice if row[2]}
    appended = {row[1]: int(row[3]) for row in by_slice if row[3]}
    keys = int(both) + int(new) + int(gone)
    return Moves(int(proposed), Difference(keys, purged, appended), int(new), int(gone), int(both))


def rows_by_slice(relation: Relation, version: SourceVersion, query: Query) -> Counts:
    """Count the rows that users would see at this version, by slice."""
    name = slice_sql_snowflake(relation.slices, relation.columns)
    sql = f"SELECT {name} AS {_SLICE}, COUNT(*) FROM {relation.from_clause(version)} AS r GROUP BY {name}"
    return {row[0]: int(row[1]) for row in query(sql)}


def _statement(relation: Relation, question: Question, selects: Sequence[str], resync: Sequence[str | None]) -> str:
    span, key, columns = question.span, purge_key(relation), numbered(relation.columns)
    names = [quote(name) for name in key]
    keys, compared = ", ".join(names), ", ".join([*names, *map(quote, columns)])
    inside = (
        f"CASE WHEN {slice_filter_snowflake(relation.slices, relation.columns, resync)} THEN 1 ELSE 0 END"
        if resync
        else "0"
    )
    sides = " UNION ALL ".join(
        f"SELECT {select_list(key)}, {select_list(columns)}, {slice_sql_snowflake(relation.slices, relation.columns)} AS {_SLICE}, "
        f"{inside} AS TIR_FORCED, {number} AS {_COUNT} FROM {source_sql(relation, version)} AS s"
        for version, number in ((span.old, -1), (span.new, 1))
    )
    union = " UNION ".join(selects)
    versions = [
        f"{name} AS (SELECT * FROM {relation.base(version).sql})"
        for name, version in ((NEW, span.new), (OLD, span.old))
        if name in union
    ]

    def same(left: str, right: str) -> str:
        return " AND ".join(f"{left}.{name} IS NOT DISTINCT FROM {right}.{name}" for name in names)

    parts = [
        *versions,
        f"TIR_KEYS AS (SELECT DISTINCT * FROM ({union}) AS u)",
        f"TIR_ROWS AS (SELECT r.* FROM ({sides}) AS r JOIN TIR_KEYS AS k ON {same('k', 'r')})",
        f"TIR_UNEVEN AS (SELECT {keys} FROM TIR_ROWS GROUP BY {compared} HAVING SUM({_COUNT}) <> 0)",
        f"TIR_CHANGED AS (SELECT {keys} FROM TIR_UNEVEN UNION ALL SELECT {keys} FROM TIR_ROWS WHERE TIR_FORCED = 1)",
        f"TIR_MOVED AS (SELECT DISTINCT {keys} FROM TIR_CHANGED)",
        f"TIR_MOVING AS (SELECT r.* FROM TIR_ROWS AS r JOIN TIR_MOVED AS m ON {same('m', 'r')})",
        f"TIR_BY_KEY AS (SELECT MIN({_COUNT}) AS LEAST_N, MAX({_COUNT}) AS MOST_N FROM TIR_MOVING GROUP BY {keys})",
    ]

    def counted(condition: str) -> str:
        return f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)"

    by_slice = (
        f"SELECT 'rows' AS TIR_WHAT, {_SLICE}, {counted(f'{_COUNT} < 0')} AS A, {counted(f'{_COUNT} > 0')} AS B, 0 AS C, 0 AS D "
        f"FROM TIR_MOVING GROUP BY {_SLICE}"
    )
    by_key = (
        f"SELECT 'keys' AS TIR_WHAT, NULL AS {_SLICE}, (SELECT COUNT(*) FROM TIR_KEYS) AS A, "
        f"COALESCE({counted('LEAST_N < MOST_N')}, 0) AS B, COALESCE({counted('LEAST_N > 0')}, 0) AS C, "
        f"COALESCE({counted('MOST_N < 0')}, 0) AS D FROM TIR_BY_KEY"
    )
    return f"WITH {', '.join(parts)} {by_slice} UNION ALL {by_key}"
