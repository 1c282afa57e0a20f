"""Warnings about a valid change set (NULL or duplicate keys, incomplete hints, broken joins), and what the spec forbids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tir_dagster.changes.detectors import Question, changed_dimension_keys
from tir_dagster.changes.difference import Difference
from tir_dagster.changes.hints import Hint, partial_warning
from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.errors import GuardError
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.extract import ExtractSpec


def partial_warnings(relation: Relation, hints: Sequence[Hint], difference: Difference) -> tuple[str, ...]:
    """Warn if more changed in the first table than its hints describe."""
    table_hints = [hint for hint in hints if hint.table == relation.table]
    warning = partial_warning(
        table_hints,
        detected=difference.keys,
        described=difference.keys - difference.undescribed,
        missed=difference.undescribed_keys,
    )
    return (warning,) if warning else ()


def key_warnings(spec: ExtractSpec, difference: Difference, *, joined: bool) -> tuple[str, ...]:
    """Warn of NULLs and duplicates in the row key, which are replaced null-safely and as bags."""
    if not spec.row_key:
        return ()
    names = ", ".join(spec.row_key)
    warnings = []
    if difference.null_keys:
        warnings.append(f"{difference.null_keys:,} changed rows have a NULL in the row key ({names}).")
    if difference.repeated_keys:
        why = "by a join, or because it is" if joined else f"{names} is"
        warnings.append(f"{difference.repeated_keys:,} changed keys have more than one row ({why} not unique).")
    return tuple(warnings)


def contract_warnings(relation: Relation, question: Question, access: SnowflakeAccess) -> tuple[str, ...]:
    """Warn of changed join keys that occur more than once, or that are missing though an inner join needs them."""
    keys = changed_dimension_keys(relation, question)
    return tuple(
        warning
        for dimension in relation.dimensions
        if dimension.alias in keys
        for warning in _broken_contracts(relation, dimension, keys[dimension.alias], question, access)
    )


def _broken_contracts(
    relation: Relation, dimension: Dimension, keys: str, question: Question, access: SnowflakeAccess
) -> Iterator[str]:
    names = [quote(column.name) for column in dimension.key]
    pinned = f"{dimension.table.sql} {question.span.new.sql}"
    same_key = " AND ".join(f"k.{name} = t.{name}" for name in names)
    counted = (
        f"SELECT {', '.join(f'k.{name}' for name in names)}, COUNT(t.{names[0]}) AS TIR_N "
        f"FROM (SELECT DISTINCT * FROM ({keys}) AS u) AS k LEFT JOIN {pinned} AS t ON {same_key} "
        f"WHERE {' AND '.join(f'k.{name} IS NOT NULL' for name in names)} GROUP BY {', '.join(f'k.{name}' for name in names)}"
    )
    repeated = int(access.query(f"SELECT COUNT(*) FROM ({counted}) AS c WHERE TIR_N > 1")[0][0])
    if repeated:
        yield (
            f"{repeated:,} changed keys of {dimension.table} occur more than once: rows that refer to them are multiplied."
        )
    if dimension.join != "inner" or relation.view is None:
        return
    parent = next(table.table for table in relation.view.tables if table.alias == dimension.parent)
    refers = " AND ".join(
        f"g.{quote(key.name)} = r.{quote(join_key.column)}"
        for key, join_key in zip(dimension.key, dimension.on, strict=True)
    )
    missing = f"(SELECT * FROM ({counted}) AS c WHERE TIR_N = 0) AS g"
    rows = f"SELECT COUNT(*) FROM {parent.sql} {question.span.new.sql} AS r JOIN {missing} ON {refers}"
    if count := int(access.query(rows)[0][0]):
        yield f"{count:,} rows of {parent} refer to keys that {dimension.table} no longer has: the query hides them."


# The most duplicate keys that the error lists.
_NAMED = 5


def refuse_duplicates(relation: Relation, access: SnowflakeAccess, version: SourceVersion) -> None:
    """Raise GuardError if a join key occurs more than once in a table whose keys must be unique by the spec."""
    tested: set[tuple[str, ...]] = set()
    for dimension in relation.dimensions:
        key = (str(dimension.table), *(column.name for column in dimension.key))
        if dimension.changes.duplicates == "fail" and key not in tested:
            tested.add(key)
            _refuse(relation.spec.name, access, dimension, version)


def _refuse(extract: str, access: SnowflakeAccess, dimension: Dimension, version: SourceVersion) -> None:
    names = [quote(column.name) for column in dimension.key]
    # NULL never joins, so it multiplies nothing.
    not_null = " AND ".join(f"{name} IS NOT NULL" for name in names)
    listed = ", ".join(names)
    duplicates = access.query(
        f"SELECT {listed}, COUNT(*) FROM {dimension.table.sql} {version.sql} WHERE {not_null} "
        f"GROUP BY {listed} HAVING COUNT(*) > 1 ORDER BY {listed} LIMIT {_NAMED + 1}"
    )
    if not duplicates:
        return
    examples = "; ".join(f"{', '.join(map(str, row[:-1]))} ({row[-1]} rows)" for row in duplicates[:_NAMED])
    more = " and more" if len(duplicates) > _NAMED else ""
    joined = ", ".join(column.name for column in dimension.key)
    raise GuardError(
        f"{extract}: {dimension.table} has keys ({joined}) more than once: {examples}{more}. Rows that refer to them would be "
        f"multiplied. Nothing was touched. Fix the table, or set changes.tables.{dimension.table}.duplicates to warn."
    )
