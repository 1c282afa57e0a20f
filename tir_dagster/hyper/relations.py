"""How the tables of an extract refer to each other: keys declared for Tableau, and rows that break what is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tir_dagster.hyper.engine import connect, quoted, unbroken
from tir_dagster.hyper.hyperfile import TableId, describe


@dataclass(frozen=True)
class Reference:
    """Rows of one table refer to rows of another one by these columns of the Hyper file."""

    table: TableId
    columns: tuple[str, ...]
    refers_to: TableId
    referred: tuple[str, ...]


def declare_keys(path: Path, references: Sequence[Reference]) -> None:
    """Declare assumed primary and foreign keys in the file: Tableau reads the relationships of a published file from them.

    Hyper believes them without looking: with a primary key, it groups no rows by it. So they are declared in the copy that is
    published only, never in a file that is compared.
    """
    with unbroken(path), connect(path) as connection:
        for table, columns in dict.fromkeys((one.refers_to, one.referred) for one in references):
            connection.execute_command(f"ALTER TABLE {quoted(*table)} ADD ASSUMED PRIMARY KEY ({_listed(columns)})")
        for one in references:
            connection.execute_command(
                f"ALTER TABLE {quoted(*one.table)} ADD ASSUMED FOREIGN KEY ({_listed(one.columns)}) "
                f"REFERENCES {quoted(*one.refers_to)} ({_listed(one.referred)})"
            )


def count_repeated(path: Path, reference: Reference) -> int:
    """Return how many values, NULL aside, several of the referred rows have."""
    is_null = " OR ".join(f"{quoted(name)} IS NULL" for name in reference.referred)
    values = _listed(reference.referred)
    repeated = (
        f"SELECT 1 FROM {quoted(*reference.refers_to)} WHERE NOT ({is_null}) GROUP BY {values} HAVING COUNT(*) > 1"
    )
    return _count(path, f"SELECT COUNT(*) FROM ({repeated}) AS odd")


def count_without_partner(path: Path, reference: Reference) -> int:
    """Return how many rows have a value that no referred row has."""
    # Texts of two collations, such as people's files have, are compared as the source compares them.
    tables = (describe(path, reference.table), describe(path, reference.refers_to))
    left, right = ({column.name: column.comparable for column in table.columns} for table in tables)
    pairs = list(zip(reference.columns, reference.referred, strict=True))
    same = " AND ".join(f"r.{right[there]} = t.{left[here]}" for here, there in pairs)
    is_set = " AND ".join(f"t.{quoted(here)} IS NOT NULL" for here, _ in pairs)
    partner = f"SELECT 1 FROM {quoted(*reference.refers_to)} AS r WHERE {same}"
    return _count(
        path, f"SELECT COUNT(*) FROM {quoted(*reference.table)} AS t WHERE {is_set} AND NOT EXISTS ({partner})"
    )


def _count(path: Path, query: str) -> int:
    with connect(path) as connection:
        return int(connection.execute_scalar_query(query))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names))
