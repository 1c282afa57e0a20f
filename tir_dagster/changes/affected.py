"""Affected keys: which rows of the first table may show something else because a joined table changed.

    K_D = join keys of changed rows of D (old image and new, minus NULL) + { d.key : d in D now, d refers to a key in K_G }

Computed in the warehouse between two pinned versions, so that keys move and rows do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tir_dagster.changes.candidates import Candidates, Referring, Values, matching
from tir_dagster.changes.described import Described
from tir_dagster.changes.marks import NUMBERS, differing_sql, highest_mark, lower_bound
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.changes.span import Span
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.connection import BEYOND_TIME_TRAVEL, UNTRACKED, SnowflakeAccess, SnowflakeError
from tir_dagster.source.names import TableName, quote

# More changed keys than this are not named one by one: then every row is compared with the ledger.
MOST_KEYS = 10_000

# Beyond this the statement that names them would be too long for Snowflake.
MOST_TEXT = 500_000
# Snowflake keeps nanoseconds, Python microseconds.
_FINE = (Kind.TIMESTAMP, Kind.INSTANT, Kind.TIME)

Log = Callable[[str], None]


class _Unknown(Exception):  # noqa: N818 - no error: an answer
    """Which keys changed cannot be told; the text says why."""


def affected(
    relation: Relation,
    access: SnowflakeAccess,
    span: Span,
    *,
    changed: Collection[TableName],
    described: Callable[[Dimension], Described] = lambda _: Described(),
    log: Log,
) -> tuple[Candidates, tuple[str, ...]]:
    """Candidates for changes of joined tables, and warnings; every row is one where that cannot be told."""
    keys: dict[str, set[tuple[Any, ...]]] = {}
    warnings: tuple[str, ...] = ()
    try:
        # Those at the end of a chain first: what refers to them is affected, too.
        for dimension in reversed(relation.dimensions):
            told = described(dimension)
            warnings += told.warnings
            looked_at = dimension.changes.by != "hint" and dimension.table in changed
            anything = told.anything
            if told.queries and any(column.kind in _FINE for column in dimension.key):
                raise _Unknown(f"{dimension.table} is joined by a time, which may be finer than what can be named")
            found = _changed_keys(access, dimension, span, anything=anything) if looked_at or anything else set()
            for query in told.queries:
                found |= _keys(access, dimension, query)
            for child in relation.dimensions:
                if child.parent == dimension.alias and keys[child.alias]:
                    found |= _referring_keys(access, dimension, child, keys[child.alias], span)
            if len(found) > MOST_KEYS:
                raise _Unknown(f"{len(found):,} keys of {dimension.table} changed")
            keys[dimension.alias] = found
            if len(matching([column.name for column in dimension.key], dimension.key, _sorted(found))) > MOST_TEXT:
                raise _Unknown(f"{len(found):,} long keys of {dimension.table} changed")
            if found:
                log(f"{len(found):,} keys of {dimension.table} changed")
                warnings += tuple(_contract_warnings(access, relation, dimension, found, span))
    except _Unknown as reason:
        sentence = f"{reason}: every row is compared with the ledger."
        log(sentence)
        return Candidates(everything=True), (*warnings, sentence[0].upper() + sentence[1:])
    referring = tuple(
        Referring(relation.refers[one.alias], one.key, _sorted(keys[one.alias]))
        for one in relation.dimensions
        if one.alias in relation.refers and keys[one.alias]
    )
    return Candidates(referring=referring), warnings


def _contract_warnings(
    access: SnowflakeAccess, relation: Relation, dimension: Dimension, keys: set[tuple[Any, ...]], span: Span
) -> Iterator[str]:
    """Changed keys that are there more than once, or not at all though a mandatory join needs them: shown as they are, and told."""
    key, pinned = _listed(dimension.key), f"{dimension.table.sql} {span.new.sql}"
    where = matching([column.name for column in dimension.key], dimension.key, _sorted(keys))
    there = access.query(f"SELECT {key}, COUNT(*) AS TIR_N FROM {pinned} WHERE {where} GROUP BY {key}")
    if repeated := sum(int(row[-1]) > 1 for row in there):
        yield f"{repeated:,} changed keys of {dimension.table} are there more than once: rows that refer to them are multiplied."
    gone = keys - {tuple(row[:-1]) for row in there}
    if dimension.join != "inner" or not gone or relation.view is None:
        return
    parent = next(one.table for one in relation.view.tables if one.alias == dimension.parent)
    referring = matching([one.column for one in dimension.on], dimension.key, _sorted(gone))
    count = int(access.query(f"SELECT COUNT(*) FROM {parent.sql} {span.new.sql} WHERE {referring}")[0][0])
    if count:
        yield f"{count:,} rows of {parent} refer to keys that {dimension.table} does not have any more: the query hides them."


def _sorted(keys: set[tuple[Any, ...]]) -> Values:
    # In one order, so that the same refresh asks the same question.
    return tuple(sorted(keys, key=repr))


def _changed_keys(access: SnowflakeAccess, dimension: Dimension, span: Span, *, anything: bool) -> set[tuple[Any, ...]]:
    """By the table's own detector; one who says that anything may have changed does not mean what a watermark tells."""
    if any(column.kind in _FINE for column in dimension.key):
        raise _Unknown(f"{dimension.table} is joined by a time, which may be finer than what can be named")
    try:
        if dimension.changes.by == "feed":
            listed = _listed(dimension.key)
            return _keys(access, dimension, f"SELECT DISTINCT {listed} FROM {span.changes(dimension.table)}")
        if dimension.mark is not None and not anything:
            return _keys(access, dimension, _marked(access, dimension, dimension.mark, span))
        return _keys(access, dimension, _differing(dimension, span))
    except SnowflakeError as error:
        if error.errno in UNTRACKED:
            return _keys_by_comparison(access, dimension, span)
        if error.errno in BEYOND_TIME_TRAVEL:
            raise _Unknown(f"the history of {dimension.table} does not reach back to {span.old}") from error
        raise


