"""A warehouse of three small tables on DuckDB that keeps pinned versions and answers the product's own Snowflake SQL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import duckdb
import sqlglot
from snowflake.connector.constants import FIELD_ID_TO_NAME
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers

from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, MISSING_OBJECT, UNTRACKED, SnowflakeError
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import SourceVersion

Row = dict[str, Any]

SALES, PRODUCTS, MAKERS = (TableName("DB", "S", name) for name in ("SALES", "PRODUCTS", "MAKERS"))
# So few values that keys meet, repeat and are missing all the time.
INT, KEY, TEXT = (0, 1, None), (0, 1, 2, None), ("a", "b", None, "N/A")
DAY = (None, date(2025, 3, 5), date(2025, 3, 31), date(2025, 4, 7))
STAMP = "STAMP"
COLUMNS: dict[TableName, dict[str, tuple[Any, ...]]] = {
    SALES: {"ID": KEY, "DAY": DAY, "PRODUCT": INT, "OTHER": INT, "QTY": INT, "NOTE": TEXT, STAMP: ()},
    PRODUCTS: {"PRODUCT": INT, "COLOR": TEXT, "PRICE": INT, "MAKER": INT, "SINCE": INT, "NOTE": TEXT, STAMP: ()},
    MAKERS: {"MAKER": INT, "TITLE": TEXT, "NOTE": TEXT, STAMP: ()},
}
BEGINNING = datetime(2025, 5, 1, tzinfo=UTC)

_TYPES = {INT: "BIGINT", KEY: "BIGINT", TEXT: "VARCHAR", DAY: "DATE", (): "TIMESTAMP"}
_DECLARED = {"BIGINT": "NUMBER(38,0)", "VARCHAR": "VARCHAR(16777216)", "DATE": "DATE", "TIMESTAMP": "TIMESTAMP_NTZ(9)"}
# What the connector calls them; sums are HUGEINT.
_FIELDS = {"BIGINT": "FIXED", "HUGEINT": "FIXED", "INTEGER": "FIXED", "VARCHAR": "TEXT", "DATE": "DATE"} | {
    "TIMESTAMP": "TIMESTAMP_NTZ",
    "DOUBLE": "REAL",
}
_NUMBERS = {str(name): number for number, name in FIELD_ID_TO_NAME.items()}
_MOMENT = r"\(TIMESTAMP => '([^']+)'::TIMESTAMP_TZ\)"
_TABLE = re.compile(rf'"DB"\."S"\."(\w+)"(?: CHANGES\(INFORMATION => DEFAULT\) AT{_MOMENT} END{_MOMENT}| AT{_MOMENT})?')
_WRITTEN = re.compile(r"\bdb\.s\.(\w+)", re.IGNORECASE)
_PLACE = re.compile(r'"(\w+) of (\d+)"')


def types(table: TableName) -> dict[str, str]:
    return {name: _TYPES[of] for name, of in COLUMNS[table].items()}


def literal(value: Any) -> str:
    """A value as DuckDB reads it."""
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else f"'{value}'"


@cache
def for_duckdb(sql: str) -> str:
    """Names that are not in quotes are in upper case, as Snowflake shows them."""
    tree = sqlglot.parse_one(sql, dialect="snowflake")
    return normalize_identifiers(tree, dialect="snowflake").sql(dialect="duckdb")


class Warehouse:
    """The tables as they are now, and as they were at each pinned moment; asked as SnowflakeAccess is."""

    account = "small"

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        # With NULLs in the order, DuckDB 1.5.5 takes a wrong row for QUALIFY ROW_NUMBER() OVER (…) = 1.
        connection.execute("SET disabled_optimizers = 'top_n_window_elimination'")
        self.tables: dict[TableName, list[Row]] = {table: [] for table in COLUMNS}
        self.tokens: Counter[TableName] = Counter()
        self.tracked = True
        self._minutes = 0
        self._pinned: dict[str, dict[TableName, int]] = {}
        self._kept: set[tuple[TableName, int]] = set()
        self._answers: dict[str, list[tuple[Any, ...]]] = {}
        for table in COLUMNS:
            listed = ", ".join(f"{name} {kind}" for name, kind in types(table).items())
            connection.execute(f"CREATE OR REPLACE TEMP TABLE {table.name}_KEPT (AT_VERSION INTEGER, {listed})")

    # What happens to it

    def tick(self) -> datetime:
        """A minute later, as anything may come a minute after the last thing; the time without a zone, for stamps."""
        self._minutes += 1
        return (BEGINNING + timedelta(minutes=self._minutes)).replace(tzinfo=None)

    def write(self, table: TableName, rows: list[Row]) -> None:
        """The table holds these rows from now on; that it was written to is seen even if they are the same."""
        self.tables[table] = rows
        self.tokens[table] += 1

    def pin(self) -> SourceVersion:
        self.tick()
        version = SourceVersion(BEGINNING + timedelta(minutes=self._minutes))
        self._pinned[str(version)] = dict(self.tokens)
        for table in COLUMNS:
            self._keep(table, self.tokens[table])
        return version

    def _keep(self, table: TableName, number: int) -> None:
        values = [f"({', '.join(map(literal, [number, *row.values()]))})" for row in self.tables[table]]
        if values and (table, number) not in self._kept:
            self.connection.execute(f"INSERT INTO {table.name}_KEPT VALUES {', '.join(values)}")
        self._kept.add((table, number))

    def forget(self) -> None:
        """Time Travel reaches back to no earlier version any more."""
        self._pinned.clear()

    # What it is asked

    def query(self, sql: str, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        if sql.startswith("DESCRIBE TABLE"):
            name = sql.rsplit('"', 2)[1]
            table = next((table for table in COLUMNS if table.name == name), None)
            if table is None:
                raise SnowflakeError(f"Object '{name}' does not exist.", errno=min(MISSING_OBJECT))
            return [(column, _DECLARED[kind], "COLUMN", "Y") for column, kind in types(table).items()]
        if ".INFORMATION_SCHEMA.TABLES" in sql:
            return [(table.schema, table.name) for table in COLUMNS]
        return self.rows(self.translated(sql))

    def rows(self, duckdb_sql: str) -> list[tuple[Any, ...]]:
        """Versions do not change, so neither does an answer."""
        if duckdb_sql not in self._answers:
            self._answers[duckdb_sql] = self.connection.execute(duckdb_sql).fetchall()
        return list(self._answers[duckdb_sql])

    def named_rows(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query by column names."""
        answer = self.connection.execute(self.translated(sql))
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def translated(self, sql: str) -> str:
        """The product's SQL for DuckDB. Only its form is parsed: the versions come in afterwards, so it is parsed once."""
        reads: list[str] = []

        def place(match: re.Match[str]) -> str:
            name, since, until, at = match.groups()
            reads.append(self._changes(name, since, until) if since else self._version(name, at))
            return f'"{name} of {len(reads) - 1}"'

        text = for_duckdb(_TABLE.sub(place, sql))
        return _PLACE.sub(lambda match: reads[int(match[2])], text)

    def shown(self, query: str, version: SourceVersion) -> Counter[tuple[Any, ...]]:
        """What a query as its user wrote it shows at a version: nothing of the product has a part in this."""
        text = for_duckdb(_WRITTEN.sub(lambda match: f'"{match[1].upper()} of 0"', query))
        return Counter(self.rows(_PLACE.sub(lambda match: self._version(match[1], str(version)), text)))

    def _version(self, name: str, moment: str | None) -> str:
        table = next(table for table in COLUMNS if table.name == name)
        if moment is not None and moment not in self._pinned:
            raise SnowflakeError("Time travel data is not available.", errno=min(BEYOND_TIME_TRAVEL))
        number = -1 if moment is None else self._pinned[moment].get(table, 0)
        return f"(SELECT {', '.join(COLUMNS[table])} FROM {name}_KEPT WHERE AT_VERSION = {number})"

    def _changes(self, name: str, since: str, until: str) -> str:
        """Both images of what changed, net: what is in one version and not as often in the other."""
        if not self.tracked:
            raise SnowflakeError("Change tracking is not enabled.", errno=min(UNTRACKED))
        old, new = self._version(name, since), self._version(name, until)
        return f"(({new} EXCEPT ALL {old}) UNION ALL ({old} EXCEPT ALL {new}))"

    # As describe_query asks: a connection with a cursor that describes

    @contextmanager
    def connect(self) -> Iterator[Any]:
        yield SimpleNamespace(cursor=self._cursor)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        yield SimpleNamespace(describe=self._describe)

    def _describe(self, sql: str) -> list[Any]:
        rows = self.rows(f"DESCRIBE {self.translated(sql)}")
        return [
            SimpleNamespace(name=row[0], type_code=_NUMBERS[_FIELDS[row[1]]], precision=38, scale=0, is_nullable=True)
            for row in rows
        ]
