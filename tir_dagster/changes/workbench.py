"""The workbench of a refresh: reads Snowflake at one pinned version through Spark, and runs the set logic there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from tir_dagster.changes import sets
from tir_dagster.changes.candidates import SLICE_NAME, Candidates
from tir_dagster.changes.driversets import DriverSets
from tir_dagster.changes.find import Stats
from tir_dagster.changes.ledger import Ledger, write_frame
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.keychecks import check_ledger, check_source, check_sql
from tir_dagster.source.names import quote, spark_quote
from tir_dagster.source.pinned import PinnedSource, sql_literal
from tir_dagster.source.reader import read, read_here, register, spark_failures
from tir_dagster.source.slices import slice_filter_snowflake, slice_spark, slice_sql_snowflake
from tir_dagster.source.staging import HASH, SLICE, Staged, stage

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Keys in one statement, and in all statements of one look-up; beyond that the whole table's keys are compared in Spark.
KEYS_PER_QUERY = 2_000
KEYS_BY_QUERY = 20_000
# Letters of values in one statement; Snowflake takes a megabyte, with all that stands around them.
TEXT_PER_QUERY = 200_000
# Relations up to this size are settled in the driver: a second there, where Spark takes ten for its many small jobs.
DRIVER_ROWS = 5_000_000
# What Spark computed comes to the driver up to this size.
SMALL_ROWS = 100_000
_WORD = re.compile(r"[a-z_]\w*")
# Relations as large as the ledger: cheaper to compute again than to keep.
_LARGE = frozenset({"ledger", "ledger_touched", "ledger_after", "suspect_ledger"})


class SparkWorkbench:
    """Keyed relations as temporary views, dropped at the end; one refresh at a time in a session."""

    def __init__(
        self,
        spark: SparkSession,
        access: SnowflakeAccess,
        source: PinnedSource,
        *,
        folder: Path,
        ledger: Path | None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        # Not a session of its own: one made by newSession() neither knows our data source nor lets it be registered.
        self._spark = spark
        register(spark)
        self._views: dict[str, DataFrame] = {}
        self._driver = DriverSets(source.key, folder, source.group)
        self._access = access
        self._source = source
        self._folder = folder
        self._log = log
        self._staged: list[Staged] = []
        self._source_stats: Stats = {}
        self.width = len(source.key) or 1
        self.groups = len(source.group)
        self._ledger = Ledger(ledger, source.key, source.group) if ledger else None
        if self._ledger is not None and self._ledger.rows <= DRIVER_ROWS:
            self._driver.scan("ledger", self._ledger.files, self._ledger.columns)
        elif self._ledger is not None:
            self._name("ledger", self._ledger.frame(spark))

    # Relations

    def define(self, name: str, sql: str) -> None:
        """In the driver if all it needs is there; else by Spark, and into the driver if the result is small."""
        used = {word for word in _WORD.findall(sql) if word in self._views or word in self._driver.names}
        if used <= self._driver.names:
            make = self._driver.show if name in _LARGE else self._driver.define
            make(name, sql)
            return
        for relation in used & self._driver.names - self._views.keys():
            self._lend(relation)
        frame = self._spark.sql(sql)
        if name in _LARGE:
            self._name(name, frame)
            return
        with spark_failures(f"computing {name}"):
            found = frame.limit(SMALL_ROWS + 1).toArrow()
        if found.num_rows > SMALL_ROWS:
            self._name(name, frame, keep=True)
        else:
            self._driver.put(name, found)

    def _lend(self, relation: str) -> None:
        """Show Spark a relation of the driver."""
        if relation == "ledger" and self._ledger is not None:
            self._name(relation, self._ledger.frame(self._spark))
        else:
            self._name(relation, self._lent(relation, self._driver.table(relation)))

    def _lent(self, relation: str, table: pa.Table) -> DataFrame:
        """Large ones by a file: what is handed over in memory is held several times there."""
        if table.num_rows <= SMALL_ROWS:
            return self._spark.createDataFrame(table)
        file = self._folder / f"lent-{relation}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, file)
        schema = self._spark.createDataFrame(table.slice(0, 0)).schema
        return self._spark.read.schema(schema).parquet(file.absolute().as_uri())

    def count(self, relation: str) -> int:
        if relation in self._driver.names:
            return self._driver.count(relation)
        with spark_failures(f"counting {relation}"):
            return self._spark.table(relation).count()

    def stats(self, relation: str) -> Stats:
        if relation in self._driver.names:
            return self._driver.stats(relation)
        if not self._source.key:
            with spark_failures(f"counting {relation}"):
                counted = self._spark.table(relation).groupBy("slice").count().collect()
            return {row["slice"]: (row["count"], 0) for row in counted}
        named = self._spark.table(relation).selectExpr(*self._key_names(), f"slice AS {spark_quote(SLICE)}")
        checks = check_ledger(named, key=self._source.key)
        return {name: (check.rows, check.checksum) for name, check in checks.items()}

    def source_stats(self) -> Stats:
        """Rows and key checksum by slice, added up by Snowflake."""
        source = self._source
        if not source.key:
            slice_sql = slice_sql_snowflake(source.slices, source.columns)
            rows = self._access.query(f"SELECT {slice_sql}, COUNT(*) FROM {source.sql} GROUP BY 1")
            self._source_stats = {row[0]: (int(row[1]), 0) for row in rows}
        else:
            sql = check_sql(source.sql, key=source.key, slices=source.slices, columns=source.columns)
            checks = check_source(self._access, sql)
            self._source_stats = {name: (check.rows, check.checksum) for name, check in checks.items()}
        return self._source_stats

    # Reads

    def read_all(self, name: str) -> Staged:
        return self._stage(name, self._source.select())

    def read_touched(self, name: str, keys: str, candidates: Candidates, resync: Sequence[str | None]) -> None:
        """All rows of every candidate key: a semi-join, so that a key's other rows come along."""
        if candidates.everything or (candidates.named and not self._source.key):
            self.read_all(name)
            self.define(keys, sets.distinct_keys(name, self.width))
            return
        tests = self._tests(candidates, resync)
        present = f"SELECT * FROM {self._source.sql} WHERE {' OR '.join(tests) or 'FALSE'}"
        self._stage(name, self._rows_of(present, [*candidates.named, *candidates.differing]))
        if not candidates.named:
            self.define(keys, sets.distinct_keys(name, self.width))
            return
        listed = ", ".join(quote(column.name) for column in self._source.key)
        named = " UNION ".join(f"SELECT {listed} FROM ({query})" for query in candidates.named)
        self._read_keys("named_keys", named, self._source.key, expected=None)
        self.define(keys, sets.union_keys([name, "named_keys"], self.width))

    def _tests(self, candidates: Candidates, resync: Sequence[str | None]) -> list[str]:
        """Conditions for the candidates among the rows that are there."""
        source, tests = self._source, [one.sql for one in candidates.referring if one.keys]
        if candidates.since is not None and source.watermark is not None:
            mark = quote(source.watermark.name)
            tests += [f"{mark} >= {candidates.since}", f"{mark} IS NULL"]
        if resync:
            tests.append(slice_filter_snowflake(source.slices, source.columns, resync))
        return tests

    def _rows_of(self, candidates: str, further: Sequence[str] = ()) -> str:
        """All rows with the key of a candidate, or of what the further queries give: keys, or slices if there is no key."""
        source = self._source
        listed = ", ".join(f"t.{quote(column.name)}" for column in source.columns)
        if source.key:
            key = ", ".join(quote(column.name) for column in source.key)
            wanted = " UNION ".join(f"SELECT {key} FROM ({query})" for query in (candidates, *further))
            same = " AND ".join(f"c.{quote(k.name)} IS NOT DISTINCT FROM t.{quote(k.name)}" for k in source.key)
            return f"SELECT {listed} FROM {source.sql} AS t WHERE EXISTS (SELECT 1 FROM ({wanted}) c WHERE {same})"
        slice_sql = slice_sql_snowflake(source.slices, source.columns)
        inner = f"SELECT *, {slice_sql} AS {SLICE_NAME} FROM {source.sql}"
        wanted = " UNION ".join([f"SELECT {slice_sql} AS {SLICE_NAME} FROM ({candidates})", *further])
        return (
            f"SELECT {listed} FROM ({inner}) t WHERE EXISTS "
            f"(SELECT 1 FROM ({wanted}) c WHERE c.{SLICE_NAME} IS NOT DISTINCT FROM t.{SLICE_NAME})"
        )

    def read_keys(self, name: str, slices: Sequence[str | None]) -> None:
        source = self._source
        slice_sql = slice_sql_snowflake(source.slices, source.columns)
        columns = [*source.key, Column(SLICE_NAME, Kind.TEXT)]
        listed = "".join(f"{quote(column.name)}, " for column in source.key)
        where = slice_filter_snowflake(source.slices, source.columns, slices) if slices else "FALSE"
        query = f"SELECT {listed}{slice_sql} AS {SLICE_NAME} FROM {source.sql} WHERE {where}"
        expected = sum(self._source_stats.get(slice_name, (0, 0))[0] for slice_name in slices)
        self._read_keys(name, query, columns, expected=expected)

    def _read_keys(self, name: str, query: str, columns: Sequence[Column], *, expected: int | None) -> None:
        """Keys as a relation, with their slices if those come last: in the driver if they fit, else on Spark."""
        sliced = columns[-1].name == SLICE_NAME
        if expected is None:
            expected = int(self._access.query(f"SELECT COUNT(*) FROM ({query})")[0][0])
        if "ledger" in self._driver.names and expected <= DRIVER_ROWS:
            found = read_here(self._access, query, columns)
            named = found if self._source.key else found.append_column("slice", found.column(0))
            names = [*(f"k{at}" for at in range(self.width)), *(["slice"] if sliced else [])]
            self._driver.put(name, named.rename_columns(names))
            return
        key = [f"{spark_quote(column.name)} AS k{at}" for at, column in enumerate(self._source.key)]
        keys = read(self._spark, self._access, query, columns, split_by=[column.name for column in columns])
        shown = [*(key or [f"{SLICE_NAME} AS k0"]), *([f"{SLICE_NAME} AS slice"] if sliced else [])]
        self._name(name, keys.selectExpr(*shown), keep=True)

    def read_rows(self, name: str, keys: str) -> None:
        count = self.count(keys)
        if count > KEYS_BY_QUERY:
            self._log(f"comparing {count:,} keys with the whole table's")
            self._on_spark(keys)
            self._stage(name, self._source.select(), having=self._spark.table(keys))
            return
        if count == 0:
            self.define(name, "SELECT * FROM touched WHERE 1 = 0")
            return
        self._in_driver(keys)
        values = self._driver.keys(keys)
        self._stage(name, *(self._rows_with(part) for part in _parts(values)))

    def _rows_with(self, keys: list[tuple[Any, ...]]) -> str:
        """The rows of these keys, which stand in the statement as literals."""
        if not self._source.key:
            where = slice_filter_snowflake(self._source.slices, self._source.columns, [key[0] for key in keys])
            return self._source.select(where)
        return self._rows_of(_values(self._source.key, keys))

    def _stage(self, name: str, *queries: str, having: DataFrame | None = None) -> Staged:
        """Read once, write to Parquet, and name the key, slice and hash of what was written."""
        source = self._source
        # Without a row key all columns tell rows apart.
        split_by = [column.name for column in source.key or source.columns]
        parts = [read(self._spark, self._access, query, source.columns, split_by=split_by) for query in queries]
        empty = self._spark.createDataFrame([], _schema(source.columns))
        rows = empty
        for part in parts:
            rows = part if rows is empty else rows.unionByName(part)
        if having is not None:
            rows = self._filtered(rows, having)
        key = [column.name for column in source.key]
        staged = stage(rows, self._folder / name, key=key, slices=source.slices, columns=source.columns)
        self._staged.append(staged)
        self._log(f"read {staged.rows:,} rows")
        if staged.rows <= DRIVER_ROWS:
            self._driver.scan(name, staged.files, ", ".join(self._keyed(quote)))
        else:
            kept = self._spark.read.schema(_staged_schema(source.columns)).parquet(str(staged.folder))
            self._name(name, kept.selectExpr(*self._keyed(spark_quote)))
        return staged

    def _filtered(self, rows: DataFrame, keys: DataFrame) -> DataFrame:
        if not self._source.key:
            slice_name = slice_spark(self._source.slices, self._source.columns)
            return rows.join(keys, slice_name.eqNullSafe(keys["k0"]), "left_semi")
        names = [column.name for column in self._source.key]
        named = keys.selectExpr(*(f"k{at} AS {spark_quote(name)}" for at, name in enumerate(names)))
        return rows.join(named, _same(rows, named, names), "left_semi")

    def _keyed(self, quoted: Callable[[str], str]) -> list[str]:
        """The key, slice and hash of staged rows, as SQL."""
        key = [f"{quoted(column.name)} AS k{at}" for at, column in enumerate(self._source.key)]
        groups = [f"{quoted(column.name)} AS g{at}" for at, column in enumerate(self._source.group)]
        return [*(key or [f"{SLICE} AS k0"]), f"{SLICE} AS slice", f"{HASH} AS hash", *groups]

    def load_pending(self, folders: Sequence[Path]) -> None:
        """Name the keys of pending change sets `pending`."""
        files = [file for folder in folders for file in sorted(folder.glob("part-*.parquet"))]
        if files:
            key = [f"{quote(column.name)} AS k{at}" for at, column in enumerate(self._source.key)] or ["k0"]
            self._driver.scan("pending", files, f"DISTINCT {', '.join(key)}")
        elif folders:
            # Pending without keys: they are applied, and yet the extract has to be looked at again.
            self._driver.put("pending", self._driver.schema().empty_table())

    # Results

    def _on_spark(self, relation: str) -> None:
        if relation not in self._views:
            self._lend(relation)

    def _in_driver(self, relation: str) -> None:
        if relation not in self._driver.names:
            with spark_failures(f"collecting {relation}"):
                self._driver.put(relation, self._spark.table(relation).toArrow())

    def odd_keys(self, relation: str) -> tuple[int, int]:
        """How many rows have a NULL in their key, and how many keys have more than one row."""
        columns = [f"k{at}" for at in range(self.width)]
        nulls = " OR ".join(f"{column} IS NULL" for column in columns)
        repeated = f"SELECT 1 FROM {relation} GROUP BY {', '.join(columns)} HAVING COUNT(*) > 1"
        query = f"SELECT (SELECT COUNT(*) FROM {relation} WHERE {nulls}), (SELECT COUNT(*) FROM ({repeated}) r)"
        if relation in self._driver.names:
            row: Sequence[int] = self._driver.rows(query)[0]
        else:
            with spark_failures("counting keys"):
                row = self._spark.sql(query).collect()[0]
        return row[0], row[1]

    def keys(self, relation: str) -> list[tuple[Any, ...]]:
        """A relation's keys, as Python values: not more than the driver settles."""
        self._in_driver(relation)
        return self._driver.keys(relation)

    def write_groups(self, relation: str, folder: Path, rows: Path, shown: PinnedSource) -> Staged:
        """The groups under their own names, for the purge; and what the query shows of them now."""
        self.define("groups_touched", relation)
        count = self.count("groups_touched")
        names = [column.name for column in self._source.group]
        if count > KEYS_BY_QUERY:
            self._log(f"comparing {count:,} groups with all of them")
            self._on_spark("groups_touched")
            named = [f"g{at} AS {spark_quote(name)}" for at, name in enumerate(names)]
            groups = self._spark.table("groups_touched").selectExpr(*named).distinct()
            groups.coalesce(1).write.mode("overwrite").parquet(folder.absolute().as_uri())
            found = read(self._spark, self._access, shown.select(), shown.columns, split_by=names)
            return self._stage_shown(found.join(groups, _same(found, groups, names), "left_semi"), rows, shown)
        self._in_driver("groups_touched")
        self._driver.write_keys("groups_touched", folder, names, prefix="g")
        values = self._driver.groups("groups_touched")
        listed = ", ".join(f"t.{quote(column.name)}" for column in shown.columns)
        same = " AND ".join(f"c.{quote(name)} IS NOT DISTINCT FROM t.{quote(name)}" for name in names)
        found = self._spark.createDataFrame([], _schema(shown.columns))
        for part in _parts(values):
            query = (
                f"SELECT {listed} FROM {shown.sql} AS t WHERE EXISTS "
                f"(SELECT 1 FROM ({_values(self._source.group, part)}) c WHERE {same})"
            )
            found = found.unionByName(read(self._spark, self._access, query, shown.columns, split_by=names))
        return self._stage_shown(found, rows, shown)

    def group_counts(self, relation: str) -> dict[str | None, int]:
        """How many groups the rows of a relation are in, by slice."""
        groups = sets.groups_of([relation], self.groups)
        query = f"SELECT slice, COUNT(*) FROM ({groups}) listed GROUP BY slice"
        if relation in self._driver.names:
            return {row[0]: int(row[1]) for row in self._driver.rows(query)}
        with spark_failures("counting groups"):
            return {row[0]: int(row[1]) for row in self._spark.sql(query).collect()}

    def read_shown(self, rows: Path, shown: PinnedSource) -> Staged:
        """All rows that the query shows, where the ledger knows other ones."""
        # By the groups: sums of floats may differ from one query to the next.
        split_by = [column.name for column in self._source.group]
        found = read(self._spark, self._access, shown.select(), shown.columns, split_by=split_by)
        return self._stage_shown(found, rows, shown)

    def _stage_shown(self, found: DataFrame, rows: Path, shown: PinnedSource) -> Staged:
        return stage(found, rows, key=[], slices=shown.slices, columns=shown.columns)

    def write_keys(self, relation: str, folder: Path) -> None:
        """The keys under their own names, for the purge."""
        if relation in self._driver.names:
            self._driver.write_keys(relation, folder, [column.name for column in self._source.key] or ["k0"])
            return
        with spark_failures("writing keys"):
            named = self._spark.table(relation).selectExpr(*self._key_names())
            named.coalesce(1).write.mode("overwrite").parquet(folder.absolute().as_uri())

    def write_rows(self, keys: str, folder: Path) -> None:
        """The staged rows, with all columns, of the keys in a relation."""
        source = self._source
        files = [file for staged in self._staged for file in staged.files]
        if keys in self._driver.names and sum(staged.rows for staged in self._staged) <= DRIVER_ROWS:
            key = [column.name for column in source.key] or [SLICE]
            self._driver.write_rows(keys, folder, staged=files, key=key)
            return
        self._on_spark(keys)
        with spark_failures("writing rows"):
            rows = self._spark.createDataFrame([], _staged_schema(source.columns))
            for staged in self._staged:
                part = self._spark.read.schema(_staged_schema(source.columns)).parquet(str(staged.folder))
                rows = rows.unionByName(part)
            self._name("staged_rows", rows)
            if source.key:
                tests = [f"s.k{at} IS NOT DISTINCT FROM r.{spark_quote(k.name)}" for at, k in enumerate(source.key)]
            else:
                tests = [f"s.k0 IS NOT DISTINCT FROM r.{SLICE}"]
            chosen = self._spark.sql(
                f"SELECT r.* FROM staged_rows r WHERE EXISTS (SELECT 1 FROM {keys} s WHERE {' AND '.join(tests)})"
            )
            chosen.write.mode("overwrite").parquet(folder.absolute().as_uri())

    def write_ledger(self, relation: str, folder: Path, slices: Sequence[str | None] | None) -> None:
        """The ledger of these slices (None: of all), a folder for each slice."""
        chosen = f"SELECT * FROM {relation}" if slices is None else sets.in_slices(relation, slices)
        if relation in self._driver.names:
            self._driver.write_ledger(chosen, folder)
            return
        with spark_failures("writing the ledger"):
            write_frame(self._spark.sql(chosen), folder)

    def close(self) -> None:
        self._driver.close()
        for name, frame in self._views.items():
            self._spark.catalog.dropTempView(name)
            frame.unpersist()

    def _name(self, name: str, frame: DataFrame, *, keep: bool = False) -> None:
        self._views[name] = frame.persist() if keep else frame
        self._views[name].createOrReplaceTempView(name)

    def _key_names(self) -> list[str]:
        if not self._source.key:
            return ["k0"]
        return [f"k{at} AS {spark_quote(column.name)}" for at, column in enumerate(self._source.key)]


def _values(columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> str:
    """A query that gives these values, under the columns' names."""
    return " UNION ALL ".join(
        "SELECT "
        + ", ".join(f"{sql_literal(c, value)} AS {quote(c.name)}" for c, value in zip(columns, row, strict=True))
        for row in rows
    )


def _parts(values: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Values for one statement each: neither too many nor too long."""
    part: list[tuple[Any, ...]] = []
    length = 0
    for value in values:
        part.append(value)
        length += sum(len(str(one)) for one in value)
        if len(part) == KEYS_PER_QUERY or length > TEXT_PER_QUERY:
            yield part
            part, length = [], 0
    if part:
        yield part


def _same(one: DataFrame, other: DataFrame, names: Sequence[str]) -> Any:
    """A null-safe test that two frames have the same values in these columns."""
    tests = [one[name].eqNullSafe(other[name]) for name in names]
    condition = tests[0]
    for test in tests[1:]:
        condition = condition & test
    return condition


def _schema(columns: Sequence[Column]) -> str:
    return ", ".join(f"{spark_quote(column.name)} {column.spark}" for column in columns)


def _staged_schema(columns: Sequence[Column]) -> str:
    return f"{_schema(columns)}, {SLICE} string, {HASH} bigint"
