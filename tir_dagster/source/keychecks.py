"""Count and key checksum per slice, the same number from Snowflake and from Spark: finds lost and extra keys.

Each key becomes one text, the text an MD5, its hexadecimal digits decimal ones, and the first 18 of them a number that is
summed. Reading a to f as 0 to 5 loses little (18 digits keep 58 bits) and needs nothing but functions that every engine
has and computes alike; Snowflake's own HASH_AGG exists nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name its own documentation uses

from tir_dagster.errors import SourceError
from tir_dagster.source.columns import Column, Kind
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import quote, spark_quote
from tir_dagster.source.reader import spark_failures
from tir_dagster.source.slices import SliceBy, slice_sql_snowflake
from tir_dagster.source.staging import SLICE

# '~' alone is NULL; in texts '~' and '|' are written '~0' and '~1', so no two keys share a text.
_NULL = "~"
_DIGITS = 18


@dataclass(frozen=True)
class SliceCheck:
    """How many rows a slice has, and the sum over their keys."""

    rows: int
    checksum: int


def check_sql(source: str, *, key: Sequence[Column], slices: SliceBy, columns: Sequence[Column]) -> str:
    """Snowflake's query: slice, rows, checksum. `source` is what follows FROM: a pinned table or a query in brackets."""
    return (
        f"SELECT {slice_sql_snowflake(slices, columns)} AS SLICE, COUNT(*) AS N, SUM({key_number_snowflake(key)}) AS CHECKSUM "
        f"FROM {source} GROUP BY 1"
    )


def check_source(access: SnowflakeAccess, sql: str) -> dict[str | None, SliceCheck]:
    """Run a query of `check_sql`."""
    return {row[0]: SliceCheck(int(row[1]), int(row[2])) for row in access.query(sql)}


def check_ledger(ledger: DataFrame, *, key: Sequence[Column]) -> dict[str | None, SliceCheck]:
    """The same from rows that hold the key columns and `__tir_slice`."""
    summed = ledger.groupBy(SLICE).agg(F.count("*").alias("N"), F.sum(key_number_spark(key)).alias("CHECKSUM"))
    with spark_failures("adding up the keys of the ledger"):
        return {row[SLICE]: SliceCheck(int(row["N"]), int(row["CHECKSUM"])) for row in summed.collect()}


def key_number_snowflake(key: Sequence[Column]) -> str:
    """One key as a number, in Snowflake's SQL."""
    text = " || '|' || ".join(_text_snowflake(column) for column in _usable(key))
    return f"CAST(SUBSTR(TRANSLATE(MD5({text}), 'abcdef', '012345'), 1, {_DIGITS}) AS NUMBER(38, 0))"


def key_number_spark(key: Sequence[Column]) -> SparkColumn:
    """One key as the same number, as a Spark column."""
    text = F.concat_ws("|", *(_text_spark(column) for column in _usable(key)))
    digits = F.substring(F.translate(F.md5(text.cast("binary")), "abcdef", "012345"), 1, _DIGITS)
    return digits.cast(f"decimal({_DIGITS},0)")


def key_number_duckdb(key: Sequence[Column]) -> str:
    """One key as the same number, in DuckDB's SQL, where the key columns are called k0, k1 and so on."""
    text = " || '|' || ".join(_text_duckdb(f"k{at}", column) for at, column in enumerate(_usable(key)))
    return f"CAST(SUBSTR(TRANSLATE(MD5({text}), 'abcdef', '012345'), 1, {_DIGITS}) AS BIGINT)"


def _usable(key: Sequence[Column]) -> Sequence[Column]:
    unfit = [column for column in key if column.kind in (Kind.FLOAT, Kind.JSON)]
    if unfit or not key:
        what = ", ".join(f"{column.name} ({column.kind.value})" for column in unfit) or "nothing"
        raise SourceError(
            f"A key of {what} cannot be compared. Use columns of numbers, texts, dates or booleans as key."
        )
    return key


def _text_snowflake(column: Column) -> str:
    name = quote(column.name)
    text = {
        Kind.TEXT: f"REPLACE(REPLACE({name}, '~', '~0'), '|', '~1')",
        Kind.DATE: f"TO_CHAR(CAST({name} AS DATE), 'YYYY-MM-DD')",
        Kind.TIME: f"TO_VARCHAR(DATEDIFF(MICROSECOND, '00:00:00'::TIME, {name}))",
        Kind.TIMESTAMP: f"TO_VARCHAR(DATE_PART(EPOCH_MICROSECOND, {name}))",
        Kind.INSTANT: f"TO_VARCHAR(DATE_PART(EPOCH_MICROSECOND, {name}))",
    }.get(column.kind, f"TO_VARCHAR({name})")
    return f"COALESCE({text}, '{_NULL}')"


def _text_duckdb(name: str, column: Column) -> str:
    text = {
        Kind.TEXT: f"REPLACE(REPLACE({name}, '~', '~0'), '|', '~1')",
        # A text since it was read.
        Kind.TIME: f"DATEDIFF('microsecond', TIME '00:00:00', CAST({name} AS TIME))",
        Kind.TIMESTAMP: f"EPOCH_US({name})",
        Kind.INSTANT: f"EPOCH_US({name})",
    }.get(column.kind, name)
    return f"COALESCE(CAST({text} AS VARCHAR), '{_NULL}')"


def _text_spark(column: Column) -> SparkColumn:
    value = F.col(spark_quote(column.name))
    if column.kind is Kind.TEXT:
        value = F.replace(F.replace(value, F.lit("~"), F.lit("~0")), F.lit("|"), F.lit("~1"))
    elif column.kind is Kind.TIME:
        # A text since it was read; microseconds since midnight here and there.
        value = F.unix_micros(F.concat(F.lit("1970-01-01 "), value).cast("timestamp"))
    elif column.kind in (Kind.TIMESTAMP, Kind.INSTANT):
        # The session is in UTC: a time without a zone keeps its digits.
        value = F.unix_micros(value.cast("timestamp"))
    return F.coalesce(value.cast("string"), F.lit(_NULL))
