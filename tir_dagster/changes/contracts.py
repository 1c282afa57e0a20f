"""What an extract may demand of its joined tables before anything of it is touched."""

from __future__ import annotations

from tir_dagster.changes.relation import Dimension, Relation
from tir_dagster.errors import GuardError
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import quote
from tir_dagster.snowflake.versions import SourceVersion

# So many keys are named; that there are more is said.
_NAMED = 5


def refuse_duplicates(relation: Relation, access: SnowflakeAccess, version: SourceVersion) -> None:
    """GuardError if a join key is there more than once in a table whose keys the spec wants to be unique."""
    tested: set[tuple[str, ...]] = set()
    for dimension in relation.dimensions:
        key = (str(dimension.table), *(column.name for column in dimension.key))
        if dimension.changes.duplicates == "fail" and key not in tested:
            tested.add(key)
            _refuse(relation.spec.name, access, dimension, version)


def _refuse(extract: str, access: SnowflakeAccess, dimension: Dimension, version: SourceVersion) -> None:
    names = [quote(column.name) for column in dimension.key]
    # NULL never joins, so it multiplies nothing.
    there = " AND ".join(f"{name} IS NOT NULL" for name in names)
    listed = ", ".join(names)
    found = access.query(
        f"SELECT {listed}, COUNT(*) FROM {dimension.table.sql} {version.sql} WHERE {there} "
        f"GROUP BY {listed} HAVING COUNT(*) > 1 ORDER BY {listed} LIMIT {_NAMED + 1}"
    )
    if not found:
        return
    told = "; ".join(f"{', '.join(map(str, row[:-1]))} ({row[-1]} rows)" for row in found[:_NAMED])
    more = " and more" if len(found) > _NAMED else ""
    joined = ", ".join(column.name for column in dimension.key)
    raise GuardError(
        f"{extract}: {dimension.table} has keys ({joined}) more than once: {told}{more}. Rows that refer to them would be "
        f"multiplied. Nothing was touched. Mend the table, or set changes.tables.{dimension.table}.duplicates to warn."
    )