def _keys_by_comparison(access: SnowflakeAccess, dimension: Dimension, span: Span) -> set[tuple[Any, ...]]:
    """Without change tracking the two versions are compared."""
    try:
        return _keys(access, dimension, _differing(dimension, span))
    except SnowflakeError as error:
        if error.errno in BEYOND_TIME_TRAVEL:
            raise _Unknown(f"{dimension.table} has no change tracking, and its history ends too early") from error
        raise


def _differing(dimension: Dimension, span: Span) -> str:
    """Keys whose bags of used columns differ between the versions; duplicates count."""
    key, used = _listed(dimension.key), _listed(dimension.columns)
    sides = " UNION ALL ".join(
        f"SELECT {used}, {sign} AS TIR_N FROM {dimension.table.sql} {version.sql}"
        for version, sign in ((span.new, 1), (span.old, -1))
    )
    return f"SELECT DISTINCT {key} FROM (SELECT {used} FROM ({sides}) GROUP BY {used} HAVING SUM(TIR_N) <> 0)"


def _marked(access: SnowflakeAccess, dimension: Dimension, mark: Column, span: Span) -> str:
    """Keys of rows at or after the highest mark of the old version minus the look-back, and of rows without a mark."""
    new, old = (f"{dimension.table.sql} {version.sql}" for version in (span.new, span.old))
    found = f"SELECT DISTINCT {_listed(dimension.key)} FROM {new}"
    highest = highest_mark(access, mark, old)
    if highest is not None:
        since = lower_bound(mark, highest, read=span.old.moment, look_back=dimension.changes.look_back)
        found += f" WHERE {quote(mark.name)} >= {since} OR {quote(mark.name)} IS NULL"
    if mark.kind in NUMBERS:
        # Whichever number is higher; keys with more or fewer rows are among these.
        return f"{found} UNION {_recounted(dimension, new, old, [mark])}"
    return f"{found} UNION {_recounted(dimension, new, old)}" if dimension.changes.deletes else found


def _recounted(dimension: Dimension, new: str, old: str, content: Sequence[Column] = ()) -> str:
    """Keys with more or fewer rows (of the same content) than before: one that went, or got another key, left no mark behind."""
    keys, values = ([quote(column.name) for column in columns] for columns in (dimension.key, content))
    return differing_sql(keys, values, [column.name for column in dimension.key], new=new, old=old)


def _referring_keys(
    access: SnowflakeAccess, dimension: Dimension, child: Dimension, keys: set[tuple[Any, ...]], span: Span
) -> set[tuple[Any, ...]]:
    """Keys of rows that refer to one of the child's keys."""
    where = matching([one.column for one in child.on], child.key, _sorted(keys))
    pinned = f"{dimension.table.sql} {span.new.sql}"
    return _keys(access, dimension, f"SELECT DISTINCT {_listed(dimension.key)} FROM {pinned} WHERE {where}")


def _keys(access: SnowflakeAccess, dimension: Dimension, query: str) -> set[tuple[Any, ...]]:
    """The keys without those that hold a NULL, which never join."""
    rows = access.query(f"SELECT * FROM ({query}) LIMIT {MOST_KEYS + 1}")
    if len(rows) > MOST_KEYS:
        # Counted with the NULLs: behind the limit there may be any keys.
        raise _Unknown(f"more than {MOST_KEYS:,} keys of {dimension.table} changed")
    return {tuple(row) for row in rows if None not in row}


def _listed(columns: Sequence[Column]) -> str:
    return ", ".join(quote(column.name) for column in columns)
