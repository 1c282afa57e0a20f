"""Set logic over keyed rows, as SQL text that Spark runs in a refresh and any other engine can run in a test.

A relation of rows has the columns k0, k1, … (the row key), slice, hash, and g0, g1, … where rows are aggregated to groups.
Bags, not sets: duplicates count.
Every key test is null-safe.
"""

from __future__ import annotations

from collections.abc import Sequence


def key_columns(width: int) -> str:
    return ", ".join(f"k{at}" for at in range(width))


def same_key(one: str, other: str, width: int) -> str:
    return " AND ".join(f"{one}.k{at} IS NOT DISTINCT FROM {other}.k{at}" for at in range(width))


def having_keys(rows: str, keys: str, width: int, *, columns: str = "r.*") -> str:
    """The rows whose key is among the keys."""
    return f"SELECT {columns} FROM {rows} r WHERE EXISTS (SELECT 1 FROM {keys} s WHERE {same_key('s', 'r', width)})"


def lacking_keys(rows: str, keys: str, width: int, *, columns: str = "r.*") -> str:
    """The rows whose key is not among the keys."""
    return f"SELECT {columns} FROM {rows} r WHERE NOT EXISTS (SELECT 1 FROM {keys} s WHERE {same_key('s', 'r', width)})"


def distinct_keys(rows: str, width: int, *, where: str = "") -> str:
    return f"SELECT DISTINCT {key_columns(width)} FROM {rows}{f' WHERE {where}' if where else ''}"


def union_keys(relations: Sequence[str], width: int) -> str:
    """The keys of several relations, each once: UNION treats NULLs as equal."""
    return " UNION ".join(f"SELECT {key_columns(width)} FROM {relation}" for relation in relations)


def differing_keys(one: str, other: str, width: int, *, content: Sequence[str] = ("slice", "hash")) -> str:
    """The keys whose bags of content differ between two relations: what is in one and not as often in the other."""
    listed = ", ".join([key_columns(width), *content])
    return (
        f"SELECT DISTINCT {key_columns(width)} FROM ("
        f"SELECT {listed} FROM ("
        f"SELECT {listed}, 1 AS n FROM {one} UNION ALL SELECT {listed}, -1 AS n FROM {other}) both_sides "
        f"GROUP BY {listed} HAVING SUM(n) <> 0) differing"
    )


def row_columns(width: int, groups: int = 0) -> str:
    return ", ".join([key_columns(width), "slice", "hash", *(f"g{at}" for at in range(groups))])


def groups_of(relations: Sequence[str], groups: int) -> str:
    """The groups of several relations of rows, each once, with the slice they are in."""
    listed = ", ".join(["slice", *(f"g{at}" for at in range(groups))])
    # Of one relation alone there is no UNION that would drop what repeats.
    return " UNION ".join(f"SELECT DISTINCT {listed} FROM {relation}" for relation in relations)


def replaced(ledger: str, keys: str, fresh: str, width: int, groups: int = 0) -> str:
    """The one rule, on the ledger: what is not among the keys stays, the fresh rows come."""
    columns = row_columns(width, groups)
    return f"{lacking_keys(ledger, keys, width, columns=columns)} UNION ALL SELECT {columns} FROM {fresh}"


def in_slices(rows: str, slices: Sequence[str | None], *, columns: str = "*", inside: bool = True) -> str:
    """The rows inside (or outside) these slices; None is the slice of rows without one."""
    named = ", ".join("'" + name.replace("'", "''") + "'" for name in slices if name is not None)
    tests = [f"COALESCE(slice IN ({named}), FALSE)"] if named else []
    tests += ["slice IS NULL"] if None in slices else []
    test = f"({' OR '.join(tests) or '1 = 0'})"
    return f"SELECT {columns} FROM {rows} WHERE {'' if inside else 'NOT '}{test}"
