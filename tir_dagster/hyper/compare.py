"""Compares staged candidates with the extract: which keys' rows differ, as bags of whole rows in the stored types.

The extract is its own memory. Staged candidate rows (Parquet) are compared with the rows of the same keys in the base
version, null-safely; a candidate whose rows are the same is no change.

In the SQL here, a relation has the key as k0, k1, …, the columns as c0, c1, … and the slice as tir_slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tir_dagster.changes.change_set import BEFORE, KEYS, ROWS
from tir_dagster.changes.difference import HINT_MARK, ROW_MARK, SLICE_KEY, Counts, Difference, Forced, Key
from tir_dagster.changes.hints import ConditionWriter, Scope, written_condition
from tir_dagster.hyper.casts import Loaded, check_staged, pair_columns
from tir_dagster.hyper.engine import connect, literal, parquet, python_value, quoted
from tir_dagster.hyper.fingerprints import SUMS, Fingerprint, row_fingerprints
from tir_dagster.hyper.hyperfile import look_at
from tir_dagster.hyper.purge import key_select, staged_key
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.hyper.slices import slice_sql_hyper
from tir_dagster.snowflake.columns import Column, Kind

# The most keys that are kept as examples for people.
_SAMPLE = 20


@contextmanager
def comparing(extract: Path, shape: ExtractShape) -> Iterator[ExtractComparison]:
    """Open the base extract for a comparison; it is not changed."""
    with connect(extract) as connection:
        yield ExtractComparison(connection, extract, shape)


class ExtractComparison:
    """The base extract, open, with staged candidates beside it."""

    def __init__(self, connection: Any, path: Path, shape: ExtractShape) -> None:
        self._connection = connection
        self._shape = shape
        self._table = look_at(connection, path, shape.table)
        self._pairs = pair_columns(shape.columns, self._table.columns, path=path, names=shape.names or None)
        self._stored = {pair.source.name: pair.stored for pair in self._pairs}
        self._keys = [f"k{at}" for at in range(len(shape.key) or 1)]
        self._columns = [f"c{at}" for at in range(len(self._pairs))]
        self._source = self._table.sql
        self._staged: tuple[Path, ...] = ()
        self._hinted: tuple[Path, ...] = ()
        self._everything = False
        self._is_narrow = False

    @property
    def rows(self) -> int:
        """The number of rows in the extract."""
        return self._table.rows

    def add(self, files: Sequence[Path], *, everything: bool = False, hinted: bool = False) -> None:
        """Put staged rows beside the extract.

        `everything` says that they are all rows of the source, `hinted` that each is marked whether a hint describes its key.
        """
        check_staged(files, self._staged_names())
        self._staged = (*self._staged, *files)
        self._hinted = (*self._hinted, *(files if hinted else ()))
        self._everything = self._everything or everything

    def clear(self) -> None:
        """Forget what was staged."""
        self._staged, self._hinted, self._everything = (), (), False

    def slice_digests(self) -> Mapping[str | None, Fingerprint]:
        """Return, by slice, how many rows there are and a digest of their keys."""
        names = {*self._shape.key, *([self._shape.slices.column] if self._shape.slices.column else [])}
        columns = [column for column in self._shape.columns if column.name in names]
        return row_fingerprints(self._connection, self._source, self._pairs, columns, self._shape.slices)

    # Keys that nobody has staged

    def unstaged_keys_in_slices(self, slices: Sequence[str | None], *, most: int) -> list[Key]:
        """Return keys of the extract's rows in these slices that were not staged; at most so many."""
        return self._unstaged(self._extract_keys(_among(self._slice(), slices)), most)

    def unstaged_keys_in_files(self, files: Sequence[Path], *, most: int) -> list[Key]:
        """Return keys in these files, such as a pending change set's, that were not staged; at most so many."""
        return self._unstaged(self._file_keys(files), most) if files else []

    def unstaged_keys_in_scope(self, scope: Scope, *, most: int) -> list[Key]:
        """Return keys of the extract's rows that a hint describes and that were not staged; at most so many."""
        columns = {column.name: column for column in self._shape.columns}
        names = {pair.source.name: quoted(pair.stored.name) for pair in self._pairs}
        condition = written_condition(scope, columns, ConditionWriter(names.__getitem__, _value_literal))
        return self._unstaged(self._extract_keys(condition), most)

    def _unstaged(self, keys: str, most: int) -> list[Key]:
        query = f"SELECT DISTINCT {', '.join(self._keys)} FROM ({keys}) AS k"
        if self._staged:
            query += f" WHERE NOT {self._among_keys('k', self._file_keys(self._staged))}"
        return self._listed_keys(f"{query} LIMIT {most}")

    # Decision

    def decide(self, forced: Forced, folder: Path) -> Difference:
        """Find the keys to replace; write them, their fresh rows and those of the extract to `keys`, `rows` and `before`."""
        if not self._everything and not forced.slices:
            # Read once: they are compared, and those that leave are summed up.
            self.narrow([*self._staged, *forced.keys])
        self._connection.execute_command(f"CREATE TEMPORARY TABLE changed AS ({self._changed(forced)})")
        self._write(f"SELECT {', '.join(self._keys)} FROM changed", folder / KEYS)
        difference = self._leaving(self._count("changed"), folder)
        if not self._staged:
            return difference
        undescribed = self._undescribed() if self._hinted else []
        arriving = f"SELECT * FROM ({self._fresh()}) AS t WHERE {self._is_changed('t')}"
        self._connection.execute_command(f"CREATE TEMPORARY TABLE arriving AS ({arriving})")
        self._write(f"SELECT {', '.join(map(quoted, self._staged_names()))} FROM arriving", folder / ROWS)
        return replace(
            difference,
            appended=self._by_slice("arriving"),
            null_keys=self._count("arriving", where=self._has_null()) if self._shape.key else 0,
            repeated_keys=self._repeated() if self._shape.key else 0,
            undescribed=len(undescribed),
            undescribed_keys=tuple(undescribed[:_SAMPLE]),
        )

    def _leaving(self, keys: int, folder: Path) -> Difference:
        """Count the rows of the changed keys by slice, with the sums of their digests, and write them down.

        They have just been read for the comparison: later, in another process, that would take as long again. Where most rows
        change, everything will be loaded again, and neither the digests nor the rows are needed.
        """
        if keys > self.rows // 2:
            leaving = self._extract_rows([f"{self._slice()} AS tir_slice"])
            purged = self._by_slice(f"(SELECT * FROM ({leaving}) AS t WHERE {self._is_changed('t')})")
            return Difference(keys, purged, {})
        changed = self._row_is_among("SELECT * FROM changed")
        sums = self._sums(f"(SELECT * FROM {self._source} AS t WHERE {changed}) AS t")
        listed = ", ".join(f"{quoted(pair.stored.name)} AS {quoted(pair.source.name)}" for pair in self._pairs)
        self._write(f"SELECT {listed} FROM {self._source} AS t WHERE {changed}", folder / BEFORE)
        rows, digests = ({name: fingerprint[feature] for name, fingerprint in sums.items()} for feature in SUMS)
        return Difference(keys, rows, {}, purged_digests=digests)

    def narrow(self, keys: Sequence[Path]) -> None:
        """From here on, look at the rows of these keys only; they are read once."""
        among = self._row_is_among(self._file_keys(keys)) if keys else "FALSE"
        self._connection.execute_command(
            f"CREATE TEMPORARY TABLE tir_narrowed AS (SELECT * FROM {self._source} AS t WHERE {among})"
        )
        self._source, self._is_narrow = "tir_narrowed", True

    def sums(self) -> Mapping[str | None, Fingerprint]:
        """Return rows and the sum of their digests, by slice."""
        return self._sums(self._source)

    def _sums(self, rows_sql: str) -> Mapping[str | None, Fingerprint]:
        shape = self._shape
        return row_fingerprints(
            self._connection, rows_sql, self._pairs, shape.columns, shape.slices, loose=shape.loose, sums_only=True
        )

    def _row_is_among(self, keys: str) -> str:
        """The condition for rows, called t, whose key is among these."""
        parts = [f"t.{self._stored[name].comparable}" for name in self._shape.key] or [self._slice()]
        same = " AND ".join(
            f"s.{name} IS NOT DISTINCT FROM {part}" for name, part in zip(self._keys, parts, strict=True)
        )
        return f"EXISTS (SELECT 1 FROM ({keys}) AS s WHERE {same})"

    def misplaced_keys(self, keys: Sequence[Path], *, most: int) -> list[Key]:
        """Return keys of these files whose rows are not exactly those that were staged; at most so many."""
        return self._listed_keys(f"{self._differing(self._file_keys(keys))} LIMIT {most}") if keys else []

    def _changed(self, forced: Forced) -> str:
        parts = [self._candidates_that_differ()]
        if forced.keys:
            parts.append(self._file_keys(forced.keys))
        if forced.slices:
            parts.append(self._extract_keys(_among(self._slice(), forced.slices)))
            if self._staged:
                parts.append(f"SELECT * FROM ({self._fresh()}) AS f WHERE {_among('tir_slice', forced.slices)}")
        listed = ", ".join(self._keys)
        # UNION treats NULLs as equal.
        return " UNION ".join(f"SELECT {listed} FROM ({part}) AS p{at}" for at, part in enumerate(parts))

    def _candidates_that_differ(self) -> str:
        if self._everything or self._is_narrow:
            return self._differing(None)
        return self._differing(self._file_keys(self._staged)) if self._staged else self._extract_keys("FALSE")

    def _differing(self, among: str | None) -> str:
        """Keys of rows whose number differs between the two sides; of the extract, only rows of these keys."""
        listed = ", ".join([*self._keys, *self._columns])
        compared = [f"{_exact(pair, quoted(pair.stored.name))} AS c{at}" for at, pair in enumerate(self._pairs)]
        stale = self._extract_rows(compared)
        if among is not None:
            stale = f"SELECT * FROM ({stale}) AS t WHERE {self._among_keys('t', among)}"
        sides = f"SELECT {listed}, -1 AS tir_n FROM ({stale}) AS o"
        if self._staged:
            sides += f" UNION ALL SELECT {listed}, 1 AS tir_n FROM ({self._fresh()}) AS f"
        uneven = f"SELECT {listed} FROM ({sides}) AS u GROUP BY {listed} HAVING SUM(tir_n) <> 0"
        return f"SELECT DISTINCT {', '.join(self._keys)} FROM ({uneven}) AS d"

    def _undescribed(self) -> list[Key]:
        """Changed keys among the marked ones that no hint describes."""
        marked = (
            f"SELECT {staged_key(self._key_parts())}, {quoted(HINT_MARK.name)} AS tir_hint FROM {parquet(self._hinted)}"
        )
        query = f"SELECT DISTINCT {', '.join(self._keys)} FROM ({marked}) AS t WHERE tir_hint IS NULL AND {self._is_changed('t')}"
        return self._listed_keys(query)

    def _listed_keys(self, query: str) -> list[Key]:
        return [tuple(map(python_value, row)) for row in self._connection.execute_list_query(query)]

    def _by_slice(self, rows: str) -> Counts:
        query = f"SELECT tir_slice, COUNT(*) FROM {rows} AS r GROUP BY tir_slice"
        return {name: int(count) for name, count in self._connection.execute_list_query(query)}

    def _count(self, table: str, *, where: str = "TRUE") -> int:
        return int(self._connection.execute_scalar_query(f"SELECT COUNT(*) FROM {table} WHERE {where}"))

    def _has_null(self) -> str:
        return f"({' OR '.join(f'{name} IS NULL' for name in self._keys)})"

    def _repeated(self) -> int:
        listed = ", ".join(self._keys)
        repeated = f"SELECT 1 FROM arriving WHERE NOT {self._has_null()} GROUP BY {listed} HAVING COUNT(*) > 1"
        return self._count(f"({repeated}) AS r")

    def _write(self, select: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        target = literal(str(folder.resolve() / "part-0.parquet"))
        self._connection.execute_command(f"COPY ({select}) TO {target} WITH (FORMAT => 'parquet')")

    # Relations

    def _fresh(self) -> str:
        """The staged rows: as they were staged, and as the extract would hold them."""
        raw = ", ".join(map(quoted, self._staged_names()))
        values = [f"{_exact(pair, pair.value)} AS c{at}" for at, pair in enumerate(self._pairs)]
        stored = dict(self._stored)
        if name := self._shape.slices.column:
            # The slice of the value as it is stored: the extract will show the row there.
            value = next(pair.value for pair in self._pairs if pair.source.name == name)
            values.append(f"{value} AS tir_sliced_by")
            stored[name] = replace(stored[name], name="tir_sliced_by")
        staged = f"{parquet(self._staged)} WHERE {quoted(ROW_MARK.name)} IS NOT NULL"
        rows = f"SELECT {raw}, {staged_key(self._key_parts())}, {', '.join(values)} FROM {staged}"
        return f"SELECT *, {slice_sql_hyper(self._shape.slices, self._shape.columns, stored)} AS tir_slice FROM ({rows}) AS s"

    def _extract_rows(self, listed: Sequence[str], where: str = "TRUE") -> str:
        key = [f"{self._slice()} AS k0"]
        if self._shape.key:
            key = [f"{self._stored[name].comparable} AS k{at}" for at, name in enumerate(self._shape.key)]
        return f"SELECT {', '.join([*key, *listed])} FROM {self._source} WHERE {where}"

    def _extract_keys(self, where: str) -> str:
        return self._extract_rows([], where)

    def _file_keys(self, files: Sequence[Path]) -> str:
        return f"SELECT DISTINCT * FROM ({key_select(self._key_parts(), files)}) AS k"

    def _staged_names(self) -> list[str]:
        marks = [ROW_MARK, *([] if self._shape.key else [SLICE_KEY])]
        return [column.name for column in (*self._shape.columns, *marks)]

    def _key_parts(self) -> list[Loaded]:
        by_name = {pair.source.name: pair for pair in self._pairs}
        return [by_name[name] for name in self._shape.key]

    def _slice(self) -> str:
        return slice_sql_hyper(self._shape.slices, self._shape.columns, self._stored)

    def _is_changed(self, alias: str) -> str:
        return self._among_keys(alias, "SELECT * FROM changed")

    def _among_keys(self, alias: str, keys: str) -> str:
        same = " AND ".join(f"s.{name} IS NOT DISTINCT FROM {alias}.{name}" for name in self._keys)
        return f"EXISTS (SELECT 1 FROM ({keys}) AS s WHERE {same})"


def _value_literal(column: Column, value: Any) -> str:
    """A value of a kind that extracts hold exactly, in Hyper's SQL."""
    match column.kind:
        case Kind.INTEGER:
            # A bound may lie beyond what a plain constant can be.
            return f"CAST({literal(str(int(value)))} AS NUMERIC(38,0))"
        case Kind.BOOLEAN:
            return "TRUE" if value else "FALSE"
        case Kind.DATE:
            return f"DATE {literal(value.isoformat())}"
    raise AssertionError(f"{column.name}: a {column.kind.value} is not compared here")


def _exact(pair: Loaded, value: str) -> str:
    """The value for comparison: an extract's collation may call 'a' and 'A' equal."""
    return f'{value} COLLATE "binary"' if pair.stored.type == "TEXT" else value


def _among(value: str, slices: Sequence[str | None]) -> str:
    literals = ", ".join(literal(name) for name in slices if name is not None)
    tests = [f"{value} IN ({literals})"] if literals else []
    tests += [f"({value}) IS NULL"] if None in slices else []
    return f"({' OR '.join(tests) or 'FALSE'})"
