"""Column types across Snowflake, Spark, Parquet and Hyper: the one table that knows them. docs/types.md shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.names import quote

# Hyper's default file version holds decimals up to this precision; wider ones become floats, as in Tableau itself.
HYPER_DECIMAL_DIGITS = 18


class Kind(Enum):
    """The kind of value in a column, the same for every system."""

    INTEGER = "integer"
    DECIMAL = "decimal"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TEXT = "text"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"  # without a zone
    INSTANT = "instant"  # with a zone: a moment, shown in UTC
    JSON = "json"


@dataclass(frozen=True)
class HeldType:
    """A type of Snowflake that an extract holds, under all its names; the first is the one DESCRIBE writes."""

    kind: Kind
    names: tuple[str, ...]


@dataclass(frozen=True)
class RefusedType:
    """A type that no extract holds; `cast` is what a query shows instead of the column."""

    cast: str
    names: tuple[str, ...]


HELD = (
    # With digits after the point it is a DECIMAL.
    HeldType(
        Kind.INTEGER,
        (
            *("NUMBER", "DECIMAL", "DEC", "NUMERIC", "INT", "INTEGER"),
            *("BIGINT", "SMALLINT", "TINYINT", "BYTEINT"),
        ),
    ),
    HeldType(Kind.FLOAT, ("FLOAT", "FLOAT4", "FLOAT8", "DOUBLE", "DOUBLE PRECISION", "REAL")),
    HeldType(Kind.BOOLEAN, ("BOOLEAN",)),
    HeldType(
        Kind.TEXT,
        (
            *("VARCHAR", "CHAR", "CHARACTER", "NCHAR", "STRING", "TEXT", "NVARCHAR", "NVARCHAR2"),
            *("CHAR VARYING", "NCHAR VARYING", "CHARACTER VARYING"),
        ),
    ),
    HeldType(Kind.DATE, ("DATE",)),
    HeldType(Kind.TIME, ("TIME",)),
    HeldType(Kind.TIMESTAMP, ("TIMESTAMP_NTZ", "TIMESTAMPNTZ", "DATETIME", "TIMESTAMP")),
    HeldType(Kind.INSTANT, ("TIMESTAMP_LTZ", "TIMESTAMPLTZ")),
    HeldType(Kind.INSTANT, ("TIMESTAMP_TZ", "TIMESTAMPTZ")),
    HeldType(Kind.JSON, ("VARIANT",)),
    HeldType(Kind.JSON, ("OBJECT",)),
    HeldType(Kind.JSON, ("ARRAY",)),
)

REFUSED = (
    # Hyper has BYTEA, but Tableau has no fields of that type: a column that nobody can show, with no key and no fingerprint.
    RefusedType("HEX_ENCODE({})", ("BINARY", "VARBINARY")),
    RefusedType("CAST({} AS VARCHAR)", ("DECFLOAT",)),
    RefusedType("CAST({} AS VARCHAR)", ("UUID",)),
    RefusedType("ST_ASWKT({})", ("GEOGRAPHY",)),
    RefusedType("ST_ASWKT({})", ("GEOMETRY",)),
    RefusedType("CAST({} AS ARRAY)", ("VECTOR",)),
    RefusedType("CAST({} AS OBJECT)", ("MAP",)),
    RefusedType("FL_GET_RELATIVE_PATH({})", ("FILE",)),
    RefusedType("CAST({} AS VARCHAR)", ("INTERVAL", "INTERVAL_YEAR_MONTH", "INTERVAL_DAY_TIME")),
)

_KINDS = {name: held.kind for held in HELD for name in held.names}
_CASTS = {name: refused.cast for refused in REFUSED for name in refused.names}


@dataclass(frozen=True)
class _Forms:
    spark: str
    parquet: str
    hyper: str


# Spark has no time of day that Parquet and Hyper share, and no JSON: both travel as text.
_FORMS = {
    Kind.INTEGER: _Forms("bigint", "INT64", "BIGINT"),
    Kind.FLOAT: _Forms("double", "DOUBLE", "DOUBLE PRECISION"),
    Kind.BOOLEAN: _Forms("boolean", "BOOLEAN", "BOOLEAN"),
    Kind.TEXT: _Forms("string", "BYTE_ARRAY String", "TEXT"),
    Kind.DATE: _Forms("date", "INT32 Date", "DATE"),
    Kind.TIME: _Forms("string", "BYTE_ARRAY String", "TIME"),
    Kind.TIMESTAMP: _Forms("timestamp_ntz", "INT64 Timestamp, microseconds, no zone", "TIMESTAMP"),
    Kind.INSTANT: _Forms("timestamp", "INT64 Timestamp, microseconds, UTC", "TIMESTAMP"),
    Kind.JSON: _Forms("string", "BYTE_ARRAY String", "TEXT"),
}

# A type's name and its numbers; for a type that the connector does not know, what stands in the brackets is no number.
_DECLARED = re.compile(r"^([A-Z_0-9]+(?: PRECISION| VARYING)?)\s*(\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?")


@dataclass(frozen=True)
class Column:
    """A column of a Snowflake table, by its name there and its type as DESCRIBE gives it."""

    name: str
    kind: Kind
    precision: int = 0
    scale: int = 0
    nullable: bool = True
    # What people wrote about it in Snowflake; it makes no other column.
    comment: str = field(default="", compare=False)

    @staticmethod
    def from_snowflake(name: str, declared: str, *, nullable: bool = True, comment: str = "") -> Column:
        """Return the column for a declared type such as NUMBER(12,2); raise UnheldTypeError if no extract can hold it."""
        text = declared.strip().upper()
        match = _DECLARED.match(text)
        kind = _KINDS.get(match[1]) if match else None
        if match is None or kind is None:
            raise _refusal(name, declared, _CASTS.get(match[1], "") if match else "")
        if kind is not Kind.INTEGER:
            return Column(name, kind, nullable=nullable, comment=comment)
        if match.end() < len(text):
            raise _refusal(name, declared, "")
        precision, scale = int(match[3] or 38), int(match[4] or 0)
        return Column(name, Kind.DECIMAL if scale else kind, precision, scale, nullable, comment)

    @property
    def spark(self) -> str:
        """Spark's type, as a DDL string; also what staged Parquet files hold."""
        return f"decimal({self.precision},{self.scale})" if self.kind is Kind.DECIMAL else _FORMS[self.kind].spark

    @property
    def parquet(self) -> str:
        """The type in staged Parquet files: how values are stored, and what they mean."""
        if self.kind is not Kind.DECIMAL:
            return _FORMS[self.kind].parquet
        stored = "INT32" if self.precision <= 9 else "INT64" if self.precision <= 18 else "FIXED_LEN_BYTE_ARRAY"
        return f"{stored} Decimal({self.precision},{self.scale})"

    @property
    def hyper(self) -> str:
        """Hyper's type in a new extract; an existing extract keeps its own."""
        if self.kind is Kind.DECIMAL:
            fits = self.precision <= HYPER_DECIMAL_DIGITS
            return f"NUMERIC({self.precision},{self.scale})" if fits else "DOUBLE PRECISION"
        return _FORMS[self.kind].hyper


class UnheldTypeError(SourceError):
    """A column of a type that no extract can hold."""


def _refusal(name: str, declared: str, cast: str) -> UnheldTypeError:
    quoted = quote(name)
    replacement = (cast or "CAST({} AS VARCHAR)").format(quoted)
    return UnheldTypeError(
        f"Column {name} is {declared or 'of a type without a name'}, which a Tableau extract cannot hold. "
        "Leave it out: name the columns you want under `columns:` in the extract's spec. "
        f"Or show {replacement} AS {quoted} in a `query:`, or in a view."
    )
