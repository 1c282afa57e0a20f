"""Rows that differ between an extract and its source, found by narrowing: slices, buckets of row digests, rows (L3).

Both sides are asked for the same digests as for fingerprints, so only rows of buckets that differ travel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tir_dagster.hyper.casts import FileColumn, pair_columns
from tir_dagster.hyper.engine import connect, python_value, quoted
from tir_dagster.hyper.features import HYPER, SNOWFLAKE, Dialect, row_digest_sql, row_texts
from tir_dagster.hyper.fingerprints import digested_rows
from tir_dagster.hyper.hyperfile import look_at
from tir_dagster.hyper.replace import ExtractShape

# So many rows are in a bucket on average: what is read for one wrong row.
_BUCKET_ROWS = 500
_MOST_BUCKETS = 2**16
# The most buckets whose rows are read: a slice in which everything differs needs no list of all its rows.
_MOST_READ = 400

Query = Callable[[str], list[tuple[Any, ...]]]
Kind = Literal["missing", "extra", "stale"]


@dataclass(frozen=True)
class Row:
    """One row of a side: its values, and the same values as texts that are equal in both systems."""

    slice: str | None
    values: tuple[Any, ...]
    texts: tuple[str | None, ...]


@dataclass(frozen=True)
class RowDifference:
    """A key whose rows differ: `missing` in the extract, `extra` there, or `stale` (other values, or another number of rows)."""

    kind: Kind
    slice: str | None
    key: tuple[Any, ...]
    # The columns whose values differ; empty unless both sides have one row of the key.
    columns: tuple[str, ...]
    extract: tuple[Row, ...]
    source: tuple[Row, ...]


@dataclass(frozen=True)
class RowDifferences:
    """All differing keys of some slices, or as many as were looked for."""

    found: tuple[RowDifference, ...]
    complete: bool

    def count(self, kind: Kind) -> int:
        return sum(difference.kind == kind for difference in self.found)


def find_row_differences(
    extract: Path,
    slices: Collection[str | None],
    *,
    shape: ExtractShape,
    table_sql: str,
    query: Query,
) -> RowDifferences:
    """Return the keys of these slices whose rows differ; `table_sql` is the source at the extract's own version."""
    with connect(extract) as connection:
        table = look_at(connection, extract, shape.table)
        pairs = pair_columns(shape.columns, table.columns, path=extract, names=shape.names or None)
        in_extract = _Side(
            HYPER, shape, {pair.source.name: pair.stored for pair in pairs}, table.sql, connection.execute_list_query
        )
        as_declared = {column.name: FileColumn(column.name, column.hyper) for column in shape.columns}
        in_source = _Side(SNOWFLAKE, shape, as_declared, table_sql, query)
        buckets = min(max(table.rows // _BUCKET_ROWS, 1), _MOST_BUCKETS)
        differing = _differing(in_extract.sums(slices, buckets), in_source.sums(slices, buckets))
        complete = len(differing) <= _MOST_READ
        chosen = sorted(differing, key=repr)[:_MOST_READ]
        sides = [side.rows(chosen, buckets) for side in (in_extract, in_source)]
    return RowDifferences(_by_key(shape, *sides), complete)


Bucket = tuple[str | None, int]


@dataclass(frozen=True)
class _Side:
    """The extract or the source: how its rows are asked for."""

    dialect: Dialect
    shape: ExtractShape
    stored: Mapping[str, FileColumn]
    from_sql: str
    query: Query

    def sums(self, slices: Collection[str | None], buckets: int) -> dict[Bucket, tuple[int, int]]:
        """Return rows and the sum of their digests by slice and bucket."""
        inner = f"SELECT tir_slice, {row_digest_sql(self.dialect)} AS tir_digest FROM ({self._digested(slices)}) AS d"
        bucketed = f"SELECT tir_slice, MOD(tir_digest, {buckets}) AS tir_bucket, tir_digest FROM ({inner}) AS i"
        sql = (
            "SELECT tir_slice, CAST(tir_bucket AS VARCHAR), CAST(COUNT(*) AS VARCHAR), CAST(SUM(tir_digest) AS VARCHAR) "
            f"FROM ({bucketed}) AS b GROUP BY tir_slice, tir_bucket"
        )
        return {(name, _whole(at)): (_whole(rows), _whole(total)) for name, at, rows, total in self.query(sql)}

    def rows(self, chosen: Sequence[Bucket], buckets: int) -> list[Row]:
        """Return the rows of these buckets."""
        if not chosen:
            return []
        names = [quoted(self.stored[column.name].name) for column in self.shape.columns]
        texts = row_texts(self.shape.columns, self.dialect, stored=self.stored, loose=self.shape.loose)
        listed = ", ".join([*names, *(f"{text} AS tir_as_text{at}" for at, text in enumerate(texts))])
        rows = self._digested({name for name, _ in chosen})
        inner = f"SELECT tir_slice, MOD({row_digest_sql(self.dialect)}, {buckets}) AS tir_bucket, {listed} FROM ({rows}) AS d"
        places = ", ".join(str(at) for at in sorted({at for _, at in chosen}))
        width, wanted = len(names), set(chosen)
        return [
            Row(row[0], tuple(map(python_value, row[2 : 2 + width])), tuple(row[2 + width :]))
            for row in self.query(f"SELECT * FROM ({inner}) AS b WHERE tir_bucket IN ({places})")
            # A bucket of that number may be asked for in another slice only.
            if (row[0], _whole(row[1])) in wanted
        ]

    def _digested(self, slices: Collection[str | None]) -> str:
        shape = self.shape
        return digested_rows(
            shape.columns, self.dialect, self.from_sql, shape.slices, slices, stored=self.stored, loose=shape.loose
        )


def _whole(value: Any) -> int:
    return int(str(value).partition(".")[0])


def _differing(one: Mapping[Bucket, Any], other: Mapping[Bucket, Any]) -> list[Bucket]:
    return [bucket for bucket in {**one, **other} if one.get(bucket) != other.get(bucket)]


def _by_key(shape: ExtractShape, extract: Sequence[Row], source: Sequence[Row]) -> tuple[RowDifference, ...]:
    """Pair the rows that are not equal on both sides by their keys; without a row key, every row stands for itself."""
    surplus = Counter(row.texts for row in extract)
    surplus.subtract(Counter(row.texts for row in source))
    firm = [column.name for column in shape.columns if column.name not in shape.loose]
    places = [place for place, name in enumerate(firm) if name in shape.key]
    by_key: dict[Any, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for side, rows, sign in ((0, extract, 1), (1, source, -1)):
        for row in rows:
            if surplus[row.texts] * sign > 0:
                surplus[row.texts] -= sign
                by_key[tuple(row.texts[place] for place in places) or row.texts][side].append(row)
    return tuple(_difference(shape, firm, *rows) for _, rows in sorted(by_key.items(), key=lambda item: repr(item[0])))


def _difference(shape: ExtractShape, firm: Sequence[str], extract: list[Row], source: list[Row]) -> RowDifference:
    kind: Kind = "stale" if extract and source else "extra" if extract else "missing"
    row = (source or extract)[0]
    columns: tuple[str, ...] = ()
    if len(extract) == len(source) == 1:
        pairs = zip(firm, extract[0].texts, source[0].texts, strict=True)
        columns = tuple(name for name, held, shown in pairs if held != shown)
    values = {column.name: value for column, value in zip(shape.columns, row.values, strict=True)}
    key = tuple(values[name] for name in shape.key)
    return RowDifference(kind, row.slice, key, columns, tuple(extract), tuple(source))


def shown_key(names: Iterable[str], key: Sequence[Any]) -> str:
    """A key for people: ORDER_ID = 17, REGION = NULL."""
    return ", ".join(f"{name} = {'NULL' if value is None else value}" for name, value in zip(names, key, strict=False))
