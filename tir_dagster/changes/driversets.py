"""Relations in the driver: keys and hashes of up to a few million rows, settled by DuckDB over the same Parquet files.

Spark reads and stages the rows, and does all of this for larger ones; but a Spark job takes a second however little it
has to do, and a refresh asks a dozen questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tir_dagster.changes.find import Stats
from tir_dagster.changes.ledger import LEDGER_FILE, PARTITION, partition_sql
from tir_dagster.source.arrow import arrow_type
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.keychecks import key_number_duckdb
from tir_dagster.source.names import literal, quote

MEMORY = "2GB"


class DriverSets:
    """Named relations of keyed rows: k0, k1, …, slice, hash, g0, …; relations of keys have the first ones only."""

    def __init__(self, key: Sequence[Column], folder: Path, group: Sequence[Column] = ()) -> None:
        self._key = tuple(key) or (Column("k0", Kind.TEXT),)
        self._types = {"slice": pa.string(), "hash": pa.int64()}
        self._types |= {f"g{at}": arrow_type(column) for at, column in enumerate(group)}
        self._counts_only = not key
        # Nothing is fetched from elsewhere, and what does not fit into memory goes beside what is staged.
        self._database = duckdb.connect(
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY,
                "temp_directory": str(folder / "spilled"),
            }
        )
        self._database.execute("SET TimeZone = 'UTC'")
        self.names: set[str] = set()

    def close(self) -> None:
        self._database.close()

    # Relations

    def put(self, name: str, table: pa.Table) -> None:
        """Keep a table of keys, or of keys, slices and hashes."""
        self._database.register("arrow_table", table)
        self.define(name, "SELECT * FROM arrow_table")
        self._database.unregister("arrow_table")

    def scan(self, name: str, files: Sequence[Path], columns: str) -> None:
        """Name what these Parquet files hold, without reading it now."""
        if files:
            self.show(name, f"SELECT {columns} FROM {parquet(files)}")
        else:
            self.put(name, self.schema(*self._types).empty_table())

    def define(self, name: str, sql: str) -> None:
        self._drop(name)
        self._database.execute(f"CREATE TABLE {name} AS {sql}")
        self.names.add(name)

    def show(self, name: str, sql: str) -> None:
        """Name a query without computing it."""
        self._drop(name)
        self._database.execute(f"CREATE VIEW {name} AS {sql}")
        self.names.add(name)

    def _drop(self, name: str) -> None:
        for (kind,) in self.rows(
            f"SELECT table_type FROM information_schema.tables WHERE table_name = {literal(name)}"
        ):
            self._database.execute(f"DROP {'VIEW' if kind == 'VIEW' else 'TABLE'} {name}")

    # Answers

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._database.execute(sql).fetchall()

    def count(self, name: str) -> int:
        return int(self.rows(f"SELECT COUNT(*) FROM {name}")[0][0])

    def keys(self, name: str) -> list[tuple[Any, ...]]:
        """The keys of a relation, as Python values."""
        listed = ", ".join(f"k{at}" for at in range(len(self._key)))
        table = self._arrow(f"SELECT {listed} FROM {name}").cast(self.schema())
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def groups(self, name: str) -> list[tuple[Any, ...]]:
        """The groups of a relation, as Python values."""
        names = [column for column in self._types if column.startswith("g")]
        types = pa.schema([(column, self._types[column]) for column in names])
        table = self._arrow(f"SELECT DISTINCT {', '.join(names)} FROM {name}").cast(types)
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def table(self, name: str) -> pa.Table:
        """A relation as Arrow, in the types that Spark gives its columns."""
        found = self._arrow(f"SELECT * FROM {name}")
        types = {f"k{at}": arrow_type(column) for at, column in enumerate(self._key)} | self._types
        return found.cast(pa.schema([(column, types[column]) for column in found.column_names]))

    def _arrow(self, sql: str) -> pa.Table:
        return self._database.execute(sql).to_arrow_table()

    def schema(self, *others: str) -> pa.Schema:
        """The key's columns, and of the others those that are named."""
        keys = [(f"k{at}", arrow_type(column)) for at, column in enumerate(self._key)]
        return pa.schema([*keys, *((name, self._types[name]) for name in others)])

    def stats(self, name: str) -> Stats:
        """Rows and key checksum by slice: the numbers that Snowflake and Spark give for the same keys."""
        number = "0" if self._counts_only else key_number_duckdb(self._key)
        found = self.rows(f"SELECT slice, COUNT(*), SUM({number}) FROM {name} GROUP BY slice")
        return {row[0]: (int(row[1]), int(row[2])) for row in found}

    # Files

    def write_keys(self, relation: str, folder: Path, names: Sequence[str], *, prefix: str = "k") -> None:
        listed = ", ".join(f"{prefix}{at} AS {quote(name)}" for at, name in enumerate(names))
        self._copy(f"SELECT DISTINCT {listed} FROM {relation}", folder)

    def write_rows(self, keys: str, folder: Path, *, staged: Sequence[Path], key: Sequence[str]) -> None:
        """The staged rows, with all their columns, whose key is among the keys."""
        tests = " AND ".join(f"s.k{at} IS NOT DISTINCT FROM r.{quote(name)}" for at, name in enumerate(key))
        chosen = f"SELECT * FROM {parquet(staged)} r WHERE EXISTS (SELECT 1 FROM {keys} s WHERE {tests})"
        self._copy(chosen, folder)

    def write_ledger(self, sql: str, folder: Path) -> None:
        self._database.execute(
            f"COPY (SELECT *, {partition_sql('slice')} AS {PARTITION} FROM ({sql})) TO {literal(str(folder))} (FORMAT parquet, "
            f"COMPRESSION zstd, PARTITION_BY ({PARTITION}), FILENAME_PATTERN {literal(LEDGER_FILE)}, OVERWRITE_OR_IGNORE)"
        )

    def _copy(self, sql: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "part-00000.parquet"
        self._database.execute(f"COPY ({sql}) TO {literal(str(target))} (FORMAT parquet, COMPRESSION zstd)")


def parquet(files: Sequence[Path]) -> str:
    """Parquet files as what follows FROM; folders named `p=…` add no column."""
    return f"read_parquet([{', '.join(literal(str(file)) for file in files)}], hive_partitioning = false)"
